"""Parts of a module that are trained from an epoch on: until then an optimizer step leaves them alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxlit.leaf_names import leaf_name

_REST = "the rest"  # no part is called so: a space stands in no attribute


@dataclass(frozen=True)
class Part:
    """Parameters that stay as they are before an epoch.

    Args:
        label: Its name among the parts, which its state has in the optimizer's.
        names: The parameters' names.
        start: The first epoch that trains them.
        tx: Their optimizer; None for one like that of the other parameters.
    """

    label: str
    names: frozenset[str]
    start: int
    tx: optax.GradientTransformation | None


def by_part(tx: optax.GradientTransformation, parts: Sequence[Part]) -> optax.GradientTransformation:
    """Return an optimizer that keeps a state for each part, and one for all other parameters.

    Moments and counts of a part so begin with its own first step, as if its optimizer were made then.
    """
    if not parts:
        return tx
    transforms: dict[Any, optax.GradientTransformation] = {_REST: tx} | {part.label: part.tx or tx for part in parts}
    # A function, as the parameters may be masked themselves.
    return optax.partition(transforms, lambda params: jax.tree.map_with_path(lambda path, _: _of(parts, path), params))


def _of(parts: Sequence[Part], path: Any) -> str:
    name = leaf_name(path)
    return next((part.label for part in parts if name in part.names), _REST)


@dataclass(frozen=True)
class Hold:
    """What an optimizer step leaves alone, given the epoch that it is in.

    Args:
        parts: The parts.
        epoch: () int32.
    """

    parts: Sequence[Part]
    epoch: jax.Array

    def without(self, grads: Any) -> Any:
        """Return the gradients with zeros for what is held: a clip by their norm is that of the others."""
        return self._choose(lambda held, g: jnp.where(held, jnp.zeros_like(g), g), grads)

    def keep(self, old: Any, new: Any) -> Any:
        """Return a tree like the parameters, that is `old` where it is held. Adding zeros would lose a sign of zero."""
        return self._choose(lambda held, b, a: jnp.where(held, a, b), new, old)

    def keep_state(self, old: Any, new: Any) -> Any:
        """Return the state of an optimizer of `by_part`, in which that of a held part has not moved."""
        if not self.parts:
            return new
        states = dict(new.inner_states)
        for part in self.parts:
            held, was = self.epoch < part.start, old.inner_states[part.label]
            states[part.label] = jax.tree.map(lambda a, b, held=held: jnp.where(held, a, b), was, states[part.label])
        return new._replace(inner_states=states)

    def _choose(self, choose: Callable[..., Any], tree: Any, *others: Any) -> Any:
        starts = {part.label: part.start for part in self.parts}

        def chosen(path: Any, x: jax.Array, *more: jax.Array) -> jax.Array:
            label = _of(self.parts, path)
            return x if label == _REST else choose(self.epoch < starts[label], x, *more)

        return jax.tree.map_with_path(chosen, tree, *others) if self.parts else tree
