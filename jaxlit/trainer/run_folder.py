"""Where a Trainer's runs write, and which checkpoint a run begins with."""

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints import places
from jaxlit.checkpoints.files import FOLDER, MANIFEST, Checkpoint, best_of, locate, newest, read
from jaxlit.checkpoints.module_state import load_variables
from jaxlit.checkpoints.places import FolderLock, Place, RemotePath, place_of
from jaxlit.core.module import TrainModule, log_taken
from jaxlit.distributed.team import error_of_all, once_per_node, team
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError
from jaxlit.reporting.terminal import absolute, say, short_path
from jaxlit.texts import shown
from jaxlit.weights.loading import load_weights
from jaxlit.weights.sources import is_weights

_CLAIM = ".claim"  # of the newest run of this machine in the folder of a bucket
_logger = logging.getLogger("jaxlit")


class RunFolder:
    """The folder of a Trainer's runs, made by the first write: its default_root_dir, or a fresh `runs/<time>-<id>`."""

    def __init__(self, root: str | Path | None, *, is_trial: bool = False) -> None:
        self._argument, self._is_trial = root, is_trial
        place = None if root is None else place_of(root)  # whatever folder a program goes to later
        self.remote = place if isinstance(place, RemotePath) else None
        self.root: Path | None = places.staging(str(place)) if isinstance(place, RemotePath) else place
        self.known: Path | None = self.root
        self._is_ours = False
        self._copied: dict[str, tuple[int, int]] = {}  # the time and size of each file
        self._copying = threading.Lock()

    @property
    def home(self) -> Place:
        """Where the checkpoints of the run are, in their own folder."""
        return self.remote or absolute(self.path)

    @property
    def path(self) -> Path:
        """The folder; a fresh one gets its name when it is asked for."""
        if self.known is None:
            self.known = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        return self.known

    def fetch(self, remote: RemotePath) -> None:
        """Fetch the rows of a run in a bucket, unless this machine has written last."""
        claim, root, mark = places.read_claim(remote, of_run=True), self.path, self.path / _CLAIM
        if not claim or (mark.exists() and mark.read_text() == claim.get("number")):
            return
        for name in map(str, claim.get("files", ())):
            if root in Path(os.path.normpath(root / name)).parents:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # noted, and not copied any more
                    places.write(root / name, (remote / name).read_bytes())
                    self._copied[name] = _version(root / name)

    def copy(self) -> None:
        """Copy the files of process 0 that have changed, without checkpoints, to the bucket; a failure is a warning."""
        if self.remote is None or (lock := places.held(self.remote, of_run=True)) is None:
            return
        try:
            with self._copying:
                lock.check()
                names, noted = self._names(), lock.noted.get("files", [])
                if new := names.difference(noted):  # for the machine that fetches them
                    lock.note(files=[*noted, *sorted(new)])
                for name in sorted(names):
                    with contextlib.suppress(FileNotFoundError):  # it was deleted meanwhile
                        if (version := _version(self.path / name)) != self._copied.get(name):
                            # At once: the file may grow during the copy.
                            places.write(self.remote / name, (self.path / name).read_bytes())
                            self._copied[name] = version
        except Exception as error:  # of any class: each file system has its own
            _logger.warning(
                "The rows of the run could not be copied to %s (%s: %s). They are in %s.",
                *(self.remote, type(error).__name__, str(error).rstrip("."), self.path),
            )

    def _names(self) -> set[str]:
        """Return the files of the run on this machine, without checkpoints and what is hidden."""
        names, root = set[str](), self.path
        for folder, folders, files in os.walk(root):
            folders[:] = [x for x in folders if x != FOLDER and not x.startswith(".")]
            if MANIFEST in files or (places.RUN_LOCK in files and folder != str(root)):  # a checkpoint, or another run
                folders.clear()
                continue
            names |= {Path(folder, x).relative_to(root).as_posix() for x in files if not x.startswith(".")}
        return names

    def claim(self, files: Sequence[str], resume: Any, checkpoint: Checkpoint | None, *, fitting: bool) -> None:
        """Make the folder this Trainer's; a fit refuses that of another run, unless it continues it.

        `files` is what loggers would leave in it, `resume` is `Trainer(resume=...)`.
        """
        path = None if checkpoint is None else checkpoint.path
        if self.root is None:
            if self.known is None and fitting and resume is not None and isinstance(path, Path):
                self.known = path.parent.parent if path.parent.name == FOLDER else None  # a run continues in its folder
            if (processes := team()).size > 1:  # its name holds a time and a random number
                self.known = Path(processes.agree("the run's folder", str(self.path))[0])
            return
        check.require(
            not self.root.is_file(), "default_root_dir", str(self._argument), "takes a folder", owner="Trainer"
        )
        is_inside = str(path).startswith(f"{self.remote}/")
        if isinstance(path, Path):
            is_inside = Path(os.path.realpath(self.root)) in Path(os.path.realpath(path)).parents
        continues = resume == "auto" or is_inside
        roots = () if continues or self._is_ours else filter(None, (self.remote, self.root))
        used = [(at, name) for at in roots for name in ("metrics.csv", FOLDER, *files) if _is_used(at / name)]
        if used and fitting:
            place, name = used[0]
            where = f", in {place}," if place is self.root and self.remote is not None else ""
            raise ArgumentError(
                f"Trainer(default_root_dir={str(self._argument)!r}){where} holds {name} of another run. Pass "
                "Trainer(resume='auto') to continue it, another folder, or move that run away."
            )
        self._is_ours = self._is_ours or fitting or continues or not used

    def note(self, *, ended: bool) -> None:
        """Say to those that follow the run whether its training has ended."""
        with contextlib.suppress(Exception):  # of any class: each file system has its own
            if jax.process_index() == 0 and self.known is not None and not self._is_trial and self.home.is_dir():
                mark = self.home / places.ENDED
                places.write(mark, b"") if ended else mark.unlink(missing_ok=True)

    def hold(self) -> contextlib.ExitStack:
        """Keep other trainings out of a folder that was given, until this is closed; in all processes together."""
        with contextlib.ExitStack() as locks:
            with error_of_all("the run's folder"):
                if self.root is not None and jax.process_index() == 0:  # a fresh one has a name that no other run has
                    locks.callback(FolderLock(self.root, of_run=True).close)
                    if self.remote is not None:
                        locks.callback((lock := FolderLock(self.remote, of_run=True)).close)
                        try:
                            self.root.mkdir(parents=True, exist_ok=True)
                            (self.root / _CLAIM).write_text(lock.number)
                        except OSError as error:
                            raise CheckpointError(
                                f"The rows of {self.remote} cannot be written to {self.root}: {error}. Set "
                                "XDG_CACHE_HOME to a folder that can be written."
                            ) from error
            return locks.pop_all()


def resolve_checkpoint(
    wanted: Any, argument: str, purpose: str, callbacks: Sequence[Callback], folder: RunFolder
) -> Checkpoint | None:
    """Return the checkpoint that a run begins with, verified; None to start again.

    `wanted` is "auto", "last", "best" or a path, None for nothing, `argument` where it was asked for, and `purpose` is
    in the line that names it. The folders of the callbacks are searched.
    """
    if wanted is None:
        return None
    if not isinstance(wanted, (str, Path, RemotePath)):
        raise ArgumentTypeError(f"{argument} takes 'auto', 'last', 'best' or a path, got {shown(wanted)}.")
    savers: list[Any] = [c for c in callbacks if c.role == "checkpoint"]
    asked = min(savers, key=lambda c: c.monitor is None, default=None)  # as trainer.checkpoint_callback
    if wanted == "best" and getattr(asked, "monitor", None) is None and (folder.home / "best" / MANIFEST).exists():
        wanted = folder.home / "best"  # which `trainer.follow` keeps
    if wanted not in ("auto", "last", "best"):
        checkpoint, skipped = locate(wanted, argument)
    else:
        folders = list(dict.fromkeys([*(c.folder(folder.home) for c in savers), folder.home / FOLDER]))
        if wanted == "best" and asked is not None:
            folders = [asked.folder(folder.home)]
        elif wanted == "auto":  # a job that was killed before its first full checkpoint may have written weights
            weights = {c.folder(folder.home) for c in savers if getattr(c, "save_weights_only", False)}
            folders = [x for x in folders if x not in weights] or folders
        checkpoint, skipped = newest(*folders, progress=partial(_progress, purpose))
        if wanted == "best":
            if asked is not None and asked.best_model_path:
                checkpoint = read(place_of(asked.best_model_path))
            elif checkpoint is not None:  # saved by an earlier process: the newest checkpoint names it
                checkpoint = best_of(checkpoint, "" if asked is None else asked.state_key)
        if checkpoint is None:
            if wanted != "auto" or argument != "Trainer(resume=...)":
                where = " or ".join(map(str, folders))
                raise CheckpointError(f"{argument}: {wanted!r} was asked for, and there is no checkpoint in {where}.")
            if jax.process_index() == 0:
                where = " or ".join(map(str, map(short_path, folders)))
                say(f"resume: no checkpoint in {where}, starting from scratch")
            return None
    if checkpoint.weights_only and purpose == "resume":
        raise CheckpointError(
            f"{argument}: {checkpoint.path} has weights only, as ModelCheckpoint(save_weights_only=True) writes them. "
            "No training continues from it: begin a new one with fit(init_from=path)."
        )
    if folder.remote is not None:  # after it: the rows that it has seen were there before
        once_per_node(partial(folder.fetch, folder.remote), f"fetching {folder.remote}")
    log_taken(purpose, checkpoint, skipped)
    return checkpoint


def resolve_weights(
    init_from: Any, callbacks: Sequence[Callback], folder: RunFolder
) -> Callable[[TrainModule], object] | None:
    """Return what gives a module the weights that a fit begins with, None for nothing."""
    if callable(init_from):
        return init_from
    if is_weights(init_from):
        return partial(load_weights, source=init_from, strict=False)
    checkpoint = resolve_checkpoint(init_from, "Trainer.fit(init_from=...)", "init_from", callbacks, folder)
    # Without the states of random generators: they are of the training that wrote it.
    return checkpoint and partial(load_variables, checkpoint=checkpoint, strict=False, draws=False)


def _progress(purpose: str, checkpoint: Checkpoint) -> tuple[bool, int, int]:
    """Return how much a checkpoint has seen; for a resume one of weights only has seen nothing."""
    is_complete = purpose != "resume" or not checkpoint.weights_only
    return is_complete, checkpoint.state["position"]["total_batch_idx"], checkpoint.state["epoch"]


def _version(path: Path) -> tuple[int, int]:
    """Return the time and size of a file."""
    return path.stat().st_mtime_ns, path.stat().st_size


def _is_used(path: Place) -> bool:
    """Return whether a path is a file, or a folder that holds more than locks and what a crash has left."""
    return any(not inside.name.startswith(".") for inside in path.iterdir()) if path.is_dir() else path.exists()
