"""One module under one strategy: its state on the devices, and its compiled steps."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit.errors import ModuleError
from jaxlit.model import Model
from jaxlit.module import Optimizer, TrainModule, lazy
from jaxlit.replica import Replica, is_row, reduce_state
from jaxlit.state import Layout, TrainState, Window, is_key, leaf_name
from jaxlit.step import EvalStep, TrainStep
from jaxlit.strategies.base import EACH, ROWS, SHARED, Program, Strategy


class Engine:
    """Holds the flat training state and the compiled steps that change it.

    Args:
        module: The module; its arrays are copied.
        strategy: The strategy, set up.
        optimizer: What `configure_optimizers` returned; None to evaluate only.
        accumulate: Batches an optimizer step.
        nan_policy: "raise", "skip" or "ignore".
        own: Whether the module's arrays belong to the engine, which then need not copy them.
    """

    def __init__(
        self,
        module: TrainModule,
        strategy: Strategy,
        optimizer: Optimizer | None,
        *,
        accumulate: int = 1,
        nan_policy: str = "raise",
        own: bool = False,
    ) -> None:
        wrt = optimizer.wrt if optimizer else nnx.Param
        self.strategy, self.nan_policy = strategy, nan_policy
        self.tx = optimizer.tx if optimizer else optax.identity()
        self.model = Model(nnx.graphdef(module), wrt, type(module).__name__)
        self._programs: dict[str, Callable[..., Any]] = {}
        variables = self.model.split(module)
        if optimizer:
            _check_trainable(variables[0], type(module).__name__)
        init = partial(_init_state, self.tx, strategy.window_replicas if accumulate > 1 else 0)
        abstract = jax.eval_shape(init, *variables)
        self.layout = Layout(abstract)
        self.shardings: list[NamedSharding] = jax.tree.leaves(self._state_sharding(abstract))
        self.leaves: list[jax.Array] = strategy.create_state(
            lambda *inputs: self.layout.flatten(init(*inputs)), self.shardings, *variables, donate=own
        )
        # Where each part of the state stands in the flat list.
        self._at: TrainState = jax.tree.unflatten(self.layout.treedef, range(len(self.leaves)))
        at = self._at
        part = (at.counters, at.params, at.frozen, at.model_state)
        self._eval_at: list[int] = jax.tree.leaves(part)
        self._eval_layout = Layout((abstract.counters, abstract.params, abstract.frozen, abstract.model_state))
        self._variable_at: list[int] = []
        self._next_epoch = jax.jit(
            lambda counters, epoch: counters.at[1].set(epoch).at[2].set(0), out_shardings=strategy.replicated
        )

    @property
    def state(self) -> TrainState:
        """The newest state."""
        return self.layout.unflatten(self.leaves)

    def place(self, batch: Any) -> Any:
        """Put a host batch where the step wants it."""
        return self.strategy.shard_batch(batch)

    # Training ---------------------------------------------------------------------------------------

    def prepare_training(self, batch: Any) -> None:
        """Trace the training step on the first batch and build its programs; later calls do nothing."""
        if "training" in self.model.traced:
            return
        at, state = self._at, self._abstract()

        def look(replica: Replica, *args: Any) -> None:
            params, frozen, model_state, counters, batch = args
            body = self.model.body("training", replica)
            batch = replica.constrain_batch(batch)
            arguments = (replica.vary(params), frozen, model_state, batch, *counters[:3])
            _, (frozen, model_state, *_, written) = body(*arguments)
            if written:
                self.model.check_writes(body, *arguments)
            reduce_state(replica, (frozen, model_state), self.model.traced["training"].changed)

        self.strategy.trace(look, (state.params, state.frozen, state.model_state, state.counters), batch)
        step = TrainStep(self.model, self.tx, self.layout, self.nan_policy)
        self._set(at.sums, self.model.traced["training"].table.empty())
        out = self._outputs("training")
        loss = None if at.window is None else EACH
        programs = {"train_step": (step.update, SHARED)}
        if at.window is not None:
            self._set(at.window.metrics, self._stacked(self.model.traced["training"].table.empty()))
            programs["micro_step"] = (step.micro, EACH)
        for name, (fn, logs) in programs.items():
            self._programs[name] = self.strategy.compile(
                Program(name, fn, (self.shardings,), (self.shardings, logs, loss, out), donate=(0,))
            )
        self.train_step = partial(self._train, self._programs["train_step"])
        self.micro_step = partial(self._train, self._programs.get("micro_step", _never))

    def _train(self, program: Callable[..., Any], batch: Any) -> tuple[jax.Array, Any, Any]:
        """Run a training program; returns the table of metrics, the loss of a window's batch, and the outputs."""
        self.leaves, logs, loss, outputs = program(self.leaves, batch)
        return logs, loss, outputs

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch and forget the last one's metrics and unfinished window."""
        at: Any = self._at.counters
        self.leaves[at] = self._next_epoch(self.leaves[at], np.int32(epoch))
        if "training" in self.model.traced:
            self._set(self._at.sums, self.model.traced["training"].table.empty())

    def clear_window(self) -> None:
        """Drop the batches of an accumulation window that will not be completed."""
        if (window := self._at.window) is not None:
            for i in jax.tree.leaves((window.grads, window.rows)):
                self._set(i, np.zeros(self.leaves[i].shape, self.leaves[i].dtype))
            self._set(window.metrics, self._stacked(self.model.traced["training"].table.empty()))

    def epoch_values(self) -> list[float]:
        """Return the epoch's value of each training metric; waits for the device."""
        return self.model.traced["training"].table.read(np.asarray(self.leaves[self._at.sums]))

    def bad_step(self) -> int:
        """Return the last step with a non-finite loss or gradient, or -1; waits for the device."""
        return int(np.asarray(self.leaves[self._at.counters])[3])  # type: ignore[call-overload]

    # Evaluation -------------------------------------------------------------------------------------

    def prepare_eval(self, stage: str, batch: Any) -> None:
        """Trace the stage's step on its first batch and build its program; later calls do nothing."""
        if stage in self._programs:
            return
        state = self._abstract()

        def look(replica: Replica, params: Any, frozen: Any, model_state: Any, counters: Any, batch: Any) -> None:
            batch = replica.constrain_batch(batch)
            self.model.body(stage, replica)(params, frozen, model_state, batch, *counters[:3])

        self.strategy.trace(look, (state.params, state.frozen, state.model_state, state.counters), batch)
        step = EvalStep(self.model, stage, self._eval_layout)
        sums = [self._own, self.strategy.replicated]
        name = {"validation": "eval_step"}.get(stage, f"{stage}_step")
        shardings = [self.shardings[i] for i in self._eval_at]
        self._programs[stage] = self.strategy.compile(
            Program(name, step.run, (shardings, sums), (sums, self._outputs(stage)), donate=(1,))
        )

    def eval_sums(self, stage: str) -> list[jax.Array]:
        """Return the metrics of no batch."""
        table = self._stacked(self.model.traced[stage].table.empty())
        return [jax.device_put(table, self._own), jax.device_put(np.int32(0), self.strategy.replicated)]

    def eval_step(self, stage: str, sums: list[jax.Array], batch: Any) -> tuple[list[jax.Array], Any]:
        """Add a placed batch to the metrics; returns them and the step's outputs."""
        return self._programs[stage]([self.leaves[i] for i in self._eval_at], sums, batch)

    def eval_values(self, stage: str, sums: list[jax.Array]) -> list[float]:
        """Return the value of each of the stage's metrics; waits for the device."""
        return self.model.traced[stage].table.read(np.asarray(sums[0]))

    # The user's module ------------------------------------------------------------------------------

    def variables(self, module: TrainModule) -> list[tuple[str, nnx.Variable]]:
        """Return the module's Variables and their names, in the order of `module_arrays`."""
        at = (self._at.params, self._at.frozen, self._at.model_state)
        _, *states = nnx.split(module, self.model.wrt, nnx.Param, ...)
        found, self._variable_at = [], []
        for state, indices in zip(states, at, strict=True):
            leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
            for (path, leaf), index in zip(leaves, jax.tree.leaves(indices), strict=True):
                if isinstance(leaf, nnx.Variable):
                    found.append((leaf_name(path), leaf))
                    self._variable_at.append(index)
        return found

    def module_arrays(self) -> list[jax.Array]:
        """Return the newest array of each Variable, without a copy."""
        leaves = jax.tree.leaves(self.state)
        return [leaves[i] for i in self._variable_at]

    def write(self, arrays: Mapping[int, jax.Array]) -> None:
        """Replace the arrays of some Variables, given by their place in `module_arrays`."""
        for i, array in arrays.items():
            data = jax.random.key_data(array) if is_key(array) else array
            # A copy: what the caller holds must survive the next, donating step.
            self._set(self._variable_at[i], jnp.array(data, copy=True))

    def _state_sharding(self, abstract: TrainState) -> TrainState:
        """Ask the strategy, except for the engine's own bookkeeping, which no rule on shapes should meet."""
        shardings: Any = self.strategy.state_sharding(abstract)
        if (window := shardings.window) is not None:
            window = replace(window, rows=self._own, metrics=self._own)
        whole = self.strategy.replicated
        return replace(shardings, counters=whole, sums=whole, window=window)

    # Helpers ----------------------------------------------------------------------------------------

    def _set(self, index: Any, value: Any) -> None:
        self.leaves[index] = jax.device_put(value, self.shardings[index])

    def _abstract(self) -> TrainState:
        # With their shardings: only equal types share one trace of the user's step.
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state)

    @property
    def _own(self) -> NamedSharding:
        """The sharding of what each replica has its own of."""
        strategy = self.strategy
        return NamedSharding(strategy.mesh, P(strategy.axis)) if strategy.window_replicas else strategy.replicated

    def _stacked(self, table: np.ndarray) -> np.ndarray:
        n = self.strategy.window_replicas
        return np.broadcast_to(table, (n, *table.shape)).copy() if n else table

    def _outputs(self, stage: str) -> Any:
        traced = self.model.traced[stage]
        return jax.tree.map(lambda x: ROWS if is_row(x, traced.rows) else SHARED, traced.outputs)


def _never(*_: Any) -> Any:
    raise AssertionError("a micro step needs accumulate_grad_batches > 1")


def _init_state(
    tx: optax.GradientTransformation, window_replicas: int | None, params: Any, frozen: Any, model_state: Any
) -> TrainState:
    """Build the state of step 0; metrics have no columns until the step was traced.

    Args:
        tx: The optimizer.
        window_replicas: Size of the accumulation window's leading dim, None if it has none, 0 for no window.
        params: Trained variables.
        frozen: Other parameters.
        model_state: Other state.
    """
    window = None
    if window_replicas != 0:
        lead = () if window_replicas is None else (window_replicas,)
        window = Window(
            jax.tree.map(lambda p: jnp.zeros((*lead, *p.shape), jnp.float32), params),
            jnp.zeros(lead, jnp.float32),
            jnp.zeros((*lead, 2, 0), jnp.float32),
        )
    state = TrainState(
        counters=jnp.array([0, 0, 0, -1], jnp.int32),
        params=params,
        frozen=frozen,
        model_state=model_state,
        opt_state=tx.init(params),
        window=window,
        loss_scale=None,
        sums=jnp.zeros((2, 0), jnp.float32),
    )
    # A copy of everything: an optimizer may keep the parameters themselves (lookahead, averages), and
    # neither two leaves of a donated state nor the state and its caller may share a buffer.
    return jax.tree.map(jnp.copy, state)


def _check_trainable(params: Any, name: str) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ModuleError(f"{name} has no variable to train. Give it an nnx.Param, or widen jl.Optimizer(wrt=...).")
    for path, x in leaves:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ModuleError(
                f"{name}: {leaf_name(path)} is {x.dtype}, and only floating parameters can be trained. "
                "Make it an nnx.Variable, or leave it out of jl.Optimizer(wrt=...)."
            )


def check_variables(module: TrainModule) -> None:
    """Refuse a module whose Variables do not hold one array each.

    Raises:
        ModuleError: One of them holds something else.
    """
    for path, leaf in nnx.to_flat_state(nnx.state(module)):
        value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            where = leaf_name(path)
            raise ModuleError(
                f"{type(module).__name__}: {where} holds {type(value).__name__}, not an array. "
                "Make one nnx.Variable for each array."
            )


def build_lazy(model: lazy, strategy: Strategy, seed: int) -> TrainModule:
    """Build a lazy module straight into the shards of the strategy."""
    build = model.builder(seed)
    graphs: list[Any] = []

    def init() -> Any:
        graphdef, params, rest = nnx.split(build(), nnx.Param, ...)
        graphs.append(graphdef)
        return nnx.as_pure(params), nnx.as_pure(rest)

    params, rest = jax.eval_shape(init)
    blank = _init_state_like(params, rest)
    shardings = strategy.state_sharding(blank)
    arrays = strategy.create_state(init, (shardings.params, shardings.model_state))
    return model.note(nnx.merge(graphs[0], *arrays))


def _init_state_like(params: Any, model_state: Any) -> TrainState:
    """Return the abstract state of a model with no optimizer, to ask a strategy for its shardings."""
    empty = nnx.State({})
    state = jax.eval_shape(partial(_init_state, optax.identity(), 0), params, empty, model_state)
    return replace(state, opt_state=())
