"""One module under one strategy: its state on the devices, and its compiled steps."""

import logging
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

from jaxlit.core.device_sums import Table
from jaxlit.core.inspection import inspect_evaluation, inspect_step
from jaxlit.core.log import collecting
from jaxlit.core.module import TrainModule, takes_loader
from jaxlit.core.optimizer import Optimizer
from jaxlit.core.precision import Precision, cast
from jaxlit.core.pure_module import Model
from jaxlit.core.replica import Replica
from jaxlit.core.side_tables import share_hparams
from jaxlit.core.state import Layout, TrainState
from jaxlit.core.step import EvalStep, TrainStep
from jaxlit.distributed.exchange import fetch
from jaxlit.engine.creation import check_trainable, init_state
from jaxlit.engine.hyperparams import find_hyperparams
from jaxlit.engine.step_traces import trace_step
from jaxlit.errors import StateError
from jaxlit.leaf_names import is_key, leaf_name
from jaxlit.strategies.base import EACH, ROWS, SHARED, Program, Strategy

_logger = logging.getLogger("jaxlit")

_FLOAT32 = Precision()


class Engine:
    """Holds the flat training state and the compiled steps that change it.

    Args:
        module: The module; its arrays are copied.
        strategy: The strategy, set up.
        optimizer: What `configure_optimizers` returned; None to evaluate only.
        accumulate: Batches an optimizer step.
        nan_policy: "raise", "skip" or "ignore".
        precision: The dtypes.
        clip: What is done to the gradients before the optimizer; None for nothing.
        debug: Donate nothing, so that old arrays stay readable.
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
        precision: Precision = _FLOAT32,
        clip: optax.GradientTransformation | None = None,
        debug: bool = False,
        own: bool = False,
    ) -> None:
        wrt = optimizer.wrt if optimizer else nnx.Param
        self.strategy, self.nan_policy, self.module = strategy, nan_policy, module
        self.evaluates_only = optimizer is None
        self.tx, self._clip, self._debug = optimizer.tx if optimizer else optax.identity(), clip, debug
        self.model = Model(nnx.graphdef(module), wrt, module, precision)
        self._programs: dict[Any, Callable[..., Any]] = {}
        variables = self.model.split(module)
        if optimizer:
            check_trainable(self.tx, variables[0], type(module).__name__)
        init = partial(init_state, self.tx, strategy.window_replicas if accumulate > 1 else 0, precision)
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
        self._all_finite: Callable[..., jax.Array] | None = None
        self._restored: Table | None = None  # the training metrics of a checkpoint
        self._variable_at: list[int] = []
        self._applied: dict[Callable[..., Any], Callable[..., Any]] = {}
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
        if "train_step" in self._programs:
            return
        at = self._at

        def look(replica: Replica, *args: Any) -> None:
            self.model.body("training", replica)(*args)
            inspect_step(self.model, replica, *args, twice=self._debug)

        trace_step(self.model, self.strategy, self._abstract(), "training", None, look, batch)
        step = self._step = TrainStep(self.model, self.tx, self.layout, self.nan_policy, self._clip)
        table = self.model.table("training")
        fits = self._restored is not None and self._restored.metrics == table.metrics
        if self._restored is not None and not fits:
            _logger.warning("training_step logs other metrics than in the checkpoint: this epoch's begin anew.")
        if not fits:
            self._set(at.sums, table.empty_sums())
        out = self._outputs("training")
        loss = None if at.window is None else EACH
        programs = {"train_step": (step.update, SHARED)}
        if at.window is not None:
            if not fits:
                self._set(at.window.metrics, self._stacked(table.empty()))
            programs["micro_step"] = (step.micro, EACH)
        for name, (fn, logs) in programs.items():
            self._programs[name] = self._compile(
                Program(name, fn, (self.shardings,), (self.shardings, logs, loss, out), donate=(0,))
            )
        self.train_step = partial(self._train, self._programs["train_step"])
        self.micro_step = partial(self._train, self._programs.get("micro_step", _never))

    def _train(self, program: Callable[..., Any], batch: Any) -> tuple[jax.Array, Any, Any]:
        """Run a training program; returns the table of metrics, the loss of a window's batch, and the outputs."""
        self.leaves, logs, loss, outputs = program(self.leaves, batch)
        return logs, loss, outputs

    def traced_step(self, traced: tuple[Callable[..., Any], ...], batch: Any) -> tuple[jax.Array, Any, Any, Any]:
        """Take an optimizer step that functions look into.

        Args:
            traced: Functions of (grads, updates, params, opt_state), compiled in once for each set of them.
            batch: The placed batch.

        Returns:
            What `train_step` returns, and a tuple of the functions' results.
        """
        if traced not in self._programs:
            loss = None if self._at.window is None else EACH
            out = (self.shardings, SHARED, loss, self._outputs("training"), SHARED)
            step = replace(self._step, traced=traced)
            self._programs[traced] = self._compile(
                Program("train_step_traced", step.update, (self.shardings,), out, donate=(0,))
            )
        self.leaves, logs, loss, outputs, seen = self._programs[traced](self.leaves, batch)
        return logs, loss, outputs, seen

    def run_step(self, leaves: list[jax.Array], batch: Any) -> tuple[list[jax.Array], jax.Array]:
        """Take an optimizer step from a state of the caller's own; returns the next one and the table of metrics."""
        leaves, logs, _, _ = self._programs["train_step"](leaves, batch)
        return leaves, logs

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch and forget the last one's metrics and unfinished window."""
        at: Any = self._at.counters
        self.leaves[at] = self._next_epoch(self.leaves[at], np.int32(epoch))
        self._restored = None
        self.clear_sums()

    def clear_sums(self) -> None:
        """Forget the epoch's metrics."""
        self._set(self._at.sums, self.training_table.empty_sums())

    def clear_window(self) -> None:
        """Drop the batches of an accumulation window that will not be completed."""
        if (window := self._at.window) is not None:
            for i in jax.tree.leaves((window.grads, window.rows)):
                self._set(i, np.zeros(self.leaves[i].shape, self.leaves[i].dtype))
            self._set(window.metrics, self._stacked(self.training_table.empty()))

    @property
    def training_table(self) -> Table:
        """The training metrics: of the step, or before it was traced those of a checkpoint."""
        return self.model.table("training") if "train_step" in self._programs else self._restored or Table([])

    def epoch_values(self) -> list[float]:
        """Return the epoch's value of each training metric; waits for the device."""
        return self.training_table.read(np.asarray(self.leaves[self._at.sums]))

    def bad_step(self) -> int:
        """Return the last step with a non-finite loss or gradient, or -1; waits for the device."""
        return int(np.asarray(self.leaves[self._at.counters])[3])  # type: ignore[call-overload]

    @property
    def is_whole(self) -> bool:
        """Whether all of the state is there; a step or a restore that failed may have taken some."""
        return not any(x is None or x.is_deleted() for x in self.leaves)

    def counts(self) -> tuple[int, ...]:
        """Return the optimizer steps taken, the epoch, and its batches seen; waits for the device."""
        return tuple(map(int, np.asarray(self.leaves[self._at.counters])[:3]))  # type: ignore[call-overload]

    def count_from(self, step: int, epoch: int, batch_idx: int = 0) -> None:
        """Set what the module's `global_step` and `current_epoch` are in the steps."""
        self._set(self._at.counters, np.array([step, epoch, batch_idx, -1], np.int32))

    # Checkpoints ------------------------------------------------------------------------------------

    @property
    def specs(self) -> list[tuple[str, tuple[int, ...], str]]:
        """The (name, shape, dtype) of each array of the flat state; a module's are named by their path in it."""
        found, impls = [], self.layout.key_impls
        for path, i in jax.tree_util.tree_leaves_with_path(self._at):
            in_module = path[0].name in ("params", "frozen", "model_state")
            name = f"module.{leaf_name(path[1:])}" if in_module else leaf_name(path)
            dtype = f"key<{impls[i]}>" if i in impls else str(self.leaves[i].dtype)
            found.append((name, tuple(self.leaves[i].shape), dtype))
        return found

    @property
    def optimizer_kind(self) -> str:
        """How the optimizer's state is built: optimizers with the same arrays may mean different things by them."""
        return _kind_of(self._at.opt_state)

    def is_finite(self) -> bool:
        """Tell whether every floating number of the state is finite; waits for the device."""
        if self._all_finite is None:
            self._all_finite = jax.jit(lambda xs: jnp.stack([jnp.isfinite(x).all() for x in xs]).all())
        return bool(self._all_finite([x for x in self.leaves if jnp.issubdtype(x.dtype, jnp.floating)]))

    def restore(self, arrays: Mapping[int, Any], table: Table | None) -> None:
        """Replace arrays of the flat state.

        Args:
            arrays: By their place; the sums and the window's metrics have the columns of `table`.
            table: The training metrics they were saved with, None to leave the metrics as they are.
        """
        if table is not None:
            self._restored = table
            if (window := self._at.window) is not None:
                self._set(window.metrics, self._stacked(table.empty()))
        for i, array in arrays.items():
            self._set(i, array)

    def place_sums(self, table: Any, count: int) -> list[jax.Array]:
        """Put the metrics of an evaluation, as `eval_sums` makes them, onto the devices."""
        return [jax.device_put(table, self._own), jax.device_put(np.int32(count), self.strategy.replicated)]

    # Evaluation -------------------------------------------------------------------------------------

    def prepare_eval(self, stage: str, batch: Any, loader: int | None = None) -> None:
        """Trace the stage's step on its first batch and build its program; later calls do nothing."""
        if (stage, loader) in self._programs:
            return

        def look(replica: Replica, *args: Any) -> None:
            self.model.body(stage, replica, loader)(*args)
            inspect_evaluation(self.model, stage, loader, replica, *args)

        trace_step(self.model, self.strategy, self._abstract(), stage, loader, look, batch)
        step = EvalStep(self.model, stage, loader, self._eval_layout)
        sums = [self._own, self.strategy.replicated]
        entry = EACH if self.model.table(stage, loader).has_steps else None
        name = {"validation": "eval_step"}.get(stage, f"{stage}_step")
        shardings = [self.shardings[i] for i in self._eval_at]
        self._programs[stage, loader] = self._compile(
            Program(name, step.run, (shardings, sums), (sums, entry, self._outputs(stage, loader)), donate=(1,))
        )

    def takes_loader(self, stage: str) -> bool:
        """Tell whether the stage's step asks which loader a batch is from, and so is traced once for each."""
        return takes_loader(self.module, stage)

    def eval_sums(self, stage: str, loader: int | None = None) -> list[jax.Array]:
        """Return the metrics of no batch."""
        return self.place_sums(self._stacked(self.model.table(stage, loader).empty_sums()), 0)

    def eval_step(self, stage: str, sums: list[jax.Array], batch: Any, loader: int | None = None) -> Any:
        """Add a placed batch to the metrics.

        Returns:
            The metrics so far, those of the batch alone, and the step's outputs.
        """
        return self._programs[stage, loader]([self.leaves[i] for i in self._eval_at], sums, batch)

    def eval_values(self, stage: str, table: jax.Array, loader: int | None = None) -> list[float]:
        """Return the value of each of the stage's metrics; waits for the device."""
        return self.model.table(stage, loader).read(fetch(table))

    def apply(self, fn: Callable[..., Any], *inputs: Any, module: TrainModule | None = None) -> Any:
        """Run `fn(module, *inputs)` compiled, with the newest arrays, in evaluation mode.

        Args:
            fn: The function.
            *inputs: Its other arguments.
            module: Take the arrays that it holds now, which may have been written to since it ran.
        """
        newest = self.leaves if module is None else self._held_by(module)
        if fn not in self._applied:

            def applied(leaves: list[Any], inputs: Any) -> Any:
                _, params, frozen, model_state = self._eval_layout.unflatten(leaves)
                module: Any = self.model.merge(params, frozen, model_state)
                module.eval()
                share_hparams(module, self.module)
                with collecting(None):  # a hook that calls this may log, the function may not
                    return fn(module, *cast(inputs, self.model.precision.compute))

            self._applied[fn] = jax.jit(applied)
        return self._applied[fn]([newest[i] for i in self._eval_at], self.strategy.place_inputs(inputs))

    def _held_by(self, module: TrainModule) -> list[jax.Array]:
        """Return the flat state with the arrays that the module holds now."""
        leaves = list(self.leaves)
        for (name, variable), i in zip(self.variables(module), self._variable_at, strict=True):
            array = variable.get_value()
            data = jax.random.key_data(array) if is_key(array) else jnp.asarray(array)
            if (data.shape, data.dtype) != (leaves[i].shape, leaves[i].dtype):
                raise StateError(
                    f"Trainer.apply: {name} holds {data.dtype}{list(data.shape)}, and {leaves[i].dtype}"
                    f"{list(leaves[i].shape)} when the module ran last. Run it again, by predict say."
                )
            if data is not leaves[i]:
                leaves[i] = jax.device_put(data, self.shardings[i])
        return leaves

    # The optimizer's hyperparameters ----------------------------------------------------------------

    def hyperparams(self) -> dict[str, int]:
        """Return where each hyperparameter that can be set stands in the flat state."""
        return find_hyperparams(self._at.opt_state)

    def read(self, index: int) -> float:
        """Return a number of the flat state; waits for the device."""
        return float(np.asarray(self.leaves[index]))

    def set(self, index: int, value: float) -> None:
        """Set a number of the flat state from the next step on."""
        self._set(index, np.asarray(value, self.leaves[index].dtype))

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
        scale = None if abstract.loss_scale is None else whole
        return replace(shardings, counters=whole, sums=whole, window=window, loss_scale=scale)

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

    def _compile(self, program: Program) -> Callable[..., Any]:
        run = self.strategy.compile(replace(program, donate=()) if self._debug else program)
        return _run_eagerly(run, program) if jax.config.jax_disable_jit else run  # type: ignore[attr-defined]

    def _outputs(self, stage: str, loader: int | None = None) -> Any:
        traced = self.model.noted(stage, loader)
        treedef = jax.tree.structure(traced.outputs)
        return treedef.unflatten([ROWS if is_row else SHARED for is_row in traced.rows_of])


def _run_eagerly(run: Callable[..., Any], program: Program) -> Callable[..., Any]:
    """Do by hand what jit does beside compiling: take numpy arrays, and put results where they should lie."""

    def call(*args: Any) -> tuple[Any, ...]:
        args = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, args)
        pairs = zip(run(*args), program.out_shardings, strict=True)
        return tuple(jax.device_put(x, to) if isinstance(to, list) else x for x, to in pairs)

    return call


def _kind_of(state: Any) -> str:
    """Return the names of the state classes in an optimizer's state, in order."""
    if isinstance(state, tuple):
        inside = ", ".join(filter(None, map(_kind_of, state)))
        named = type(state).__name__ if hasattr(state, "_fields") else ""
        return f"{named}({inside})" if inside or named else ""
    if isinstance(state, dict):
        return ", ".join(f"{key}: {inside}" for key, value in state.items() if (inside := _kind_of(value)))
    return ""


def _never(*_: Any) -> Any:
    raise AssertionError("a micro step needs accumulate_grad_batches > 1")
