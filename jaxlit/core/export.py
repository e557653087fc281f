"""Export the predictions of a module as a program that runs without jaxlit."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxlit import checks as check
from jaxlit import sharding
from jaxlit.core.module import TrainModule, call_step, trainer_of
from jaxlit.core.pure_module import PureModule, retraced
from jaxlit.core.replica import Replica, abstract_batch, with_rows
from jaxlit.distributed.team import fetch
from jaxlit.errors import ArgumentError, ArgumentTypeError, JaxlitError, ModuleError
from jaxlit.sharding import out
from jaxlit.texts import is_key, leaf_name, shown

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_MOST_BYTES = 2**31 - 2**24  # of weights: flatbuffers is limited to 2 GiB

_ANY_ROWS = (
    "The export is for any number of rows, the first dim of every array in the example. If the step needs the number "
    "of rows, or the first dims differ, pass export(dynamic_batch=False)."
)


def export(
    module: TrainModule, example: Any, *, platforms: str | Sequence[str] | None = None, dynamic_batch: bool = True
) -> bytes:
    """Return `predict_step` and its weights as serialized bytes that need only jax to run.

    The step is exported in evaluation mode. `jax.export.deserialize(data).call(batch)` runs it in a process that has
    neither jaxlit nor flax. Sharded weights are gathered; all processes must call this. Each call draws the same random
    numbers, and `batch_idx` and `dataloader_idx` are 0. A step that names mesh axes is exported for one device; the
    axes are those of the mesh that `jax.set_mesh` has set, or else of the mesh of the module's arrays. Both sides need
    `pip install flatbuffers`.

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
    pure = PureModule(nnx.graphdef(module, graph=True), nnx.Param, module)
    arrays = pure.split(module)
    mesh = _mesh_of_one(module, arrays)
    explicit, split = sharding.explicit_axes(mesh), [axis for axis in sharding.BATCH_AXES if axis in mesh.axis_names]
    rows = sharding.over_axes(P(tuple(split or mesh.axis_names[:1])), explicit)
    with out():
        variables = _constants(arrays, type(module).__name__)

    def run(batch: Any) -> Any:
        _, (_, _, _, outputs) = pure.run("predict", Replica(), None, *variables, batch, 0, 0, 0)
        _check_plain(outputs, "output", name, ModuleError)
        return outputs

    def predict(batch: Any) -> Any:
        specs = jax.tree.map(lambda x: rows if x.ndim else P(), batch)
        with jax.sharding.use_abstract_mesh(sharding.with_types(mesh, ()).abstract_mesh):
            return jax.sharding.explicit_axes(run, axes=explicit, in_sharding=(specs,))(batch)

    return bytes(_exported(predict, mesh, name, abstract_batch(example), platforms, dynamic_batch).serialize())


def _mesh_of_one(module: TrainModule, arrays: Any) -> Mesh:
    """Return a mesh of one device, with the axes of the mesh in context, of the module's Trainer, or of arrays."""
    trained_on = getattr(trainer_of(module), "mesh", None)
    meshes = [jax.sharding.get_abstract_mesh(), *([] if trained_on is None else [trained_on])]
    meshes += [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    device = np.array(jax.local_devices()[:1])
    mesh = next((mesh for mesh in meshes if not mesh.empty), Mesh(device, ("data",)))
    return Mesh(device.reshape((1,) * len(mesh.axis_names)), mesh.axis_names, axis_types=mesh.axis_types)


def _exported(
    predict: Any, mesh: Mesh, name: str, batch: Any, platforms: Sequence[str] | None, dynamic_batch: bool
) -> Any:
    """Export a function of a batch, of which only shapes are known, for its number of rows or for any."""
    rows: Any = jax.export.symbolic_shape("batch")[0]
    try:
        shapes = with_rows(batch, rows) if dynamic_batch else batch
        with jax.set_mesh(mesh):  # for `jax.device_put(x, P("data"))`; what is exported knows no mesh around it
            program, results = retraced(jax.make_jaxpr(predict, return_shape=True))(shapes)
        run, treedef = jaxpr_as_fun(program), jax.tree.structure(results)
        with out():
            step = jax.jit(lambda x: treedef.unflatten(run(*jax.tree.leaves(x))))
            return jax.export.export(step, platforms=platforms)(shapes)
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
    def constant(x: Any) -> jax.Array:
        if is_key(x):
            return jax.random.wrap_key_data(constant(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        return jnp.asarray(fetch(x))

    return jax.tree.map(constant, variables)


def _check_plain(tree: Any, kind_of_leaf: str, owner: str, kind: type[JaxlitError]) -> None:
    """Refuse inputs and outputs that a process without jaxlit could not build or read."""
    plain = (dict, list, tuple, type(None))
    for path, x in jax.tree.leaves_with_path(tree, is_leaf=lambda x: type(x) not in plain):
        if not hasattr(x, "dtype"):
            problem = f"a {type(x).__name__}, and must be arrays in plain dicts, lists and tuples"
        elif is_key(x) or not (jnp.issubdtype(x.dtype, np.number) or x.dtype == bool):
            problem = f"of {x.dtype}, and must be numeric"
        else:
            continue
        raise kind(f"{owner}: the {kind_of_leaf}{'.' * bool(path)}{leaf_name(path)} is {problem}.")
