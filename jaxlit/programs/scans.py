"""Gathers arrays where a step uses them, those of scanned layers one layer at a time; finds what scans take apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxlit.programs import jaxpr as programs
from jaxlit.programs.jaxpr import JITS, bind, equations, follow, inner_jaxprs, parts_of, remat_of, rerun_scan, run
from jaxlit.sharding import explicit_axes

# What a backward pass computes again: gathered weights, and what only changes their layout.
_LAYOUT = ("reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "split", "copy")
_RECOMPUTED = ("sharding_constraint", "reshard", *_LAYOUT)


class InputPart(NamedTuple):
    """An input of a program that is followed through it, or a slice of one."""

    index: int
    dims: tuple[int, ...]  # the input's dims that this value has, in its order
    is_slice: bool = False  # in a scan


_BATCH = InputPart(-1, ())  # a value that depends on the batch
_Followed = Sequence[InputPart | None]  # of each input of an equation or a program, None for another value


def scanned_dims(closed: Any, inputs: Sequence[int], batch: Sequence[int] = ()) -> dict[int, set[int]]:
    """Return for those of some inputs that scans of a program take apart the dims that they take one by one.

    With the places of the batch, only those of layers: of scans with a carry, which take nothing of the batch apart.
    """
    scanned: dict[int, set[int]] = {}
    followed = [_BATCH if i in batch else x for i, x in enumerate(_stacked_inputs(closed.jaxpr, inputs))]
    _follow(closed.jaxpr, followed, scanned, of_layers=bool(batch))
    return scanned


def _stacked_inputs(jaxpr: Any, inputs: Sequence[int]) -> _Followed:
    return [InputPart(i, tuple(range(x.aval.ndim))) if i in inputs else None for i, x in enumerate(jaxpr.invars)]


def _follow(jaxpr: Any, inputs: _Followed, scanned: dict[int, set[int]], *, of_layers: bool = False) -> None:
    def rule(eqn: Any, ins: _Followed) -> _Followed:
        if any(ins) and (inner := _entered(eqn)) is not None:
            if eqn.primitive.name == "scan":
                consts, carries = programs.scan_counts(eqn)
                outers = [x for x in ins[consts + carries :] if x is not None]
                if not of_layers or (_BATCH not in outers and carries):
                    for outer in outers:
                        scanned.setdefault(outer.index, set()).add(outer.dims[0])
            _follow(inner, _inside(eqn, ins), scanned, of_layers=of_layers)
        if _BATCH in ins:
            return [_BATCH] * len(eqn.outvars)
        return [_moved(eqn, ins)] + [None] * (len(eqn.outvars) - 1)

    follow(jaxpr, inputs, rule, None)


def _moved(eqn: Any, ins: _Followed) -> InputPart | None:
    """Return an equation's result as a stacked input, None if it is another value."""
    if not ins or (first := ins[0]) is None or len(eqn.outvars) != 1:
        return None
    if eqn.primitive.name == "transpose":
        return first._replace(dims=tuple(first.dims[i] for i in eqn.params["permutation"]))
    return first if eqn.primitive.name in ("convert_element_type", "copy", "copy_p") else None


def _entered(eqn: Any) -> Any:
    """Return the program that an equation runs on its inputs, one by one, or on slices of them; else None."""
    if eqn.primitive.name not in (*JITS, "scan") and not remat_of(eqn):
        return None
    inner = [parts_of(x)[0] for x in inner_jaxprs(eqn)]
    return inner[0] if len(inner) == 1 and len(inner[0].invars) == len(eqn.invars) else None


def _inside(eqn: Any, ins: _Followed) -> _Followed:
    """Return the values in the program that an equation runs."""
    if eqn.primitive.name != "scan":
        return list(ins)
    # Not constants, which are one array in all turns, nor carries, which are another one in each.
    first = sum(programs.scan_counts(eqn))
    inside = [x if x is _BATCH else None for x in ins[:first]]
    return inside + [x if x is None or x is _BATCH else x._replace(dims=x.dims[1:], is_slice=True) for x in ins[first:]]


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
        used = {i: pair[1] for i, pair in enumerate(shardings) if pair is not None}
        has_types, inputs = any(explicit_axes(x.mesh) for x in used.values()), [*used]
        leaves, treedef = jax.tree.flatten(args)
        types = list(leaves)
        for i in inputs if has_types else ():  # the body is for arrays of the types in which they are used
            types[i] = jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype, sharding=used[i])
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(*treedef.unflatten(types))
        gathering = _Gathering(shardings, frozenset(scanned_dims(closed, inputs)), policy, has_types)
        results = gathering.run(closed, leaves, _stacked_inputs(closed.jaxpr, inputs))
        # What the body returns as it was stays split: an optimizer that reads it would keep it gathered until then.
        results = [x if i is None else leaves[i] for x, i in zip(results, programs.origins(closed.jaxpr), strict=True)]
        return jax.tree.structure(shapes).unflatten(results)

    return call


class _Value(NamedTuple):
    """An array in a program, and the stacked input that it is."""

    array: Any
    stacked: InputPart | None = None


@dataclass(frozen=True)
class _Gathering:
    """Runs a program, and gathers slices where they are used."""

    shardings: Sequence[tuple[NamedSharding, NamedSharding] | None]
    scanned: frozenset[int]  # the inputs that a scan takes apart, of which only slices are gathered
    policy: Any
    has_types: bool  # whether shardings are part of the types of arrays

    def run(
        self, program: Any, args: Sequence[Any], stacked: _Followed, gathered: dict[int, Any] | None = None
    ) -> list[Any]:
        """Run a program, given its inputs and which stacked input each of them is."""
        # By the identity of a slice: the slice, without which another value could have this identity, and it gathered.
        cache = {} if gathered is None else gathered
        jaxpr, consts = parts_of(program)

        def used(x: _Value) -> Any:
            if x.stacked is None or (x.stacked.index in self.scanned and not x.stacked.is_slice):
                return x.array
            if id(x.array) not in cache:
                cache[id(x.array)] = (x.array, self._gather(x.array, x.stacked))
            return cache[id(x.array)][1]

        def rule(eqn: Any, ins: list[_Value]) -> list[_Value]:
            arrays, kinds = [x.array for x in ins], [x.stacked for x in ins]
            if (moved := _moved(eqn, kinds)) is not None:
                return [_Value(bind(eqn, arrays)[0], moved)]
            if _entered(eqn) is not None and any(inside := _inside(eqn, kinds)):
                # A constant of a scan has the type inside that it has outside.
                arrays = [x.array if y or not self.has_types else used(x) for x, y in zip(ins, inside, strict=True)]
                return list(map(_Value, self._enter(eqn, arrays, kinds, cache)))
            return list(map(_Value, bind(eqn, list(map(used, ins)))))

        values = run(jaxpr, list(map(_Value, consts)), list(map(_Value, args, stacked)), rule, lambda x: _Value(x.val))
        return list(map(used, values))

    def _enter(self, eqn: Any, args: Sequence[Any], stacked: _Followed, gathered: dict[int, Any]) -> list[Any]:
        """Run an equation that runs a program."""
        (inner,), inside = inner_jaxprs(eqn), _inside(eqn, stacked)
        if eqn.primitive.name in JITS:
            return self.run(inner, args, inside, gathered)

        def body(*args: Any) -> list[Any]:
            # Nothing gathered outside is used: a backward pass that runs the program again must gather again.
            return self.run(inner, args, inside)

        if eqn.primitive.name != "scan":
            return jax.checkpoint(body, **remat_of(eqn))(*args)
        # A layer that its user wraps in a checkpoint gathers again in it; a policy from outside would undo that.
        # Effects cannot run twice: a layer that calls the host is not changed.
        has_remat = any(map(remat_of, equations(parts_of(inner)[0])))
        if not eqn.effects and (self.policy is not None or not has_remat):
            body = jax.checkpoint(body, prevent_cse=False, policy=self.policy or _all_but_gathered)
        return rerun_scan(eqn, args, body)

    def _gather(self, x: Any, stacked: InputPart) -> Any:
        """Return an array gathered for use, whose gradient is split again."""
        pair, constrain = self.shardings[stacked.index], jax.lax.with_sharding_constraint
        assert pair is not None
        if pair[0] == pair[1]:
            return x
        split, gathered = (
            NamedSharding(s.mesh, PartitionSpec(*(s.spec[dim] if dim < len(s.spec) else None for dim in stacked.dims)))
            for s in pair
        )
        if self.has_types:  # in its mesh: gathers of jax are in one of Auto axes
            with jax.sharding.use_abstract_mesh(gathered.mesh.abstract_mesh):
                return jax.sharding.reshard(x, gathered)
        if not jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):  # it has no gradient
            return constrain(x, gathered)
        gather = jax.custom_vjp(lambda x: constrain(x, gathered))
        gather.defvjp(lambda x: (constrain(x, gathered), None), lambda _, g: (constrain(g, split),))
        return gather(x)


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _RECOMPUTED
