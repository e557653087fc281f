"""W&B runs of processes: one that is killed, several of one training, and some in which W&B fails."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx
from kit.processes import Ended, say
from sweeps.wandb_faults import FAULTS, Fault, Outcome
from sweeps.wandb_faults import run as run_faulty
from wandb_backend import Backend
from wandb_model import Line, data
from wandb_runs import QUIET, lines_of, rows_of, start

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint, WandbLogger

# What the processes do ---------------------------------------------------------------------------------


class KillsItself(jl.Callback):
    """Ends a training that has not been resumed by SIGKILL."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.begun = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.begun and trainer.global_step == 5:
            trainer.checkpoint_callback.finish(trainer)
            os.kill(os.getpid(), signal.SIGKILL)


def train_or_go_on() -> None:
    trainer = jl.Trainer(
        strategy="single",
        max_epochs=4,
        callbacks=[WandbLogger("project"), ModelCheckpoint(every_n_train_steps=2), KillsItself()],
        default_root_dir="run",
        resume="auto",
        **QUIET,
    )
    trainer.fit(Line(rngs=nnx.Rngs(0)), data(), data())


class Note(jl.Callback):
    """Logs a text from each process."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        (logger,) = (c for c in trainer.callbacks if isinstance(c, WandbLogger))
        logger.log_text("note", f"from process {jax.process_index()}")


def train_together() -> None:
    for kind in ("shared", "group", "first"):
        logger = WandbLogger("project", processes=kind)
        trainer = jl.Trainer(
            strategy="ddp",
            max_epochs=2,
            callbacks=[logger, Note()],
            default_root_dir=Path("..") / kind,
            enable_checkpointing=False,
            **QUIET,
        )
        trainer.fit(Line(rngs=nnx.Rngs(0)), data(), data())
        say(kind, logger.id)


class StopsTheService(jl.Callback):
    """Stops the SDK's own process, so that it answers nothing any more."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        import wandb

        service: Any = wandb.setup()
        os.kill(service._connection._proc._process.pid, signal.SIGSTOP)


def train_with_a_service_that_stops() -> None:
    from jaxlit.reporting import wandb_run, wandb_start

    wandb_run.MARGIN, wandb_start._EXIT = 0.0, 0.1
    trainer = jl.Trainer(
        strategy="single",
        max_epochs=1,
        callbacks=[WandbLogger(offline=True, finish_timeout=0.5), StopsTheService()],
        default_root_dir="run",
        enable_checkpointing=False,
        **QUIET,
    )
    trainer.fit(Line(rngs=nnx.Rngs(0)), data(), data())
    say("steps", trainer.global_step)


# One process -------------------------------------------------------------------------------------------


def test_a_killed_training_goes_on_in_its_run(tmp_path: Path) -> None:
    with Backend() as backend:
        (killed,) = start(train_or_go_on, tmp_path / "here", backend)
        assert killed.code == -signal.SIGKILL, killed.output + killed.errors
        (again,) = start(train_or_go_on, tmp_path / "here", backend)
        assert (again.code, again.errors) == (0, ""), again.output + again.errors
    ((name, run),) = backend.runs.items()
    assert list(json.loads((tmp_path / "here" / "run" / "wandb_run_ids.json").read_text()).values()) == [name]
    assert (run.sessions, run.resumed, run.exit_code) == (2, True, 0)
    lines, rows = lines_of(tmp_path / "here" / "run"), rows_of(run)
    assert [line["step"] for line in lines] == [0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7]
    # It goes on at step 4; what the killed process had not sent is in the files only.
    tail = [line for line in lines if line["step"] >= 4]
    assert rows[-len(tail) :] == tail
    before = [row for row in rows[: -len(tail)] if row["step"] < 4]
    assert before == lines[: len(before)]


def test_a_service_that_hangs_does_not_keep_the_process_from_its_end(tmp_path: Path) -> None:
    """The SDK waits for its service when the process ends, without limit."""
    with Backend() as backend:
        (ended,) = start(train_with_a_service_that_stops, tmp_path / "here", backend)
    assert (ended.code, ended.errors, ended.said) == (0, "", {"steps": 2})
    offline, told = ended.output.splitlines()
    assert offline.startswith("W&B offline") and told.startswith("W&B: the upload did not finish (no end after")


# Two processes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Backend, list[Ended]]]:
    folder = tmp_path_factory.mktemp("together")
    with Backend() as backend:
        ended = start(train_together, folder / "here", backend, count=2)
        assert [x.code for x in ended] == [0, 0], ended[0].errors + ended[1].errors
        yield folder, backend, ended


def test_two_processes_share_one_run(together: tuple[Path, Backend, list[Ended]]) -> None:
    folder, backend, ended = together
    assert ended[0].said["shared"] == ended[1].said["shared"]
    run = backend.runs[ended[0].said["shared"]]
    assert rows_of(run) == lines_of(folder / "shared")
    notes = {client: [row["note"] for row in rows if "note" in row] for client, rows in run.clients.items()}
    assert sorted(notes.values()) == [["from process 0"], ["from process 1"]]
    labels = {name.partition("/l:")[2] for row in run.events for name in row if name.startswith("system.")}
    assert labels == {"process_0", "process_1"}
    assert (run.sessions, run.exit_code) == (2, 0)


def test_two_processes_have_two_runs_of_one_group(together: tuple[Path, Backend, list[Ended]]) -> None:
    folder, backend, ended = together
    first = ended[0].said["group"]
    assert ended[1].said["group"] == first
    lines = lines_of(folder / "group")
    for index, name in enumerate((first, f"{first}-1")):
        run = backend.runs[name]
        assert (run.group, run.job_type, run.sessions, run.exit_code) == (first, f"process_{index}", 1, 0)
        assert rows_of(run) == lines
        assert [row["note"] for row in run.history if "note" in row] == [f"from process {index}"]


def test_only_the_first_of_two_processes_has_a_run(together: tuple[Path, Backend, list[Ended]]) -> None:
    folder, backend, ended = together
    run = backend.runs[ended[0].said["first"]]
    assert rows_of(run) == lines_of(folder / "first")
    assert [row["note"] for row in run.history if "note" in row] == ["from process 0"]
    assert (run.sessions, run.exit_code) == (1, 0)
    assert len(backend.runs) == 1 + 2 + 1  # with those of the other two ways


# A sample of tests/sweeps/wandb_faults.py --------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    found = run_faulty(tmp_path_factory.mktemp("plain") / "run", None)
    assert (found.code, found.errors) == (0, "")
    return found


@pytest.mark.parametrize("fault", ["no key", "wrong key", "log raises"])
def test_a_fault_of_wandb_changes_nothing_and_is_said_in_one_line(plain: Outcome, tmp_path: Path, fault: str) -> None:
    found = run_faulty(tmp_path / "run", FAULTS[fault])
    assert found.problems(plain, limit=float("inf")) == [], found.output + found.errors


def test_an_unreachable_server_learns_and_leaves_no_secret(plain: Outcome, tmp_path: Path) -> None:
    secrets = {"MY_SECRET": "planted", "WANDB_API_KEY": "planted1" * 5}
    fault = Fault(env=lambda: FAULTS["unreachable server"].env() | secrets, told={"password": "planted"})
    found = run_faulty(tmp_path / "run", fault, (1, 1))
    assert found.problems(plain, limit=float("inf")) == [], found.output + found.errors
    (line,) = found.told
    assert line.startswith("W&B offline (") and "wandb sync" in line
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert [path for path in files if b"planted" in path.read_bytes()] == []
