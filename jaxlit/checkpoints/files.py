"""Checkpoints on the disk: their names and folders, and how they are verified and read.

A checkpoint is a folder: `arrays/` as orbax writes them, `state.json` for everything else, and `MANIFEST.json` with the
sizes and hashes of its files, written last. Of several processes, those after the first have the states of their
loaders in a file each, in `loaders/`. It contains data only: nothing in it is imported, called or unpickled. The
manifest guards against damage, not against forgery, so all that is read here is checked before it is used. At the end:
the lock of a folder that one training at a time writes into, and the names of `ModelCheckpoint(filename=...)`.
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import random
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from jaxlit.checkpoints.position import check_loaders, check_state
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError, did_you_mean
from jaxlit.texts import from_json, shown

MANIFEST, STATE = "MANIFEST.json", "state.json"
VERSION = 1  # of the layout of a checkpoint
MOST_JSON = 64 * 2**20  # bytes of a JSON file that is read
_TRANSIENT = (errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT)
_WAITS_S = (0.1, 0.5, 2.0)

_logger = logging.getLogger("jaxlit")

FOLDER = "checkpoints"  # in a run's folder
ARRAYS, LOADERS = "arrays", "loaders"
_NAME = re.compile(r"step_(\d{8,15})(-[\w=.,+-]+)?")
TEMPORARY, _TRASH = ".tmp-", ".trash-"
AS_BYTES = {"uint2": "uint8", "uint4": "uint8"}  # orbax cannot store these
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


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path  # its folder
    state: dict[str, Any]  # what is no array, see `jaxlit.loop.snapshot`

    @property
    def weights_only(self) -> bool:
        """Whether it has only the module's arrays, so that no training can continue from it."""
        return all(name.startswith("module.") for name, _, _ in self.specs)

    @property
    def specs(self) -> list[tuple[str, tuple[int, ...], str]]:
        """The (name, shape, dtype) of each array."""
        return [(name, tuple(shape), dtype) for name, shape, dtype in self.state["arrays"]]

    @property
    def weights(self) -> list[tuple[str, tuple[int, ...], str]]:
        """The same, but a parameter's name is that of what validations saw in its place, such as an average."""
        evaluated = self.state.get("evaluated") or {}
        names = evaluated | {average: name for name, average in evaluated.items()}
        return [(names.get(name, name), shape, dtype) for name, shape, dtype in self.specs]

    def arrays(self, wanted: Mapping[int, Any]) -> dict[int, Any]:
        """Read some of the arrays, each straight into its sharding; refuse what is not as `specs` says.

        `wanted` is by index in `specs`: a `jax.ShapeDtypeStruct` with a sharding, or None for a numpy array.
        """
        from orbax.checkpoint import v1 as ocp

        folder, arrays, target = str(self.path / ARRAYS), {}, {}
        try:
            stored = ocp.metadata(folder).metadata
            for i, (name, shape, dtype) in enumerate(self.specs):
                kind = "uint32" if _KEY.fullmatch(dtype) else AS_BYTES.get(dtype, dtype)
                if not math.prod(shape):  # what has no elements is not stored
                    arrays[i] = np.zeros(shape, dtype)
                    continue
                # Before anything is allocated: the files may not ask for more than the shape.
                array, expected = stored[str(i)], f"{kind}{list(shape)}"
                actual = f"{array.dtype}{list(array.shape)}"
                chunk = getattr(array.storage_metadata, "chunk_shape", None) or shape
                if actual != expected or len(chunk) != len(shape) or any(np.greater(chunk, shape)):
                    raise CheckpointError(f"{self.path}: {name} is stored as {actual}, not as {expected}.")
                spec = wanted.get(i, ocp.PLACEHOLDER)
                if dtype in AS_BYTES and isinstance(spec, jax.ShapeDtypeStruct):
                    spec = spec.update(dtype=kind)
                target[str(i)] = np.zeros(shape, kind) if spec is None else spec
            if any(x is not ocp.PLACEHOLDER for x in target.values()):
                arrays |= {int(i): x for i, x in ocp.load(folder, target).items()}
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self.path}: its arrays cannot be read: {error}") from error
        dtypes = [dtype for _, _, dtype in self.specs]
        return {i: arrays[i].astype(dtypes[i]) if dtypes[i] in AS_BYTES else arrays[i] for i in wanted}


def read(path: Path) -> Checkpoint:
    """Verify a checkpoint and return it; in several processes all must come here.

    Raises:
        CheckpointError: It is damaged, incomplete, or of another format.
    """
    path, state, problem = Path(os.path.abspath(path)), {}, None
    try:
        # Each process reads its share of the files.
        entries = verify(path, index=jax.process_index(), count=jax.process_count())
        state = read_json(path / STATE)
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
        parts.append(read_json(path / name))
        check_loaders(parts[-1], f"{path / name}: the state")
    loaders = {}
    for stage in state["loaders"]:
        saved = [part[stage] for part in parts if part[stage] is not None]
        states = [x for loader in saved for x in loader["states"]]
        if same and not names:  # older checkpoints have the states of all processes in state.json
            states = states[index : index + 1]
        if saved and not states:
            raise CheckpointError(f"{path} has no state of the {stage} loader of process {index}.")
        loaders[stage] = saved[0] | {"states": states} if saved else None
    return loaders


def candidates(folder: Path) -> list[Path]:
    """Return what is named like a checkpoint in a folder, the one written last first.

    Those whose manifest has no order come before all: reading them raises what is wrong.
    """
    keys = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if (step := step_of(path)) is not None:
            order = order_of(path)
            keys[path] = (math.inf if order is None else order, step, path.name)
    return sorted(keys, key=lambda path: keys[path], reverse=True)


def last_order(folder: Path) -> int:
    """Return the order of the checkpoint that was written last in a folder, 0 if there is none."""
    return max([0, *(order_of(path) or 0 for path in candidates(folder))])


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint of a folder that verifies, and why newer ones do not.

    None if there is no checkpoint; if there are some and none verifies, a CheckpointError is raised.
    """
    skipped = {}
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
    """Return the checkpoint at a path, or the newest one of a folder that verifies, and why newer ones were skipped.

    The path is that of a checkpoint, a run's folder or a folder of checkpoints, or has `/best` or `/last` at the end.
    """
    if not isinstance(path, (str, Path)):
        raise ArgumentTypeError(f"{argument} takes a path, got {shown(path)}.")
    place, checkpoint, skipped = Path(path), None, []
    has_word = place.name in ("best", "last") and place.parent.is_dir() and not place.exists()
    wants_best = has_word and place.name == "best"
    place = place.parent if has_word else place
    if place.is_file():
        raise CheckpointError(
            f"{argument}: {str(path)!r} is a file, and a checkpoint of jaxlit is a folder. Weights in a file are given "
            "to a module by jl.load_weights(module, path), or by fit(init_from=path)."
        )
    if (place / MANIFEST).exists() or step_of(place) is not None:
        checkpoint = read(place) if place.exists() else None
    elif place.is_dir():
        checkpoint, skipped = newest(_checkpoints_in(place))
    if checkpoint is not None:
        return best_of(checkpoint) if wants_best else checkpoint, skipped
    near, hint = place, ""
    while not near.is_dir():
        near, hint = near.parent, did_you_mean(near.name, [p.name for p in near.parent.glob("*")])
    if names := ", ".join(p.name for p in candidates(_checkpoints_in(near))[:5]):
        hint += f" In {near} there are: {names}."
    raise CheckpointError(f"{argument}: {str(path)!r} is not a checkpoint, and contains none.{hint}")


def _checkpoints_in(folder: Path) -> Path:
    return folder / FOLDER if (folder / FOLDER).is_dir() else folder


def best_of(newest: Checkpoint, key: str = "") -> Checkpoint:
    """Return the best checkpoint that the newest of a folder knows, first by the ModelCheckpoint of a `state_key`."""
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
        if _LEFT.fullmatch(path.name) or (replaced and (folder / replaced[1] / MANIFEST).exists()):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(PROBE):
            path.unlink(missing_ok=True)


def seal(folder: Path, order: int, known: Mapping[str, Any] | None = None) -> None:
    """Put every file of a folder onto the disk, and write the manifest after them.

    `order` is larger for what was written later, whatever clocks say; `known` is what `on_disk` has returned of some.
    """
    known = known or {}
    paths = [path for path in sorted(_files(folder)) if path.relative_to(folder).as_posix() not in known]
    files = {**known, **on_disk(folder, paths)}
    body: dict = {"format": "jaxlit", "format_version": VERSION, "order": order, "files": files}
    body["digest"] = hashlib.sha256(_canonical(body)).hexdigest()
    write(folder / MANIFEST, _canonical(body))
    for path, _, _ in os.walk(folder, topdown=False):
        fsync(Path(path))


def on_disk(folder: Path, paths: Iterable[Path]) -> dict[str, Any]:
    """Put some files of a folder onto the disk, and return by name the entry of each in the manifest."""
    entries = {}
    for path in paths:
        entries[path.relative_to(folder).as_posix()] = [path.stat().st_size, _digest(path)]
        fsync(path)
    return entries


def verify(folder: Path, *, hashes: bool = True, index: int = 0, count: int = 1) -> dict[str, Any]:
    """Refuse a folder whose files are not those of its manifest; return by name the size and hash of every file.

    Without `hashes` only their sizes are compared. There are `count` shares of about as many bytes, of which the one of
    this `index` is compared; the first one also looks for files that the manifest lacks.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder.")
    real, entries = os.path.realpath(folder), files_of(folder)
    for path in _files(folder) if index == 0 else ():
        name = path.relative_to(folder).as_posix()
        # Hidden ones are left by file systems and file managers.
        if name in entries or name == MANIFEST or path.name.startswith("."):
            continue
        if name == STATE or path.is_symlink() or "/" in name:  # among the arrays a library might read it
            raise CheckpointError(f"{folder}: {name} is not in its manifest.")
        _logger.warning("%s: %s is not in its manifest, and is ignored.", folder, name)
    # The largest go first, one to each share in turns.
    for name, (size, digest) in sorted(entries.items(), key=lambda x: (-x[1][0], x[0]))[index::count]:
        path = folder / name
        # Neither a link nor a `..` may lead to another file.
        if os.path.realpath(path) != os.path.join(real, *name.split("/")):
            raise CheckpointError(f"{folder}: its manifest names {name!r}, which is not a file inside it.")
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is missing.")
        if (length := path.stat().st_size) != size:
            raise CheckpointError(f"{folder}: {name} has {length} bytes, and had {size} when it was written.")
        if hashes and _digest(path) != digest:
            raise CheckpointError(f"{folder}: {name} is damaged: its bytes are not those that were written.")
    return entries


def order_of(folder: Path) -> int | None:
    """Return the order of a folder, None if its manifest cannot be read."""
    try:
        order = _parse(folder / MANIFEST, _bytes(folder / MANIFEST)).get("order")
    except CheckpointError:
        return None
    return order if type(order) is int else None


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file of bounded size."""
    return _parse(path, _bytes(path))


def write(path: Path, data: bytes) -> None:
    """Write a file and put it onto the disk."""
    patiently(path.write_bytes, data)
    fsync(path)


def patiently(work: Callable, *arguments: Any) -> Any:
    """Return `work(*arguments)`, tried again where a network file system asks for patience."""
    for wait in _WAITS_S:
        try:
            return work(*arguments)
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
            _logger.warning("%s; trying again in %.1f s.", error, wait)
        time.sleep(wait * random.uniform(1.0, 1.5))  # several processes do not come back at once
    return work(*arguments)


def fsync(path: Path) -> None:
    """Put a file, or the names in a folder, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems sync names automatically, and refuse the call.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(handle)


def files_of(folder: Path) -> dict[str, Any]:
    """Return by name the size and hash of each file in a folder's manifest, which is verified."""
    path = folder / MANIFEST
    raw = _bytes(path)
    body = _parse(path, raw)
    version, files = body.get("format_version"), body.get("files")
    if body.get("format") != "jaxlit" or type(version) is not int or version < 1 or not isinstance(files, dict):
        raise CheckpointError(f"{path} is no manifest of a checkpoint.")
    if version > VERSION:
        raise CheckpointError(
            f"{folder} was written by a newer jaxlit, in format {version}; this one reads formats up to {VERSION}. "
            "Update jaxlit."
        )
    digest = body.pop("digest", None)
    if digest != hashlib.sha256(_canonical(body)).hexdigest() or raw != _canonical({**body, "digest": digest}):
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written.")
    for name, entry in files.items():
        steps = name.split("/")
        sound = not any(step in ("", ".", "..") for step in steps) and not any(c in name for c in "\\\0:")
        complete = isinstance(entry, list) and [type(x) for x in entry] == [int, str] and entry[0] >= 0
        if not sound or not complete:
            raise CheckpointError(f"{path} names {name!r:.80} with {entry!r:.80}, which is no file inside the folder.")
    return files


def _bytes(path: Path) -> bytes:
    try:
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path.parent}: {path.name} is missing, or no file.")
        if (size := path.stat().st_size) > MOST_JSON:
            raise CheckpointError(f"{path} has {size} bytes, more than the {MOST_JSON} that are read.")
        return patiently(path.read_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw, object_hook=from_json)
    except (ValueError, TypeError, LookupError, EOFError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}.") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{path} holds a {type(body).__name__}, not a JSON object.")
    return body


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _files(folder: Path) -> Iterator[Path]:
    for path, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        yield from (Path(path) / name for name in (*names, *links))


def _digest(path: Path) -> str:
    try:
        return patiently(_hash, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _hash(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


PROBE = ".probe-"  # of a file that is written to see whether one can be

_held: set[str] = set()  # folders that this process holds
_without_locks: set[int] = set()  # file systems that were warned of


class FolderLock:
    """Holds a folder, which is created if it does not exist, until it is closed or the process ends in whatever way.

    The folder is for checkpoints, or `of_run`: there the first write raises if nothing can be written.

    Raises:
        CheckpointError: Nothing can be written there, or another training holds it.
    """

    def __init__(self, folder: Path, *, of_run: bool = False) -> None:
        # Checkpoints may be in the run's folder itself, so the two have different locks.
        self._name = os.path.join(os.path.realpath(folder), ".run-lock" if of_run else ".lock")
        self._file: TextIO | None = None
        # Before the file is opened: closing it again would release the lock.
        if self._name in _held:
            raise CheckpointError(
                f"Two {'fits' if of_run else 'ModelCheckpoints'} of this program would write to {folder}. Wait for the "
                "one that continues, or pass another folder."
            )
        try:
            os.makedirs(os.path.dirname(self._name), exist_ok=True)
            if not of_run:
                probe = folder / f"{PROBE}{secrets.token_hex(4)}"
                probe.write_bytes(b"\0" * 4096)
                probe.unlink()
            self._file = Path(self._name).open("a+")  # noqa: SIM115
        except OSError as error:
            if of_run:
                return
            raise CheckpointError(
                f"No checkpoint can be written in {folder}: {error}. Pass another Trainer(default_root_dir=...) or "
                "ModelCheckpoint(dirpath=...), or Trainer(enable_checkpointing=False)."
            ) from error
        self._hold(folder, self._file)

    def _hold(self, folder: Path, file: TextIO) -> None:
        try:
            import fcntl
        except ImportError:  # a system without such locks
            return
        try:
            # Of the process: one that it has forked does not hold it as well.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            file.close()
            raise CheckpointError(
                f"{folder} is in use by {holder}. Two trainings cannot write to one folder: end that one, or pass "
                "another Trainer(default_root_dir=...)."
            ) from error
        except OSError as error:
            if (device := os.stat(self._name).st_dev) not in _without_locks:
                _without_locks.add(device)
                _logger.warning(
                    "%s is on a file system without locks (%s): see to it that no other training writes there.",
                    *(folder, error),
                )
            return
        _held.add(self._name)
        with contextlib.suppress(OSError):  # only for the message of another process
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()

    def close(self) -> None:
        """Release the folder."""
        if self._file is not None:
            _held.discard(self._name)
            with contextlib.suppress(OSError):
                self._file.close()


_FIELD = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")


def check_filename(filename: str | None) -> None:
    """Refuse what is no format of names."""
    for name, form in _FIELD.findall(filename or ""):
        try:
            format(1 if name in ("epoch", "step") else 1.0, form[1:])
        except ValueError as error:
            raise ArgumentError(
                f"ModelCheckpoint(filename={filename!r}): {name}{form} is no format: {error}."
            ) from None
    if set("{}") & set(_FIELD.sub("", filename or "")):
        raise ArgumentError(
            f"ModelCheckpoint(filename={filename!r}) has a brace without its other, or an empty pair. Write "
            "for example '{epoch}-{val/loss:.2f}'."
        )


def filled(filename: str, counts: Mapping[str, int], metric: Callable[[str], Any]) -> str:
    """Return a filename with the values that it names, from the counts or the metrics, fit for a folder's name."""

    def fill(field: re.Match[str]) -> str:
        name, form = field[1], (field[2] or ":")[1:]
        return f"{name}={format(counts[name] if name in counts else metric(name), form)}"

    return re.sub(r"[^\w=.,+-]", "_", _FIELD.sub(fill, filename))


@dataclass(frozen=True)
class Resume:
    """A checkpoint to begin with, and how much of it must fit."""

    checkpoint: Checkpoint
    strict: bool = True  # refuses other arrays than the engine's; otherwise those that fit are taken, the others named
    reset_optimizer: bool = False  # leaves the optimizer as it is at step 0
    named: bool = False  # by a path, and so continues a run that was stopped
