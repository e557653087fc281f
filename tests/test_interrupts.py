"""Signals reach a real process as users send them, and every ending tears everything down."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl

ROOT = Path(__file__).parents[1]

# Real processes --------------------------------------------------------------------------------------

# The child prints "ready" from a hook and waits there, on its input, for the parent's word: so the signal has come
# when the hook goes on. A line is one event; the last says how the program ended.
SCRIPT = """
import os, signal, sys
import jax.numpy as jnp, numpy as np, optax
from flax import nnx
import jaxlit as jl

waits, own = sys.argv[1].split(","), sys.argv[2:]

def say(*words):
    print(*words, flush=True)

def wait_in(hook):
    if hook in waits:
        waits.remove(hook)
        say("ready")
        sys.stdin.readline()
        say("went on")

class Mean(jl.TrainModule):
    def __init__(self):
        self.w = nnx.Param(jnp.zeros(1))

    def training_step(self, batch):
        return jnp.mean((self.w[...] - batch["x"]) ** 2)

    def validation_step(self, batch):
        self.log("val", jnp.mean(batch["x"]))

    def configure_optimizers(self):
        return optax.sgd(0.25)

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
batches = [{"x": np.full((4, 1), k, np.float32)} for k in range(1, 4)]
trainer = jl.Trainer(strategy="single", max_epochs=2, callbacks=[Watch(), Last()], logger=False, num_sanity_val_steps=0,
                     enable_progress_bar=False, enable_model_summary=False)
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
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        environment.pop("XLA_FLAGS", None)  # one device
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


def weight_after(*means: float) -> float:
    """Train by hand: a step moves the weight half way to the mean of its batch."""
    w = 0.0
    for mean in means:
        w -= 0.5 * (w - mean)
    return w


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
        f"weight {weight_after(1, 2)}",
        "step 1",
        *ENDED,
        "late teardown",
        "again False 1",
    ]
    assert child.code == 0
    assert "SIGINT" in child.errors and "Traceback" not in child.errors


def test_a_second_ctrl_c_raises_at_once_after_on_exception_and_teardown(start: Callable[..., Child]) -> None:
    child = start("batch 0 1,end 0 1")
    child.send(signal.SIGINT)
    child.send(signal.SIGINT)
    assert child.finish() == [
        "step 1",
        "ready",
        "went on",
        "ready",
        "on_exception KeyboardInterrupt",
        "teardown",
        "late teardown",
        "raised KeyboardInterrupt",
        "interrupted True",
        "handlers True",
        f"weight {weight_after(1, 2)}",
    ]
    assert child.code == -signal.SIGINT


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
        f"weight {weight_after(1, 2)}",
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
        f"weight {weight_after(1, 2)}",
    ]
    assert child.code == 143 and "SIGTERM" in child.errors and "Traceback" not in child.errors


def test_sigterm_after_a_ctrl_c_ends_at_once_and_still_tears_down(start: Callable[..., Child]) -> None:
    child = start("batch 0 1,end 0 1")
    child.send(signal.SIGINT)
    child.send(signal.SIGTERM)
    assert child.finish()[2:7] == ["went on", "ready", "on_exception SystemExit", "teardown", "late teardown"]
    assert child.code == 143


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_handler_of_the_programs_own_is_left_alone(start: Callable[..., Child], name: str) -> None:
    child = start("batch 0 1", name)
    number = int(getattr(signal, name))
    child.send(number)
    lines = child.finish()
    assert lines[:5] == ["step 1", "ready", f"mine {number}", "went on", "step 2"]
    assert "step 6" in lines and "interrupted False" in lines and "handlers True" in lines
    assert child.code == 0


def test_a_ctrl_c_inside_validation_ends_after_its_batch(start: Callable[..., Child]) -> None:
    child = start("validation 0")
    child.send(signal.SIGINT)
    lines = child.finish()
    # A validation that was cut off has no result, and so no end.
    assert lines[3:8] == ["ready", "went on", "validated 0", *ENDED[:2]]
    assert lines[8:12] == ["on_fit_end", "teardown", "late teardown", "interrupted True"]
    assert child.code == 0


# In this process -------------------------------------------------------------------------------------


class Mean(jl.TrainModule):
    """Learns the mean of its data."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(1))

    def training_step(self, batch: Any) -> jax.Array:
        loss = jnp.mean((self.w[...] - batch["x"]) ** 2)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", jnp.mean(batch["x"]))

    def test_step(self, batch: Any) -> None:
        self.log("test", jnp.mean(batch["x"]))

    def predict_step(self, batch: Any) -> jax.Array:
        return batch["x"] - self.w[...]

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.25)


def make_batches(count: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((4, 1), k + 1, np.float32)} for k in range(count)]


def make_trainer(*callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "strategy": "single"}
    return jl.Trainer(callbacks=list(callbacks), **(quiet | arguments))


def make_callback(**hooks: Any) -> jl.Callback:
    """Return a callback with these functions of (trainer, module, ...) as its hooks."""
    return type("Made", (jl.Callback,), {k: staticmethod(v) for k, v in hooks.items()})()


class Listener(jl.Callback):
    """A logger that counts how often it was finished, and keeps what it was told."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.exceptions: list[BaseException] = []
        self.finished = 0

    def on_log(self, trainer: Any, values: dict[str, float], step: int) -> None:
        self.rows.append(step)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        assert not self.finished
        self.exceptions.append(exception)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.finished += 1


FIT = [name for name in vars(jl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
FIT = [
    name for name in FIT if not any(word in name for word in ("test", "predict", "exception", "checkpoint", "trace"))
]
OTHERS = ["prepare_data", "train_dataloader", "val_dataloader", "configure_optimizers", "training_step"]
OTHERS += ["validation_step", "on_before_batch_transfer"]


@pytest.mark.parametrize("error", [RuntimeError("the first"), KeyboardInterrupt("the first"), SystemExit("the first")])
@pytest.mark.parametrize("hook", ["setup", "on_train_batch_end", "on_validation_epoch_end", "on_fit_end", "teardown"])
def test_whatever_is_raised_in_a_hook_finishes_every_logger_once_and_comes_out_as_it_is(
    hook: str, error: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise error

    before, after = Listener(), Listener()
    trainer = make_trainer(before, make_callback(**{hook: fail}), after, max_epochs=1)
    with pytest.raises(type(error)) as raised:
        trainer.fit(Mean(), make_batches(2), make_batches(1))
    assert raised.value is error and not getattr(error, "__notes__", [])
    told = [] if hook == "teardown" else [error]  # nothing was running any more
    assert [(x.finished, x.exceptions) for x in (before, after)] == [(1, told)] * 2


@pytest.mark.parametrize("hook", [*FIT, *OTHERS])
def test_an_error_in_any_hook_or_step_of_the_module_finishes_every_logger(hook: str, tmp_path: Path) -> None:
    error = RuntimeError("the first")

    def fail(*_: Any) -> Any:
        raise error

    cls = type("Fails", (Mean,), {hook: fail} | ({"on_log": fail} if hook == "on_log" else {}))
    listener, csv = Listener(), jl.callbacks.CSVLogger()
    arguments = {"num_sanity_val_steps": int("sanity" in hook), "default_root_dir": tmp_path / "run"}
    trainer = make_trainer(listener, csv, max_epochs=1, log_every_n_steps=1, **arguments)
    given = {"train_dataloader": (None, make_batches(1)), "val_dataloader": (make_batches(3),)}
    with pytest.raises(RuntimeError, match="the first") as raised:
        trainer.fit(cls(), *given.get(hook, (make_batches(3), make_batches(1))))
    assert raised.value is error
    assert listener.finished == 1 and listener.exceptions == ([] if hook == "teardown" else [error])
    # Every row that the loggers were given before is in the file.
    path = tmp_path / "run" / "metrics.csv"
    written = len(path.read_text().splitlines()) - 1 if path.exists() else 0
    assert written == len(listener.rows)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
@pytest.mark.parametrize("when", ["setup", "start", "batch_start", "batch_end", "end"])
def test_an_error_in_an_evaluation_finishes_every_logger(verb: str, when: str) -> None:
    error = RuntimeError("the first")

    def fail(*_: Any) -> None:
        raise error

    stage = "validation" if verb == "validate" else verb
    hook = "setup" if when == "setup" else f"on_{stage}_{when}"
    listener = Listener()
    trainer = make_trainer(listener, make_callback(**{hook: fail}))
    with pytest.raises(RuntimeError) as raised:
        getattr(trainer, verb)(Mean(), make_batches(1))
    assert raised.value is error and (listener.finished, listener.exceptions) == (1, [error])


def test_later_errors_are_notes_on_the_first_in_the_order_in_which_they_came() -> None:
    def raising(error: BaseException) -> Callable[..., None]:
        def fail(*_: Any) -> None:
            raise error

        return fail

    first, listener = RuntimeError("the first"), Listener()
    trainer = make_trainer(
        make_callback(
            on_train_start=raising(first), on_exception=raising(KeyError("a")), teardown=raising(OSError("b"))
        ),
        make_callback(on_exception=raising(SystemExit(3)), teardown=raising(KeyboardInterrupt("c"))),
        listener,
        max_epochs=1,
    )
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(Mean(), make_batches(1))
    assert raised.value is first and listener.exceptions == [first] and listener.finished == 1
    assert [note.split(" ")[0] for note in first.__notes__] == ["Made.on_exception"] * 2 + ["Made.teardown"] * 2
    for note, part in zip(first.__notes__, ("KeyError('a')", "SystemExit(3)", "OSError('b')", "'c'"), strict=True):
        assert part in note


@pytest.mark.parametrize("error", [KeyboardInterrupt("in one"), SystemExit(5), ValueError("in one")])
def test_what_one_teardown_raises_keeps_no_other_from_its_own_and_comes_out(error: BaseException) -> None:
    called: list[str] = []

    def fail(*_: Any) -> None:
        raise error

    class Tears(Mean):
        def teardown(self, stage: str) -> None:
            called.append("module")

    later = make_callback(teardown=lambda *_: called.append("later"))
    trainer = make_trainer(make_callback(teardown=fail), later, max_epochs=1)
    with pytest.raises(type(error)) as raised:
        trainer.fit(Tears(), make_batches(1))
    assert raised.value is error and called == ["later", "module"]
    assert trainer.global_step == 1


def test_after_any_error_the_trainer_runs_again_as_if_it_had_not_happened() -> None:
    hooks = ["setup", "on_validation_start", "on_train_start", "teardown"]  # the second in the sanity check
    due: list[str] = []

    def fail_in(hook: str) -> Callable[..., None]:
        def fail(*_: Any) -> None:
            if hook in due:
                due.remove(hook)
                raise RuntimeError(hook)

        return fail

    trainer = make_trainer(make_callback(**{hook: fail_in(hook) for hook in hooks}), max_epochs=1)
    for hook in hooks:
        due.append(hook)
        with pytest.raises(RuntimeError, match=hook):
            trainer.fit(Mean(), make_batches(2), make_batches(1))
        assert trainer.sanity_checking is False
    module = Mean()
    trainer.fit(module, make_batches(2), make_batches(1))
    assert (trainer.current_epoch, trainer.global_step) == (1, 2)
    assert float(module.w[...][0]) == pytest.approx(weight_after(1, 2), rel=1e-6)


def test_an_error_in_configure_callbacks_comes_before_setup_and_leaves_the_trainer_usable() -> None:
    class Fails(Mean):
        def configure_callbacks(self) -> Any:
            raise RuntimeError("no callbacks")

    listener = Listener()
    trainer = make_trainer(listener, max_epochs=1)
    with pytest.raises(RuntimeError, match="no callbacks"):
        trainer.fit(Fails(), make_batches(1))
    assert listener.finished == 0  # as setup never came
    trainer.fit(Mean(), make_batches(1))
    assert listener.finished == 1 and trainer.global_step == 1


def test_handlers_are_the_programs_own_again_after_a_fit_that_raised() -> None:
    def fail(*_: Any) -> None:
        inside.append(signal.getsignal(signal.SIGINT))
        raise RuntimeError("the first")

    inside: list[Any] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(RuntimeError, match="the first"):
            make_trainer(make_callback(on_train_batch_end=fail), max_epochs=1).fit(Mean(), make_batches(1))
        assert inside[0] is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_fit_in_another_thread_has_no_handlers_and_trains() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    inside: list[Any] = []
    look = make_callback(on_train_start=lambda *_: inside.append([signal.getsignal(n) for n in (2, 15)]))
    trainer = make_trainer(look, max_epochs=1)
    thread = threading.Thread(target=trainer.fit, args=(Mean(), make_batches(2)))
    thread.start()
    thread.join(BOUND)
    assert inside == [before] and trainer.global_step == 2
