"""Notes on errors: where they were raised, and what to do."""

import contextlib
from collections.abc import Iterator

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
