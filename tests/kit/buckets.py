"""Buckets in memory, and another machine that knows nothing but what is in them."""

import os
import shutil
import threading
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
    """A bucket in memory that notes what is done in it, and calls `meet(operation, path)` then."""

    protocol, cachable = "bucket", False
    store: dict[str, Any] = {}  # noqa: RUF012 - of all of them, as fsspec's own
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    log: list[tuple[str, str]] = []  # noqa: RUF012
    changed = threading.Condition()
    meet: Callable[[str, str], None] = staticmethod(lambda operation, path: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("bucket://"))

    @classmethod
    def _note(cls, operation: str, path: str) -> None:
        with cls.changed:
            cls.log.append((operation, path))
            cls.changed.notify_all()
        cls.meet(operation, path)

    @classmethod
    def wait_for(cls, operation: str, text: str) -> None:
        """Wait until an operation on a path with a text begins."""
        with cls.changed:
            assert cls.changed.wait_for(lambda: any(o == operation and text in path for o, path in cls.log), 60)

    def put_file(self, lpath: Any, rpath: Any, *args: Any, **named: Any) -> None:
        self._note("put", rpath)
        super().put_file(lpath, rpath, *args, **named)

    def pipe_file(self, path: Any, value: Any, *args: Any, **named: Any) -> None:
        self._note("put", path)
        super().pipe_file(path, value, *args, **named)

    def get_file(self, rpath: Any, lpath: Any, *args: Any, **named: Any) -> None:
        self._note("get", rpath)
        super().get_file(rpath, lpath, *args, **named)

    def rm_file(self, path: Any) -> None:
        self._note("remove", path)
        super().rm_file(path)


class WaitsForCopies(jl.Callback):
    """Waits until a checkpoint is being copied, all or that of one step, before a newer one can take its place."""

    def __init__(self, step: int | None = None) -> None:
        self.step, self.name = step, ""

    def on_checkpoint_saved(self, trainer: jl.Trainer, module: Any, callback: Any, path: Path) -> None:
        self.name = path.name if self.step is None or path.name.endswith(f"{self.step}") else ""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.name:
            Bucket.wait_for("put", self.name)

    def on_train_end(self, trainer: jl.Trainer, module: Any) -> None:
        self.on_train_batch_end()


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


def in_bucket(url: str = URL) -> dict[str, bytes]:
    """Return the files of a run in a bucket."""
    fs, base = fsspec.core.url_to_fs(url)
    return {os.path.relpath(path, base): fs.cat_file(path) for path in fs.find(base)}


def in_folder(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder, without locks."""
    files = [x for x in folder.rglob("*") if x.is_file() and (not x.name.startswith(".") or x.name == ".mirror")]
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
