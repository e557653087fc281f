"""What is said of programs that are compiled while training continues."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from jaxlit.core.replica import num_rows
from jaxlit.reporting.terminal import clock

if TYPE_CHECKING:
    from jaxlit.trainer import Trainer

_LEAST = 0.005  # seconds that are worth a line


class CompileLines:
    """Names what was compiled, with its seconds; what each line says adds up to `trainer.compile_seconds`."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}  # seconds by program
        self._rows: dict[tuple[str, int | None], set[int]] = {}  # of the batches that each was compiled for, by loader
        self._first: dict[str, float] = {}  # seconds of those that were compiled once, and are not told of yet

    def update(
        self, trainer: "Trainer", batch: Any, *, last: Callable[[], bool], loader: int | None = None
    ) -> list[str]:
        """Take note of what was compiled for a batch.

        Args:
            trainer: The Trainer.
            batch: The host batch that a step has taken.
            last: Returns whether it is known to be the last of its loader.
            loader: The loader of an evaluation; None in training.

        Returns:
            A line for each program that was compiled again; `rest` has those compiled for the first time.
        """
        seconds, lines = trainer.compile_seconds, list[str]()
        if seconds == self._told:
            return lines
        rows = num_rows(batch)
        for name, total in seconds.items():
            more = total - self._told.get(name, 0.0)
            if more < _LEAST and name in self._told:
                continue
            self._told[name] = total
            seen = self._rows.setdefault((name, loader), set())
            if not seen or (name in self._first and rows in seen):
                self._first[name] = self._first.get(name, 0.0) + more
            else:
                again = "again" if rows in seen else _batch(trainer, rows, last=last())
                advice = _advice(trainer) if last and rows not in seen and loader is None else ""
                lines += [self.rest(), f"compiled {name} {again} in {clock(more)}{advice}"]
            seen.add(rows)
        return lines

    def rest(self) -> str:
        """Return the line of what was compiled for the first time since it was asked for; "" if nothing was."""
        each, self._first = ", ".join(f"{name} in {clock(s)}" for name, s in self._first.items()), {}
        return f"compiled {each}" if each else ""


def _batch(trainer: "Trainer", rows: int, *, last: bool) -> str:
    which = "the last" if last else "a"
    if jax.process_count() > 1:  # the rows are those of this process
        return f"for {which} batch of another size"
    return f"for {which} batch of {rows:,} row{'s' * (rows != 1)}"


def _advice(trainer: "Trainer") -> str:
    """Return how to do without a short last batch, where the loader has an argument for it."""
    loader = trainer.train_dataloader
    # grain's `batch` has it as well.
    knows = hasattr(loader, "drop_remainder") or type(loader).__module__.split(".")[0] == "grain"
    return "; drop_remainder=True saves it" if knows else ""
