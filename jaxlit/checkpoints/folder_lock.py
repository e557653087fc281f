"""One training at a time writes its checkpoints into a folder."""

import contextlib
import os
import secrets
import socket
from pathlib import Path

from jaxlit.errors import CheckpointError

PROBE = ".probe-"  # of a file that is written to see whether one can be

_held: set[str] = set()  # folders that this process holds


class FolderLock:
    """Holds a folder until it is closed, or until the process ends in whatever way.

    Args:
        folder: The folder; it is made if it is not there.

    Raises:
        CheckpointError: Nothing can be written there, or another training holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._name = os.path.realpath(folder)
        # Before the file is opened: closing it again would let go of the lock.
        if self._name in _held:
            raise CheckpointError(
                f"Two ModelCheckpoints of this program would write to {folder}. Give one of them a dirpath of its own."
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f"{PROBE}{secrets.token_hex(4)}"
            probe.write_bytes(b"\0" * 4096)
            probe.unlink()
            self._file = (folder / ".lock").open("a+")
        except OSError as error:
            raise CheckpointError(
                f"No checkpoint can be written in {folder}: {error}. Pass another Trainer(default_root_dir=...) or "
                "ModelCheckpoint(dirpath=...), or Trainer(enable_checkpointing=False)."
            ) from error
        self._hold(folder)

    def _hold(self, folder: Path) -> None:
        try:
            import fcntl
        except ImportError:  # a system without such locks
            return
        try:
            # Of the process: one that it has forked does not hold it as well.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self._file.seek(0)
            other = self._file.read(200).strip() or "another process"
            self._file.close()
            raise CheckpointError(
                f"{folder} is in use by {other}. Two trainings cannot write to one folder: end that one, or pass "
                "another Trainer(default_root_dir=...)."
            ) from error
        except OSError:  # a file system without locks
            return
        _held.add(self._name)
        with contextlib.suppress(OSError):  # only for the message to others
            self._file.seek(0)
            self._file.truncate()
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._file.flush()

    def close(self) -> None:
        """Let go of the folder."""
        _held.discard(self._name)
        with contextlib.suppress(OSError):
            self._file.close()
