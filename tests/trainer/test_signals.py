"""Ctrl-C and SIGTERM: the first ends training after the step that runs, the second at once."""

import signal
from typing import Any

import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.journal import hooks
from kit.modules import Mean
from kit.processes import launch
from kit.trainers import BARE, make_trainer

BOTH = (signal.SIGINT, signal.SIGTERM)


def train(*due: tuple[str, int]) -> None:
    """Train in a process of its own, with signals at places, and print a line for each event."""
    left, say = dict(due), lambda *words: print(*words, flush=True)

    def at(place: str, *words: Any) -> None:
        if place in left:
            signal.raise_signal(left.pop(place))
        say(*words)

    ends = ("on_train_epoch_end", "on_train_end", "on_fit_end")
    watch = hooks(
        on_train_batch_start=lambda t, m, batch, i: at(f"batch {t.current_epoch} {i}", "batch"),
        on_train_batch_end=lambda t, *_: say("step", t.global_step),
        on_exception=lambda t, m, error: say("on_exception", type(error).__name__),
        teardown=lambda *_: at("teardown", "teardown"),
        **{hook: lambda *_, hook=hook: say(hook) for hook in ends},
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the parent had
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    handlers, module = [signal.getsignal(s) for s in BOTH], Mean()
    trainer = make_trainer(watch, hooks(teardown=lambda *_: say("late")), max_epochs=2, **BARE)
    try:
        trainer.fit(module, numbered(3))
    except BaseException as error:
        say("raised", type(error).__name__)
        raise
    finally:
        say("interrupted", trainer.interrupted, float(module.w[...][0]))
        say("handlers", handlers == [signal.getsignal(s) for s in BOTH])
    trainer.max_epochs = 1
    trainer.fit(module, numbered(1))
    say("again", trainer.interrupted, trainer.global_step)


def one_ctrl_c() -> None:
    train(("batch 0 1", signal.SIGINT))


def a_second_in_teardown() -> None:
    train(("batch 0 1", signal.SIGINT), ("teardown", signal.SIGINT))


def sigterm() -> None:
    train(("batch 0 1", signal.SIGTERM))


ENDED = ["on_train_epoch_end", "on_train_end", "on_fit_end"]
TORN = [*ENDED, "teardown", "late"]
TOLD = [f"interrupted True {mean([[1], [2]])}", "handlers True"]
AGAIN = ["batch", "step 1", *TORN, "again False 1"]


@pytest.mark.parametrize(
    ("work", "lines", "code"),
    [
        (one_ctrl_c, [*TORN, *TOLD, *AGAIN], 0),
        (sigterm, [*TORN, "raised SystemExit", *TOLD], 143),
        pytest.param(
            *(a_second_in_teardown, [*ENDED, "late", "raised KeyboardInterrupt", *TOLD], -signal.SIGINT),
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_signal_finishes_the_step_tears_down_and_ends_fit_or_the_process(work, lines, code, tmp_path) -> None:
    (child,) = launch(work, tmp_path, count=1, devices=1, join=False)
    assert child.output.splitlines() == ["batch", "step 1", "batch", "step 2", *lines], child.errors
    assert child.code == code
    name = "SIGTERM" if code == 143 else "SIGINT"
    assert code < 0 or (name in child.errors and "Traceback" not in child.errors)


STAGES = ("on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end", "on_exception", "teardown")


def run(hook: str, *numbers: int) -> tuple[Any, list[str], Any]:
    """Train, with signals at the first call of a hook; returns the Trainer, what was called, and what was raised."""
    called, left = list[str](), list(numbers)

    def send(*_: Any) -> None:
        while left:
            signal.raise_signal(left.pop(0))

    watch = hooks(**{stage: lambda *_, stage=stage: called.append(stage) for stage in STAGES})
    trainer = make_trainer(hooks(**{hook: send}), watch, num_sanity_val_steps=0, max_epochs=2)
    try:
        trainer.fit(Mean(), numbered(3), numbered(2))
    except BaseException as error:
        return trainer, called, error
    return trainer, called, None


@pytest.mark.parametrize(("second", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_second_signal_raises_at_once_after_on_exception_and_teardown(second, kind, signals) -> None:
    trainer, called, error = run("on_train_batch_start", signal.SIGINT, second)
    assert type(error) is kind and getattr(error, "code", 143) == 143
    assert called == ["on_exception", "teardown"] and trainer.interrupted and trainer.global_step == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_handler_of_the_programs_own_is_left_alone(number, signals) -> None:
    mine: list[int] = []
    signal.signal(number, lambda number, frame: mine.append(number))
    handler = signal.getsignal(number)
    trainer, _, error = run("on_train_batch_start", number)
    assert mine == [number] and error is None and not trainer.interrupted and trainer.global_step == 6
    assert signal.getsignal(number) is handler


def test_a_ctrl_c_inside_validation_ends_after_its_batch(signals) -> None:
    trainer, called, error = run("on_validation_batch_start", signal.SIGINT)
    # A validation that was cut off has no result, and so no end.
    assert called == [*ENDED, "teardown"] and error is None
    assert trainer.interrupted and trainer.global_step == 3
