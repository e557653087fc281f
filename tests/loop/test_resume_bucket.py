"""A process that dies while it writes to a bucket, and its machine with it, is continued by another one."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from kit.buckets import checkpoints, in_bucket
from kit.processes import launch
from kit.resume_model import fit, make_trainer
from kit.resume_runs import problems_of, write_final

import jaxlit as jl
from jaxlit.checkpoints.places import RemotePath

EPOCHS, EVERY, CUT = 2, 2, 10  # optimizer steps between checkpoints, and the one whose copy is cut


def train(root: Path, number: int, **arguments: Any) -> None:
    """Train, or continue; `metrics.csv` is then next to the journal."""
    saves = jl.callbacks.ModelCheckpoint(every_n_train_steps=EVERY)
    given: dict[str, Any] = {"max_epochs": EPOCHS, "enable_checkpointing": True, "resume": "auto"}
    trainer = fit(make_trainer("single", root, [saves], f"journal{number}", **given | arguments), seed=number)
    write_final(trainer, root)
    if trainer.run_dir != root.absolute():
        shutil.copy(trainer.run_dir / "metrics.csv", root)


def whole() -> None:
    train(Path("whole"), 0)


def killed() -> None:
    write = RemotePath.write_bytes

    def write_or_die(self: RemotePath, data: bytes) -> None:
        if f"step_{CUT:08d}" in str(self) and self.name == "state.json":
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, data)

    RemotePath.write_bytes = write_or_die
    train(Path("cut"), 0, default_root_dir=f"dir::file://{Path.cwd()}/bucket")


def resumed() -> None:
    train(Path("cut"), 1, default_root_dir=f"dir::file://{Path.cwd()}/bucket")


@pytest.mark.full
def test_a_machine_dies_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    (first,) = launch(whole, tmp_path, count=1, join=False)
    assert first.code == 0, first.errors
    (died,) = launch(killed, tmp_path, count=1, join=False)
    assert died.code == -signal.SIGKILL, died.errors
    url = f"dir::file://{tmp_path}/bucket"
    assert [name for name in in_bucket(url) if name.startswith(f"checkpoints/step_{CUT:08d}")]
    assert f"step_{CUT:08d}" not in checkpoints(url)
    assert checkpoints(url)
    shutil.rmtree(tmp_path / "machine")
    (last,) = launch(resumed, tmp_path, count=1, join=False)
    assert last.code == 0, last.errors
    problems = problems_of(tmp_path / "cut", tmp_path / "whole", 2)
    assert problems.pop("lost") >= EVERY
    assert problems == {}
    assert checkpoints(url) == ["step_00000016"]
    assert in_bucket(url)["metrics.csv"] == (tmp_path / "whole" / "metrics.csv").read_bytes()
