"""Two real processes train in a bucket together: one copies, and the others wait for it."""

import shutil
import socket
from pathlib import Path

import jax
import pytest
from kit.buckets import checkpoints, in_bucket, in_folder, saves
from kit.checkpoints import loader
from kit.modules import Linear
from kit.processes import Ended, launch, say
from kit.trainers import make_trainer

import jaxlit as jl
from jaxlit.errors import ArgumentError


def go(epochs: int, root: str | None = None) -> None:
    url = f"file://{Path.cwd().parent}/bucket" if root is None else root
    trainer = make_trainer(saves(), strategy="ddp", max_epochs=epochs, default_root_dir=url, resume="auto")
    trainer.fit(Linear(), loader())
    say("ended", [trainer.global_step, trainer.module.kernel[...].ravel().tolist(), str(trainer.run_dir)])


def begins() -> None:
    go(1)


def continues() -> None:
    go(2)


def trains_without() -> None:
    go(2, "whole")


def on_two_computers() -> None:
    name = socket.gethostname()
    socket.gethostname = lambda: f"{name}-{jax.process_index()}"
    try:
        go(1)
    except ArgumentError as error:
        say("refused", str(error))
    mirror = jl.callbacks.Mirror(f"file://{Path.cwd().parent}/copy")
    trainer = make_trainer(saves(), mirror, strategy="ddp", default_root_dir="shared")
    trainer.fit(Linear(), loader())


def ended(children: list[Ended]) -> list[dict[str, object]]:
    assert [child.code for child in children] == [0, 0], children[0].errors + children[1].errors
    return [child.said for child in children]


@pytest.mark.full
def test_two_processes_continue_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    url = f"file://{tmp_path}/bucket"
    first = ended(launch(begins, tmp_path / "first"))
    assert checkpoints(url) == ["step_00000003"]
    shutil.rmtree(tmp_path / "machine")
    second = ended(launch(continues, tmp_path / "second"))
    whole = ended(launch(trains_without, tmp_path / "whole"))
    assert [x["ended"][0] for x in (first[0], second[0])] == [3, 6]  # type: ignore[index]
    assert [x["ended"][:2] for x in second] == [x["ended"][:2] for x in whole]  # type: ignore[index]
    assert in_bucket(url) == in_folder(Path(second[1]["ended"][2]))  # type: ignore[index]


@pytest.mark.full
def test_a_folder_of_one_of_several_computers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    said = ended(launch(on_two_computers, tmp_path / "job"))
    url = f"file://{tmp_path}/bucket"
    for one in said:
        assert "the processes are on several" in str(one["refused"])
        assert f"jl.callbacks.Mirror('{url}')" in str(one["refused"])
    assert not (tmp_path / "machine" / "jaxlit" / "runs").exists()
    assert in_bucket(f"file://{tmp_path}/copy") == in_folder(tmp_path / "job" / "shared")
