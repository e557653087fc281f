"""Signals: the first ends training after the step that runs, a second Ctrl-C at once."""

import contextlib
import signal
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.checkpoints import names, state_of
from kit.journal import at_batch, hooks
from kit.modules import Mean
from kit.processes import launch
from kit.refusals import refuses
from kit.trainers import BARE, fit, make_trainer, thinned
from kit.waiting import held

from jaxlit.checkpoints import files
from jaxlit.checkpoints.files import Saving
from jaxlit.control import Control
from jaxlit.engine.state import State
from jaxlit.errors import CheckpointError, NonFiniteError
from jaxlit.trainer.endings import interruptible

DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}


def train(left: dict[str, int]) -> None:
    """Train in a process of its own, with signals at places, and print a line for each event."""
    say = lambda *words: print(*words, flush=True)  # noqa: E731

    def at(place: str, *words: Any) -> None:
        if place in left:
            signal.raise_signal(left.pop(place))
        say(*words)

    watch = hooks(
        on_train_batch_start=lambda t, m, batch, i: at(f"batch {t.current_epoch} {i}", "batch"),
        on_train_batch_end=lambda t, *_: say("step", t.global_step),
        on_exception=lambda t, m, error: say("on_exception", type(error).__name__),
        teardown=lambda *_: at("teardown", "teardown"),
        **{hook: lambda *_, hook=hook: say(hook) for hook in ("on_train_epoch_end", "on_train_end", "on_fit_end")},
    )
    for number, handler in DEFAULTS.items():  # whatever the parent had
        signal.signal(number, handler)
    module = Mean()
    trainer = make_trainer(watch, hooks(teardown=lambda *_: say("late")), max_epochs=2, **BARE)
    try:
        trainer.fit(module, numbered(3))
    except BaseException as error:
        say("raised", type(error).__name__)
        raise
    finally:
        say("interrupted", trainer.interrupted, float(module.w[...][0]))
        say("handlers", all(signal.getsignal(number) == handler for number, handler in DEFAULTS.items()))
    trainer.max_epochs = 1
    trainer.fit(module, numbered(1))
    say("again", trainer.interrupted, trainer.global_step)


PLACES = {
    "one Ctrl-C": {"batch 0 1": signal.SIGINT},
    "SIGTERM": {"batch 0 1": signal.SIGTERM},
    "a second in teardown": {"batch 0 1": signal.SIGINT, "teardown": signal.SIGINT},
}


def work() -> None:
    train(dict(PLACES[Path.cwd().name]))


ENDED = ["on_train_epoch_end", "on_train_end", "on_fit_end"]
TORN = [*ENDED, "teardown", "late"]
TOLD = [f"interrupted True {mean([[1], [2]])}", "handlers True"]


WRITTEN = {
    "one Ctrl-C": ([*TORN, *TOLD, "batch", "step 1", *TORN, "again False 1"], 0),
    "SIGTERM": ([*TORN, "raised SystemExit", *TOLD], 143),
    "a second in teardown": ([*ENDED, "late", "raised KeyboardInterrupt", *TOLD], -signal.SIGINT),
}


@pytest.mark.parametrize("name", thinned(PLACES, "one Ctrl-C"))
def test_a_signal_finishes_the_step_and_tears_down(name, tmp_path) -> None:
    lines, code = WRITTEN[name]
    (child,) = launch(work, tmp_path / name, count=1, devices=1, join=False)
    assert child.output.splitlines() == ["batch", "step 1", "batch", "step 2", *lines], child.errors
    assert child.code == code
    told = {
        "one Ctrl-C": "Ctrl-C: stopping after step 2. Press Ctrl-C again to stop now (no checkpoint).",
        "SIGTERM": "SIGTERM: stopping after step 2. Press Ctrl-C to stop now (no checkpoint).",
    }
    assert code < 0 or (told.get(name, "") in child.errors and "Traceback" not in child.errors)


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
def test_a_second_signal_raises_at_once_after_teardown(second, kind, signals) -> None:
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


def test_nohup_ignores_sighup_and_slurm_adds_sigusr1(signals, monkeypatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    trainer, _, error = run("on_train_batch_start", signal.SIGHUP)
    assert error is None and trainer.global_step == 6
    inside = hooks(on_train_start=lambda *_: result.append(signal.getsignal(signal.SIGUSR1)))
    result: list[Any] = []
    fit(Mean(), numbered(1), None, inside, **BARE)
    assert result == [signal.SIG_DFL]
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    trainer, _, error = run("on_train_batch_start", signal.SIGUSR1)
    assert error.code == 128 + signal.SIGUSR1 and trainer.global_step == 1


def test_a_swallowed_second_ctrl_c_is_raised_at_the_end(signals) -> None:
    def swallows(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(Mean(), numbered(3), None, hooks(on_train_batch_start=swallows), **BARE)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, NonFiniteError)])
def test_sigterm_keeps_its_exit_code_after_a_bad_step(number, kind, signals, capsys) -> None:
    def send(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            signal.raise_signal(number)

    batches = numbered(6)
    batches[1]["x"][:] = np.nan
    with pytest.raises(kind) as raised:
        fit(Mean(), batches, None, hooks(on_train_batch_end=send), default_root_dir="run")
    assert getattr(raised.value, "code", 143) == 143
    assert names() == ["step_00000001"] and "not_finite" in state_of(Path("run/checkpoints/step_00000001"))
    told = "NaN or infinite at optimizer step 1 (epoch 0)."
    assert told in (capsys.readouterr().err if kind is SystemExit else str(raised.value))


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_second_ctrl_c_ends_before_a_bad_step_if_ready(is_ready, signals, monkeypatch) -> None:
    def end(trainer: Any, module: Any) -> None:
        jax.block_until_ready(module.w[...])
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    if not is_ready:
        monkeypatch.setattr(State, "is_ready", False)
    trainer, batches = make_trainer(at_batch(5, end), default_root_dir="run", log_every_n_steps=0), numbered(8)
    batches[3]["x"][:] = np.nan
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Mean(), batches)
    assert trainer.global_step == (3 if is_ready else 6)
    with contextlib.nullcontext() if is_ready else pytest.raises(NonFiniteError):
        trainer.save_checkpoint("kept")
    assert not is_ready or state_of("kept")["not_finite"]["batches"] == [3, 4]


def test_a_signal_in_the_last_moment_is_not_lost(signals, monkeypatch) -> None:
    def restore(number: int, handler: Any) -> Any:
        if handler == signal.SIG_DFL and control.left:  # the handlers are put back
            control.left = False
            signal.raise_signal(signal.SIGTERM)
        return real(number, handler)

    real, control = signal.signal, Control()
    control.left = True
    monkeypatch.setattr(signal, "signal", restore)
    with pytest.raises(SystemExit) as raised, interruptible(control):
        pass
    assert raised.value.code == 143 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


class Waits:
    """Gives batches, and waits for ever in the place of one; there the signals come."""

    def __init__(self, at: int, *numbers: int) -> None:
        self.at, self.numbers, self.left = at, numbers, True

    def __iter__(self) -> Any:
        for k, batch in enumerate(numbered(4)):
            if k == self.at and self.left:
                self.left = False
                for number in self.numbers:
                    signal.raise_signal(number)
                if threading.Event().wait(60):
                    raise AssertionError
                pytest.fail("the wait was not cut")
            yield batch


@pytest.mark.parametrize("stage", ["training", "validation"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_signal_cuts_a_wait_for_data_without_losing_it(at, stage, signals) -> None:
    def train(loader: Any, **arguments: Any) -> Any:
        model, plain = Mean(), numbered(4)
        loaders = (loader, plain) if stage == "training" else (plain, loader)
        given = {"default_root_dir": "run", "resume": "auto", "num_sanity_val_steps": 0, "prefetch": 0}
        try:
            return model, fit(model, *loaders, **given | arguments)
        except SystemExit as error:
            return model, error.code

    assert train(Waits(at, signal.SIGTERM))[1] == 143
    # The batch before waits for the next one to be known; the first ones are looked at before anything is trained.
    steps = 0 if at == 0 else at - 1 if stage == "training" else 4
    assert names() == ([f"step_{steps:08d}"] if steps else [])
    model, trainer = train(Waits(-1))
    assert float(model.w[...][0]) == mean([[1], [2], [3], [4]]) and trainer.global_step == 4


def test_a_second_ctrl_c_waits_while_a_save_begins(signals, monkeypatch) -> None:
    def write(*arguments: Any) -> Any:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    real = Saving.begin
    monkeypatch.setattr(Saving, "begin", write)
    with pytest.raises(KeyboardInterrupt):
        fit(Mean(), numbered(3), default_root_dir="run")
    assert names() == ["step_00000003"] and (Path("run/checkpoints") / names()[0] / "MANIFEST.json").exists()


def test_a_folder_stays_locked_while_a_writer_works(signals, monkeypatch) -> None:
    def seal(*arguments: Any) -> None:
        assert go.wait(60)
        real_seal(*arguments)

    def join(saving: Any, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread() and not go.is_set():
            signal.raise_signal(signal.SIGINT)
        return real_join(saving, timeout)

    real_seal, real_join = files.seal, Saving.join
    monkeypatch.setattr(files, "seal", seal)
    monkeypatch.setattr(Saving, "join", join)
    first = hooks(on_train_batch_end=lambda *_: signal.raise_signal(signal.SIGINT))
    again = lambda: fit(Mean(), numbered(3), default_root_dir="run", resume="auto")  # noqa: E731
    with held() as go:
        with pytest.raises(KeyboardInterrupt):
            fit(Mean(), numbered(3), None, first, default_root_dir="run")
        refuses(CheckpointError, again, "would write to|in use by")
    for thread in threading.enumerate():
        if thread.name == "jaxlit-checkpoint":
            thread.join(60)
    assert names() == ["step_00000001"] and again().global_step == 3
