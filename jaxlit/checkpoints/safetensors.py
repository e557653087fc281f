"""Files of arrays in the format of safetensors, written while they are hashed, and read by ranges of bytes.

A file has eight bytes for the length of a JSON header, the header, and the bytes of all arrays. In a checkpoint each
process writes one, with its parts of the arrays; the name of a part ends with where it begins, `kernel@512,0`.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes  # a dependency of jax; bfloat16 and float8 for numpy
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxlit.checkpoints.places import read_into
from jaxlit.errors import CheckpointError

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"{kind}{8 * n}": np.dtype(f"{kind.lower()}{n}") for kind in "IU" for n in (1, 2, 4, 8)},
    **{f"F{8 * n}": np.dtype(f"f{n}") for n in (2, 4, 8)},
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER = 100_000_000  # bytes, the limit of the safetensors library
CHUNK = 2**24  # bytes that are written, or read, at once

Spec = tuple[str, tuple[int, ...], np.dtype[Any]]  # name, shape, dtype


class Stored(NamedTuple):
    """A part of an array in a file."""

    path: Any
    offset: int  # in the file, in bytes
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def own_parts(arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Return the parts that this process stores, on the host; the arrays may be overwritten as soon as it returns.

    Devices that hold the same part share the arrays, by their bytes, so that no process stores all of them.
    """
    parts, before = dict[str, Any](), 0
    total = sum(x.nbytes for x in arrays.values())
    for name, x in arrays.items():
        if not x.size:
            continue
        copies = x.sharding.num_devices * math.prod(x.sharding.shard_shape(x.shape)) // x.size
        copy, before = copies * (2 * before + x.nbytes) // (2 * total), before + x.nbytes  # by where its middle is
        for shard in x.addressable_shards:
            if shard.replica_id == copy:
                start = ",".join(str(s.start or 0) for s in shard.index)
                is_whole = shard.data.shape == x.shape and "@" not in name
                parts[name if is_whole else f"{name}@{start}"] = shard.data
    data = list(parts.values())
    # A GPU copies to page-locked memory 30 times as fast, of which jax gives a process 64 GB by default.
    if jax.default_backend() == "gpu" and sum(x.nbytes for x in data) < 2**35:
        places = [SingleDeviceSharding(x.device, memory_kind="pinned_host") for x in data]
        data = jax.device_put(data, places)  # in the order of the device's work: before the next step
    else:
        for x in data:
            x.copy_to_host_async()
        data = [np.asarray(x) for x in data]  # on a CPU a view, which keeps the memory from being overwritten
    return dict(zip(parts, data, strict=True))


def write_arrays(
    file: Any, specs: Sequence[Spec], arrays: Iterable[Any], metadata: Mapping[str, str]
) -> tuple[int, str]:
    """Write arrays of any dtype, with their specs, to an open file one by one; return its size and hash.

    What the format lacks is stored as bytes, with those of a value as a last axis; numpy has a byte for 4 bits.
    """
    header: dict = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape, dtype in specs:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        stored_shape = shape if dtype in NAMES or dtype.itemsize == 1 else (*shape, dtype.itemsize)
        header[name] = {"dtype": NAMES.get(dtype, "U8"), "shape": [*stored_shape], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # arrays begin at multiples of eight bytes
    digest = hashlib.sha256()
    for data in chain([len(text).to_bytes(8, "little") + text], map(bytes_of, arrays)):
        for at in range(0, len(data), CHUNK):  # the file of a bucket copies what it is given
            file.write(data[at : at + CHUNK])
            digest.update(data[at : at + CHUNK])
    return 8 + len(text) + end, digest.hexdigest()


def bytes_of(x: Any) -> memoryview:
    """Return the bytes of an array on the host, without a copy if they are contiguous."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name, memory-mapped: only the parts that are used are read from disk."""
    entries, _ = read_header(path)
    data = np.memmap(path, np.uint8, mode="r")
    return {name: data[x.offset : x.offset + x.size].view(x.dtype).reshape(x.shape) for name, x in entries.items()}


def read_header(path: Any) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return where the arrays of a file are, by name, and its metadata; refuse a file that is damaged."""
    problem = "its header is damaged"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MOST_HEADER, size - 8):
                raise ValueError
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        entries, begin = dict[str, Stored](), 8 + length
        for name, entry in header.items():
            problem = f"the entry of {name} in its header is damaged"
            kind, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
            problem = f"{name} has the dtype {kind!r:.20}, which jax does not support"
            dtype = DTYPES[kind]
            problem = f"the bytes of {name} do not match its shape, or are missing. Download the file again"
            if min([start, *shape]) < 0 or stop - start != math.prod(shape) * dtype.itemsize or begin + stop > size:
                raise ValueError
            entries[name] = Stored(path, begin + start, (0,) * len(shape), tuple(shape), dtype)
        problem = "its arrays are not contiguous up to the end of the file"
        for stored in sorted(entries.values(), key=lambda x: (x.offset, x.size)):
            if stored.offset != begin:
                raise ValueError
            begin += stored.size
        if begin != size:
            raise ValueError
    except Exception as error:  # of any class: each file system has its own
        is_damaged = isinstance(error, (ValueError, TypeError, LookupError, AttributeError, RecursionError))
        problem = problem if is_damaged else f"{error}"
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {problem}.") from error
    return entries, metadata


def parts_in(path: Any, dtypes: Mapping[str, np.dtype[Any]]) -> list[tuple[str, Stored]]:
    """Return the parts of arrays in the file of a process, with the names of arrays, whose dtypes are given."""
    parts = []
    for key, stored in read_header(path)[0].items():
        name, _, start = key.rpartition("@") if "@" in key else (key, "", "")
        dtype = dtypes[name]
        if dtype not in NAMES and dtype.itemsize > 1:
            stored = stored._replace(shape=stored.shape[:-1])
        starts = tuple(map(int, start.split(","))) if start else stored.start[: len(stored.shape)]
        if stored.dtype != (dtype if dtype in NAMES else np.uint8) or len(starts) != len(stored.shape):
            raise CheckpointError(f"{path}: {key} is stored as {stored.dtype}{list(stored.shape)}, not as {dtype}.")
        parts.append((name, stored._replace(start=starts, dtype=dtype)))
    return parts


def read_region(name: str, parts: Sequence[Stored], start: Sequence[int], shape: Sequence[int], dtype: Any) -> Any:
    """Return a region of an array from the parts that are stored, of which it reads no other rows."""
    overlaps = []
    for part in parts:
        low = np.maximum(part.start, start)
        high = np.minimum(np.add(part.start, part.shape), np.add(start, shape))
        if (high > low).all():
            overlaps.append((part, low.astype(int), high.astype(int)))
    # Before anything is allocated: a file may not ask for more than it has.
    if sum(math.prod((high - low).tolist()) for _, low, high in overlaps) != math.prod(shape):
        raise CheckpointError(f"{name} is not stored as {dtype}{list(shape)}.")
    region = np.empty(shape, dtype)
    for part, low, high in overlaps:
        target = region[(*map(slice, low - start, high - start), ...)]
        inner = [slice(None), *map(slice, (low - part.start)[1:], (high - part.start)[1:])][: len(part.shape)]
        first, count = (int(low[0]) - part.start[0], int(high[0] - low[0])) if part.shape else (0, 1)
        rows = (count, *part.shape[1:]) if part.shape else ()
        block = target if target.flags.c_contiguous and target.shape == rows else np.empty(rows, dtype)
        at = part.offset + first * math.prod(part.shape[1:]) * part.dtype.itemsize
        if read_into(part.path, at, bytes_of(block)) != block.nbytes:
            raise CheckpointError(f"{part.path} is cut.")
        if block is not target:
            target[...] = block[tuple(inner)]
    return region
