"""Writes a checkpoint in the background, completely or not at all: `prepare`, `Saving.begin`, `Saving.wait`.

Every process writes a file with its parts of the arrays, and sends process 0 its size and hash, or why it could not.
When all have come, process 0 writes the manifest.
"""

import contextlib
import errno
import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit.background import Background
from jaxlit.checkpoints import files, places
from jaxlit.checkpoints.files import ARRAYS, STATE, step_of
from jaxlit.checkpoints.locks import check_claims, held
from jaxlit.checkpoints.places import Place, fsync, patiently, place_of
from jaxlit.checkpoints.safetensors import CHUNK, own_parts, write_parts
from jaxlit.distributed.team import LONG_S, agree_or_raise, received, send, team
from jaxlit.errors import ArgumentError, CheckpointError, JaxlitError, NonFiniteError, ProcessError


class Saving(Background[None]):
    """A checkpoint that all processes write together, by a thread for which the end of the process waits."""

    def __init__(self, path: Place, order: int) -> None:
        super().__init__("jaxlit-checkpoint", self._write, daemon=False)
        self.path, self.order = path, order
        self.folder = path / f"data-{secrets.token_hex(4)}"  # of its files, with a name that no other write has
        self.was_awaited = False  # whether anybody has waited for it
        self.seconds = 0.0  # how long writing took
        self._text = b""  # the state as JSON; of processes other than 0 only that of their loaders
        self._names = list[str]()  # of the arrays
        self._parts = dict[str, Any]()  # of them, those that this process stores
        self._failure: Exception | None = None

    def begin(
        self,
        arrays: Iterable[jax.Array],
        replaces: Iterable[Place] = (),
        before: Callable[[Mapping[str, float]], object] = lambda found: None,
        judged: Collection[str] = (),
    ) -> "Saving":
        """Begin to write; in several processes all must come here.

        The arrays, in the order of their names, may be overwritten as soon as this returns. `before` is called in
        process 0 before this is a checkpoint, with how many infinities the arrays named in `judged` have, NaN for a
        NaN; then others that it `replaces` are deleted.
        """
        self._replaces, self._before, self._judged = replaces, before, judged
        try:
            self._parts = own_parts(dict(zip(self._names, arrays, strict=True)))
        except Exception as error:
            self._failure = error  # `wait` raises it, and in all processes, of which the others have none
        self.start()
        return self

    def wait(self) -> None:
        """Wait until it is written; in several processes all must come here.

        At every call a CheckpointError is raised if it could not be written, a NonFiniteError if a parameter is none.
        """
        self.join()
        self.was_awaited = True
        unwritten = _unwritten(self.path, self.error) if self.error else None
        team().same_error(f"{self.path.name} is written", unwritten, timeout=LONG_S)

    def discard(self) -> None:
        """Delete what was written, unless it is a checkpoint already."""
        if jax.process_index() == 0:
            with contextlib.suppress(Exception):  # the error that led here is the one to raise
                if files.order_of(self.path) >= 0 and f"{self.folder.name}/{STATE}" in files.files_of(self.path):
                    return
                places.remove(self.folder)
                self.path.rmdir()  # unless it has an older checkpoint

    def _write(self) -> None:
        began = time.monotonic()
        try:
            if self._failure is not None:
                raise self._failure
            found = _infinities(self._parts, self._judged)
            entry = patiently(self._write_own)
            if jax.process_index() == 0:
                self._seal(entry, found)
                older = list[Place]()
                with contextlib.suppress(Exception):  # what stays is never read
                    older = [x for x in self.path.iterdir() if files.is_of_a_write(x) and x.name != self.folder.name]
                files.clear(older, places.remove)
                files.clear(self._replaces)
            else:
                send(f"saved/{self.folder.name}", json.dumps([entry, found]))
        except BaseException as error:
            if jax.process_index():  # process 0 is sent the reason
                with contextlib.suppress(Exception):  # the error that led here is the one to raise
                    send(f"saved/{self.folder.name}", json.dumps(str(error).strip() or type(error).__name__))
            self.discard()
            raise
        finally:
            self._parts, self._text = {}, b""  # a program may keep this object
            self.seconds = time.monotonic() - began

    def _write_own(self) -> dict[str, Any]:
        """Write this process's file, and return its entry in the manifest."""
        index = jax.process_index()
        path = self.folder / f"{index}{ARRAYS}"
        if isinstance(path, Path) and not path.parent.is_dir():
            raise ProcessError(
                f"{path.parent}, which process 0 has made, is not there. The processes must write to a disk that they "
                "share, or to a bucket by its URL"
            )
        with path.open("wb") as file:
            size, digest = write_parts(file, self._parts, {"loaders": self._text.decode()} if index else {})
        fsync(path)
        if (length := path.stat().st_size) != size:
            raise OSError(f"{path} has {length} bytes after {size} were written")
        return {f"{self.folder.name}/{path.name}": [size, digest]}

    def _seal(self, entries: dict[str, Any], found: dict[str, float]) -> None:
        """Make it a checkpoint once the files of all processes are there."""
        entries[f"{self.folder.name}/{STATE}"] = [len(self._text), hashlib.sha256(self._text).hexdigest()]
        texts = received(f"saved/{self.folder.name}") if jax.process_count() > 1 else ()
        for process, message in enumerate(map(json.loads, texts), 1):
            if isinstance(message, str):
                raise ProcessError(f"process {process}: {message}")
            entries |= message[0]
            for name, n in message[1].items():
                found[name] = found.get(name, 0) + n
        self._before(found)
        places.write(self.folder / STATE, self._text)
        fsync(self.path)  # the folder's name, before the manifest has it
        check_claims(self.path)
        if (lock := held(self.path.parent)) is not None:  # the list of a bucket may be late
            # Before: what fails after it is sealed would call a checkpoint none.
            lock.note(newest=[self.path.name, *lock.noted.get("newest", ())][:2])
        files.seal(self.path, self.order, entries)
        fsync(self.path.parent)


def prepare(
    path: Any, take: Callable[[], Mapping[str, Any]], order: int, compare: Any = None, has: bool = False
) -> Saving:
    """Make the folder of a checkpoint's files; in several processes all must come here.

    `take` returns the state, as JSON values. It is called here so that an error of one process is that of all. `order`
    is larger than those of the existing checkpoints; that of process 0 counts. Where one process `has` something to
    compare, all of them `compare`.
    """
    saving, leads = Saving(place_of(path), order), jax.process_index() == 0
    problem = None
    try:
        state = take()
        saving._names = [name for name, *_ in state["arrays"]]
        saving._text = json.dumps(state if leads else state["loaders"], separators=(",", ":")).encode()
        if (size := len(saving._text)) > files.MOST_JSON:
            raise CheckpointError(
                f"The state without the arrays has {size} bytes as JSON, and only {files.MOST_JSON} are read. Keep "
                "less in state_dict, and large hyperparameters in files."
            )
        if leads:
            _check_path(saving.path)
            if isinstance(saving.folder, Path):  # elsewhere the first file makes it, if there are folders
                saving.folder.mkdir(parents=True, exist_ok=True)
    except JaxlitError as error:
        problem = error
    except OSError as error:
        problem = _unwritten(saving.path, error)
    try:
        # The only agreement: the folder is made before it, so that its problem is known.
        names, have = zip(*agree_or_raise("a checkpoint begins", [saving.folder.name, has], problem), strict=True)
        if any(have):
            compare()
    except BaseException:
        saving.discard()
        raise
    saving.folder = saving.path / names[0]
    return saving


def _check_path(path: Place) -> None:
    """Refuse a folder whose files are not those of checkpoints; by the name of one it may be damaged."""
    if step_of(path) is not None or not path.exists():
        return
    others = [x.name for x in path.iterdir() if not files.is_of_a_write(x)] if path.is_dir() else [path.name]
    is_ours = others in ([], [files.MANIFEST])  # it may be cut
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, CheckpointError):
        is_ours = files.read_json(path / files.MANIFEST).get("format") == "jaxlit"
    if not is_ours:
        raise ArgumentError(f"{path} is no checkpoint, and would be overwritten. Pass another path.")


def _infinities(parts: Mapping[str, Any], judged: Collection[str]) -> dict[str, float]:
    """Return how many infinities some arrays have in these parts, NaN for a NaN; those that are finite are left out."""
    found = dict[str, float]()
    for part, x in parts.items():
        if (name := part.rpartition("@")[0] or part) in judged and jnp.issubdtype(x.dtype, jnp.inexact):
            flat = np.ascontiguousarray(x).reshape(-1)
            for at in range(0, flat.size, CHUNK):  # no mask of the entire array
                chunk = flat[at : at + CHUNK]
                if not np.isfinite(chunk).all():
                    n = math.nan if np.isnan(chunk).any() else int(np.isinf(chunk).sum())
                    found[name] = found.get(name, 0) + n
    return found


def _unwritten(path: Place, error: BaseException) -> JaxlitError:
    if isinstance(error, NonFiniteError):
        return error
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    remedy = "Free the disk, or pass another folder" if isinstance(path, Path) else "Save again, or pass another URL"
    remedy = "Give a shorter name" if getattr(error, "errno", None) == errno.ENAMETOOLONG else remedy
    text = f"The checkpoint {path} could not be written: {reason}. Earlier ones are as they were. {remedy}."
    unwritten = CheckpointError(text)
    unwritten.__cause__ = error
    return unwritten
