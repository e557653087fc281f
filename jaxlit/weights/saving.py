"""Save the weights of a module to a safetensors file."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxlit import checks as check
from jaxlit.distributed.exchange import fetch
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentTypeError, CheckpointError, JaxlitError
from jaxlit.leaf_names import is_key
from jaxlit.shown import shown
from jaxlit.version import __version__
from jaxlit.weights.loading import weights_of
from jaxlit.weights.safetensors_file import NAMES, write


def save_weights(module: nnx.Module, path: str | Path) -> None:
    """Write the weights of a module to a safetensors file; a name is the path of a leaf, joined by dots.

    `jl.load_weights(module, path)` and the safetensors library read the same bits. Every Variable and array attribute
    is written except random generators, metrics, decoding caches and intermediates that layers sow. Sharded arrays are
    gathered one at a time and written by process 0; all processes must call this. An existing file stays until the new
    one is complete.

    Args:
        module: Any NNX module; `trainer.module` is the one of the last run.
        path: The file, `*.safetensors`.

    Raises:
        ArgumentTypeError: `module` is not an NNX module, or `path` has another suffix.
        CheckpointError: The file format does not support the dtype of a leaf, or the file cannot be written.
    """
    leaves, problem = list[tuple[str, Any]](), None
    try:
        if not isinstance(module, nnx.Module):
            raise ArgumentTypeError(f"save_weights takes a flax.nnx module, got {shown(module)}.")
        if not (isinstance(path, (str, os.PathLike)) and str(path).endswith(".safetensors")):
            raise ArgumentTypeError(f"save_weights takes the path of a file, *.safetensors, got {shown(path)}.")
        path = Path(os.path.abspath(check.on_disk("path", path, owner="save_weights")))
        leaves = [(name, x) for name, *_, x in weights_of(module)]
        _check(leaves)
    except JaxlitError as error:
        problem = error
    team().same_error("saving weights", problem)
    # The largest items first, so that each array begins at a multiple of its item size.
    leaves.sort(key=lambda leaf: (-leaf[1].dtype.itemsize, leaf[0]))
    specs, arrays = [(name, x.shape, np.dtype(x.dtype)) for name, x in leaves], (_gathered(x) for _, x in leaves)
    try:
        if jax.process_index() == 0:
            write(Path(path), specs, arrays, {"format": "np", "module": type(module).__name__, "jaxlit": __version__})
    except OSError as error:
        problem = CheckpointError(f"{path} could not be written: {error}. An existing file is unchanged.")
    for _ in arrays:  # every process takes part in gathering each array, also after an error in process 0
        pass
    team().same_error("saving weights", problem)


def _gathered(x: Any) -> np.ndarray:
    """Return an entire array on the host; jax would keep the copy of the module's own array as long as it lives."""
    if isinstance(x, jax.Array):
        parts = [shard.data for shard in x.addressable_shards]
        x = jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
    return fetch(x)


def _check(leaves: list[tuple[str, Any]]) -> None:
    for name, x in leaves:
        if isinstance(x, jax.ShapeDtypeStruct):
            raise CheckpointError(f"save_weights: {name} is a shape without an array. Load weights into it first.")
        dtype = x.dtype if hasattr(x, "dtype") else type(x)
        if is_key(x) or np.dtype(dtype) not in NAMES:
            raise CheckpointError(
                f"save_weights: {name} is {dtype}, and a safetensors file supports {', '.join(NAMES.values())}."
            )
