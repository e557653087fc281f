"""What WandbLogger does with checkpoints: it sends them, changes none, and leaves no copies."""

import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from flax import nnx
from wandb_model import Line, data
from wandb_offline import records, summary

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint, WandbLogger
from jaxlit.reporting.wandb_run import WandbError

QUIET: dict[str, Any] = {"strategy": "single", "enable_progress_bar": False, "enable_model_summary": False}


def fit(callbacks: Any, **arguments: Any) -> jl.Trainer:
    given = {"max_epochs": 2, "default_root_dir": "run", **QUIET, **arguments}
    trainer = jl.Trainer(callbacks=callbacks, **given)
    trainer.fit(Line(rngs=nnx.Rngs(0)), data(), data())
    return trainer


def copies(folder: str | Path = ".") -> list[str]:
    return [str(path) for path in Path(folder).rglob(".tmp-*")]


class Hashes(jl.Callback):
    """Takes a checkpoint's hashes as soon as it is there, before whoever comes later in the list of callbacks."""

    def __init__(self) -> None:
        self.found: dict[Path, str] = {}

    def on_checkpoint_saved(self, trainer: Any, module: Any, callback: ModelCheckpoint, path: Path) -> None:
        self.found |= {file: digest(file) for file in path.rglob("*") if file.is_file()}


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("log_model", ["all", True, "best"])
def test_sending_checkpoints_of_the_same_name_changes_none_of_them(log_model: str | bool) -> None:
    hashes, logger = Hashes(), WandbLogger(offline=True, log_model=log_model)
    # At the same steps, so with the same names; what they know of themselves is different.
    first = ModelCheckpoint("A", monitor="val/loss", save_top_k=-1)
    second = ModelCheckpoint("B", monitor="val/score", save_top_k=-1)  # by which the last is the best
    fit([hashes, logger, first, second])
    names = sorted(path.name for path in Path("A").glob("step_*"))
    assert names == sorted(path.name for path in Path("B").glob("step_*")) == ["step_00000002", "step_00000004"]
    assert {file: digest(file) for file in hashes.found} == hashes.found
    there = [path for name in "AB" for path in Path(name).absolute().glob("step_*/**/*")]
    assert {path for path in there if path.is_file()} == set(hashes.found)
    assert copies() == []
    sent = [record["artifact"] for record in records(Path("run")) if record["type"] == "artifact"]
    sent = [artifact for artifact in sent if artifact["type"] == "model"]
    expected = {f"model-{logger.id}": "A", f"model-{logger.id}-1": "B"}
    count = 1 if log_model == "best" else 2
    assert sorted(artifact["name"] for artifact in sent) == sorted([*expected] * count)
    for artifact in sent:
        (step,) = {*artifact["aliases"]} - {"latest", "best"}
        folder = Path(expected[artifact["name"]], step).absolute()
        contents = {folder / entry["path"]: entry["local_path"] for entry in artifact["manifest"]["contents"]}
        assert {file: digest(Path(copy)) for file, copy in contents.items()} == {
            file: found for file, found in hashes.found.items() if file.is_relative_to(folder)
        }


# A run whose server does as a test says ----------------------------------------------------------------


class FakeRun:
    """A run that is online, whose artifacts arrive when a test lets them."""

    id, url, dir, offline, disabled = "abc123", "http://there/abc123", "/there/files", False, False

    def __init__(self, arrives: Callable[[], Any] = lambda: None, log: Callable[[], Any] = lambda: None) -> None:
        self._arrives, self._log, self.config, self.summary, self.sent = arrives, log, {}, {}, list[str]()

    def log(self, row: dict[str, Any]) -> None:
        self._log()

    def log_artifact(self, artifact: Any, aliases: list[str]) -> Any:
        self.sent.append(aliases[-1])
        return SimpleNamespace(wait=lambda: self._arrives())

    def define_metric(self, *args: Any, **given: Any) -> None:
        pass

    def finish(self, exit_code: int) -> None:
        pass


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeRun], FakeRun]:
    """Return a function that makes `wandb.init` give a run."""

    def become(run: FakeRun) -> FakeRun:
        monkeypatch.setattr(wandb, "init", lambda **given: run)
        return run

    return become


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """An event that what hangs waits for; at the end it goes on in any case."""
    event = threading.Event()
    yield event
    event.set()


class Counts(jl.Callback):
    """Counts the copies at the start of each epoch, when the checkpoint of the one before is there."""

    def __init__(self, wait: Callable[[], Any] = lambda: None) -> None:
        self._wait, self.counts = wait, list[int]()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.checkpoint_callback.finish(trainer)
        self._wait()
        self.counts.append(len(copies()))


def test_a_copy_is_deleted_as_soon_as_it_is_sent(online: Callable[[FakeRun], FakeRun]) -> None:
    run, logger = online(FakeRun()), WandbLogger(log_model="all")
    # The uploads' thread has nothing left to do.
    counts = Counts(lambda: logger._run and logger._run._uploads.join(30))
    fit([logger, counts, ModelCheckpoint(every_n_epochs=1)], max_epochs=6)
    assert run.sent == [f"step_{2 * epoch:08}" for epoch in range(1, 7)]
    assert counts.counts == [0] * 6 and copies() == []


@pytest.mark.parametrize(("patience", "most"), [(0.0, 3), (60.0, 7)])
def test_a_run_that_gets_nowhere_keeps_three_copies_at_most(
    online: Callable[[FakeRun], FakeRun], release: threading.Event, capsys: Any, patience: float, most: int
) -> None:
    begun, logger = threading.Event(), WandbLogger(log_model="all")
    run = online(FakeRun(arrives=lambda: begun.set() or release.wait(30)))
    counts = Counts(lambda: logger._run is not None and logger._run._copies and begun.wait(30))

    class Waits(jl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            assert logger._run is not None
            self.limit, logger._run._finish_timeout = logger._run._finish_timeout, patience

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            assert logger._run is not None
            logger._run._finish_timeout = self.limit
            release.set()

    fit([logger, counts, Waits(), ModelCheckpoint(every_n_epochs=1)], max_epochs=8)
    assert max(counts.counts) == most and copies() == [] and len(run.sent) == (3 if most == 3 else 8)
    _, *told = capsys.readouterr().out.splitlines()
    expected = "W&B: step_00000008 was not sent (one before it is not through after 0 s)"
    assert told == ([expected] if most == 3 else [])


def test_a_run_that_is_off_keeps_no_copies(online: Callable[[FakeRun], FakeRun], capsys: Any) -> None:
    def fails() -> None:
        raise RuntimeError("the service is gone")

    logger = WandbLogger(log_model="all")
    online(FakeRun(log=fails))
    counts = Counts(lambda: logger._run and logger._run._rows.join(30) and logger._run._uploads.join(30))
    fit([logger, counts, ModelCheckpoint(every_n_epochs=1)], max_epochs=6, log_every_n_steps=1)
    assert counts.counts[1:] == [0] * 5 and copies() == []
    assert capsys.readouterr().out.splitlines()[1:] == ["W&B: off for the rest of this run (the service is gone)"]


class Deletes(jl.Callback):
    """Deletes checkpoints behind the back of all others."""

    def on_checkpoint_saved(self, trainer: Any, module: Any, callback: ModelCheckpoint, path: Path) -> None:
        shutil.rmtree(path)


@pytest.mark.parametrize("log_model", ["all", True])
def test_a_checkpoint_that_cannot_be_read_is_said_or_raised(log_model: str | bool, capsys: Any) -> None:
    for on_error in ("offline", "raise"):
        logger = WandbLogger(offline=True, log_model=log_model, on_error=on_error)
        callbacks = [Deletes(), logger, ModelCheckpoint(every_n_epochs=1)]
        if on_error == "raise":
            with pytest.raises(WandbError, match=r"cannot send step_0000000\d: .*No such file"):
                fit(callbacks, default_root_dir=on_error)
            assert logger.experiment is None and summary(Path(on_error))["exit_code"] == 1  # it has ended
        else:
            assert fit(callbacks, default_root_dir=on_error).global_step == 4
            told = capsys.readouterr().out.splitlines()[1:]
            assert len(told) == 1 and told[0].startswith("W&B: step_0000000") and "was not sent (" in told[0]
