"""`Mirror`, which copies a run to a bucket: its hooks, what process 0 does, and what the thread that copies does."""

import contextlib
import logging
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlit import checks as check
from jaxlit.background import BackgroundQueue
from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.files import FOLDER, MANIFEST, TEMPORARY, order_of
from jaxlit.checkpoints.remote import MARK, check_url, connect, manifests, read_mark, staging, write
from jaxlit.distributed.team import once_per_node, team
from jaxlit.errors import CheckpointError, JaxlitError
from jaxlit.reporting.terminal import absolute, say

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")
_MOST_BYTES = 2**26  # of a file that is read at once, as it may grow during a copy
_PATIENCE_S = 7 * 24 * 3600.0  # a failure ends the wait


class Mirror(Callback):
    """Copy a run's folder to a bucket while training continues.

    A checkpoint is copied once it is complete, its manifest last, and deleted in the bucket once it is deleted locally.
    Other files are copied with each checkpoint and at the end, which waits for the copies.
    `Trainer(default_root_dir=url)` adds this callback, and continues from the bucket; as a callback, it copies a run
    from any folder, for example on a shared disk. A copy that fails ends training, or is a warning, by
    `ModelCheckpoint(on_save_error=)`.

    Args:
        url: The run's folder in the bucket: "gs://bucket/runs/net", or any URL that fsspec takes.

    Raises:
        ArgumentError: `url` is not a URL, or the package of its file system is not installed.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=jl.callbacks.Mirror("memory://runs/net"))
    """

    role = "mirror"
    in_fast_dev_run = False

    def __init__(self, url: str) -> None:
        check.require(check.is_url(url), "url", url, "takes a URL, for example 'gs://bucket/run'", owner="Mirror")
        self.url: str = check_url("url", url, owner="Mirror")
        self.exclusive = "URL", staging(url)
        self._queue: BackgroundQueue | None = None
        self._error: Exception | None = None
        self._printed = False

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Begin a fit, and print that a bucket has no locks."""
        self._error, self._run = None, absolute(trainer.run_dir)
        self._names = list[str]()  # of the local checkpoints, also deleted ones of this fit; the newest last
        self._manifests: dict[str, bytes | None] = {}  # in the bucket
        self._copied: dict[str, tuple[int, int]] = {}  # the time and size of other files
        if stage == "fit" and trainer.is_global_zero and not self._printed:
            self._printed = True
            say(f"{self._run} is copied to {self.url}: there are no locks, so no other training may write there")

    def on_load_checkpoint(self, trainer: "Trainer", module: "TrainModule", checkpoint: dict[str, Any]) -> None:
        """Remember which checkpoints were to be deleted when this one was written."""
        self._names += [name for state in checkpoint["callbacks"].values() for name in state.get("replaced", ())]

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Raise a CheckpointError if the bucket cannot be written; copy what an earlier process has not."""
        once_per_node(lambda: self._begin(trainer), f"opening {self.url}")

    def on_checkpoint_saved(self, trainer: "Trainer", module: "TrainModule", callback: Callback, path: Path) -> None:
        """Copy a checkpoint in the background."""
        self._check(trainer)
        if self._queue is None:
            return
        if path.parent == self._run / FOLDER:
            self._names.append(path.name)
        else:
            _logger.warning("%s is not in %s, and is not copied to %s.", path, self._run / FOLDER, self.url)
        if len(self._queue) < 2:  # a copy that has not begun copies this checkpoint as well
            self._queue.submit(self._copy)

    def due_in(self, step: int) -> int | None:
        """Return None: no step is due by its number."""

    def due_in_seconds(self) -> float | None:
        """Return 0 if a copy has failed."""
        return None if self._error is None else 0.0

    def on_safe_point(self, trainer: "Trainer", module: "TrainModule", epoch_over: bool, training_over: bool) -> None:
        """Raise or warn if a copy has failed."""
        self._check(trainer)

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Copy the rest, and wait for it, in all processes."""
        if stage != "fit":
            return
        try:
            self._end(trainer)
        finally:
            if not team().over:
                team().agree(f"copying to {self.url}", None, timeout=_PATIENCE_S)

    def _begin(self, trainer: "Trainer") -> None:
        """Open the bucket, and begin to copy what it lacks."""
        if not trainer.is_global_zero:
            return
        try:
            self._fs, self._base = connect(self.url)
            self._manifests = manifests(self._fs, f"{self._base}/{FOLDER}")
            mark, remote_mark = self._run / MARK, read_mark(self._fs, self._base)
            if any(self._manifests.values()) and not (mark.exists() and mark.read_text() == remote_mark):
                raise CheckpointError(
                    f"{self.url} holds another run. Pass Trainer(default_root_dir={self.url!r}, resume='auto') to "
                    "continue it, or another URL."
                )
            if not mark.exists():
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.write_text(secrets.token_hex(8))
            write(self._fs, f"{self._base}/{MARK}", mark.read_bytes())
        except JaxlitError:
            raise
        except Exception as error:  # of any class: each file system has its own
            raise self._failed(error) from error
        for saver in trainer.checkpoint_callbacks:
            paths = [*getattr(saver, "best_k_models", ()), getattr(saver, "last_model_path", "")]
            self._names += [Path(path).name for path in paths if Path(path).parent == self._run / FOLDER]
        self._names += [name for name, raw in self._manifests.items() if raw is None and name not in self._names]
        self._names.sort(key=lambda name: order_of(self._run / FOLDER / name) or 0)
        self._queue = BackgroundQueue("jaxlit-mirror", lambda error: setattr(self, "_error", error))
        self._queue.submit(self._copy)

    def _end(self, trainer: "Trainer") -> None:
        queue, self._queue = self._queue, None
        if queue is None:
            return
        try:
            queue.submit(self._copy)
            if not queue.wait_idle(2.0):
                say(f"waiting for copies to {self.url}")
            # After the failure of another process there is less time.
            while not queue.wait_idle(0.5) and team().seconds_left != 0.0:
                pass
        finally:
            queue.stop()
        self._check(trainer)

    def _check(self, trainer: "Trainer") -> None:
        error, self._error = self._error, None
        if error is None:
            return
        if any(getattr(c, "on_save_error", "raise") == "warn" for c in trainer.checkpoint_callbacks):
            _logger.warning("%s", self._failed(error))
        else:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.url} could not be written: {type(error).__name__}: {error}. Nothing is lost in {self._run}. The "
            "same command copies it, or pass another URL or a folder."
        )

    def _copy(self) -> None:
        """Copy other files and new checkpoints, and delete remote checkpoints that are deleted locally."""
        folder, names = self._run / FOLDER, list(self._names)
        self._copy_files()
        for name in reversed(names):
            self._copy_checkpoint(name)
        if names and (folder / names[-1]).exists():  # otherwise an even newer one is not copied yet
            for name in self._manifests.keys() & {x for x in names if not (folder / x).exists()}:
                try:
                    self._remove(name)
                except Exception as error:
                    _logger.warning("%s/%s/%s could not be deleted: %r", self.url, FOLDER, name, error)

    def _copy_checkpoint(self, name: str) -> None:
        """Copy a checkpoint unless the bucket has it, from links to its files: it may be deleted during the copy."""
        path, remote = self._run / FOLDER / name, f"{self._base}/{FOLDER}/{name}"
        links = path.with_name(f"{TEMPORARY}{name}-{secrets.token_hex(4)}")
        try:
            if (raw := (path / MANIFEST).read_bytes()) == self._manifests.get(name):
                return
            shutil.copytree(path, links, copy_function=os.link)
        except OSError:
            shutil.rmtree(links, ignore_errors=True)
            if (path / MANIFEST).exists():
                raise
            return  # it was deleted: there is a newer one
        try:
            if name in self._manifests:
                self._remove(name)
            self._manifests[name] = None
            files = [x for x in links.rglob("*") if x.is_file() and x != links / MANIFEST]
            self._fs.put([str(x) for x in files], [f"{remote}/{x.relative_to(links).as_posix()}" for x in files])
            write(self._fs, f"{remote}/{MANIFEST}", raw)
            self._manifests[name] = raw
        finally:
            shutil.rmtree(links, ignore_errors=True)

    def _remove(self, name: str) -> None:
        """Delete a checkpoint, its manifest first."""
        path = f"{self._base}/{FOLDER}/{name}"
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{path}/{MANIFEST}")
        # A recursive rm would take [1] in a name for a pattern. A store without folders refuses rmdir.
        for file in self._fs.find(path):
            self._fs.rm_file(file)
        with contextlib.suppress(OSError):
            for folder, _, _ in self._fs.walk(path, topdown=False):
                self._fs.rmdir(folder)
        del self._manifests[name]

    def _copy_files(self) -> None:
        """Copy the files that have changed and are in no checkpoint."""
        for folder, folders, names in os.walk(self._run):
            folders[:] = [x for x in folders if x != FOLDER and not x.startswith(".")]
            for path in (Path(folder, x) for x in names if not x.startswith(".")):
                name = path.relative_to(self._run).as_posix()
                try:
                    version = (path.stat().st_mtime_ns, path.stat().st_size)
                    if version == self._copied.get(name):
                        continue
                    content = path.read_bytes() if version[1] <= _MOST_BYTES else None
                except OSError:  # it was deleted meanwhile
                    continue
                write(self._fs, f"{self._base}/{name}", path if content is None else content)
                self._copied[name] = version
