"""Lines about programs that are compiled while training continues."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from jaxlit.core.replica import num_rows
from jaxlit.reporting.terminal import clock

if TYPE_CHECKING:
    from jaxlit.trainer import Trainer

_LEAST = 0.005  # seconds that are worth a line


class CompileLines:
    """Names what was compiled, with its seconds: all lines together add up to `trainer.compile_seconds`."""

    def __init__(self) -> None:
        self._printed: dict[str, float] = {}  # seconds by program
        self._first: dict[str, float] = {}  # of programs that were compiled for the first time, and not printed yet

    def update(self, trainer: "Trainer", batch: Any, *, last: Callable[[], bool]) -> list[str]:
        """Return a line for each program that was compiled again; `first` has those compiled for the first time.

        Args:
            trainer: The Trainer.
            batch: The host batch that a step has taken.
            last: Returns whether it is known to be the last of its loader.
        """
        seconds, lines = trainer.compile_seconds, list[str]()
        if seconds == self._printed:
            return lines
        for name, total in seconds.items():
            more = total - self._printed.get(name, 0.0)
            if name not in self._printed:
                self._first[name] = more
            elif more < _LEAST:
                continue
            else:
                rows = num_rows(batch)  # of this process, which says little in several
                size = f"of {rows:,} row{'s' * (rows != 1)}" if jax.process_count() == 1 else "of another size"
                lines += [self.first(), f"compiled {name} for {'the last' if last() else 'a'} batch {size}{_in(more)}"]
                if last() and name.startswith("train_step") and hasattr(trainer.train_dataloader, "drop_remainder"):
                    lines[-1] += "; drop_remainder=True saves it"
            self._printed[name] = total
        return lines

    def first(self) -> str:
        """Return a line on programs compiled for the first time since it was asked for; "" if there are none."""
        each, self._first = ", ".join(f"{name}{_in(s)}" for name, s in self._first.items()), {}
        return f"compiled {each}" if each else ""


def _in(seconds: float) -> str:
    return f" in {clock(seconds)}"
