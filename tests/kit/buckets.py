"""Buckets in memory, and another machine that knows nothing but what is in them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import jaxlit as jl
from kit.checkpoints import train

URL = "bucket://runs/net"


class Bucket(MemoryFileSystem):
    """A bucket in memory that notes what is done in it, and calls `meet(operation, path)` before it is done."""

    protocol, cachable = "bucket", False
    store: dict[str, Any] = {}  # noqa: RUF012 - of all of them, as fsspec's own
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    log: list[tuple[str, str]] = []  # noqa: RUF012
    meet: Callable[[str, str], None] = staticmethod(lambda operation, path: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("bucket://"))

    @classmethod
    def _note(cls, operation: str, path: str) -> None:
        cls.log.append((operation, path))
        cls.meet(operation, path)

    def _open(self, path: str, mode: str = "rb", **named: Any) -> Any:
        self._note("get" if mode == "rb" else "put", path)  # which `put_file` and `pipe_file` come to as well
        return super()._open(path, mode, **named)

    def cat_file(self, path: str, *arguments: Any, **named: Any) -> Any:
        self._note("get", path)
        return super().cat_file(path, *arguments, **named)

    def rm_file(self, path: Any) -> None:
        self._note("remove", path)
        super().rm_file(path)


def make_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty bucket, and a machine whose folder of caches is returned."""
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    for name, value in {"store": {}, "pseudo_dirs": [""], "log": [], "meet": staticmethod(lambda *_: None)}.items():
        monkeypatch.setattr(Bucket, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "machine"))
    return folder / "machine"


def replace(machine: Path) -> None:
    """Continue on another machine."""
    shutil.rmtree(machine)


def write(name: str, data: bytes) -> None:
    """Write a file of the run in the bucket, as a stranger may."""
    fs, base = fsspec.core.url_to_fs(URL)
    fs.pipe_file(f"{base}/{name}", data)


def in_bucket(url: str = URL) -> dict[str, bytes]:
    """Return the files of a run in a bucket, without claims."""
    fs, base = fsspec.core.url_to_fs(url)
    paths = [path for path in fs.find(base) if "/." not in path.removeprefix(base)]
    return {os.path.relpath(path, base): fs.cat_file(path) for path in paths}


def rows_in_bucket(url: str = URL) -> dict[str, bytes]:
    """Return those that are of no checkpoint."""
    return {name: data for name, data in in_bucket(url).items() if not name.startswith("checkpoints/")}


def in_folder(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder, without locks."""
    files = [x for x in folder.rglob("*") if x.is_file() and not x.name.startswith(".")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def checkpoints(url: str = URL) -> list[str]:
    """Return the names of the complete checkpoints in a bucket."""
    return sorted(name.split("/")[1] for name in in_bucket(url) if name.endswith("MANIFEST.json"))


def saves(**arguments: Any) -> jl.callbacks.ModelCheckpoint:
    """Return a callback that writes a checkpoint after each epoch."""
    return jl.callbacks.ModelCheckpoint(**{"every_n_epochs": 1} | arguments)


def go(epochs: int, *callbacks: jl.Callback, url: str = URL, **arguments: Any) -> jl.Trainer:
    """Train in a bucket, or continue there, so many epochs of three steps."""
    return train(url, epochs, *(callbacks or [saves()]), **{"resume": "auto"} | arguments)
