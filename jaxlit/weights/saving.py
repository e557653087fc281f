"""A module's weights into a file of safetensors."""

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
    """Write the weights of a module to a file of safetensors, by the paths of its leaves joined by dots.

    `jl.load_weights(module, path)` reads them again bit by bit, and so does the library of safetensors. These are all
    Variables but random generators, metrics, caches of decoding and what layers have sown. Sharded arrays are gathered
    one by one, and process 0 writes; in several processes all must call this. An older file stays until the new one
    is complete.

    Args:
        module: Any NNX module; `trainer.module` for the one of the last run.
        path: The file, `*.safetensors`.

    Raises:
        ArgumentTypeError: It is no module, or another kind of file.
        CheckpointError: The file cannot hold an array, which is named, or cannot be written.
    """
    leaves, problem = list[tuple[str, Any]](), None
    path = Path(os.path.abspath(check.on_disk("path", path, owner="save_weights")))
    try:
        if not isinstance(module, nnx.Module):
            raise ArgumentTypeError(f"save_weights takes a flax.nnx module, got {shown(module)}.")
        if path.suffix != ".safetensors":
            raise ArgumentTypeError(f"save_weights writes *.safetensors, got {str(path)!r}.")
        leaves = [(name, x) for name, _, x in weights_of(module)]
        _check(leaves)
    except JaxlitError as error:
        problem = error
    team().same_error("saving weights", problem)
    # The largest items first, so that each begins at a multiple of its size.
    leaves.sort(key=lambda leaf: (-leaf[1].dtype.itemsize, leaf[0]))
    specs, arrays = [(name, x.shape, np.dtype(x.dtype)) for name, x in leaves], (_gathered(x) for _, x in leaves)
    try:
        if jax.process_index() == 0:
            write(path, specs, arrays, {"format": "np", "module": type(module).__name__, "jaxlit": __version__})
    except OSError as error:
        problem = CheckpointError(f"{path} could not be written: {error}. An older file is unchanged.")
    for _ in arrays:  # every process takes part in gathering each of them, also after an error of process 0
        pass
    team().same_error("saving weights", problem)


def _gathered(x: Any) -> np.ndarray:
    """Return an entire array; the module's own would keep this copy as long as it lives."""
    if isinstance(x, jax.Array):
        parts = [shard.data for shard in x.addressable_shards]
        x = jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
    return fetch(x)


def _check(leaves: list[tuple[str, Any]]) -> None:
    for name, x in leaves:
        dtype = x.dtype if hasattr(x, "dtype") else type(x)
        if is_key(x) or np.dtype(dtype) not in NAMES:
            raise CheckpointError(
                f"save_weights: {name} is {dtype}, and a file of safetensors holds one of {', '.join(NAMES.values())}."
            )
