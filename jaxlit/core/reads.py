"""What a function that is being traced reads of a Trainer."""

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax

from jaxlit.core.plain_attributes import copied, same

# Read by every attribute of a Trainer, in hooks of every step: hence the variable itself, and no function around it.
READS: ContextVar["Reads | None"] = ContextVar("jaxlit_reads", default=None)


class Reads(list[tuple["weakref.ref[Any]", str, Any]]):
    """The attributes that a trace has read, and their values then.

    A value is compiled into the program, which is right only for as long as the attribute has it.
    """

    def note(self, owner: Any, name: str, value: Any) -> None:
        """Note an attribute's value, unless it is an array of the trace, which follows its argument."""
        if not isinstance(value, jax.Array):
            # Weakly: jax keeps what it has compiled, which would hold a Trainer and all its arrays.
            self.append((weakref.ref(owner), name, copied(value)))

    def hold(self) -> bool:
        """Return whether every recorded attribute still has the value that the trace read.

        False if two traces read different values.
        """
        try:
            return all(same(was, getattr(owner(), name)) for owner, name, was in self)
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
