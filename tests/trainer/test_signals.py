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
from kit.processes import CHEAP, ROOT
from kit.trainers import make_trainer

# Real processes: the child prints "ready" from a hook and waits there, on its input, for the parent's word: so the
# signal has come when the hook goes on. A line is one event; the last says how the program ended.
SCRIPT = """
import signal, sys
import jaxlit as jl
from kit.batches import numbered
from kit.journal import hooks
from kit.modules import Mean

waits = sys.argv[1].split(",")

def say(*words):
    print(*words, flush=True)

def wait_in(hook):
    if hook in waits:
        waits.remove(hook)
        say("ready")
        sys.stdin.readline()
        say("went on")

def torn(*_):
    wait_in("teardown")
    say("teardown")

watch = hooks(
    on_train_batch_start=lambda t, m, batch, i: wait_in(f"batch {t.current_epoch} {i}"),
    on_train_batch_end=lambda t, *_: say("step", t.global_step),
    on_exception=lambda t, m, error: say("on_exception", type(error).__name__),
    teardown=torn,
    **{hook: lambda *_, hook=hook: say(hook) for hook in ("on_train_epoch_end", "on_train_end", "on_fit_end")},
)
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the parent had
signal.signal(signal.SIGTERM, signal.SIG_DFL)
handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
trainer = jl.Trainer(strategy="single", max_epochs=2, callbacks=[watch, hooks(teardown=lambda *_: say("late"))],
                     enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
module = Mean()
try:
    trainer.fit(module, numbered(3))
except BaseException as error:
    say("raised", type(error).__name__)
    raise
finally:
    say("interrupted", trainer.interrupted)
    say("handlers", handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)])
    say("weight", float(module.w[...][0]))
trainer.max_epochs = 1
trainer.fit(module, numbered(1))
say("again", trainer.interrupted, trainer.global_step)
"""
BOUND = 120  # seconds; only a child that hangs takes as long


class Child:
    """A process that trains, and what it has printed so far."""

    def __init__(self, waits: str) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        more = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self.process: Any = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, waits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | CHEAP | more,
            start_new_session=True,  # a Ctrl-C at the tests is not the child's
        )
        os.set_blocking(self.process.stdout.fileno(), False)
        self.text, self.errors, self.code = "", "", 0

    def send(self, number: int) -> None:
        """Wait until the child is ready, send a signal, and let it go on."""
        asked, end = self.text.count("ready\n") + 1, time.monotonic() + BOUND
        while self.text.count("ready\n") < asked:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise AssertionError(f"The child did not get ready: {self.text}")
            if not (chunk := self.process.stdout.read()):
                raise AssertionError(f"The child ended early: {self.text} {self.process.stderr.read()}")
            self.text += chunk.decode()
        self.process.send_signal(number)
        # Python handles a signal before it goes on from the read that the signal has interrupted.
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def finish(self) -> list[str]:
        """Wait for the end, and return the lines."""
        os.set_blocking(self.process.stdout.fileno(), True)
        rest, errors = self.process.communicate(timeout=BOUND)
        self.text, self.errors, self.code = self.text + rest.decode(), errors.decode(), self.process.returncode
        return self.text.splitlines()


@pytest.fixture
def start() -> Iterator[Callable[[str], Child]]:
    """Start children, and kill by its pid any that is left."""
    children: list[Child] = []

    def begin(waits: str) -> Child:
        children.append(Child(waits))
        return children[-1]

    try:
        yield begin
    finally:
        for child in children:
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait()
            for pipe in (child.process.stdin, child.process.stdout, child.process.stderr):
                pipe.close()


ENDED = ["on_train_epoch_end", "on_train_end", "on_fit_end"]
TOLD = ["interrupted True", "handlers True", f"weight {mean([[1], [2]])}"]


def test_one_ctrl_c_finishes_the_step_and_fit_returns(start) -> None:
    child = start("batch 0 1")
    child.send(signal.SIGINT)
    torn = [*ENDED, "teardown", "late"]
    assert child.finish() == [
        *("step 1", "ready", "went on", "step 2", *torn, *TOLD),
        *("step 1", *torn, "again False 1"),
    ]
    assert child.code == 0 and "SIGINT" in child.errors and "Traceback" not in child.errors


@pytest.mark.parametrize(
    ("waits", "numbers", "raised", "code"),
    [
        pytest.param("batch 0 1,teardown", (2, 2), "KeyboardInterrupt", -signal.SIGINT, marks=pytest.mark.full),
        ("batch 0 1", (signal.SIGTERM,), "SystemExit", 143),
    ],
)
def test_sigterm_or_a_second_ctrl_c_in_a_teardown_ends_the_process_when_all_is_torn_down(
    start, waits, numbers, raised, code
) -> None:
    child = start(waits)
    for number in numbers:
        child.send(number)
    lines, torn = child.finish(), ["teardown", "late"] if code == 143 else ["ready", "late"]
    assert lines == ["step 1", "ready", "went on", "step 2", *ENDED, *torn, f"raised {raised}", *TOLD]
    assert child.code == code
    assert code != 143 or ("SIGTERM" in child.errors and "Traceback" not in child.errors)


# In this process

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
