"""Arrays that are gathered where a step uses them: those of layers that it scans over one layer at a time."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jaxlit.programs.jaxpr import JITS, REMATS, bind, bodies, equations, follow, inner_jaxprs, run, scan_counts

# What a backward pass computes again: gathered weights, and what only changes their layout.
_RECOMPUTED = ("sharding_constraint", "reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "split", "copy")
_ENTERED = (*JITS, *REMATS, "scan")


class Stacked(NamedTuple):
    """An input of a program that is followed through it, or a slice of one.

    Attributes:
        index: Which input it is.
        dims: The input's dims that this value has, in its order.
        is_slice: Whether it is a slice in a scan.
    """

    index: int
    dims: tuple[int, ...]
    is_slice: bool = False


_Followed = Sequence[Stacked | None]  # of each input of an equation or a program, None for another value


def scanned_dims(closed: Any, inputs: Sequence[int]) -> dict[int, set[int]]:
    """Return by input the dims that a scan of the program takes one by one.

    Args:
        closed: The program.
        inputs: The inputs to look at.
    """
    scanned: dict[int, set[int]] = {}
    _follow(closed.jaxpr, _stacked_inputs(closed.jaxpr, inputs), scanned)
    return scanned


def _stacked_inputs(jaxpr: Any, inputs: Sequence[int]) -> _Followed:
    return [Stacked(i, tuple(range(x.aval.ndim))) if i in inputs else None for i, x in enumerate(jaxpr.invars)]


def _follow(jaxpr: Any, inputs: _Followed, scanned: dict[int, set[int]]) -> None:
    def rule(eqn: Any, given: _Followed) -> _Followed:
        if any(given) and (inner := _entered(eqn)) is not None:
            inside = _inside(eqn, given)
            if eqn.primitive.name == "scan":
                for outer in itertools.compress(given, inside):
                    assert outer is not None
                    scanned.setdefault(outer.index, set()).add(outer.dims[0])
            _follow(inner, inside, scanned)
        return [_moved(eqn, given)] + [None] * (len(eqn.outvars) - 1)

    follow(jaxpr, inputs, rule, None)


def _moved(eqn: Any, given: _Followed) -> Stacked | None:
    """Return an equation's result as a stacked input, None if it is another value."""
    if not given or given[0] is None or len(eqn.outvars) != 1:
        return None
    if eqn.primitive.name == "transpose":
        return given[0]._replace(dims=tuple(given[0].dims[i] for i in eqn.params["permutation"]))
    return given[0] if eqn.primitive.name in ("convert_element_type", "copy", "copy_p") else None


def _entered(eqn: Any) -> Any:
    """Return the program that an equation runs on its inputs, one by one, or on slices of them; else None."""
    inner = bodies(eqn) if eqn.primitive.name in _ENTERED else []
    return inner[0] if len(inner) == 1 and len(inner[0].invars) == len(eqn.invars) else None


def _inside(eqn: Any, given: _Followed) -> _Followed:
    """Return the values in the program that an equation runs."""
    if eqn.primitive.name != "scan":
        return list(given)
    first = sum(scan_counts(eqn))
    # A constant of a scan is one array in all turns; a carry is another one in each.
    return [None] * first + [x and x._replace(dims=x.dims[1:], is_slice=True) for x in given[first:]]


def by_layer(
    body: Callable[..., Any], shardings: Sequence[tuple[NamedSharding, NamedSharding] | None], policy: Any = None
) -> Callable[..., Any]:
    """Return a function that gathers its arrays where they are used, those of scans slice by slice.

    Without it XLA may split what the layers compute, and move activations between the devices for each of them, where
    the weights of one layer are less: it does so for all layers if an embedding is split along its features. Slices are
    gathered forward and again backward; an array that no scan takes apart is gathered once.

    Args:
        body: The function, of pytrees of arrays.
        shardings: For each of its first leaves how it is split, and how a slice of it is sharded while it is used; None
            for a leaf that stays as it is.
        policy: Of `jax.checkpoint_policies`, what of a turn is kept for the backward pass; None for all but what was
            gathered.
    """

    def call(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(*args)
        inputs = [i for i, x in enumerate(shardings) if x is not None]
        given, scanned = _stacked_inputs(closed.jaxpr, inputs), frozenset(scanned_dims(closed, inputs))
        gathering = _Gathering(shardings, scanned, policy)
        results = gathering.run(closed.jaxpr, closed.consts, jax.tree.leaves(args), given)
        return jax.tree.structure(shapes).unflatten(results)

    return call


class _Value(NamedTuple):
    """An array in a program, and the stacked input that it is."""

    array: Any
    stacked: Stacked | None = None


@dataclass(frozen=True)
class _Gathering:
    """Runs a program, and gathers slices where they are used."""

    shardings: Sequence[tuple[NamedSharding, NamedSharding] | None]
    scanned: frozenset[int]  # the inputs that a scan takes apart, of which only slices are gathered
    policy: Any

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        stacked: _Followed,
        gathered: dict[int, Any] | None = None,
    ) -> list[Any]:
        """Run a program.

        Args:
            jaxpr: The program.
            consts: Its constants.
            args: Its inputs.
            stacked: Which stacked input each of them is.
            gathered: By the identity of a slice, the slice and what was gathered. It holds the slice, as another value
                could have its identity otherwise.
        """
        cache = {} if gathered is None else gathered

        def used(x: _Value) -> Any:
            if x.stacked is None or (x.stacked.index in self.scanned and not x.stacked.is_slice):
                return x.array
            if id(x.array) not in cache:
                cache[id(x.array)] = (x.array, self.gather(x.array, x.stacked))
            return cache[id(x.array)][1]

        def rule(eqn: Any, given: list[_Value]) -> list[_Value]:
            arrays, kinds = [x.array for x in given], [x.stacked for x in given]
            if (moved := _moved(eqn, kinds)) is not None:
                return [_Value(bind(eqn, arrays)[0], moved)]
            if _entered(eqn) is not None and any(_inside(eqn, kinds)):
                return list(map(_Value, self.enter(eqn, arrays, kinds, cache)))
            return list(map(_Value, bind(eqn, list(map(used, given)))))

        read = lambda x, values: _Value(x.val) if isinstance(x, core.Literal) else values[x]  # noqa: E731
        inputs = list(map(_Value, args, stacked))
        return list(map(used, run(jaxpr, list(map(_Value, consts)), inputs, rule, read)))

    def enter(self, eqn: Any, args: Sequence[Any], stacked: _Followed, gathered: dict[int, Any]) -> list[Any]:
        """Run an equation that runs a program."""
        (closed,) = inner_jaxprs(eqn)
        inner, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        inside = _inside(eqn, stacked)
        if eqn.primitive.name in JITS:
            return self.run(inner, consts, args, inside, gathered)
        # Nothing gathered outside is used: a backward pass that runs the program again must gather again.
        again = lambda *args: self.run(inner, consts, args, inside)  # noqa: E731
        if eqn.primitive.name != "scan":
            return jax.checkpoint(again, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])(*args)
        num_consts, num_carries = scan_counts(eqn)
        first = num_consts + num_carries
        # A layer that its user wraps in a checkpoint gathers again in it; a policy from outside would undo that.
        # Effects cannot run twice: a layer that calls the host is left as it is.
        has_remat = any(x.primitive.name in REMATS for x in equations(inner))
        if not eqn.effects and (self.policy is not None or not has_remat):
            again = jax.checkpoint(again, prevent_cse=False, policy=self.policy or _all_but_gathered)

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            results = again(*args[:num_consts], *carry, *xs)
            return results[:num_carries], results[num_carries:]

        params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, made = jax.lax.scan(body, list(args[num_consts:first]), list(args[first:]), **params)
        return [*carry, *made]

    def gather(self, x: Any, stacked: Stacked) -> Any:
        pair = self.shardings[stacked.index]
        assert pair is not None
        if pair[0] == pair[1]:
            return x
        split, gathered = (
            NamedSharding(s.mesh, PartitionSpec(*(s.spec[dim] if dim < len(s.spec) else None for dim in stacked.dims)))
            for s in pair
        )
        if not jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):  # it has no gradient
            return jax.lax.with_sharding_constraint(x, gathered)
        return _gather(x, split, gathered)


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _RECOMPUTED


def _gather(x: Any, split: NamedSharding, gathered: NamedSharding) -> Any:
    """Return an array gathered for use, whose gradient is split again."""
    constrain = jax.lax.with_sharding_constraint
    gather = jax.custom_vjp(lambda x: constrain(x, gathered))
    gather.defvjp(lambda x: (constrain(x, gathered), None), lambda _, g: (constrain(g, split),))
    return gather(x)
