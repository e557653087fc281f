"""The lock of a folder that one training at a time writes to; where there are no locks, as in buckets, a claim to it.

A claim is a file that each training writes when it begins. A training looks whether the claims are still its own before
it makes a folder a checkpoint, or copies its rows: of two the one that began last continues. Nothing is overwritten
until the other one notices, as the files of a checkpoint have names of their own.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
from pathlib import Path
from typing import Any, TextIO

from jaxlit.checkpoints.places import Place, RemotePath, write
from jaxlit.errors import CheckpointError

RUN_LOCK = ".run-lock"
_KINDS: dict[str, type] = {
    "number": str,
    "holder": str,
    "newest": list,
    "files": list,
    "ended": bool,
}  # what is in a claim
_ENDED = "a training that has ended"
_held: dict[str, "FolderLock"] = {}  # by the path of the lock, those of this process
_without_locks: set[int] = set()  # file systems that were warned of
_logger = logging.getLogger("jaxlit")


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
                self.note(**read_claim(folder, of_run=of_run) | {"ended": False})
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
        claim = _read(self._path) if self._file is None else {}
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

    def end(self) -> None:
        """Say to those that follow the training that it has ended, until another one begins there."""
        with contextlib.suppress(Exception):  # of any class: each file system has its own
            self.note(ended=True)
            if self._file is not None:
                self._file.truncate(0)
                self._file.write(_ENDED)
                self._file.flush()

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


def has_ended(folder: Place) -> bool:
    """Return whether the newest training in a folder has come to its end."""
    path = _lock_in(folder)
    with contextlib.suppress(OSError):
        return path.read_bytes() == _ENDED.encode() or _read(path).get("ended", False)
    return False


def check_claims(path: Place) -> None:
    """Refuse to write below a folder that this process had claimed, and another training has claimed since."""
    for lock in list(_held.values()):
        if str(path).startswith(f"{lock.folder}/"):
            lock.check()


def read_claim(folder: Place, *, of_run: bool = False) -> dict[str, Any]:
    """Return what the claim to a folder says; nothing if there is none."""
    path = _lock_in(folder, of_run=of_run)
    lock = _held.get(str(path))
    # To close a file that this process has locked would release the lock.
    return _read(path) if lock is None or lock._file is None else {}


def _read(path: Place) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):  # a lock's file has another text
        claim = json.loads(path.read_bytes())
        items = claim.items() if isinstance(claim, dict) else ()
        return {key: x for key, x in items if type(x) is _KINDS.get(key)}
    return {}


def _holder() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
