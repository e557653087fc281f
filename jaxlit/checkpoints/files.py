"""Checkpoints: their names and folders, how they are verified, read, found and written, on a disk or in a bucket.

A checkpoint is a folder with `MANIFEST.json`; one without it is none. The manifest has the sizes and hashes of the
files, which are in one subfolder, of a name that no other write has: `state.json`, and of each process the file
`<process>.safetensors` with its parts of the arrays. It is written last, at once, and deleted first, so that an older
checkpoint of that name stays whatever ends a write. Nothing in a checkpoint is imported, called or unpickled. The
manifest guards against damage, not against forgery, so all that is read is checked before it is used.
"""

import errno
import hashlib
import json
import logging
import math
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit import checks as check
from jaxlit import errors
from jaxlit.background import Background
from jaxlit.checkpoints import places
from jaxlit.checkpoints.places import Place, RemotePath, fsync, patiently, place_of, size_of
from jaxlit.checkpoints.safetensors import CHUNK, own_parts, parts_in, read_header, read_region, write_arrays
from jaxlit.control import Position
from jaxlit.distributed.team import LONG_S, agree_or_raise, error_of_all, received, send, team
from jaxlit.errors import ArgumentError, CheckpointError, JaxlitError, ProcessError, did_you_mean
from jaxlit.sharding import array_of_shards
from jaxlit.texts import from_json, shown

MANIFEST, STATE, ARRAYS = "MANIFEST.json", "state.json", ".safetensors"
VERSION = 3  # of the layout of a checkpoint and of its state
MOST_JSON = 64 * 2**20  # bytes of a JSON file that is read
FOLDER = "checkpoints"  # in a run's folder
# The fields of `Position` in state.json; `jaxlit.loop.snapshot` saves `data` as the loader's state, and not `cut`.
POSITION = ("epoch", "batch_idx", "total_batch_idx", "global_step", "first_step", "filled", "over", "validated")
_NAME = re.compile(r"step_(\d{8,15})(-[\w=.,+-]+)?")
_FILE = re.compile(r"data-[0-9a-f]{8}/[\w.]+")  # of a checkpoint
_KEY = re.compile(r"key<\w+>")  # how the dtype of random keys is written; their data are uint32
_AT_ONCE = 8  # files that are read at once: a bucket answers late
_logger = logging.getLogger("jaxlit")


def name_of(step: int, suffix: str = "") -> str:
    """Return the name of the checkpoint of an optimizer step."""
    return f"step_{step:08d}{suffix}"


def step_of(path: Place) -> int | None:
    """Return the optimizer step in a checkpoint's name, None if it is no such name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Place  # its folder
    state: dict[str, Any]  # what is no array, see `jaxlit.loop.snapshot`
    files: tuple[Place, ...]  # of the arrays, one of each process that wrote it

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
        specs = self.specs
        with fitting(self.path), ThreadPoolExecutor(_AT_ONCE) as pool:
            dtypes = {name: np.dtype("uint32" if _KEY.fullmatch(x) else x) for name, _, x in specs}
            stored: dict[str, list[Any]] = {name: [] for name in dtypes}
            for parts in pool.map(lambda path: parts_in(path, dtypes), self.files):
                for name, part in parts:
                    stored[name].append(part)

            def read(index: int) -> Any:
                (name, shape, _), spec = specs[index], wanted[index]

                def region(at: Any) -> np.ndarray:
                    start = [x.start or 0 for x in at]
                    size = [n if x.stop is None else x.stop - i for x, i, n in zip(at, start, shape, strict=True)]
                    part = read_region(name, stored[name], start, size, dtypes[name])
                    return part if spec is None else part.astype(spec.dtype, copy=False)

                if spec is None:
                    return region((slice(None),) * len(shape))
                return array_of_shards(shape, spec.sharding, region)

            return dict(zip(wanted, pool.map(read, wanted), strict=True))


@dataclass(frozen=True)
class Resume:
    """A checkpoint to begin with, and how much of it must fit."""

    checkpoint: Checkpoint
    strict: bool = True  # refuses other arrays than the engine's; otherwise those that fit are taken, the others named
    reset_optimizer: bool = False  # leaves the optimizer as it is at step 0
    named: bool = False  # by a path, and so continues a run that was stopped


def read(path: Place) -> Checkpoint:
    """Verify a checkpoint and return it, or raise a CheckpointError; in several processes all must come here."""
    index, count = jax.process_index(), jax.process_count()
    with error_of_all(f"verifying {path.name}", timeout=LONG_S), fitting(path):
        checkpoint = load(path, index=index, count=count)  # each process reads its share of the files
        state = checkpoint.state
        position_of(state)
        for name, shape, dtype in checkpoint.weights:
            hash((name.encode(), shape, dtype))  # of the kinds that are compared
        for section in (state["callbacks"], state["module"]["hparams"]):
            section.items()
        if (writers := len(checkpoint.files)) != state["processes"]:
            raise CheckpointError(f"{path} has files of {writers} processes, not of {state['processes']}.")
        # The states of this process's loaders if as many processes as now have saved them, else of all. Those of
        # process 0 are in the state. Those that are equal are read once.
        files = checkpoint.files[1:] if writers != count else checkpoint.files[index : index + 1] if index else ()
        texts = dict.fromkeys(read_header(file)[1]["loaders"] for file in files)
        parts = [] if writers == count and index else [state["loaders"]]
        parts += [_parse(path, text.encode()) for text in texts]
        saved = [part["training"] for part in parts if part["training"] is not None]
        states = [x for loader in saved for x in loader["states"]]
        state["loaders"] = {"training": saved[0] | {"states": states} if saved else None}
    return checkpoint


def position_of(state: Mapping[str, Any]) -> Position:
    """Return the position in a state; raise an error of any class if it is none."""
    saved = state["position"]
    stated = {name: type(saved[name]) is type(getattr(Position, name)) and saved[name] >= 0 for name in POSITION}
    if not all(stated.values()) or any(state[name] != saved[name] for name in ("global_step", "epoch")):
        raise ValueError(f"no training is at {saved}")
    return Position(**saved)


def load(path: Place, *, index: int = 0, count: int = 1) -> Checkpoint:
    """Verify a share of a checkpoint's files, and return it with its state as it is in the file."""
    names = verify(path, index=index, count=count)
    state = next((name for name in names if name.endswith(f"/{STATE}")), None)
    if state is None:
        raise CheckpointError(f"{path}: its manifest names no {STATE}.")
    arrays = sorted((name for name in names if name.endswith(ARRAYS)), key=lambda name: (len(name), name))
    return Checkpoint(path, read_json(path / state), tuple(path / name for name in arrays))


@contextmanager
def fitting(path: Place) -> Iterator[None]:
    """Raise a CheckpointError, with the path, where what is read is not what `jaxlit.loop.snapshot.take` makes."""
    try:
        yield
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error
    except JaxlitError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path}: {error.filename or error} is missing.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{path}: its state is not what a checkpoint of this version has: {error!r:.200}. It was changed, or "
            "written by another version: continue from another one."
        ) from error


def candidates(folder: Place) -> list[Place]:
    """Return the checkpoints in a folder, those written last first; before them those that reading refuses."""
    names = {path.name for path in _inside(folder)}
    names |= {*map(str, places.read_claim(folder).get("newest", ()))}  # the list of a bucket may be late
    paths = [folder / name for name in names if _NAME.fullmatch(name)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        orders = list(pool.map(order_of, paths))
    keys = [(order, step_of(path), path.name) for order, path in zip(orders, paths, strict=True)]
    return [folder / name for order, _, name in sorted(keys, reverse=True) if order >= 0]


def names_in(folder: Place) -> list[str]:
    """Return the names of `candidates` as process 0 sees them; in several processes all must come here."""
    topic = f"the checkpoints in {folder.name}"
    with error_of_all(topic), fitting(folder):
        names = [path.name for path in candidates(folder)] if jax.process_index() == 0 else []
    return team().agree(topic, names)[0]


def _inside(folder: Place) -> Iterator[Place]:
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from folder.iterdir()


def last_order(folder: Place) -> int:
    """Return the order of the checkpoint that was written last in a folder, 0 if there is none."""
    orders = map(order_of, candidates(folder))  # the highest first, after those that cannot be read
    return next((int(x) for x in orders if x < math.inf), 0)


def order_of(path: Place) -> float:
    """Return the order of a checkpoint: -1 if it has no manifest, infinity if that cannot be read."""
    try:
        order = read_json(path / MANIFEST)["order"]
    except (FileNotFoundError, NotADirectoryError):
        return -1
    except (CheckpointError, OSError, LookupError):
        return math.inf
    return order if type(order) is int else math.inf


def newest(
    *folders: Place,
    verified: Callable[[Place], Checkpoint] | None = None,
    progress: Callable[[Checkpoint], Any] = lambda checkpoint: 0,
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that `verified`, by default `read`, returns, and why newer ones do not.

    Of several folders it is the newest of one of them, that of most `progress`. None if there is no checkpoint; if
    there are some and none verifies, a CheckpointError is raised.
    """
    checkpoints, skipped = list[Checkpoint](), dict[Place, str]()
    for folder in folders:
        try:
            # Listed again each time: while one is read, a training may replace it by a newer one.
            while path := next((folder / name for name in names_in(folder) if folder / name not in skipped), None):
                try:
                    checkpoints.append((verified or read)(path))
                    break
                except CheckpointError as error:
                    skipped[path] = str(error)
        except CheckpointError as error:  # the folder cannot be read; another one may have a good checkpoint
            if len(folders) == 1:
                raise
            skipped[folder] = str(error)
    if skipped and not checkpoints:
        names, reasons = " or ".join(map(str, folders)), "\n  ".join(skipped.values())
        raise CheckpointError(
            f"None of the {len(skipped)} checkpoints in {names} can be used:\n  {reasons}\nTraining does not "
            "start again in their folder. Restore one from a copy, move them away, or pass another default_root_dir."
        )
    return max(checkpoints, key=progress, default=None), [*skipped.values()]


def locate(path: Any, argument: str) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint at a path, or the newest one of a folder that verifies, and why newer ones were skipped.

    The path is that of a checkpoint, a run's folder or a folder of checkpoints, or has `/best` or `/last` at the end.
    """
    if not isinstance(path, (str, Path, RemotePath)):
        raise errors.ArgumentTypeError(f"{argument} takes a path, got {shown(path)}.")
    place, checkpoint, skipped = place_of(check.url("path", path, owner=argument)), None, []
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
        checkpoint, skipped = newest(checkpoints_in(place))
    if checkpoint is not None:
        return best_of(checkpoint) if wants_best else checkpoint, skipped
    near, hint = place, ""
    while not near.is_dir() and near != near.parent:
        near, hint = near.parent, did_you_mean(near.name, [p.name for p in _inside(near.parent)])
    if names := ", ".join(p.name for p in candidates(checkpoints_in(near))[:5]):
        hint += f" In {near} there are: {names}."
    raise CheckpointError(f"{argument}: {str(path)!r} is not a checkpoint, and contains none.{hint}")


def checkpoints_in(folder: Place) -> Place:
    """Return where the checkpoints of a run's folder are, or of a folder of them."""
    return folder / FOLDER if (folder / FOLDER).is_dir() else folder


def best_of(newest: Checkpoint, key: str = "") -> Checkpoint:
    """Return the best checkpoint that the newest of a folder knows, first by the ModelCheckpoint of a `state_key`.

    Of several it is the one that writes to a folder of this name.
    """
    by_name, folder = newest.state["callbacks"], newest.path.parent
    states = [x for x in (by_name.get(key), *by_name.values()) if isinstance(x, dict)]
    for state in sorted(states, key=lambda x: x.get("folder") != folder.name):
        if isinstance(name := state.get("best_model"), str) and name:
            return read(folder / Path(name).name)
    raise CheckpointError(
        f"{newest.path} knows no best checkpoint. Train with ModelCheckpoint(monitor=...), or pass 'last'."
    )


class Saving(Background[None]):
    """A checkpoint that all processes write together, by a thread for which the end of the process waits.

    Each process writes a file with its parts of the arrays, and sends process 0 its size and hash, or why it could not.
    When all have come, process 0 writes the manifest. In several processes all must make it, `begin` and `wait`.

    Args:
        path: The folder, which is made here, so that its problem is known before training continues.
        take: Returns the state, as JSON values. It is called here, so that an error of one process is that of all.
        order: A number larger than those of the existing checkpoints; that of process 0 counts.
        compare: Called in all processes where one of them `has` something to compare.
    """

    def __init__(
        self,
        path: Any,
        take: Callable[[], Mapping[str, Any]],
        order: int,
        *,
        compare: Callable[[], object] = lambda: None,
        has: bool = False,
    ) -> None:
        super().__init__("jaxlit-checkpoint", self._write, daemon=False)
        self.path, self.order = place_of(path), order
        self.folder = self.path / f"data-{secrets.token_hex(4)}"  # of its files, with a name that no other write has
        self.was_awaited = False  # whether anybody has waited for it
        self.seconds = 0.0  # how long writing took
        self._parts = dict[str, Any]()  # of the arrays, those that this process stores
        self._failure: Exception | None = None
        problem = None
        try:
            state, leads = take(), jax.process_index() == 0
            self._names = [name for name, *_ in state["arrays"]]
            # The state as JSON; of processes other than 0 only that of their loaders.
            self._text = json.dumps(state if leads else state["loaders"], separators=(",", ":")).encode()
            if (size := len(self._text)) > MOST_JSON:
                raise CheckpointError(
                    f"The state without the arrays has {size} bytes as JSON, and only {MOST_JSON} are read. Keep "
                    "less in state_dict, and large hyperparameters in files."
                )
            if leads:
                _check_path(self.path)
                if isinstance(self.folder, Path):  # elsewhere the first file makes it, if there are folders
                    self.folder.mkdir(parents=True, exist_ok=True)
        except (JaxlitError, OSError) as error:
            problem = _unwritten(self.path, error) if isinstance(error, OSError) else error
        try:
            # The only agreement: the folder is made before it, so that its problem is known.
            names, have = zip(*agree_or_raise("a checkpoint begins", [self.folder.name, has], problem), strict=True)
            if any(have):
                compare()
        except BaseException:
            self.discard()
            raise
        self.folder = self.path / names[0]

    def begin(
        self,
        arrays: Iterable[jax.Array],
        replaces: Iterable[Place] = (),
        before: Callable[[Mapping[str, float]], object] = lambda found: None,
        judged: Collection[str] = (),
    ) -> "Saving":
        """Begin to write.

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
        """Wait until it is written.

        At every call a CheckpointError is raised if it could not be written, a NonFiniteError if a parameter is none.
        """
        self.join()
        self.was_awaited = True
        unwritten = _unwritten(self.path, self.error) if self.error else None
        team().same_error(f"{self.path.name} is written", unwritten, timeout=LONG_S)

    def discard(self) -> None:
        """Delete what was written, unless it is a checkpoint already."""
        if jax.process_index() == 0:
            with suppress(Exception):  # the error that led here is the one to raise
                if order_of(self.path) >= 0 and f"{self.folder.name}/{STATE}" in files_of(self.path):
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
                with suppress(Exception):  # what stays is never read
                    older = [x for x in self.path.iterdir() if is_of_a_write(x) and x.name != self.folder.name]
                clear(older, places.remove)
                clear(self._replaces)
            else:
                send(f"saved/{self.folder.name}", json.dumps([entry, found]))
        except BaseException as error:
            if jax.process_index():  # process 0 is sent the reason
                with suppress(Exception):  # the error that led here is the one to raise
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
        specs = [(name, x.shape, x.dtype) for name, x in self._parts.items()]
        loaders = {"loaders": self._text.decode()} if index else {}
        with path.open("wb") as file:
            size, digest = write_arrays(file, specs, self._parts.values(), loaders)
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
        places.check_claims(self.path)
        if (lock := places.held(self.path.parent)) is not None:  # the list of a bucket may be late
            # Before: what fails after it is sealed would call a checkpoint none.
            lock.note(newest=[self.path.name, *lock.noted.get("newest", ())][:2])
        seal(self.path, self.order, entries)
        fsync(self.path.parent)


def _check_path(path: Place) -> None:
    """Refuse a folder whose files are not those of checkpoints; by the name of one it may be damaged."""
    if step_of(path) is not None or not path.exists():
        return
    others = [x.name for x in path.iterdir() if not is_of_a_write(x)] if path.is_dir() else [path.name]
    is_ours = others in ([], [MANIFEST])  # it may be cut
    with suppress(FileNotFoundError, NotADirectoryError, CheckpointError):
        is_ours = read_json(path / MANIFEST).get("format") == "jaxlit"
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
    if isinstance(error, errors.NonFiniteError):
        return error
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    remedy = "Free the disk, or pass another folder" if isinstance(path, Path) else "Save again, or pass another URL"
    remedy = "Give a shorter name" if getattr(error, "errno", None) == errno.ENAMETOOLONG else remedy
    text = f"The checkpoint {path} could not be written: {reason}. Earlier ones are as they were. {remedy}."
    unwritten = CheckpointError(text)
    unwritten.__cause__ = error
    return unwritten


def remove(path: Place) -> None:
    """Delete a checkpoint with what a user has in its `files`; a crash meanwhile leaves nothing that a resume reads."""
    if path.is_dir():
        (path / MANIFEST).unlink(missing_ok=True)
        for left in [x for x in path.iterdir() if is_of_a_write(x)]:
            places.remove(left)
        with suppress(OSError):  # somebody has files there
            path.rmdir()


def copy(path: Place, to: Place) -> None:
    """Copy a checkpoint, without a user's files, to a folder where it replaces another one once it is complete."""
    manifest, names = (path / MANIFEST).read_bytes(), files_of(path)
    for name in names:
        if isinstance(to, Path):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
        with (path / name).open("rb") as source, (to / name).open("wb") as target:
            shutil.copyfileobj(source, target)
        places.fsync(to / name)
    places.write(to / MANIFEST, manifest)
    kept = {name.partition("/")[0] for name in names}
    clear([x for x in to.iterdir() if x.name.startswith("data-") and x.name not in kept], places.remove)


def clear(paths: Iterable[Place], delete: Callable[[Place], None] | None = None) -> None:
    """Delete checkpoints, or what is left of them; a failure loses nothing, and is a warning."""
    for path in paths:
        try:
            (delete or remove)(path)
        except Exception as error:  # of any class: each file system has its own
            _logger.warning("The old checkpoint %s could not be deleted: %s", path, error)


def sweep(folder: Place) -> None:
    """Delete what crashes have left in a folder of checkpoints, which no other training writes to."""
    unsealed = [x for x in _inside(folder) if step_of(x) is not None and x.is_dir() and order_of(x) < 0]
    clear(path for path in unsealed if all(map(is_of_a_write, _inside(path))))


def is_of_a_write(path: Place) -> bool:
    """Return whether a name in a checkpoint's folder is one that writing makes, before the manifest, or a user's."""
    return re.fullmatch(r"data-[0-9a-f]{8}|files|\.MANIFEST.*", path.name) is not None


def seal(folder: Place, order: int, files: Mapping[str, Any]) -> None:
    """Make a folder a checkpoint, given the sizes and hashes of its files; `order` grows whatever clocks say."""
    body: dict = {"format": "jaxlit", "format_version": VERSION, "order": order, "files": dict(files)}
    body["digest"] = hashlib.sha256(_canonical(body)).hexdigest()
    places.write(folder / MANIFEST, _canonical(body))


def verify(folder: Place, *, index: int = 0, count: int = 1) -> dict[str, Any]:
    """Refuse a folder whose files are not those of its manifest; return by name the size and hash of every file.

    Of `count` shares of about as many bytes that of the `index` is compared. Other files are never read.
    """
    entries = files_of(folder)
    # The largest go first, one to each share in turns.
    for name, (size, digest) in sorted(entries.items(), key=lambda x: (-x[1][0], x[0]))[index::count]:
        if (length := size_of(folder / name)) != size:
            raise CheckpointError(f"{folder}: {name} has {length} bytes, and had {size} when it was written.")
        if patiently(_digest, folder / name) != digest:
            raise CheckpointError(f"{folder}: {name} is damaged: its bytes are not those that were written.")
    return entries


def files_of(folder: Place) -> dict[str, Any]:
    """Return by name the size and hash of each file in a folder's manifest, which is verified."""
    path = folder / MANIFEST
    body = _parse(path, raw := _bytes(path))
    version, files = body.get("format_version"), body.get("files")
    if body.get("format") != "jaxlit" or type(version) is not int or version < 1 or not isinstance(files, dict):
        raise CheckpointError(f"{path} is no manifest of a checkpoint.")
    if version != VERSION:
        age, remedy = ("a newer", "Update jaxlit") if version > VERSION else ("an older", "Continue with that version")
        raise CheckpointError(
            f"{folder} was written by {age} jaxlit, in format {version}; this one reads format {VERSION}. {remedy}."
        )
    digest = body.pop("digest", None)
    if digest != hashlib.sha256(_canonical(body)).hexdigest() or raw != _canonical({**body, "digest": digest}):
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written.")
    for name, entry in files.items():
        complete = isinstance(entry, list) and [type(x) for x in entry] == [int, str] and entry[0] >= 0
        if not _FILE.fullmatch(name) or name.endswith("..") or not complete:
            raise CheckpointError(f"{path} names {name!r:.80} with {entry!r:.80}, which is no file of a checkpoint.")
    return files


def read_json(path: Place) -> dict[str, Any]:
    """Return a JSON object from a file of bounded size."""
    return _parse(path, _bytes(path))


def read_state(path: Place) -> dict[str, Any]:
    """Return the state of a checkpoint that was verified."""
    with fitting(path):
        return read_json(path / next(name for name in files_of(path) if name.endswith(f"/{STATE}")))


def _bytes(path: Place) -> bytes:
    if (size := size_of(path)) > MOST_JSON:
        raise CheckpointError(f"{path} has {size} bytes, more than the {MOST_JSON} that are read.")
    return patiently(path.read_bytes)


def _parse(path: Place, raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw, object_hook=from_json)
    except (ValueError, TypeError, LookupError, EOFError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}.") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{path} holds a {type(body).__name__}, not a JSON object.")
    return body


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _digest(path: Place) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()
