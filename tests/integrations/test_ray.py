"""Ray Train, with a stand-in for Ray; `tests/sweeps/test_ray_train.py` has the real one."""

import csv
import doctest
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from kit.line import Line, make_batches
from kit.processes import launch, say
from kit.refusals import refuses
from kit.trainers import fit

import jaxlit as jl
from jaxlit.errors import ArgumentError, ProcessError
from jaxlit.integrations import ray as room


class Ray:
    """What a worker sees of Ray, and a `DataParallelTrainer` that runs the function here.

    Args:
        rank: Of this worker.
        size: How many workers there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.reports: list[tuple[dict[str, float], Path | None]] = []
        self.scaling, self.run = dict[str, Any](), dict[str, Any]()

    def broadcast_from_rank_zero(self, data: str | None) -> str:
        """Give the data of rank 0 to the other one of two, by a pipe."""
        if self.size > 1:
            with suppress(FileExistsError):
                os.mkfifo("pipe")
            if data is None:
                data = Path("pipe").read_text()
            else:
                Path("pipe").write_text(data)
        assert data is not None
        return data

    def report(self, metrics: dict[str, float], *, checkpoint: Any, checkpoint_upload_mode: str) -> None:
        assert checkpoint_upload_mode == "none"
        assert checkpoint is None or Path(checkpoint, "MANIFEST.json").exists()
        self.reports.append((metrics, checkpoint and Path(checkpoint)))

    def make_trainer(self, function: Callable[[], None], *, scaling_config: Any, run_config: Any) -> Any:
        self.scaling, self.run = scaling_config, run_config
        return SimpleNamespace(fit=function)

    def install(self, put: Callable[[dict[str, ModuleType], str, Any], None]) -> "Ray":
        """Put its modules where Python finds them, by a function like `monkeypatch.setitem`."""
        worker = SimpleNamespace(get_world_size=lambda: self.size, get_world_rank=lambda: self.rank)
        names: dict[str, dict[str, Any]] = {
            "ray": {},
            "ray.util": {"get_node_ip_address": lambda: "127.0.0.1"},
            "ray.train": {"get_context": lambda: worker, "report": self.report, "Checkpoint": str},
            "ray.train.collective": {"broadcast_from_rank_zero": self.broadcast_from_rank_zero},
            "ray.train.v2.api.data_parallel_trainer": {"DataParallelTrainer": self.make_trainer},
        }
        names["ray.train"] |= dict.fromkeys(("ScalingConfig", "RunConfig", "FailureConfig"), dict)
        names["ray.train"]["CheckpointUploadMode"] = SimpleNamespace(NO_UPLOAD="none")
        for name, values in names.items():
            module = ModuleType(name)
            vars(module).update(values)
            put(sys.modules, name, module)
        sys.modules["ray"].train = sys.modules["ray.train"]  # type: ignore[attr-defined]
        sys.modules["ray.train"].collective = sys.modules["ray.train.collective"]  # type: ignore[attr-defined]
        return self


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ray:
    monkeypatch.chdir(tmp_path)
    return Ray().install(monkeypatch.setitem)


def train(**given: Any) -> jl.Trainer:
    """Train six steps of an epoch, with a checkpoint every two."""
    saves = jl.callbacks.ModelCheckpoint(every_n_train_steps=2, every_n_epochs=1)
    given = {"log_every_n_steps": 1, "default_root_dir": "run"} | given
    return fit(Line(), jl.ArrayLoader(make_batches(48)[0], 8), None, saves, room.RayReport(), **given)


def test_each_checkpoint_is_reported_with_values_logged_before_it(ray: Ray) -> None:
    train()
    with open("run/metrics.csv") as file:
        losses = {int(row["step"]): float(row["loss_step"]) for row in csv.DictReader(file) if row["loss_step"]}
    assert [path and path.name for _, path in ray.reports] == ["step_00000002", "step_00000004", "step_00000006"]
    for metrics, path in ray.reports:
        assert path is not None
        assert metrics["global_step"] == int(path.name.removeprefix("step_"))
        assert metrics["step"] < metrics["global_step"]
        assert losses[int(metrics["step"])] == pytest.approx(metrics["loss_step"], rel=1e-5)


def test_a_resumed_training_reports_values_from_before(ray: Ray) -> None:
    train()
    before = ray.reports[-1][0]
    train(max_epochs=2, resume="auto", log_every_n_steps=100, logger=False)
    after = ray.reports[3][0]
    assert after["global_step"] == 8
    assert after["loss_epoch"] == before["loss_epoch"]


def test_only_the_first_worker_gives_a_checkpoint(ray: Ray) -> None:
    ray.rank = 1
    train()
    assert ray.reports == [({}, None)] * 3


def test_a_job_that_has_failed_reports_nothing(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "team", lambda: SimpleNamespace(over=True))
    train()
    assert ray.reports == []


def test_workers_that_each_train_alone_are_refused(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.size = 2
    refuses(ProcessError, train, "a job of 2 processes, .* start them with jl.integrations.ray.RayTrainer")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    refuses(ProcessError, train, "RayReport: .* Ray has 2, and jax 1: each would train alone.*jl.integrations.ray.RayT")
    assert not Path("run/metrics.csv").exists()


def test_the_arguments_become_those_of_ray(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"num_workers": 4, "storage_path": "shared", "name": "digits", "max_failures": 3}
    stale = Path("shared/digits/checkpoint_manager_snapshot.json")
    stale.parent.mkdir(parents=True)
    stale.touch()
    calls = list[Path]()
    job = room.RayTrainer(calls.append, **given, devices="tpu", scaling={"topology": "4x4"})
    monkeypatch.setattr(room, "_join", lambda devices: calls.append(Path(devices)))
    job.fit()
    assert calls == [Path("tpu"), Path.cwd() / "shared" / "digits"]
    assert ray.scaling == {"num_workers": 4, "resources_per_worker": None, "use_tpu": True, "topology": "4x4"}
    assert ray.run["name"] == "digits"
    assert ray.run["storage_path"] == str(Path.cwd() / "shared")
    assert ray.run["failure_config"] == {"max_failures": 3}
    assert not stale.exists()


def test_workers_on_cpus_ask_for_no_other_device(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    job = room.RayTrainer(print, num_workers=1, storage_path=".", name="x", resources_per_worker={"CPU": 3})
    monkeypatch.setattr(room, "_join", lambda devices: None)
    job.fit()
    assert ray.scaling == {"num_workers": 1, "resources_per_worker": {"CPU": 3}}


def test_an_unknown_device_is_refused() -> None:
    make = lambda: room.RayTrainer(print, num_workers=1, storage_path=".", name="x", devices="cuda")  # noqa: E731
    refuses(ArgumentError, make, "RayTrainer.*devices.*'cuda'", "cpu.*gpu.*tpu")


def test_a_missing_ray_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.train", None)
    job = room.RayTrainer(print, num_workers=1, storage_path=".", name="x")
    refuses(ProcessError, job.fit, r'RayTrainer needs ray.*pip install "ray\[train\]"')


def a_worker() -> None:
    rank = int(sys.argv[1].split('"index": ')[1][0])
    ray = Ray(rank, size=2).install(dict.__setitem__)
    jax.config.update("jax_platforms", None)  # as in a worker

    def work(folder: Path) -> None:
        trainer = train(strategy="ddp", default_root_dir=folder)
        say("processes", [jax.process_index(), jax.process_count(), len(jax.devices())])
        say("platforms", jax.config.jax_platforms)
        say("weights", np.asarray(trainer.module.w[...].addressable_data(0)).tolist())
        say("reports", [path and path.name for _, path in ray.reports])

    room.RayTrainer(work, num_workers=2, storage_path="ray", name="job").fit()


@pytest.mark.full
def test_the_workers_are_the_processes_of_one_job(tmp_path: Path) -> None:
    first, second = launch(a_worker, tmp_path, join=False)
    assert first.code == 0, first.errors
    assert second.code == 0, second.errors
    assert first.said["processes"] == [0, 2, 8]
    assert second.said["processes"] == [1, 2, 8]
    assert first.said["platforms"] == "cpu"
    assert first.said["weights"] == second.said["weights"]
    assert first.said["reports"] == ["step_00000002", "step_00000004", "step_00000006"]
    assert second.said["reports"] == [None, None, None]


def without_an_accelerator() -> None:
    Ray().install(dict.__setitem__)
    room.RayTrainer(print, num_workers=1, storage_path="ray", name="job", devices="gpu").fit()


@pytest.mark.full
def test_a_worker_without_the_devices_is_refused(tmp_path: Path) -> None:
    (worker,) = launch(without_an_accelerator, tmp_path, count=1, join=False)
    assert worker.code == 1
    assert "RayTrainer(devices='gpu'): jax uses cpu in worker 0" in worker.errors


def test_the_examples_of_the_docstrings_run() -> None:
    assert doctest.testmod(room, raise_on_error=True).attempted > 3
