"""What steps have written to a module, as it was where an accumulation window began."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxlit.engine.state import State


class WindowBackup:
    """Keeps copies, on the devices, of what the steps of a window write: statistics, counts and random keys.

    A window that turns out to be bad has run its batches: the parameters are still those before it, these are not.

    Args:
        state: The training state.
        places: The places in it of what steps write.

    Attributes:
        kept: What was kept.
    """

    def __init__(self, state: State, places: Sequence[int]) -> None:
        self._state, self.places, self.kept = state, list(places), list[jax.Array]()
        self._choose = state.spec.strategy.on_state(_choose)

    def keep(self) -> None:
        """Keep what there is; after a bad step, which only the device knows of, what was kept before it stays."""
        leaves = self._state.leaves
        now = [leaves[i] for i in self.places]
        self.kept = self._choose([leaves[self._state.spec.index.counters], *(self.kept or now), *now])  # type: ignore[call-overload]

    def restore(self) -> None:
        """Put back what was kept."""
        self._state.restore(dict(zip(self.places, self.kept, strict=True)))


def _choose(arrays: list[jax.Array]) -> list[jax.Array]:
    counters, *pairs = arrays
    good, middle = counters[3] < 0, len(pairs) // 2
    return [jnp.where(good, now, kept) for kept, now in zip(pairs[:middle], pairs[middle:], strict=True)]
