"""Ctrl-C while W&B keeps somebody waiting: it is left at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import wandb

from jaxlit.callbacks import WandbLogger
from jaxlit.reporting.background import within


class FakeRun:
    """A run whose end takes as long as a test says."""

    id, url, dir, offline, disabled = "abc123", "http://there/abc123", "/there/files", False, False

    def __init__(self, finish: Callable[[], Any] = lambda: None) -> None:
        self._finish, self.codes = finish, list[int]()

    def log(self, row: dict[str, Any]) -> None:
        pass

    def define_metric(self, *args: Any, **given: Any) -> None:
        pass

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)
        self._finish()


@pytest.fixture
def hang() -> Iterator[Callable[[], None]]:
    """A function that interrupts the main thread, as Ctrl-C does, and then hangs until the test's end."""
    release = threading.Event()

    def work() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        release.wait(30)

    work.release = release.set  # type: ignore[attr-defined]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    yield work
    signal.signal(signal.SIGINT, before)
    release.set()


def test_a_run_that_opens_is_left_at_once_and_finished_when_it_comes(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, hang: Any, capsys: Any
) -> None:
    ended = threading.Event()
    late, asked = FakeRun(finish=ended.set), []

    def init(**given: Any) -> FakeRun:
        asked.append(given["mode"])
        hang()
        return late

    monkeypatch.setattr(wandb, "init", init)
    logger, trainer = WandbLogger(init_timeout=25), make_trainer()
    with pytest.raises(KeyboardInterrupt):
        trainer.start(logger)
    logger.teardown(trainer, trainer.module, "fit")
    # Not tried again offline, and nothing said of a failure.
    assert asked == [None] and late.codes == [] and logger.experiment is None
    assert capsys.readouterr().out == ""
    hang.release()
    assert ended.wait(30) and late.codes == [1]


def test_a_run_that_finishes_is_left_at_once_and_a_line_says_how_to_send_the_rest(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, hang: Any, capsys: Any
) -> None:
    returned = []
    run = FakeRun(finish=lambda: (hang(), returned.append(True)))
    monkeypatch.setattr(wandb, "init", lambda **given: run)
    logger, trainer = WandbLogger(finish_timeout=25), make_trainer()
    trainer.start(logger)
    trainer.log(logger, {"loss": 1.0}, 0)
    with pytest.raises(KeyboardInterrupt):
        logger.teardown(trainer, trainer.module, "fit")
    assert run.codes == [0] and returned == []
    assert capsys.readouterr().out.splitlines() == [
        "W&B http://there/abc123",
        "W&B: the upload was interrupted; later: wandb sync /there",
    ]


def test_what_is_no_longer_waited_for_hands_its_result_to_late(hang: Any) -> None:
    taken, came = [], threading.Event()

    def late(result: str) -> None:
        taken.append(result)
        came.set()

    with pytest.raises(KeyboardInterrupt):
        within(25, lambda: (hang(), "result")[1], late=late)
    assert taken == []
    hang.release()
    assert came.wait(30) and taken == ["result"]


def test_what_is_in_time_never_goes_to_late() -> None:
    assert within(25, lambda: "result", late=lambda result: pytest.fail("it was waited for")) == "result"
