"""Compiled programs in a folder, where a later process finds them instead of compiling again."""

import contextlib
import functools
import logging
import os
import threading
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache  # jax has no public way to choose how entries are stored
from jax._src.compilation_cache_interface import CacheInterface

MAX_BYTES = 2 * 2**30
# Seconds of compiling from which on a program is stored; jax's default of 1 leaves out most programs of a small model.
_LEAST_SECONDS, _JAX_LEAST_SECONDS = 0.1, 1.0
_SUFFIX = "-cache"  # as jax names its own entries

_logger = logging.getLogger("jaxlit")


class CompileCache(CacheInterface):
    """Stores what jax compiles, each program in a file that appears complete.

    jax names an entry by a hash of the program, the versions of jaxlib and the driver, the flags, and the devices with
    the features of the CPU. Its own store writes in place, so that a killed process leaves half an entry, which is
    never replaced, and it needs another package to keep to a size.

    Args:
        folder: The folder, which is made. The least recently used entries are deleted down to `MAX_BYTES`.

    Raises:
        OSError: The folder cannot be made or read.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # an entry is code: only its owner may write one
        self._path = folder
        _trim(folder)

    def get(self, key: str) -> bytes | None:
        """Return an entry, None if there is none."""
        file = self._file(key)
        try:
            value = file.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # a folder that is only read has no order of use
            os.utime(file)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Store an entry, in place of a damaged one."""
        part = self._file(f"{key}.{os.getpid()}.{threading.get_ident()}")
        try:
            part.write_bytes(value)
            part.replace(self._file(key))
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            _warn(f"{self._path}: {error}")

    def _file(self, key: str) -> Path:
        return self._path / f"{key[-200:]}{_SUFFIX}"  # the hash is at the end; file systems allow 255 bytes


def use_compile_cache(where: bool | str | Path) -> None:
    """Have jax store its programs from now on, unless the user has chosen a folder or switched jax's cache off.

    Args:
        where: A folder, True for `default_folder()`, False for none.
    """
    config: Any = jax.config
    current = compilation_cache._cache
    chosen = config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache
    if chosen or where is False:
        if isinstance(current, CompileCache):
            compilation_cache._cache = None  # jax then looks for the user's
        return
    try:
        folder = default_folder() if where is True else Path(where).expanduser().absolute()
        if isinstance(current, CompileCache) and current._path == folder:
            return
        compilation_cache._cache = CompileCache(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        compilation_cache._cache = None
        _warn(str(error))
        return
    if config.jax_persistent_cache_min_compile_time_secs == _JAX_LEAST_SECONDS:
        config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)


def default_folder() -> Path:
    """Return the folder of compiled programs in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlit" / "compiled"


def _trim(folder: Path) -> None:
    """Delete the least recently used entries, and what killed processes left, down to `MAX_BYTES`."""
    total, used = 0, dict[Path, os.stat_result]()
    for file in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may have deleted it
            used[file] = file.stat()
    for file in sorted(used, key=lambda file: used[file].st_mtime, reverse=True):
        total += used[file].st_size
        if total > MAX_BYTES:
            file.unlink(missing_ok=True)


@functools.cache
def _warn(reason: str) -> None:
    """Warn, once a process."""
    _logger.warning(
        "Compiled programs cannot be stored: %s. Later starts compile again. Trainer(compile_cache=...) takes another "
        "folder, or False for none.",
        reason.rstrip("."),
    )
