"""Signals that end a training: the first after the step that runs, a second Ctrl-C at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from jaxlit.control import Control, Interrupted, ending
from jaxlit.distributed.team import team
from jaxlit.errors import NonFiniteError
from jaxlit.reporting.terminal import say


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
        first, again = control.signal, control.again
        control.signal, control.again, control.shielded = None, None, False
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
