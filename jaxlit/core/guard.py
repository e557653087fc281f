"""The guard of an optimizer step: which of its results replace the old values."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Literal

from jaxlit.programs.jaxpr import bind, indices, run, sources


def all_finite(tree: Any) -> list[jax.Array]:
    """Return for each array of a tree whether all of it is finite, () bool."""
    # Leaf by leaf, as the norm of finite gradients may overflow. XLA adds up float32 in fewer kernels than it joins
    # booleans, and a sum of ones is not zero however it rounds.
    return [jnp.sum(jnp.where(jnp.isfinite(x), jnp.float32(0), 1)) == 0 for x in jax.tree.leaves(tree)]


def computed_once(ok: jax.Array) -> jax.Array:
    """Return a bool, unchanged, in a form that XLA computes in one place."""
    # XLA copies comparisons into each kernel that reads them, with all that they compare: the flags of all gradients
    # in the kernel of each parameter. A root is too expensive for it to copy.
    return jnp.sqrt(jnp.where(ok, jnp.float32(0), 1)) == 0


def keep_unless(ok: jax.Array, old: Any, new: Any) -> Any:
    """Return the tree `new` if `ok`, else `old`."""
    return jax.tree.map(lambda a, b: b if a is b else jax.lax.select(ok, b, a), old, new)


def holds_weights(tx: optax.GradientTransformation, params: Any) -> bool:
    """Return whether an optimizer's state begins with numbers of the parameters, such as slow weights or averages."""
    return any(sources(jax.make_jaxpr(tx.init)(params).jaxpr))


def guarded(
    update: Callable[..., tuple[Any, Any]],
    grads: Any,
    state: Any,
    *others: Any,
    early: jax.Array,
    finite: Sequence[jax.Array],
    ok: jax.Array,
    wait_for_all: bool,
) -> tuple[Any, Any]:
    """Return what an optimizer's update returns, but old leaves of its state where a gradient is not finite.

    Each leaf selects new or old as soon as the gradients that it depends on are known, so that XLA can overwrite the
    old buffer in place. Waiting for the last gradient would keep all gradients, and a copy of the old moments, in
    memory at once. The price: after a step whose loss is finite but one gradient is not, leaves that depend on other
    gradients only have been updated.

    Args:
        update: A function of (grads, state, *others) to (the new state, anything).
        grads: The gradients.
        state: The optimizer's state.
        *others: Other arguments of the function.
        early: () bool, whether the step is good as far as is known without the gradients.
        finite: Of each gradient, () bool, whether it is finite.
        ok: () bool, all of these.
        wait_for_all: Whether each leaf of the state depends on all gradients, as where the state contains weights.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        # Each equation would run by itself: nothing is overwritten in place, so nothing is gained by choosing early.
        new, rest = update(grads, state, *others)
        return keep_unless(ok, state, new), rest
    closed, shape = jax.make_jaxpr(update, return_shape=True)(grads, state, *others)
    is_good = {frozenset(range(len(finite))): ok}  # by the gradients that a leaf needs
    choices = list[Choice]()
    for old, needs in zip(jax.tree.leaves(state), _needs(closed, state, len(finite), wait_for_all), strict=True):
        if needs not in is_good:
            is_good[needs] = reduce(and_, [finite[i] for i in sorted(needs)], early)
        choices.append(Choice(is_good[needs], old))
    results = _run(closed, jax.tree.leaves((grads, state, others)), choices)
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def needed_grads(
    update: Callable[..., Any], grads: Any, state: Any, *others: Any, wait_for_all: bool
) -> list[frozenset[int]]:
    """Return for each leaf of an optimizer's state the indices of the gradients that it needs; see `guarded`."""
    closed = jax.make_jaxpr(update)(grads, state, *others)
    return _needs(closed, state, len(jax.tree.leaves(grads)), wait_for_all)


def _needs(closed: ClosedJaxpr, state: Any, num_grads: int, wait_for_all: bool) -> list[frozenset[int]]:
    # A moment depends on its own gradient, after a clip by the global norm on all. Leaves that no gradient reaches,
    # and single numbers such as counts, wait for all: they must agree with each other.
    every = frozenset(range(num_grads))
    if wait_for_all:
        return [every] * len(jax.tree.leaves(state))
    needs = list[frozenset[int]]()
    for leaf, inputs in zip(jax.tree.leaves(state), sources(closed.jaxpr), strict=False):
        grads = indices(inputs & ((1 << num_grads) - 1)) if leaf.ndim else every  # the gradients are the first inputs
        needs.append(grads or every)
    return needs


class Choice(NamedTuple):
    """What an output of the update is selected by."""

    is_good: jax.Array  # () bool, whether to take the new array
    old: Any


def _run(closed: ClosedJaxpr, args: Sequence[Any], choices: Sequence[Choice]) -> list[Any]:
    """Run a program whose first outputs are each selected, as soon as they are computed.

    Args:
        closed: The program.
        args: Its inputs.
        choices: Of each of the first outputs.
    """
    places: dict[Any, list[int]] = {}  # by variable, the outputs that it is
    for i, var in enumerate(closed.jaxpr.outvars[: len(choices)]):
        if not isinstance(var, Literal):
            places.setdefault(var, []).append(i)
    chosen: dict[int, Any] = {}

    def rule(eqn: Any, args: list[Any]) -> list[Any]:
        results = bind(eqn, args)
        for k, (var, new) in enumerate(zip(eqn.outvars, results, strict=True)):
            for i in places.get(var, ()):
                # Later equations read what was selected: if they read the new array, both would be kept in memory.
                results[k] = chosen[i] = keep_unless(*choices[i], new)
        return results

    results = run(closed.jaxpr, closed.consts, args, rule)
    for i, choice in enumerate(choices):  # inputs and literals, which no equation computes, are selected here
        results[i] = chosen[i] if i in chosen else keep_unless(*choice, results[i])
    return results
