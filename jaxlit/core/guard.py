"""The guard of an optimizer step: which of its results replace the old values."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Literal

from jaxlit.programs.jaxpr import bind, reaches, sources, value_of, walk


def all_finite(tree: Any) -> list[jax.Array]:
    """Return for each array of a tree whether all of it is finite, () bool."""
    # Leaf by leaf, as the norm of finite gradients may overflow. XLA adds up float32 in fewer kernels than it joins
    # booleans, and a sum of ones is not zero however it rounds.
    return [jnp.sum(jnp.where(jnp.isfinite(x), jnp.float32(0), 1)) == 0 for x in jax.tree.leaves(tree)]


def keep_unless(ok: jax.Array, old: Any, new: Any) -> Any:
    """Return the tree `new` if `ok`, else `old`."""
    return jax.tree.map(lambda a, b: b if a is b else jnp.where(ok, b, a), old, new)


def holds_weights(tx: optax.GradientTransformation, params: Any) -> bool:
    """Return whether an optimizer's state begins with numbers of the parameters, such as slow weights or averages."""
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
        wait_for_all: Whether each leaf of the state depends on all gradients, as where the state contains weights.
    """
    every = (1 << len(finite)) - 1
    good = {every: early & jnp.stack(finite).all()}
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        new, rest = update(grads, state, *others)
        return keep_unless(good[every], state, new), rest
    closed, shape = _traced(update, grads, state, *others)
    choices = []
    for x, bits in zip(jax.tree.leaves(state), _waits(closed, state, len(finite), wait_for_all), strict=True):
        if bits not in good:
            good[bits] = reduce(and_, [ok for i, ok in enumerate(finite) if bits >> i & 1], early)
        choices.append((good[bits], x))
    made = _run(closed, jax.tree.leaves((grads, state, others)), choices)
    return jax.tree.unflatten(jax.tree.structure(shape), made)


def waits(update: Callable[..., Any], grads: Any, state: Any, *others: Any, wait_for_all: bool) -> list[int]:
    """Return for each leaf of an optimizer's state the gradients that it depends on, as bits; see `guarded`."""
    closed, _ = _traced(update, grads, state, *others)
    return _waits(closed, state, len(jax.tree.leaves(grads)), wait_for_all)


def _traced(update: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    leaves, treedef = jax.tree.flatten(args)
    return jax.make_jaxpr(lambda *x: update(*treedef.unflatten(x)), return_shape=True)(*leaves)


def _waits(closed: ClosedJaxpr, state: Any, num_grads: int, wait_for_all: bool) -> list[int]:
    # A moment depends on its own gradient, after a clip by the global norm on all. Leaves that no gradient reaches,
    # and single numbers such as counts, wait for all: they must agree with each other.
    every = (1 << num_grads) - 1
    pairs = zip(jax.tree.leaves(state), sources(closed.jaxpr), strict=False)
    return [every if wait_for_all or not x.ndim else bits & every or every for x, bits in pairs]


def _run(closed: ClosedJaxpr, args: Sequence[Any], choices: Sequence[tuple[jax.Array, Any]]) -> list[Any]:
    """Run a program whose first outputs are each selected, as soon as they are computed.

    Args:
        closed: The program.
        args: Its inputs.
        choices: For each of the first outputs whether to take the new array, and the old one.
    """
    outputs, values = closed.jaxpr.outvars, dict[Any, Any]()
    chosen: dict[int, Any] = {}  # by output
    waiting: dict[Any, list[int]] = {}  # by variable
    for i, var in enumerate(outputs[: len(choices)]):
        if isinstance(var, Literal):
            chosen[i] = keep_unless(*choices[i], var.val)
        else:
            waiting.setdefault(var, []).append(i)

    def select(var: Any, new: Any) -> Any:
        made = {i: keep_unless(*choices[i], new) for i in waiting.get(var, [])}
        chosen.update(made)
        return next(iter(made.values()), new)  # later equations read what was selected, not both

    for var, x in zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args], strict=True):
        values[var] = x
        select(var, x)
    walk(
        closed.jaxpr.eqns,
        values,
        lambda eqn, args: [select(var, x) for var, x in zip(eqn.outvars, bind(eqn, args), strict=True)],
    )
    rest = [value_of(x, values) for x in outputs[len(choices) :]]
    return [*(chosen[i] for i in range(len(choices))), *rest]
