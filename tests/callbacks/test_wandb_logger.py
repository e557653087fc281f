"""WandbLogger with the real SDK without network, read back by W&B's own reader."""

import contextlib
import importlib.metadata
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import wandb
from kit import wandb_runs
from kit.batches import numbered
from kit.by_hand import mean
from kit.checkpoints import names
from kit.journal import hooks, without_rates
from kit.modules import Mean, module
from kit.refusals import fit_refuses, refuses
from kit.trainers import thinned
from kit.wandb_runs import PIXELS, STEP, Wide, data, history, records, run_files, summary, trainer_of
from matplotlib.figure import Figure
from PIL import Image

import jaxlit as jl
from jaxlit.callbacks import GradientNorm, ModelCheckpoint, WandbLogger
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
    assert summary()["config"]["num_params"] == model.kernel.size == 120
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
    refuses(jl.errors.JaxlitError, lambda: run_stage(trainer), "could not finish run .*No such file")


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
    assert logger.experiment is not run and logger.experiment.id == run.id


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


def test_another_process_than_the_first_has_no_run(monkeypatch, capsys):
    monkeypatch.setattr(jl.Trainer, "is_global_zero", False)
    logger = WandbLogger(offline=True)
    notes = hooks(on_fit_start=lambda t, m: (note("x")(t), t.logger.log_hyperparams({})))
    run_stage(trainer_of(logger, notes, max_epochs=0, logger=False, enable_checkpointing=False))
    assert logger.experiment is None and [path.name for path in Path("run").iterdir()] == [".run-lock"]
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


def log_media(trainer, module):
    logger, picture = trainer.loggers[0], PIXELS.copy()
    logger.log_image("image", picture)
    picture[:] = 0
    logger.log_image("two", [Image.fromarray(PIXELS), PIXELS + 1], caption=["first", "second"])
    logger.log_table("table", ["name", "value"], [("one", 1), [2, "two"], [None, 2.5]])
    logger.log_histogram("histogram", np.array([[0.0, 1.0, 1.0], [4.0, np.nan, np.inf]]), bins=4)
    logger.log_text("note", "a text")
    logger.log_text("note", "another", step=7)
    figure = Figure(figsize=(2, 1), dpi=100, facecolor="#ff0000")
    logger.log_figure("figure", figure)
    figure.set_facecolor("#00ff00")
    logger.log_hyperparams({"later": 1, "hf_token": "planted"})


def joined(rows):
    """Return rows as the file has them: one for each step and epoch, with six digits."""
    result = []
    for exact in rows:
        row = {name: x if x % 1 == 0 else float(f"{x:.6g}") for name, x in exact.items()}
        same = result and all(result[-1].get(name) == row.get(name) for name in ("step", "epoch"))
        result[-1:] = [result[-1] | row] if same else [*result[-1:], row]
    return result


def numbers(rows):
    return [{"step": row.pop(STEP), **row} for row in rows if "epoch" in row]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Train and test with everything, and with a choice of checkpoints."""
    folder = tmp_path_factory.mktemp("everything")
    given = {"name": "shown", "group": "group", "job_type": "train", "tags": ["a", "b"], "notes": "why"}
    config = {"extra": {"size": 3, "password": "planted"}, "strategy": "theirs"}
    watch = {"watch": "all", "watch_every_n_steps": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        logger = WandbLogger("project", offline=True, **given, config=config, log_model="all", **watch)
        # At the same steps, so with the same names; what they know of themselves is different.
        first = ModelCheckpoint("A", monitor="val/loss", save_top_k=-1)
        second = ModelCheckpoint("B", monitor="val/other", mode="max", save_top_k=-1)  # by which the last is the best
        callbacks = [logger, hooks(on_train_end=log_media), GradientNorm(), first, second]
        trainer = trainer_of(*callbacks, max_epochs=3, default_root_dir="whole")
        trainer.fit(Wide(), data(), data())
        trainer.test(dataloaders=data())
        for name, log_model in (("kept", True), ("best", "best")):
            chooses = WandbLogger("project", offline=True, log_model=log_model)
            saves = ModelCheckpoint(monitor="val/loss")
            trainer = trainer_of(chooses, saves, max_epochs=3, default_root_dir=folder / name)
            trainer.fit(Wide(), data(), data())
    run, rows = folder / "whole", history(folder / "whole", 0)
    losses = [row["val/loss"] for row in rows if "val/loss" in row]
    assert losses == sorted(losses) and losses[0] < losses[-1]
    return SimpleNamespace(folder=folder, run=run, id=logger.id, rows=rows, losses=losses)


@pytest.mark.full
def test_every_row_is_in_the_run_and_a_test_after_the_fit_adds_its_own(whole):
    (expected, grads, _), rows = wandb_runs.by_hand(3), numbers(history(whole.run, 0) + history(whole.run, 1))
    assert joined(rows) == wandb_runs.lines_of(whole.run)
    norms = [row.pop("grad_norm") for row in rows if "grad_norm" in row]
    assert norms == pytest.approx([float(np.linalg.norm(grad)) for grad in grads], rel=1e-4)
    expected.append({"step": 5, "epoch": 3, "test/loss": whole.losses[-1]})
    for row, wanted in zip(rows, expected, strict=True):
        assert without_rates(row) == pytest.approx(wanted, rel=1e-4)
    assert [path.stem for path in run_files(whole.run)] == [f"run-{whole.id}"] * 2


@pytest.mark.full
def test_the_run_has_its_description_config_and_best_values(whole):
    result = summary(whole.run, 0)
    (run,) = [record["run"] for record in records(whole.run, 0) if record["type"] == "run"]
    given = {"project": "project", "display_name": "shown", "run_group": "group", "job_type": "train", "notes": "why"}
    assert run.items() >= given.items() and run["tags"] == ["a", "b"] and run["resume"] is True
    sent = [file["path"] for record in records(whole.run, 0) for file in record.get("files", {}).get("files", ())]
    assert not [name for name in sent if "meta" in name], "the command line is sent"
    config = result["config"]
    trainer, versions = config.pop("trainer"), config.pop("versions")
    assert (trainer["max_epochs"], trainer["strategy"], trainer["resume"]) == (3, "single", None)
    assert trainer["callbacks"][:2] == ["WandbLogger", "Made"]
    assert versions == {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "jaxlit")}
    # The user's own names stay theirs.
    assert config.pop("strategy") == "theirs" and config.pop("jaxlit/strategy").startswith("SingleDevice")
    mesh = {"mesh": {"data": 1}, "devices": {"kind": "cpu", "count": 1, "processes": 1}, "num_params": 120}
    secrets = {"api_key": "<redacted>", "extra": {"size": 3, "password": "<redacted>"}, "hf_token": "<redacted>"}
    assert config == mesh | secrets | {"width": 3, "later": 1}
    worst, best = whole.losses[-1], whole.losses[0]
    expected = {"val/loss": {"min": best, "last": worst}, "val/other": {"max": worst, "last": worst}}
    expected |= {"val/score": -worst, "best/val/loss": best, "best/val/other": worst}
    expected["best/checkpoint"] = "step_00000002"
    assert {name: result["summary"][name] for name in expected} == expected
    assert summary(whole.run, 1)["summary"]["test/loss"] == worst


@pytest.mark.full
def test_media_are_kept_as_they_were_when_logged(whole):
    folder = run_files(whole.run)[0].parent / "files"

    def pixels(path):
        with Image.open(folder / path) as image:
            return np.asarray(image)

    result = {key: value for row in whole.rows for key, value in row.items()}
    for name, expected in (("image", [PIXELS]), ("two", [PIXELS, PIXELS + 1])):
        for path, picture in zip(result[f"{name}.filenames"], expected, strict=True):
            np.testing.assert_array_equal(pixels(path), picture, err_msg=name)
    assert result["two.captions"] == ["first", "second"]
    figure = pixels(result["figure.filenames"][0])
    assert figure.shape[:2] == (100, 200) and (figure[..., :3] == [255, 0, 0]).all()
    table = json.loads((folder / result["table.path"]).read_text())
    assert (table["columns"], table["data"]) == (["name", "value"], [["one", 1], [2, "two"], [None, 2.5]])
    assert (result["histogram.values"], result["histogram.bins"]) == ([1, 2, 0, 1], [0.0, 1.0, 2.0, 3.0, 4.0])
    assert [(row["note"], row[STEP]) for row in whole.rows if "note" in row] == [("a text", 5), ("another", 7)]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gradients", "parameters"])
def test_watched_histograms_are_those_of_numpy(whole, kind):
    rows = [row for row in whole.rows if f"{kind}/kernel.bins" in row]
    assert [row[STEP] for row in rows] == [1, 3, 5]
    _, grads, params = wandb_runs.by_hand(3)
    for row in rows:
        values = (grads if kind == "gradients" else params)[row[STEP]]
        counts, edges = np.histogram(values, 64)
        # No entry is so near to an edge that rounding could count it elsewhere.
        assert np.sort(np.abs(values.reshape(-1, 1) - edges[1:-1]).ravel())[0] > 1e-5 * (edges[-1] - edges[0])
        np.testing.assert_allclose(row[f"{kind}/kernel.bins"], edges, rtol=1e-4, atol=1e-5 * np.abs(edges).max())
        assert row[f"{kind}/kernel.values"] == counts.tolist()


@pytest.mark.full
def test_every_checkpoint_is_kept_byte_for_byte(whole):
    artifacts = wandb_runs.models(whole.run, 0)
    for writer, (name, monitor, best) in {"A": ("", "val/loss", 1), "B": ("-1", "val/other", 3)}.items():
        of_writer = [artifact for artifact in artifacts if artifact.name == f"model-{whole.id}{name}"]
        for epoch, (artifact, score) in enumerate(zip(of_writer, whole.losses, strict=True), start=1):
            name = f"step_{2 * epoch:08}"
            assert artifact.files == wandb_runs.files_of(whole.folder / writer / name)
            # By which the last is the best, each is the best when it is written.
            assert artifact.aliases == {name, "latest", *(["best"] if best == 3 or epoch == 1 else [])}
            assert artifact.metadata == {"step": 2 * epoch, "epoch": epoch, "monitor": monitor, "score": score}
    assert len(artifacts) == 6


@pytest.mark.full
def test_log_model_chooses_the_checkpoints(whole):
    both = {"step_00000002": {"best"}, "step_00000006": set()}
    for name, expected in (("kept", both), ("best", {"step_00000002": {"best"}})):
        artifacts = wandb_runs.models(whole.folder / name)
        for artifact, (step, marks) in zip(artifacts, expected.items(), strict=True):
            assert artifact.files == wandb_runs.files_of(whole.folder / name / "checkpoints" / step)
            assert artifact.aliases - {"latest"} == {step, *marks}


def fit_or_go_on():
    def die(trainer, *rest):
        if not begun[0] and trainer.global_step == 5:
            trainer.checkpoint_callback.finish(trainer)
            os.kill(os.getpid(), signal.SIGKILL)

    begun = []
    kills = hooks(on_train_start=lambda trainer, module: begun.append(trainer.global_step), on_train_batch_end=die)
    saves = ModelCheckpoint(every_n_train_steps=2)
    trainer = trainer_of(WandbLogger("project", offline=True), saves, kills, max_epochs=4, resume="auto")
    trainer.fit(Wide(), data(), data())


@pytest.mark.full
def test_a_killed_training_goes_on_in_its_run(tmp_path):
    killed = wandb_runs.start(fit_or_go_on, tmp_path)
    assert killed.code == -signal.SIGKILL, killed.output + killed.errors
    again = wandb_runs.start(fit_or_go_on, tmp_path)
    assert (again.code, again.errors) == (0, ""), again.output + again.errors
    (state, *_) = tmp_path.glob("run/checkpoints/step_*/state.json")
    name = json.loads(state.read_text())["callbacks"]["WandbLogger"]["id"]
    assert ids_in(tmp_path / "run") == [name] * 2
    lines = wandb_runs.lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6, 7]
    # It continues at step 4.
    assert joined(numbers(history(tmp_path / "run"))) == [line for line in lines if line["step"] >= 4]
