"""What changes during a run: signals, stops and counts, and how far training is."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_logger = logging.getLogger("jaxlit")


class Interrupted(BaseException):
    """A signal came during a wait for data, and ends the wait; the code that waits catches it."""


def ending(number: int) -> BaseException:
    """Return the exception of a signal that ends a program: KeyboardInterrupt, or SystemExit of 128 and its number."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


@dataclass
class Control:
    """What changes during a run, apart from its position."""

    should_stop: bool = False
    stop_reason: str | None = None  # of the first `stop`
    is_final: bool = False  # the stop is kept by a resume, unless that names a checkpoint
    interrupted: bool = False  # Ctrl-C, SIGTERM or the like came: training ends after the step that runs
    signal: int | None = None  # the signal that came first in the fit that runs
    again: int | None = None  # the signal that asked the fit to end at once
    drawing: bool = False  # the main thread waits for a batch, which a signal may cut by `Interrupted`
    # If there are more processes, the requests of this one, until all do them at the same step: "signal 15", "stop",
    # "finish" or "interrupt" and a reason, or what a callback has named. None in one process: they are done at once.
    asked: list[str] | None = None
    agreed: set[str] = field(default_factory=set)  # what callbacks have named and all processes do now
    shielded: bool = False  # what runs must not be cut, not even by a second signal
    sanity_checking: bool = False  # the validation that runs is the one before training
    training_loader: str = ""  # its argument
    num_training_batches: int | float = 0  # of an epoch; inf where the loader has no length
    num_val_batches: list[int | float] = field(default_factory=list)  # of each loader
    num_predict_batches: list[int | float] = field(default_factory=list)  # of each loader; inf where it has no length
    log_every: int = 50  # the optimizer steps between rows that `log_every_n_steps="auto"` means
    verbose: bool = True  # whether the metrics of `validate` and `test` are printed at their end
    noted: set[str] = field(default_factory=set)  # texts that were logged or printed once, and "signal" for one
    predict_outputs: Any = None  # the shapes and dtypes that `predict_step` returns for the loader at hand

    def begin(self, *, alone: bool) -> None:
        """Begin a run, in one process or in several; a signal that has come since the fit was called counts."""
        self.asked = None if alone else [x for x in self.asked or () if x.startswith(("signal ", "interrupt "))]
        self.interrupted = alone and self.signal is not None
        self.noted.clear()
        self.agreed.clear()

    def log_once(self, level: int, text: str, *args: Any) -> None:
        """Log a text, unless the run has logged it before."""
        if text not in self.noted:
            self.noted.add(text)
            _logger.log(level, text, *args)

    def stop(self, reason: str | None, *, final: bool = False) -> None:
        """Ask for a stop; the first reason counts."""
        if self.asked is None or not self.should_stop:
            self._ask(f"{'finish' if final else 'stop'} {reason or ''}")

    def interrupt(self, reason: str) -> None:
        """Ask for the end of training after the step that runs, as by a signal."""
        self._ask(f"interrupt {reason}")

    def receive(self, number: int) -> None:
        """Note a signal that ends training after the step that runs."""
        self.signal = number
        self._ask(f"signal {number}")

    def _ask(self, text: str) -> None:
        """Ask all processes to do something together; a single process does it at once."""
        if self.asked is None:
            self.take([text])
        elif text not in self.asked:
            self.asked.append(text)

    def agree(self, name: str, wanted: bool) -> bool:
        """See `Trainer.agreed`."""
        if self.asked is None:
            return wanted
        done = name in self.agreed
        self.agreed.discard(name)
        if wanted and not done:
            self._ask(f"name {name}")
        return done

    def take(self, agreed: list[str]) -> None:
        """Do what all processes do now."""
        for text in agreed:
            kind, _, rest = text.partition(" ")
            if kind == "signal":
                self.signal = self.signal or int(rest)
                self.interrupted = True
            elif kind in ("stop", "finish", "interrupt"):
                self.should_stop |= kind != "interrupt"
                self.is_final |= kind == "finish"
                self.interrupted |= kind == "interrupt"
                self.stop_reason = self.stop_reason or rest or None
            else:
                self.agreed.add(rest)
            if self.asked and text in self.asked:  # in place: another thread may ask for more
                self.asked.remove(text)

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Let a second signal wait until the block is over."""
        self.shielded = True
        try:
            yield
        finally:
            self.shielded = False
        if self.again is not None:
            raise ending(self.again)


@dataclass
class Position:
    """How far training is. It continues between two batches, or after an epoch: a validation may be left to do."""

    epoch: int = 0  # epochs finished
    batch_idx: int = 0  # batches of this epoch done
    total_batch_idx: int = 0  # batches of all epochs done
    global_step: int = 0  # optimizer steps taken
    first_step: int = 0  # those taken before this epoch
    filled: int = 0  # batches in the accumulation window
    over: bool = False  # this epoch has no batch left
    validated: bool = True  # no validation is left to do after the last batch
    data: Any = None  # the state of the training loader after the last batch that was used
    cut: bool = False  # training has ended in this epoch, which counts for hooks; in no checkpoint

    @property
    def inside(self) -> bool:
        """Whether an epoch has begun and not ended."""
        return self.batch_idx > 0 or self.over

    @property
    def epochs(self) -> int:
        """Epochs finished, with one that a stop has cut."""
        return self.epoch + self.cut

    def advance(self, data: Any, *, stepping: int, last: bool, batches: int = 1) -> None:
        """Move after batches of `stepping` optimizer steps, maybe the epoch's last, to a state of the loader."""
        self.batch_idx += batches
        self.total_batch_idx += batches
        self.global_step += stepping
        self.filled = 0 if stepping else self.filled + 1
        self.validated, self.over, self.data = False, last, data

    def advance_epoch(self, data: Any) -> None:
        """Move before the next epoch, whose loader continues from `data`."""
        self.epoch, self.batch_idx, self.over = self.epoch + 1, 0, False
        self.data, self.first_step = data, self.global_step
