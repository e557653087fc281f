"""Two real processes train in a bucket together: one copies, and the others wait for it."""

import re
import shutil
import socket
from pathlib import Path
from typing import Any

import jax
import pytest
from kit.buckets import checkpoints, in_bucket, in_folder, saves
from kit.checkpoints import loader
from kit.modules import Linear
from kit.processes import Ended, error_of, launch, say
from kit.trainers import make_trainer

import jaxlit as jl


def go(epochs: int, root: str | None = None) -> None:
    url = f"file://{Path.cwd().parent}/bucket" if root is None else root
    trainer = make_trainer(saves(), strategy="ddp", max_epochs=epochs, default_root_dir=url, resume="auto")
    trainer.fit(Linear(), loader())
    say("ended", [trainer.global_step, trainer.module.kernel[...].ravel().tolist(), str(trainer.run_dir)])


JOBS: dict[str, tuple[Any, ...]] = {"first": (1,), "second": (2,), "whole": (2, "whole")}  # by the folder's name


def work() -> None:
    go(*JOBS[Path.cwd().name])


def on_two_computers() -> None:
    name = socket.gethostname()
    socket.gethostname = lambda: f"{name}-{jax.process_index()}"
    say("refused", error_of(lambda: go(1)))
    mirror = jl.callbacks.Mirror(f"file://{Path.cwd().parent}/copy")
    trainer = make_trainer(saves(), mirror, strategy="ddp", default_root_dir="shared")
    trainer.fit(Linear(), loader())


def ended(children: list[Ended]) -> list[dict[str, Any]]:
    assert [child.code for child in children] == [0, 0], children[0].errors + children[1].errors
    return [child.said for child in children]


@pytest.mark.full
def test_two_processes_continue_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    url = f"file://{tmp_path}/bucket"
    first = ended(launch(work, tmp_path / "first"))
    assert checkpoints(url) == ["step_00000003"]
    shutil.rmtree(tmp_path / "machine")
    second, whole = (ended(launch(work, tmp_path / name)) for name in ("second", "whole"))
    assert [x["ended"][0] for x in (first[0], second[0])] == [3, 6]
    assert [x["ended"][:2] for x in second] == [x["ended"][:2] for x in whole]
    assert in_bucket(url) == in_folder(Path(second[1]["ended"][2]))


@pytest.mark.full
def test_a_folder_of_one_of_several_computers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    said = ended(launch(on_two_computers, tmp_path / "job"))
    url = f"file://{tmp_path}/bucket"
    for one in said:
        assert re.match("ArgumentError.*the processes are on several", str(one["refused"]), re.DOTALL)
        assert f"jl.callbacks.Mirror('{url}')" in str(one["refused"])
    assert not (tmp_path / "machine" / "jaxlit" / "runs").exists()
    assert in_bucket(f"file://{tmp_path}/copy") == in_folder(tmp_path / "job" / "shared")
