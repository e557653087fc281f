"""Runs in real stores: S3, served by moto 5.2.5, and Google Cloud Storage, by gcp-storage-emulator 2026.7.19."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from kit.buckets import checkpoints, in_bucket, replace, saves
from kit.checkpoints import bytes_of, loader, train
from kit.modules import Linear
from kit.processes import launch, say
from kit.refusals import refuses, warnings_of
from kit.stores import serving
from kit.trainers import make_trainer, thinned

import jaxlit as jl
from jaxlit.distributed.team import fetch
from jaxlit.errors import CheckpointError

for name in ("moto", "s3fs", "gcsfs", "gcp_storage_emulator"):
    pytest.importorskip(name)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@contextlib.contextmanager
def store(kind: str, machine: Path, monkeypatch: pytest.MonkeyPatch, fault: str = "") -> Iterator[str]:
    """Serve a store to this process, and yield the URL of a run in it."""
    import gcsfs
    import s3fs

    monkeypatch.setenv("XDG_CACHE_HOME", str(machine))
    with serving(kind, fault) as environment:
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        for fs in (s3fs.S3FileSystem, gcsfs.GCSFileSystem):
            fs.clear_instance_cache()  # those of another server
        yield f"{kind}://runs/net"


def go(url: Any, epochs: int, *callbacks: jl.Callback) -> jl.Trainer:
    return train(url, epochs, *(callbacks or [saves()]), resume="auto")


@pytest.mark.parametrize(
    ("kind", "fault"),
    thinned(
        [("s3", ""), ("gs", ""), ("s3", "busy"), ("s3", "slow")],
        ("s3", "busy"),
        full=[("s3", ""), ("gs", ""), ("s3", "slow")],
    ),
)
def test_another_machine_continues_bit_by_bit(kind: str, fault: str, tmp_path: Path, monkeypatch: Any) -> None:
    with store(kind, tmp_path / "machine", monkeypatch, fault) as url:
        go(url, 2)
        replace(tmp_path / "machine")
        trainer, whole = go(url, 4), train("whole", 4, saves())
        assert bytes_of(trainer) == bytes_of(whole)
        there = in_bucket(url)
        assert there["metrics.csv"] == (whole.run_dir / "metrics.csv").read_bytes()
        assert checkpoints(url) == ["step_00000012"]
        assert len([name for name in there if name.startswith("checkpoints/step")]) == 3  # all else was deleted
        np.testing.assert_array_equal(Linear.load_from_checkpoint(url).kernel[...], whole.module.kernel[...])


def test_a_store_that_goes_down_ends_training_and_loses_no_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with store("s3", tmp_path / "machine", monkeypatch, "down") as url:
        refuses(CheckpointError, lambda: go(url, 40), f"{url}/checkpoints/step_.* could not be written")
        (name,) = checkpoints(url)
        assert Linear.load_from_checkpoint(f"{url}/checkpoints/{name}") is not None


def test_a_store_that_goes_down_is_a_warning_if_that_is_wanted(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with store("s3", tmp_path / "machine", monkeypatch, "down") as url:
        assert go(url, 12, saves(on_save_error="warn")).global_step == 36
        assert checkpoints(url)
    assert any("could not be written" in text for text in warnings_of(caplog))


class Dies(jl.Callback):
    """Ends each process at a step, as when the machines are taken away."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if "DIES_AT" in os.environ and trainer.global_step == int(os.environ["DIES_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)


def work() -> None:
    """Train in a folder and with a cache that no other process sees."""
    folder = Path(f"machine{jax.process_index()}").absolute()
    folder.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    with contextlib.chdir(folder):
        writes = saves(every_n_epochs=None, every_n_train_steps=2)
        trainer = make_trainer(
            Dies(), writes, strategy="fsdp", max_epochs=4, default_root_dir=os.environ["RUN"], resume="auto"
        )
        trainer.fit(Linear(), loader())
        values = [fetch(x).ravel().tolist() for x in jax.tree.leaves(trainer.state.params)]
    say("ended", [trainer.global_step, values, trainer.history.read() if hasattr(trainer.history, "read") else None])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_processes_without_a_shared_disk_are_killed_and_continued(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    """By as many, bit by bit, by one, and by four."""
    with store(kind, tmp_path / "cache", monkeypatch) as url:
        monkeypatch.setenv("RUN", f"{url}/whole")
        (whole, _) = launch(work, tmp_path / "whole")
        assert whole.code == 0, whole.errors
        expected = whole.said["ended"]
        for count in (2, 1, 4):
            monkeypatch.setenv("RUN", f"{url}/{count}")
            monkeypatch.setenv("DIES_AT", "7")
            killed = launch(work, tmp_path / f"killed{count}")
            assert [x.code for x in killed] == [-signal.SIGKILL] * 2
            monkeypatch.delenv("DIES_AT")
            ended = launch(work, tmp_path / f"continued{count}", count=count, devices=8 // count, join=count > 1)
            assert [x.code for x in ended] == [0] * count, ended[0].errors
            steps, values, _ = ended[0].said["ended"]
            assert steps == expected[0] == 12
            if count == 2:
                assert values == expected[1]
                assert in_bucket(f"{url}/2")["metrics.csv"] == in_bucket(f"{url}/whole")["metrics.csv"]
            for value, wanted in zip(values, expected[1], strict=True):
                np.testing.assert_allclose(value, wanted, rtol=1e-5)
            shutil.rmtree(tmp_path / f"killed{count}")


@pytest.mark.full
def test_of_two_jobs_in_one_bucket_the_one_that_began_last_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    with store("s3", tmp_path / "machine", monkeypatch) as url:
        second: list[jl.Trainer] = []

        class BeginsAnother(jl.Callback):
            def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
                if trainer.current_epoch == 2 and not second:
                    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
                    code = launch(other, tmp_path / "job", count=1, join=False)[0]
                    assert code.code == 0, code.errors
                    second.append(trainer)

        monkeypatch.setenv("RUN", url)
        refuses(CheckpointError, lambda: go(url, 5, saves(), BeginsAnother()), f"{url} was taken by process")
        assert checkpoints(url) == ["step_00000018"]
        whole = train("whole", 6, saves())
        np.testing.assert_array_equal(Linear.load_from_checkpoint(url).kernel[...], whole.module.kernel[...])


def other() -> None:
    train(os.environ["RUN"], 6, saves(), resume="auto")
