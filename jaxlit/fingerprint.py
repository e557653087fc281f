"""Short texts of values and arrays that are the same in every process which has the same value."""

import re
import zlib
from typing import Any

import jax
import numpy as np

from jaxlit.leaf_names import is_key
from jaxlit.shown import shown

_ADDRESS = re.compile(r"( at )?\b0x[0-9a-fA-F]+|\bid=\d{6,}")
_BRACES = re.compile(r"\{([^{}]*)\}")


def stable_text(value: Any) -> str:
    """Return a value's text without what differs from process to process: addresses, and the order of a set."""
    text = _ADDRESS.sub("", value if isinstance(value, str) else shown(value, most=10_000))
    count = 1
    while count:  # the innermost sets first; a dict's order is lost as well
        text, count = _BRACES.subn(lambda found: f"\1{', '.join(sorted(found[1].split(', ')))}\2", text)
    return text.replace("\1", "{").replace("\2", "}")


def array_text(x: Any) -> str:
    """Return an array's dtype, shape and checksum; without a checksum if other processes hold parts of it."""
    kind = f"{x.dtype}{list(x.shape)}"
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return kind
    data = np.ascontiguousarray(jax.random.key_data(x) if is_key(x) else x).reshape(-1).view(np.uint8)
    # Weights may take gigabytes: a cryptographic hash would take half as long again.
    return f"{kind} with checksum {zlib.crc32(data.data):08x}"
