"""How a value of the user's is shown in a message."""

import re
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
