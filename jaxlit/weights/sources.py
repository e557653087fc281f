"""Read weights from files and mappings, as numpy arrays by name; and write files of them."""

import json
import math
import os
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # a dependency of jax; bfloat16 and float8 for numpy
import numpy as np
from flax import nnx

from jaxlit import checks as check
from jaxlit.checkpoints.files import MANIFEST, candidates, checkpoints_in
from jaxlit.checkpoints.places import Place, place_of, replacing, staging
from jaxlit.checkpoints.safetensors import Spec, Stored, read_header, read_region, read_safetensors, write_arrays
from jaxlit.distributed.team import fetch
from jaxlit.errors import ArgumentTypeError, CheckpointError
from jaxlit.texts import keys_of, shown
from jaxlit.weights.weight_rules import Ranged

_INDEX = ".safetensors.index.json"
_SUFFIXES = (".safetensors", _INDEX, ".npz")
_MODELS = ("model.safetensors", f"model{_INDEX}")  # of a folder, the first that is there, as in transformers


def is_weights(path: Any) -> bool:
    """Return whether `init_from` is a file of weights, or a folder as the hub has it that is no run or checkpoint."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    inside = _inside(check.url("init_from", path, owner="Trainer.fit"))
    if not any(place.name in _MODELS for place in inside):
        return os.fspath(path).endswith(_SUFFIXES)
    return not candidates(checkpoints_in(place_of(path))) and all(place.name != MANIFEST for place in inside)


def dotted(path: Any) -> str:
    """Return the name of a leaf in files: its path, joined by dots."""
    return ".".join(map(str, keys_of(path)))


def read_arrays(source: Any) -> dict[str, Any]:
    """Return the arrays of a source of `load_weights` by name; those of a file are read when they are used."""
    if isinstance(source, Mapping):
        tree = nnx.as_pure(source) if isinstance(source, nnx.State) else dict(source)
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {dotted(path): _numpy(dotted(path), x) for path, x in leaves}
    if not isinstance(source, (str, os.PathLike)):
        raise ArgumentTypeError(
            f"load_weights takes the path of a file, or a mapping of names to arrays, got {shown(source)}."
        )
    inside = {place.name for place in _inside(check.url("source", source, owner="load_weights"))}
    source = next((os.path.join(source, name) for name in _MODELS if name in inside), os.fspath(source))
    path = place_of(source) if check.is_url(source) else Path(source)
    if not path.exists():
        folder = "" if path == place_of(path) else f" in {Path.cwd()}"
        token = " A private or gated repository needs HF_TOKEN." if source.startswith("hf:") else ""
        raise CheckpointError(f"load_weights: there is no file {path}{folder}.{token}")
    if path.name.endswith(_INDEX):
        return _read_sharded(path)
    if path.name.endswith(".safetensors"):
        return _read_safetensors(path)
    if path.name.endswith(".npz"):
        return _read_npz(fetched(source))
    raise CheckpointError(
        f"load_weights reads *.safetensors, *{_INDEX}, *.npz, and a folder with model.safetensors or its index, got "
        f"{str(source)!r}. For a checkpoint of jaxlit, call Model.load_from_checkpoint(path) or fit(init_from=path). "
        "For a file of torch, pass torch.load(path, weights_only=True)."
    )


def fetched(url: Any) -> Path:
    """Return a file; that of a URL is fetched to this machine, unless it is there and has not changed."""
    source = place_of(url)
    if isinstance(source, Path):
        return source if check.is_url(url) else Path(url)
    path = staging(str(url), "fetched")
    known = path.with_name(f".{path.name}.info")
    try:
        info = repr(source.ask("info"))  # with its size, and its time or hash
        if not (path.exists() and known.exists() and known.read_text() == info):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as part:
                source.ask("get_file", str(part))  # whose name differs among file systems
            known.write_text(info)
    except FileNotFoundError as error:
        raise CheckpointError(f"{url} cannot be read: there is no such file.") from error
    return path


def _inside(source: str | os.PathLike[str]) -> list[Place]:
    """Return what is in a folder of a disk or at a URL."""
    is_folder = not os.fspath(source).endswith(_SUFFIXES) and (check.is_url(source) or os.path.isdir(source))
    return [*place_of(source).iterdir()] if is_folder else []


def _read_safetensors(path: Place) -> dict[str, Any]:
    if isinstance(path, Path):
        return read_safetensors(path)

    def ranged(name: str, x: Stored) -> Ranged:
        def read(at: Sequence[range]) -> np.ndarray:
            return read_region(name, [x], [part.start for part in at], [*map(len, at)], x.dtype)

        return Ranged(x.shape, x.dtype, read)

    return {name: ranged(name, x) for name, x in read_header(path)[0].items()}


def _read_sharded(path: Place) -> dict[str, Any]:
    try:
        files = json.loads(path.read_bytes())["weight_map"]
        if outside := [file for file in files.values() if os.path.isabs(file) or ".." in Path(file).parts]:
            raise ValueError(f"{outside[0]!r} is not in its folder")
        parts = {file: _read_safetensors(path.parent / file) for file in {*files.values()}}
        return {name: parts[file][name] for name, file in files.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as an index of safetensors files: {error!r}.") from error


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an archive; those that are not compressed are memory-mapped."""
    arrays, known = {}, np.lib.format
    try:
        data = np.memmap(path, np.uint8, mode="r")
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                with archive.open(info) as file:
                    if info.compress_type == zipfile.ZIP_STORED:
                        is_first = known.read_magic(file) == (1, 0)
                        header = known.read_array_header_1_0 if is_first else known.read_array_header_2_0
                        shape, is_fortran, dtype = header(file)
                        # A zip entry has a header of 30 bytes, whose last four are the sizes of two more fields.
                        at = info.header_offset + 30
                        start = at + int(data[at - 4 : at].view("<u2").sum()) + file.tell()
                        if math.prod(shape) * dtype.itemsize != info.file_size - file.tell():
                            raise ValueError(f"{info.filename} does not have the size of its shape")
                        array = data[start : start + math.prod(shape) * dtype.itemsize].view(dtype)
                        array = array.reshape(shape, order="F" if is_fortran else "C")
                    else:
                        array = known.read_array(file, allow_pickle=False)
                # numpy stores bfloat16 as two raw bytes, V2; jax.numpy.load reads these as bfloat16 too.
                array = array.view(ml_dtypes.bfloat16) if array.dtype == "V2" else array
                arrays[info.filename.removesuffix(".npy")] = array
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} cannot be read as a numpy archive: {error}.") from error
    return arrays


def _numpy(name: str, x: Any) -> np.ndarray:
    if hasattr(x, "detach"):  # a torch tensor; numpy has no bfloat16, so its bits are read as int16
        x = x.detach()
        if str(x.dtype) == "torch.bfloat16":
            return x.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()
    array = fetch(x) if isinstance(x, jax.Array) else np.asarray(x)
    if array.dtype.hasobject:
        raise ArgumentTypeError(f"load_weights takes a mapping of names to arrays, and {name} is {shown(x)}.")
    return array


def write_safetensors(
    path: Path, specs: Sequence[Spec], arrays: Iterable[np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file array by array, given their specs; an old file stays until the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("wb") as file:
        write_arrays(file, specs, arrays, metadata)
