"""The part of a checkpoint that each process writes next to the arrays, and how process 0 learns that it is there."""

import contextlib
from pathlib import Path

import jax

from jaxlit.checkpoints import manifest
from jaxlit.checkpoints.files import LOADERS, loaders_of
from jaxlit.distributed.exchange import tell_first, told_by_others
from jaxlit.errors import ProcessError


def hand_over(folder: Path, token: str, loaders: bytes) -> None:
    """Write the states of this process's loaders, and tell process 0.

    Args:
        folder: The temporary folder, which has the arrays.
        token: Its token.
        loaders: The states, as JSON.

    Raises:
        OSError: The disk is full, or the like.
    """
    (folder / LOADERS).mkdir(exist_ok=True)
    manifest.write(folder / loaders_of(jax.process_index()), loaders)
    tell_first(f"saved/{token}", "")


def give_up(token: str, error: BaseException) -> None:
    """Tell process 0 that this process cannot hand over its files."""
    with contextlib.suppress(Exception):  # the error that led here is the one to raise
        tell_first(f"saved/{token}", str(error).strip() or type(error).__name__)


def collect(token: str) -> None:
    """Wait in process 0 until all processes have handed over their files.

    Raises:
        ProcessError: Another process could not.
    """
    for process, problem in enumerate(told_by_others(f"saved/{token}") if jax.process_count() > 1 else (), 1):
        if problem:
            raise ProcessError(f"process {process}: {problem}")
