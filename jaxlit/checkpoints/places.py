"""Places of files: a path on a disk, or one in a bucket, which has the methods of `pathlib.Path` that are used here."""

import contextlib
import errno
import logging
import os
import random
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any, TypeAlias

from jaxlit import checks as check
from jaxlit.checks import cache_folder
from jaxlit.errors import ArgumentError, CheckpointError

_TRANSIENT = (errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT)
_WAITS_S = (0.1, 0.5, 2.0)
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


def check_url(name: str, value: Any, *, owner: str = "Trainer") -> Any:
    """Return a path, or a URL whose file system is installed; refuse any other URL."""
    if check.is_url(value):
        if re.search(r"://[^/@]*:[^/]*@", str(value)):
            raise ArgumentError(
                f"{owner}({name}=...) has a password in its URL, which would be printed. Give it to fsspec by the "
                "environment or its configuration files."
            )
        from fsspec.registry import get_filesystem_class

        for part in str(value).split("::"):
            try:
                get_filesystem_class(part.partition("://")[0])
            except (ImportError, ValueError) as error:
                remedy = " Pass a string: pathlib shortens URLs." if isinstance(value, Path) else ""
                raise ArgumentError(f"{owner}({name}={str(value)!r}) cannot be opened: {error}.{remedy}") from error
    return value


def staging(url: str, root: str = "runs") -> Path:
    """Return the folder of this machine for the rows of the "runs" at a URL, or for files "fetched" from it."""
    scheme, _, path = url.partition("://")
    path = os.path.normpath(f"/{path}")
    return cache_folder(root).absolute() / re.sub(r"\W", "_", scheme) / path.lstrip("/")


def fetched(url: Any) -> Path:
    """Return a file; that of a URL is fetched to this machine, unless it is there and has not changed."""
    source = place_of(check_url("url", url, owner="fsspec"))
    if isinstance(source, Path):
        return source if check.is_url(url) else Path(url)
    path = staging(str(url), "fetched")
    known = path.with_name(f".{path.name}.info")
    try:
        info = repr(source.ask("info"))  # with its size, and its time or hash
        if not (path.exists() and known.exists() and known.read_text() == info):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as part:
                source.ask("get_file", str(part))  # whose name differs among file systems
            known.write_text(info)
    except FileNotFoundError as error:
        raise CheckpointError(f"{url} cannot be read: there is no such file.") from error
    return path


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
