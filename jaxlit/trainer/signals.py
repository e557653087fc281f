"""Ctrl-C and SIGTERM: the first ends training after the step that runs, the second at once."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from jaxlit.control import Control


@contextmanager
def interruptible(control: Control) -> Iterator[None]:
    """Turn a first SIGINT or SIGTERM into `control.interrupted` inside the block.

    A program's own handlers stay as they are, and threads other than the main one have none.

    Raises:
        SystemExit: After the block, with code 143, if the signal was SIGTERM.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if control.interrupted and number == signal.SIGTERM:
            raise SystemExit(128 + number)
        if control.interrupted:
            raise KeyboardInterrupt
        control.interrupted = True
        name = signal.Signals(number).name
        print(f"{name}: training ends after this step; once more ends it at once", file=sys.stderr, flush=True)

    installed = {}
    if threading.current_thread() is threading.main_thread():
        for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            if signal.getsignal(number) == default:
                installed[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in installed.items():
            signal.signal(number, handler)
    if signal.SIGTERM in received:
        raise SystemExit(128 + signal.SIGTERM)
