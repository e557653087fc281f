"""W&B that fails, hangs, or has no key: training goes on, and one line says so."""

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from wandb.errors import UsageError
from wandb_offline import summary

from jaxlit.callbacks import WandbLogger
from jaxlit.errors import LoggerError
from jaxlit.reporting.background import Background
from jaxlit.reporting.wandb_run import WandbError

STEP = "trainer/global_step"


class FakeRun:
    """A run whose server does as a test says."""

    id, url, dir = "abc123", "http://there/abc123", "/there/files"
    offline = disabled = False

    def __init__(
        self,
        log: Callable[[dict[str, Any]], Any] = lambda row: None,
        finish: Callable[[], Any] = lambda: None,
        define: Callable[[], Any] = lambda: None,
    ) -> None:
        self._log, self._finish, self._define = log, finish, define
        self.rows: list[dict[str, Any]] = []
        self.threads: set[threading.Thread] = set()
        self.codes: list[int] = []
        self.summary: dict[str, Any] = {}

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.threads.add(threading.current_thread())
        self._log(row)

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)
        self._finish()

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        self._define()


def fail(*args: Any, **given: Any) -> Any:
    raise RuntimeError("the service is gone\nand more")


def train(trainer: Any, logger: WandbLogger, rows: int = 1) -> None:
    trainer.start(logger)
    for step in range(rows):
        trainer.log(logger, {"loss": 1.0}, step)
    logger.teardown(trainer, trainer.module, "fit")


@pytest.fixture
def make_logger(monkeypatch: pytest.MonkeyPatch) -> Callable[..., WandbLogger]:
    """Return a function that makes a logger whose `wandb.init` gives runs, one each time, and waits for no margin."""

    def make(*runs: Any, **arguments: Any) -> WandbLogger:
        left = list(runs)

        def init(**given: Any) -> Any:
            run = left.pop(0)
            return run(**given) if callable(run) else run

        monkeypatch.setattr(wandb, "init", init)
        for module in ("wandb_run", "wandb_start"):
            monkeypatch.setattr(f"jaxlit.reporting.{module}.MARGIN", 0.0)
        return WandbLogger(**arguments)

    return make


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """An event that what hangs waits for; at the end it goes on in any case."""
    event = threading.Event()
    yield event
    event.set()


def lines(capsys: Any) -> list[str]:
    """Return what was told since the run's address was."""
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"W&B {FakeRun.url}"
    return said[1:]


def test_rows_are_sent_in_order_by_another_thread(
    make_trainer: Callable[..., Any], make_logger: Callable[..., WandbLogger], capsys: Any
) -> None:
    run = FakeRun()
    train(make_trainer(), make_logger(run), 100)
    assert [row[STEP] for row in run.rows] == list(range(100)) and run.codes == [0]
    assert len(run.threads) == 1 and threading.current_thread() not in run.threads
    assert lines(capsys) == []


def test_logging_that_fails_is_said_once_and_not_tried_again(
    make_trainer: Callable[..., Any], make_logger: Callable[..., WandbLogger], capsys: Any
) -> None:
    run = FakeRun(log=fail)
    train(make_trainer(), make_logger(run), 3)
    assert len(run.rows) == 1 and run.codes == [0]
    assert lines(capsys) == ["W&B: off for the rest of this run (the service is gone)"]


def test_logging_that_fails_raises_at_the_end_if_asked(
    make_trainer: Callable[..., Any], make_logger: Callable[..., WandbLogger], capsys: Any
) -> None:
    with pytest.raises(WandbError, match="the service is gone"):
        train(make_trainer(), make_logger(FakeRun(log=fail), on_error="raise"))
    assert lines(capsys) == []


def test_logging_that_fails_raises_at_a_later_row_if_asked(
    make_trainer: Callable[..., Any], make_logger: Callable[..., WandbLogger]
) -> None:
    logger, trainer, sent = make_logger(FakeRun(log=fail), on_error="raise"), make_trainer(), 0
    trainer.start(logger)
    with pytest.raises(WandbError, match="the service is gone"):
        for sent in range(1_000_000):
            trainer.log(logger, {"loss": 1.0}, sent)
    assert sent > 0


def test_logging_that_hangs_keeps_nobody_waiting(
    make_trainer: Callable[..., Any],
    make_logger: Callable[..., WandbLogger],
    release: threading.Event,
    capsys: Any,
) -> None:
    returned = []  # what waits and is not released is False
    run = FakeRun(log=lambda row: returned.append(release.wait(30)))
    train(make_trainer(), make_logger(run, finish_timeout=0.01), 50)
    (line,) = lines(capsys)
    assert returned == [] and len(run.rows) <= 1
    assert line.startswith("W&B: the upload did not finish") and line.endswith("wandb sync /there")


def test_what_hung_says_nothing_more_when_it_goes_on(
    make_trainer: Callable[..., Any],
    make_logger: Callable[..., WandbLogger],
    release: threading.Event,
    capsys: Any,
) -> None:
    finished = threading.Event()
    run = FakeRun(log=lambda row: release.wait(30), finish=finished.set)
    train(make_trainer(), make_logger(run, finish_timeout=0.01), 50)
    assert len(lines(capsys)) == 1
    release.set()
    assert finished.wait(30)
    assert len(run.rows) <= 1 and capsys.readouterr().out == ""


def test_rows_that_there_was_no_time_for_are_said_in_one_line(
    make_trainer: Callable[..., Any],
    make_logger: Callable[..., WandbLogger],
    monkeypatch: pytest.MonkeyPatch,
    release: threading.Event,
    capsys: Any,
) -> None:
    run = FakeRun(log=lambda row: release.wait(30))
    logger, join = make_logger(run, finish_timeout=1e-6), Background.join

    def late(self: Background, timeout: float) -> bool:
        release.set()
        return join(self, timeout)

    monkeypatch.setattr("jaxlit.reporting.wandb_run.MARGIN", 30.0)
    monkeypatch.setattr(Background, "join", late)
    train(make_trainer(), logger, 50)
    assert len(run.rows) <= 1 and run.codes == [0]
    assert lines(capsys) == ["W&B: the upload did not finish (there was no time left); later: wandb sync /there"]


def test_a_finish_that_hangs_is_left_behind(
    make_trainer: Callable[..., Any],
    make_logger: Callable[..., WandbLogger],
    release: threading.Event,
    capsys: Any,
) -> None:
    run = FakeRun(finish=lambda: release.wait(30))
    train(make_trainer(), make_logger(run, finish_timeout=0.01))
    (line,) = lines(capsys)
    assert line.endswith("wandb sync /there") and len(run.rows) == 1


@pytest.mark.parametrize("on_error", ["offline", "raise"])
def test_a_finish_that_fails_is_said_in_one_line_or_raised(
    make_trainer: Callable[..., Any], make_logger: Callable[..., WandbLogger], on_error: str, capsys: Any
) -> None:
    logger = make_logger(FakeRun(finish=fail), on_error=on_error)
    if on_error == "raise":
        with pytest.raises(WandbError, match="the service is gone"):
            train(make_trainer(), logger)
    else:
        train(make_trainer(), logger)
    expected = ["W&B: the upload did not finish (the service is gone); later: wandb sync /there"]
    assert lines(capsys) == (expected if on_error == "offline" else [])


def test_metrics_that_cannot_be_defined_do_not_stop_training(
    make_trainer: Callable[..., Any], make_logger: Callable[..., WandbLogger], capsys: Any
) -> None:
    train(make_trainer(), make_logger(FakeRun(define=fail)), 3)
    assert lines(capsys) == ["W&B: off for the rest of this run (the service is gone)"]


def test_a_failure_of_what_is_no_row_of_numbers_does_not_stop_the_rows(
    make_trainer: Callable[..., Any], make_logger: Callable[..., WandbLogger], capsys: Any
) -> None:
    run = FakeRun(log=lambda row: fail() if "note" in row else None)
    logger, trainer = make_logger(run), make_trainer()
    trainer.start(logger)
    for step in range(3):
        logger.log_text("note", "a text")
        trainer.log(logger, {"loss": 1.0}, step)
    logger.teardown(trainer, trainer.module, "fit")
    assert [row[STEP] for row in run.rows if "loss" in row] == [0, 1, 2]
    assert sum("note" in row for row in run.rows) == 3  # each may succeed
    assert lines(capsys) == ["W&B: note was not sent (the service is gone)"]


def test_a_full_disk_is_said_once_and_does_not_stop_the_rows(
    make_trainer: Callable[..., Any],
    make_logger: Callable[..., WandbLogger],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """The SDK writes an image when it is made, and each file has another path."""
    paths = iter(range(100))

    def full(*args: Any, **given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"/there/{next(paths)}.png")

    monkeypatch.setattr(wandb, "Image", full)
    run = FakeRun()
    logger, trainer = make_logger(run), make_trainer()
    trainer.start(logger)
    for step in range(3):
        logger.log_image("image", np.zeros((2, 2)))
        trainer.log(logger, {"loss": 1.0}, step)
    logger.teardown(trainer, trainer.module, "fit")
    assert [row[STEP] for row in run.rows] == [0, 1, 2] and next(paths) == 3
    assert lines(capsys) == ["W&B: image was not sent (No space left on device)"]


def test_a_run_that_lags_behind_too_far_is_given_up(
    make_trainer: Callable[..., Any],
    make_logger: Callable[..., WandbLogger],
    monkeypatch: pytest.MonkeyPatch,
    release: threading.Event,
    capsys: Any,
) -> None:
    monkeypatch.setattr("jaxlit.reporting.wandb_run._MOST_WAITING", 20)
    run = FakeRun(log=lambda row: release.wait(30))
    logger, trainer = make_logger(run), make_trainer()
    trainer.start(logger)
    for step in range(50):
        trainer.log(logger, {"loss": 1.0}, step)
    assert lines(capsys) == ["W&B: off for the rest of this run (it is 20 rows behind)"]
    release.set()
    logger.teardown(trainer, trainer.module, "fit")
    assert len(run.rows) <= 1 and run.codes == [0] and capsys.readouterr().out == ""


def test_an_init_that_hangs_is_left_behind_and_ended_when_it_comes(
    make_trainer: Callable[..., Any],
    make_logger: Callable[..., WandbLogger],
    release: threading.Event,
    capsys: Any,
) -> None:
    ended = threading.Event()
    late, run = FakeRun(finish=ended.set), FakeRun()
    run.offline = True
    asked = []

    def first(**given: Any) -> FakeRun:
        asked.append(given)
        release.wait(30)
        return late

    def second(**given: Any) -> FakeRun:
        asked.append(given)
        return run

    train(make_trainer(), make_logger(first, second, init_timeout=0.01))
    assert [given["mode"] for given in asked] == [None, "offline"] and asked[0]["id"] != asked[1]["id"]
    assert len(run.rows) == 1 and not late.codes
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("W&B offline (no answer after") and line.endswith(f"wandb sync --id {asked[0]['id']} /there")
    release.set()
    assert ended.wait(30) and late.codes == [1] and late.rows == []


def test_where_no_run_can_be_opened_training_goes_on_without(
    make_trainer: Callable[..., Any], make_logger: Callable[..., WandbLogger], capsys: Any
) -> None:
    logger, trainer = make_logger(fail, fail), make_trainer()
    trainer.start(logger)
    trainer.log(logger, {"loss": 1.0}, 0)
    logger.log_text("note", "a text")
    logger.teardown(trainer, trainer.module, "fit")
    assert logger.experiment is None
    assert capsys.readouterr().out == "W&B: off for this run (the service is gone)\n"


def test_a_full_disk_at_the_start_is_said_and_training_goes_on(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("jaxlit.callbacks.wandb_logger.tempfile.TemporaryFile", full)
    train(make_trainer(), WandbLogger(offline=True))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("W&B: off for this run") and "No space left" in line
    with pytest.raises(LoggerError, match="No space left"):
        train(make_trainer(), WandbLogger(offline=True, on_error="raise"))


# The real SDK without a key or a server ----------------------------------------------------------------


def test_offline_is_said_in_one_line_with_the_command_that_uploads(
    make_trainer: Callable[..., Any], capfd: Any
) -> None:
    trainer = make_trainer()
    train(trainer, WandbLogger(offline=True))
    out, err = capfd.readouterr()
    (line,) = out.splitlines()
    (folder,) = trainer.run_dir.glob("wandb/offline-run-*")
    assert Path(line.partition("wandb sync ")[2]).resolve() == folder.resolve() and err == ""


def test_without_a_key_the_run_goes_offline(make_trainer: Callable[..., Any], capfd: Any) -> None:
    trainer, logger = make_trainer(), WandbLogger()
    train(trainer, logger)
    out = capfd.readouterr().out
    assert len(out.splitlines()) == 1 and "No API key" in out
    assert summary(trainer.run_dir)["summary"]["loss"] == 1.0


def test_without_a_key_on_error_raise_raises(make_trainer: Callable[..., Any]) -> None:
    logger, trainer = WandbLogger(on_error="raise"), make_trainer()
    with pytest.raises(UsageError, match="API key"):
        trainer.start(logger)


def test_nothing_asks_for_a_key_on_a_terminal(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keyboard:
        def isatty(self) -> bool:
            return True

        def readline(self, *size: int) -> str:
            raise AssertionError("someone was asked")

    keyboard, trainer = Keyboard(), make_trainer()
    monkeypatch.setattr(sys, "stdin", keyboard)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    train(trainer, WandbLogger())
    assert sys.stdin is keyboard
