"""How a run ends early: signals, errors that are explained, and a run that hangs, which is saved."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax

from jaxlit.checkpoints import files
from jaxlit.checkpoints.places import place_of
from jaxlit.control import Control, Interrupted, ending
from jaxlit.data.watchdog import EXIT_CODE
from jaxlit.distributed.team import team
from jaxlit.engine.compiled_program import is_exhausted, out_of_memory
from jaxlit.errors import NonFiniteError, StateError
from jaxlit.loop.rewind import end_before_bad_step
from jaxlit.loop.run import Run
from jaxlit.loop.train import end_at_safe_point
from jaxlit.reporting.terminal import bytes_of, say


@contextmanager
def interruptible(control: Control) -> Iterator[None]:
    """Turn a first SIGINT, SIGTERM or SIGHUP into `control.interrupted` inside the block.

    Handlers that a program has installed stay, as does a signal that is ignored, for example SIGHUP under `nohup`; only
    the main thread has handlers. SIGUSR1 counts in a job of SLURM, which announces its end with it. A signal to one
    of several processes ends all of them at the same step; SIGTERM is handled by jax there, which announces it.

    Machines send several of them, so only a Ctrl-C makes a second one end the block at once.

    Raises:
        KeyboardInterrupt: A second signal was SIGINT.
        SystemExit: After the block, with 128 and the signal's number, 143 for SIGTERM, unless it was SIGINT; also if a
            step before it turns out not to have been finite, which is said. Any other error comes before it.
    """

    # It may run between any two operations: it only notes, and writes to nothing.
    def handle(number: int, frame: FrameType | None) -> None:
        if control.signal is None:
            control.receive(number)
            if control.drawing and control.interrupted:
                raise Interrupted
        elif signal.SIGINT in (control.signal, number):
            control.again = number
            if not control.shielded:
                raise ending(number)

    installed = {}
    control.asked = [] if team().size > 1 else None
    if threading.current_thread() is threading.main_thread():
        for number, default in _defaults().items():
            if signal.getsignal(number) == default:
                installed[number] = signal.signal(number, handle)
    try:
        yield
    except NonFiniteError as error:
        if control.signal in (None, signal.SIGINT):
            raise
        say(f"{error}", aside=True)  # a step before the signal: its sender waits for the signal's exit code
    finally:
        control.shielded = True  # a handler that raises now would leave the others in place
        for number, handler in installed.items():
            signal.signal(number, handler)
        first = control.signal
        again = control.again
        control.signal = None
        control.again = None
        control.shielded = False
    if again is not None:  # what it raised was lost in a callback of a library
        raise ending(again)
    if first not in (None, signal.SIGINT):
        raise ending(first)


def _defaults() -> dict[int, object]:
    """Return the signals that end a training, each with the handler of a program that has set up none."""
    defaults: dict[int, object] = {signal.SIGINT: signal.default_int_handler}
    if not team().announces:  # else jax has a handler, which Python does not know of
        defaults[signal.SIGTERM] = signal.SIG_DFL
    if hasattr(signal, "SIGHUP"):
        defaults[signal.SIGHUP] = signal.SIG_DFL
        if "SLURM_JOB_ID" in os.environ:
            defaults[signal.SIGUSR1] = signal.SIG_DFL
    return defaults


def explained(error: BaseException, run: Run | None) -> BaseException:
    """Return the error that a run ends with: the one that was raised, or one that says more than jax's."""
    if is_exhausted(error):
        return _exhausted(error, run)
    if isinstance(error, RuntimeError) and "has been deleted" in str(error) and not isinstance(error, StateError):
        deleted = StateError(
            "An array of an earlier step was read, and a later step has overwritten it. Keep a copy instead: "
            "jax.tree.map(jnp.copy, ...), or read through the module, which is up to date in every hook."
        )
        deleted.__cause__ = error
        return deleted
    return error


def _exhausted(error: BaseException, run: Run | None) -> BaseException:
    if run is None:
        return out_of_memory(error, "before the first step")
    engine = run.engine
    failed = engine.failed
    compiling = "compil" in str(error).lower()
    place = run.place
    programs = engine.programs
    if failed is not None:  # to compile it again would only fail again, and may take minutes
        place = f"in {failed.name}, {'as it was compiled' if compiling else 'in its first call'}"
        programs = [] if compiling else [failed]
    example = run.prefetcher.example
    batch = None
    if example is not None:
        batch = bytes_of(jax.tree.leaves(example)) // engine.strategy.num_replicas
    return out_of_memory(error, place, state=engine.state.spec.tree, batch=batch, programs=programs)


def rescue(trainer: Any, run: Run | None, place: str) -> str:
    """Write a checkpoint of a run that hangs, as after an error, from another thread; return what was saved, as a text.

    The run is None before it has an engine.
    """
    error = TimeoutError("nothing moved")
    failed = team().fail(error, place, EXIT_CODE)
    if run is None:
        return f"Nothing was there to be saved. {failed}".strip()
    with contextlib.suppress(Exception):  # else the checkpoint would be of after a step that was not finite
        end_before_bad_step(run, error)
    end_at_safe_point(run)
    before = run.progress
    texts = []
    savers: list[Any] = [c for c in run.hooks.callbacks if c.role == "checkpoint"]
    for callback in savers:
        last = callback.last_model_path
        callback.on_exception(trainer, run.module, error)
        if run.progress != before and callback.last_model_path not in ("", last):
            # The run moved meanwhile: the arrays may be of another step than the rest.
            files.remove(place_of(callback.last_model_path))
            texts.append("It moved while it was saved: that checkpoint was deleted.")
        elif callback.last_model_path:
            texts.append(f"The newest checkpoint is {callback.last_model_path}.")
    return " ".join([*texts, failed]).strip() or "Nothing was there to be saved."
