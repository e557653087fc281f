"""One training at a time writes into a folder."""

import contextlib
import logging
import os
import secrets
import socket
from pathlib import Path
from typing import TextIO

from jaxlit.errors import CheckpointError

PROBE = ".probe-"  # of a file that is written to see whether one can be

_held: set[str] = set()  # folders that this process holds
_without_locks: set[int] = set()  # file systems that were warned of

_logger = logging.getLogger("jaxlit")


class FolderLock:
    """Holds a folder until it is closed, or until the process ends in whatever way.

    Args:
        folder: The folder; it is made if it is not there.
        of_run: Whether it is the folder of a run: the first write raises if nothing can be written there. Otherwise it
            is for checkpoints.

    Raises:
        CheckpointError: Nothing can be written there, or another training holds it.
    """

    def __init__(self, folder: Path, *, of_run: bool = False) -> None:
        # Checkpoints may be in the run's folder itself, so the two have different locks.
        self._name = os.path.join(os.path.realpath(folder), ".run-lock" if of_run else ".lock")
        self._file: TextIO | None = None
        # Before the file is opened: closing it again would let go of the lock.
        if self._name in _held:
            who = "Two fits" if of_run else "Two ModelCheckpoints"
            remedy = "Wait for the one that continues, or pass another folder"
            raise CheckpointError(f"{who} of this program would write to {folder}. {remedy}.")
        try:
            os.makedirs(os.path.dirname(self._name), exist_ok=True)
            if not of_run:
                probe = folder / f"{PROBE}{secrets.token_hex(4)}"
                probe.write_bytes(b"\0" * 4096)
                probe.unlink()
            self._file = Path(self._name).open("a+")  # noqa: SIM115
        except OSError as error:
            if of_run:
                return
            raise CheckpointError(
                f"No checkpoint can be written in {folder}: {error}. Pass another Trainer(default_root_dir=...) or "
                "ModelCheckpoint(dirpath=...), or Trainer(enable_checkpointing=False)."
            ) from error
        self._hold(folder, self._file)

    def _hold(self, folder: Path, file: TextIO) -> None:
        try:
            import fcntl
        except ImportError:  # a system without such locks
            return
        try:
            # Of the process: one that it has forked does not hold it as well.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            other = file.read(200).strip() or "another process"
            file.close()
            raise CheckpointError(
                f"{folder} is in use by {other}. Two trainings cannot write to one folder: end that one, or pass "
                "another Trainer(default_root_dir=...)."
            ) from error
        except OSError as error:
            if (device := os.stat(self._name).st_dev) not in _without_locks:
                _without_locks.add(device)
                _logger.warning(
                    "%s is on a file system without locks (%s): see to it that no other training writes there.",
                    *(folder, error),
                )
            return
        _held.add(self._name)
        with contextlib.suppress(OSError):  # only for the message to others
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()

    def close(self) -> None:
        """Let go of the folder."""
        if self._file is not None:
            _held.discard(self._name)
            with contextlib.suppress(OSError):
                self._file.close()
