"""When the times of a training are over, in all processes at the same step."""

import time
from dataclasses import dataclass, field

from jaxlit.distributed.exchange import agree

_MOST_S = 10.0  # between two exchanges
_PATIENCE_S = 24 * 3600.0  # a process may wait for data; one that ends is noticed by jax


@dataclass
class Clock:
    """Seconds since it was made, the same in every process where they decide something.

    The clocks of several processes differ, and each process reaches a step at another time: if each used its clock, one
    process would stop a step before the others, which would wait for it forever. So they exchange their times, and the
    latest counts. An exchange takes a millisecond, so the next one follows after half of the time that is left, at most
    ten seconds, counted in looks at the pace of the last ones.

    Args:
        several: Whether there are several processes, all of which look at the same places.

    Attributes:
        now: The seconds at the last look; in several processes at the last exchange.
    """

    several: bool
    now: float = 0.0
    _began: float = field(default_factory=lambda: time.monotonic())
    _looks: int = 0  # since the last exchange
    _rest: int = 0  # how many go without one

    def look(self, due: float | None, *, ask: bool = False) -> float:
        """Return the seconds.

        Args:
            due: The earliest time that is waited for, None for none.
            ask: Exchange the times now, and at the next look as well.
        """
        if not self.several:
            self.now = time.monotonic() - self._began
            return self.now
        self._looks += 1
        if not ask and self._looks <= self._rest:
            return self.now
        before, self.now = self.now, max(agree("the time", time.monotonic() - self._began, timeout=_PATIENCE_S))
        pace, left = (self.now - before) / self._looks, _MOST_S
        if due is not None:
            left = max(min(left, (due - self.now) / 2), 0.0)
        self._looks, self._rest = 0, 0 if ask or pace <= 0 else int(left / pace)
        return self.now
