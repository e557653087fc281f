"""What an argument holds, as a text that is the same in every process."""

import hashlib
from collections.abc import Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from jaxlit.fingerprint import array_text, stable_text
from jaxlit.leaf_names import is_key
from jaxlit.shown import shown

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def argument_text(value: Any, most: int) -> str:
    """Return how an argument is shown: as `shown` does, but an array of one number as that number."""
    return str(value) if _is_number(value) else shown(value, most)


def content_text(value: Any) -> str:
    """Return the text of a number or a string; for other values a text with a checksum of all that they hold.

    Arrays count by their data, functions by their code, defaults and closures, and other objects by what pickle would
    store; classes and modules by their names.
    """
    plain = value.item() if _is_number(value) else value
    return repr(plain) if isinstance(plain, _PLAIN) else f"{stable_text(value)} with checksum {_checksum(value, {})}"


def _is_number(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) and not x.shape and not (is_key(x) or x.dtype == object)


def _checksum(x: Any, known: dict[int, tuple[Any, str]]) -> str:
    """Return the checksum of a value; `known` has those met before, by their ids, as values may hold each other."""
    if isinstance(x, _PLAIN):
        return repr(x)
    if id(x) not in known:
        known[id(x)] = x, "itself"
        parts = _parts(x)
        texts = [parts] if isinstance(parts, str) else [_checksum(part, known) for part in parts]
        text = "\n".join([type(x).__qualname__, *texts])
        known[id(x)] = x, hashlib.sha256(text.encode()).hexdigest()[:16]
    return known[id(x)][1]


def _parts(x: Any) -> list[Any] | str:
    """Return the values that a value consists of, or its text."""
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return x.tolist() if x.dtype == object else array_text(x)
    if isinstance(x, dict):
        return [part for item in x.items() for part in item]
    if isinstance(x, (list, tuple)):
        return [*x]
    if isinstance(x, (set, frozenset)):
        return stable_text(str(sorted(map(repr, x))))
    if isinstance(x, partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, CodeType):
        return [x.co_code, x.co_names, x.co_consts]
    if isinstance(x, FunctionType):
        held = [cell.cell_contents for cell in x.__closure__ or () if cell != CellType()]  # that of an empty one raises
        return [x.__code__, x.__defaults__, x.__kwdefaults__, held]
    if isinstance(x, MethodType):
        return [x.__func__, x.__self__]
    if hasattr(x, "__wrapped__") and not isinstance(x, type):
        return [x.__wrapped__]
    if not isinstance(x, (type, ModuleType)):
        try:
            reduced = x.__reduce_ex__(2)
        except Exception:  # of another library, which cannot be pickled
            reduced = ""
        if isinstance(reduced, tuple):
            return [[*part] if isinstance(part, Iterator) else part for part in reduced[1:]]
    return stable_text(repr(x))
