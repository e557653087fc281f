"""The URL of a remote file system is taken for a run, and refused where it would become the name of a local folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.registry import known_implementations
from kit.batches import numbered, random
from kit.buckets import URL, Bucket, make_machine
from kit.modules import Mean
from kit.refusals import refuses
from kit.trainers import BARE, fit

import jaxlit as jl
from jaxlit.errors import ArgumentError

MODULE = Mean()


USES: dict[str, Callable[[Any], Any]] = {
    r"PredictionWriter\(output_dir": lambda url: jl.callbacks.PredictionWriter(url),
    r"Profiler\(dirpath": lambda url: jl.callbacks.Profiler(1, dirpath=url),
    r"save_weights\(path": lambda url: jl.save_weights(MODULE, f"{url}/x.safetensors"),
    r"jl\.fit_many\(default_root_dir": lambda url: jl.fit_many(
        Mean, [{}], random(1), max_epochs=1, default_root_dir=url
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_url_that_nothing_writes_to_is_refused(use: str) -> None:
    for url in ("gs://bucket/run", Path("s3://bucket/run"), "memory://run"):
        message = rf"{use}=\.\.\.\) takes a path on a disk .*{str(url)[:4]}.*Trainer\(default_root_dir=url\)"
        refuses(ArgumentError, lambda url=url: USES[use](url), message)
    assert not [path for path in Path().iterdir() if ":" in path.name]


TAKES: dict[str, Callable[[Any], Any]] = {
    "Trainer(default_root_dir=": lambda url: jl.Trainer(default_root_dir=url),
    "Trainer(resume=": lambda url: jl.Trainer(resume=url, default_root_dir="runs"),
    "ModelCheckpoint(dirpath=": jl.callbacks.ModelCheckpoint,
    "trainer.saver.begin(path=": lambda url: fit(Mean(), numbered(1), **BARE).save_checkpoint(url),
    "load_weights": lambda url: jl.load_weights(MODULE, f"{url}/x.safetensors"),
    "load_from_checkpoint": Mean.load_from_checkpoint,
    "init_from": lambda url: jl.Trainer(max_epochs=1).fit(MODULE, random(1), init_from=url),
    "ckpt_path": lambda url: jl.Trainer().validate(MODULE, random(1), ckpt_path=url),
}


@pytest.mark.parametrize("use", TAKES)
def test_a_url_that_cannot_be_used_says_why(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"class": "missing_fs.FileSystem", "err": "no such file system"}
    monkeypatch.setitem(known_implementations, "missing", missing)
    refuses(ArgumentError, lambda: TAKES[use]("missing://b/run"), r"missing://b/run.*no such file system")
    refuses(ArgumentError, lambda: TAKES[use]("nonesuch://b/run"), "Protocol not known: nonesuch")
    refuses(ArgumentError, lambda: TAKES[use]("memory://me:pass@b/run"), r"has a password in its URL(?!.*pass@)")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"default_root_dir": Path("memory://b/run")}, "memory:/b/run.*Pass a string"),
        ({"resume": "memory://b/run"}, "resume='memory://b/run'.*without default_root"),
    ],
    ids=["shortened by pathlib", "no folder to continue in"],
)
def test_a_url_that_a_trainer_cannot_use_is_refused(arguments: dict[str, Any], words: str) -> None:
    refuses(ArgumentError, lambda: jl.Trainer(**arguments), words)


def test_a_trial_of_a_few_batches_copies_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_machine(tmp_path, monkeypatch)
    jl.Trainer(fast_dev_run=True, default_root_dir=URL, strategy="single").fit(Mean(), random(1))
    assert Bucket.store == {}


@pytest.mark.parametrize("path", ["C:/runs", "runs/a:b", "a:/b", "./gs://x", "runs"])
def test_a_colon_is_no_address(path: str) -> None:
    assert jl.Trainer(default_root_dir=path).default_root_dir == path
