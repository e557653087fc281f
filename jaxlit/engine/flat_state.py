"""The training state as a flat list of arrays on the devices: what each array is, and its sharding."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxlit import sharding
from jaxlit.core.module import TrainModule
from jaxlit.core.pure_module import PureModule
from jaxlit.core.state import Layout, TrainState, WindowStart
from jaxlit.engine.memory import is_exhausted, out_of_memory
from jaxlit.leaf_names import is_key, leaf_name
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.like_params import like_params
from jaxlit.strategies.program import ArraySpec


class FlatState:
    """The arrays of a training, and the index of each part of the state among them.

    A step takes and returns the list as it is: jax's fast path knows lists of arrays, and no other tree is cheaper.

    Args:
        pure: The module taken apart.
        strategy: The strategy, set up.
        init: A function of the module's trained, frozen and other variables to the state of step 0.
        variables: These variables.
        donate: Whether their arrays may be overwritten.
        example: The first batch of the training, if one is known.

    Attributes:
        strategy: See above.
        leaves: The newest arrays; random keys as their raw data.
        layout: How the list becomes a `TrainState`.
        index: A `TrainState` whose leaves are indices into the list.
        eval_index: The indices of what an evaluation reads: counters, parameters and the module's other state.
        eval_layout: How those become a tuple of the four.
        sharding_tree: A `TrainState` of shardings.
        shardings: The same as a list.
        grad_shardings: The gradients' shardings in a step, None lets XLA choose.
        array_specs: The spec of each array, as a program takes it.
    """

    def __init__(
        self,
        pure: PureModule,
        strategy: Strategy,
        init: Callable[..., TrainState],
        variables: Any,
        *,
        donate: bool,
        example: Any = None,
    ) -> None:
        self._model, self.strategy = pure, strategy
        abstract = jax.eval_shape(init, *variables)
        self.layout = Layout(abstract)
        self.sharding_tree = self._state_sharding(abstract, example)
        self.grad_shardings = strategy.grad_sharding(replace(abstract, extras={}, window_start=None), pure, example)
        self.shardings: list[NamedSharding] = jax.tree.leaves(self.sharding_tree)
        try:
            self.leaves: list[jax.Array] = strategy.create_state(
                lambda *inputs: self.layout.flatten(init(*inputs)), self.shardings, *variables, donate=donate
            )
        except jax.errors.JaxRuntimeError as error:
            if not is_exhausted(error):
                raise
            state = jax.tree.map(_spec, abstract, self.sharding_tree)
            raise out_of_memory(error, "in making the state of step 0", state=state) from error
        index = self.index = jax.tree.unflatten(self.layout.treedef, range(len(self.leaves)))
        stacked = set(jax.tree.leaves(index.window)) if self.per_replica else set()
        self.array_specs = [ArraySpec(sharding, per_replica=i in stacked) for i, sharding in enumerate(self.shardings)]
        self.eval_index = self.evaluated(index.params)
        self.eval_layout = Layout((abstract.counters, *abstract.variables))
        self._variable_index: list[int] = []  # of each Variable of the module
        self._keys: dict[int, tuple[jax.Array, jax.Array]] = {}  # data and key of those that a module was given
        self._all_finite: Callable[..., jax.Array] | None = None

    def evaluated(self, params: Any) -> list[int]:
        """Return the indices of what an evaluation reads, with the parameters at these."""
        return jax.tree.leaves((self.index.counters, params, self.index.frozen, self.index.model_state))

    def unflatten(self) -> TrainState:
        """Return the newest state as a `TrainState`."""
        return self.layout.unflatten(self.leaves)

    def abstract(self) -> TrainState:
        """Return the state's shapes and dtypes, typed as a step takes them."""
        # With their shardings: only equal types share one trace of the user's step.
        return jax.tree.map(lambda x: _spec(x, x.sharding), self.unflatten())

    def stored(self, leaves: list[jax.Array] | None = None) -> TrainState | None:
        """Return the shape, dtype and sharding of every array as it is stored, also of one that was overwritten.

        None if a restore that failed has left some out.

        Args:
            leaves: The arrays of another state like this one.
        """
        leaves = self.leaves if leaves is None else leaves
        if any(x is None for x in leaves):
            return None
        return jax.tree.unflatten(self.layout.treedef, [_spec(x, x.sharding) for x in leaves])

    def branch(self) -> "FlatState":
        """Return a state of the same arrays to evaluate: what is written to one of the two is not in the other."""
        state = copy.copy(self)
        state.leaves, state._keys = list(self.leaves), dict(self._keys)
        state.eval_index = self.evaluated(self.index.params)  # a callback's averages are those of another module
        return state

    @property
    def is_complete(self) -> bool:
        """Whether every array exists; a step or a restore that failed may have deleted some."""
        return not any(x is None or x.is_deleted() for x in self.leaves)

    @property
    def is_ready(self) -> bool:
        """Whether the steps that were dispatched are done: nothing waits for the device then."""
        return bool(self.leaves[self.index.counters].is_ready())  # type: ignore[call-overload]

    def is_finite(self) -> bool:
        """Return whether every floating number of the state is finite; waits for the device."""
        if self._all_finite is None:
            self._all_finite = self.strategy.on_state(lambda xs: jnp.stack([jnp.isfinite(x).all() for x in xs]).all())
        return bool(self._all_finite([x for x in self.leaves if jnp.issubdtype(x.dtype, jnp.floating)]))

    # One array --------------------------------------------------------------------------------------

    def put(self, index: Any, value: Any) -> None:
        """Replace an array by another, with the same sharding."""
        self.leaves[index] = jax.device_put(value, self.shardings[index])

    def counters(self) -> list[int]:
        """Return step, epoch, batch_idx and bad_step, see `TrainState`; waits for the device."""
        return np.asarray(self.leaves[self.index.counters]).tolist()  # type: ignore[call-overload]

    def count_from(self, step: int, epoch: int, batch_idx: int = 0) -> None:
        """Set what the module's `global_step` and `current_epoch` are in the steps."""
        self.put(self.index.counters, np.array([step, epoch, batch_idx, -1], np.int32))

    # Checkpoints ------------------------------------------------------------------------------------

    @property
    def specs(self) -> list[tuple[str, tuple[int, ...], str]]:
        """The (name, shape, dtype) of each array; a module's are named by their path in it."""
        specs, impls = [], self.layout.key_impls
        for path, i in jax.tree_util.tree_leaves_with_path(self.index):
            part, name = path[0].name, leaf_name(path)
            if part in ("params", "frozen", "model_state"):
                name = f"module.{leaf_name(path[1:])}"
            elif part == "extras":  # in brackets, as the key may be any text
                inside = leaf_name(path[2:])
                name = f"extras[{path[1].key!r}]" + ("." * (inside[:1] not in ("", "[")) + inside)
            dtype = f"key<{impls[i]}>" if i in impls else str(self.leaves[i].dtype)
            specs.append((name, tuple(self.leaves[i].shape), dtype))
        return specs

    @property
    def optimizer_kind(self) -> str:
        """How the optimizer's state is built: optimizers with the same arrays may mean different things by them."""
        return _kind_of(self.index.opt_state)

    def release(self, indices: Iterable[int]) -> dict[int, jax.ShapeDtypeStruct]:
        """Delete some arrays, whose memory is for those that will be restored; return their specs."""
        specs = {i: _spec(self.leaves[i], self.shardings[i]) for i in indices}
        for i in specs:
            self.leaves[i] = None  # type: ignore[call-overload]
        return specs

    def restore(self, arrays: Mapping[int, Any]) -> None:
        """Replace arrays, given by index."""
        for i, array in arrays.items():
            self.put(i, array)

    # The user's module ------------------------------------------------------------------------------

    def module_leaves(self, module: TrainModule) -> list[tuple[str, Any, int]]:
        """Return the (name, Variable or bare array, index) of each leaf of the module."""
        _, *states = nnx.split(module, self._model.wrt, nnx.Param, ...)
        indices = jax.tree.leaves(self.index.variables)
        leaves = jax.tree_util.tree_leaves_with_path(states, is_leaf=lambda x: isinstance(x, nnx.Variable))
        return [(leaf_name(path[1:]), leaf, i) for (path, leaf), i in zip(leaves, indices, strict=True)]

    def variables(self, module: TrainModule) -> list[tuple[str, nnx.Variable]]:
        """Return the module's Variables and their names, in the order of `module_arrays`."""
        leaves = [x for x in self.module_leaves(module) if isinstance(x[1], nnx.Variable)]
        self._variable_index = [i for _, _, i in leaves]
        return [(name, variable) for name, variable, _ in leaves]

    def module_arrays(self) -> list[jax.Array]:
        """Return the newest array of each Variable, without a copy."""
        return [self._key(i) if i in self.layout.key_impls else self.leaves[i] for i in self._variable_index]

    def _key(self, i: int) -> jax.Array:
        """Return a random key, the same object while its data are the same: arrays are compared by identity."""
        data = self.leaves[i]
        if i not in self._keys or self._keys[i][0] is not data:
            self._keys[i] = (data, jax.random.wrap_key_data(data, impl=self.layout.key_impls[i]))
        return self._keys[i][1]

    def write(self, arrays: Mapping[int, jax.Array]) -> None:
        """Replace the arrays of some Variables, given by their index in `module_arrays`."""
        for i, array in arrays.items():
            data = jax.random.key_data(array) if is_key(array) else array
            # A copy: what the caller holds must survive the next, donating step.
            self.put(self._variable_index[i], jnp.array(data, copy=True))

    # Per replica ------------------------------------------------------------------------------------

    @property
    def per_replica(self) -> bool:
        """Whether each replica has its own window and sums."""
        return self.strategy.replica.stack_size is not None

    @property
    def replica_sharding(self) -> NamedSharding:
        """The sharding of a window's rows and of sums: split by replica, if each has its own."""
        strategy = self.strategy
        return sharding.rows(strategy.mesh, strategy.batch_axes) if self.per_replica else strategy.replicated

    def stacked(self, table: np.ndarray) -> np.ndarray:
        """Return one copy of a table of metrics for each replica that has its own."""
        n = self.strategy.replica.stack_size
        return np.broadcast_to(table, (n, *table.shape)).copy() if n else table

    def _state_sharding(self, abstract: TrainState, example: Any) -> TrainState:
        """Ask the strategy, except for jaxlit's own bookkeeping, which no rule on shapes should meet."""
        # Without the callbacks' arrays and copies of the module's: they have the shardings of what they belong to.
        shardings: Any = self.strategy.state_sharding(
            replace(abstract, extras={}, window_start=None), self._model, example
        )
        replicated, window, start = self.strategy.replicated, shardings.window, abstract.window_start
        if window is not None:
            window = replace(window, rows=self.replica_sharding, metrics=self.replica_sharding)
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


def _spec(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _kind_of(state: Any) -> str:
    """Return the names of the state classes in an optimizer's state, in order."""
    if isinstance(state, tuple):
        inside = ", ".join(filter(None, map(_kind_of, state)))
        named = type(state).__name__ if hasattr(state, "_fields") else ""
        return f"{named}({inside})" if inside or named else ""
    if isinstance(state, dict):
        return ", ".join(f"{key}: {inside}" for key, value in state.items() if (inside := _kind_of(value)))
    return ""
