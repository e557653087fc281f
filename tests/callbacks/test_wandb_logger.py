"""WandbLogger with the real SDK without network, read back by W&B's own reader."""

import contextlib
import hashlib
import importlib.metadata
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import wandb
from kit.batches import numbered
from kit.by_hand import mean
from kit.journal import hooks
from kit.modules import Mean, module
from kit.refusals import fit_refuses, refuses
from kit.trainers import make_trainer
from kit.wandb_runs import PIXELS, START, STEP, Wide, by_hand, data, history, lines_of, records, run_files, summary
from matplotlib.figure import Figure
from PIL import Image

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint, WandbLogger
from jaxlit.errors import ArgumentError, LoggerError

CALLS = {
    "log_text": ("note", "a text"),
    "log_table": ("table", ["a"], [[1]]),
    "log_histogram": ("histogram", [1.0]),
    "log_image": ("image", PIXELS),
    "log_figure": ("figure", Figure(figsize=(1, 1))),
}


def trainer_of(*callbacks, **arguments):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    return make_trainer(*callbacks, **{"default_root_dir": "run", **quiet, **arguments})


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


# A training that logs one of everything


def media(trainer, model):
    logger, picture = trainer.loggers[0], PIXELS.copy()
    logger.log_image("image", picture)
    picture[:] = 0
    Image.fromarray(PIXELS).save("picture.png")
    logger.log_image("from a file", [Path("picture.png")])
    logger.log_image("two", [Image.fromarray(PIXELS), PIXELS + 1], captions=["first", "second"])
    logger.log_table("table", ["name", "value"], [("one", 1), [2, "two"], [None, 2.5]])
    logger.log_histogram("histogram", np.array([[0.0, 1.0, 1.0], [4.0, np.nan, np.inf]]), bins=4)
    logger.log_text("note", "a text")
    logger.log_text("note", "another", step=7)
    figure = Figure(figsize=(2, 1), dpi=100, facecolor="#ff0000")
    logger.log_figure("figure", figure)
    figure.set_facecolor("#00ff00")
    logger.log_hyperparams({"later": 1, "hf_token": "planted"})


def digest(file):
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """What a training of two epochs, of two steps each, and a test behind it have left."""
    folder, hashes = tmp_path_factory.mktemp("fitted"), {}
    # Before the logger, which sends each checkpoint as soon as it is there.
    saved = hooks(
        on_checkpoint_saved=lambda t, m, callback, path: hashes.update(
            {file: digest(file) for file in path.rglob("*") if file.is_file()}
        )
    )
    description = {"name": "shown", "id": "abc123", "entity": "team", "group": "sweep", "job_type": "train"}
    config = {"extra": {"size": 3, "db_password": "planted"}, "strategy": "theirs"}
    logger = WandbLogger(
        "digits", **description, tags=["a", "b"], notes="why", offline=True, config=config, log_model="all"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # At the same steps, so with the same names; what they know of themselves is different.
        first = ModelCheckpoint("A", monitor="val/loss", save_top_k=-1)
        second = ModelCheckpoint("B", monitor="val/other", mode="max", save_top_k=-1)  # by which the last is the best
        trainer = trainer_of(saved, logger, hooks(on_train_end=media), first, second, max_epochs=2)
        trainer.fit(Wide(), data(), data())
        left = SimpleNamespace(records=records(), history=history(), **summary(), hashes=hashes)
    left.files, left.folder, left.lines = (
        run_files(folder / "run")[-1].parent / "files",
        folder,
        lines_of(folder / "run"),
    )
    return left


def of_kind(fitted, kind):
    return [record[kind] for record in fitted.records if record["type"] == kind]


def test_every_row_of_a_training_comes_back_with_its_step_as_the_axis(fitted):
    rows = [{"step": row.pop(STEP), **row} for row in map(dict, fitted.history) if "epoch" in row]
    assert rows == fitted.lines and [list(row) for row in rows] != []
    for row, expected in zip(rows, by_hand(2)[0], strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    axes = {m.get("glob_name") or m.get("name"): m.get("step_metric") for m in of_kind(fitted, "metric")}
    assert axes == {STEP: None, "*": STEP, "val/loss": STEP, "val/other": STEP}


def test_the_run_holds_its_description_and_the_best_of_what_is_monitored(fitted):
    run, names = of_kind(fitted, "run")[0], ("project", "display_name", "run_id", "entity", "run_group", "job_type")
    assert [run[k] for k in names] == ["digits", "shown", "abc123", "team", "sweep", "train"]
    assert (run["tags"], run["notes"], fitted.exit_code) == (["a", "b"], "why", 0)
    losses = [row["val/loss"] for row in fitted.lines if "val/loss" in row]
    assert losses[0] < losses[1]
    expected = {"val/loss": {"min": losses[0], "last": losses[1]}, "val/other": {"max": losses[1], "last": losses[1]}}
    expected |= {"val/score": -losses[1], "best/val/loss": losses[0], "best/val/other": losses[1]}
    expected["best/checkpoint"] = "step_00000002"
    assert {name: fitted.summary[name] for name in expected} == expected


def test_the_config_says_what_was_trained_and_how_without_secrets(fitted):
    config, redacted = dict(fitted.config), "<redacted>"
    trainer, versions = config.pop("trainer"), config.pop("versions")
    assert (trainer["max_epochs"], trainer["strategy"], trainer["resume"]) == (2, "single", None)
    assert trainer["callbacks"][:2] == ["Made", "WandbLogger"]
    assert versions == {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "jaxlit")}
    # The user's own names stay theirs.
    assert config.pop("strategy") == "theirs" and config.pop("jaxlit/strategy").startswith("SingleDevice")
    assert config == {
        **{"mesh": {"data": 1}, "devices": {"kind": "cpu", "count": 1, "processes": 1}, "num_params": 120},
        **{"width": 3, "api_key": redacted, "extra": {"size": 3, "db_password": redacted}},
        **{"later": 1, "hf_token": redacted},
    }


def test_images_figures_tables_histograms_and_texts_arrive_as_they_were_when_logged(fitted):
    def pixels(path):
        with Image.open(fitted.files / path) as image:
            return np.asarray(image)

    found = fitted.summary
    for name, expected in (("image", [PIXELS]), ("from a file", [PIXELS]), ("two", [PIXELS, PIXELS + 1])):
        for path, picture in zip(found[name]["filenames"], expected, strict=True):
            np.testing.assert_array_equal(pixels(path), picture, err_msg=name)
    assert found["two"]["captions"] == ["first", "second"]
    figure = pixels(found["figure"]["path"])
    assert figure.shape[:2] == (100, 200) and (figure[..., :3] == [255, 0, 0]).all()
    table = json.loads((fitted.files / found["table"]["path"]).read_text())
    assert (table["columns"], table["data"]) == (["name", "value"], [["one", 1], [2, "two"], [None, 2.5]])
    entry = found["histogram"]
    assert (entry["values"], entry["bins"]) == ([1, 2, 0, 1], [0.0, 1.0, 2.0, 3.0, 4.0])
    texts = [row for row in fitted.history if "note" in row]
    assert texts == [{"note": "a text", STEP: 3}, {"note": "another", STEP: 7}]


def test_sending_checkpoints_of_the_same_name_changes_none_of_them(fitted):
    folders = [fitted.folder / name for name in "AB"]
    names = [sorted(path.name for path in folder.glob("step_*")) for folder in folders]
    assert names == [["step_00000002", "step_00000004"]] * 2
    assert {file: digest(file) for file in fitted.hashes} == fitted.hashes
    there = {path for folder in folders for path in folder.glob("step_*/**/*") if path.is_file()}
    assert there == set(fitted.hashes) and list(fitted.folder.rglob(".tmp-*")) == []
    sent = [artifact for artifact in of_kind(fitted, "artifact") if artifact["type"] == "model"]
    of = {"model-abc123": folders[0], "model-abc123-1": folders[1]}
    assert sorted(artifact["name"] for artifact in sent) == sorted([*of] * 2)
    for artifact in sent:
        (step,) = {*artifact["aliases"]} - {"latest", "best"}
        folder = of[artifact["name"]] / step
        copies = {folder / entry["path"]: entry["local_path"] for entry in artifact["manifest"]["contents"]}
        assert {file: digest(copy) for file, copy in copies.items()} == {
            file: found for file, found in fitted.hashes.items() if file.is_relative_to(folder)
        }


# Stages


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_run_needs_no_fit_before_it_and_has_the_config_of_the_module_it_evaluates(stage):
    trainer = trainer_of(WandbLogger(offline=True), max_epochs=0)
    run_stage(trainer)
    run_stage(
        trainer, stage, model := module(init=lambda self: Wide.__init__(self), error=lambda self, batch: batch["x"])
    )
    (row,) = history()
    assert row[{"validate": "val", "test": "test"}[stage]] == 1.5  # the mean of batches 1 and 2
    assert summary()["config"]["num_params"] == model.kernel.size == START.size


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
def test_before_setup_in_it_and_behind_the_run_logging_is_refused(stage):
    logger, tried = WandbLogger(offline=True), []

    def try_it(*args):
        for name, given in CALLS.items():
            refuses(LoggerError, lambda name=name, given=given: getattr(logger, name)(*given), "no run open")
        tried.append(args)

    try_it()
    # Teardown is the logger's first.
    run_stage(trainer_of(logger, hooks(setup=try_it, teardown=try_it), logger=False, max_epochs=0), stage)
    try_it()
    assert len(tried) == 4


@pytest.mark.parametrize("arguments", [{"fast_dev_run": True}, {"logger": False}])
def test_without_a_logger_everything_can_be_logged_and_goes_nowhere(arguments):
    called = []

    def log(trainer, model):
        assert isinstance(trainer.logger, jl.callbacks.NoLogger)
        for name, given in CALLS.items():
            getattr(trainer.logger, name)(*given, step=3)
        called.append(trainer.loggers)

    callbacks = [hooks(on_train_epoch_end=log), *([WandbLogger(offline=True)] if "fast_dev_run" in arguments else [])]
    run_stage(trainer_of(*callbacks, **arguments))
    written = [path.name for path in Path("run").iterdir()] if Path("run").exists() else []
    assert (called, written) == ([[]], [] if "fast_dev_run" in arguments else ["checkpoints"])


# Which run


def test_a_training_has_an_id_of_its_own_unless_it_goes_on(monkeypatch):
    logger = WandbLogger(offline=True)
    assert logger.id is None
    first = begin(logger)
    assert begin(logger) == first and ids_in() == first * 2  # a second fit
    assert begin(WandbLogger(offline=True)) != first
    # One that was killed before its first checkpoint; the id of each project is its own.
    both = [begin(WandbLogger("one", offline=True), WandbLogger("two", offline=True), resume="auto") for _ in range(2)]
    assert both[0] == both[1] and len({*both[0]}) == 2
    # Two trainings that write their W&B files to one place.
    shared = [begin(WandbLogger(offline=True, save_dir="all"), resume="auto", default_root_dir=x) for x in "ab"]
    assert shared[0] != shared[1] and ids_in("all") == sorted(shared[0] + shared[1])
    monkeypatch.setenv("WANDB_RUN_ID", "ofagent")
    assert begin(WandbLogger(offline=True)) == ["ofagent"] and begin(WandbLogger(offline=True, id="mine")) == ["mine"]


@pytest.mark.parametrize(("given", "expected"), [({}, "ofcheckpoint"), ({"id": "mine"}, "mine")])
def test_a_checkpoint_says_which_run_goes_on_unless_an_id_was_given(given, expected):
    run_stage(trainer_of(WandbLogger(offline=True, id="ofcheckpoint")))
    file = Path("run/wandb_run_ids.json")
    file.write_text(json.dumps({"/": "offile", "me/other": "another"}))  # the checkpoint knows better
    assert begin(WandbLogger(offline=True, **given), resume="auto", max_epochs=1) == [expected]
    assert json.loads(file.read_text()) == {"/": expected, "me/other": "another"}


@contextlib.contextmanager
def open_run(**given):
    """Open a run as a program of the user's own does, and finish it at the end."""
    Path("mine").mkdir(exist_ok=True)
    with wandb.init(mode="offline", dir=Path("mine").absolute(), config={"own": 1}, **given) as run:
        yield run


@pytest.mark.parametrize("by", ["default", "experiment", "same id"])
def test_a_run_that_the_user_has_opened_is_used_and_left_open(by):
    with open_run(id="mine", reinit="create_new" if by == "experiment" else None) as run:
        logger = WandbLogger(id="mine" if by == "same id" else None, experiment=run if by == "experiment" else None)
        assert (logger.id, logger.experiment) == {"experiment": ("mine", run), "same id": ("mine", None)}.get(
            by, (None, None)
        )
        run_stage(trainer_of(logger, logger=False))
        assert logger.id == "mine" and ids_in() == []
        run.log({"after": 1})
    rows, config = history("mine"), summary("mine")["config"]
    losses = [mean([], 0.0) - 1, 2.0 - mean([[1]])]
    assert [row["loss"] for row in rows if "loss" in row] == [x**2 for x in losses] and rows[-1]["after"] == 1
    assert (config["own"], config["num_params"]) == (1, 1)


def test_a_logger_with_another_id_opens_its_own_run():
    with open_run(id="mine"):
        assert begin(WandbLogger(id="other", offline=True)) == ["other"]
    assert ids_in() == ["other"] and ids_in("mine") == ["mine"]


def test_a_disabled_run_is_nowhere(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = WandbLogger(log_model="all")
    trainer = trainer_of(
        logger, ModelCheckpoint(), hooks(on_test_end=note("x")), enable_progress_bar=True, logger=False
    )
    run_stage(trainer)
    out = capsys.readouterr().out
    assert logger.location is None and "  report" not in out and out.splitlines()[1] == "W&B disabled"
    run_stage(trainer, "test")
    assert [path.name for path in Path("run").iterdir()] == ["checkpoints"]


# How it ends


def test_an_error_marks_the_run_as_failed_and_the_closing_lines_name_it(capsys):
    fails = hooks(on_train_epoch_end=lambda *args: 1 / 0)
    logger = WandbLogger(offline=True, save_dir="elsewhere")
    with pytest.raises(ZeroDivisionError):
        run_stage(trainer_of(logger, fails, enable_progress_bar=True, logger=False))
    (report,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  report")]
    assert report.split() == ["report", str(run_files("elsewhere")[0].parent)]
    assert summary("elsewhere")["exit_code"] == 1 and logger.experiment is None and not Path("run/wandb").exists()


def test_a_finished_run_does_not_end_training(capsys):
    with open_run() as run:
        pass
    trainer = run_stage(trainer_of(WandbLogger(experiment=run)))
    (line,) = capsys.readouterr().out.splitlines()
    assert trainer.global_step == 2 and line.startswith("W&B: off for the rest of this run (") and "finished" in line


def test_a_row_that_fails_ends_training_if_asked(monkeypatch):
    monkeypatch.setattr(wandb.Run, "log", lambda *args, **given: 1 / 0)
    with pytest.raises(jl.errors.JaxlitError, match="division by zero"):
        run_stage(trainer_of(WandbLogger(offline=True, on_error="raise")))
    assert summary()["exit_code"] == 1


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


@pytest.mark.parametrize("log_model", ["all", True])
def test_a_checkpoint_that_is_gone_is_said_in_one_line(log_model, capsys):
    """Deleted behind the back of all others."""
    gone = hooks(on_checkpoint_saved=lambda t, m, callback, path: path.rename(f"away{path.name}"))
    logger = WandbLogger(offline=True, log_model=log_model)
    assert run_stage(trainer_of(gone, logger, ModelCheckpoint())).global_step == 2
    told = capsys.readouterr().out.splitlines()[1:]
    assert len(told) == 1 and told[0].startswith("W&B: step_0000000") and "was not sent (No such file" in told[0]


# What is refused


def test_checkpoints_to_send_need_someone_who_writes_them():
    for log_model in ("all", True, "best"):
        logger = WandbLogger(offline=True, log_model=log_model)
        fit_refuses(ArgumentError, "log_model=.* without a Mod", callbacks=logger, enable_checkpointing=False)
    assert not list(Path().rglob("wandb"))


def test_a_folder_that_cannot_be_written_is_refused_and_a_full_disk_is_said(monkeypatch, capsys):
    Path("file").write_text("no folder")
    fit_refuses(LoggerError, "save_dir", callbacks=WandbLogger(offline=True, save_dir="file"))

    def full(*args, **given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxlit.callbacks.wandb_logger.tempfile.TemporaryFile", full)
    fit_refuses(LoggerError, "No space left", callbacks=WandbLogger(offline=True, on_error="raise"))
    capsys.readouterr()
    begin(WandbLogger(offline=True))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("W&B: off for this run") and "No space left" in line


def test_what_cannot_be_logged_is_refused_by_name():
    logger = WandbLogger(offline=True)
    for call, words in (
        (lambda: logger.log_image("key", [np.zeros((4, 5), np.int32)]), r"log_image\('key', .*int32\[4, 5\]"),
        (lambda: logger.log_image("key", [PIXELS, PIXELS], captions=["one"]), "2 images and 1 captions"),
        (lambda: logger.log_table("key", ["a", "b"], [[1, 2], [1]]), r"log_table\('key', .*row 1 has 1 cells.* 2 col"),
        *(
            (lambda bins=bins: logger.log_histogram("key", [1.0], bins=bins), rf"\(bins=\.\.\.\).* 512.*got {bins}")
            for bins in (0, 513, 2.0, True)
        ),
        *(
            (
                lambda key=key, name=name: getattr(logger, name)(key, *CALLS[name][1:]),
                f"logs under a name .*got {key!r}",
            )
            for key in ("step", "epoch", "", 3)
            for name in CALLS
        ),
    ):
        refuses(ArgumentError, call, words)


def test_without_pillow_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    for name in ("log_image", "log_figure"):
        refuses(LoggerError, lambda name=name: getattr(WandbLogger(), name)(*CALLS[name]), "pip install pillow")
