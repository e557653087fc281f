"""Training in the workers of a real Ray: a killed worker, a second start, an error, and workers that do not join.

    pip install "ray[train]==2.60.*"
    python tests/sweeps/ray_train.py

It starts Ray on this computer, with fixed ports: `ray.init` gives up where its agents start slowly. Prints each case
with its seconds; fails at the first that is not as it must be. Takes five minutes on two cores.
"""

import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import ray
from flax import nnx
from ray.train import ScalingConfig, TrainingFailedError
from ray.train.v2.jax import JaxTrainer

import jaxlit as jl

ROOT = Path(__file__).parents[2]
PORT = 6390
PORTS = ("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "runtime-env-agent-port", "metrics-export-port")
STEPS = 20  # of an epoch


class Line(jl.TrainModule):
    """One layer."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(3, 1, rngs=rngs)

    def training_step(self, batch: jax.Array) -> jax.Array:
        self.log("loss", loss := (self.layer(batch) ** 2).mean())
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


class Notes(jl.Callback):
    """Notes the step at which each process starts, and fails in one of them."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def on_train_start(self, trainer: jl.Trainer, module: Any) -> None:
        with (trainer.run_dir / f"starts{jax.process_index()}").open("a") as file:
            file.write(f"{trainer.global_step}\n")

    def on_train_batch_end(self, trainer: jl.Trainer, *_: Any) -> None:
        if self.fails and jax.process_index() == 1 and trainer.global_step == 15:
            raise ValueError("a bad sample")


def train(folder: Path, epochs: int = 1, fails: bool = False) -> None:
    """Train in a worker."""
    jl.testing.fake_devices(4)
    callbacks = [jl.callbacks.ModelCheckpoint(every_n_train_steps=10), jl.integrations.ray.RayReport(), Notes(fails)]
    trainer = jl.Trainer(strategy="ddp", max_epochs=epochs, log_every_n_steps=1, default_root_dir=folder, resume="auto",
                         callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    rows = np.random.default_rng(0).normal(size=(STEPS * 16, 3)).astype(np.float32)
    trainer.fit(Line(rngs=nnx.Rngs(0)), jl.ArrayLoader(rows, 16))


def job(storage: Path, name: str, **given: Any) -> jl.integrations.ray.RayTrainer:
    return jl.integrations.ray.RayTrainer(partial(train, **given), num_workers=2, storage_path=storage, name=name)


def steps_of(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(row["loss"] for row in rows)
    return [int(row["step"]) for row in rows]


def a_killed_worker(storage: Path) -> str:
    """The example: the second attempt goes on from a checkpoint, and each step has one row in the end."""
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), str(storage)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    starts = {(int(i), int(step)) for i, step in re.findall(r"process (\d) of 2 starts at step (\d+)", done.stdout)}
    resumed = max(step for _, step in starts)
    assert resumed in (10, 20, 30)
    assert starts == {(0, 0), (1, 0), (0, resumed), (1, resumed)}
    assert steps_of(storage / "digits") == list(range(60))
    assert "reported: step 60" in done.stdout
    return f"killed in step 35, resumed at {resumed}, 60 rows"


def a_second_start(storage: Path) -> str:
    """Ray's own list of checkpoints names some that are deleted by now."""
    assert job(storage, "twice").fit().metrics["global_step"] == STEPS
    result = job(storage, "twice", epochs=2).fit()
    assert result.metrics["global_step"] == 2 * STEPS
    assert Path(result.checkpoint.path).name == "step_00000040"
    assert (storage / "twice" / "starts1").read_text().split() == ["0", "20"]
    assert steps_of(storage / "twice") == list(range(2 * STEPS))
    return "resumed at 20, 40 rows"


def error_of(fit: Any) -> str:
    try:
        fit()
    except TrainingFailedError as error:
        return str(error)
    raise AssertionError("it did not fail")


def an_error_in_one_worker(storage: Path) -> str:
    error = error_of(job(storage, "fails", fails=True).fit)
    assert "ValueError: a bad sample" in error, error
    return "Ray raises the ValueError"


def workers_that_do_not_join(storage: Path) -> str:
    """Ray's own trainer for jax starts nothing on CPUs."""
    apart = JaxTrainer(partial(train, storage), scaling_config=ScalingConfig(num_workers=2))
    error = error_of(apart.fit)
    assert "ProcessError: RayReport: the workers of Ray must be the processes of one job" in error, error
    return "refused by name"


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Start Ray, and end what was started."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2"]
    command += [f"--port={PORT}", "--node-ip-address=127.0.0.1", f"--temp-dir={folder / 'ray'}"]
    command += [f"--{name}={PORT + 1 + i}" for i, name in enumerate(PORTS)]
    with (folder / "head").open("w") as log:
        head = subprocess.Popen([*command, "--include-dashboard=false"], stdout=log, stderr=subprocess.STDOUT)
    try:
        while "Ray runtime started" not in (folder / "head").read_text():
            assert head.poll() is None, (folder / "head").read_text()
            time.sleep(0.2)
        yield
    finally:
        ray.shutdown()
        head.send_signal(signal.SIGTERM)
        head.wait(60)


def main() -> None:
    os.environ |= {"RAY_ADDRESS": f"127.0.0.1:{PORT}", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, cluster(Path(name)):
        for case in (a_killed_worker, a_second_start, an_error_in_one_worker, workers_that_do_not_join):
            begun = time.monotonic()
            told = case(Path(name) / case.__name__)
            print(f"{case.__name__}: {told}, {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
