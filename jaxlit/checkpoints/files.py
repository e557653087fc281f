"""Checkpoints on the disk: their names and folders, and how they are verified and read.

A checkpoint is a folder: `arrays/` as orbax writes them, `state.json` for everything else, and `MANIFEST.json`, written
last. Of several processes, those after the first have the states of their loaders in a file each, in `loaders/`. It
contains data only: nothing in it is imported, called or unpickled.
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
import numpy as np

from jaxlit.checkpoints import manifest
from jaxlit.checkpoints.folder_lock import PROBE
from jaxlit.checkpoints.schema import check_loaders, check_state
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentTypeError, CheckpointError, did_you_mean
from jaxlit.shown import shown

FOLDER = "checkpoints"  # in a run's folder
STATE, ARRAYS, LOADERS = manifest.STATE, "arrays", "loaders"
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
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


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
    def weights_only(self) -> bool:
        """Whether it has the module's arrays alone, so that no training continues from it."""
        return all(name.startswith("module.") for name, _, _ in self.specs)

    @property
    def specs(self) -> list[tuple[str, tuple[int, ...], str]]:
        """The (name, shape, dtype) of each array."""
        return [(name, tuple(shape), dtype) for name, shape, dtype in self.state["arrays"]]

    @property
    def weights(self) -> list[tuple[str, tuple[int, ...], str]]:
        """The same, but a parameter's name is that of what validations saw in its place, such as an average."""
        seen = self.state.get("evaluated") or {}
        names = seen | {kept: name for name, kept in seen.items()}
        return [(names.get(name, name), shape, dtype) for name, shape, dtype in self.specs]

    def arrays(self, wanted: Mapping[int, Any]) -> dict[int, Any]:
        """Read some of the arrays, each straight into its sharding.

        Args:
            wanted: By index in `specs`: a `jax.ShapeDtypeStruct` with a sharding, or None to get a numpy array.

        Raises:
            CheckpointError: What is stored is not what `specs` says.
        """
        from orbax.checkpoint import v1 as ocp

        folder, specs = str(self.path / ARRAYS), self.specs
        arrays: dict[int, Any] = {}
        try:
            stored = ocp.metadata(folder).metadata
            target: dict[str, Any] = {}
            for i, (name, shape, dtype) in enumerate(specs):
                kind = "uint32" if _KEY.fullmatch(dtype) else dtype
                if not math.prod(shape):  # what has no elements is not stored
                    arrays[i] = np.zeros(shape, dtype)
                    continue
                # Before anything is allocated: the files may not ask for more than the shape.
                array, expected = stored[str(i)], f"{kind}{list(shape)}"
                found = f"{array.dtype}{list(array.shape)}"
                chunk = getattr(array.storage_metadata, "chunk_shape", None) or shape
                is_sound = len(chunk) == len(shape) and not any(np.greater(chunk, shape))
                if found != expected or not is_sound:
                    raise CheckpointError(f"{self.path}: {name} is stored as {found}, not as {expected}.")
                asked = wanted.get(i, ocp.PLACEHOLDER)
                target[str(i)] = np.zeros(shape, kind) if asked is None else asked
            if any(x is not ocp.PLACEHOLDER for x in target.values()):
                arrays |= {int(i): x for i, x in ocp.load(folder, target).items()}
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self.path}: its arrays cannot be read: {error}") from error
        return {i: arrays[i] for i in wanted}


def read(path: Path) -> Checkpoint:
    """Verify a checkpoint and return it; in several processes all must come here.

    Raises:
        CheckpointError: It is damaged, incomplete, or of another format.
    """
    path, state = Path(os.path.abspath(path)), {}
    problem: CheckpointError | None = None
    try:
        # Each process reads its share of the files.
        entries = manifest.verify(path, index=jax.process_index(), count=jax.process_count())
        state = manifest.read_json(path / STATE)
        check_state(state, f"{path / STATE}: the state")
        state["loaders"] = _loaders(path, state, entries)
    except CheckpointError as error:
        problem = error
    except OSError as error:  # the others would wait for this process
        problem = CheckpointError(f"{path} cannot be read: {error}.")
    team().same_error(f"verifying {path.name}", problem)
    return Checkpoint(path, state)


def loaders_of(process: int) -> str:
    """Return the name of the file with the states of the loaders of a process after the first."""
    return f"{LOADERS}/process_{process}.json"


def _loaders(path: Path, state: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of this process's loaders if as many processes as now have saved them, else of all."""
    index, same = jax.process_index(), state["processes"] == jax.process_count()
    names = [name for name in entries if name.startswith(f"{LOADERS}/") and (not same or name == loaders_of(index))]
    parts = [] if same and names else [state["loaders"]]
    for name in {str(entries[name]): name for name in names}.values():  # those that are equal are read once
        parts.append(manifest.read_json(path / name))
        check_loaders(parts[-1], f"{path / name}: the state")
    loaders = {}
    for stage in state["loaders"]:
        given = [part[stage] for part in parts if part[stage] is not None]
        states = [x for loader in given for x in loader["states"]]
        if same and not names:  # older checkpoints have the states of all processes in state.json
            states = states[index : index + 1]
        if given and not states:
            raise CheckpointError(f"{path} has no state of the {stage} loader of process {index}.")
        loaders[stage] = given[0] | {"states": states} if given else None
    return loaders


def candidates(folder: Path) -> list[Path]:
    """Return what is named like a checkpoint in a folder, the one written last first.

    Those whose manifest has no order come before all: reading them says what is wrong.
    """
    keys = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if (step := step_of(path)) is not None:
            order = manifest.order_of(path)
            keys[path] = (math.inf if order is None else order, step, path.name)
    return sorted(keys, key=lambda path: keys[path], reverse=True)


def last_order(folder: Path) -> int:
    """Return the order of the checkpoint that was written last in a folder, 0 if there is none."""
    return max([0, *(manifest.order_of(path) or 0 for path in candidates(folder))])


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint of a folder that verifies, and why newer ones do not.

    Raises:
        CheckpointError: There are some, and none of them verifies.
    """
    skipped: dict[str, str] = {}
    # While one is read, a training may replace it by a newer one: then there is another list.
    while names := [
        x for x in team().agree("the checkpoints", [p.name for p in candidates(folder)])[0] if x not in skipped
    ]:
        for name in names:
            try:
                return read(folder / name), [*skipped.values()]
            except CheckpointError as error:
                skipped[name] = str(error)
    if reasons := "\n  ".join(skipped.values()):
        raise CheckpointError(
            f"None of the {len(skipped)} checkpoints in {folder} can be used:\n  {reasons}\nTraining does not "
            "start again in their folder. Restore one from a copy, move them away, or pass another "
            "Trainer(default_root_dir=...)."
        )
    return None, []


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
    where, checkpoint, skipped = Path(path), None, list[str]()
    which = where.name if where.name in ("best", "last") and where.parent.is_dir() and not where.exists() else ""
    where = where.parent if which else where
    if where.is_file():
        raise CheckpointError(
            f"{argument}: {str(path)!r} is a file, and a checkpoint of jaxlit is a folder. Weights in a file are given "
            "to a module by jl.load_weights(module, path), or by fit(init_from=path)."
        )
    folder_of = lambda path: path / FOLDER if (path / FOLDER).is_dir() else path  # noqa: E731
    if (where / manifest.MANIFEST).exists() or step_of(where) is not None:
        checkpoint = read(where) if where.exists() else None
    elif where.is_dir():
        checkpoint, skipped = newest(folder_of(where))
    if checkpoint is not None:
        return best_of(checkpoint) if which == "best" else checkpoint, skipped
    near, hint = where, ""
    while not near.is_dir():
        near, hint = near.parent, did_you_mean(near.name, [p.name for p in near.parent.glob("*")])
    if names := ", ".join(p.name for p in candidates(folder_of(near))[:5]):
        hint += f" In {near} there are: {names}."
    raise CheckpointError(f"{argument}: {str(path)!r} is not a checkpoint, and contains none.{hint}")


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
    """Delete a checkpoint; a crash meanwhile leaves it complete, or nothing that a resume reads."""
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
