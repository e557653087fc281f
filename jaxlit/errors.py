"""The errors that jaxlit raises for mistakes in a user's arguments, data, module or hooks, and notes on errors.

Every message has the rule, what was given, and what to do; a note says where an error was raised.
"""

import contextlib
import difflib
import functools
from collections.abc import Iterable, Iterator
from typing import TypeVar

_E = TypeVar("_E", bound=BaseException)

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CheckpointError",
    "DataError",
    "JaxlitError",
    "LogError",
    "LoggerError",
    "ModuleError",
    "NonFiniteError",
    "OutOfMemoryError",
    "PeerError",
    "ProcessError",
    "StateError",
]


def __dir__() -> list[str]:
    return __all__


class JaxlitError(Exception):
    """Base of every error that jaxlit raises on purpose."""


class ArgumentError(JaxlitError, ValueError):
    """An argument has a value out of its set, or does not fit another argument."""


class ArgumentTypeError(JaxlitError, TypeError):
    """An argument has the wrong type, or no argument of this name exists."""


class DataError(JaxlitError, ValueError):
    """A loader or a batch cannot be used."""


class ModuleError(JaxlitError, TypeError):
    """A module lacks a method, or one of its methods returned what cannot be used."""


class LogError(JaxlitError, ValueError):
    """`self.log` was called in the wrong place, or with what cannot be logged."""


class LoggerError(JaxlitError, RuntimeError):
    """A logger cannot write, or a callback lacks the metric that it watches."""


class StateError(JaxlitError, ValueError):
    """A hook or a step changed the module in a way that training cannot follow."""


class CheckpointError(JaxlitError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit."""


class ProcessError(JaxlitError, RuntimeError):
    """The processes of a training did not meet, or do not run the same thing."""


class PeerError(ProcessError):
    """Another process of the job has failed or died, so that this one cannot continue."""


class NonFiniteError(JaxlitError, FloatingPointError):
    """The loss or a gradient was NaN or infinite."""

    raised_everywhere = True  # read from the device, where all processes have the same value


class OutOfMemoryError(JaxlitError, MemoryError):
    """A device's memory is too small for the state, a batch or a step."""


def raised_everywhere(error: _E) -> _E:
    """Mark an error as raised by every process of the job at the same place, so that none waits for another."""
    error.raised_everywhere = True  # type: ignore[attr-defined]
    return error


def did_you_mean(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """Return `" Did you mean 'fsdp'?"` for the known name nearest to `name`, or nothing if none is `least` like it."""
    near = _nearest(name, tuple(known), least)
    return f" Did you mean {near[0]!r}?" if near else ""


@functools.lru_cache  # each fit asks modules by hasattr for what they need not have, and gets this error every time
def _nearest(name: str, known: tuple[str, ...], least: float) -> list[str]:
    return difflib.get_close_matches(name, [x for x in known if not x.startswith("_")], n=1, cutoff=least)


_RAISED_BY = "It was raised by "


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error, once."""
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def note_place(error: BaseException, place: str) -> BaseException:
    """Return an error with a note of where it was raised, unless it has one already: the inner place is the nearer."""
    if not any(note.startswith(_RAISED_BY) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_RAISED_BY}{place}.")
    return error


def noted_place(error: BaseException) -> str | None:
    """Return where an error was raised, if it has a note of that."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_RAISED_BY)]
    return notes[0].removeprefix(_RAISED_BY).rstrip(".") if notes else None


def note_step(error: BaseException, step: int) -> None:
    """Add the number of optimizer steps taken to the note of where an error was raised."""
    notes = getattr(error, "__notes__", [])
    for i, note in enumerate(notes):
        if note.startswith(_RAISED_BY) and "(global_step " not in note:
            notes[i] = f"{note[:-1]} (global_step {step})."


@contextlib.contextmanager
def noting_place(place: str) -> Iterator[None]:
    """Note the place on whatever is raised inside the block."""
    try:
        yield
    except BaseException as error:
        note_place(error, place)
        raise
