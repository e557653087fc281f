"""Parts of a module that are trained from an epoch on: until then an optimizer step leaves them alone.

At the end `optimizer_of`: what `configure_optimizers` returned, as an `Optimizer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxlit.core.module import TrainModule
from jaxlit.core.optimizer import Optimizer
from jaxlit.errors import ModuleError, noting_place
from jaxlit.texts import leaf_name, shown


@dataclass(frozen=True)
class Part:
    """Parameters that stay as they are before an epoch.

    Args:
        label: Its name among the parts: of its state in the optimizer's, and of its rate in a row.
        names: The parameters' names.
        start: The first epoch that trains them.
        tx: Their optimizer; None for one like that of the other parameters.
    """

    label: str
    names: frozenset[str]
    start: int
    tx: optax.GradientTransformation | None


class PartStates(NamedTuple):
    """The state of an optimizer of `by_part`."""

    rest: Any  # that of the parameters in no part
    parts: dict[str, Any]  # that of each part, by its label


def by_part(optimizer: Optimizer, parts: Sequence[Part]) -> Optimizer:
    """Return an optimizer that keeps a state for each part, and one for all other parameters.

    Moments and counts of a part so begin with its own first step, as if its optimizer were made then. Its groups are
    split as the states are: what a part has of a group has its own rate.
    """
    if not parts:
        return optimizer
    names_in_parts = {name for part in parts for name in part.names}
    txs = [optimizer.tx_of(optimizer.groups.keys() - names_in_parts)]
    txs += [optimizer.tx_of(part.names) if part.tx is None else part.tx for part in parts]
    transforms: dict = dict(enumerate(txs))
    # A function, as the parameters may be masked themselves.
    split = optax.partition(transforms, lambda params: jax.tree.map_with_path(lambda path, _: _at(parts, path), params))

    def init(params: Any) -> PartStates:
        return named(split.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, PartStates]:
        states = state.rest, *(state.parts[part.label] for part in parts)
        updates, new = split.update(updates, optax.PartitionState(dict(enumerate(states))), params, **extra)
        return updates, named(new)

    def named(state: Any) -> PartStates:
        states = state.inner_states
        return PartStates(states[0], {part.label: states[i] for i, part in enumerate(parts, 1)})

    rate_names = dict(optimizer.groups)  # by parameter, in a row
    for part in parts:
        for name in sorted(part.names):
            group = optimizer.groups.get(name, "")
            has_own_rate = part.tx is not None or group in ("", part.label)
            rate_names[name] = part.label if has_own_rate else f"{group}/{part.label}"
    return optimizer.with_tx(optax.GradientTransformationExtraArgs(init, update), rate_names)


def parts_along(state: Any) -> list[str]:
    """Return for each leaf of an optimizer's state the label of the part that it is of, "" for none."""
    paths: list = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    if not isinstance(state, PartStates):
        return [""] * len(paths)
    return [path[1].key if path[0].name == "parts" else "" for path in paths]


def _at(parts: Sequence[Part], path: Any) -> int:
    """Return the number of the part that a parameter is in, from 1, or 0 for none."""
    name = leaf_name(path)
    return next((place for place, part in enumerate(parts, 1) if name in part.names), 0)


@dataclass(frozen=True)
class Hold:
    """What an optimizer step leaves alone, given the epoch that it is in."""

    parts: Sequence[Part]
    epoch: jax.Array  # () int32

    def without(self, grads: Any) -> Any:
        """Return the gradients with zeros for what is held: a clip by their norm is that of the others."""
        return self.keep(None, grads)

    def keep(self, old: Any, new: Any) -> Any:
        """Return a tree like the parameters, that is `old`, or zero, where it is held."""

        # Adding zeros would lose a sign of zero.
        def select(path: Any, x: jax.Array, old: jax.Array | int = 0) -> jax.Array:
            place = _at(self.parts, path)
            return x if place == 0 else jnp.where(self._held(self.parts[place - 1]), old, x)

        return jax.tree.map_with_path(select, new, *([] if old is None else [old])) if self.parts else new

    def keep_state(self, old: Any, new: Any) -> Any:
        """Return the state of an optimizer of `by_part`, in which that of a held part has not moved."""
        if not self.parts:
            return new
        states = {}
        for part in self.parts:
            choose = partial(jnp.where, self._held(part))
            states[part.label] = jax.tree.map(choose, old.parts[part.label], new.parts[part.label])
        return new._replace(parts=states)

    def _held(self, part: Part) -> jax.Array:
        return self.epoch < part.start


def optimizer_of(module: TrainModule, cls: type[TrainModule] | None = None) -> Optimizer:
    """Return what `configure_optimizers` returned, as an `Optimizer` of the module's parameters.

    Args:
        module: The module.
        cls: The class whose method is called; by default the module's.

    Raises:
        ModuleError: The method is missing or returned something else.
    """
    cls = cls or type(module)
    method = f"{cls.__name__}.configure_optimizers"
    if cls.configure_optimizers is TrainModule.configure_optimizers:
        raise ModuleError(f"fit needs {method}. Return an optax transform from it, for example optax.adamw(1e-3).")
    with noting_place(method):
        returned: Any = cls.configure_optimizers(module)
        while type(returned) in (list, tuple) and len(returned) == 1:
            (returned,) = returned
        if isinstance(returned, (optax.GradientTransformation, optax.MultiSteps)):
            return Optimizer(returned)  # type: ignore[arg-type]  # MultiSteps is a transform in all but its type
        if isinstance(returned, Optimizer):
            return returned.of(module)
    remedy = (
        "Return one, with the schedule inside, optax.adamw(schedule), or one transform for each group of parameters, "
        "jl.Optimizer(by={'encoder': optax.adam(1e-3), 'decoder': optax.adam(1e-3)})"
    )
    is_pair = type(returned) in (list, tuple) and [type(x) in (list, tuple) for x in returned] == [True, True]
    if is_pair or (isinstance(returned, dict) and "lr_scheduler" in returned):
        remedy = (
            "Return one transform with the schedule inside, optax.adamw(schedule): docs/schedules.md lists torch's "
            "schedules. A schedule counts steps: a milestone in epochs becomes epochs times the steps of an epoch"
        )
    if isinstance(returned, nnx.Optimizer):
        remedy = "Return its tx: what it keeps is kept in the training state"
    raise ModuleError(
        f"{method} must return an optax.GradientTransformation or a jaxlit.Optimizer, got {shown(returned, 100)}. "
        f"{remedy}."
    )
