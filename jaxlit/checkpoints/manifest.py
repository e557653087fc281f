"""The manifest of a checkpoint: its files' sizes and hashes, written last.

The manifest guards against damage, not against forgery: a program that can write the files can write a manifest that
fits. So all that is read here is data, and is checked before it is used.
"""

import errno
import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxlit.errors import CheckpointError

MANIFEST, STATE = "MANIFEST.json", "state.json"
VERSION = 1  # of the layout of a checkpoint
MOST_JSON = 64 * 2**20  # bytes of a JSON file that is read
_BLOCK = 2**22
_TRANSIENT = (errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT)
_WAITS_S = (0.1, 0.5, 2.0)

_logger = logging.getLogger("jaxlit")


def seal(folder: Path, order: int, known: Mapping[str, Any] | None = None) -> None:
    """Put every file of a folder onto the disk, and write the manifest after them.

    Args:
        folder: The folder.
        order: A number that is larger for what was written later, whatever clocks say.
        known: What `on_disk` has returned of some of the files.

    Raises:
        OSError: The disk is full, or the like.
    """
    files = dict(known or {})
    files |= on_disk(
        folder, (path for path in sorted(_files(folder)) if path.relative_to(folder).as_posix() not in files)
    )
    body: dict[str, Any] = {"format": "jaxlit", "format_version": VERSION, "order": order, "files": files}
    body["digest"] = hashlib.sha256(_canonical(body)).hexdigest()
    write(folder / MANIFEST, _canonical(body))
    for path, _, _ in os.walk(folder, topdown=False):
        fsync(Path(path))


def on_disk(folder: Path, paths: Iterable[Path]) -> dict[str, Any]:
    """Put some files of a folder onto the disk, and return by name what the manifest says of each."""
    entries = {}
    for path in paths:
        entries[path.relative_to(folder).as_posix()] = [path.stat().st_size, _digest(path)]
        fsync(path)
    return entries


def verify(folder: Path, *, hashes: bool = True, index: int = 0, count: int = 1) -> dict[str, Any]:
    """Refuse a folder whose files are not those of its manifest.

    Args:
        folder: The folder.
        hashes: Read the files too; otherwise only their sizes are compared.
        index: Which share of the files is compared, of about as many bytes as any other.
        count: How many shares there are. In the first one it is also looked for files that the manifest lacks.

    Returns:
        By name the size and hash of every file.

    Raises:
        CheckpointError: Naming the file.
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
    """Return a JSON object from a file of bounded size.

    Raises:
        CheckpointError: It is missing, too large or no JSON object.
    """
    return _parse(path, _bytes(path))


def write(path: Path, data: bytes) -> None:
    """Write a file and put it onto the disk."""
    patiently(path.write_bytes, data)
    fsync(path)


def patiently(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return `work(*arguments)`, tried again where a network file system asks for patience.

    Raises:
        OSError: The error is of another kind, or stays.
    """
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
    """Return by name the size and hash of each file in a folder's manifest.

    Raises:
        CheckpointError: The file is not a manifest, is damaged, or names a file outside of the folder.
    """
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
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
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
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()
