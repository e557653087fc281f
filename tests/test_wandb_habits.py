"""What people are used to with W&B: any hook logs, any stage has a run, and runs of their own are respected."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from flax import nnx
from wandb_model import START, Line, data
from wandb_offline import history, run_file, summary

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint, WandbLogger
from jaxlit.errors import ArgumentError, LoggerError

QUIET: dict[str, Any] = {"strategy": "single", "enable_progress_bar": False, "enable_model_summary": False}
LOGGING: dict[str, tuple[Any, ...]] = {
    "log_text": ("note", "a text"),
    "log_table": ("table", ["a"], [[1]]),
    "log_histogram": ("histogram", [1.0]),
    "log_image": ("image", np.zeros((2, 2))),
}


class Model(Line):
    """A line that can be tested and asked for predictions too."""

    def __init__(self, width: int = 1, *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs)
        self.more = nnx.List([nnx.Param(np.zeros(())) for _ in range(width - 1)])

    def test_step(self, batch: Any) -> None:
        self.log("test/mean", batch["x"].mean())

    def predict_step(self, batch: Any) -> Any:
        return self.weight * batch["x"]


def model(width: int = 1) -> jl.TrainModule:
    return Model(width, rngs=nnx.Rngs(0))


def make(callbacks: Any, **arguments: Any) -> jl.Trainer:
    given = {"max_epochs": 1, "log_every_n_steps": 1, "default_root_dir": "run", **QUIET, **arguments}
    return jl.Trainer(callbacks=callbacks, **given)


def run_stage(trainer: jl.Trainer, stage: str, module: jl.TrainModule | None = None) -> None:
    loaders = (data(), data()) if stage == "fit" else (data(),)
    getattr(trainer, stage)(module or model(), *loaders)


def runs(folder: str | Path = "run") -> list[str]:
    """Return the ids of the offline runs below a folder."""
    return sorted(path.stem.removeprefix("run-") for path in Path(folder).glob("wandb/offline-run-*/*.wandb"))


class At(jl.Callback):
    """Calls a function in one hook."""

    def __init__(self, hook: str, work: Callable[[Any], Any]) -> None:
        setattr(self, hook, lambda trainer, *rest: work(trainer))


@contextlib.contextmanager
def open_run(**given: Any) -> Iterator[wandb.Run]:
    """Open a run as a program of the user's own does, and finish it at the end."""
    Path("mine").mkdir()
    with wandb.init(mode="offline", dir=Path("mine").absolute(), **given) as run:
        yield run


def note(text: str) -> Callable[[Any], None]:
    return lambda trainer: trainer.logger.log_text("note", text)


# Stages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_run_needs_no_fit_before_it(stage: str) -> None:
    run_stage(make(WandbLogger(offline=True)), stage)
    (row,) = history(Path("run"))
    x = np.concatenate([batch["x"] for batch in data()])
    expected = {"test/mean": x.mean()} if stage == "test" else {"val/loss": START**2 * np.mean(x**2)}
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_the_config_is_that_of_the_module_that_is_tested() -> None:
    trainer = make(WandbLogger(offline=True))
    trainer.fit(model(), data())
    trainer.test(model(5), data())
    assert summary(Path("run"))["config"]["num_params"] == 5


HOOKS = {
    "fit": ["on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_epoch_end", "on_fit_end"],
    "validate": ["on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"],
    "test": ["on_test_start", "on_test_epoch_start", "on_test_batch_end", "on_test_epoch_end", "on_test_end"],
    "predict": ["on_predict_start", "on_predict_epoch_start", "on_predict_epoch_end", "on_predict_end"],
}


@pytest.mark.parametrize("stage", HOOKS)
def test_every_hook_can_log_whatever_the_order_of_callbacks(stage: str) -> None:
    callbacks = [At(hook, note(hook)) for hook in HOOKS[stage]]
    run_stage(make([*callbacks, WandbLogger(offline=True)], logger=False, limit_val_batches=1), stage)
    found = [row["note"] for row in history(Path("run")) if "note" in row]
    # The hooks of each batch are called for each.
    assert set(found) == set(HOOKS[stage])


@pytest.mark.parametrize("name", LOGGING)
@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_in_setup_and_behind_the_run_logging_is_refused(stage: str, name: str) -> None:
    logger, refused = WandbLogger(offline=True), []

    def try_it(trainer: Any) -> None:
        with pytest.raises(LoggerError, match="no run open"):
            getattr(logger, name)(*LOGGING[name])
        refused.append(trainer)

    # Teardown is the logger's first.
    trainer = make([logger, At("setup", try_it), At("teardown", try_it)], logger=False, max_epochs=0)
    run_stage(trainer, stage)
    try_it(trainer)
    assert len(refused) == 3


@pytest.mark.parametrize(
    "arguments", [{"fast_dev_run": True}, {"logger": False}, {"fast_dev_run": True, "logger": False}]
)
def test_without_a_logger_everything_can_be_logged_and_goes_nowhere(arguments: dict[str, Any]) -> None:
    called = []

    def log(trainer: Any) -> None:
        assert isinstance(trainer.logger, jl.callbacks.NoLogger)
        for name, given in LOGGING.items():
            getattr(trainer.logger, name)(*given, step=3)
        trainer.logger.log_figure("figure", object())
        called.append(trainer.loggers)

    callbacks = [At("on_train_epoch_end", log), *([WandbLogger(offline=True)] if "logger" not in arguments else [])]
    trainer = make(callbacks, **arguments)
    run_stage(trainer, "fit")
    assert called == [[]]
    written = [path.name for path in Path("run").iterdir()] if Path("run").exists() else []
    assert written == ([] if "fast_dev_run" in arguments else ["checkpoints"])


# Which run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["default", "agent", "same id"])
def test_the_run_that_is_open_is_used_and_left_open(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    if by == "agent":
        monkeypatch.setenv("WANDB_RUN_ID", "mine")
    logger = WandbLogger(id="mine" if by == "same id" else None)
    with open_run(id="mine") as run:
        run_stage(make(logger, logger=False), "fit")
        assert logger.id == "mine" and logger.experiment is None
        run.log({"after": 1})
    assert not list(Path("run").glob("wandb/*"))
    rows = history(Path("mine"))
    assert [row["after"] for row in rows if "after" in row] == [1]
    assert len([row for row in rows if "train/loss" in row]) == 2


def test_a_logger_with_another_id_opens_its_own_run() -> None:
    with open_run(id="mine"):
        run_stage(make(WandbLogger(id="other", offline=True), logger=False), "fit")
    assert runs() == ["other"] and runs("mine") == ["mine"]
    assert not any("train/loss" in row for row in history(Path("mine")))


def test_two_projects_in_one_folder_keep_their_ids() -> None:
    def ids() -> list[str | None]:
        loggers = [WandbLogger("one", offline=True), WandbLogger("two", offline=True)]
        run_stage(make(loggers, resume="auto"), "fit")
        return [logger.id for logger in loggers]

    first = ids()
    assert len(set(first)) == 2 and ids() == first  # there is no checkpoint that would know them


def test_two_trainings_that_save_in_one_folder_have_two_ids() -> None:
    found = []
    for folder in ("a", "b"):
        found.append(logger := WandbLogger(offline=True, save_dir="both"))
        run_stage(make(logger, resume="auto", default_root_dir=folder), "fit")
    assert runs("both") == sorted(str(logger.id) for logger in found) and len(set(runs("both"))) == 2


@pytest.mark.parametrize("damage", ["", "{", "[1]", "3", b"\xff\xfe"])
def test_a_damaged_file_of_ids_does_not_end_training(damage: str | bytes) -> None:
    file = Path("run/wandb_run_ids.json")
    file.parent.mkdir()
    file.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    logger = WandbLogger("one", offline=True)
    run_stage(make(logger, resume="auto", max_epochs=0), "fit")
    assert json.loads(file.read_text()) == {"/one": logger.id}


def test_a_mode_that_is_set_later_counts(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    wandb.setup()  # which reads the environment
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)  # not the lack of a key
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    run_stage(make(WandbLogger(on_error="raise"), max_epochs=0), "fit")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("W&B offline ") and "(" not in line and len(runs()) == 1


def test_a_disabled_run_is_nowhere(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = WandbLogger(log_model="all")
    trainer = make([logger, ModelCheckpoint(), At("on_test_end", note("x"))], enable_progress_bar=True, logger=False)
    run_stage(trainer, "fit")
    assert logger.location is None and "  report" not in (out := capsys.readouterr().out)
    assert out.splitlines()[1] == "W&B disabled"
    run_stage(trainer, "test")
    assert [path.name for path in Path("run").iterdir()] == ["checkpoints"]


def test_after_an_error_the_closing_lines_name_the_run(capsys: Any) -> None:
    class Fails(jl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            raise RuntimeError("no")

    logger = WandbLogger(offline=True)
    with pytest.raises(RuntimeError, match="no"):
        run_stage(make([logger, Fails()], enable_progress_bar=True, logger=False), "fit")
    (report,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  report")]
    assert report.split() == ["report", str(run_file(Path("run")).parent)]


# What comes of it --------------------------------------------------------------------------------------


def test_a_finished_run_does_not_end_training(capsys: Any) -> None:
    with open_run() as run:
        pass
    trainer = make(WandbLogger(experiment=run))
    run_stage(trainer, "fit")
    (line,) = capsys.readouterr().out.splitlines()
    assert trainer.global_step == 2 and line.startswith("W&B: off for the rest of this run (") and "finished" in line


def test_many_fits_leave_no_threads() -> None:
    trainer = make(WandbLogger(offline=True))
    run_stage(trainer, "fit")  # the SDK's own stay
    before = set(threading.enumerate())
    for _ in range(4):
        run_stage(trainer, "fit")
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(("wandb", "jaxlit")):
            thread.join(10)  # it may be at its end just now
    assert sorted(thread.name for thread in set(threading.enumerate()) - before) == []


def test_hyperparameters_with_our_names_stay_the_users(tmp_path: Path) -> None:
    class Own(Line):
        def __init__(self, devices: int = 3, trainer: str = "mine", *, rngs: nnx.Rngs) -> None:
            super().__init__(rngs=rngs)

    logger = WandbLogger(offline=True, config={"strategy": "theirs"})
    run_stage(make(logger, max_epochs=1), "fit", Own(rngs=nnx.Rngs(0)))
    config = summary(Path("run"))["config"]
    assert (config["devices"], config["trainer"], config["strategy"]) == (3, "mine", "theirs")
    assert (config["jaxlit/devices"]["count"], config["jaxlit/trainer"]["max_epochs"]) == (1, 1)
    assert config["jaxlit/strategy"].startswith("SingleDevice") and config["num_params"] == 1


@pytest.mark.parametrize("log_model", ["all", True, "best"])
def test_checkpoints_to_send_need_someone_who_writes_them(log_model: str | bool) -> None:
    class Steps(jl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise AssertionError("a step was taken")

    trainer = make([WandbLogger(offline=True, log_model=log_model), Steps()], enable_checkpointing=False)
    with pytest.raises(ArgumentError, match=r"log_model=.* without a ModelCheckpoint"):
        run_stage(trainer, "fit")
    assert runs() == []
