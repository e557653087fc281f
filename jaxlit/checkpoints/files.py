"""Checkpoints on the disk: their names and folders, and reading, before which they are verified.

A checkpoint is a folder: `arrays/` as orbax writes them, `state.json` for all that is no array, and `MANIFEST.json`,
written last. It holds data only: nothing in it is imported, called or unpickled.
"""

import math
import os
import re
import secrets
import shutil
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
from jaxlit.errors import ArgumentTypeError, CheckpointError, did_you_mean
from jaxlit.shown import shown

FOLDER = "checkpoints"  # in a run's folder
STATE, ARRAYS = manifest.STATE, "arrays"
_NAME = re.compile(r"step_(\d{8,15})(-[\w=.,+-]+)?")
TEMPORARY, _TRASH = ".tmp-", ".trash-"
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
            raise CheckpointError(f"{self.path}: {STATE} has an array of {dtype!r:.40}, which is no dtype.") from error
        return [(name, tuple(shape), dtype) for name, shape, dtype in self.state["arrays"]]

    def arrays(self, wanted: Mapping[int, Any]) -> dict[int, Any]:
        """Read some of the arrays, each straight into its sharding.

        Args:
            wanted: By index in `specs`: a `jax.ShapeDtypeStruct` with a sharding, or None to get a numpy array.

        Raises:
            CheckpointError: What is stored is not what `specs` says.
        """
        from orbax.checkpoint import v1 as ocp

        folder, specs = self.path / ARRAYS, self.specs
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
                _, shape, dtype = specs[i]
                host = None if wanted[i] is not None else np.zeros(shape, "uint32" if _KEY.fullmatch(dtype) else dtype)
                target[str(i)] = wanted[i] if host is None else host
            loaded = ocp.load(str(folder), target) if set(stored) & set(wanted) else {}
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self.path}: its arrays cannot be read: {error}") from error
        return {i: loaded[str(i)] if i in stored else empty[i] for i in wanted}


def read(path: Path) -> Checkpoint:
    """Verify a checkpoint and return it; in several processes all must come here.

    Raises:
        CheckpointError: It is damaged, incomplete, or of another format.
    """
    path, state = Path(os.path.abspath(path)), {}
    problem: CheckpointError | None = None
    try:
        # One process reads the files: the others would only read the same ones.
        manifest.verify(path, hashes=jax.process_index() == 0)
        state = manifest.read_json(path / STATE)
        check_state(state, f"{path / STATE}: the state")
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
    return max([0, *(manifest.order_of(path) or 0 for path in candidates(folder))])


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
        path: A checkpoint, a run's folder or a folder of checkpoints, or with `/best` or `/last` at the end.
        argument: Where it was given, for messages.

    Returns:
        The checkpoint, and why newer ones of the folder were passed over.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    if not isinstance(path, (str, Path)):
        raise ArgumentTypeError(f"{argument} takes a path, got {shown(path)}.")
    where, found, skipped, missing = Path(path), None, list[str](), ""
    which = where.name if where.name in ("best", "last") and where.parent.is_dir() and not where.exists() else ""
    where = where.parent if which else where
    if where.is_file():
        raise CheckpointError(
            f"{argument}: {str(path)!r} is a file, and a checkpoint of jaxlit is a folder. Weights of another library "
            "are read with it, and given to a module by nnx.update(module, state)."
        )
    if (where / manifest.MANIFEST).exists() or step_of(where) is not None:
        found = read(where) if where.exists() else None
    elif where.is_dir():
        found, skipped = newest(folder_of(where))
    if found is not None:
        return best_of(found) if which == "best" else found, skipped
    if which == str(path):
        raise CheckpointError(f'{argument}: {which!r} names no folder: pass "<run\'s folder>/{which}".')
    near = where
    while not near.is_dir():
        missing, near = near.name, near.parent
    names = ", ".join(p.name for p in candidates(folder_of(near))[:5])
    there = f" In {near} there are: {names}." if names else ""
    if near != where:
        place = f" in {near}" if near != Path() else ""
        there = (
            f" There is no folder {missing!r}{place}.{did_you_mean(missing, [p.name for p in near.iterdir()])}{there}"
        )
    raise CheckpointError(f"{argument}: {str(path)!r} is not a checkpoint, and contains none.{there}")


def best_of(newest: Checkpoint, key: str = "") -> Checkpoint:
    """Return the best checkpoint that the newest of a folder knows.

    Args:
        newest: The newest checkpoint.
        key: The `state_key` of the ModelCheckpoint that is asked first.

    Raises:
        CheckpointError: It knows none, or the best is damaged.
    """
    states = newest.state["callbacks"]
    for state in (states.get(key, {}), *states.values()):
        if isinstance(name := state.get("best_model"), str) and name:
            return read(newest.path.parent / Path(name).name)
    raise CheckpointError(
        f"{newest.path} knows no best checkpoint. Train with ModelCheckpoint(monitor=...), or pass 'last'."
    )


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
