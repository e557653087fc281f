"""What hangs until a test lets it continue, and the Ctrl-C of somebody who does not wait."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def held() -> Iterator[threading.Event]:
    """Give an event that what hangs waits for; at the end it continues in any case."""
    event = threading.Event()
    try:
        yield event
    finally:
        event.set()


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """Let SIGINT raise, which a shell's background jobs ignore; gives a function that sends it to the main thread."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
