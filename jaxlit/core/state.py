"""Everything a training step changes, as one pytree, and its flat form."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit.leaf_names import is_key, leaf_name


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """An accumulation window: what the microbatches since the last optimizer step add up to.

    Strategies whose step sees one replica's rows keep a window per replica, stacked along a leading
    dim of size `num_replicas`, and reduce it once, in the update step.
    """

    grads: nnx.State[Any, Any]  # sum of row-weighted gradients, the shape of the parameters, float32
    rows: jax.Array  # () float32, rows so far
    metrics: jax.Array  # (2, num_metrics) float32, see jaxlit.core.device_sums.Table


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowStart:
    """What the steps of an accumulation window write to the module, as it was before the window.

    Under `nan_policy="skip"` a window that is not finite puts it back.
    """

    batches: jax.Array  # () int32, batches since then
    arrays: dict[str, jax.Array]  # by path: floating arrays of the module; of no meaning after 0 batches


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a training step changes."""

    counters: jax.Array  # (4,) int32: step, epoch, batch_idx, bad_step
    params: nnx.State[Any, Any]  # variables that the optimizer trains
    frozen: nnx.State[Any, Any]  # nnx.Param variables that it does not
    model_state: nnx.State[Any, Any]  # batch statistics, rng keys and counts, caches, custom variables
    opt_state: Any  # optax.OptState
    window: Window | None  # None when every batch is an optimizer step
    loss_scale: jax.Array | None  # (2,) float32, see jaxlit.core.precision; None without loss scaling
    sums: jax.Array  # (4, num_metrics) float32, metrics of the epoch so far
    extras: dict[str, Any] = field(default_factory=dict)  # arrays of callbacks, by their `state_key`
    window_start: WindowStart | None = None  # None where no window is put back

    # The counters share an array: each array more in the state costs a step one or two microseconds.
    @property
    def step(self) -> jax.Array:
        """() int32, optimizer steps taken."""
        return self.counters[0]

    @property
    def epoch(self) -> jax.Array:
        """() int32, the current epoch."""
        return self.counters[1]

    @property
    def batch_idx(self) -> jax.Array:
        """() int32, batches of this epoch seen."""
        return self.counters[2]

    @property
    def bad_step(self) -> jax.Array:
        """() int32, the first non-finite step under "raise", the newest under "skip"; -1 if there was none."""
        return self.counters[3]

    def advance(self, *, steps: int, bad_step: jax.Array | None = None) -> "TrainState":
        """Count one batch and `steps` optimizer steps."""
        bad_step = self.bad_step if bad_step is None else bad_step
        return replace(self, counters=jnp.stack([self.step + steps, self.epoch, self.batch_idx + 1, bad_step]))

    @property
    def variables(self) -> tuple[nnx.State[Any, Any], nnx.State[Any, Any], nnx.State[Any, Any]]:
        """The module's arrays: (params, frozen, model_state)."""
        return self.params, self.frozen, self.model_state

    def with_variables(self, variables: Sequence[nnx.State[Any, Any]]) -> "TrainState":
        """Return the state with other (params, frozen, model_state)."""
        params, frozen, model_state = variables
        return replace(self, params=params, frozen=frozen, model_state=model_state)

    @property
    def module(self) -> dict[str, jax.Array]:
        """The module's arrays by their paths, in the order of `variables`."""
        return {leaf_name(path[1:]): x for path, x in jax.tree_util.tree_leaves_with_path(self.variables)}

    def next_start(self) -> WindowStart | None:
        """Return `window_start` after one more batch: the first of a window stores the module's arrays."""
        if (start := self.window_start) is None:
            return None
        begins, module = start.batches == 0, self.module
        arrays = {name: jnp.where(begins, module[name], x) for name, x in start.arrays.items()}
        return WindowStart(start.batches + 1, arrays)

    def at_start(self, start: WindowStart | None) -> "TrainState":
        """Return the state with the arrays of a window's start in the module."""
        if start is None:
            return self
        treedef = jax.tree.structure(self.variables)
        return self.with_variables(treedef.unflatten((self.module | start.arrays).values()))


class Layout:
    """How a pytree of arrays is held as a flat list of raw arrays.

    Typed PRNG keys leave jit's C++ fast path, so a key is held as its raw `key_data` and wrapped again
    inside the trace.

    Args:
        tree: A pytree of arrays or `jax.ShapeDtypeStruct`s.

    Attributes:
        key_impls: The implementation of each leaf that is a key, by index.
    """

    def __init__(self, tree: Any) -> None:
        leaves, self.treedef = jax.tree.flatten(tree)
        keys, impls = [i for i, x in enumerate(leaves) if is_key(x)], list[Any]()
        # In a trace, as jax knows no implementation of a mere shape.
        jax.eval_shape(lambda *xs: impls.extend(map(jax.random.key_impl, xs)), *(leaves[i] for i in keys))
        self.key_impls = dict(zip(keys, impls, strict=True))

    def flatten(self, tree: Any) -> list[jax.Array]:
        """Return the leaves of `tree`, keys as raw data."""
        leaves = jax.tree.leaves(tree)
        for i in self.key_impls:
            leaves[i] = jax.random.key_data(leaves[i])
        return leaves

    def unflatten(self, leaves: list[Any]) -> Any:
        """Return the tree of `leaves`, raw data as keys."""
        if self.key_impls:
            leaves = list(leaves)
            for i, impl in self.key_impls.items():
                leaves[i] = jax.random.wrap_key_data(leaves[i], impl=impl)
        return jax.tree.unflatten(self.treedef, leaves)
