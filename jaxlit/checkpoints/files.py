"""Checkpoints on the disk: written whole or not at all, verified before they are read.

A checkpoint is a folder: `arrays/` as orbax writes them, `state.json` for all that is no array, and `MANIFEST.json`,
written last. It holds data only: nothing in it is imported, called or unpickled.
"""

import json
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit.checkpoints import manifest
from jaxlit.checkpoints.folder_lock import PROBE
from jaxlit.checkpoints.schema import check_state
from jaxlit.distributed.exchange import agree
from jaxlit.errors import ArgumentError, CheckpointError, did_you_mean

FOLDER = "checkpoints"  # in a run's folder
_STATE, _ARRAYS = "state.json", "arrays"
_NAME = re.compile(r"step_(\d{8,15})(-[\w=.,+-]+)?")
_TEMPORARY, _TRASH = ".tmp-", ".trash-"
_KEY = re.compile(r"key<\w+>")  # how the dtype of random keys is written; their data are uint32
_LEFT = re.compile(r"\.(tmp|trash)-step_\d{8,15}.*-[0-9a-f]{8}")  # by a crash
_REPLACED = re.compile(r"(step_\d{8,15}.*)-replaced_[0-9a-f]{8}")


def name_of(step: int, suffix: str = "") -> str:
    """Return the name of the checkpoint of an optimizer step."""
    return f"step_{step:08d}{suffix}"


def step_of(path: Path) -> int | None:
    """Return the optimizer step in a checkpoint's name, None if it is no such name."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


# Reading ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        path: Its folder.
        state: What is no array, see `jaxlit.loop.snapshot`.
    """

    path: Path
    state: dict[str, Any]

    @property
    def specs(self) -> list[tuple[str, tuple[int, ...], str]]:
        """The (name, shape, dtype) of each array."""
        try:
            for _, _, dtype in self.state["arrays"]:
                if not _KEY.fullmatch(dtype):
                    jnp.dtype(dtype)
        except TypeError as error:
            raise CheckpointError(f"{self.path}: {_STATE} has an array of {dtype!r:.40}, which is no dtype.") from error
        return [(name, tuple(shape), dtype) for name, shape, dtype in self.state["arrays"]]

    def arrays(self, wanted: Mapping[int, Any]) -> dict[int, Any]:
        """Read some of the arrays, each straight into its sharding.

        Args:
            wanted: By index in `specs`: a `jax.ShapeDtypeStruct` with a sharding, or None to get a numpy array.

        Raises:
            CheckpointError: What is stored is not what `specs` says.
        """
        from orbax.checkpoint import v1 as ocp

        folder, specs = self.path / _ARRAYS, self.specs
        stored = [i for i, (_, shape, _) in enumerate(specs) if np.prod(shape, dtype=np.int64)]
        try:
            # What has no elements is not stored.
            empty = {i: np.zeros(specs[i][1], specs[i][2]) for i in wanted if i not in stored}
            held = ocp.metadata(str(folder)).metadata
            for i in stored:
                # Before anything is allocated: what is on the disk may not ask for more than its shape.
                found, (name, shape, dtype) = held[str(i)], specs[i]
                kind = "uint32" if _KEY.fullmatch(dtype) else dtype
                chunk = getattr(found.storage_metadata, "chunk_shape", None) or shape
                sound = len(chunk) == len(shape) and not any(np.greater(chunk, shape))
                if tuple(found.shape) != shape or str(found.dtype) != kind or not sound:
                    stored_as = f"{found.dtype}{list(found.shape)}"
                    raise CheckpointError(f"{self.path}: {name} is stored as {stored_as}, not as {kind}{list(shape)}.")
            target: dict[str, Any] = {str(i): ocp.PLACEHOLDER for i in stored}
            for i in wanted.keys() & set(stored):
                target[str(i)] = np.zeros(specs[i][1], specs[i][2]) if wanted[i] is None else wanted[i]
            loaded = ocp.load(str(folder), target) if set(stored) & set(wanted) else {}
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self.path}: its arrays cannot be read: {error}") from error
        return {i: loaded[str(i)] if i in stored else empty[i] for i in wanted}


def read(path: Path) -> Checkpoint:
    """Verify a checkpoint and return it; in several processes all must come here.

    Raises:
        CheckpointError: It is damaged, incomplete, or of a newer format.
    """
    path, state = Path(os.path.abspath(path)), {}
    problem: CheckpointError | None = None
    try:
        # One process reads the files: the others would only read the same ones.
        manifest.verify(path, hashes=jax.process_index() == 0)
        state = manifest.read_json(path / _STATE)
        check_state(state, f"{path / _STATE}: the state")
    except CheckpointError as error:
        problem = error
    raise_together(f"verifying {path.name}", problem)
    return Checkpoint(path, state)


def raise_together(topic: str, problem: CheckpointError | None) -> None:
    """Raise in every process what one of them has found; all must come here.

    Args:
        topic: What it is about, for messages.
        problem: What this process has found.

    Raises:
        CheckpointError: A process has found something.
    """
    told = agree(topic, None if problem is None else str(problem))
    if found := next(filter(None, told), None):  # the same in every process
        raise problem if str(problem) == found and problem is not None else CheckpointError(found)


def candidates(folder: Path) -> list[Path]:
    """Return what is named like a checkpoint in a folder, the one written last first.

    Those that do not tell when they were written come before all: whoever looks for the newest says what is wrong.
    """
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None]
    orders = {path: order if (order := manifest.order_of(path)) is not None else math.inf for _, path in found}
    return [path for _, path in sorted(found, key=lambda x: (orders[x[1]], x[0], x[1].name), reverse=True)]


def last_order(folder: Path) -> int:
    """Return the order of the checkpoint that was written last in a folder, 0 if there is none."""
    return max((manifest.order_of(path) or 0 for path in candidates(folder)), default=0)


def folder_of(path: Path) -> Path:
    """Return the folder with the checkpoints of a run, given it or the run's own."""
    return path / FOLDER if (path / FOLDER).is_dir() else path


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint of a folder that verifies, and why newer ones do not.

    Raises:
        CheckpointError: There are some, and none of them verifies.
    """
    skipped: list[str] = []
    tried: list[str] = []
    # While one is read, a training may replace it by a newer one: then there is another list.
    while names := [x for x in agree("the checkpoints", [p.name for p in candidates(folder)])[0] if x not in tried]:
        for name in names:
            tried.append(name)
            try:
                return read(folder / name), skipped
            except CheckpointError as error:
                skipped.append(str(error))
    if skipped:
        raise CheckpointError(
            f"None of the {len(skipped)} checkpoints in {folder} can be used:\n  " + "\n  ".join(skipped) + "\n"
            "Training does not start from scratch beside them. Restore one from a copy, move them away, or pass "
            "another Trainer(default_root_dir=...)."
        )
    return None, skipped


def locate(path: str | Path, argument: str) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint at a path: it, or the newest one of a run's folder that verifies.

    Args:
        path: A checkpoint, a run's folder or a folder of checkpoints.
        argument: Where it was given, for messages.

    Returns:
        The checkpoint, and why newer ones of the folder were passed over.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    where, missing = Path(path), ""
    if (where / manifest.MANIFEST).exists() or step_of(where) is not None:
        if where.exists():
            return read(where), []
    elif where.is_dir():
        found, skipped = newest(folder_of(where))
        if found is not None:
            return found, skipped
    near = where
    while not near.is_dir():
        missing, near = near.name, near.parent
    names = ", ".join(p.name for p in candidates(folder_of(near))[:5])
    there = f" In {near} there are: {names}." if names else ""
    if near != where:
        there = f" There is no {missing!r} in {near}.{did_you_mean(missing, [p.name for p in near.iterdir()])}{there}"
    raise CheckpointError(f"{argument}: {str(path)!r} is no checkpoint and no folder that holds one.{there}")


# Writing ---------------------------------------------------------------------------------------------


class Saving:
    """A checkpoint that is being written.

    Attributes:
        path: Where it will be.
        seconds: How long writing it took.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, 0.0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, finish: Any) -> None:
        """Run `finish` in a thread."""

        def run() -> None:
            begun = time.monotonic()
            try:
                finish()
            except BaseException as error:
                self._error = error
            self.seconds = time.monotonic() - begun

        self._thread = threading.Thread(target=run, name="jaxlit-checkpoint")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it is written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it is written; in several processes all must come here.

        Raises:
            CheckpointError: It could not be written; what was there before is as it was.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        raise_together("the checkpoint is written", None if error is None else _unwritten(self.path, error))


def save(path: Path, arrays: Mapping[int, jax.Array], state: Mapping[str, Any], order: int) -> Saving:
    """Write a checkpoint; in several processes all must come here, with the same arguments.

    The arrays may be overwritten as soon as this returns. What stands at `path` stays until the new one is there.

    Args:
        path: Its folder.
        arrays: By index in `state["arrays"]`; those without elements are left out.
        state: JSON values.
        order: A number that is larger than those of the checkpoints that are there.

    Raises:
        ArgumentError: Something else than a checkpoint stands at `path`.
        CheckpointError: It cannot be begun.
    """
    from orbax.checkpoint import v1 as ocp

    path = Path(os.path.abspath(path))
    leads, token, problem = jax.process_index() == 0, secrets.token_hex(4), None
    if "\\" in str(path) and os.sep == "/":  # which is a separator to the library that writes the arrays
        raise ArgumentError(f"{path} has a backslash in its name. Write checkpoints to another folder.")
    is_empty = path.is_dir() and not any(path.iterdir())
    # By its name it is one that was damaged.
    if path.exists() and not ((path / manifest.MANIFEST).exists() or is_empty or step_of(path) is not None):
        raise ArgumentError(f"{path} is no checkpoint, and would be overwritten. Pass another path.")
    token = agree("the checkpoint's temporary name", token)[0]
    temporary = path.parent / f"{_TEMPORARY}{path.name}-{token}"
    saving = Saving(path)
    text = json.dumps(state, separators=(",", ":")).encode()
    if len(text) > manifest.MOST_JSON:
        raise CheckpointError(
            f"The state beside the arrays has {len(text)} bytes as JSON, and only {manifest.MOST_JSON} are read again. "
            "Keep less in state_dict, and large hyperparameters in files."
        )
    try:
        if leads:
            temporary.mkdir(parents=True)
    except OSError as error:
        problem = _unwritten(path, error)
    raise_together("the checkpoint's folder", problem)
    context = ocp.Context()
    # Weights hardly compress, and the time would be the loop's on a machine with few cores.
    context.array.saving.use_compression = False
    # In the background, a folder that cannot be made would leave its threads waiting for ever.
    context.asynchronous.create_directories_asynchronously = False
    stored = {str(i): x for i, x in arrays.items() if x.size}
    try:
        with context:
            response = ocp.save_async(str(temporary / _ARRAYS), stored)
    except Exception as error:
        _discard(temporary)
        raise _unwritten(path, error) from error

    def finish() -> None:
        try:
            response.result()
            if leads:
                manifest.write(temporary / _STATE, text)
                manifest.seal(temporary, order)
                _put(temporary, path, token)
                # Its files were read back for their hashes just now: to read them again would only take the cores.
                manifest.verify(path, hashes=False)
        except BaseException:
            if leads:
                _discard(temporary)
            raise

    saving.start(finish)
    return saving


def remove(path: Path) -> None:
    """Delete a checkpoint; a crash on the way leaves it whole, or nothing that is taken for one."""
    if path.exists():
        trash = path.parent / f"{_TRASH}{path.name}-{secrets.token_hex(4)}"
        os.rename(path, trash)
        shutil.rmtree(trash)


def sweep(folder: Path) -> None:
    """Delete what crashes have left in a folder of checkpoints."""
    for path in folder.iterdir() if folder.is_dir() else ():
        replaced = _REPLACED.fullmatch(path.name)
        if _LEFT.fullmatch(path.name) or (replaced and (folder / replaced[1] / manifest.MANIFEST).exists()):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(PROBE):
            path.unlink(missing_ok=True)


def _put(temporary: Path, path: Path, token: str) -> None:
    """Give a written checkpoint its name; one that has it already is deleted afterwards."""
    old = None
    if path.exists():
        old = path.with_name(f"{path.name}-replaced_{token}")  # found by a resume if this is the end
        manifest.patiently(os.rename, path, old)
    manifest.patiently(os.rename, temporary, path)
    manifest.fsync(path.parent)
    if old is not None:
        remove(old)


def _discard(temporary: Path) -> None:
    # Writers of the library that are still at work may make the folder again.
    for wait in (0.0, 0.02, 0.1):
        time.sleep(wait)
        shutil.rmtree(temporary, ignore_errors=True)


def _unwritten(path: Path, error: BaseException) -> CheckpointError:
    what = str(error).strip() or type(error).__name__
    found = CheckpointError(
        f"The checkpoint {path} could not be written: {what.splitlines()[0].rstrip('.')}. Earlier ones are as they "
        "were. Free the disk, or pass another folder."
    )
    found.__cause__ = error
    return found
