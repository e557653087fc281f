"""Tensor parallel: weights are split within a layer, by rules."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from jaxlit.core.pure_module import PureModule
from jaxlit.core.train_state import TrainState
from jaxlit.errors import ArgumentError
from jaxlit.sharding import axes_of
from jaxlit.strategies.fsdp import FSDP


class TensorParallel(FSDP):
    r"""Split weights over `tp` by rules, the rest of the state over `fsdp`, and the batch over `data` and `fsdp`.

    The rules say which dim of a weight is split over `tp`; XLA splits the computations with it and adds the collectives
    (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053: first the columns, then the rows, and one sum after each
    pair). The numbers are those of `single`.

    Args:
        rules: By path or name of a dim, see `Rules`; None if the module names its dims like the mesh axes.
        tp: Devices that share a weight; -1 for all other devices.
        fsdp: Devices that share the rest of the state.
        data: Copies of the state.
        min_size: The most elements of an array that `fsdp` does not split.
        remat: See `FSDP`.
        axis_types: See `FSDP`.

    Raises:
        ArgumentError: The sizes do not multiply to the number of devices, or nothing is split over `tp`.

    Example:
        >>> import jaxlit as jl
        >>> from jax.sharding import PartitionSpec as P
        >>> rules = {r"up\.kernel$": P(None, "tp"), r"down\.kernel$": P("tp", None)}
        >>> strategy = jl.strategies.TensorParallel(rules, tp=2, data=-1)
    """

    def __init__(
        self,
        rules: Mapping[str, Any] | None = None,
        *,
        tp: int = -1,
        fsdp: int = 1,
        data: int = 1,
        min_size: int = 1024,
        remat: bool | str | Callable[..., Any] = False,
        axis_types: Literal["auto", "explicit"] = "auto",
    ) -> None:
        self.tp, self.fsdp, self.data = tp, fsdp, data
        mesh = {"data": data, "fsdp": fsdp, "tp": tp}
        if axis_types == "explicit" and data == 1:
            del mesh["data"]  # models of that kind call the rows P("fsdp"), not P(("data", "fsdp"))
        super().__init__(rules=rules, min_size=min_size, remat=remat, mesh=mesh, axis_types=axis_types)

    def state_sharding(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Return the shardings by rules, also of the optimizer state; refuse rules that split nothing over `tp`."""
        shardings = super().state_sharding(state, model, example)
        weights = jax.tree.leaves((shardings.params, shardings.frozen))
        if self.mesh.shape["tp"] > 1 and not any("tp" in axes_of(x.spec) for x in weights):
            raise ArgumentError(
                f"TensorParallel splits nothing of {model.name} over 'tp'. Give rules such as "
                '{"up.kernel$": P(None, "tp")}, or name dims in the module.'
            )
        return shardings
