"""What tests of signals share."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def signals() -> Iterator[None]:
    """Handle signals as a program does that has set up nothing."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
