"""The compiled programs of one stage: forward, backward, and backward in two parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlit.core.derived_steps import MicrobatchStep
from jaxlit.pipeline.cut import Cut, Piece
from jaxlit.programs.jaxpr import inline, value_of, variables, walk, walk_back


@dataclass(frozen=True)
class Flow:
    """The values that the gradient passes through."""

    values: frozenset[Any]  # the variables of a program that depend on a parameter and that its first output depends on
    params: frozenset[int]  # the indices of the parameters of which that is true


def flow_of(jaxpr: Any, params: Sequence[int]) -> Flow:
    """Return the flow of the gradient of a program's first output, given the indices of the parameters."""
    depends = dict.fromkeys(jaxpr.constvars, False) | {x: i in {*params} for i, x in enumerate(jaxpr.invars)}
    walk(jaxpr.eqns, depends, lambda eqn, ins: [any(ins) and _is_real(x) for x in eqn.outvars], lambda _: False)
    below = {x for x, is_below in depends.items() if is_below}
    above = dict.fromkeys(x for x in variables(jaxpr.outvars[:1]) if _is_real(x))
    walk_back(jaxpr.eqns, above, lambda eqn, used: any(map(_is_real, used)) and eqn.primitive.name != "stop_gradient")
    return Flow(frozenset(below & above.keys()), frozenset(i for i in params if jaxpr.invars[i] in above))


def _is_real(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


@dataclass
class Saved:
    """The values that a forward pass keeps for its backward pass."""

    inputs: list[Any]  # the stage's inputs, None for those that are not needed again
    ins: list[Any]  # the same for the values of other stages
    residuals: list[jax.Array]  # the values that it computed

    @property
    def nbytes(self) -> int:
        """The bytes of what is saved in addition to the state."""
        return sum(x.size * x.dtype.itemsize for x in (*self.ins, *self.residuals) if x is not None)


class Stage:
    """The programs of one stage, for microbatches of one shape, compiled when they are first called.

    `jit` compiles a function, given its name and options of `jax.jit`. `remat` is a policy of `jax.checkpoint_policies`
    to compute the stage again by in the backward pass, or None.
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
        self._sources: list[tuple[str, int] | None] = []  # of each array of a pullback: an input, None for a residual
        self.forward = jit(self._forward, "fwd")
        self.backward = jit(self._backward, "bwd", donate_argnums=(3,))
        self.fused = jit(self._fused, "fwd_bwd", donate_argnums=(2,))
        self.backward_input = jit(self._backward_input, "bwd_input")
        self.backward_weight = jit(self._backward_weight, "bwd_weight", donate_argnums=(2,))

    def keep(self, inputs: Sequence[Any], ins: Sequence[Any], residuals: list[Any]) -> Saved:
        """Return the values of a forward pass that its backward pass needs."""
        used = set(self._sources)
        needed_inputs = [x if ("inputs", i) in used else None for i, x in enumerate(inputs)]
        needed_ins = [x if ("ins", i) in used else None for i, x in enumerate(ins)]
        return Saved(needed_inputs, needed_ins, residuals)

    def _pass(self, inputs: list[Any], ins: list[Any]) -> tuple[Any, Any, Any]:
        """Return the differentiated results, their pullback, and the other results."""

        def run(params: list[Any], real_ins: list[Any]) -> tuple[list[Any], Any]:
            all_inputs = dict(enumerate(inputs)) | dict(zip(self.wrt, params, strict=True))
            all_ins = dict(enumerate(ins)) | dict(zip(self.ins, real_ins, strict=True))
            outs, results = self._run([*all_inputs.values()], [*all_ins.values()])
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
        known = {id(x): (kind, i) for kind, xs in (("inputs", inputs), ("ins", ins)) for i, x in enumerate(xs)}
        self._sources = [known.get(id(x)) for x in leaves]
        return outs, results, [x for x in leaves if id(x) not in known]

    def _pull(self, saved: Any, residuals: list[Any], cotangents: list[list[Any]]) -> tuple[list[Any], list[Any]]:
        """Return the gradients of the parameters, and of the values of other stages."""
        rest = iter(residuals)
        arrays: dict[str, Any] = dict(zip(("inputs", "ins"), saved, strict=True))
        leaves = [next(rest) if source is None else arrays[source[0]][source[1]] for source in self._sources]
        along = [sum(parts[1:], parts[0]) for parts in cotangents]
        pull = jax.tree.unflatten(self._treedef, leaves)
        return pull(along + ([jnp.ones((), float)] if self.ends else []))

    def _add(self, totals: list[Any], grads: Sequence[Any], rows: Any, scale: Any) -> list[Any]:
        return [self._passes.add(t, g, rows, scale) for t, g in zip(totals, grads, strict=True)]

    def _backward(
        self, saved: Any, residuals: list[Any], cotangents: Any, totals: list[Any], rows: Any, scale: Any
    ) -> tuple[list[Any], list[Any]]:
        grads, sent = self._pull(saved, residuals, cotangents)
        return sent, self._add(totals, grads, rows, scale)

    def _fused(
        self, inputs: list[Any], ins: list[Any], totals: list[Any], rows: Any, scale: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        _, pull, (_, results) = self._pass(inputs, ins)
        grads, sent = pull([jnp.ones((), float)])
        return results, sent, self._add(totals, grads, rows, scale)

    def _backward_input(self, *returned: Any) -> tuple[list[Any], list[Any]]:
        halves = self._halves(*returned)
        values = walk(halves.first, halves.values)
        return [value_of(x, values) for x in halves.sent], [values[x] for x in halves.crossing]

    def _backward_weight(
        self, returned: tuple[Any, Any, Any], crossing: list[Any], totals: list[Any], rows: Any, scale: Any
    ) -> list[Any]:
        halves = self._halves(*returned)
        values = walk(halves.second, halves.values | dict(zip(halves.crossing, crossing, strict=True)))
        return self._add(totals, [value_of(x, values) for x in halves.grads], rows, scale)

    def _halves(self, *returned: Any) -> "_Halves":
        """Divide a backward pass into the gradients that the stage before waits for, and the rest."""
        args, treedef = jax.tree.flatten(returned)
        closed = inline(jax.make_jaxpr(lambda *x: self._pull(*treedef.unflatten(x)))(*args), also=lambda _: True)
        jaxpr = closed.jaxpr
        grads, sent = jaxpr.outvars[: len(self.wrt)], jaxpr.outvars[len(self.wrt) :]
        first = walk_back(jaxpr.eqns, dict.fromkeys(variables(sent)))
        is_first, wanted = {id(eqn) for eqn in first}, dict.fromkeys(variables(grads))
        second = walk_back([eqn for eqn in jaxpr.eqns if id(eqn) not in is_first], wanted)
        crossing = [x for eqn in reversed(first) for x in eqn.outvars if x in wanted]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
        return _Halves(first, second, crossing, values, grads, sent)


class _Halves(NamedTuple):
    """The two parts of a backward pass."""

    first: list[Any]
    second: list[Any]
    crossing: list[Any]  # the variables that the second part needs of the first
    values: dict[Any, Any]  # the constants and inputs
    grads: list[Any]
    sent: list[Any]
