"""The training state as a flat list of arrays on the devices, and what each of them is.

`StateSpec`, known before an array exists; `State`; the hyperparameters that an optimizer keeps in it; and a backup of
what steps write to a module, as it was where an accumulation window began.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxlit import sharding
from jaxlit.checkpoints.module_state import hash_of
from jaxlit.core.log import Table
from jaxlit.core.module import TrainModule
from jaxlit.core.optimizer import averaged
from jaxlit.core.parts import PartStates
from jaxlit.core.pure_module import PureModule
from jaxlit.core.train_state import Layout, TrainState, WindowStart
from jaxlit.distributed.team import fetch
from jaxlit.engine.compiled_program import Bound, is_exhausted, out_of_memory
from jaxlit.errors import ArgumentTypeError, did_you_mean
from jaxlit.strategies.base import ArraySpec, Strategy, like_params
from jaxlit.texts import array_text, is_key, leaf_name
from jaxlit.variables import arrays_of, numbers_in


@dataclass(frozen=True, eq=False)
class StateSpec:
    """What the arrays of a training state are, known before one of them exists; `state_spec` makes it.

    A step takes and returns a flat list: jax's fast path knows lists of arrays, and no other tree is cheaper.
    """

    strategy: Strategy  # the strategy, set up
    layout: Layout  # how the list becomes a `TrainState`
    tree: TrainState  # the shape, dtype and sharding of each array, a `TrainState` as a step takes it
    arrays: list[jax.ShapeDtypeStruct]  # the same as a list, in which random keys are raw data
    wrt: Any  # the filter of the variables that are trained
    grad_shardings: Any  # the gradients' shardings in a step; None lets XLA choose
    eval_params: Any  # the indices of what an evaluation sees as the parameters, a tree like them
    used: Any  # the shardings of the module's arrays where a step uses them, see `Strategy.used_sharding`
    numbers: dict[str, bool | int | float]  # those in the module's Variables, by their paths
    averages: Any = ()  # the indices of what evaluations compute the parameters with, see `averages_of`

    @cached_property
    def index(self) -> TrainState:
        """A `TrainState` whose leaves are indices into the list."""
        return jax.tree.unflatten(self.layout.treedef, range(len(self.arrays)))

    @cached_property
    def shardings(self) -> TrainState:
        """A `TrainState` of shardings."""
        return jax.tree.map(lambda x: x.sharding, self.tree)

    @cached_property
    def is_typed(self) -> bool:
        """Whether arrays of the module have types outside of steps as they have inside: on a mesh of Explicit axes.

        They do if each is stored as it is used. One that is gathered for use stays on Auto axes, and all others with
        it: no operation takes arrays of both kinds.
        """
        stored, used = jax.tree.leaves(self.shardings.variables), jax.tree.leaves(self.used)
        return bool(self.strategy.explicit_axes) and stored == used

    @cached_property
    def array_specs(self) -> list[ArraySpec]:
        """The sharding of each array, as a program takes it."""
        stacked = set(jax.tree.leaves(self.index.window)) if self.per_replica else set()
        return [ArraySpec(self.sharding(i), per_replica=i in stacked) for i in range(len(self.arrays))]

    def outside_array(self, i: int, data: jax.Array) -> jax.Array:
        """Return an array as a module has it outside of steps."""
        data = sharding.renamed(data, self.strategy.model_mesh) if self.is_typed else data
        impl = self.layout.key_impls.get(i)
        return data if impl is None else jax.random.wrap_key_data(data, impl=impl)

    @cached_property
    def eval_index(self) -> list[int]:
        """The indices of what an evaluation reads: counters, parameters and the module's other state."""
        index = self.index
        return jax.tree.leaves((index.counters, self.eval_params, index.frozen, index.model_state, self.averages))

    @cached_property
    def eval_layout(self) -> Layout:
        """How what an evaluation reads becomes counters and the module's variables."""
        view: Callable = lambda tree: (tree[0], averaged(tree[1], tree[4]), *tree[2:4])  # noqa: E731
        return Layout((self.tree.counters, *self.tree.variables, self.averages), view)

    @property
    def wrap(self) -> Callable:
        """What the strategy makes of a user's step."""
        return partial(self.strategy.wrap_body, stored=self.shardings.variables, used=self.used)

    def places(self, numbers: Iterable[int]) -> list[int]:
        """Return the indices of leaves of the module's variables, given their numbers among these."""
        indices = jax.tree.leaves(self.index.variables)
        return [indices[i] for i in numbers]

    def sharding(self, i: int) -> NamedSharding:
        """Return the sharding of an array."""
        return self.arrays[i].sharding  # type: ignore[return-value]

    @property
    def per_replica(self) -> bool:
        """Whether each replica has its own window and sums."""
        return self.strategy.replica.stack_size is not None

    @property
    def replica_sharding(self) -> NamedSharding:
        """The sharding of a window's rows and of sums: split by replica, if each has its own."""
        return _replica_sharding(self.strategy)

    def stacked(self, table: np.ndarray) -> np.ndarray:
        """Return one copy of a table of metrics for each replica that has its own."""
        n = self.strategy.replica.stack_size
        return np.broadcast_to(table, (n, *table.shape)).copy() if n else table

    def with_metrics(self, table: Table) -> "StateSpec":
        """Return the spec of a state with other metrics, whose number of columns is known once the step was traced."""
        index: Any = self.index
        shapes = {index.sums: table.empty_sums().shape}
        if index.window is not None:
            shapes[index.window.metrics] = self.stacked(table.empty()).shape
        arrays = [x.update(shape=shapes.get(i, x.shape)) for i, x in enumerate(self.arrays)]
        leaves = [x.update(shape=shapes.get(i, x.shape)) for i, x in enumerate(jax.tree.leaves(self.tree))]
        return replace(self, arrays=arrays, tree=jax.tree.unflatten(self.layout.treedef, leaves))

    @cached_property
    def entries(self) -> list[tuple[str, tuple[int, ...], str]]:
        """The (name, shape, dtype) of each array as in a checkpoint; a module's are named by their path in it."""
        entries, impls = [], self.layout.key_impls
        for path, i in jax.tree_util.tree_leaves_with_path(self.index):
            part, name, x = path[0].name, leaf_name(path), self.arrays[i]
            if part in ("params", "frozen", "model_state"):
                name = f"module.{leaf_name(path[1:])}"
            elif part == "extras":  # in brackets, as the key may be any text
                inside = leaf_name(path[2:])
                name = f"extras[{path[1].key!r}]" + ("." * (inside[:1] not in ("", "[")) + inside)
            entries.append((name, tuple(x.shape), f"key<{impls[i]}>" if i in impls else str(x.dtype)))
        return entries

    @cached_property
    def evaluated_places(self) -> list[int]:
        """The indices of the parameters, and of averages that evaluations see."""
        return list(dict.fromkeys(jax.tree.leaves((self.index.params, self.eval_params))))

    @cached_property
    def optimizer_kind(self) -> str:
        """The classes in the optimizer's state: optimizers with the same arrays may mean different things by them."""
        return _kind_of(self.index.opt_state)

    def make(self, init: Callable[..., TrainState], variables: Any, *, donate: bool) -> "State":
        """Return the state of step 0, given arguments of `state_spec`; `donate` lets it overwrite the variables."""
        shardings = [self.sharding(i) for i in range(len(self.arrays))]
        create, flatten = self.strategy.create_state, self.layout.flatten
        try:
            return State(self, create(lambda *x: flatten(init(*x)), shardings, *variables, donate=donate))
        except jax.errors.JaxRuntimeError as error:
            if not is_exhausted(error):
                raise
            raise out_of_memory(error, "in making the state of step 0", state=self.tree) from error


def state_spec(
    pure: PureModule, strategy: Strategy, init: Callable[..., TrainState], variables: Any, example: Any = None
) -> StateSpec:
    """Return what the arrays of a module's training state are; none is made.

    `init` is a function of the module's `variables`, arrays or their shapes, to the state of step 0, and `example` the
    first batch of the training, if one is known.
    """
    abstract = jax.eval_shape(init, *jax.tree.map(sharding.untyped, variables))
    # Without the callbacks' arrays and copies of the module's: they have the shardings of what they belong to.
    without_copies, layout = replace(abstract, extras={}, window_start=None), Layout(abstract)
    shardings = _bookkeeping(strategy, abstract, strategy.state_sharding(without_copies, pure, example))
    # With shardings: only equal types share one trace of the user's step.
    tree, flat = jax.tree.map(_spec, abstract, shardings), jax.tree.leaves(shardings)
    arrays = list(map(_spec, jax.eval_shape(layout.flatten, abstract), flat))
    params = jax.tree.unflatten(layout.treedef, range(len(arrays))).params
    grads = strategy.grad_sharding(without_copies, pure, example)
    used, numbers = strategy.used_sharding(shardings, pure), numbers_in(tree.variables)
    return StateSpec(strategy, layout, tree, arrays, pure.wrt, grads, params, used, numbers)


def _bookkeeping(strategy: Strategy, abstract: TrainState, shardings: Any) -> TrainState:
    """Return a strategy's shardings with those of jaxlit's bookkeeping, which no rule on shapes should meet."""
    replicated, window, start = strategy.replicated, shardings.window, abstract.window_start
    if window is not None:
        window = replace(window, metrics=_replica_sharding(strategy))
    if start is not None:
        start = WindowStart(replicated, {name: shardings.module[name] for name in start.arrays})  # type: ignore[arg-type]
    return replace(
        shardings,
        counters=replicated,
        sums=replicated,
        window=window,
        loss_scale=None if abstract.loss_scale is None else replicated,
        extras=like_params(abstract.extras, abstract.params, shardings.params, replicated),
        window_start=start,
    )


class State:
    """The arrays of a training.

    Attributes:
        leaves: The newest arrays, which `spec` describes; random keys as their raw data.
        written: What hooks have written in one of several processes, not compared yet: a text by its name.
        infinities_at_start: What `infinities` returned when training began, None before: a mask has some on purpose.
        hyperparams_at_start: What `hyperparams` returned when training began; a resume continues the same training.
    """

    def __init__(self, spec: StateSpec, leaves: list[jax.Array]) -> None:
        self.spec, self.leaves = spec, leaves
        self.written, self.hyperparams_at_start = dict[str, str](), dict[str, float]()
        self.infinities_at_start: dict[str, float] | None = None
        self._variable_index: list[int] = []  # of each Variable of the module
        self._given: dict[int, tuple[jax.Array, jax.Array]] = {}  # arrays, and what a module was given for them
        self._looks: list[Callable[..., jax.Array]] | None = None
        # The sha256 of arrays that no step writes: now, and at the begin of the fit, "" if one was replaced before.
        self._hashes, self._built = dict[int, str](), dict[int, str]()

    def unflatten(self) -> TrainState:
        """Return the newest state as a `TrainState`."""
        return self.spec.layout.unflatten(self.leaves)

    def branch(self) -> "State":
        """Return a state of the same arrays to evaluate: what is written to one of the two is not in the other."""
        state = copy.copy(self)
        state.leaves, state._given, state.written = list(self.leaves), dict(self._given), {}
        state._hashes, state._built = {}, {}
        # A callback's averages are those of another module.
        state.spec = replace(self.spec, eval_params=self.spec.index.params, averages=())
        return state

    def evaluated(self) -> list[jax.Array]:
        """Return what an evaluation reads, which donates none of it."""
        leaves = self.leaves
        return [leaves[i] for i in self.spec.eval_index]

    def averaged(self) -> list[jax.Array]:
        """Return the parameters that evaluations compute, none where they see arrays of the state."""
        if not self.spec.averages:
            return []
        layout = self.spec.eval_layout
        return self.spec.strategy.on_state(lambda x: jax.tree.leaves(layout.unflatten(x)[1]))(self.evaluated())

    def use_averages(self) -> None:
        """Replace the parameters by those that evaluations compute, after training."""
        if self.spec.averages:
            for i, x in zip(jax.tree.leaves(self.spec.index.params), self.averaged(), strict=True):
                self.leaves[i] = x
            self.spec = replace(self.spec, averages=())

    @property
    def is_complete(self) -> bool:
        """Whether no array is missing or deleted, as after a step or a restore that failed."""
        return not any(x is None or x.is_deleted() for x in self.leaves)

    @property
    def is_ready(self) -> bool:
        """Whether the steps that were dispatched are done: nothing waits for the device then."""
        return bool(self.leaves[self.spec.index.counters].is_ready())  # type: ignore[call-overload]

    def infinities(self) -> dict[str, float]:
        """Return how many infinities the parameters, and averages that evaluations see, have, NaN for a NaN.

        Those that are finite are left out; waits for the device.
        """
        spec, bound = self.spec, Bound(4)  # a computer that simulates devices hangs with many sums under way
        if self._looks is None:
            self._looks = [spec.strategy.on_state(look) for look in (_is_finite, _infinities)]
        is_finite, count = self._looks
        found = dict[int, jax.Array]()
        # One by one: a program is compiled for each shape, not for each array.
        for i in spec.evaluated_places:
            if jnp.issubdtype(self.leaves[i].dtype, jnp.inexact):
                bound(found.setdefault(i, is_finite([self.leaves[i]])))
        counts = {i: int(fetch(count([self.leaves[i]]))) for i, x in found.items() if not fetch(x)}
        return {spec.entries[i][0].removeprefix("module."): n if n >= 0 else math.nan for i, n in counts.items()}

    def not_finite(self) -> list[str]:
        """Return which of these hold a NaN, or more infinities than where training began; waits for the device."""
        return more_infinite(self.infinities(), self.infinities_at_start)

    def hyperparams(self) -> dict[str, float]:
        """Return the numbers that `optax.inject_hyperparams` keeps, by name; waits for the device."""
        places = find_hyperparams(self.spec.index.opt_state)
        return {name: float(fetch(self.leaves[i])) for name, i in places.items() if not self.spec.arrays[i].shape}

    def put(self, index: Any, value: Any) -> None:
        """Replace an array by another, with the same sharding."""
        to = self.spec.sharding(index)
        # Between processes `device_put` compares host values in a collective, but only some may have put one.
        is_local = not to.is_fully_addressable and getattr(value, "is_fully_addressable", True)
        self.leaves[index] = (sharding.place_replicated if is_local else jax.device_put)(value, to)
        self._hashes.pop(index, None)
        self._built.setdefault(index, "")

    def as_built(self, places: Sequence[int]) -> dict[int, str]:
        """Return the sha256 of those arrays that are as the fit began with them, of some that no step writes."""
        for i in places:
            if i not in self._hashes and self._built.get(i) != "":
                self._hashes[i] = hash_of(self.leaves[i])
                self._built.setdefault(i, self._hashes[i])
        return {i: x for i in places if (x := self._hashes.get(i)) is not None and x == self._built[i]}

    def counters(self) -> list[int]:
        """Return step, epoch, batch_idx and bad_step, see `TrainState`; waits for the device."""
        return np.asarray(self.leaves[self.spec.index.counters]).tolist()  # type: ignore[call-overload]

    def count_from(self, step: int, epoch: int, batch_idx: int = 0) -> None:
        """Set what the module's `global_step` and `current_epoch` are in the steps."""
        self.put(self.spec.index.counters, np.array([step, epoch, batch_idx, -1], np.int32))

    def release(self, indices: Iterable[int]) -> dict[int, jax.ShapeDtypeStruct]:
        """Delete some arrays, whose memory is for those that will be restored; return their specs."""
        specs = {i: _spec(self.leaves[i], self.spec.sharding(i)) for i in indices}
        for i in specs:
            self.leaves[i] = None  # type: ignore[call-overload]
        return specs

    def restore(self, arrays: Mapping[int, Any]) -> None:
        """Replace arrays, given by index."""
        for i, array in arrays.items():
            self.put(i, array)

    def module_leaves(self, module: TrainModule) -> list[tuple[str, Any, int]]:
        """Return the (name, place, index) of each array of the module, see `ModuleLeaf`."""
        indices = jax.tree.leaves(self.spec.index.variables)
        pairs = zip(arrays_of(module, self.spec.wrt, nnx.Param, ...), indices, strict=True)
        return [(x.name, x.place, i) for x, i in pairs]

    def variables(self, module: TrainModule) -> list[tuple[str, Any]]:
        """Return the places of the module's arrays and their names, in the order of `module_arrays`."""
        leaves = self.module_leaves(module)
        self._variable_index = [i for _, _, i in leaves]
        return [(name, leaf) for name, leaf, _ in leaves]

    def module_arrays(self) -> list[jax.Array]:
        """Return the newest array of each Variable or attribute, without a copy."""
        keys, is_typed = self.spec.layout.key_impls, self.spec.is_typed
        return [self._outside(i) if is_typed or i in keys else self.leaves[i] for i in self._variable_index]

    def _outside(self, i: int) -> jax.Array:
        """Return a random key, or an array with its type: the same object while its data are the same."""
        data = self.leaves[i]
        if i not in self._given or self._given[i][0] is not data:  # arrays are compared by identity
            self._given[i] = (data, self.spec.outside_array(i, data))
        return self._given[i][1]

    def write(self, arrays: Mapping[int, jax.Array]) -> None:
        """Replace the arrays of some Variables, given by their index in `module_arrays`."""
        for i, array in arrays.items():
            data = jax.random.key_data(array) if is_key(array) else array
            # A copy: what the caller holds must survive the next, donating step.
            self.put(self._variable_index[i], jnp.array(data, copy=True))

    def note(self, name: str, value: Any) -> None:
        """Note what a hook has written, which the processes compare where they meet next."""
        if jax.process_count() > 1:
            self.written[name] = array_text(value) if value.ndim else str(value)


def _replica_sharding(strategy: Strategy) -> NamedSharding:
    per_replica = strategy.replica.stack_size is not None
    return sharding.rows(strategy.mesh, strategy.batch_axes) if per_replica else strategy.replicated


def _spec(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _is_finite(leaves: list[jax.Array]) -> jax.Array:
    """Return whether an array holds neither NaN nor infinity."""
    # Zero times either is NaN, and to sum up is the fastest way to read an array.
    (x,) = leaves
    return jnp.isfinite(jnp.sum((x.astype(jnp.float32) if x.dtype.itemsize < 4 else x) * 0))  # some have no zero


def _infinities(leaves: list[jax.Array]) -> jax.Array:
    """Return how many infinities an array has, -1 for a NaN."""
    (x,) = leaves
    return jnp.where(jnp.isnan(x).any(), -1, jnp.isinf(x).sum())


def more_infinite(found: Mapping[str, float], before: Mapping[str, float] | None) -> list[str]:
    """Return the names with a NaN, or with more infinities than `before`, None if that is not known."""
    return [name for name, n in found.items() if not n <= (n if before is None else before.get(name, 0))]


def _kind_of(state: Any) -> str:
    """Return the names of the state classes in an optimizer's state, in order."""
    if isinstance(state, tuple):
        inside = ", ".join(filter(None, map(_kind_of, state)))
        named = type(state).__name__ if hasattr(state, "_fields") else ""
        return f"{named}({inside})" if inside or named else ""
    if isinstance(state, dict):
        return ", ".join(f"{key}: {inside}" for key, value in state.items() if (inside := _kind_of(value)))
    return ""


class Hyperparams(MutableMapping[str, float]):
    """The hyperparameters that `optax.inject_hyperparams` keeps in the optimizer state."""

    def __init__(self, state: "State") -> None:
        self._state = state

    def __repr__(self) -> str:
        return repr(dict(self))

    def __getitem__(self, name: str) -> float:
        return float(np.asarray(self._state.leaves[self._index(name)]))

    def __setitem__(self, name: str, value: float) -> None:
        i = self._index(name)
        if isinstance(value, (bool, str)):
            raise ArgumentTypeError(f"trainer.hyperparams[{name!r}] takes a number, got {value!r}.")
        self._state.put(i, new := np.asarray(float(value), self._state.leaves[i].dtype))
        self._state.note(f"trainer.hyperparams[{name!r}]", new)

    def __delitem__(self, name: str) -> None:
        raise TypeError("A hyperparameter cannot be deleted. Set it.")

    def __iter__(self) -> Iterator[str]:
        return iter(find_hyperparams(self._state.spec.index.opt_state))

    def __len__(self) -> int:
        return len(find_hyperparams(self._state.spec.index.opt_state))

    def _index(self, name: str) -> int:
        known = find_hyperparams(self._state.spec.index.opt_state)
        if name not in known:
            raise KeyError(
                f"The optimizer has no hyperparameter {name!r} that can be set.{did_you_mean(name, known)} Known: "
                f"{sorted(known)}. Build it as optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)"
                "(learning_rate=1e-3)."
            )
        return known[name]


def find_hyperparams(opt_state: Any) -> dict[str, int]:
    """Return each leaf that `optax.inject_hyperparams` keeps as a hyperparameter, except for schedules, by its name.

    One that several transforms have is named with their labels, for example `learning_rate/head`. One that a part of
    the parameters has is named with the part's name after it; that of the other parameters is named as without parts.

    Args:
        opt_state: The optimizer's state, with the indices of its leaves as leaves.
    """
    states = {"": opt_state.rest} | opt_state.parts if isinstance(opt_state, PartStates) else {"": opt_state}
    leaves = []
    for part, state in states.items():
        for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: hasattr(x, "hyperparams")):
            label = "/".join(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey))
            scheduled = getattr(node, "hyperparams_states", {})
            injected = getattr(node, "hyperparams", {})
            leaves += [(name, label, part, i) for name, i in injected.items() if name not in scheduled]
    names = []
    for name, label, part, _ in leaves:
        # A part's own transform, without a label, is distinguished by the part.
        labels = {x for n, x, p, _ in leaves if n == name and (x or not p)}
        text = f"{name}/{label}" if label and len(labels) > 1 else name
        names.append(f"{text}/{part}" if part and part != label else text)
    numbered = [x if names.count(x) == 1 else f"{x}/{names[:k].count(x)}" for k, x in enumerate(names)]
    return {name: i for name, (*_, i) in zip(numbered, leaves, strict=True)}


class WindowBackup:
    """Keeps copies, on the devices, of what the steps of a window write: statistics, counts and random keys.

    A window that turns out to be bad has run its batches: the parameters are still those before it, these are not.
    `places` are the indices in the state of what steps write, and `arrays` the copies.
    """

    def __init__(self, state: State, places: Sequence[int]) -> None:
        self._state, self.places, self.arrays = state, list(places), list[jax.Array]()
        self._choose = state.spec.strategy.on_state(_choose)

    def keep(self) -> None:
        """Copy the arrays as they are; after a bad step, which only the device knows of, the older copies stay."""
        leaves = self._state.leaves
        now = [leaves[i] for i in self.places]
        self.arrays = self._choose([leaves[self._state.spec.index.counters], *(self.arrays or now), *now])  # type: ignore[call-overload]

    def restore(self) -> None:
        """Put the copies back."""
        self._state.restore(dict(zip(self.places, self.arrays, strict=True)))


def _choose(arrays: list[jax.Array]) -> list[jax.Array]:
    counters, *pairs = arrays
    good, middle = counters[3] < 0, len(pairs) // 2
    return [jnp.where(good, new, old) for old, new in zip(pairs[:middle], pairs[middle:], strict=True)]
