"""How a value of the user's is shown in a message."""

import re
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
from flax import nnx

_MOST_ENTRIES = 10


def shown(value: Any, most: int = 300) -> str:
    """Return a value's repr on a line: arrays by dtype and shape, functions by name, cut after `most` characters."""
    text = _text(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _text(x: Any) -> str:
    if isinstance(x, dict):
        return f"{{{_joined((f'{key!r}: {_text(value)}' for key, value in x.items()), len(x))}}}"
    if isinstance(x, list):
        return f"[{_joined(map(_text, x), len(x))}]"
    if isinstance(x, tuple):
        return f"({_joined(map(_text, x), len(x))}{',' * (len(x) == 1)})"
    if isinstance(x, nnx.Pytree):
        return f"{type(x).__name__}(...)"
    if isinstance(x, type) or x is ...:
        return "..." if x is ... else repr(x)
    if isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype") and not isinstance(x, np.generic):
        return f"{x.dtype}{list(x.shape)}"
    if callable(x) and (name := getattr(x, "__qualname__", None) or getattr(x, "__name__", None)):
        return f"<function {name}>"
    return " ".join(re.sub(r" at 0x[0-9a-f]+", "", repr(x)).split())


def _joined(texts: Iterable[str], count: int) -> str:
    return ", ".join(islice(texts, _MOST_ENTRIES)) + ", ..." * (count > _MOST_ENTRIES)
