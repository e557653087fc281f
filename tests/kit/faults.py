"""Faults injected into file operations, to see what a training loses."""

import contextlib
import errno
import functools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

KINDS = ("kill", "crash", "full", "denied", "broken")
_CREATES = ("open", "os.mkdir", "os.rename", "os.link", "os.symlink", "os.fsync")
_REMOVES = ("os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Crash(BaseException):
    """For a folder, the process has died: `faults(kind="crash")`."""


class faults:
    """Count a program's operations on the files in a folder, and make one of them fail.

    Every file that Python opens to write counts, and every folder created and every file renamed, deleted or flushed to
    the disk, in any library and any thread. Writes of a library's C++ code do not.

    Args:
        folder: The folder, with its subfolders.
        at: The operation that fails, from 1; None only counts.
        kind: "kill" ends the process by SIGKILL. "crash" raises `Crash` there and at every later operation, so that
            the folder is left as by a kill. "full" fails like a full disk from there on, "denied" like a folder that
            may not be written to, "broken" like a disk that has failed.

    Attributes:
        operations: The operations in order: (operation, path).
    """

    def __init__(self, folder: str | Path, *, at: int | None = None, kind: str = "crash") -> None:
        assert kind in KINDS
        assert at is None or at > 0
        self.kind, self.at = kind, at
        self.folder = os.path.abspath(folder)
        self.operations: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "faults":
        _listen()
        _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.remove(self)

    def _record(self, operation: str, path: str) -> None:
        with self._lock:
            self.operations.append((operation, path))
            if self.at is None or len(self.operations) < self.at:
                return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "crash":
            raise Crash(f"{operation} {path}")
        if self.kind != "full" or operation in _CREATES:
            code = {"full": errno.ENOSPC, "broken": errno.EIO, "denied": errno.EACCES}[self.kind]
            raise OSError(code, os.strerror(code), path)  # which Python makes a PermissionError of EACCES


_active: list[faults] = []


@functools.cache
def _listen() -> None:
    # An audit hook stays until the process ends; without an active fault it returns at once.
    sys.addaudithook(_hear)
    plain = os.fsync

    def fsync(file: Any) -> None:  # it has no audit event
        _hear("os.fsync", (os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}"),))
        plain(file)

    os.fsync = fsync


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if not _active or (event not in _CREATES and event not in _REMOVES):
        return
    if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITING):
        return
    paths = [args[0]]
    if event in ("os.rename", "os.link", "os.symlink"):  # a new file counts in its folder
        paths = [args[0], args[1]] if event == "os.rename" else [args[1]]
    # A path may be relative to a folder that is open.
    is_relative = event.startswith("os.") and event != "os.mkdir"
    opened = [x for x in args[1:] if is_relative and type(x) is int and x >= 0]
    known = [absolute for path in paths if (absolute := _absolute(path, opened)) is not None]
    for fault in list(_active):
        inside = [path for path in known if path == fault.folder or path.startswith(fault.folder + os.sep)]
        if inside:
            fault._record(event, inside[0])


def _absolute(path: Any, opened: list[int]) -> str | None:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    path = os.fsdecode(path)
    if opened and not os.path.isabs(path):
        with contextlib.suppress(OSError):
            path = os.path.join(os.readlink(f"/proc/self/fd/{opened[-1]}"), path)
    return os.path.abspath(path)
