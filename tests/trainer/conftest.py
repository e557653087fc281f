"""What tests of signals share."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def signals() -> Iterator[None]:
    """Handle signals as a program does that has set up nothing."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
