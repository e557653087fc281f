"""The optimizer of a module by its parts: which are trained from which epoch on, and at which learning rates.

A `Part` is left alone until its epoch; `optimizer_of` reads `configure_optimizers`; `Rates` are read off
the program of the optimizer's update.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.extend.core import Literal

from jaxlit.core.module import TrainModule
from jaxlit.core.optimizer import Optimizer, map_params, updates_of
from jaxlit.errors import ModuleError, noting_place
from jaxlit.programs.jaxpr import inline, is_call, run, value_of, variables, walk, walk_back
from jaxlit.texts import leaf_name, named_leaves, shown


@dataclass(frozen=True)
class Part:
    """Parameters that stay as they are before an epoch."""

    label: str  # its name among the parts: of its state in the optimizer's, and of its rate in a row
    names: frozenset[str]  # the parameters' names
    start: int  # the first epoch that trains them
    tx: optax.GradientTransformation | None  # their optimizer; None for one like that of the other parameters


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
    split = optax.partition(transforms, lambda params: map_params(lambda path, _: _at(parts, path), params))

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


def _at(parts: Sequence[Part], path: Any) -> int:
    """Return the number of the part that a parameter is in, from 1, or 0 for none."""
    name = leaf_name(path)
    return next((place for place, part in enumerate(parts, 1) if name in part.names), 0)


def held_in(parts: Sequence[Part], epoch: int) -> frozenset[str]:
    """Return the names of the parameters that an epoch does not train."""
    return frozenset(name for part in parts if epoch < part.start for name in part.names)


def keep_held(held: Collection[str], old: Any, new: Any) -> Any:
    """Return a tree like the parameters, that is `old` where a parameter is held."""
    return jax.tree.map_with_path(lambda path, x, y: x if leaf_name(path) in held else y, old, new) if held else new


def keep_held_state(parts: Sequence[Part], held: Collection[str], old: Any, new: Any) -> Any:
    """Return the state of an optimizer of `by_part`, in which that of a held part has not moved."""
    states = {part.label: old.parts[part.label] for part in parts if part.names <= {*held}}
    return new._replace(parts=new.parts | states) if states else new


def optimizer_of(module: TrainModule, cls: type[TrainModule] | None = None) -> Optimizer:
    """Return what `configure_optimizers` returned, as an `Optimizer` of the module's parameters.

    Args:
        module: The module.
        cls: The class whose method is called; by default the module's.
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


# "complex" makes a number of two parts, which have the same rate.
_AS_IT_IS = ("convert_element_type", "copy", "copy_p", "complex", "sharding_constraint", "optimization_barrier")
_SPREAD = (*_AS_IT_IS, "broadcast_in_dim", "reshape", "squeeze")


@dataclass(frozen=True)
class Rates:
    """The learning rates of an optimizer step."""

    # what they are called in a row: `lr`, or one for each group and each part of the parameters
    names: tuple[str, ...] = ()
    # a function of (the optimizer's state before the step, the loss, the step's index, its epoch) to one () float a
    # name; it is traced into the step
    values: Callable[[Any, jax.Array, jax.Array, jax.Array], list[jax.Array]] = lambda *_: []
    # `updates_of` without the optimizer and its owner, if the rates were read off its program; None: trace it
    update: Callable[[Any, Any, Any, jax.Array], tuple[Any, Any]] | None = None


def rates_of(optimizer: Optimizer, params: Any, parts: Sequence[Part] = ()) -> Rates:
    """Return the learning rates of an optimizer, none where they cannot be read.

    optax keeps a rate inside of closures, each optimizer elsewhere. The program of the update shows it:
    a rate is what an array of updates is multiplied with at the end, a number or one computed of the optimizer's state.
    So it is the true one under any wrapper, whatever its schedule counts. That of a part is 0 until the epoch that
    trains it. The parameters may be abstract.
    """
    scheduled = {} if optimizer.lr_schedule is None else _scheduled(optimizer, params, parts)
    starts, read, update = _read(optimizer, params, parts)
    first_epochs = [*(start for start, _ in scheduled.values()), *starts.values()]

    def values(state: Any, loss: jax.Array, step: jax.Array, epoch: jax.Array) -> list[jax.Array]:
        rates = [*(rate(state, step) for _, rate in scheduled.values()), *read(state, loss)]
        return [jnp.where(epoch < start, 0, x) if start else x for start, x in zip(first_epochs, rates, strict=True)]

    return Rates((*scheduled, *starts), values, update)


def _scheduled(optimizer: Optimizer, params: Any, parts: Sequence[Part]) -> dict[str, Any]:
    """Return the rates of `lr_schedule`: by name the first epoch, and a function of (optimizer's state, step).

    The optimizer's own count is used: it starts again where its state was left out of a resume, and in a part with its
    first step. A part that counts otherwise has no rate in a row, as the step's index is not its count.
    """
    schedule: Any = optimizer.lr_schedule
    state = jax.eval_shape(optimizer.tx.init, params)
    counts: dict[str, int] = {}  # the index of each part's count, by its label
    leaves: Any = enumerate(jax.tree.leaves_with_path(state))
    for i, (path, x) in leaves:
        part = path[1].key if isinstance(state, PartStates) and path[0].name == "parts" else ""
        if leaf_name(path).split(".")[-1] == "count" and x.shape == () and jnp.issubdtype(x.dtype, jnp.integer):
            counts.setdefault(part, i)

    def rate(label: str) -> Callable:
        i = counts.get(label)
        return lambda state, step: _number(schedule(step if i is None else jax.tree.leaves(state)[i]))

    # Another transform has another rate.
    like = {f"lr/{x.label}": (x.start, rate(x.label)) for x in parts if x.tx is None and x.label in counts}
    return {"lr": (0, rate(""))} | like


def _read(optimizer: Optimizer, params: Any, parts: Sequence[Part]) -> tuple[dict[str, int], Callable, Any]:
    """Return the first epoch of each rate without a schedule, by name, a function of (state, loss), `Rates.update`."""
    names = [name for name, _ in named_leaves(params)]
    wanted = set(names)
    if optimizer.lr_schedule is not None:
        wanted = {name for part in parts if part.tx is not None for name in part.names}
    try:
        # Where jit is disabled a conditional would be taken in Python, for which it needs its value.
        with jax.disable_jit(False):
            program = _Program(optimizer.tx, params)
            factors = [program.factors(i) if name in wanted else [] for i, name in enumerate(names)]
    except Exception:  # an update that fails is reported where the step is traced
        return {}, lambda *_: [], None
    of_parameter = _named(names, optimizer.groups, [_key(x) for x in factors])
    starts = {name: part.start for part in parts for name in part.names}
    values = program.values([factors[i] for i in of_parameter.values()])
    update = None if jax.config.jax_disable_jit else program.update  # type: ignore[attr-defined]  # which is Python then
    return {name: starts.get(names[i], 0) for name, i in of_parameter.items()}, values, update


def _named(names: Sequence[str], groups: Mapping[str, str], keys: Sequence[Any]) -> dict[str, int]:
    """Return what the rates are called in a row, with the index of a parameter that each is the rate of."""
    labels, of_parameter = [groups.get(name, "") for name in names], {}
    for label in dict.fromkeys(["", *groups.values()]):  # what is in no group first
        first = {}  # the first parameter of each of the group's rates
        for i, key in enumerate(keys):
            if labels[i] == label and key is not None:
                first.setdefault(key, i)
        name = f"lr/{label}" if label else "lr"
        of_parameter |= {f"{name}/pg{k}" if len(first) > 1 else name: i for k, i in enumerate(first.values(), 1)}
    return of_parameter


class _Program:
    """The program of an optimizer's update, for abstract parameters."""

    def __init__(self, tx: optax.GradientTransformation, params: Any) -> None:
        # As in a step, of types that are not weak.
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(tx.init, params))
        update, count = partial(updates_of, tx, owner=""), len(jax.tree.leaves(params))
        closed, self._shapes = jax.make_jaxpr(update, return_shape=True)(params, state, params, jnp.zeros(()))
        ends = {*variables(closed.jaxpr.outvars[:count])}
        if any(is_call(eqn) and not ends.isdisjoint(eqn.outvars) for eqn in closed.jaxpr.eqns):
            closed = inline(closed)  # a transform that was given to jax.jit; else it would only take time
        self.jaxpr, self.consts = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self.inputs = [*self.jaxpr.invars[count : -count - 1], self.jaxpr.invars[-1]]  # the state and the loss
        self.made_by = {x: eqn for eqn in self.jaxpr.eqns for x in eqn.outvars}
        self.of_step = {*self.jaxpr.invars} - {*self.inputs}  # what depends on gradients or parameters
        for eqn in self.jaxpr.eqns:
            if not self.of_step.isdisjoint(variables(eqn.invars)):
                self.of_step.update(eqn.outvars)

    def update(self, *args: Any) -> tuple[Any, Any]:
        """Run the program on (grads, state, params, loss)."""
        results = run(self.jaxpr, [*self.consts.values()], jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self._shapes), results)

    def factors(self, i: int) -> list:
        """Return what the updates of a parameter are multiplied with at the end: variables, literals, None for -1.

        From the end it goes inwards until the sign has changed, as it does where a rate makes a descent of a gradient.
        Factors further inside are the optimizer's, such as the number by which Muon scales a matrix.
        """
        var, factors, is_rate, descends = self.jaxpr.outvars[i], [], False, False
        while not (is_rate and descends) and not isinstance(var, Literal) and (eqn := self.made_by.get(var)):
            name, factor, var = eqn.primitive.name, None, eqn.invars[0]
            if name in _AS_IT_IS:
                continue
            if name == "mul":
                sides = [self._scalar(x) for x in eqn.invars]
                numbers = [k for k, x in enumerate(sides) if x is not None]
                # A number that is computed of the layer, such as LAMB's trust ratio, is no rate.
                free = [k for k in numbers if self.of_step.isdisjoint(variables([sides[k]]))]
                places = free or numbers
                if len(places) != 1:
                    break
                var = eqn.invars[1 - places[0]]
                if not free:
                    continue
                factor = sides[free[0]]
            elif name != "neg":
                break
            factors.append(factor)
            is_rate |= factor is not None and not (isinstance(factor, Literal) and abs(factor.val) == 1)
            descends ^= self._is_negative(factor)
        return factors if is_rate else []  # else it is a sign, with the rate elsewhere

    def _is_negative(self, factor: Any) -> bool:
        """Return whether a factor changes the sign, by how it is written."""
        if factor is None or isinstance(factor, Literal):
            return factor is None or bool(factor.val < 0)
        eqn = self.made_by.get(factor)
        name, inputs = (eqn.primitive.name, eqn.invars) if eqn else ("", [])
        return name == "neg" or (name == "mul" and any(isinstance(x, Literal) and x.val < 0 for x in inputs))

    def _scalar(self, x: Any) -> Any:
        """Return the number that is spread to an array, as it was before it was rounded to the array's dtype."""
        while not isinstance(x, Literal) and (eqn := self.made_by.get(x)) is not None and eqn.primitive.name in _SPREAD:
            if eqn.primitive.name not in _AS_IT_IS and eqn.invars[0].aval.size != 1:
                return None
            x = eqn.invars[0]
        return x if getattr(x.aval, "shape", None) == () else None

    def values(self, rates: Sequence[Sequence]) -> Callable:
        """Return a function of (state, loss) to the values of rates, each given by its factors."""
        needed = dict.fromkeys(variables([x for factors in rates for x in factors if x is not None]))
        eqns = walk_back(self.jaxpr.eqns, needed)

        def compute(state: Any, loss: jax.Array) -> list[jax.Array]:
            known = walk(eqns, self.consts | dict(zip(self.inputs, jax.tree.leaves((state, loss)), strict=True)))
            factors = [[-1.0 if x is None else value_of(x, known) for x in xs] for xs in rates]
            return [_number(-math.prod(xs, start=1.0)) for xs in factors]

        return compute


def _key(factors: Sequence[Any]) -> Any:
    """Return what two parameters of one rate have in common: the variables or equal numbers; None without a rate."""
    return tuple(float(x.val) if isinstance(x, Literal) else x for x in factors) or None


def _number(x: Any) -> jax.Array:
    return jnp.asarray(x, float).reshape(())
