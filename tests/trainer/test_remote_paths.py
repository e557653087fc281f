"""The URL of a remote file system is taken for a run, and refused where it would become the name of a local folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.registry import known_implementations
from kit.batches import random
from kit.modules import Mean
from kit.refusals import refuses

import jaxlit as jl
from jaxlit.errors import ArgumentError

MODULE = Mean()


def save(path: Any) -> None:
    trainer = jl.Trainer(max_epochs=1, strategy="single", logger=False, enable_checkpointing=False)
    trainer.fit(Mean(), [{"x": np.ones((2, 1), np.float32)}])
    trainer.save_checkpoint(path)


def fit_many(url: Any) -> None:
    jl.fit_many(Mean, {"seed": [0, 1]}, random(1), max_epochs=1, default_root_dir=url)


USES: dict[str, Callable[[Any], Any]] = {
    r"ModelCheckpoint\(dirpath": lambda url: jl.callbacks.ModelCheckpoint(url),
    r"PredictionWriter\(output_dir": lambda url: jl.callbacks.PredictionWriter(url),
    r"Profiler\(dirpath": lambda url: jl.callbacks.Profiler(1, dirpath=url),
    r"trainer\.saver\.begin\(path": save,
    r"save_weights\(path": lambda url: jl.save_weights(MODULE, f"{url}/x.safetensors"),
    r"jl\.fit_many\(default_root_dir": fit_many,
}


@pytest.mark.parametrize("use", USES)
def test_a_url_that_nothing_copies_to_is_refused(use: str) -> None:
    for url in ("gs://bucket/run", Path("s3://bucket/run"), "memory://run"):
        message = rf"{use}=\.\.\.\) takes a path on a disk .*{str(url)[:4]}.*jl\.callbacks\.Mirror\(url\)"
        refuses(ArgumentError, lambda url=url: USES[use](url), message)
    assert not [path for path in Path().iterdir() if ":" in path.name]


TAKES: dict[str, Callable[[Any], Any]] = {
    "Trainer(default_root_dir=": lambda url: jl.Trainer(default_root_dir=url),
    "Trainer(resume=": lambda url: jl.Trainer(resume=url, default_root_dir="runs"),
    "Mirror(url=": lambda url: jl.callbacks.Mirror(url),
    "load_weights": lambda url: jl.load_weights(MODULE, f"{url}/x.safetensors"),
    "load_from_checkpoint": Mean.load_from_checkpoint,
    "init_from": lambda url: jl.Trainer(max_epochs=1).fit(MODULE, random(1), init_from=url),
    "ckpt_path": lambda url: jl.Trainer().validate(MODULE, random(1), ckpt_path=url),
}


@pytest.mark.parametrize("use", TAKES)
def test_a_file_system_that_is_not_installed_says_what_to_install(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"class": "missing_fs.FileSystem", "err": "no such file system"}
    monkeypatch.setitem(known_implementations, "missing", missing)
    refuses(ArgumentError, lambda: TAKES[use]("missing://b/run"), r"missing://b/run.*`pip install missing_fs`")
    refuses(ArgumentError, lambda: TAKES[use]("nonesuch://b/run"), "Protocol not known: nonesuch")


@pytest.mark.parametrize("use", TAKES)
def test_a_password_in_a_url_is_refused(use: str) -> None:
    refuses(ArgumentError, lambda: TAKES[use]("memory://me:pass@b/run"), r"has a password in its URL(?!.*pass@)")


def test_two_mirrors_of_one_url_are_refused() -> None:
    mirrors = [jl.callbacks.Mirror("memory://z/r/")]
    refuses(ArgumentError, lambda: jl.Trainer(default_root_dir="memory://z/r", callbacks=mirrors), "two Mirrors of one")


def test_a_url_that_pathlib_has_shortened_is_refused() -> None:
    refuses(ArgumentError, lambda: jl.Trainer(default_root_dir=Path("memory://b/run")), "memory:/b/run.*Pass a string")


def test_a_run_at_a_url_needs_a_folder_to_continue_in() -> None:
    refuses(ArgumentError, lambda: jl.Trainer(resume="memory://b/run"), "resume='memory://b/run'.*without default_root")


def test_a_trial_of_a_few_batches_copies_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    url = f"file://{tmp_path}/bucket"
    jl.Trainer(fast_dev_run=True, default_root_dir=url, strategy="single").fit(Mean(), random(1))
    assert not (tmp_path / "bucket").exists()


@pytest.mark.parametrize("path", ["C:/runs", "runs/a:b", "a:/b", "./gs://x", "runs"])
def test_a_colon_is_no_address(path: str) -> None:
    assert jl.Trainer(default_root_dir=path).default_root_dir == path
