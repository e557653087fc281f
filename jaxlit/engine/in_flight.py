"""A bound on the steps that are dispatched and not finished."""

import jax


class Bound:
    """Keeps the steps in flight bounded by one wait a period: a wait each step costs more than a step's Python.

    Args:
        limit: The most steps in flight.
    """

    def __init__(self, limit: int) -> None:
        self._period = max(1, limit // 2)
        self._count, self._token, self._each = 0, None, limit == 1

    def __call__(self, token: jax.Array) -> None:
        """Note a step by one of its results, and wait for the one a period ago."""
        self._count += 1
        if self._count == self._period:
            self._count = 0
            if self._each:
                token.block_until_ready()
            elif self._token is not None:
                self._token.block_until_ready()
            self._token = token

    def drain(self, token: jax.Array) -> None:
        """Note a step, and once a period wait for it."""
        self._count += 1
        if self._count == self._period:
            self._count = 0
            token.block_until_ready()
