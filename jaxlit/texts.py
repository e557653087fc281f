"""Texts: values in messages, names of a pytree's leaves, tables, numbers with units, and values as JSON's types.

Last are texts and checksums of values that are the same in every process.
"""

import base64
import contextlib
import io
import math
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

_MOST_ENTRIES = 10


def shown(value: Any, most: int = 300) -> str:
    """Return a value's repr on a line: arrays by dtype and shape, functions by name, cut after `most` characters."""
    text = _text(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _text(x: Any) -> str:
    if isinstance(x, (dict, list, tuple)):
        first = islice(x.items() if isinstance(x, dict) else x, _MOST_ENTRIES)
        texts = (f"{key!r}: {_text(value)}" for key, value in first) if isinstance(x, dict) else map(_text, first)
        inside = ", ".join(texts) + ", ..." * (len(x) > _MOST_ENTRIES)
        if isinstance(x, tuple):
            return f"({inside}{',' * (len(x) == 1)})"
        return f"{{{inside}}}" if isinstance(x, dict) else f"[{inside}]"
    if isinstance(x, nnx.Pytree):
        return f"{type(x).__name__}(...)"
    if isinstance(x, type):
        return repr(x)
    if isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype") and not isinstance(x, np.generic):
        return f"{x.dtype}{list(x.shape)}"
    if callable(x) and (name := getattr(x, "__qualname__", None) or getattr(x, "__name__", None)):
        return f"<function {name}>"
    return " ".join(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(x)).split())


def is_key(x: Any) -> bool:
    """Return whether `x` is a typed PRNG key array, concrete or abstract."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return the (name, leaf) of each leaf of a pytree, named as a user writes it."""
    return [(leaf_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def keys_of(path: Sequence[Any]) -> list[Any]:
    """Return the names and indices in a pytree path."""
    return [getattr(x, "key", getattr(x, "name", getattr(x, "idx", x))) for x in path]


def leaf_name(path: Sequence[Any]) -> str:
    """Return a pytree path as a user writes it: `net.layers[0].kernel`."""
    name = ""
    for part in path:  # without a call for each part: a fit names every array
        key = getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))
        if isinstance(key, int) or set(".[]") & set(str(key)):  # such a name would read like more than one
            name += f"[{key!r}]"
        else:
            name += f".{key}" if name else str(key)
    return name


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the first of some names, and how many more there are."""
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


def table(rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Return the lines of a table, the head first: so many `texts` columns aligned to the left, then the numbers."""
    columns = []
    for i, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        columns.append([cell.ljust(width) if i < texts else cell.rjust(width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def size(num_bytes: float) -> str:
    """Return a number of bytes with its unit."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        num_bytes /= 1024
        if num_bytes < 1024 or unit == "TiB":
            break
    return f"{num_bytes:.{1 if num_bytes < 100 else 0}f} {unit}"


def count(number: float) -> str:
    """Return a number with three digits and a letter for its thousands."""
    for letter in ("", "k", "M", "G", "T", "P"):
        if number < 999.5 or letter == "P":
            break
        number /= 1000
    return f"{number:.3g}{letter}" if number < 999.5 else f"{number:,.0f}{letter}"


def duration(seconds: float) -> str:
    """Return a duration with three digits and its unit."""
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


class NotJSONError(TypeError):
    """JSON has no such value: `path` is its place, "['callbacks'][0]", and `problem` the rest of a sentence."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or 'the value'} {problem}")
        self.path, self.problem = path, problem


def to_json(x: Any, *, lenient: bool = False, exact: bool = False, path: str = "") -> Any:
    """Return a value as dicts, lists, bools, ints, floats, strs and None: numpy scalars as numbers, tuples as lists.

    Args:
        x: The value.
        lenient: Convert everything, for people and other programs to read: an array to a list, a number that is not
            finite to "NaN", "Infinity" or "-Infinity", keys and objects to their `str`.
        exact: Keep tuples, sets, bytes, arrays, tensors of torch and keys of any kind, as dicts for `from_json`.
        path: Where the value is in a larger one, for the error.

    Raises:
        NotJSONError: A part of it is no such value; never if `lenient`.
    """
    into = partial(to_json, lenient=lenient, exact=exact)
    if isinstance(x, Mapping):
        wrong = [] if lenient else [key for key in x if not isinstance(key, str) or (exact and key == _KIND)]
        if exact and wrong:
            return {_KIND: "dict", "value": [[into(k), into(y, path=f"{path}[{k!r}]")] for k, y in x.items()]}
        if wrong:
            raise NotJSONError(path, f"has the key {wrong[0]!r}")
        return {str(key): into(item, path=f"{path}[{key!r}]") for key, item in x.items()}
    kinds = (list, tuple, set, frozenset) if exact else (list, tuple)
    if isinstance(x, kinds):
        items = [into(item, path=f"{path}[{i}]") for i, item in enumerate(x)]
        kind = next(kind for kind in kinds if isinstance(x, kind))
        return {_KIND: kind.__name__, "value": items} if exact and kind is not list else items
    if exact and (node := _data_of(x)) is not None:
        return node
    if isinstance(x, (np.generic, IntEnum)):
        x = int(x) if isinstance(x, IntEnum) else x.item()
    if lenient and isinstance(x, float) and not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if lenient:  # `tolist` is numpy's and jax's
        return to_json(np.asarray(x).tolist(), lenient=True) if hasattr(x, "tolist") else str(x)
    raise NotJSONError(path, f"is of type {type(x).__name__} {getattr(x, 'dtype', '')}".rstrip())


def from_json(node: dict[str, Any]) -> Any:
    """Return the value of a dict of `to_json(exact=True)`, whose parts are values already; another dict as it is."""
    return _KINDS[node[_KIND]](node["value"]) if _KIND in node else node


def _data_of(x: Any) -> dict[str, Any] | None:
    """Return bytes or an array as text; None of anything else, and of dtypes that numpy's files do not have."""
    if isinstance(x, (bytes, bytearray)):
        return {_KIND: "bytes", "value": base64.b64encode(x).decode()}
    of_torch, data = getattr(sys.modules.get("torch"), "Tensor", ()), x
    if isinstance(x, (np.ndarray, jax.Array, of_torch)):
        with contextlib.suppress(TypeError, ValueError):  # of dtypes that numpy does not have
            array = np.asarray(data.detach().cpu() if isinstance(x, of_torch) else data)
            np.save(file := io.BytesIO(), array, allow_pickle=False)
            if array.dtype.kind != "V":  # one of another library comes back as bytes
                kind = "tensor" if isinstance(x, of_torch) else "array"
                return {_KIND: kind, "value": base64.b64encode(file.getvalue()).decode()}
    return None


def _array(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def _tensor(text: str) -> Any:
    # Without torch there is nothing that could take a tensor.
    return sys.modules["torch"].from_numpy(_array(text)) if "torch" in sys.modules else _array(text)


_KIND = "jaxlit value"  # the key of a dict that represents another value
_KINDS: dict[str, Callable[[Any], Any]] = {kind.__name__: kind for kind in (tuple, set, frozenset, dict)}
_KINDS |= {"bytes": base64.b64decode, "array": _array, "tensor": _tensor}

_ADDRESS = re.compile(r"( at )?\b0x[0-9a-fA-F]+|\bid=\d{6,}")
_BRACES = re.compile(r"\{([^{}]*)\}")


def stable_text(value: Any) -> str:
    """Return a value's text without what differs from process to process: addresses, and the order of a set."""
    text = _ADDRESS.sub("", value if isinstance(value, str) else shown(value, most=10_000))
    count = 1
    while count:  # the innermost sets first; a dict's order is lost as well
        text, count = _BRACES.subn(lambda match: f"\1{', '.join(sorted(match[1].split(', ')))}\2", text)
    return text.replace("\1", "{").replace("\2", "}")


def array_text(x: Any) -> str:
    """Return an array's dtype, shape and checksum; without a checksum if other processes hold parts of it."""
    kind = f"{x.dtype}{list(x.shape)}"
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return kind
    data = np.ascontiguousarray(jax.random.key_data(x) if is_key(x) else x).reshape(-1).view(np.uint8)
    # Weights may take gigabytes: a cryptographic hash would take half as long again.
    return f"{kind} with checksum {zlib.crc32(data.data):08x}"
