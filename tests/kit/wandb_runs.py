"""Runs of W&B: a training whose every number is known, processes that log to a server, and runs made up."""

import csv
import json
import os
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from wandb.util import get_core_path

import jaxlit as jl
from kit.processes import Ended, launch
from kit.trainers import make_trainer
from kit.wandb_backend import Backend, ReceivedRun

STEP = "trainer/global_step"
PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
NOISE = np.random.default_rng(3)
X, START = NOISE.normal(size=(32, 40)).astype(np.float32), NOISE.normal(size=(40, 3)).astype(np.float32)
BATCH, LR = 16, 2.0  # such a rate is too much: losses grow, and the best one is the first


class Wide(jl.TrainModule):
    """A product whose gradients have many entries, and whose losses grow."""

    def __init__(self, width: int = 3, api_key: str = "planted") -> None:
        self.kernel = nnx.Param(jnp.asarray(START))

    def loss(self, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ self.kernel[...]) ** 2)

    def training_step(self, batch: Any) -> jax.Array:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        loss = self.loss(batch)
        self.log_dict({"val/loss": loss, "val/score": -loss, "val/other": loss})

    def test_step(self, batch: Any) -> None:
        self.log("test/loss", self.loss(batch))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(LR)


def data() -> jl.ArrayLoader:
    """Return a loader of two batches."""
    return jl.ArrayLoader({"x": X}, BATCH)


def trainer_of(*callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    """Return a Trainer that shows nothing and logs each step; a run's folder is "run" if nothing else is said."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    return make_trainer(*callbacks, **{"default_root_dir": "run", **quiet, **arguments})


def by_hand(epochs: int) -> tuple[list[dict[str, float]], list[np.ndarray], list[np.ndarray]]:
    """Return the rows of a training that validates on the same data, and the gradients and parameters of each step."""
    x, kernel = X.astype(np.float64), START.astype(np.float64)
    rows, grads, params = [], [], []
    for step in range(2 * epochs):
        batch = x[BATCH * (step % 2) :][:BATCH]
        rows.append({"step": step, "epoch": step // 2, "train/loss": float(np.mean((batch @ kernel) ** 2))})
        params.append(kernel)
        grads.append(2 * batch.T @ (batch @ kernel) / (BATCH * 3))
        kernel = kernel - LR * grads[-1]
        if step % 2:
            loss = float(np.mean((x @ kernel) ** 2))
            rows.append({"step": step, "epoch": step // 2, "val/loss": loss, "val/score": -loss, "val/other": loss})
    return rows, grads, params


def start(work: Callable[[], None], folder: Path, *, log_to: Backend | None, **env: str) -> list[Ended]:
    """Run a process that finds no settings of W&B but a server, if there is one, and those of `env`."""
    own = {f"WANDB_{kind}_DIR": str(folder / kind.lower()) for kind in ("CACHE", "DATA", "CONFIG")}
    own |= {"HOME": str(folder), "NETRC": str(folder / "none")}
    if log_to is not None:
        own |= {"WANDB_BASE_URL": log_to.url, "WANDB_API_KEY": 40 * "a"}
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_") or name.lower().endswith("_proxy")]:
            patch.delenv(name)
        for name, value in (own | env).items():
            patch.setenv(name, value)
        return launch(work, folder, count=1, devices=1, join=False)


def rows_of(run: ReceivedRun) -> list[dict[str, Any]]:
    """Return the rows of numbers, without what W&B adds."""
    rows = [{k: v for k, v in row.items() if not k.startswith("_")} for row in run.history]
    return [{"step": row.pop(STEP), **row} for row in rows if "epoch" in row]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that the training wrote to its own file, which has six digits of a number."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_files(folder: str | Path = "run") -> list[Path]:
    """Return the files of the offline runs in a folder, the newest last."""
    return sorted(Path(folder).glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def records(folder: str | Path = "run") -> list[dict[str, Any]]:
    """Return every record of the newest run that has ended, in order."""
    deadline = time.monotonic() + 60
    while True:  # the SDK writes the last of them a little after `finish`
        result = [json.loads(line) for line in _inspect(folder).splitlines()]
        if "exit" in {record["type"] for record in result}:
            return result
        assert time.monotonic() < deadline, f"the newest run in {folder} has not ended"


def summary(folder: str | Path = "run") -> dict[str, Any]:
    """Return what the newest run that has ended comes to: its description, config, summary and exit code."""
    records(folder)
    return json.loads(_inspect(folder, "--summary"))


def history(folder: str | Path = "run") -> list[dict[str, Any]]:
    """Return the rows of the newest run that has ended, without what W&B adds."""
    items = [record["history"]["item"] for record in records(folder) if record["type"] == "history"]
    return [{k: v for k, v in item.items() if not k.startswith("_")} for item in items]


def _inspect(folder: str | Path, *options: str) -> str:
    file = run_files(folder)[-1].resolve()
    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json", *options]
    command += ["--run-file", str(file), str(file.parents[1])]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


class FakeRun:
    """A run that is online, whose server does as a test says.

    Args:
        **does: What its calls do: `log` (with the row), `define`, `finish`, and `arrives`, the wait for an artifact.
    """

    id, url, dir, offline, disabled = "abc123", "http://there/abc123", "/there/files", False, False

    def __init__(self, **does: Callable[..., Any]) -> None:
        self._does = defaultdict(lambda: lambda *row: None, does)
        self.rows, self.codes, self.sent = list[Any](), list[int](), list[str]()
        self.threads, self.summary = set[threading.Thread](), dict[str, Any]()

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.threads.add(threading.current_thread())
        self._does["log"](row)

    def log_artifact(self, artifact: Any, aliases: list[str]) -> Any:
        self.sent.append(aliases[-1])
        return SimpleNamespace(wait=self._does["arrives"])

    def define_metric(self, *args: Any, **given: Any) -> None:
        self._does["define"]()

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)
        self._does["finish"]()
