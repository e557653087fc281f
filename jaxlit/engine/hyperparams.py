"""The hyperparameters that an optimizer keeps in its state, to be read and set while it trains."""

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlit.core.parts import PartStates
from jaxlit.errors import ArgumentTypeError, did_you_mean

if TYPE_CHECKING:
    from jaxlit.engine.state import State


class Hyperparams(MutableMapping[str, float]):
    """The hyperparameters that `optax.inject_hyperparams` keeps in the optimizer state.

    Args:
        state: The state that holds them.
    """

    def __init__(self, state: "State") -> None:
        self._state = state

    def __repr__(self) -> str:
        return repr(dict(self))

    def __getitem__(self, name: str) -> float:
        return float(np.asarray(self._state.leaves[self._index(name)]))

    def __setitem__(self, name: str, value: float) -> None:
        i = self._index(name)
        if isinstance(value, (bool, str)):
            raise ArgumentTypeError(f"trainer.hyperparams[{name!r}] takes a number, got {value!r}.")
        self._state.put(i, np.asarray(float(value), self._state.leaves[i].dtype))

    def __delitem__(self, name: str) -> None:
        raise TypeError("A hyperparameter cannot be deleted. Set it.")

    def __iter__(self) -> Iterator[str]:
        return iter(find_hyperparams(self._state.spec.index.opt_state))

    def __len__(self) -> int:
        return len(find_hyperparams(self._state.spec.index.opt_state))

    def _index(self, name: str) -> int:
        known = find_hyperparams(self._state.spec.index.opt_state)
        if name not in known:
            raise KeyError(
                f"The optimizer has no hyperparameter {name!r} that can be set.{did_you_mean(name, known)} Known: "
                f"{sorted(known)}. Build it as optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
            )
        return known[name]


def find_hyperparams(opt_state: Any) -> dict[str, int]:
    """Return each leaf that `optax.inject_hyperparams` keeps as a hyperparameter, except for schedules, by its name.

    One that several transforms have is named with their labels, for example `learning_rate/head`. One that a part of
    the parameters has is named with the part's name after it; that of the others is named as without parts.

    Args:
        opt_state: The optimizer's state, with the indices of its leaves as leaves.
    """
    states = {"": opt_state.rest} | opt_state.parts if isinstance(opt_state, PartStates) else {"": opt_state}
    is_injected = lambda x: hasattr(x, "hyperparams")  # noqa: E731
    leaves = list[tuple[str, str, str, int]]()
    for part, state in states.items():
        for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_injected):
            label = "/".join(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey))
            scheduled = getattr(node, "hyperparams_states", {})
            injected = node.hyperparams if is_injected(node) else {}
            leaves += [(name, label, part, i) for name, i in injected.items() if name not in scheduled]
    names = []
    for name, label, part, _ in leaves:
        # A part's own transform, without a label, is distinguished by the part.
        labels = {x for n, x, p, _ in leaves if n == name and (x or not p)}
        text = f"{name}/{label}" if label and len(labels) > 1 else name
        names.append(f"{text}/{part}" if part and part != label else text)
    numbered = [x if names.count(x) == 1 else f"{x}/{names[:k].count(x)}" for k, x in enumerate(names)]
    return {name: i for name, (*_, i) in zip(numbered, leaves, strict=True)}
