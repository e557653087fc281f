"""Compiled programs in a folder, where a later process finds them instead of compiling again."""

import contextlib
import functools
import logging
import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxlit.cache_folder import cache_folder

MAX_BYTES = 2 * 2**30
_JAX_LEAST_SECONDS = 1.0  # of compiling, from which on jax stores a program by default: on a fast machine, almost none

_logger = logging.getLogger("jaxlit")
_ours: list[str | None] = [None]  # the folder that was set here; another one is the user's


def use_compile_cache(where: bool | str | Path) -> None:
    """Have jax store its programs from now on, unless the user has chosen a folder or switched jax's cache off.

    Args:
        where: A folder, True for `default_folder()`, False for none. Old entries are deleted down to `MAX_BYTES`.
    """
    config: Any = jax.config
    current, folder = config.jax_compilation_cache_dir, None
    if current not in (None, _ours[0]) or not config.jax_enable_compilation_cache:
        return
    if where is not False:
        try:
            folder = str(default_folder() if where is True else Path(where).expanduser().absolute())
            if folder != current:
                Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)  # only its owner may write code there
                _trim(Path(folder))
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            folder = None
            _warn(str(error))
    if folder != current:
        config.update("jax_compilation_cache_dir", folder)
        reset_cache()  # jax opens a folder once
        _ours[0] = folder
    if folder is not None and config.jax_persistent_cache_min_compile_time_secs == _JAX_LEAST_SECONDS:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def default_folder() -> Path:
    """Return the folder of compiled programs in the user's cache folder."""
    return cache_folder("compiled")


def _trim(folder: Path) -> None:
    """Delete the oldest entries down to `MAX_BYTES`; jax does so itself only with another package."""
    total, stats = 0, dict[Path, os.stat_result]()
    for file in folder.glob("*-cache"):  # as jax names its entries
        with contextlib.suppress(OSError):  # another process may have deleted it
            stats[file] = file.stat()
    for file in sorted(stats, key=lambda file: stats[file].st_mtime, reverse=True):
        total += stats[file].st_size
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
