"""The job that the environment names, what only process 0 does, and reads that one process alone makes."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.distributed import global_state
from kit.batches import random
from kit.modules import Linear
from kit.processes import Ended, launch, say
from kit.trainers import BARE, fit, make_trainer

import jaxlit as jl
from jaxlit.distributed import job as start
from jaxlit.distributed.job import job_size
from jaxlit.distributed.team import fetch
from jaxlit.errors import ProcessError

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "here", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"}
JOBS = {
    "slurm": (SLURM | {"SLURM_LOCALID": "0"}, 4),
    "a shell of slurm": (SLURM, 1),
    "mpi": ({"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:3", "OMPI_COMM_WORLD_SIZE": "3"}, 3),
    "a pod": ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 1),
    "variables": ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2"}, 2),
    "alone on purpose": (SLURM | {"SLURM_LOCALID": "0", "JAX_NUM_PROCESSES": "1"}, 1),
    "nothing": ({}, 1),
}


@pytest.mark.parametrize("job", JOBS)
def test_the_size_of_a_job_is_read_from_the_environment(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, size = JOBS[job]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert job_size() == size


def test_workers_of_ray_that_have_not_joined_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(get_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: worker))
    jax.devices()
    with pytest.raises(ProcessError, match="a job of 2 processes, but jax runs in this one already"):
        make_trainer(**BARE)
    monkeypatch.setattr("jaxlit.distributed.job.jax_runs", lambda: False)
    with pytest.raises(ProcessError, match="a job of 2 processes, and jax has found 1"):
        make_trainer(**BARE)


def test_a_trainer_that_would_train_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    with pytest.raises(ProcessError, match=r"a job of 3 processes, but jax runs .* jl\.distributed\.initialize\(\)"):
        make_trainer(**BARE)


def test_a_trainer_joins_the_job_before_jax_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = list[dict[str, Any]]()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "a:1")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    monkeypatch.setattr("jaxlit.distributed.job.jax_runs", lambda: False)
    monkeypatch.setattr(start, "jax_runs", lambda: False)
    monkeypatch.setattr(start, "fate", lambda *args: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **named: joined.append(named))
    with pytest.raises(ProcessError, match="a job of 3 processes, and jax has found 1"):
        make_trainer(**BARE)
    monkeypatch.setattr(global_state, "num_processes", 3)
    make_trainer(**BARE)
    assert [named["heartbeat_timeout_seconds"] for named in joined] == [100, 100]


def test_rank_zero_only_runs_in_process_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    @jl.rank_zero_only
    def written(text: str) -> int:
        return len(text)

    assert written("done") == 4
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert written("done") is None


class Reader(jl.Callback):
    """Reads weights that both processes hold parts of, in one of them."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and batch_idx == 1:
            fetch(module.kernel[...])


def read_alone() -> None:
    (rows,) = random(1, rows=32)
    say("global", jax.process_count())
    arguments = BARE | {"debug": True, "max_epochs": 1, "strategy": jl.strategies.FSDP(min_size=0)}
    fit(Linear(4), jl.ArrayLoader(rows | {"x": np.ones((32, 4), np.float32)}, 8), None, Reader(), **arguments)


@pytest.mark.full
def test_debug_names_the_callback_that_reads_in_one_process(tmp_path: Path) -> None:
    ended: list[Ended] = launch(read_alone, tmp_path, devices=2, grace=60.0)
    assert [one.code for one in ended] == [1, 1]
    for one in ended:
        assert "at 'Reader.on_train_batch_end reads an array that all processes hold parts of'" in one.errors
        assert "at 'the end of step 2'" in one.errors
