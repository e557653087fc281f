"""Training in the workers of a real Ray: a killed worker, a second start, an error, workers that do not join, and a
machine that is lost and comes back.

    pip install "ray[train]==2.60.*"
    pytest -m sweep tests/sweeps/test_ray_train.py

It starts Ray on this computer, with fixed ports: `ray.init` gives up where its agents start slowly. Takes five minutes
on two cores.
"""

import csv
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl

ray = pytest.importorskip("ray")
pytest.importorskip("ray.train")
pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # those that Ray gives

ROOT = Path(__file__).parents[2]
PORT = 6390 + 10 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = ("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "runtime-env-agent-port", "metrics-export-port")
STEPS = 20  # of an epoch


class Line(jl.TrainModule):
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


def node(folder: Path, *options: str, first: int) -> subprocess.Popen:
    """Start a machine of the cluster, with ports from the first one on, and wait until it runs."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--node-ip-address=127.0.0.1", *options]
    command += [f"--{name}={first + i}" for i, name in enumerate(PORTS)]
    log = folder / f"node{first}"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    while "Ray runtime started" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.2)
    return process


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start Ray, and end what was started."""
    folder = tmp_path_factory.mktemp("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", f"127.0.0.1:{PORT}")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        options = [
            "--head",
            "--num-cpus=2",
            f"--port={PORT}",
            f"--temp-dir={folder / 'ray'}",
            "--include-dashboard=false",
        ]
        head = node(folder, *options, first=PORT + 1)
        try:
            ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import a test
            yield
        finally:
            ray.shutdown()
            head.send_signal(signal.SIGTERM)
            head.wait(60)


def test_a_killed_worker_is_started_again_from_a_checkpoint(tmp_path: Path) -> None:
    """In the example: each step has one row in the end."""
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    starts = {(int(i), int(step)) for i, step in re.findall(r"process (\d) of 2 starts at step (\d+)", done.stdout)}
    resumed = max(step for _, step in starts)
    assert resumed in (10, 20, 30)
    assert starts == {(0, 0), (1, 0), (0, resumed), (1, resumed)}
    assert steps_of(tmp_path / "digits") == list(range(60))
    assert "reported: step 60" in done.stdout


def test_a_second_start_continues(tmp_path: Path) -> None:
    """Ray's own list of checkpoints names some that are deleted by now."""
    assert job(tmp_path, "twice").fit().metrics["global_step"] == STEPS
    result = job(tmp_path, "twice", epochs=2).fit()
    assert result.metrics["global_step"] == 2 * STEPS
    assert Path(result.checkpoint.path).name == "step_00000040"
    assert (tmp_path / "twice" / "starts1").read_text().split() == ["0", "20"]
    assert steps_of(tmp_path / "twice") == list(range(2 * STEPS))


def test_an_error_in_one_worker_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ray.train.TrainingFailedError, match="ValueError: a bad sample"):
        job(tmp_path, "fails", fails=True).fit()


def test_workers_that_do_not_join_are_refused(tmp_path: Path) -> None:
    """Ray's own trainer for jax starts nothing on CPUs."""
    from ray.train.v2.jax import JaxTrainer

    apart = JaxTrainer(partial(train, tmp_path), scaling_config=ray.train.ScalingConfig(num_workers=2))
    words = "ProcessError: RayReport: the workers of Ray must be the processes of one job"
    with pytest.raises(ray.train.TrainingFailedError, match=words):
        apart.fit()


class Elastic(jl.Callback):
    """Notes where each start begins, of how many processes, and stops once the file "enough" is there."""

    def on_train_start(self, trainer: jl.Trainer, module: Any) -> None:
        if jax.process_index() == 0:
            with (trainer.run_dir / "starts").open("a") as file:
                file.write(f"{jax.process_count()} {trainer.global_step}\n")

    def on_train_batch_end(self, trainer: jl.Trainer, *_: Any) -> None:
        if (trainer.run_dir / "enough").exists():
            trainer.should_stop = True


def train_on(folder: Path) -> None:
    callbacks = [jl.callbacks.ModelCheckpoint(every_n_train_steps=200), jl.integrations.ray.RayReport(), Elastic()]
    trainer = jl.Trainer(strategy="ddp", max_steps=10**7, log_every_n_steps=1, default_root_dir=folder, resume="auto",
                         callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    rows = np.random.default_rng(0).normal(size=(STEPS * 12, 3)).astype(np.float32)
    trainer.fit(Line(rngs=nnx.Rngs(0)), jl.ArrayLoader(rows, 12))


def test_training_goes_on_without_a_lost_machine_and_grows_back(tmp_path: Path) -> None:
    """Four workers, one of them on a machine that is killed: three continue, and four once it is back."""
    folder, address = tmp_path / "elastic", f"--address=127.0.0.1:{PORT}"
    nodes = [node(tmp_path, address, "--num-cpus=1", first=PORT + 100 * k) for k in (1, 2)]

    def starts() -> list[list[int]]:
        file = folder / "starts"
        return [[int(x) for x in line.split()] for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for(processes: list[int]) -> None:
        while [count for count, _ in starts()] != processes and not ended.is_set():
            time.sleep(0.2)

    def lose_a_machine() -> None:
        wait_for([4])
        while not (folder / "checkpoints" / "step_00000200" / "MANIFEST.json").exists() and not ended.is_set():
            time.sleep(0.2)
        os.killpg(nodes[1].pid, signal.SIGKILL)
        wait_for([4, 3])
        nodes.append(node(tmp_path, address, "--num-cpus=1", first=PORT + 300))
        wait_for([4, 3, 4])
        (folder / "enough").touch()

    ended, scaling = threading.Event(), {"elastic_resize_monitor_interval_s": 5.0}
    thread = threading.Thread(target=lose_a_machine)
    thread.start()
    try:
        given: Any = {"storage_path": tmp_path, "name": "elastic", "max_failures": 9, "scaling": scaling}
        result = jl.integrations.ray.RayTrainer(train_on, num_workers=(2, 4), **given).fit()
    finally:
        ended.set()
        thread.join()
        for each in nodes:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGTERM)
            each.wait(60)
    assert [count for count, _ in starts()] == [4, 3, 4]
    assert all(step % 200 == 0 for _, step in starts()) and starts()[1][1] >= 200
    assert steps_of(folder) == list(range(result.metrics["global_step"]))
