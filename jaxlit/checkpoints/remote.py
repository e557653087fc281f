"""Checkpoints and weights in a bucket, fetched to a folder of this machine from which everything else reads them.

A bucket has no locks and no rename. A run is therefore written to a folder of this machine, and `jl.callbacks.Mirror`
copies what is complete, the manifest of a checkpoint last.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from jaxlit import checks as check
from jaxlit.checkpoints import files
from jaxlit.checkpoints.files import FOLDER, TEMPORARY, candidates, last_order, remove, step_of
from jaxlit.checkpoints.writing import put
from jaxlit.checks import cache_folder
from jaxlit.distributed.team import once_per_node
from jaxlit.errors import ArgumentError, CheckpointError, JaxlitError

MARK = ".mirror"  # the file with a token of the run, on this machine and in the bucket
_PART = ".jaxlit-part"  # ends the name of a file that is being written
_logger = logging.getLogger("jaxlit")


def check_url(name: str, value: Any, *, owner: str = "Trainer") -> Any:
    """Return a path, or a URL whose file system is installed; refuse any other URL."""
    if check.is_url(value):
        if re.search(r"://[^/@]*:[^/]*@", str(value)):
            raise ArgumentError(
                f"{owner}({name}=...) has a password in its URL, which would be printed. Give it to fsspec by the "
                "environment or its configuration files."
            )
        from fsspec.registry import get_filesystem_class, known_implementations

        for part in str(value).split("::"):
            protocol = part.partition("://")[0]
            try:
                get_filesystem_class(protocol)
            except (ImportError, ValueError) as error:
                package = known_implementations.get(protocol, {"class": "fsspec"})["class"].split(".")[0]
                remedy = "" if package == "fsspec" else f" Run `pip install {package}`."
                remedy = " Pass a string: pathlib shortens URLs." if isinstance(value, Path) else remedy
                raise ArgumentError(f"{owner}({name}={str(value)!r}) cannot be opened: {error}.{remedy}") from error
    return value


def staging(url: str, root: str = "runs") -> Path:
    """Return where this machine has the copy of a URL: in the folder of "runs", or of what was "fetched" to be read."""
    scheme, _, path = url.partition("://")
    path = os.path.abspath(path) if scheme in ("file", "local") else os.path.normpath(f"/{path}")
    return cache_folder(root).absolute() / re.sub(r"\W", "_", scheme) / path.lstrip("/")


def connect(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    # Only the local file system has to be asked to make the folders of a file.
    options = {x: {"auto_mkdir": True} for x in ("file", "local") if f"{x}://" in url}
    fs, path = url_to_fs(url, **options)
    return fs, path.rstrip("/")


def manifests(fs: Any, folder: str) -> dict[str, bytes | None]:
    """Return by name the manifest of each checkpoint in a folder; None for one that is incomplete."""
    names = [name for name in _names(fs, folder) if step_of(Path(name)) is not None]
    return {name: _manifest(fs, f"{folder}/{name}") for name in names}


def names_in(url: str) -> list[str]:
    """Return the names in a folder; none if there is no such folder."""
    with _reading(url):
        return _names(*connect(url))


def local(path: Any, kind: str = "checkpoint", *, run: str | None = None) -> Any:
    """Return the local copy of a URL, fetched if needed; return a path unchanged.

    Of several processes all must call this, except for a file, which each fetches by itself.

    Args:
        path: A path or a URL.
        kind: What is fetched: a "checkpoint", of a run's folder the newest, or the best with `/best` at the end; a
            "file"; or a "run" to continue, if it has begun: its newest and best checkpoints, and its other files.
        run: The URL of the run that continues: its checkpoints are fetched into its folder.

    Raises:
        ArgumentError: The file system of the URL is not installed.
        CheckpointError: The URL cannot be read, or none of its checkpoints verifies.
    """
    if not check.is_url(path):
        return path
    url = str(check_url("url", path, owner="fsspec"))
    in_run = kind == "run" or (run is not None and f"{url}/".startswith(f"{run.rstrip('/')}/"))
    folder = staging(url, "runs" if in_run else "fetched")
    if kind == "file":
        _fetch_file(url, folder)
    else:
        once_per_node(partial(_fetch, url, folder, as_run=kind == "run", prune=not in_run), f"fetching {url}")
    return folder


def _fetch(url: str, folder: Path, *, as_run: bool, prune: bool) -> None:
    with _reading(url):
        fs, base = connect(url)
        with_best, problems = as_run, []
        if base.endswith(("/best", "/last")):
            base, folder, with_best = base.rpartition("/")[0], folder.parent, True
        if not as_run and (raw := _manifest(fs, base)) is not None:
            if not _is_here(folder, raw):
                _fetch_checkpoint(fs, base, folder, raw)
            return
        if as_run:
            mark, known = read_mark(fs, base), folder / MARK
            if mark is not None and known.exists() and known.read_text() != mark:
                raise CheckpointError(
                    f"{url} holds another run than {folder}. Delete that folder, or pass another URL."
                )
        if as_run or fs.isdir(f"{base}/{FOLDER}"):
            base, folder = f"{base}/{FOLDER}", folder / FOLDER
        complete = {name: raw for name, raw in manifests(fs, base).items() if raw is not None}
        for path in candidates(folder) if prune else ():
            if not _is_here(path, complete.get(path.name)):
                remove(path)
        for name in sorted(complete, key=lambda name: _order(complete[name]), reverse=True):
            if as_run and _order(complete[name]) < last_order(folder):
                return  # this machine has gone on, and its newest is not copied yet
            if as_run and not _is_here(folder / name, complete[name]):
                # First: a process that ends here does not take the run for complete at its next start.
                _fetch_files(fs, base.rpartition("/")[0], folder.parent)
            if _fetched(fs, f"{base}/{name}", folder / name, complete[name], problems):
                for best in _best(folder / name) & complete.keys() if with_best else ():
                    _fetched(fs, f"{base}/{best}", folder / best, complete[best], problems)
                return
        if problems or not as_run:
            raise CheckpointError("\n  ".join([f"There is no checkpoint in {url} that can be used.", *problems]))


def write(fs: Any, path: str, source: bytes | Path) -> None:
    """Write a file of a run; a process that ends meanwhile leaves the old one or the new one."""
    in_place = "file" in getattr(fs, "fs", fs).protocol  # also if another one wraps it; buckets show complete files
    part = f"{path}{_PART}" if in_place else path
    if isinstance(source, bytes):
        fs.pipe_file(part, source)
    else:
        fs.put_file(str(source), part)
    if in_place:
        fs.mv(part, path)


def read_mark(fs: Any, base: str) -> str | None:
    """Return the token of a run in a bucket; None if no run was copied there."""
    try:
        return fs.cat_file(f"{base}/{MARK}").decode()
    except FileNotFoundError:
        return None


def _fetched(fs: Any, source: str, path: Path, raw: bytes, problems: list[str]) -> bool:
    """Fetch a checkpoint unless it is here; returns whether that succeeded."""
    try:
        if not _is_here(path, raw):
            _fetch_checkpoint(fs, source, path, raw)
    except CheckpointError as error:
        _logger.warning("A checkpoint in a bucket was skipped. %s", error)
        problems.append(str(error))
        return False
    return True


def _is_here(path: Path, raw: bytes | None) -> bool:
    """Return whether a checkpoint is on this machine, complete and with this manifest."""
    with contextlib.suppress(CheckpointError, OSError):  # its hashes are verified when it is read
        return (path / files.MANIFEST).read_bytes() == raw and bool(files.verify(path, hashes=False))
    return False


def _fetch_checkpoint(fs: Any, source: str, path: Path, raw: bytes) -> None:
    """Fetch a checkpoint under a temporary name, verify it and rename it."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{(token := secrets.token_hex(4))}")
    temporary.mkdir(parents=True)
    try:
        files.write(temporary / files.MANIFEST, raw)
        names = [*files.files_of(temporary)]
        for name in names:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        fs.get([f"{source}/{name}" for name in names], [str(temporary / name) for name in names])
        files.verify(temporary)
        if not _is_here(path, raw):  # another process may have fetched it, and read it
            put(temporary, path, token)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source}: a file is missing: {error}.") from error
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(temporary), source)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _best(path: Path) -> set[str]:
    """Return the names of the checkpoints that a checkpoint knows as the best."""
    states = files.read_json(path / files.STATE)["callbacks"].values()
    return {name for state in states for name, _ in state.get("best_k_models", ())}


def _fetch_files(fs: Any, base: str, folder: Path) -> None:
    """Fetch the files of a run that are in none of its checkpoints."""
    for path in fs.find(base):
        name = path.removeprefix(base).lstrip("/")
        if not ({FOLDER, ".."} & {*name.split("/")} or name.endswith(_PART)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(path, str(folder / name))


def _fetch_file(url: str, path: Path) -> None:
    with _reading(url):
        fs, base = connect(url)
        known, part = path.with_name(f".{path.name}.info"), path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        fs.invalidate_cache()
        info = repr(fs.info(base))  # with its size, and its time or hash
        if path.exists() and known.exists() and known.read_text() == info:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fs.get_file(base, str(part))
            part.replace(path)
            known.write_text(info)
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def _reading(url: str) -> Iterator[None]:
    try:
        yield
    except JaxlitError:
        raise
    except Exception as error:  # of any class: each file system has its own
        raise CheckpointError(f"{url} cannot be read: {type(error).__name__}: {error}.") from error


def _names(fs: Any, folder: str) -> list[str]:
    fs.invalidate_cache()  # other machines write there
    try:
        return [path.rstrip("/").rpartition("/")[2] for path in fs.ls(folder, detail=False)]
    except FileNotFoundError:
        return []


def _manifest(fs: Any, folder: str) -> bytes | None:
    """Return the manifest of a checkpoint, None if it is not there, or was cut."""
    try:
        raw = fs.cat_file(f"{folder}/{files.MANIFEST}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return raw if type(_order(raw)) is int else None


def _order(raw: bytes) -> int:
    return json.loads(raw)["order"]
