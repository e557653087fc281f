"""Writes a checkpoint in the background, completely or not at all.

It is written under a temporary name, sealed by its manifest, and only then renamed.
"""

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxlit.background import Background
from jaxlit.checkpoints import manifest, quiet, shares
from jaxlit.checkpoints.files import ARRAYS, STATE, TEMPORARY, remove, step_of
from jaxlit.distributed.exchange import agree_or_raise
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentError, CheckpointError, JaxlitError, ProcessError, in_all


class Saving(Background[None]):
    """A checkpoint that is being written, by a thread for which the end of the process waits.

    Attributes:
        path: Where it will be.
        order: A number larger than those of the checkpoints of the folder that were begun before.
        seconds: How long writing it took.
        was_awaited: Whether anybody has waited for it.
    """

    def __init__(self, path: Path, order: int, token: str, finish: Callable[[], None]) -> None:
        super().__init__("jaxlit-checkpoint", finish, daemon=False)
        self.path, self.order, self._token, self.was_awaited = path, order, token, False
        self._begun, self.seconds = time.monotonic(), 0.0

    def wait(self) -> None:
        """Wait until it is written, and raise what went wrong; in several processes all must come here.

        Raises:
            CheckpointError: It could not be written, at every call; what was there before is as it was.
        """
        several = team().size > 1
        error = self._wait_for_others() if several else self.join() and self.error
        self.was_awaited, unwritten = True, _unwritten(self.path, error) if error else None
        # Process 0 hears of the problems of all, and all raise what it says. After a failure of the job none waits.
        if several and not team().over and (text := shares.outcome(self._token, str(unwritten or ""))):
            unwritten = in_all(unwritten if unwritten is not None and str(unwritten) == text else CheckpointError(text))
        if unwritten is not None:
            raise unwritten

    def _wait_for_others(self) -> BaseException | None:
        """Wait, and return the error; the writer of a process whose disk is full leaves those of the others waiting."""
        while not self.join(0.5):
            if (problem := shares.problem_of(self._token)) is not None:
                return ProcessError(problem)
            if team().seconds_left == 0.0:  # it waits for processes that have failed
                return ProcessError("the job ended before")
        return self.error

    def _run(self) -> None:
        super()._run()
        self.seconds = time.monotonic() - self._begun


@dataclass(frozen=True)
class Draft:
    """A checkpoint that all processes write together; its temporary folder is there.

    Attributes:
        path: Where it will be.
        order: A number that is larger than those of the checkpoints that are there.
        token: What no other temporary folder has in its name.
        text: The state as JSON; of processes other than 0 only that of their loaders.
    """

    path: Path
    order: int
    token: str
    text: bytes = b""

    @property
    def temporary(self) -> Path:
        """The folder that it is written to."""
        return self.path.parent / f"{TEMPORARY}{self.path.name}-{self.token}"

    def write(self, arrays: Mapping[int, jax.Array]) -> Saving:
        """Begin to write; in several processes all must come here.

        The arrays may be overwritten as soon as this returns. An older checkpoint at `path` stays until the new one is
        complete.

        Args:
            arrays: By index in the state's "arrays"; those without elements are left out.

        Raises:
            CheckpointError: It cannot be begun.
        """
        quiet.begin()
        try:
            response = _begin_arrays(self.temporary / ARRAYS, arrays)
        except BaseException as error:
            _discard(self.temporary)
            quiet.end(failed=True)
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
                    shares.hand_over(self.temporary, self.token, self.text)
            except BaseException as error:
                shares.give_up(self.token, error)
                if leads:
                    _discard(self.temporary)
                quiet.end(failed=True)
                raise
            quiet.end(failed=False)

        saving = Saving(self.path, self.order, self.token, finish)
        saving.start()
        return saving

    def _seal(self) -> None:
        """Seal the files of all processes, and give the folder its name."""
        manifest.write(self.temporary / STATE, self.text)
        manifest.seal(self.temporary, self.order, shares.collect(self.temporary, self.token))
        put(self.temporary, self.path, self.token)
        # Its files were read back for their hashes just now: to read them again would only take the cores.
        manifest.verify(self.path, hashes=False)


def prepare(path: Path, take: Callable[[], Mapping[str, Any]], order: int) -> Draft:
    """Make the temporary folder of a checkpoint; in several processes all must come here.

    Args:
        path: The checkpoint's folder.
        take: Returns the state, as JSON values. It is called here so that an error of one process is that of all.
        order: A number that is larger than those of the checkpoints that are there; that of process 0 counts.

    Raises:
        ArgumentError: `path` is something else than a checkpoint.
        CheckpointError: The state is no JSON value, or the folder cannot be made.
    """
    draft, leads = Draft(Path(os.path.abspath(path)), order, secrets.token_hex(4)), jax.process_index() == 0
    problem: JaxlitError | None = None
    try:
        state = take()
        draft = replace(draft, text=_as_json(state if leads else state["loaders"]))
        if leads:
            _make_folder(draft)
    except JaxlitError as error:
        problem = error
    try:
        # The only agreement: the folder is made before it, so that its problem is known. Orbax begins with collectives,
        # in which the others would wait for a process that has one.
        token = agree_or_raise("a checkpoint begins", draft.token, problem)[0]
        shares.forget_outcomes()
    except BaseException:
        if leads:
            _discard(draft.temporary)
        raise
    return replace(draft, token=token)


def _make_folder(draft: Draft) -> None:
    _check_path(draft.path)
    try:
        draft.temporary.mkdir(parents=True)
    except OSError as error:
        raise _unwritten(draft.path, error) from error


def _check_path(path: Path) -> None:
    """Refuse a path whose files would be lost, or that cannot be written."""
    if "\\" in str(path) and os.sep == "/":  # which is a separator to the library that writes the arrays
        raise ArgumentError(f"{path} has a backslash in its name. Write checkpoints to another folder.")
    is_empty = path.is_dir() and not any(path.iterdir())
    # By its name it is one that was damaged.
    if path.exists() and not ((path / manifest.MANIFEST).exists() or is_empty or step_of(path) is not None):
        raise ArgumentError(f"{path} is no checkpoint, and would be overwritten. Pass another path.")


def _as_json(state: Mapping[str, Any]) -> bytes:
    text = json.dumps(state, separators=(",", ":")).encode()
    if len(text) > manifest.MOST_JSON:
        raise CheckpointError(
            f"The state without the arrays has {len(text)} bytes as JSON, and only {manifest.MOST_JSON} are read. "
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
        return ocp.save_async(str(folder), {str(i): x for i, x in arrays.items() if x.size})


def put(temporary: Path, path: Path, token: str) -> None:
    """Give a written checkpoint its name; one that has it already is deleted afterwards."""
    old = None
    if path.exists():
        old = path.with_name(f"{path.name}-replaced_{token}")  # a resume reads it if the process ends here
        manifest.patiently(os.rename, path, old)
    manifest.patiently(os.rename, temporary, path)
    manifest.fsync(path.parent)
    if old is not None:
        remove(old)


def _discard(temporary: Path) -> None:
    # Writers of the library that are still at work may make the folder again.
    for wait in (0.0, 0.02, 0.1):
        time.sleep(wait)
        with contextlib.suppress(OSError):  # the error that led here is the one to raise
            shutil.rmtree(temporary, ignore_errors=True)


def _unwritten(path: Path, error: BaseException) -> CheckpointError:
    what = str(error).strip() or type(error).__name__
    unwritten = CheckpointError(
        f"The checkpoint {path} could not be written: {what.splitlines()[0].rstrip('.')}. Earlier ones are as they "
        "were. Free the disk, or pass another folder."
    )
    if isinstance(error, OSError):  # its message is enough: its traceback through orbax would be pages
        error = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
    unwritten.__cause__ = error
    return unwritten
