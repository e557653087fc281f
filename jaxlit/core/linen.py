"""Linen modules: an NNX module holds their variables through flax's bridge only."""

from typing import Any

import flax.errors
from flax import linen, nnx

from jaxlit.core.plain_attributes import each_attribute

AS_NNX = "self.net = nnx.bridge.ToNNX(Net(), rngs=rngs).lazy_init(x), with x as a batch has it"


def is_linen(x: Any) -> bool:
    """Return whether an object is a linen module."""
    return isinstance(x, linen.Module)


def linen_in(module: nnx.Module) -> str | None:
    """Return the path of a linen module that an NNX module holds as it is, None if there is none."""
    return next((path for path, value in each_attribute(module) if is_linen(value)), None)


def note_linen(error: BaseException) -> None:
    """Note on the error of a linen module that was called without variables what would give it some."""
    if isinstance(error, flax.errors.CallCompactUnboundModuleError):
        error.add_note(f"A linen module has no variables of its own. Give it some: {AS_NNX}.")
