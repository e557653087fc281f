"""The files of a checkpoint that each process has written: it hashes them, and process 0 seals those of all.

A process writes its hashes to a file in the temporary folder of the checkpoint, and then sends process 0 a short
message. Only this goes through the coordinator of jax: many hashes would be too much for it.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import jax

from jaxlit.checkpoints import manifest
from jaxlit.checkpoints.files import ARRAYS, LOADERS, loaders_of
from jaxlit.distributed.exchange import forget, received, send, sent, shared_by_first
from jaxlit.errors import ProcessError


def hand_over(folder: Path, token: str, loaders: bytes) -> None:
    """Write the states of this process's loaders, and give process 0 the hashes of this process's files.

    Args:
        folder: The temporary folder, which has the arrays.
        token: Its token.
        loaders: The states, as JSON.

    Raises:
        OSError: The disk is full, or the like.
    """
    (folder / LOADERS).mkdir(exist_ok=True)
    manifest.write(folder / loaders_of(jax.process_index()), loaders)
    text = json.dumps(manifest.on_disk(folder, _written(folder)))
    manifest.patiently(_hashes(folder, jax.process_index()).write_text, text)
    send(f"saved/{token}", "")


def give_up(token: str, error: BaseException) -> None:
    """Send the other processes the reason why this one cannot write its part."""
    if jax.process_count() > 1:
        with contextlib.suppress(Exception):  # the error that led here is the one to raise
            send(f"saved/{token}", str(error).strip() or type(error).__name__)


def problem_of(token: str) -> str | None:
    """Return the problem of a process that cannot write its part of a checkpoint, None if all can so far."""
    return next((f"process {i}: {text}" for i, text in sent(f"saved/{token}").items() if text), None)


def collect(folder: Path, token: str) -> dict[str, Any]:
    """Return in process 0 what the manifest says of the arrays' files of all processes; nothing if there is only one.

    Raises:
        ProcessError: Another process could not hand over its files.
        OSError: A file cannot be read.
    """
    if jax.process_count() == 1:
        return {}
    entries = manifest.on_disk(folder, _written(folder))  # while the others hash theirs
    for process, problem in enumerate(received(f"saved/{token}"), 1):
        if problem:
            raise ProcessError(f"process {process}: {problem}")
        path = _hashes(folder, process)
        entries |= manifest.read_json(path)
        path.unlink()
    return entries


def outcome(token: str, problem: str) -> str:
    """Return in every process what process 0 found to be the problem of a checkpoint, nothing if it is written."""
    return shared_by_first(f"written/{token}", problem)


def forget_outcomes() -> None:
    """Delete the outcomes of earlier checkpoints; to be called once all processes have waited for these."""
    if jax.process_count() > 1 and jax.process_index() == 0:
        forget("written")


def _written(folder: Path) -> list[Path]:
    """Return the files that this process has written; what is in no process's folder is left to process 0."""
    # Each folder by its name: a listing of those of a thousand processes, made by all of them, would be a million.
    index, arrays = jax.process_index(), folder / ARRAYS
    folders = [*arrays.glob(f"*/ocdbt.process_{index}"), *arrays.glob(f"*/array_metadatas/process_{index}")]
    files = [path for found in folders for path in ([found] if found.is_file() else sorted(found.rglob("*")))]
    return [path for path in (*files, folder / loaders_of(index)) if path.is_file()]


def _hashes(folder: Path, process: int) -> Path:
    return folder / f".hashes_{process}.json"
