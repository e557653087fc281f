"""Checkpoints of a population: all members in one folder, written by the parts that write a Trainer's."""

import logging
import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax

from jaxlit.checkpoints import manifest
from jaxlit.checkpoints.files import Checkpoint, candidates, last_order, name_of, remove, sweep
from jaxlit.checkpoints.folder_lock import FolderLock
from jaxlit.checkpoints.writing import Saving, prepare
from jaxlit.errors import ArgumentError, CheckpointError
from jaxlit.populations.programs import Programs

_logger = logging.getLogger("jaxlit")

FOLDER = "population"  # next to a Trainer's checkpoints, which have the arrays of one module
_FORMAT = 1


class Saves:
    """Writes the checkpoints of a population, and keeps the newest.

    Args:
        root: The folder of the run.
        resume: Whether to continue from its newest checkpoint.

    Raises:
        ArgumentError: There are checkpoints, and `resume` is False.
        CheckpointError: Another training writes there, or no checkpoint can be used.
    """

    def __init__(self, root: Path, *, resume: bool) -> None:
        self.folder = Path(os.path.abspath(root)) / FOLDER  # the program may change its directory
        self._saving: Saving | None = None
        if not resume and candidates(self.folder):
            raise ArgumentError(
                f"jl.fit_many(default_root_dir={str(root)!r}) has the checkpoints of a population. Pass resume='auto' "
                "to continue it, or another folder."
            )
        self._lock = FolderLock(self.folder)
        sweep(self.folder)

    def save(self, state: dict[str, Any], step: int, arrays: Sequence[jax.Array]) -> None:
        """Begin to write a checkpoint after the previous one is complete; training continues meanwhile.

        Raises:
            CheckpointError: It cannot be written.
        """
        self.wait()
        draft = prepare(self.folder / name_of(step), lambda: {"format": _FORMAT, **state}, last_order(self.folder) + 1)
        self._saving = draft.write(dict(enumerate(arrays)))

    def wait(self) -> None:
        """Wait until the checkpoint is written, and delete older ones."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.wait()
            for path in candidates(self.folder):
                if path.name != saving.path.name:
                    remove(path)

    def close(self) -> None:
        """Release the folder after the current write."""
        if self._saving is not None:
            self._saving.join()
        self._lock.close()

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that verifies, or None.

        Raises:
            CheckpointError: There are some, and none of them can be used.
        """
        problems = list[str]()
        for path in candidates(self.folder):
            try:
                manifest.verify(path)
                state = manifest.read_json(path / manifest.STATE)
                if state.get("format") != _FORMAT or "variations" not in state:
                    raise CheckpointError(f"{path} is no checkpoint of a population that this version reads.")
            except CheckpointError as error:
                problems.append(str(error))
                _logger.warning("%s The checkpoint before it is used, if there is one.", error)
            else:
                return Checkpoint(path, state)
        if problems:
            raise CheckpointError(
                f"No checkpoint in {self.folder} can be used: {problems[0]} Restore one from a copy, or pass another "
                "jl.fit_many(default_root_dir=...)."
            )
        return None


def described(programs: Programs) -> dict[str, Any]:
    """Return what must be the same when a population is resumed, as JSON values: the members and their arrays."""
    count = len(programs.members)
    return {
        "variations": [dict(m.contents) for m in programs.members],
        "optimizer": programs.spec.optimizer_kind,
        "metrics": [m.name for m in programs.step_table.metrics.metrics],
        "arrays": [[name, [count, *shape], dtype] for name, shape, dtype in programs.spec.entries],
    }


def read_arrays(checkpoint: Checkpoint, programs: Programs) -> list[jax.Array]:
    """Return the arrays of a checkpoint, each read directly onto the devices of its members.

    Raises:
        CheckpointError: It was written for other members or another module.
    """
    for key, now in described(programs).items():
        was = checkpoint.state[key]
        if was == now:
            continue
        if isinstance(was, list):
            was, now = next((a, b) for a, b in zip_longest(was, now) if a != b)
        raise CheckpointError(
            f"{checkpoint.path} does not fit: of its {key} one is {was}, and now it is {now}. Resume with the "
            "variations, the module and the optimizer that it was written with, or pass another folder."
        )
    arrays = checkpoint.arrays(dict(enumerate(programs.array_specs)))
    return [arrays[i] for i in range(len(arrays))]
