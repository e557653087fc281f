"""WandbLogger with the real SDK, without network, read back by W&B's own reader."""

import importlib.metadata
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from flax import nnx
from wandb_model import Line, by_hand, data
from wandb_offline import history, records, run_file, summary

import jaxlit as jl
from jaxlit.callbacks import EarlyStopping, WandbLogger
from jaxlit.errors import ArgumentError, JaxlitError, LoggerError
from jaxlit.reporting.redaction import redact

STEP = "trainer/global_step"


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real training of 2 epochs, of 2 steps each."""
    folder = tmp_path_factory.mktemp("fitted")
    logger = WandbLogger("digits", offline=True, config={"extra": {"size": 3, "db_password": "planted"}})
    trainer = jl.Trainer(
        strategy="ddp",
        max_epochs=2,
        log_every_n_steps=1,
        callbacks=[
            logger,
            EarlyStopping("val/loss", patience=9),
            EarlyStopping("val/score", mode="max", patience=9),
        ],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(Line(rngs=nnx.Rngs(0)), data(), data())
    return folder


def test_every_row_of_a_training_comes_back(fitted: Path) -> None:
    rows, expected = history(fitted), by_hand(2)
    lines = [json.loads(line) for line in (fitted / "metrics.jsonl").read_text().splitlines()]
    assert [{"step": row.pop(STEP), **row} for row in rows] == lines
    assert [row.pop("epoch") for row in lines] == [0, 0, 0, 1, 1, 1]
    assert [set(row) for row in lines] == [set(row) for row in expected]
    for row, wanted in zip(lines, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-5)


def test_the_config_says_what_was_trained_and_how_without_secrets(fitted: Path) -> None:
    config = summary(fitted)["config"]
    trainer = config.pop("trainer")
    assert (trainer["max_epochs"], trainer["strategy"], trainer["resume"]) == (2, "ddp", None)
    assert trainer["callbacks"][:3] == ["WandbLogger", "EarlyStopping", "EarlyStopping"]
    versions = config.pop("versions")
    assert versions.pop("jaxlit") == jl.__version__
    assert versions == {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")}
    assert config.pop("strategy").startswith("DDP")
    assert config == {
        "mesh": {"data": 8},
        "devices": {"kind": "cpu", "count": 8, "processes": 1},
        "num_params": 1,
        "start": 2.0,
        "api_key": "<redacted>",
        "extra": {"size": 3, "db_password": "<redacted>"},
    }


def test_the_summary_has_the_best_of_what_is_monitored(fitted: Path) -> None:
    found, rows = summary(fitted)["summary"], [row for row in history(fitted) if "val/loss" in row]
    losses, scores = ([row[name] for row in rows] for name in ("val/loss", "val/score"))
    assert losses[0] < losses[1]
    assert found["val/loss"] == {"min": losses[0], "last": losses[1]}
    assert found["val/score"] == {"max": scores[0], "last": scores[1]}
    assert found["val/other"] == losses[1]


def test_a_trial_of_a_few_batches_has_no_run(tmp_path: Path) -> None:
    logger = WandbLogger(offline=True)
    trainer = jl.Trainer(fast_dev_run=True, callbacks=[logger], default_root_dir=tmp_path)
    trainer.fit(Line(rngs=nnx.Rngs(0)), data(), data())
    assert logger.experiment is None and list(tmp_path.iterdir()) == []


def test_what_looks_like_a_secret_is_redacted_at_any_depth() -> None:
    config = {
        "API_KEY": "x",
        "apiKey": ["x"],
        "a": {"hf_token": "x", "list": [{"client_secret": {"y": "x"}}, ({"PASSWORD": 1234},)]},
        "aws_credentials": "x",
        "Authorization": "x",
    }
    assert "x" not in (text := json.dumps(redact(config)).replace("<redacted>", "")) and "1234" not in text


def test_a_password_in_a_url_is_redacted() -> None:
    config = {"db": "postgres://me:planted@host:5432/x", "all": ["see redis://:planted@host and s3://u:planted@b/c"]}
    assert redact(config) == {
        "db": "postgres://me:<redacted>@host:5432/x",
        "all": ["see redis://:<redacted>@host and s3://u:<redacted>@b/c"],
    }
    for plain in ("http://host:80/a@b", "https://me@host/a:b", "a: b@c", "host:80"):
        assert redact({"url": plain}) == {"url": plain}


def test_ordinary_hyperparameters_are_kept() -> None:
    config = {"width": 8, "max_tokens": 4096, "names": ["a", {"lr": 0.1}], "key": None, "tokenizer": "bpe"}
    assert redact(config) == config


# With a stand-in for the Trainer -----------------------------------------------------------------------


def train(
    trainer: Any,
    logger: WandbLogger,
    rows: Sequence[tuple[int, dict[str, float]]] = ((0, {"loss": 1.0}),),
    error: Exception | None = None,
) -> None:
    trainer.start(logger)
    for step, values in rows:
        trainer.log(logger, values, step)
    if error is not None:
        logger.on_exception(trainer, trainer.module, error)
    logger.teardown(trainer, trainer.module, "fit")


def test_rows_come_back_with_the_steps_that_made_them(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer()
    # A step that goes back, as after a resume, is kept too.
    rows = [(4, {"loss": 1.5}), (9, {"loss": 0.5, "val/loss": 2.0}), (7, {"loss": 0.25})]
    train(trainer, WandbLogger(offline=True), rows)
    assert history(trainer.run_dir) == [{**values, STEP: step, "epoch": 0} for step, values in rows]


def test_every_metric_has_the_global_step_as_its_axis(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer()
    train(trainer, WandbLogger(offline=True))
    metrics = [record["metric"] for record in records(trainer.run_dir) if record["type"] == "metric"]
    assert {(m.get("glob_name") or m.get("name"), m.get("step_metric")) for m in metrics} == {(STEP, None), ("*", STEP)}


def test_the_run_holds_its_description(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer()
    logger = WandbLogger(
        "digits",
        name="first",
        id="abc123",
        entity="team",
        group="sweep",
        job_type="train",
        tags=["a", "b"],
        notes="why",
        offline=True,
    )
    train(trainer, logger)
    (run,) = [record["run"] for record in records(trainer.run_dir) if record["type"] == "run"]
    names = ("project", "display_name", "run_id", "entity", "run_group", "job_type", "tags", "notes")
    assert [run[k] for k in names] == ["digits", "first", "abc123", "team", "sweep", "train", ["a", "b"], "why"]


@pytest.mark.parametrize(("error", "code"), [(None, 0), (ValueError("bad batch"), 1)])
def test_the_exit_code_tells_of_an_error(make_trainer: Callable[..., Any], error: Exception | None, code: int) -> None:
    trainer = make_trainer()
    train(trainer, WandbLogger(offline=True), error=error)
    assert summary(trainer.run_dir)["exit_code"] == code


def test_save_dir_takes_the_place_of_the_folder_of_the_run(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make_trainer()
    train(trainer, WandbLogger(offline=True, save_dir="elsewhere"))
    assert summary(tmp_path / "elsewhere")["summary"]["loss"] == 1.0 and not trainer.run_dir.exists()


# Which run ---------------------------------------------------------------------------------------------


def test_two_trainings_have_different_ids(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    first, second = WandbLogger(offline=True), WandbLogger(offline=True)
    assert first.id is None
    for i, logger in enumerate((first, second)):
        train(make_trainer(run_dir=tmp_path / str(i)), logger)
    assert first.id != second.id


def test_a_second_fit_has_the_same_id(make_trainer: Callable[..., Any]) -> None:
    trainer, logger = make_trainer(), WandbLogger(offline=True, id="abc123")
    train(trainer, logger)
    train(trainer, logger, [(1, {"loss": 0.5})])
    files = [path.name for path in trainer.run_dir.glob("wandb/offline-run-*/*.wandb")]
    assert files == ["run-abc123.wandb"] * 2


@pytest.mark.parametrize(("given", "expected"), [({}, "ofcheckpoint"), ({"id": "mine"}, "mine")])
def test_a_checkpoint_says_which_run_goes_on_unless_an_id_was_given(
    make_trainer: Callable[..., Any], given: dict[str, Any], expected: str
) -> None:
    state = WandbLogger(id="ofcheckpoint").state_dict()
    trainer, logger = make_trainer(resume="auto"), WandbLogger(offline=True, **given)
    trainer.run_dir.mkdir()
    file = trainer.run_dir / "wandb_run_ids.json"
    file.write_text(json.dumps({"/": "offile", "me/other": "another"}))  # the checkpoint knows better
    logger.setup(trainer, trainer.module, "fit")
    logger.load_state_dict(json.loads(json.dumps(state)))
    logger.on_fit_start(trainer, trainer.module)
    logger.teardown(trainer, trainer.module, "fit")
    assert run_file(trainer.run_dir).name == f"run-{expected}.wandb"
    assert json.loads(file.read_text()) == {"/": expected, "me/other": "another"}


@pytest.mark.parametrize(("resume", "same"), [("auto", True), (None, False)])
def test_a_training_killed_before_its_first_checkpoint_goes_on_in_its_run(
    make_trainer: Callable[..., Any], resume: str | None, same: bool
) -> None:
    first, second = WandbLogger(offline=True), WandbLogger(offline=True)
    train(make_trainer(resume=resume), first)
    train(make_trainer(resume=resume), second)
    assert (first.id == second.id) is same


def test_an_agent_says_which_run_it_is(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "ofagent")
    trainer = make_trainer()
    train(trainer, WandbLogger(offline=True))
    assert run_file(trainer.run_dir).name == "run-ofagent.wandb"


def test_a_run_of_the_users_own_is_used_and_left_open(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make_trainer(hparams={"width": 8})
    run = wandb.init(mode="offline", dir=str(tmp_path), config={"mine": 1}, reinit="create_new")
    logger = WandbLogger(experiment=run)
    assert logger.id == run.id and logger.experiment is run
    train(trainer, logger)
    run.log({"after": 1})
    run.finish()
    rows = history(tmp_path)
    assert [row.get("loss") for row in rows] == [1.0, None] and rows[1]["after"] == 1
    config = summary(tmp_path)["config"]
    assert (config["mine"], config["width"], config["mesh"]) == (1, 8, {"data": 8})
    assert not trainer.run_dir.exists()


def test_only_the_first_process_has_a_run(make_trainer: Callable[..., Any]) -> None:
    logger, trainer = WandbLogger(offline=True), make_trainer(is_global_zero=False)
    trainer.start(logger)
    trainer.log(logger, {"loss": 1.0}, 0)
    logger.log_text("note", "of this process")
    assert logger.experiment is None
    logger.teardown(trainer, trainer.module, "fit")
    assert not trainer.run_dir.exists()


# What is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "") for name in ("project", "name", "id", "entity", "group", "job_type", "notes")),
        *((name, 3) for name in ("project", "name", "id", "entity", "group", "job_type", "notes", "save_dir")),
        *(("id", f"a{sign}b") for sign in "/\\#?%:"),
        *(("tags", value) for value in ("one", [1], [""], ["x" * 65])),
        ("config", [("a", 1)]),
        ("offline", "yes"),
        *(("log_model", value) for value in ("latest", 1, None)),
        *(("watch", value) for value in ("grads", True)),
        *(("watch_every_n_steps", value) for value in (0, -1, 1.5, True)),
        ("processes", "all"),
        ("on_error", "ignore"),
        *((name, value) for name in ("init_timeout", "finish_timeout") for value in (0, -1.0, float("inf"), True, "5")),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as error:
        WandbLogger(**{name: value})
    assert f"WandbLogger({name}=...)" in str(error.value) and repr(value) in str(error.value)


def test_a_shared_run_cannot_be_offline() -> None:
    with pytest.raises(ArgumentError, match="processes='group'"):
        WandbLogger(processes="shared", offline=True)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("log_text", ("k", "text")),
        ("log_table", ("k", ["a"], [[1]])),
        ("log_histogram", ("k", [1.0])),
        ("log_image", ("k", np.zeros((2, 2)))),
    ],
)
def test_nothing_can_be_logged_before_the_run_is_open(
    make_trainer: Callable[..., Any], method: str, arguments: tuple[Any, ...]
) -> None:
    logger, trainer = WandbLogger(offline=True), make_trainer()
    with pytest.raises(LoggerError, match="no run open"):
        getattr(logger, method)(*arguments)
    logger.setup(trainer, trainer.module, "fit")
    trainer.is_running = False  # nothing is known yet of the checkpoint that training goes on from
    with pytest.raises(LoggerError, match="no run open"):
        getattr(logger, method)(*arguments)


def test_without_the_package_the_error_says_what_to_do(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    logger, trainer = WandbLogger(offline=True), make_trainer()
    with pytest.raises(JaxlitError, match="pip install wandb"):
        trainer.start(logger)


def test_a_folder_that_can_never_be_written_is_refused_at_once(make_trainer: Callable[..., Any]) -> None:
    Path("file").write_text("no folder")
    with pytest.raises(LoggerError, match="save_dir"):
        make_trainer().start(WandbLogger(offline=True, save_dir="file"))
