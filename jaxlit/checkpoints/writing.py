"""Writes a checkpoint in the background, completely or not at all.

It is written under a temporary name, sealed by its manifest, and only then renamed: `prepare`, `Draft.write`, `Saving`.
Each process hashes the files that it has written into a file of the temporary folder, and sends process 0 a short
message, as many hashes would be too much for the coordinator of jax; process 0 seals the files of all. The end of
the file hides what orbax prints when a save fails: hundreds of lines, while the error that is raised names the cause.
"""

import contextlib
import json
import logging
import os
import secrets
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxlit.background import Background
from jaxlit.checkpoints import files
from jaxlit.checkpoints.files import ARRAYS, LOADERS, STATE, TEMPORARY, loaders_of, remove, step_of
from jaxlit.distributed.team import agree_or_raise, forget, received, send, sent, shared_by_first, team
from jaxlit.errors import ArgumentError, CheckpointError, JaxlitError, ProcessError, raised_everywhere


class Saving(Background[None]):
    """A checkpoint that is being written, by a thread for which the end of the process waits.

    `order` is a number larger than those of the checkpoints of the folder that were begun before.
    """

    def __init__(self, path: Path, order: int, token: str, finish: Callable[[], None]) -> None:
        super().__init__("jaxlit-checkpoint", finish, daemon=False)
        self.path, self.order, self._token = path, order, token
        self.was_awaited = False  # whether anybody has waited for it
        self._begun, self.seconds = time.monotonic(), 0.0  # how long writing took

    def wait(self) -> None:
        """Wait until it is written, and raise what went wrong; in several processes all must come here.

        Raises:
            CheckpointError: It could not be written, at every call; what was there before is as it was.
        """
        has_peers = team().size > 1
        error = self._wait_with_peers() if has_peers else self.join() and self.error
        self.was_awaited, unwritten = True, _unwritten(self.path, error) if error else None
        # Process 0 hears of the problems of all, and all raise what it says. After a failure of the job none waits.
        if has_peers and not team().over and (text := shared_by_first(f"written/{self._token}", str(unwritten or ""))):
            if unwritten is None or str(unwritten) != text:
                unwritten = CheckpointError(text)
            raise raised_everywhere(unwritten)
        if unwritten is not None:
            raise unwritten

    def _wait_with_peers(self) -> BaseException | None:
        """Wait, and return the error; the writer of a process whose disk is full leaves those of its peers waiting."""
        while not self.join(0.5):
            for process, problem in sent(f"saved/{self._token}").items():
                if problem:
                    return ProcessError(f"process {process}: {problem}")
            if team().seconds_left == 0.0:  # it waits for processes that have failed
                return ProcessError("the job ended before")
        return self.error

    def _run(self) -> None:
        super()._run()
        self.seconds = time.monotonic() - self._begun


@dataclass(frozen=True)
class Draft:
    """A checkpoint that all processes write together; its temporary folder exists."""

    path: Path  # where it will be
    order: int  # a number that is larger than those of the existing checkpoints
    token: str  # what no other temporary folder has in its name
    text: bytes = b""  # the state as JSON; of processes other than 0 only that of their loaders

    @property
    def temporary(self) -> Path:
        """The folder that it is written to."""
        return self.path.parent / f"{TEMPORARY}{self.path.name}-{self.token}"

    def write(self, arrays: Mapping[int, jax.Array]) -> Saving:
        """Begin to write; in several processes all must come here.

        The arrays may be overwritten as soon as this returns. An older checkpoint at `path` stays until the new one is
        complete. The arrays are by index in the state's "arrays"; those without elements are left out.
        """
        _count(1)  # hides orbax's messages until `show_messages` was called as often
        try:
            response = _begin_arrays(self.temporary / ARRAYS, arrays)
        except BaseException as error:
            _discard(self.temporary)
            show_messages(failed=True)
            if isinstance(error, Exception):
                raise _unwritten(self.path, error) from error
            raise

        def finish() -> None:
            leads = jax.process_index() == 0
            try:
                response.result()
                if leads:
                    self._seal()
                else:
                    hand_over(self.temporary, self.token, self.text)
            except BaseException as error:
                if jax.process_count() > 1:  # the other processes are sent the reason
                    with contextlib.suppress(Exception):  # the error that led here is the one to raise
                        send(f"saved/{self.token}", str(error).strip() or type(error).__name__)
                if leads:
                    _discard(self.temporary)
                show_messages(failed=True)
                raise
            show_messages(failed=False)

        saving = Saving(self.path, self.order, self.token, finish)
        saving.start()
        return saving

    def _seal(self) -> None:
        """Seal the files of all processes, and give the folder its name."""
        files.write(self.temporary / STATE, self.text)
        files.seal(self.temporary, self.order, collect(self.temporary, self.token))
        put(self.temporary, self.path, self.token)
        # Its files were read back for their hashes just now: to read them again would only take the cores.
        files.verify(self.path, hashes=False)


def prepare(
    path: Path, take: Callable[[], Mapping[str, Any]], order: int, compare: Any = None, has: bool = False
) -> Draft:
    """Make the temporary folder of a checkpoint; in several processes all must come here.

    `take` returns the state, as JSON values. It is called here so that an error of one process is that of all. `order`
    is larger than those of the existing checkpoints; that of process 0 counts. Where one process `has` something to
    compare, all of them `compare`.
    """
    draft, leads = Draft(Path(os.path.abspath(path)), order, secrets.token_hex(4)), jax.process_index() == 0
    problem = None
    try:
        state = take()
        draft = replace(draft, text=_as_json(state if leads else state["loaders"]))
        if leads:
            _check_path(draft.path)
            try:
                draft.temporary.mkdir(parents=True)
            except OSError as error:
                raise _unwritten(draft.path, error) from error
    except JaxlitError as error:
        problem = error
    try:
        # The only agreement: the folder is made before it, so that its problem is known. Orbax begins with collectives,
        # in which the others would wait for a process that has one.
        tokens, have = zip(*agree_or_raise("a checkpoint begins", [draft.token, has], problem), strict=True)
        if any(have):
            compare()
        if leads and jax.process_count() > 1:  # all processes have waited for earlier checkpoints
            forget("written")
    except BaseException:
        if leads:
            _discard(draft.temporary)
        raise
    return replace(draft, token=tokens[0])


def _check_path(path: Path) -> None:
    """Refuse a path whose files would be lost, or that cannot be written."""
    if "\\" in str(path) and os.sep == "/":  # which is a separator to the library that writes the arrays
        raise ArgumentError(f"{path} has a backslash in its name. Write checkpoints to another folder.")
    is_empty = path.is_dir() and not any(path.iterdir())
    # By its name it is one that was damaged.
    if path.exists() and not ((path / files.MANIFEST).exists() or is_empty or step_of(path) is not None):
        raise ArgumentError(f"{path} is no checkpoint, and would be overwritten. Pass another path.")


def _as_json(state: Mapping[str, Any]) -> bytes:
    text = json.dumps(state, separators=(",", ":")).encode()
    if len(text) > files.MOST_JSON:
        raise CheckpointError(
            f"The state without the arrays has {len(text)} bytes as JSON, and only {files.MOST_JSON} are read. "
            "Keep less in state_dict, and large hyperparameters in files."
        )
    return text


def _begin_arrays(folder: Path, arrays: Mapping[int, jax.Array]) -> Any:
    """Begin to write the arrays; returns what waits for them. They may be overwritten as soon as this returns."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    # Weights hardly compress, and the time would be the loop's on a machine with few cores.
    context.array.saving.use_compression = False
    # The devices that hold the same array write a part each: for a small one this costs a compiled slice a device.
    context.array.saving.min_slice_bytes_for_replica_parallel = 2**20
    # A GPU copies to page-locked memory 30 times as fast, of which jax gives a process 64 GB unless told otherwise.
    size = sum(shard.data.nbytes for x in arrays.values() for shard in x.addressable_shards)
    context.array.saving.enable_pinned_host_transfer = jax.default_backend() == "gpu" and size < 2**35
    # In the background, a folder that cannot be made would leave its threads waiting for ever.
    context.asynchronous.create_directories_asynchronously = False
    with context:
        stored = {str(i): x for i, x in arrays.items() if x.size}
        kinds = {i: str(x.dtype) for i, x in stored.items()}
        widened = {i: stored[i].astype(files.AS_BYTES[kind]) for i, kind in kinds.items() if kind in files.AS_BYTES}
        return ocp.save_async(str(folder), stored | widened)


def put(temporary: Path, path: Path, token: str) -> None:
    """Give a written checkpoint its name; one that has it already is deleted afterwards."""
    old = None
    if path.exists():
        old = path.with_name(f"{path.name}-replaced_{token}")  # a resume reads it if the process ends here
        files.patiently(os.rename, path, old)
    files.patiently(os.rename, temporary, path)
    files.fsync(path.parent)
    if old is not None:
        remove(old)


def _discard(temporary: Path) -> None:
    # Writers of the library that are still at work may make the folder again.
    for wait in (0.0, 0.02, 0.1):
        time.sleep(wait)
        with contextlib.suppress(OSError):  # the error that led here is the one to raise
            shutil.rmtree(temporary, ignore_errors=True)


def _unwritten(path: Path, error: BaseException) -> CheckpointError:
    reason = str(error).strip() or type(error).__name__
    unwritten = CheckpointError(
        f"The checkpoint {path} could not be written: {reason.splitlines()[0].rstrip('.')}. Earlier ones are as they "
        "were. Free the disk, or pass another folder."
    )
    if isinstance(error, OSError):  # its message is enough: its traceback through orbax would be pages
        error = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
    unwritten.__cause__ = error
    return unwritten


def hand_over(folder: Path, token: str, loaders: bytes) -> None:
    """Write the states of this process's loaders into a temporary folder, and give process 0 hashes of its files."""
    (folder / LOADERS).mkdir(exist_ok=True)
    files.write(folder / loaders_of(jax.process_index()), loaders)
    text = json.dumps(files.on_disk(folder, _written(folder)))
    files.patiently(_hashes(folder, jax.process_index()).write_text, text)
    send(f"saved/{token}", "")


def collect(folder: Path, token: str) -> dict[str, Any]:
    """Return in process 0 what the manifest says of the arrays' files of all processes; nothing if it is alone."""
    if jax.process_count() == 1:
        return {}
    entries = files.on_disk(folder, _written(folder))  # while the others hash theirs
    for process, problem in enumerate(received(f"saved/{token}"), 1):
        if problem:
            raise ProcessError(f"process {process}: {problem}")
        path = _hashes(folder, process)
        entries |= files.read_json(path)
        path.unlink()
    return entries


def _written(folder: Path) -> list[Path]:
    """Return the files that this process has written; what is in no process's folder is left to process 0."""
    # Each folder by its name: a listing of those of a thousand processes, made by all of them, would be a million.
    index, arrays = jax.process_index(), folder / ARRAYS
    folders = [*arrays.glob(f"*/ocdbt.process_{index}"), *arrays.glob(f"*/array_metadatas/process_{index}")]
    paths = [path for part in folders for path in (part, *sorted(part.rglob("*")))]
    return [path for path in (*paths, folder / loaders_of(index)) if path.is_file()]


def _hashes(folder: Path, process: int) -> Path:
    return folder / f".hashes_{process}.json"


_LATE_S = 5.0
_LOGGERS = ("absl", "asyncio")  # orbax's, and that of its event loops
_ORBAX = f"{os.sep}orbax{os.sep}"
_lock = threading.Lock()
_saves = 0
_previous = sys.unraisablehook


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    trace = record.exc_info[2] if record.exc_info else None
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))
    return not any(_ORBAX in path for path in (record.pathname, *frames))


def _unraisable(event: Any) -> None:
    # A write that has ended reports to the event loop that waited for it, which the failure of another has closed.
    if str(event.exc_value) != "Event loop is closed":
        _previous(event)


def show_messages(*, failed: bool) -> None:
    """Show orbax's messages unless another save hides them; after a failure later, as other writers have yet to end."""
    if failed:
        late = threading.Timer(_LATE_S, _count, [-1])
        late.daemon = True
        late.start()
    else:
        _count(-1)


def _count(change: int) -> None:
    global _saves, _previous
    with _lock:
        before, _saves = _saves, _saves + change
        if bool(before) == bool(_saves):
            return
        for logger in map(logging.getLogger, _LOGGERS):
            (logger.addFilter if _saves else logger.removeFilter)(_is_not_of_orbax)
        if _saves:
            _previous, sys.unraisablehook = sys.unraisablehook, _unraisable
        elif sys.unraisablehook is _unraisable:
            sys.unraisablehook = _previous
