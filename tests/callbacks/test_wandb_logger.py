"""WandbLogger with the real SDK without network, read back by W&B's own reader."""

import contextlib
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import wandb
from kit.batches import numbered
from kit.by_hand import mean
from kit.checkpoints import names
from kit.journal import hooks
from kit.modules import Mean, module
from kit.odd_names import LOGGED, train_odd_names
from kit.refusals import fit_refuses, refuses
from kit.trainers import thinned
from kit.wandb_runs import PIXELS, START, STEP, Wide, files_of, history, records, run_files, summary, trainer_of
from matplotlib.figure import Figure

import jaxlit as jl
from jaxlit.callbacks import CSVLogger, ModelCheckpoint, WandbLogger
from jaxlit.errors import ArgumentError, LoggerError

CALLS = {
    "log_text": ("note", "a text"),
    "log_table": ("table", ["a"], [[1]]),
    "log_histogram": ("histogram", [1.0]),
    "log_image": ("image", PIXELS),
    "log_figure": ("figure", Figure(figsize=(1, 1))),
}


def run_stage(trainer, stage="fit", model=None):
    loaders = (numbered(2), numbered(1)) if stage == "fit" else (numbered(2),)
    getattr(trainer, stage)(Mean() if model is None else model, *loaders)
    return trainer


def begin(*loggers, **arguments):
    """Open runs in a fit of no steps, and return their ids."""
    run_stage(trainer_of(*loggers, **{"max_epochs": 0, "logger": False, "enable_checkpointing": False, **arguments}))
    return [logger.id for logger in loggers]


def ids_in(folder="run"):
    return sorted(path.stem.removeprefix("run-") for path in run_files(folder))


def note(text):
    return lambda trainer, *rest: trainer.logger.log_text("note", text)


def test_odd_names_stay_but_those_that_wandb_writes():
    train_odd_names(WandbLogger(offline=True), CSVLogger())
    rows = [record["history"]["item"] for record in records() if record["type"] == "history"]
    taken = {"_step", "_runtime", "_timestamp", STEP}
    for name, values in LOGGED.items():
        key = f"jaxlit/{name}" if name in taken else name
        assert [(row[STEP], row[key]) for row in rows if key in row] == values, name


def test_a_row_outside_of_a_run_is_refused():
    begin(logger := WandbLogger(offline=True))
    refuses(LoggerError, lambda: logger.log_metrics({"late": 1.0}), "has no run open. Log from a hook")


def test_a_monitored_name_with_a_star_is_logged():
    class Star(Mean):
        def validation_step(self, batch):
            self.log("a*b", 1.0)

    run_stage(trainer_of(WandbLogger(offline=True), ModelCheckpoint(monitor="a*b")), model=Star())
    assert [row["a*b"] for row in history() if "a*b" in row] == [1.0]


@pytest.mark.full
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_an_evaluation_has_a_run_with_the_config_of_its_module(stage):
    trainer = trainer_of(WandbLogger(offline=True), max_epochs=0)
    run_stage(trainer)
    run_stage(
        trainer, stage, model := module(init=lambda self: Wide.__init__(self), error=lambda self, batch: batch["x"])
    )
    (row,) = history()
    assert row[{"validate": "val", "test": "test"}[stage]] == 1.5  # the mean of batches 1 and 2
    assert summary()["config"]["num_params"] == model.kernel.size == START.size
    metrics = [record["metric"] for record in records() if record["type"] == "metric"]
    assert {m.get("glob_name") or m.get("name"): m.get("step_metric") for m in metrics} == {STEP: None, "*": STEP}


HOOKS = {
    "fit": ["on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_epoch_end", "on_fit_end"],
    "validate": ["on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"],
    "test": ["on_test_start", "on_test_epoch_start", "on_test_batch_end", "on_test_epoch_end", "on_test_end"],
    "predict": ["on_predict_start", "on_predict_epoch_start", "on_predict_epoch_end", "on_predict_end"],
}


@pytest.mark.parametrize("stage", HOOKS)
def test_every_hook_can_log_whatever_the_order_of_callbacks(stage):
    callbacks = [hooks(**{hook: note(hook)}) for hook in HOOKS[stage]]
    run_stage(trainer_of(*callbacks, WandbLogger(offline=True), logger=False), stage)
    assert {row["note"] for row in history() if "note" in row} == set(HOOKS[stage])  # some are called for each batch


@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_without_a_run_logging_is_refused_or_goes_to_files(stage):
    logger, steps = WandbLogger(offline=True), iter(range(2))

    def log(*_, **given):
        for name, arguments in CALLS.items():
            getattr(logger, name)(*arguments, **given)

    refuses(LoggerError, log, "no run open")
    to_files = lambda *_: log(step=next(steps))  # noqa: E731
    # Teardown is the logger's first.
    run_stage(trainer_of(logger, hooks(setup=to_files, teardown=to_files), logger=False, max_epochs=0), stage)
    refuses(LoggerError, log, "no run open")
    suffixes = {"note": "txt", "table": "csv", "histogram": "json", "image": "png", "figure": "png"}
    result = sorted(path.relative_to("run/media").as_posix() for path in Path("run/media").rglob("*.*"))
    assert result == sorted(f"{key}/{step}.{suffix}" for key, suffix in suffixes.items() for step in range(2))


def test_every_training_has_another_id_and_a_second_fit_the_same():
    logger = WandbLogger(offline=True)
    first = begin(logger)
    assert begin(logger) == first and ids_in() == first * 2
    assert begin(WandbLogger(offline=True)) != first


def test_one_logger_in_other_trainings_begins_other_runs():
    logger = WandbLogger(offline=True)
    ids = [begin(logger, default_root_dir=folder)[-1] for folder in ("a", "b", "c")]
    assert len({*ids}) == 3
    logger = WandbLogger(offline=True, id="mine")
    assert [begin(logger, default_root_dir=folder)[-1] for folder in ("d", "e")] == ["mine", "mine"]


@pytest.mark.parametrize("given", [{}, {"id": "mine"}])
def test_an_agent_or_checkpoint_names_the_run_unless_given(given, monkeypatch):
    expected = given.get("id", "theirs")
    run_stage(trainer_of(WandbLogger(offline=True, id="theirs")))
    assert begin(WandbLogger(offline=True, **given), resume="auto", max_epochs=1) == [expected]
    monkeypatch.setenv("WANDB_RUN_ID", "theirs")
    assert begin(WandbLogger(offline=True, **given), default_root_dir="other") == [expected]


@contextlib.contextmanager
def open_run(**given):
    """Open a run as a program of the user's own does, and finish it at the end."""
    Path("mine").mkdir(exist_ok=True)
    with wandb.init(mode="offline", dir=Path("mine").absolute(), config={"own": 1}, **given) as run:
        yield run


@pytest.mark.parametrize("by", thinned(["default", "experiment", "same id"], "default"))
def test_a_run_that_the_user_has_opened_is_used_and_left_open(by):
    with open_run(id="mine", reinit="create_new" if by == "experiment" else None) as run:
        logger = WandbLogger(id="mine" if by == "same id" else None, experiment=run if by == "experiment" else None)
        assert logger.id == (None if by == "default" else "mine")
        run_stage(trainer_of(logger, logger=False))
        assert logger.id == "mine" and ids_in() == [] and logger.experiment is run
        run.log({"after": 1})
    rows, config = history("mine"), summary("mine")["config"]
    assert [row["loss"] for row in rows if "loss" in row] == [1.0, (2 - mean([[1]])) ** 2], rows
    assert rows[-1]["after"] == 1
    assert (config["own"], config["num_params"]) == (1, 1)
    with open_run(id="open"):
        assert begin(WandbLogger(id="other", offline=True), default_root_dir="new") == ["other"]
    assert ids_in("new") == ["other"] and not any("loss" in row for row in history("mine"))


def test_a_disabled_run_is_nowhere(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = WandbLogger(log_model="all")
    callbacks = [logger, ModelCheckpoint(), hooks(on_test_end=note("x"))]
    trainer = run_stage(trainer_of(*callbacks, enable_progress_bar=True, logger=False))
    out = capsys.readouterr().out
    assert (
        logger.location is None
        and "  report" not in out
        and "  logs" not in out
        and out.splitlines()[1] == "W&B disabled"
    )
    run_stage(trainer, "test")
    assert names("run") == ["checkpoints"]


def test_an_error_marks_the_run_as_failed(capsys):
    fails = hooks(on_train_epoch_end=lambda *args: 1 / 0)
    logger = WandbLogger("digits", entity="team", offline=True, save_dir="elsewhere")
    with pytest.raises(ZeroDivisionError):
        run_stage(trainer_of(logger, fails, enable_progress_bar=True, logger=False))
    (logs,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  logs")]
    assert logs.split() == ["logs", str(run_files("elsewhere")[0].parent)]
    (run,) = [record["run"] for record in records("elsewhere") if record["type"] == "run"]
    assert (run["project"], run["entity"]) == ("digits", "team")
    assert summary("elsewhere")["exit_code"] == 1 and logger.experiment.id == run["run_id"] == logger.id
    assert not Path("run/wandb").exists()


def test_a_failure_ends_training_if_asked():
    gone = hooks(on_checkpoint_saved=lambda t, m, callback, path: path.rename("away"))
    trainer = trainer_of(gone, WandbLogger(offline=True, log_model=True, on_error="raise"), ModelCheckpoint())
    refuses(jl.errors.JaxlitError, lambda: run_stage(trainer), "could not finish run .*MANIFEST.json is missing")


def test_after_a_fit_there_is_still_its_run(capfd):
    logger, file, seen = WandbLogger("digits", offline=True), jl.callbacks.CSVLogger(), []
    assert logger.experiment is None and file.experiment is file
    with pytest.raises(AttributeError, match="CSVLogger has no attribute 'add_image'. Call log_image"):
        file.experiment.add_image  # noqa: B018
    assert jl.callbacks.NoLogger().experiment.add_image("x", np.zeros(3)) is None
    run_stage(trainer_of(hooks(on_train_end=lambda t, m: seen.append(logger.experiment)), logger, file))
    run = logger.experiment
    assert run is seen[0] and (run.id, run.project, run.url) == (logger.id, "digits", None)
    assert Path(run.dir).parent == run_files()[0].parent.absolute()
    begin(logger, default_root_dir="again")
    assert logger.experiment.id == logger.id != run.id


def test_many_fits_leave_no_threads():
    logger = WandbLogger(offline=True)
    begin(logger)  # the SDK's own stay
    before = set(threading.enumerate())
    for _ in range(3):
        begin(logger)
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(("wandb", "jaxlit")):
            thread.join(10)  # it may be at its end just now
    assert sorted(thread.name for thread in set(threading.enumerate()) - before) == []


def test_offline_media_and_a_copy_of_each_checkpoint_are_kept():
    def log(trainer, model):
        for name, given in CALLS.items():
            getattr(trainer.logger, name)(*given)
        trainer.logger.log_hyperparams({"later": 1})

    result = {}
    # Before the logger, which sends each checkpoint as soon as it is there.
    saved = lambda t, m, callback, path: result.update({path.name: files_of(path)})  # noqa: E731
    logger = WandbLogger(offline=True, log_model="all", watch="all", watch_every_n_steps=1)
    saves = ModelCheckpoint(monitor="loss", every_n_train_steps=1, save_top_k=-1)
    run_stage(trainer_of(hooks(on_checkpoint_saved=saved, on_train_end=log), logger, saves))
    left = summary()
    names = {given[0] for given in CALLS.values()} | {"gradients/w", "parameters/w", "best/loss"}
    assert names <= left["summary"].keys() and left["config"]["later"] == 1
    assert [*result] == ["step_00000001", "step_00000002"]
    shutil.rmtree("run/checkpoints")
    sent = [record["artifact"] for record in records() if record["type"] == "artifact"]
    for artifact in (artifact for artifact in sent if artifact["type"] == "model"):
        (step,) = {*artifact["aliases"]} - {"latest", "best"}
        copies = {entry["path"]: entry["local_path"] for entry in artifact["manifest"]["contents"]}
        assert {name: Path(copy).read_bytes() for name, copy in copies.items()} == result.pop(step)
    assert not result


def test_another_process_than_the_first_has_no_run(monkeypatch, capsys):
    monkeypatch.setattr(jl.Trainer, "is_global_zero", False)
    logger = WandbLogger(offline=True)
    notes = hooks(on_fit_start=lambda t, m: (note("x")(t), t.logger.log_hyperparams({})))
    run_stage(trainer_of(logger, notes, max_epochs=0, logger=False, enable_checkpointing=False))
    assert logger.experiment is None and names("run") == []
    assert "W&B" not in capsys.readouterr().out


def test_checkpoints_to_send_need_someone_who_writes_them():
    for log_model in ("all", True, "best"):
        logger = WandbLogger(offline=True, log_model=log_model)
        fit_refuses(ArgumentError, "log_model=.* without a Mod", callbacks=logger, enable_checkpointing=False)
    assert not list(Path().rglob("wandb"))


def test_without_pillow_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    for name in ("log_image", "log_figure"):
        refuses(LoggerError, lambda name=name: getattr(WandbLogger(), name)(*CALLS[name]), "pip install pillow")
