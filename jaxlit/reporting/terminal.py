"""Lines in the terminal, among them one that changes in place and those of epochs; arrays and their bytes in words."""

import contextlib
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax

from jaxlit.sharding import HOST

_ASCII = str.maketrans("·…━─", "|.=-")
_SHORTEST, _LONGEST = 6, 18  # cells of a bar


def say(text: str, *, aside: bool = False) -> None:
    """Print lines to stdout, or `aside` to stderr; a stream that is gone or cannot write them never ends training."""
    stream = sys.stderr if aside else sys.stdout
    # A closed Python file raises ValueError, None and an object without flush raise AttributeError.
    with contextlib.suppress(OSError, ValueError, LookupError, AttributeError):
        stream.write(f"{_writable(text)}\n")
        stream.flush()


def join(parts: Sequence[str], indent: str = "  ", *, between: str = " · ") -> str:
    """Return parts as one line, or as several in a narrow terminal: no part is broken, later lines are indented."""
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
    """Return the width of the terminal, also of a dumb one; None without a terminal."""
    return shutil.get_terminal_size().columns if _is_tty() else None


def bar(done: int, total: float, width: int) -> str:
    """Return a progress bar; a full one if the total is not known."""
    filled = width if total == math.inf else round(width * min(done / max(total, 1), 1.0))
    return "━" * filled + "─" * (width - filled)


def clock(seconds: float) -> str:
    """Return a duration in words."""
    if seconds >= 100:
        return str(timedelta(seconds=round(seconds)))
    return f"{seconds:.{1 if seconds >= 1 else 2}f} s"


def short_path(path: Any) -> Any:
    """Return a path relative to the working folder, if it is below it; a URL as it is."""
    if "://" in str(path):
        return path
    path = absolute(path)
    with contextlib.suppress(OSError, ValueError):  # the working folder is gone, or is elsewhere
        return path.relative_to(Path.cwd())
    return path


def absolute(path: Path) -> Path:
    """Return an absolute path, or the path itself if the working folder was deleted."""
    with contextlib.suppress(OSError):
        return Path(os.path.abspath(path))
    return path


def is_terminal() -> bool:
    """Return whether a line can change in place."""
    return _is_tty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _is_tty() -> bool:
    # Not Rich's answer, which is yes for a file too if FORCE_COLOR is set, as on build servers.
    try:
        return _stdout().isatty()
    except (AttributeError, ValueError):  # None, another object, or a closed file
        return False


def _stdout() -> Any:
    """Return the stdout that Rich replaces while a line is live."""
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

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        class QuietConsole(Console):
            # Rich's method ends the process.
            def on_broken_pipe(self) -> None:
                raise BrokenPipeError

        # Drawn from hooks: a thread of rich would compete with the training loop.
        self._live = Live(console=QuietConsole(force_terminal=True), auto_refresh=False, transient=True)
        self._live.start()

    def show(self, text: str) -> None:
        """Draw the line, cut at the terminal's width."""
        from rich.text import Text

        line = Text(text)
        # Three cells stay free: in a full line the ^C that a terminal shows would begin another line.
        line.truncate(max((line_width() or 80) - 3, 1), overflow="ellipsis")
        self._live.update(Text(_writable(line.plain), no_wrap=True, overflow="crop"), refresh=True)

    def close(self) -> None:
        """Remove the line."""
        self._live.stop()


def epoch_line(epoch: str, done: int, total: float, numbers: Sequence[str]) -> str:
    """Return an epoch's line, with as long a bar as fits; without a terminal there is no bar.

    The widths of the numbers decide the layout, so that all epochs have the same layout. Spaces are given up before the
    bar. The last two of the numbers are a mark, which stays next to the part before it, and a remark, which the layout
    does not count.
    """
    *parts, mark, remark = [epoch, *numbers]
    parts, width = list(filter(None, parts)), line_width() or 0
    for gap in ("  ", " ") if width else ("  ",):
        fixed = gap.join(filter(None, [*parts, mark]))
        if (room := width - len(fixed) - len(gap)) >= _SHORTEST:
            parts.insert(1, bar(done, total, min(room, _LONGEST)))
            break
    parts[-1:] = [gap.join(filter(None, [parts[-1], mark]))]
    return join([*parts, remark], " " * (len(epoch) + 2), between=gap)


def live_line(epoch: str, done: int, total: float, numbers: str) -> str:
    """Return the line of the current epoch; a narrow terminal has a shorter bar."""
    room = (line_width() or 200) - len(f"{epoch}{numbers}") - 8
    return f"{epoch}  {bar(done, total, min(max(room, _SHORTEST), _LONGEST))}  {numbers}"


def partition(arrays: Iterable[Any], devices: Iterable[jax.Device]) -> str:
    """Return how arrays, or their shapes, are sharded: "P('fsdp', None)", "replicated", or "mixed" if they differ.

    Arrays of one device are "on cpu:3", those of a part of the `devices` "replicated on cpu:4,5".
    """
    all_devices = frozenset(devices)
    shardings = {x.sharding for x in arrays}
    partitions = {_partition(x, all_devices) + f" in {HOST}" * (x.memory_kind == HOST) for x in shardings}
    return partitions.pop() if len(partitions) == 1 else "mixed"


def bytes_of(arrays: Iterable[Any]) -> int:
    """Return the bytes of unsharded arrays."""
    return sum(x.size * x.dtype.itemsize for x in arrays)


def bytes_per_device(arrays: Iterable[Any]) -> int:
    """Return the bytes of arrays on the device that has the most of them; those in the host's memory take none."""
    by_sharding, held = Counter[Any](), Counter[jax.Device]()
    for x in arrays:
        if x.sharding.memory_kind != HOST:
            by_sharding[x.sharding] += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for sharding, num_bytes in by_sharding.items():
        held.update(dict.fromkeys(sharding.device_set, num_bytes))
    return max(held.values(), default=0)


def devices_of(arrays: Iterable[Any]) -> frozenset[jax.Device]:
    """Return the devices of arrays."""
    return frozenset().union(*(sharding.device_set for sharding in {x.sharding for x in arrays}))


def _partition(sharding: Any, all_devices: frozenset[jax.Device]) -> str:
    devices = sharding.device_set
    if len(devices) == 1:
        return f"on {_names(devices)}"
    is_split = any(axes is not None for axes in sharding.spec)
    text = f"P({', '.join(map(repr, sharding.spec))})" if is_split else "replicated"
    return text if devices == all_devices else f"{text} on {_names(devices)}"


def _names(devices: Iterable[jax.Device]) -> str:
    """Return devices as "cpu:0,1,6"."""
    return f"{next(iter(devices)).platform}:{','.join(map(str, sorted(device.id for device in devices)))}"
