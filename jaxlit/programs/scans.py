"""Layers that a step scans over: which arrays are stacked, and one layer of them gathered at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding

from jaxlit.programs.jaxpr import bind, inner_jaxprs, scan_counts

# What a backward pass makes again: weights that were gathered, and what only lays them out otherwise.
_MADE_ANEW = ("sharding_constraint", "reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "split", "copy")
_CALLS = ("jit", "pjit", "closed_call", "core_call")
_REMATS = ("checkpoint", "remat", "remat2")
_SAME = ("convert_element_type", "copy", "copy_p")


@dataclass(frozen=True)
class Held:
    """An input of a program that is followed through it, or a slice of one.

    Attributes:
        place: Which input it is.
        dims: The input's dims that this value has, in its order.
        is_slice: Whether it is a slice in a scan.
    """

    place: int
    dims: tuple[int, ...]
    is_slice: bool = False


def scanned_dims(closed: Any, places: Sequence[int]) -> dict[int, set[int]]:
    """Return by input the dims that a scan of the program takes one by one.

    Args:
        closed: The program.
        places: The inputs to look at.
    """
    found: dict[int, set[int]] = {}
    jaxpr = closed.jaxpr
    known = {jaxpr.invars[i]: Held(i, tuple(range(jaxpr.invars[i].aval.ndim))) for i in places}
    _follow(jaxpr, known, found)
    return found


def _follow(jaxpr: Any, known: dict[Any, Held], found: dict[int, set[int]]) -> None:
    for eqn in jaxpr.eqns:
        held = [None if isinstance(x, core.Literal) else known.get(x) for x in eqn.invars]
        if not any(held):
            continue
        if (moved := _moved(eqn, held)) is not None:
            known[eqn.outvars[0]] = moved
        elif inner := _inner(eqn):
            inside = _inside(eqn, held)
            for outer, entered in zip(held, inside, strict=True):
                if outer is not None and entered is not None and len(entered.dims) < len(outer.dims):
                    found.setdefault(outer.place, set()).add(outer.dims[0])
            pairs = zip(inner.invars, inside, strict=True)
            _follow(inner, {var: entered for var, entered in pairs if entered is not None}, found)


def _moved(eqn: Any, held: Sequence[Held | None]) -> Held | None:
    """Return what an equation's result is of a value that is followed, if it is that value still."""
    if not held or held[0] is None or len(eqn.outvars) != 1:
        return None
    if eqn.primitive.name == "transpose":
        return replace(held[0], dims=tuple(held[0].dims[i] for i in eqn.params["permutation"]))
    return held[0] if eqn.primitive.name in _SAME else None


def _inner(eqn: Any) -> Any:
    """Return the program that an equation runs on its inputs, one by one, or on slices of them."""
    if eqn.primitive.name not in (*_CALLS, *_REMATS, "scan"):
        return None
    found = [getattr(x, "jaxpr", x) for x in inner_jaxprs(eqn)]
    return found[0] if len(found) == 1 and len(found[0].invars) == len(eqn.invars) else None


def _concerns(eqn: Any, held: Sequence[Held | None]) -> bool:
    """Return whether what an equation runs uses a slice, or scans over what is followed."""
    if not any(held) or (inner := _inner(eqn)) is None:
        return False
    inside, found = _inside(eqn, held), dict[int, set[int]]()
    if any(x is not None and x.is_slice for x in inside):
        return True
    _follow(inner, {var: x for var, x in zip(inner.invars, inside, strict=True) if x is not None}, found)
    return bool(found)


def _inside(eqn: Any, held: Sequence[Held | None]) -> list[Held | None]:
    """Return what the values are in the program that an equation runs."""
    if eqn.primitive.name != "scan":
        return list(held)
    first = sum(scan_counts(eqn))
    # A constant of a scan is one array in all turns; a carry is another one in each.
    slices = [x and replace(x, dims=x.dims[1:], is_slice=True) for x in held[first:]]
    return [None] * first + slices


def by_layer(
    body: Callable[..., Any], lies: Sequence[tuple[NamedSharding, NamedSharding] | None], policy: Any = None
) -> Callable[..., Any]:
    """Return a function whose scans gather their arrays slice by slice, forward and again backward.

    Left alone, XLA may split what the layers compute, and move activations between the devices for each of them, where
    the weights of one layer are less. An array that is no layer's is left to it.

    Args:
        body: The function, of pytrees of arrays.
        lies: For each of its first leaves how it is split, and how a slice of it lies while it is used; None for a leaf
            that stays as it is.
        policy: Of `jax.checkpoint_policies`, what of a turn is kept for the backward pass; None for all but what was
            gathered.
    """

    def call(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(*args)
        places = [i for i, x in enumerate(lies) if x is not None]
        if not scanned_dims(closed, places):
            return body(*args)
        known = {closed.jaxpr.invars[i]: Held(i, tuple(range(closed.jaxpr.invars[i].aval.ndim))) for i in places}
        results = _Rewritten(lies, policy).run(closed.jaxpr, closed.consts, jax.tree.leaves(args), known, {})
        return jax.tree.structure(shapes).unflatten(results)

    return call


@dataclass(frozen=True)
class _Rewritten:
    """Runs a program, and gathers slices where they are used."""

    lies: Sequence[tuple[NamedSharding, NamedSharding] | None]
    policy: Any

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], known: dict[Any, Held], gathered: dict[int, Any]
    ) -> list[Any]:
        """Run a program.

        Args:
            jaxpr: The program.
            consts: Its constants.
            args: Its inputs.
            known: Which of them are followed.
            gathered: Slices that were gathered so far and what they became, by the identity of the slice; held with
                it, as another value could have its identity once it is gone.
        """
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        value_of = lambda var: var.val if isinstance(var, core.Literal) else values[var]  # noqa: E731
        held_of = lambda var: None if isinstance(var, core.Literal) else known.get(var)  # noqa: E731

        def used(var: Any) -> Any:
            value, held = value_of(var), held_of(var)
            if held is None or not held.is_slice:
                return value
            if id(value) not in gathered:
                gathered[id(value)] = (value, self.gather(value, held))
            return gathered[id(value)][1]

        for eqn in jaxpr.eqns:
            held = list(map(held_of, eqn.invars))
            with eqn.ctx.manager:
                if (moved := _moved(eqn, held)) is not None:
                    known[eqn.outvars[0]] = moved
                    results = bind(eqn, list(map(value_of, eqn.invars)))
                elif _concerns(eqn, held):
                    results = self.enter(eqn, list(map(value_of, eqn.invars)), held, gathered)
                else:
                    results = bind(eqn, list(map(used, eqn.invars)))
            values.update(zip(eqn.outvars, results, strict=True))
        return list(map(used, jaxpr.outvars))

    def enter(self, eqn: Any, args: Sequence[Any], held: Sequence[Held | None], gathered: dict[int, Any]) -> list[Any]:
        """Run an equation that runs a program."""
        (closed,) = inner_jaxprs(eqn)
        inner, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        known = {var: x for var, x in zip(inner.invars, _inside(eqn, held), strict=True) if x is not None}
        if eqn.primitive.name in _CALLS:
            return self.run(inner, consts, args, known, gathered)
        # Within its own bounds, so that a backward pass that runs it again gathers again.
        run = lambda *args: self.run(inner, consts, args, dict(known), {})  # noqa: E731
        if eqn.primitive.name == "scan":
            return self.scan(eqn, run, args)
        return jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])(*args)

    def scan(self, eqn: Any, run: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        num_consts, num_carries = scan_counts(eqn)
        first = num_consts + num_carries
        # What a user computes again within a layer is gathered again with it; a policy from outside would undo that.
        # Nor can it run effects again: a layer that calls the host is left as it is.
        if not eqn.effects and (self.policy is not None or not _has_remat(eqn)):
            run = jax.checkpoint(run, prevent_cse=False, policy=self.policy or _all_but_gathered)

        def turn(carry: Any, xs: Any) -> tuple[Any, Any]:
            results = run(*args[:num_consts], *carry, *xs)
            return results[:num_carries], results[num_carries:]

        params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, stacked = jax.lax.scan(turn, list(args[num_consts:first]), list(args[first:]), **params)
        return [*carry, *stacked]

    def gather(self, x: Any, held: Held) -> Any:
        lies = self.lies[held.place]
        assert lies is not None
        split, whole = (NamedSharding(s.mesh, _part(s.spec, held.dims)) for s in lies)
        if lies[0] == lies[1]:
            return x
        if not jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):  # it has no gradient
            return jax.lax.with_sharding_constraint(x, whole)
        return _gather(x, split, whole)


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _MADE_ANEW


def _has_remat(eqn: Any) -> bool:
    inner = [getattr(x, "jaxpr", x) for x in inner_jaxprs(eqn)]
    return any(e.primitive.name in _REMATS or _has_remat(e) for x in inner for e in x.eqns)


def _part(spec: Any, dims: Sequence[int]) -> jax.sharding.PartitionSpec:
    return jax.sharding.PartitionSpec(*(spec[dim] if dim < len(spec) else None for dim in dims))


def _gather(x: Any, split: NamedSharding, whole: NamedSharding) -> Any:
    """Return an array as it lies while it is used, whose gradient is split again."""

    @jax.custom_vjp
    def gather(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, whole)

    def forward(x: Any) -> tuple[Any, None]:
        return jax.lax.with_sharding_constraint(x, whole), None

    def backward(_: None, g: Any) -> tuple[Any]:
        return (jax.lax.with_sharding_constraint(g, split),)

    gather.defvjp(forward, backward)
    return gather(x)
