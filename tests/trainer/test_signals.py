"""Ctrl-C and SIGTERM: the first ends training after the step that runs, the second at once."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.journal import hooks
from kit.modules import Mean
from kit.processes import ROOT
from kit.trainers import make_trainer

# Real processes ---------------------------------------------------------------------------------------

# The child prints "ready" from a hook and waits there, on its input, for the parent's word: so the signal has come
# when the hook goes on. A line is one event; the last says how the program ended.
SCRIPT = """
import os, signal, sys
import jaxlit as jl
from kit.batches import numbered
from kit.modules import Mean

waits, own = sys.argv[1].split(","), sys.argv[2:]

def say(*words):
    print(*words, flush=True)

def wait_in(hook):
    if hook in waits:
        waits.remove(hook)
        say("ready")
        sys.stdin.readline()
        say("went on")

class Watch(jl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        wait_in(f"batch {trainer.current_epoch} {batch_idx}")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        wait_in(f"end {trainer.current_epoch} {batch_idx}")
        say("step", trainer.global_step)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        wait_in(f"validation {batch_idx}")

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        say("validated", batch_idx)

    def on_validation_end(self, trainer, module):
        say("on_validation_end")

    def on_train_epoch_end(self, trainer, module):
        say("on_train_epoch_end")

    def on_train_end(self, trainer, module):
        say("on_train_end")

    def on_fit_end(self, trainer, module):
        say("on_fit_end")

    def on_exception(self, trainer, module, exception):
        say("on_exception", type(exception).__name__)

    def teardown(self, trainer, module, stage):
        wait_in("teardown")
        say("teardown")

class Last(jl.Callback):
    def teardown(self, trainer, module, stage):
        say("late teardown")

def mine(number, frame):
    say("mine", number)

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the parent had
signal.signal(signal.SIGTERM, signal.SIG_DFL)
for name in own:
    signal.signal(getattr(signal, name), mine)
handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
batches = numbered(3)
trainer = jl.Trainer(strategy="single", max_epochs=2, callbacks=[Watch(), Last()], num_sanity_val_steps=0,
                     enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
module = Mean()
try:
    trainer.fit(module, batches, batches[:2])
except BaseException as error:
    say("raised", type(error).__name__)
    raise
finally:
    say("interrupted", trainer.interrupted)
    say("handlers", handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)])
    say("weight", float(module.w[...][0]))
trainer.max_epochs = 1
trainer.fit(module, batches[:1])
say("again", trainer.interrupted, trainer.global_step)
"""
BOUND = 120  # seconds; only a child that hangs takes as long


class Child:
    """A process that trains, and what it has printed so far."""

    def __init__(self, waits: str, *own: str) -> None:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
            "PYTHONUNBUFFERED": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, waits, *own],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a Ctrl-C at the tests is not the child's
        )
        os.set_blocking(self.process.stdout.fileno(), False)  # type: ignore[union-attr]
        self._text, self.errors, self.code = "", "", 0

    def send(self, *signals: int) -> None:
        """Wait until the child is ready, send signals, and let it go on."""
        asked = self._text.count("ready\n") + 1
        end = time.monotonic() + BOUND
        while self._text.count("ready\n") < asked:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise AssertionError(f"The child did not get ready: {self._text}")
            if not (chunk := self.process.stdout.read()):  # type: ignore[union-attr]
                raise AssertionError(f"The child ended early: {self._text} {self.process.stderr.read()}")  # type: ignore[union-attr]
            self._text += chunk.decode()
        for number in signals:
            self.process.send_signal(number)
        # Python handles a signal before it goes on from the read that the signal has interrupted.
        self.process.stdin.write(b"go\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]

    def finish(self) -> list[str]:
        """Wait for the end, and return the lines."""
        os.set_blocking(self.process.stdout.fileno(), True)  # type: ignore[union-attr]
        rest, errors = self.process.communicate(timeout=BOUND)
        self._text, self.errors, self.code = self._text + rest.decode(), errors.decode(), self.process.returncode
        return self._text.splitlines()


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Start children, and kill by its pid any that is left."""
    children: list[Child] = []

    def begin(*arguments: str) -> Child:
        children.append(Child(*arguments))
        return children[-1]

    try:
        yield begin
    finally:
        for child in children:
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait()
            for pipe in (child.process.stdin, child.process.stdout, child.process.stderr):
                pipe.close()  # type: ignore[union-attr]


ENDED = ["on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"]


def test_one_ctrl_c_finishes_the_step_and_fit_returns(start: Callable[..., Child]) -> None:
    child = start("batch 0 1")
    child.send(signal.SIGINT)
    lines = child.finish()
    assert lines == [
        "step 1",
        "ready",
        "went on",
        "step 2",
        *ENDED,
        "late teardown",
        "interrupted True",
        "handlers True",
        f"weight {mean([[1], [2]])}",
        "step 1",
        *ENDED,
        "late teardown",
        "again False 1",
    ]
    assert child.code == 0
    assert "SIGINT" in child.errors and "Traceback" not in child.errors


def test_a_second_ctrl_c_in_a_teardown_raises_when_the_other_teardowns_have_run(start: Callable[..., Child]) -> None:
    child = start("batch 0 1,teardown")
    child.send(signal.SIGINT)
    child.send(signal.SIGINT)
    lines = child.finish()
    assert lines[4:] == [
        *ENDED[:3],
        "ready",
        "late teardown",
        "raised KeyboardInterrupt",
        "interrupted True",
        "handlers True",
        f"weight {mean([[1], [2]])}",
    ]
    assert child.code == -signal.SIGINT


def test_sigterm_finishes_the_step_tears_down_and_exits_with_143(start: Callable[..., Child]) -> None:
    child = start("batch 0 1")
    child.send(signal.SIGTERM)
    assert child.finish() == [
        "step 1",
        "ready",
        "went on",
        "step 2",
        *ENDED,
        "late teardown",
        "raised SystemExit",
        "interrupted True",
        "handlers True",
        f"weight {mean([[1], [2]])}",
    ]
    assert child.code == 143 and "SIGTERM" in child.errors and "Traceback" not in child.errors


# In this process --------------------------------------------------------------------------------------

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
def test_a_second_signal_raises_at_once_after_on_exception_and_teardown(second: int, kind: Any, signals: None) -> None:
    trainer, called, error = run("on_train_batch_start", signal.SIGINT, second)
    assert type(error) is kind and getattr(error, "code", 143) == 143
    assert called == ["on_exception", "teardown"] and trainer.interrupted and trainer.global_step == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_handler_of_the_programs_own_is_left_alone(number: int, signals: None) -> None:
    mine: list[int] = []
    signal.signal(number, lambda number, frame: mine.append(number))
    handler = signal.getsignal(number)
    trainer, _, error = run("on_train_batch_start", number)
    assert mine == [number] and error is None and not trainer.interrupted and trainer.global_step == 6
    assert signal.getsignal(number) is handler


def test_a_ctrl_c_inside_validation_ends_after_its_batch(signals: None) -> None:
    trainer, called, error = run("on_validation_batch_start", signal.SIGINT)
    # A validation that was cut off has no result, and so no end.
    assert called == ["on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"] and error is None
    assert trainer.interrupted and trainer.global_step == 3
