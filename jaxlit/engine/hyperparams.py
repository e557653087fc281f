"""The hyperparameters that an optimizer keeps in its state, to be read and set while it trains."""

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlit.errors import ArgumentTypeError, did_you_mean

if TYPE_CHECKING:
    from jaxlit.engine.flat_state import FlatState


class Hyperparams(MutableMapping[str, float]):
    """The hyperparameters that `optax.inject_hyperparams` keeps in the optimizer state.

    Args:
        state: The state that holds them.
    """

    def __init__(self, state: "FlatState") -> None:
        self._state = state

    def __repr__(self) -> str:
        return repr(dict(self))

    def __getitem__(self, name: str) -> float:
        return self._state.read(self._index(name))

    def __setitem__(self, name: str, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number, np.ndarray, jax.Array)):
            raise ArgumentTypeError(f"trainer.hyperparams[{name!r}] = value takes a number, got {value!r}.")
        self._state.set(self._index(name), float(value))

    def __delitem__(self, name: str) -> None:
        raise TypeError("A hyperparameter cannot be deleted. Set it.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.hyperparams())

    def __len__(self) -> int:
        return len(self._state.hyperparams())

    def _index(self, name: str) -> int:
        known = self._state.hyperparams()
        if name not in known:
            raise KeyError(
                f"The optimizer has no hyperparameter {name!r} that can be set.{did_you_mean(name, known)} Known: "
                f"{sorted(known)}. Build it as optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
            )
        return known[name]


def find_hyperparams(opt_state: Any) -> dict[str, int]:
    """Return each leaf that `optax.inject_hyperparams` keeps as a hyperparameter, except for schedules, by its name.

    One that several transforms have is named with their labels, `learning_rate/head` say.

    Args:
        opt_state: The optimizer's state, with the places of its leaves as leaves.
    """
    is_injected = lambda x: hasattr(x, "hyperparams")  # noqa: E731
    found: list[tuple[str, str, int]] = []  # (name, label, place)
    for path, node in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_injected):
        if is_injected(node):
            scheduled = getattr(node, "hyperparams_states", {})
            keys = [str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)]
            label = "/".join(keys) or str(len(found))
            found += [(name, label, at) for name, at in node.hyperparams.items() if name not in scheduled]
    names = [name for name, _, _ in found]
    return {name if names.count(name) == 1 else f"{name}/{label}": at for name, label, at in found}
