"""Checkpoints to count, to damage and to forge."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxlit as jl
from kit.batches import random
from kit.inside import is_key
from kit.modules import Linear
from kit.trainers import fit

STEPS = 3  # of an epoch of `loader`
OLDER, NEWER = "step_00000003", "step_00000006"


def loader() -> jl.ArrayLoader:
    """Return three batches of eight rows for `Linear`, in an order that each epoch draws again."""
    (batch,) = random(1, rows=8 * STEPS)
    return jl.ArrayLoader(batch, 8, shuffle=True)


def train(root: Any, epochs: int, *callbacks: jl.Callback, module: Any = None, **arguments: Any) -> jl.Trainer:
    """Train `Linear` on `loader` in a run's folder, with arguments of the Trainer and of `fit`."""
    model = Linear() if module is None else module
    return fit(model, loader(), None, *callbacks, default_root_dir=root, max_epochs=epochs, **arguments)


def keep_all(**arguments: Any) -> jl.callbacks.ModelCheckpoint:
    return jl.callbacks.ModelCheckpoint(save_top_k=-1, **arguments)


def bytes_of(trainer: jl.Trainer) -> list[bytes]:
    """Return the bytes of all that a training step changes."""
    leaves = [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(trainer.state)]
    return [np.asarray(x).tobytes() for x in leaves]


def data_of(path: str | Path) -> Path:
    """Return the folder with a checkpoint's files, which has a name of its own."""
    (folder,) = [x for x in Path(path).iterdir() if re.fullmatch("data-[0-9a-f]{8}", x.name)]
    return folder


def state_of(path: str | Path) -> dict[str, Any]:
    """Return what a checkpoint keeps beside its arrays."""
    return json.loads((data_of(path) / "state.json").read_text())


def names(folder: str | Path = "run/checkpoints") -> list[str]:
    """Return what is in a folder, but for its lock and the mark of its end."""
    return sorted(p.name for p in Path(folder).iterdir() if not p.name.startswith((".lock", ".run-lock", ".ended")))


# Forging: a manifest as documented, made here, so that only one thing about a checkpoint is wrong.


def canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def entry_of(data: bytes) -> list[Any]:
    return [len(data), hashlib.sha256(data).hexdigest()]


def seal(folder: Path, entries: dict[str, Any] | None = None, **changed: Any) -> None:
    """Write a manifest that fits the files, with some entries and members as told."""
    result = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    files = {name: entry_of(path.read_bytes()) for name, path in result.items() if name != "MANIFEST.json"}
    body = {"format": "jaxlit", "format_version": 3, "order": 1, "files": files | (entries or {})} | changed
    body["digest"] = hashlib.sha256(canonical(body)).hexdigest()
    (folder / "MANIFEST.json").write_bytes(canonical(body))


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what state.json says, and seal the checkpoint again."""
    state = state_of(folder)
    change(state)
    (data_of(folder) / "state.json").write_text(json.dumps(state))
    seal(folder)


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change that puts a value at a path of keys."""

    def change(state: dict[str, Any]) -> None:
        inside: Any = state
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value

    return change


def flip(data: bytes, at: int, bits: int = 1) -> bytes:
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]
