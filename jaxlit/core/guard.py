"""The guard of an optimizer step: what of its result takes the place of what was there."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, DropVar, Literal, jaxpr_as_fun

from jaxlit.programs.jaxpr import reaches, sources


def all_finite(tree: Any) -> list[jax.Array]:
    """Return for each array of a tree whether all of it is finite, () bool."""
    # Leaf by leaf, as the norm of finite gradients may overflow. XLA adds up float32 in fewer kernels than it joins
    # booleans, and a sum of ones is not zero however it rounds.
    return [jnp.sum(jnp.where(jnp.isfinite(x), jnp.float32(0), 1)) == 0 for x in jax.tree.leaves(tree)]


def keep_unless(ok: jax.Array, old: Any, new: Any) -> Any:
    """Return the tree `new` if `ok`, else `old`."""
    return jax.tree.map(lambda a, b: b if a is b else jnp.where(ok, b, a), old, new)


def holds_weights(tx: optax.GradientTransformation, params: Any) -> bool:
    """Return whether an optimizer's state begins with numbers of the parameters: slow weights or averages, say."""
    leaves, treedef = jax.tree.flatten(jax.eval_shape(lambda x: x, params))
    program = jax.make_jaxpr(lambda *x: tx.init(treedef.unflatten(x)))(*leaves).jaxpr
    return any(reaches(program, range(len(program.outvars))))


def guarded(
    update: Callable[..., tuple[Any, Any]],
    grads: Any,
    state: Any,
    *others: Any,
    early: jax.Array,
    finite: Sequence[jax.Array],
    whole: bool,
) -> tuple[Any, Any]:
    """Return what an optimizer's update returns, with its state kept where a gradient was not finite.

    A leaf of the state is new if the step was found good so far and all gradients that it waits for are finite. It is
    chosen where it is made, before anything reads it: the old one is overwritten in place as its gradient arrives.
    If every leaf waited for the last gradient, all gradients would be alive at once, and a copy of old moments with
    them. So a step whose loss is finite and one gradient is not may be in the leaves that belong to the others.

    Args:
        update: A function of (grads, state, *others) to (the new state, anything).
        grads: The gradients.
        state: The optimizer's state.
        *others: What else it takes.
        early: () bool, whether the step was good as far as is known without the gradients.
        finite: Of each gradient, () bool, whether it is finite.
        whole: Whether all of the state waits for all gradients, where it holds weights.
    """
    old = jax.tree.leaves(state)
    known = {frozenset(range(len(finite))): early & jnp.stack(finite).all()}
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        new, rest = update(grads, state, *others)
        return keep_unless(known[frozenset(range(len(finite)))], state, new), rest
    closed, shape = _traced(update, grads, state, *others)
    kept = []
    for x, places in zip(old, _waits(closed, old, len(finite), whole), strict=True):
        if places not in known:
            known[places] = reduce(and_, [finite[i] for i in sorted(places)], early)
        kept.append((known[places], x))
    return jax.tree.unflatten(jax.tree.structure(shape), _run(closed, jax.tree.leaves((grads, state, others)), kept))


def waits(update: Callable[..., Any], grads: Any, state: Any, *others: Any, whole: bool) -> list[frozenset[int]]:
    """Return for each leaf of an optimizer's state the places of the gradients that it waits for, see `guarded`."""
    closed, _ = _traced(update, grads, state, *others)
    return _waits(closed, jax.tree.leaves(state), len(jax.tree.leaves(grads)), whole)


def _traced(update: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    leaves, treedef = jax.tree.flatten(args)
    return jax.make_jaxpr(lambda *x: update(*treedef.unflatten(x)), return_shape=True)(*leaves)


def _waits(closed: ClosedJaxpr, old: Sequence[Any], count: int, whole: bool) -> list[frozenset[int]]:
    # Read off the program of the update: a moment waits for its own gradient, after a clip by the global norm for all.
    # What no gradient reaches, and numbers such as counts, wait for all as well.
    every = frozenset(range(count))
    found = [reached & every for reached in sources(closed.jaxpr)[: len(old)]]
    return [every if whole or not x.ndim else reached or every for x, reached in zip(old, found, strict=True)]


def _run(closed: ClosedJaxpr, args: Sequence[Any], kept: Sequence[tuple[jax.Array, Any]]) -> list[Any]:
    """Run a program whose first outputs are each chosen between the new and an old array, where the new one is made.

    Args:
        closed: The program.
        args: Its inputs.
        kept: For each of the first outputs whether to take the new one, and the old one.
    """
    jaxpr = closed.jaxpr
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    chosen: dict[int, Any] = {}  # by output
    waiting: dict[Any, list[int]] = {}  # by variable
    for i, var in enumerate(jaxpr.outvars[: len(kept)]):
        if isinstance(var, Literal) or var in env:
            chosen[i] = keep_unless(*kept[i], var.val if isinstance(var, Literal) else env[var])
        else:
            waiting.setdefault(var, []).append(i)
    for eqn in jaxpr.eqns:
        inputs = list(dict.fromkeys(x for x in eqn.invars if not isinstance(x, Literal)))
        outputs = [x for x in eqn.outvars if not isinstance(x, DropVar)]
        one = jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=[eqn])
        for var, made in zip(outputs, jaxpr_as_fun(ClosedJaxpr(one, ()))(*(env[x] for x in inputs)), strict=True):
            places = waiting.get(var, [])
            chosen |= {i: keep_unless(*kept[i], made) for i in places}
            env[var] = chosen[places[0]] if places else made
    rest = [x.val if isinstance(x, Literal) else env[x] for x in jaxpr.outvars[len(kept) :]]
    return [*(chosen[i] for i in range(len(kept))), *rest]
