"""The compiled programs of one stage: forward, backward, and backward in two parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxlit.core.derived_steps import MicrobatchStep
from jaxlit.pipeline.cut import Cut, Piece
from jaxlit.programs.jaxpr import inline, value_of, variables, walk, walk_back


@dataclass(frozen=True)
class Flow:
    """The values that the gradient passes through.

    Attributes:
        values: The variables of a program that depend on a parameter and that its first output depends on.
        params: The indices of the parameters of which that is true.
    """

    values: frozenset[Any]
    params: frozenset[int]


def flow_of(jaxpr: Any, params: Sequence[int]) -> Flow:
    """Return the flow of the gradient of a program's first output, given the indices of the parameters."""
    is_real = lambda x: not isinstance(x, Literal) and jnp.issubdtype(x.aval.dtype, jnp.inexact)  # noqa: E731
    depends = {x: i in {*params} for i, x in enumerate(jaxpr.invars)}
    read = lambda x, values: not isinstance(x, Literal) and values.get(x, False)  # noqa: E731
    walk(jaxpr.eqns, depends, lambda eqn, given: [any(given) and is_real(x) for x in eqn.outvars], read)
    below = {x for x, is_below in depends.items() if is_below}
    above = dict.fromkeys(x for x in jaxpr.outvars[:1] if is_real(x))
    walk_back(jaxpr.eqns, above, lambda eqn, used: any(map(is_real, used)) and eqn.primitive.name != "stop_gradient")
    return Flow(frozenset(below & above.keys()), frozenset(i for i in params if jaxpr.invars[i] in above))


@dataclass
class Kept:
    """The values that a forward pass keeps for its backward pass.

    Attributes:
        inputs: The stage's inputs, None for those that are not needed again.
        ins: The same for the values of other stages.
        residuals: The values that it computed.
    """

    inputs: list[Any]
    ins: list[Any]
    residuals: list[jax.Array]

    @property
    def nbytes(self) -> int:
        """The bytes of what is kept in addition to the state."""
        return sum(x.size * x.dtype.itemsize for x in (*self.ins, *self.residuals) if x is not None)


class Stage:
    """The programs of one stage, for microbatches of one shape, compiled when they are first called.

    Args:
        cut: The program.
        piece: The part of it that this stage computes.
        flow: The values that the gradient passes through.
        passes: The functions of a pass, which add up gradients.
        jit: Compiles a function, given its name and options of `jax.jit`.
        remat: A policy of `jax.checkpoint_policies` to compute the stage again by in the backward pass, or None.
    """

    def __init__(
        self, cut: Cut, piece: Piece, flow: Flow, passes: MicrobatchStep, jit: Callable[..., Any], remat: Any = None
    ) -> None:
        self.piece, self._run, self._passes, self._remat = piece, cut.runner(piece), passes, remat
        self.wrt = [k for k, i in enumerate(piece.inputs) if i in flow.params]
        self.params = [piece.inputs[k] for k in self.wrt]
        self.ins = [k for k, x in enumerate(piece.ins) if x in flow.values]
        self.outs = [k for k, x in enumerate(piece.outs) if x in flow.values]
        self.ends = 0 in piece.results  # the objective, whose gradient begins here
        self._treedef: Any = None
        self._where: list[tuple[str, int] | None] = []
        self.forward = jit(self._forward, "fwd")
        self.backward = jit(self._backward, "bwd", donate_argnums=(3,))
        self.fused = jit(self._fused, "fwd_bwd", donate_argnums=(2,))
        self.backward_input = jit(self._backward_input, "bwd_input")
        self.backward_weight = jit(self._backward_weight, "bwd_weight", donate_argnums=(2,))

    def keep(self, inputs: Sequence[Any], ins: Sequence[Any], residuals: list[Any]) -> Kept:
        """Return the values of a forward pass that its backward pass needs."""
        used = set(self._where)
        inputs = [x if ("inputs", i) in used else None for i, x in enumerate(inputs)]
        return Kept(inputs, [x if ("ins", i) in used else None for i, x in enumerate(ins)], residuals)

    def _pass(self, inputs: list[Any], ins: list[Any]) -> tuple[Any, Any, Any]:
        """Return what is differentiated, its pullback, and the other results."""

        def run(params: list[Any], given: list[Any]) -> tuple[list[Any], Any]:
            all_inputs, all_ins = list(inputs), list(ins)
            for k, x in zip(self.wrt, params, strict=True):
                all_inputs[k] = x
            for k, x in zip(self.ins, given, strict=True):
                all_ins[k] = x
            outs, results = self._run(all_inputs, all_ins)
            along = [outs[k] for k in self.outs] + ([results[0]] if self.ends else [])
            return along, ([None if k in self.outs else x for k, x in enumerate(outs)], results)

        run = jax.checkpoint(run, policy=self._remat) if self._remat is not None else run
        return jax.vjp(run, [inputs[k] for k in self.wrt], [ins[k] for k in self.ins], has_aux=True)  # type: ignore[return-value]

    def _forward(self, inputs: list[Any], ins: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        along, pull, (outs, results) = self._pass(inputs, ins)
        for k, x in zip(self.outs, along, strict=False):
            outs[k] = x
        leaves, self._treedef = jax.tree.flatten(pull)
        # Inputs that the pullback holds are not returned: jit would copy them, the weights once for each microbatch.
        known = {id(x): (which, i) for which, xs in (("inputs", inputs), ("ins", ins)) for i, x in enumerate(xs)}
        self._where = [known.get(id(x)) for x in leaves]
        return outs, results, [x for x, at in zip(leaves, self._where, strict=True) if at is None]

    def _pull(self, kept: Any, residuals: list[Any], cotangents: list[list[Any]]) -> tuple[list[Any], list[Any]]:
        """Return the gradients of the parameters, and of what came from other stages."""
        left, (inputs, ins) = iter(residuals), kept
        given = {"inputs": inputs, "ins": ins}
        pull = jax.tree.unflatten(self._treedef, [next(left) if w is None else given[w[0]][w[1]] for w in self._where])
        along = [sum(parts[1:], parts[0]) for parts in cotangents]
        return pull(along + ([jnp.ones((), jnp.float32)] if self.ends else []))

    def _add(self, totals: list[Any], grads: Sequence[Any], rows: Any, scale: Any) -> list[Any]:
        return [self._passes.add(t, g, rows, scale) for t, g in zip(totals, grads, strict=True)]

    def _backward(
        self, kept: Any, residuals: list[Any], cotangents: Any, totals: list[Any], rows: Any, scale: Any
    ) -> tuple[list[Any], list[Any]]:
        grads, sent = self._pull(kept, residuals, cotangents)
        return sent, self._add(totals, grads, rows, scale)

    def _fused(
        self, inputs: list[Any], ins: list[Any], totals: list[Any], rows: Any, scale: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        _, pull, (_, results) = self._pass(inputs, ins)
        grads, sent = pull([jnp.ones((), jnp.float32)])
        return results, sent, self._add(totals, grads, rows, scale)

    # In two parts: the gradients that the stage before waits for, and the rest ----------------------

    def _backward_input(self, kept: Any, residuals: list[Any], cotangents: Any) -> tuple[list[Any], list[Any]]:
        (first, _), crossing, values, (_, sent) = self._halves(kept, residuals, cotangents)
        walk(first, values)
        return [value_of(x, values) for x in sent], [values[x] for x in crossing]

    def _backward_weight(
        self, given: tuple[Any, Any, Any], crossing: list[Any], totals: list[Any], rows: Any, scale: Any
    ) -> list[Any]:
        (_, second), names, values, (grads, _) = self._halves(*given)
        values.update(zip(names, crossing, strict=True))
        walk(second, values)
        return self._add(totals, [value_of(x, values) for x in grads], rows, scale)

    def _halves(self, *given: Any) -> tuple[Any, list[Any], dict[Any, Any], tuple[Any, Any]]:
        """Return the equations of both parts, what the second needs of the first, the inputs, and the results."""
        args, treedef = jax.tree.flatten(given)
        closed = jax.make_jaxpr(lambda *x: self._pull(*treedef.unflatten(x)))(*args)
        jaxpr, consts = (closed := inline(closed, also=lambda _: True)).jaxpr, closed.consts
        grads, sent = jaxpr.outvars[: len(self.wrt)], jaxpr.outvars[len(self.wrt) :]
        first = walk_back(jaxpr.eqns, dict.fromkeys(variables(sent)))
        is_first, wanted = {id(eqn) for eqn in first}, dict.fromkeys(variables(grads))
        second = walk_back([eqn for eqn in jaxpr.eqns if id(eqn) not in is_first], wanted)
        crossing = [x for eqn in reversed(first) for x in eqn.outvars if x in wanted]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        return (first, second), crossing, values, (grads, sent)
