"""What a function that is being traced reads of a Trainer."""

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax

from jaxlit.core.plain_attributes import as_held, same_value

# Read by every attribute of a Trainer, in hooks of every step: hence the variable itself, and no function around it.
READS: ContextVar["Reads | None"] = ContextVar("jaxlit_reads", default=None)


class Reads:
    """The attributes that a trace has read, and their values then.

    A value is compiled into the program, which is right only for as long as the attribute has it.
    """

    def __init__(self) -> None:
        # Weakly: jax keeps what it has compiled, which would hold a Trainer and all its arrays.
        self._found: list[tuple[weakref.ref[Any], str, Any]] = []

    def note(self, owner: Any, name: str, value: Any) -> None:
        """Note an attribute's value, unless it is an array of the trace, which follows its argument."""
        if not isinstance(value, jax.Array):
            self._add(weakref.ref(owner), name, as_held(value))

    def add(self, other: "Reads") -> None:
        """Note what another trace of the same program has read."""
        for found in other._found:
            self._add(*found)

    def _add(self, owner: "weakref.ref[Any]", name: str, value: Any) -> None:
        known = ((o, n, v) for o, n, v in self._found if o is owner and n == name)
        if not any(same_value(v, value) for _, _, v in known):
            self._found.append((owner, name, value))

    def hold(self) -> bool:
        """Return whether all of it would be read again; never so if two traces have read different values."""
        try:
            return all(same_value(was, as_held(getattr(owner(), name))) for owner, name, was in self._found)
        except AttributeError:  # the Trainer is gone, or no longer has it
            return False


@contextlib.contextmanager
def reading() -> Iterator[Reads]:
    """Note what is read inside the block, where something is traced."""
    reads = Reads()
    token = READS.set(reads)
    try:
        yield reads
    finally:
        READS.reset(token)
