"""Export the predictions of a module as a program that runs without jaxlit."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlit import checks as check
from jaxlit.core.module import TrainModule, call_step
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica, abstract_batch, with_rows
from jaxlit.distributed.team import fetch
from jaxlit.errors import ArgumentError, ArgumentTypeError, JaxlitError, ModuleError
from jaxlit.sharding import out_of_meshes
from jaxlit.texts import is_key, leaf_name, shown

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_MOST_BYTES = 2**31 - 2**24  # of weights: flatbuffers is limited to 2 GiB

_ANY_ROWS = (
    "The export is for any number of rows, the first dim of every array in the example. If the step needs the number "
    "of rows, or the first dims differ, pass export(dynamic_batch=False)."
)


@out_of_meshes
def export(
    module: TrainModule, example: Any, *, platforms: str | Sequence[str] | None = None, dynamic_batch: bool = True
) -> bytes:
    """Return `predict_step` and its weights as serialized bytes that need only jax to run.

    The step is exported in evaluation mode. `jax.export.deserialize(data).call(batch)` runs it in a process that has
    neither jaxlit nor flax. Sharded weights are gathered; all processes must call this. Each call draws the same random
    numbers, and `batch_idx` and `dataloader_idx` are 0. Both sides need `pip install flatbuffers`.

    Args:
        module: The module.
        example: A batch for `predict_step`: arrays in dicts, lists and tuples.
        platforms: The platforms to run on: "cpu", "cuda", "rocm" and "tpu"; None for the platform of this process.
        dynamic_batch: Accept batches of one row or more, not only of as many as the example has.

    Raises:
        ArgumentError: A platform is unknown, or flatbuffers is not installed.
        ArgumentTypeError: The example contains something other than numeric arrays in plain containers.
        ModuleError: The module has no `predict_step`, it returns anything else, or the weights exceed 2 GiB.

    Example:
        >>> import jax, jax.numpy as jnp, jaxlit as jl
        >>> class Double(jl.TrainModule):
        ...     def predict_step(self, batch):
        ...         return 2 * batch
        >>> data = jl.export(Double(), jnp.ones((4, 3)))
        >>> jax.export.deserialize(data).call(jnp.ones((7, 3))).shape
        (7, 3)
    """
    if not isinstance(module, TrainModule):
        raise ArgumentTypeError(f"export takes a jl.TrainModule with a predict_step, got {shown(module)}.")
    call_step(module, "predict")
    check.boolean("dynamic_batch", dynamic_batch, owner="export")
    platforms = [platforms] if isinstance(platforms, str) else platforms
    for name in platforms or ():
        check.one_of("platforms", name, _PLATFORMS, owner="export")
    check.import_package("flatbuffers", owner="export", install="flatbuffers", kind=ArgumentError)
    name = f"{type(module).__name__}.predict_step"
    _check_plain(example, "example", "export", ArgumentTypeError)
    pure = PureModule(nnx.graphdef(module), nnx.Param, module)
    variables = _constants(pure.split(module), type(module).__name__)

    def predict(batch: Any) -> Any:
        _, (_, _, _, outputs) = pure.run("predict", Replica(), None, *variables, batch, 0, 0, 0)
        _check_plain(outputs, "output", name, ModuleError)
        return outputs

    return bytes(_exported(predict, name, abstract_batch(example), platforms, dynamic_batch).serialize())


def _exported(predict: Any, name: str, batch: Any, platforms: Sequence[str] | None, dynamic_batch: bool) -> Any:
    """Export a function of a batch, of which only shapes are known, for its number of rows or for any."""
    rows: Any = jax.export.symbolic_shape("batch")[0]
    try:
        shapes = with_rows(batch, rows) if dynamic_batch else batch
        return jax.export.export(jax.jit(predict), platforms=platforms)(shapes)
    except jax.errors.InconclusiveDimensionOperation as error:
        first = str(error).splitlines()[0].rstrip(".")
        raise ModuleError(f"{name} computes with the number of rows: {first}. {_ANY_ROWS}") from error
    except Exception as error:
        if dynamic_batch and not isinstance(error, JaxlitError):
            with contextlib.suppress(Exception):  # with the example's number of rows it works
                jax.eval_shape(predict, batch)
                error.add_note(_ANY_ROWS)
        raise


def _constants(variables: Any, name: str) -> Any:
    """Return the arrays of a module; those that are sharded over several processes are gathered."""
    if (size := sum(x.nbytes for x in jax.tree.leaves(variables))) > _MOST_BYTES:
        raise ModuleError(
            f"export: the weights of {name} have {size:,} bytes, and the limit is 2 GiB. Save them with "
            "jl.save_weights, and build the module where it is served."
        )
    # jax arrays, as in every step: numpy arrays accumulate 16-bit sums in 16 bits, and have no `.at`.
    return jax.tree.map(lambda x: x if is_key(x) else jnp.asarray(fetch(x)), variables)


def _check_plain(tree: Any, kind_of_leaf: str, owner: str, kind: type[JaxlitError]) -> None:
    """Refuse inputs and outputs that a process without jaxlit could not build or read."""

    def is_leaf(x: Any) -> bool:
        return x is not None and type(x) not in (dict, list, tuple)

    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        if not hasattr(x, "dtype"):
            problem = f"a {type(x).__name__}, and must be arrays in plain dicts, lists and tuples"
        elif is_key(x) or not (jnp.issubdtype(x.dtype, np.number) or x.dtype == bool):
            problem = f"of {x.dtype}, and must be numeric"
        else:
            continue
        raise kind(f"{owner}: the {kind_of_leaf}{'.' * bool(path)}{leaf_name(path)} is {problem}.")
