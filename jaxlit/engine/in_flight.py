"""A bound on the steps that are dispatched and not finished."""

import time

import jax


class Bound:
    """Keeps the steps in flight bounded by one wait a period: a wait each step costs more than a step's Python.

    Args:
        limit: The most steps in flight.

    Attributes:
        period: Steps from wait to wait.
        seconds: How long all waits took.
    """

    def __init__(self, limit: int) -> None:
        # A wait is for the token of the period before: up to two periods of steps are under way at once.
        self.period = max(1, limit // 2)
        self._count, self._token, self._each = 0, None, limit == 1
        self.seconds = 0.0

    def __call__(self, token: jax.Array) -> None:
        """Count a step by one of its results, and wait once a period for the one a period ago."""
        self._count += 1
        if self._count >= self.period:
            self._count = 0
            self.wait(token)

    def wait(self, token: jax.Array) -> None:
        """End a period with one of the results of its last step, and wait for those of the period before."""
        # With the newest step of a period still running the device never idles; a limit of one leaves no choice.
        if (waits_for := token if self._each else self._token) is not None:
            begun = time.perf_counter()
            waits_for.block_until_ready()
            self.seconds += time.perf_counter() - begun
        self._token = token

    def drain(self, token: jax.Array) -> None:
        """Count a step, and once a period wait for it."""
        # For results that the next step overwrites: an older token could not be waited for any more.
        self._count += 1
        if self._count == self.period:
            self._count, self._token = 0, token
            self.wait(token)
            self._token = None
