"""What holds for every logger that writes rows to a file: failures, resumes, and who may write where."""

import contextlib
import csv
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.callbacks import CSVLogger, JSONLLogger, ModelCheckpoint, WandbLogger
from jaxlit.errors import ArgumentError, JaxlitError, LoggerError

KINDS = {"metrics.csv": CSVLogger, "metrics.jsonl": JSONLLogger}


@pytest.fixture(params=[CSVLogger, JSONLLogger])
def kind(request):
    """Return a kind of logger."""
    return request.param


def name_of(logger):
    return {CSVLogger: "metrics.csv", JSONLLogger: "metrics.jsonl"}[
        logger if isinstance(logger, type) else type(logger)
    ]


def read(folder: Path, name: str) -> list[dict[str, float]]:
    """Return the rows of either file as the numbers they hold."""
    with (folder / name).open(newline="") as file:
        if name.endswith(".csv"):
            return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
        return [{k: float(v) for k, v in json.loads(line).items()} for line in file]


# A file that cannot be written -----------------------------------------------------------------------


@contextlib.contextmanager
def file_size_limit(size: int):
    """Let the kernel write no file of this process beyond a size: a write that crosses it is cut."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_row_that_fits_only_in_part_is_dropped_and_later_ones_follow(kind, make_trainer, capsys):
    logger, trainer = kind(), make_trainer()
    for step in range(2):
        trainer.log(logger, {"loss": 0.5}, step)
    path = trainer.run_dir / name_of(kind)
    whole = path.read_bytes()
    with file_size_limit(len(whole) + 4):
        for step in (2, 3):
            trainer.log(logger, {"loss": 0.5}, step)
            assert path.read_bytes() == whole
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{kind.__name__} cannot write {path}" in line and "File too large" in line and "Training goes on" in line
    trainer.log(logger, {"loss": 0.25}, 4)
    rows = [{"step": s, "epoch": 0, "loss": x} for s, x in ((0, 0.5), (1, 0.5), (4, 0.25))]
    assert read(trainer.run_dir, path.name) == rows
    assert logger.state_dict()["rows"] == 3
    logger.teardown(trainer, None, "fit")


def test_raise_makes_a_failure_an_error_that_says_what_to_do(kind, make_trainer, capsys):
    logger, trainer = kind(on_error="raise"), make_trainer()
    trainer.log(logger, {"loss": 0.5}, 0)
    path = trainer.run_dir / name_of(kind)
    whole = path.read_bytes()
    with (
        file_size_limit(len(whole) + 4),
        pytest.raises(LoggerError, match=r"cannot write .*Free the disk.*logger=False"),
    ):
        trainer.log(logger, {"loss": 0.5}, 1)
    assert path.read_bytes() == whole and capsys.readouterr().out == ""


def test_a_failure_of_a_later_fit_is_said_again(kind, make_trainer, capsys):
    logger, trainer = kind(), make_trainer()
    trainer.run_dir.mkdir()
    (trainer.run_dir / name_of(kind)).mkdir()  # a folder, which no row can be written to
    for _ in range(2):
        trainer.start(logger)
        for step in range(3):
            trainer.log(logger, {"loss": 0.5}, step)
        trainer.end(logger)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_run_folder_that_can_never_be_made_is_refused_at_the_start(kind, make_trainer, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "deep" / "run"):
        trainer, logger = make_trainer(run_dir=folder), kind()
        logger.setup(trainer, trainer.module, "fit")
        with pytest.raises(LoggerError, match=rf"{kind.__name__} writes to .*file is a file\. Pass another .*root_dir"):
            logger.on_fit_start(trainer, trainer.module)


def test_a_folder_that_cannot_be_made_does_not_end_an_evaluation(kind, make_trainer, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    trainer = make_trainer(run_dir=tmp_path / "file" / "run")
    trainer.log(kind(), {"loss": 1.0}, 0)
    assert "Not a directory" in capsys.readouterr().out


def test_another_process_than_the_first_asks_for_no_folder(kind, make_trainer, tmp_path):
    (tmp_path / "file").write_text("")
    trainer = make_trainer(run_dir=tmp_path / "file" / "run", is_global_zero=False)
    trainer.start(logger := kind())
    trainer.log(logger, {"loss": 1.0}, 0)
    trainer.end(logger)


@pytest.mark.parametrize("value", ["ignore", None, True, 1])
def test_a_wrong_on_error_is_refused(kind, value):
    with pytest.raises(
        ArgumentError, match=rf"{kind.__name__}\(on_error=\.\.\.\) takes 'warn' or 'raise', got {value!r}"
    ):
        kind(on_error=value)


# Real trainings --------------------------------------------------------------------------------------


class Walk(jl.TrainModule):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(()))

    def training_step(self, batch: Any) -> jax.Array:
        loss = jnp.mean((self.w - batch["x"]) ** 2)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.w[...])

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.25)


class Texts(jl.Callback):
    """Logs a text after some batches, also behind a checkpoint."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % 4 == 3:
            for logger in trainer.loggers:
                if isinstance(logger, JSONLLogger):
                    logger.log_histogram("told", [trainer.global_step] * 3, bins=1)


class Kills(jl.Callback):
    """Ends the process as a power cut does, behind the row of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_log(self, trainer: Any, values: Any, step: int) -> None:
        if step == self.step and "loss" in values:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, *more: jl.Callback, **arguments: Any) -> jl.Trainer:
    """Train 12 steps in two epochs, with a row of each and one of every validation; checkpoints stand at 5 and 10."""
    batches = [{"x": np.full(2, x, np.float32)} for x in range(6)]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    callbacks = [CSVLogger(), JSONLLogger(), Texts(), *more, ModelCheckpoint(every_n_train_steps=5)]
    given = {"strategy": "single", "max_epochs": 2, "log_every_n_steps": 1, "resume": "auto", **quiet, **arguments}
    trainer = jl.Trainer(callbacks=callbacks, default_root_dir=folder, **given)
    trainer.fit(Walk(), batches, batches[:1])
    return trainer


def numbers(folder: str) -> list[dict[str, float]]:
    """Return the JSON rows without the histograms, as the CSV file has them."""
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{k: float(v) for k, v in row.items()} for row in lines if "told" not in row]


def test_a_killed_process_leaves_every_row_and_a_resume_makes_the_files_of_one_that_was_not(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    child = subprocess.run(
        [sys.executable, __file__, "8"], env=environment, cwd=tmp_path, capture_output=True, timeout=120
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    steps = [*range(6), 5, 6, 7, 8]  # the second 5 is the validation's
    assert [row["step"] for row in read(tmp_path / "run", "metrics.csv")] == steps
    assert [row["step"] for row in numbers("run")] == steps
    train("whole")
    assert len(numbers("whole")) == 14
    for cut in (0, 1, 9):  # what a machine that dies may leave of the last row
        shutil.copytree("run", folder := f"cut{cut}")
        for name in KINDS:
            with Path(folder, name).open("r+b") as file:
                file.truncate(Path(folder, name).stat().st_size - cut)
        train(folder)
        for name in KINDS:
            assert Path(folder, name).read_bytes() == Path("whole", name).read_bytes()
    assert numbers("whole") == read(Path("whole"), "metrics.csv")
    told = [json.loads(line) for line in Path("whole/metrics.jsonl").read_text().splitlines() if "told" in line]
    assert [(row["step"], row["told"]["counts"]) for row in told] == [(2, [3]), (6, [3]), (10, [3])]


def test_a_resume_without_the_loggers_state_drops_rows_by_their_step():
    trainer = train("run", max_epochs=1)
    assert [row["step"] for row in numbers("run")] == [0, 1, 2, 3, 4, 5, 5]
    for logger in (CSVLogger(), JSONLLogger()):
        logger.on_load_checkpoint(trainer, trainer.module, {"global_step": 3})
    assert [row["step"] for row in numbers("run")] == [0, 1, 2]
    assert numbers("run") == read(Path("run"), "metrics.csv")


# Which loggers a Trainer has -------------------------------------------------------------------------


def kinds_of(**arguments: Any) -> list[str]:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = jl.Trainer(max_epochs=1, strategy="single", **quiet, **arguments)
    assert trainer.callbacks == trainer.loggers
    return [type(c).__name__ for c in trainer.callbacks]


@pytest.mark.parametrize("logger", [True, "given"])
@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ([], ["CSVLogger", "JSONLLogger"]),
        ([CSVLogger], ["CSVLogger", "JSONLLogger"]),
        ([JSONLLogger], ["JSONLLogger", "CSVLogger"]),
        ([CSVLogger, JSONLLogger], ["CSVLogger", "JSONLLogger"]),
    ],
)
def test_beside_wandb_stand_files(logger, beside, expected):
    wandb, others = WandbLogger(offline=True), [make() for make in beside]
    if logger == "given":
        found = kinds_of(callbacks=others, logger=wandb)
        assert sorted(found) == sorted(["WandbLogger", *expected])
        assert sorted(kinds_of(logger=[WandbLogger(offline=True), *(make() for make in beside)])) == sorted(found)
    else:
        assert kinds_of(callbacks=[*others, wandb]) == [
            *(x.__name__ for x in beside),
            "WandbLogger",
            *expected[len(beside) :],
        ]


def test_without_wandb_there_is_one_file_and_without_loggers_none():
    assert kinds_of() == ["CSVLogger"]
    assert kinds_of(logger=False) == []
    assert kinds_of(logger=False, callbacks=WandbLogger(offline=True)) == ["WandbLogger"]
    assert kinds_of(logger=JSONLLogger()) == ["JSONLLogger"]
    assert kinds_of(callbacks=JSONLLogger()) == ["JSONLLogger", "CSVLogger"]
    assert kinds_of(logger=False, callbacks=[JSONLLogger("a"), CSVLogger("b"), JSONLLogger("c")]) == [
        "JSONLLogger",
        "CSVLogger",
        "JSONLLogger",
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"callbacks": [CSVLogger("x"), CSVLogger("x")]},
        lambda: {"callbacks": [CSVLogger("x"), JSONLLogger("x")]},
        lambda: {"callbacks": JSONLLogger("x"), "logger": JSONLLogger("x")},
    ],
)
def test_two_loggers_of_one_file_are_refused(make):
    with pytest.raises(ArgumentError, match="two loggers that write to x.*another filename"):
        kinds_of(**make())


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_that_holds_the_file_of_another_run_is_refused(name, tmp_path):
    for content in ("", "anything"):
        (tmp_path / name).write_text(content)
        trainer = jl.Trainer(max_epochs=1, strategy="single", logger=KINDS[name](), default_root_dir=tmp_path)
        with pytest.raises(ArgumentError, match=rf"holds {name} of another run.*resume='auto'"):
            trainer.fit(Walk(), [{"x": np.zeros(2, np.float32)}])
        assert (tmp_path / name).read_text() == content


def test_a_file_of_someone_else_is_left_alone(kind, make_trainer):
    trainer = make_trainer()
    trainer.run_dir.mkdir()
    path = trainer.run_dir / name_of(kind)
    for content in ("name,age\nada,36\n", '{"name": "ada"}\n', "[1]\n", "text"):
        path.write_text(content)
        with pytest.raises(JaxlitError, match=rf"{kind.__name__} appends to files.*another {kind.__name__}\(filename"):
            trainer.log(kind(), {"loss": 1.0}, 0)
        assert path.read_text() == content


if __name__ == "__main__":
    train("run", Kills(int(sys.argv[1])))
