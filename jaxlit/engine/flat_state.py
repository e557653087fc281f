"""The training state as a flat list of arrays on the devices: which array is what, and how each is split."""

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
from jaxlit.engine.hyperparams import find_hyperparams
from jaxlit.engine.memory import is_exhausted, out_of_memory
from jaxlit.leaf_names import is_key, leaf_name
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.like_params import like_params
from jaxlit.strategies.program import ArraySpec


class FlatState:
    """The arrays of a training, and the place of each part of the state among them.

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
        laid: A `TrainState` of shardings.
        laid_grads: The gradients' shardings in a step, None for as XLA decides.
        shardings: That of each array.
        array_specs: How each array lies, as a program takes it.
        at: A `TrainState` whose leaves are places in the list.
        eval_at: The places of what an evaluation reads: counters, parameters and the module's other state.
        eval_layout: How those become a tuple of the four.
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
        self.laid = self._state_sharding(abstract, example)
        self.laid_grads = strategy.grad_sharding(replace(abstract, extras={}, window_start=None), pure, example)
        self.shardings: list[NamedSharding] = jax.tree.leaves(self.laid)
        try:
            self.leaves: list[jax.Array] = strategy.create_state(
                lambda *inputs: self.layout.flatten(init(*inputs)), self.shardings, *variables, donate=donate
            )
        except jax.errors.JaxRuntimeError as error:
            if not is_exhausted(error):
                raise
            held = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, self.laid)
            raise out_of_memory(error, "in making the state of step 0", state=held) from error
        at = self.at = jax.tree.unflatten(self.layout.treedef, range(len(self.leaves)))
        own = set(jax.tree.leaves(at.window)) if self.has_own else set()
        self.array_specs = [ArraySpec(sharding, per_replica=i in own) for i, sharding in enumerate(self.shardings)]
        self.eval_at = self.evaluated(at.params)
        self.eval_layout = Layout((abstract.counters, abstract.params, abstract.frozen, abstract.model_state))
        self._variable_at: list[int] = []  # the place of each Variable of the module
        self._keys: dict[int, tuple[jax.Array, jax.Array]] = {}  # data and key of those that were handed out
        self._all_finite: Callable[..., jax.Array] | None = None

    def evaluated(self, params: Any) -> list[int]:
        """Return the places of what an evaluation reads, with the parameters at these."""
        return jax.tree.leaves((self.at.counters, params, self.at.frozen, self.at.model_state))

    def unflatten(self) -> TrainState:
        """Return the newest state as a `TrainState`."""
        return self.layout.unflatten(self.leaves)

    def abstract(self) -> TrainState:
        """Return the state's shapes and dtypes."""
        # With their shardings: only equal types share one trace of the user's step.
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.unflatten())

    def lies(self) -> TrainState | None:
        """Return the shape, dtype and sharding of every array as it is held, also of one that was overwritten.

        None if a restore that failed has left some out.
        """
        return None if any(x is None for x in self.leaves) else self.lies_as(self.leaves)

    def lies_as(self, leaves: list[jax.Array]) -> TrainState:
        """Return the same of another state's arrays."""
        held = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves]
        return jax.tree.unflatten(self.layout.treedef, held)

    def branch(self) -> "FlatState":
        """Return a state of the same arrays to evaluate: what is written to one of the two is not in the other."""
        found = copy.copy(self)
        found.leaves, found._keys = list(self.leaves), dict(self._keys)
        found.eval_at = self.evaluated(self.at.params)  # a callback's averages are those of another module
        return found

    @property
    def is_whole(self) -> bool:
        """Whether all of the state is there; a step or a restore that failed may have taken some."""
        return not any(x is None or x.is_deleted() for x in self.leaves)

    @property
    def is_ready(self) -> bool:
        """Whether the steps that were dispatched are done: nothing waits for the device then."""
        return bool(self.leaves[self.at.counters].is_ready())  # type: ignore[call-overload]

    def is_finite(self) -> bool:
        """Return whether every floating number of the state is finite; waits for the device."""
        if self._all_finite is None:
            self._all_finite = self.strategy.on_state(lambda xs: jnp.stack([jnp.isfinite(x).all() for x in xs]).all())
        return bool(self._all_finite([x for x in self.leaves if jnp.issubdtype(x.dtype, jnp.floating)]))

    # One array --------------------------------------------------------------------------------------

    def put(self, index: Any, value: Any) -> None:
        """Put an array in the place of another, split as that was."""
        self.leaves[index] = jax.device_put(value, self.shardings[index])

    def read(self, index: int) -> float:
        """Return a number of the state; waits for the device."""
        return float(np.asarray(self.leaves[index]))

    def set(self, index: int, value: float) -> None:
        """Set a number of the state from the next step on."""
        self.put(index, np.asarray(value, self.leaves[index].dtype))

    def counters(self) -> list[int]:
        """Return step, epoch, batch_idx and bad_step, see `TrainState`; waits for the device."""
        at: Any = self.at.counters
        return np.asarray(self.leaves[at]).tolist()

    def count_from(self, step: int, epoch: int, batch_idx: int = 0) -> None:
        """Set what the module's `global_step` and `current_epoch` are in the steps."""
        self.put(self.at.counters, np.array([step, epoch, batch_idx, -1], np.int32))

    def hyperparams(self) -> dict[str, int]:
        """Return where each hyperparameter of the optimizer that can be set stands."""
        return find_hyperparams(self.at.opt_state)

    # Checkpoints ------------------------------------------------------------------------------------

    @property
    def specs(self) -> list[tuple[str, tuple[int, ...], str]]:
        """The (name, shape, dtype) of each array; a module's are named by their path in it."""
        found, impls = [], self.layout.key_impls
        for path, i in jax.tree_util.tree_leaves_with_path(self.at):
            part, name = path[0].name, leaf_name(path)
            if part in ("params", "frozen", "model_state"):
                name = f"module.{leaf_name(path[1:])}"
            elif part == "extras":  # in brackets, as the key may be any text
                inside = leaf_name(path[2:])
                name = f"extras[{path[1].key!r}]" + ("." * (inside[:1] not in ("", "[")) + inside)
            dtype = f"key<{impls[i]}>" if i in impls else str(self.leaves[i].dtype)
            found.append((name, tuple(self.leaves[i].shape), dtype))
        return found

    @property
    def optimizer_kind(self) -> str:
        """How the optimizer's state is built: optimizers with the same arrays may mean different things by them."""
        return _kind_of(self.at.opt_state)

    def release(self, places: Iterable[int]) -> dict[int, jax.ShapeDtypeStruct]:
        """Let go of some arrays, whose memory is for those that will be restored.

        Returns:
            By place what must come there, with its sharding.
        """
        found = {}
        for i in places:
            found[i] = jax.ShapeDtypeStruct(self.leaves[i].shape, self.leaves[i].dtype, sharding=self.shardings[i])
            self.leaves[i] = None  # type: ignore[call-overload]
        return found

    def restore(self, arrays: Mapping[int, Any]) -> None:
        """Put arrays into their places."""
        for i, array in arrays.items():
            self.put(i, array)

    # The user's module ------------------------------------------------------------------------------

    def module_leaves(self, module: TrainModule) -> list[tuple[str, Any, int]]:
        """Return the (name, Variable or bare array, place) of each leaf of the module."""
        _, *states = nnx.split(module, self._model.wrt, nnx.Param, ...)
        found = []
        for state, places in zip(states, (self.at.params, self.at.frozen, self.at.model_state), strict=True):
            leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
            pairs = zip(leaves, jax.tree.leaves(places), strict=True)
            found += [(leaf_name(path), leaf, place) for (path, leaf), place in pairs]
        return found

    def variables(self, module: TrainModule) -> list[tuple[str, nnx.Variable]]:
        """Return the module's Variables and their names, in the order of `module_arrays`."""
        found = [x for x in self.module_leaves(module) if isinstance(x[1], nnx.Variable)]
        self._variable_at = [place for _, _, place in found]
        return [(name, variable) for name, variable, _ in found]

    def module_arrays(self) -> list[jax.Array]:
        """Return the newest array of each Variable, without a copy."""
        return [self._wrapped(i) if i in self.layout.key_impls else self.leaves[i] for i in self._variable_at]

    def _wrapped(self, place: int) -> jax.Array:
        """Return a random key, the same object while its data are the same: arrays are known by identity."""
        data = self.leaves[place]
        if place not in self._keys or self._keys[place][0] is not data:
            self._keys[place] = (data, jax.random.wrap_key_data(data, impl=self.layout.key_impls[place]))
        return self._keys[place][1]

    def write(self, arrays: Mapping[int, jax.Array]) -> None:
        """Replace the arrays of some Variables, given by their place in `module_arrays`."""
        for i, array in arrays.items():
            data = jax.random.key_data(array) if is_key(array) else array
            # A copy: what the caller holds must survive the next, donating step.
            self.put(self._variable_at[i], jnp.array(data, copy=True))

    # What replicas have their own of ----------------------------------------------------------------

    @property
    def has_own(self) -> bool:
        """Whether each replica has a window and sums of its own."""
        return self.strategy.replica.stack_size is not None

    @property
    def own(self) -> NamedSharding:
        """The sharding of what each replica has its own of."""
        strategy = self.strategy
        return sharding.rows(strategy.mesh, strategy.batch_axes) if self.has_own else strategy.replicated

    def stacked(self, table: np.ndarray) -> np.ndarray:
        """Return one copy of a table of metrics for each replica that has its own."""
        n = self.strategy.replica.stack_size
        return np.broadcast_to(table, (n, *table.shape)).copy() if n else table

    def _state_sharding(self, abstract: TrainState, example: Any) -> TrainState:
        """Ask the strategy, except for jaxlit's own bookkeeping, which no rule on shapes should meet."""
        # Without the callbacks' arrays and copies of the module's: they have the shardings of what they belong to.
        asked = replace(abstract, extras={}, window_start=None)
        shardings: Any = self.strategy.state_sharding(asked, self._model, example)
        extras = like_params(abstract.extras, abstract.params, shardings.params, self.strategy.replicated)
        if (window := shardings.window) is not None:
            window = replace(window, rows=self.own, metrics=self.own)
        home = self.strategy.replicated
        scale = None if abstract.loss_scale is None else home
        if (start := abstract.window_start) is not None:
            start = WindowStart(home, {name: shardings.module[name] for name in start.arrays})  # type: ignore[arg-type]
        found = replace(shardings, counters=home, sums=home, window=window, loss_scale=scale, extras=extras)
        return replace(found, window_start=start)


def _kind_of(state: Any) -> str:
    """Return the names of the state classes in an optimizer's state, in order."""
    if isinstance(state, tuple):
        inside = ", ".join(filter(None, map(_kind_of, state)))
        named = type(state).__name__ if hasattr(state, "_fields") else ""
        return f"{named}({inside})" if inside or named else ""
    if isinstance(state, dict):
        return ", ".join(f"{key}: {inside}" for key, value in state.items() if (inside := _kind_of(value)))
    return ""
