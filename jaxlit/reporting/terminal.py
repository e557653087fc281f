"""Lines in the terminal, and one line that changes in place."""

import base64
import contextlib
import math
import os
import shutil
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

_ASCII = str.maketrans("·…━─", "|.=-")


def say(text: str, *, aside: bool = False) -> None:
    """Print lines; a stdout that is gone, or that cannot write a character, never ends training.

    Args:
        text: The lines.
        aside: Whether they go to stderr.
    """
    stream = sys.stderr if aside else sys.stdout
    # ValueError is what a closed Python file raises, AttributeError what None and an object without flush do.
    with contextlib.suppress(OSError, ValueError, LookupError, AttributeError):
        stream.write(f"{_writable(text)}\n")
        stream.flush()


def join(parts: Sequence[str], indent: str = "  ", *, between: str = " · ") -> str:
    """Return parts as a line, or as so many lines as the width asks for.

    Args:
        parts: The parts, which are not broken.
        indent: What the second line and those after it begin with.
        between: The text between two parts of a line.
    """
    width, lines = line_width(), [""]
    for part in filter(None, parts):
        longer = f"{lines[-1]}{between}{part}" if lines[-1] else part
        if width is not None and len(longer) > width and lines[-1]:
            fits = len(indent) + len(part) <= width
            lines.append((indent if fits else "  ") + part)
        else:
            lines[-1] = longer
    return "\n".join(line.rstrip() for line in lines)


def line_width() -> int | None:
    """Return how many characters a line of the terminal has, also of a dumb one; None if there is none."""
    return shutil.get_terminal_size().columns if _is_tty() and not in_notebook() else None


def bar(done: int, total: float, width: int) -> str:
    """Return how much is done as a bar; a full one if the total is not known."""
    filled = width if total == math.inf else round(width * min(done / max(total, 1), 1.0))
    return "━" * filled + "─" * (width - filled)


def clock(seconds: float) -> str:
    """Return a duration in a form for people."""
    if seconds >= 100:
        return str(timedelta(seconds=round(seconds)))
    return f"{seconds:.{1 if seconds >= 1 else 2}f} s"


def short_path(path: Path) -> Path:
    """Return a path relative to the working folder, if it is below it."""
    path = absolute(path)
    with contextlib.suppress(OSError, ValueError):  # the working folder is gone, or is elsewhere
        return path.relative_to(Path.cwd())
    return path


def absolute(path: Path) -> Path:
    """Return a path from the root, or as it is where the working folder was deleted."""
    with contextlib.suppress(OSError):
        return Path(os.path.abspath(path))
    return path


def is_terminal() -> bool:
    """Return whether a line can change in place: on a terminal, or in a notebook."""
    moves = _is_tty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return moves or in_notebook()


def in_notebook() -> bool:
    """Return whether the code runs in a notebook, whose stdout only grows."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def _is_tty() -> bool:
    # Not Rich's answer, which is yes for a file too where FORCE_COLOR is set, as build servers do.
    try:
        return _stdout().isatty()
    except (AttributeError, ValueError):  # it is None, somebody's own object, or closed
        return False


def _stdout() -> Any:
    """Return the stdout that Rich puts something before while a line is live."""
    return getattr(sys.stdout, "rich_proxied_file", sys.stdout)


def _writable(text: str) -> str:
    """Return a text as stdout can write it: with ASCII lines, and "?" for other characters."""
    encoding = getattr(_stdout(), "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    return text


class TerminalLine:
    """A line at the bottom of the terminal, below other output."""

    stays = False  # while other lines are printed

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        class QuietConsole(Console):
            # Rich's own ends the process.
            def on_broken_pipe(self) -> None:
                raise BrokenPipeError

        # Drawn from hooks: a thread of rich would compete with the training loop.
        self._live = Live(console=QuietConsole(force_terminal=True), auto_refresh=False, transient=True)
        self._live.start()

    def show(self, text: str) -> None:
        """Draw the line, cut at the terminal's width."""
        from rich.text import Text

        line = Text(text)
        # Three are left free: in a full line the ^C that a terminal shows would begin another, and leave this one.
        line.truncate(max((line_width() or 80) - 3, 1), overflow="ellipsis")
        self._live.update(Text(_writable(line.plain), no_wrap=True, overflow="crop"), refresh=True)

    def close(self) -> None:
        """Take the line away."""
        self._live.stop()


class NotebookLine:
    """An output of a notebook's cell that is replaced each time; lines that stay are printed below it.

    So they are one output, in the order in which they and a user's own came, and a notebook that is kept has no bars.
    """

    stays = True

    def __init__(self) -> None:
        from IPython.display import display  # type: ignore[import-not-found]  # there is one in every notebook

        self._handle: Any = display(_in_notebook(""), raw=True, display_id=True)

    def show(self, text: str) -> None:
        """Replace the output."""
        self._handle.update(_in_notebook(text), raw=True)

    def close(self) -> None:
        """Leave an output that takes no room."""
        self._handle.update(_in_notebook(""), raw=True)


def show_picture(thing: Any) -> None:
    """Show in a notebook's cell what has a picture of itself, by `_repr_png_`; nothing where it has none."""
    from IPython.display import display  # type: ignore[import-not-found]  # there is one in every notebook

    with contextlib.suppress(Exception):  # matplotlib may be half installed; a picture ends no training
        if (picture := thing._repr_png_()) is not None:
            encoded = base64.b64encode(picture).decode()
            display({"image/png": encoded, "text/plain": repr(thing)}, raw=True)


def _in_notebook(text: str) -> dict[str, str]:
    # An empty line of text would take the room of one.
    return {"text/plain": text} if text else {"text/html": ""}
