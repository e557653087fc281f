"""Which members take steps by the same program, and arguments that do not reach a member."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit.core.hparams import hparams_of
from jaxlit.core.optimizer import updates_of
from jaxlit.core.plain_attributes import each_attribute, same
from jaxlit.engine.program_key import program_key, same_key
from jaxlit.engine.training import Training
from jaxlit.errors import ArgumentError
from jaxlit.fingerprint import stable_text
from jaxlit.populations.lifting import DifferentError, differences

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = ("builtins", "flax", "jax", "jaxlib", "jaxlit", "numpy", "optax")


class Kind(NamedTuple):
    """All that the programs of a member depend on."""

    key: Any
    hparams: dict[str, Any]
    schedule: Any
    optimizer: Any  # the program of its first step: what its closures hold

    def is_same(self, other: "Kind") -> bool:
        """Return whether members of the two kinds have the same programs, so that one need not be traced."""
        if not (same_key(self.key, other.key) and same(self.hparams, other.hparams)):
            return False
        try:
            return self.schedule is other.schedule and not differences(self.optimizer, other.optimizer)
        except DifferentError:
            return False


def kind_of(training: Training) -> Kind:
    """Return the kind of a member."""
    pure, params = training.pure, training.spec.tree.params

    def first_step(grads: Any, params: Any, loss: Any) -> Any:
        tx = training.plan.tx
        state = tx.init(params)
        return state, updates_of(tx, grads, state, params, loss, f"{pure.name}.configure_optimizers")

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    program = jax.make_jaxpr(first_step)(shapes, shapes, jax.ShapeDtypeStruct((), jnp.float32))
    key = program_key(pure.origin, training.spec.strategy, pure.precision)
    return Kind(key, dict(hparams_of(pure.origin)), training.plan.optimizer.lr_schedule, program)


def settings_of(module: Any) -> dict[str, Any]:
    """Return the numbers and texts that a module's attributes and hyperparameters hold now, in containers too."""
    settings = {path: at[name] for path, at, name in each_attribute(module)}
    settings |= {f"hparams.{name}": value for name, value in hparams_of(module).items()}
    return {path: _inside(value, set()) for path, value in settings.items()}


def _inside(value: Any, above: set[int]) -> Any:
    if isinstance(value, _PLAIN) or id(value) in above:
        return value if isinstance(value, _PLAIN) else None
    above = above | {id(value)}
    if isinstance(value, Mapping):
        return {key: _inside(x, above) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_inside(x, above) for x in value]
    if callable(value) or type(value).__module__.partition(".")[0] in _LIBRARIES:
        return None
    return {name: _inside(x, above) for name, x in getattr(value, "__dict__", {}).items()}


def check_unchanged(name: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a member whose settings were changed when a later one was built: its steps would read those.

    Raises:
        ArgumentError: Naming the attribute.
    """
    if changed := [path for path, value in before.items() if value != now[path]]:
        raise ArgumentError(
            f"jl.fit_many: {changed[0]} of {name} was {stable_text(before[changed[0]])}, and became "
            f"{stable_text(now[changed[0]])} when a later member was built. They share an object that make_module "
            "changes: make one for each member."
        )


def check_distinct(
    names: Sequence[str],
    variations: Sequence[Mapping[str, Any]],
    arrays: Sequence[Sequence[np.ndarray]],
    numbers: Sequence[np.ndarray],
) -> None:
    """Refuse two members of different variations that would be the same training.

    Args:
        names: How each member is called in messages.
        variations: What each differs in.
        arrays: Those of each member's module.
        numbers: (members, ...) each, what the programs of members differ in.

    Raises:
        ArgumentError: Naming the members.
    """
    seen = dict[str, int]()
    for i, name in enumerate(names):
        digest = hashlib.sha256()
        for x in (*arrays[i], *(column[i] for column in numbers)):
            digest.update(np.ascontiguousarray(x).tobytes())
        first = seen.setdefault(digest.hexdigest(), i)
        if stable_text(dict(variations[first])) != stable_text(dict(variations[i])):
            raise ArgumentError(
                f"jl.fit_many: {names[first]} and {name} begin with the same weights and take the same steps: what "
                "they differ in reaches neither. Read it in a step or in configure_optimizers, or leave it out."
            )
