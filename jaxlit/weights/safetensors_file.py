"""Read and write safetensors files.

A file has eight bytes for the length of a JSON header, the header, and the bytes of all arrays.
"""

import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # a dependency of jax; bfloat16 and float8 for numpy
import numpy as np

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


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name, memory-mapped: only the parts that are used are read from disk.

    Raises:
        CheckpointError: The file is not a safetensors file, or a part of it is missing.
    """
    problem = "its header is damaged"
    try:
        data = np.memmap(path, np.uint8, mode="r")
        length = int.from_bytes(data[:8].tobytes(), "little")
        if not 2 <= length <= min(_MOST_HEADER, len(data) - 8):
            raise ValueError
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        data, arrays = data[8 + length :], {}
        spans = list[tuple[int, int]]()
        for name, entry in header.items():
            problem = f"the entry of {name} in its header is damaged"
            kind, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
            problem = f"{name} has the dtype {kind!r:.20}, which jax does not support"
            dtype = DTYPES[kind]
            problem = f"the bytes of {name} do not match its shape, or are missing. Download the file again"
            if min([start, *shape]) < 0 or stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError
            arrays[name] = data[start:stop].view(dtype).reshape(shape)
            spans.append((start, stop))
        problem, end = "its arrays are not contiguous up to the end of the file", 0
        for start, stop in sorted(spans):
            if start != end:
                raise ValueError
            end = stop
        if end != len(data):
            raise ValueError
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        problem = str(error) if isinstance(error, OSError) else problem
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {problem}.") from error
    return arrays


def write(
    path: Path,
    specs: Sequence[tuple[str, tuple[int, ...], np.dtype[Any]]],
    arrays: Iterable[np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file array by array; an existing file stays until the new one is complete.

    Args:
        path: The file.
        specs: The (name, shape, dtype) of each array.
        arrays: The arrays, in the same order.
        metadata: Entries of the header.

    Raises:
        OSError: The file cannot be written.
    """
    header, end = dict[str, Any](__metadata__=dict(metadata)), 0
    for name, shape, dtype in specs:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # arrays begin at multiples of eight bytes
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in arrays:
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
