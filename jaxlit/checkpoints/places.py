"""Places of files: a path on a disk, or one in a bucket, which has the methods of `pathlib.Path` that are used here.

Last is the lock of a folder that one training at a time writes to; where there are no locks, as in buckets, it is a
claim: a file that each training writes when it begins. A training looks whether the claims are still its own before it
makes a folder a checkpoint, or copies its rows: of two the one that began last continues. Nothing is overwritten until
the other one notices, as the files of a checkpoint have names of their own.
"""

import contextlib
import errno
import json
import logging
import os
import random
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from jaxlit import checks as check
from jaxlit.checks import cache_folder
from jaxlit.errors import CheckpointError

_TRANSIENT = (errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT)
_WAITS_S = (0.1, 0.5, 2.0)
RUN_LOCK = ".run-lock"
ENDED = ".ended"  # in the folder of a run whose training has ended
_KINDS: dict[str, type] = {"number": str, "holder": str, "newest": list, "files": list}  # of a claim
_held: dict[str, "FolderLock"] = {}  # by the path of the lock, those of this process
_without_locks: set[int] = set()  # file systems that were warned of
_logger = logging.getLogger("jaxlit")


@dataclass(unsafe_hash=True)
class RemotePath:
    """A path in a bucket, or in any other file system of fsspec.

    What reads raises FileNotFoundError, or a CheckpointError for whatever else the file system raises.
    """

    url: str
    fs: Any = field(default=None, compare=False, repr=False)
    path: str = field(default="", compare=False, repr=False)  # in the file system

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        if self.fs is None:
            from fsspec.core import url_to_fs

            self.fs, self.path = url_to_fs(self.url)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        root = f"{self.url}//" if self.url.endswith(":") else f"{self.url}/"
        return RemotePath(root + name, self.fs, f"{self.path.rstrip('/')}/{name}" if self.path else name)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The folder that it is in."""
        head, _, _ = self.url.rpartition("/")
        return self if head.endswith("/") else RemotePath(head, self.fs, self.path.rstrip("/").rpartition("/")[0])

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the file system that reads."""
        if "start" not in named:  # a part of a file that was looked at does not change
            self.fs.invalidate_cache()  # other machines write there
        try:
            return getattr(self.fs, method)(self.path, *arguments, **named)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except Exception as error:  # of any class: each file system has its own
            raise CheckpointError(f"{self} cannot be read: {type(error).__name__}: {error}.") from error

    exists = partialmethod(ask, "exists")
    is_dir = partialmethod(ask, "isdir")
    is_file = partialmethod(ask, "isfile")
    read_bytes = partialmethod(ask, "cat_file")

    def stat(self) -> os.stat_result:
        """Return the size of a file, and no more."""
        return os.stat_result((stat.S_IFREG, *(0,) * 5, self.ask("info")["size"], *(0,) * 3))

    def iterdir(self) -> Iterator["RemotePath"]:
        """Return what is in a folder; nothing if there is no such folder."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in self.ask("ls", detail=False):
                yield self / path.rstrip("/").rpartition("/")[2]

    def open(self, mode: str) -> Any:
        """Open a file, "rb" or "wb"."""
        # Each read asks for as much as it needs.
        return self.ask("open", mode, cache_type="none") if mode == "rb" else self._new_file("open", mode)

    def write_bytes(self, data: bytes) -> None:
        """Write a file; in a bucket, a process that ends meanwhile leaves the old one or the new one."""
        self._new_file("pipe_file", data)

    def _new_file(self, method: str, argument: Any) -> Any:
        try:
            return getattr(self.fs, method)(self.path, argument)
        except FileNotFoundError:  # a bucket has no folders; another file system may
            self.fs.makedirs(self.parent.path, exist_ok=True)
            return getattr(self.fs, method)(self.path, argument)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete a file."""
        with contextlib.suppress(*[FileNotFoundError] * missing_ok):
            self.fs.rm_file(self.path)

    def rmdir(self) -> None:
        """Delete an empty folder, where there are any."""
        with contextlib.suppress(Exception):  # of any class: a bucket may refuse it
            self.fs.rmdir(self.path)

    def remove(self) -> None:
        """Delete the folder."""
        # A recursive rm would take [1] in a name for a pattern. A store without folders refuses rmdir.
        for path in self.ask("find"):
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(path)
        with contextlib.suppress(OSError):
            for folder, _, _ in self.fs.walk(self.path, topdown=False):
                self.fs.rmdir(folder)


Place: TypeAlias = Path | RemotePath


def place_of(path: Any) -> Place:
    """Return the place of a path or a URL."""
    if not check.is_url(path):
        return path if isinstance(path, RemotePath) else Path(os.path.abspath(path))
    scheme, _, rest = str(path).partition("://")
    return Path(os.path.abspath(rest)) if scheme in ("file", "local") else RemotePath(str(path))


def staging(url: str, root: str = "runs") -> Path:
    """Return the folder of this machine for the rows of the "runs" at a URL, or for files "fetched" from it."""
    scheme, _, path = url.partition("://")
    path = os.path.normpath(f"/{path}")
    return cache_folder(root).absolute() / re.sub(r"\W", "_", scheme) / path.lstrip("/")


def size_of(path: Place) -> int:
    """Return the size of a file; refuse what is none, such as a link to a device, which may have no end."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError(f"{path} cannot be read: it is no file.")
    return info.st_size


def read_into(path: Place, offset: int, data: memoryview) -> int:
    """Read the bytes of a file from an offset on; return how many there were."""
    if isinstance(path, RemotePath):  # at once: file systems may open a file as one object for all threads
        # A file system that opens a file for it would read further, to have the next bytes at hand.
        exactly = {} if path.fs.async_impl else {"cache_type": "none"}
        found = path.ask("cat_file", start=offset, end=offset + len(data), **exactly)
        data[: len(found)] = found
        return len(found)
    with path.open("rb") as file:
        file.seek(offset)
        return file.readinto(data)


def write(path: Place, data: bytes) -> None:
    """Write a file completely or not at all, and put it onto the disk."""
    with replacing(path) if isinstance(path, Path) else contextlib.nullcontext(path) as part:
        patiently(part.write_bytes, data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces an old one at the end of the block; after an error that stays."""
    part = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        yield part
        fsync(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    fsync(path.parent)


def remove(path: Place) -> None:
    """Delete a folder or a file, which may not exist."""
    if isinstance(path, RemotePath):
        path.remove()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fsync(path: Place) -> None:
    """Put a file, or the names in a folder, onto the disk; in a bucket, nothing is left to do."""
    if isinstance(path, RemotePath):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems sync names automatically, and refuse the call.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(handle)


def patiently(work: Callable, *arguments: Any) -> Any:
    """Return `work(*arguments)`, tried again where a network file system asks for patience."""
    for wait in _WAITS_S:
        try:
            return work(*arguments)
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
            _logger.warning("%s; trying again in %.1f s.", error, wait)
        time.sleep(wait * random.uniform(1.0, 1.5))  # several processes do not come back at once
    return work(*arguments)


class FolderLock:
    """Holds a folder, which is created if it does not exist, until it is closed or the process ends.

    A CheckpointError is raised if another training holds it, or nothing can be written there. A folder `of_run` that
    is on a disk need not be written: the first row raises. The `number` is in no other training's claim.
    """

    def __init__(self, folder: Place, *, of_run: bool = False) -> None:
        # Checkpoints may be in the run's folder itself, so the two have different locks.
        self.folder, self._path = folder, _lock_in(folder, of_run=of_run)
        self.number, self.noted = secrets.token_hex(8), dict[str, Any]()
        self._file: TextIO | None = None  # that is locked; where there are no locks, there is a claim
        # Before the file is opened: closing it again would release the lock.
        if str(self._path) in _held:
            raise CheckpointError(
                f"Two {'fits' if of_run else 'ModelCheckpoints'} of this program would write to {folder}. Wait for the "
                "one that continues, or pass another folder."
            )
        if "cache::" in str(folder):
            raise CheckpointError(
                f"{folder} is read through a cache, which does not show what other processes write. Pass "
                f"{str(folder).rpartition('cache::')[2]!r}."
            )
        try:
            if isinstance(self._path, Path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                file = self._path.open("a+")
                self._file = file if self._locks(file) else file.close()
            if self._file is None:
                self.note(**read_claim(folder, of_run=of_run))
        except CheckpointError:
            raise
        except Exception as error:  # of any class: each file system has its own
            if of_run and isinstance(self._path, Path):
                return
            raise CheckpointError(
                f"No checkpoint can be written in {folder}: {type(error).__name__}: {error}. Pass another "
                "Trainer(default_root_dir=...) or ModelCheckpoint(dirpath=...), or Trainer(enable_checkpointing=False)."
            ) from error
        _held[str(self._path)] = self

    def _locks(self, file: TextIO) -> bool:
        """Return whether a folder on a disk is locked now; some file systems have no locks."""
        try:
            import fcntl

            # Of the process: one that it has forked does not hold it as well.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # a system without such locks
            return False
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            file.close()
            raise CheckpointError(
                f"{self.folder} is in use by {holder}. Two trainings cannot write to one folder: end that one, or pass "
                "another Trainer(default_root_dir=...)."
            ) from error
        except OSError as error:
            if (device := os.fstat(file.fileno()).st_dev) not in _without_locks:
                _without_locks.add(device)
                text = "%s is on a file system without locks (%s): see to it that no other training writes there."
                _logger.warning(text, self.folder, error)
            return False
        try:
            file.write(" " * 8192)  # more than is there: a full disk is known before the first step
            file.flush()
            file.truncate(0)
            file.write(_holder())
            file.flush()
        except OSError:
            if self._path.name != RUN_LOCK:
                with contextlib.suppress(OSError):
                    file.close()  # now: closed later, it would release a lock of this process
                raise
        return True

    def check(self) -> None:
        """Refuse a folder that another training has claimed meanwhile."""
        claim = read_claim(self.folder, of_run=self._path.name == RUN_LOCK)
        if claim.get("number") not in (None, self.number):
            raise CheckpointError(
                f"{self.folder} was taken by {claim.get('holder')}, which began later. Two trainings cannot write to "
                "one folder: end one of them, or pass it another Trainer(default_root_dir=...)."
            )

    def note(self, **noted: Any) -> None:
        """Note something in the claim for those that begin after it; a lock has no notes."""
        self.noted |= noted
        if self._file is None:
            claim = {**self.noted, "number": self.number, "holder": _holder()}
            write(self._path, json.dumps(claim).encode())

    def close(self) -> None:
        """Release the folder."""
        if _held.pop(str(self._path), None) is not None and self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def _lock_in(folder: Place, *, of_run: bool = False) -> Place:
    name = RUN_LOCK if of_run else ".lock"
    return folder / name if isinstance(folder, RemotePath) else Path(os.path.realpath(folder), name)


def held(folder: Place, *, of_run: bool = False) -> FolderLock | None:
    """Return the lock of this process on a folder."""
    return _held.get(str(_lock_in(folder, of_run=of_run)))


def check_claims(path: Place) -> None:
    """Refuse to write below a folder that this process had claimed, and another training has claimed since."""
    for lock in list(_held.values()):
        if str(path).startswith(f"{lock.folder}/"):
            lock.check()


def read_claim(folder: Place, *, of_run: bool = False) -> dict[str, Any]:
    """Return what the claim to a folder says; nothing if there is none, or this process has a lock instead."""
    path = _lock_in(folder, of_run=of_run)
    lock = _held.get(str(path))
    if lock is None or lock._file is None:  # to close a file that this process has locked would release the lock
        with contextlib.suppress(OSError, ValueError):  # a lock's file has another text
            claim = json.loads(path.read_bytes())
            items = claim.items() if isinstance(claim, dict) else ()
            return {key: x for key, x in items if type(x) is _KINDS.get(key)}
    return {}


def _holder() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
