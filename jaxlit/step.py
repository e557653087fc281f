"""The bodies of the compiled steps, as pure functions of a state and a batch.

A strategy decides what a body sees: the global batch, or one replica's rows. Everything that differs
between the two is in `Replica`; the bodies are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxlit.errors import ModuleError, StateError
from jaxlit.metrics import Collector, Metric, Table, collecting
from jaxlit.module import STEPS, call_step
from jaxlit.state import Layout, TrainState, Window, is_key, leaf_name


def _same(tree: Any) -> Any:
    return tree


@dataclass(frozen=True)
class Replica:
    """What a step body sees of the batch, and how it meets the other replicas.

    Attributes:
        axis: The mapped axis that the replicas stand on; None when the body sees the global batch.
        count: Replicas on the axis.
        whole: Every replica sees all rows, for a batch that does not divide among them.
        varying_types: The axis is one of `jax.shard_map`, which tracks what varies over it.
        sync_batchnorm: BatchNorm takes its statistics over all replicas.
        constrain_batch: Shards a global batch inside the step.
        constrain_grads: Shards the gradients inside the step.
    """

    axis: str | None = None
    count: int = 1
    whole: bool = False
    varying_types: bool = False
    sync_batchnorm: bool = True
    constrain_batch: Callable[[Any], Any] = _same
    constrain_grads: Callable[[Any], Any] = _same

    @property
    def splits(self) -> bool:
        """Whether this body sees its own share of the rows."""
        return self.axis is not None and not self.whole

    @property
    def share(self) -> float:
        """The part of this body's rows that counts in a sum over replicas."""
        return 1 / self.count if self.axis is not None and self.whole else 1.0

    def vary(self, tree: Any) -> Any:
        """Mark arrays as differing between replicas, so that gradients stay local.

        Without it the gradient of a replicated parameter is already a sum over replicas, and the mean
        that follows leaves it `count` times too large.
        """
        if not (self.splits and self.varying_types):
            return tree
        return jax.tree.map(lambda x: x if self.varies(x) else jax.lax.pcast(x, self.axis, to="varying"), tree)

    def varies(self, x: jax.Array) -> bool:
        """Tell whether `x` may differ between replicas."""
        if self.axis is None or not self.varying_types:
            return self.axis is not None
        return self.axis in jax.typeof(x).manual_axis_type.varying

    def psum(self, tree: Any) -> Any:
        """Return the sum over replicas."""
        return tree if self.axis is None else jax.lax.psum(tree, self.axis)

    def pmean(self, tree: Any) -> Any:
        """Return the mean over replicas that see different rows."""
        return jax.lax.pmean(tree, self.axis) if self.splits else tree


@dataclass
class Traced:
    """What the trace of a stage's step found out."""

    table: Table
    outputs: Any = None  # jax.ShapeDtypeStructs of what the step returns beside the loss
    rows: int = 0  # rows of the batch that the body saw
    changed: tuple[bool, ...] = ()  # which leaves of (frozen, model_state) the step wrote to


@dataclass
class Model:
    """A module taken apart once: its graph here, its arrays in the state.

    Args:
        graphdef: The module's graph.
        wrt: The filter of trained variables.
        name: The module's class name, for messages.
    """

    graphdef: Any
    wrt: Any
    name: str
    traced: dict[str, Traced] = field(default_factory=dict)  # by stage
    _bodies: dict[tuple[str, Replica], Callable[..., Any]] = field(default_factory=dict)

    def split(self, module: nnx.Module) -> tuple[nnx.State, nnx.State, nnx.State]:
        """Return the trained, frozen and other variables of a module as raw arrays."""
        _, *states = nnx.split(module, self.wrt, nnx.Param, ...)
        return tuple(nnx.as_pure(state) for state in states)  # type: ignore[return-value]

    def body(self, stage: str, replica: Replica) -> Callable[..., Any]:
        """Return the user's step of a stage as a pure function, always the same one.

        It takes (params, frozen, model_state, batch, step, epoch, batch_idx) and returns
        (loss, (frozen, model_state, values, weights, outputs)).
        """
        key = (stage, replica)
        if key not in self._bodies:
            # jit(inline=True) leaves nothing behind in the step, but shares one trace between the
            # look-ahead that finds the metrics and the gradient: the user's code is traced once.
            self._bodies[key] = jax.jit(partial(self._run, stage, replica), inline=True)
        return self._bodies[key]

    def _run(
        self,
        stage: str,
        replica: Replica,
        params: nnx.State,
        frozen: nnx.State,
        model_state: nnx.State,
        batch: Any,
        step: jax.Array,
        epoch: jax.Array,
        batch_idx: jax.Array,
    ) -> tuple[jax.Array, Any]:
        module = nnx.merge(self.graphdef, params, frozen, model_state, copy=True)
        training = stage == "training"
        module.train() if training else module.eval()
        if replica.splits and replica.sync_batchnorm:
            _sync_batchnorm(module, str(replica.axis))
        put_back = _fold_keys(module, replica, None if training else batch_idx)
        rows = num_rows(batch)
        with collecting(Collector(stage, rows, step, epoch)) as collector:
            output = call_step(module, stage)(batch, batch_idx)
        loss, outputs = read_output(output, stage, self.name)
        put_back()
        new_params, new_frozen, new_state = self.split(module)
        if training:
            self._check_state(params, new_params, (frozen, model_state), (new_frozen, new_state))
        pairs = zip(jax.tree.leaves((frozen, model_state)), jax.tree.leaves((new_frozen, new_state)), strict=False)
        self._note(stage, collector, Traced(Table([]), outputs, rows, tuple(a is not b for a, b in pairs)))
        loss = jnp.zeros((), jnp.float32) if loss is None else loss.astype(jnp.float32)
        values, weights = list(collector.values.values()), list(collector.weights.values())
        if training:
            values, weights = [loss, *values], [jnp.float32(rows), *weights]
        return loss, (new_frozen, new_state, values, weights, outputs)

    def _check_state(self, params: Any, new_params: Any, old: Any, new: Any) -> None:
        before, after = _describe((params, *old)), _describe((new_params, *new))
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                raise StateError(
                    f"{self.name}.training_step changed {name} from {before.get(name, 'nothing')} to "
                    f"{after.get(name, 'nothing')}. State must keep its structure, shapes and dtypes: create "
                    "variables in __init__, and log values instead of sowing them."
                )
        written = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(new_params), strict=True)
        for (path, value), new_value in written:
            if value is not new_value:
                raise StateError(
                    f"{self.name}.training_step wrote to {leaf_name(path)}, which the optimizer trains. Return a loss "
                    "instead, or leave the variable out of jl.Optimizer(wrt=...)."
                )

    def _note(self, stage: str, collector: Collector, traced: Traced) -> None:
        metrics = list(collector.metrics.values())
        if stage == "training":
            metrics = [Metric("loss", logger=False), *metrics]
        traced.outputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.outputs)
        known = self.traced.get(stage)
        if known is not None and list(known.table.metrics) != metrics:
            old, new = {m.name for m in known.table.metrics}, {m.name for m in metrics}
            raise StateError(
                f"{self.name}.{STEPS[stage]} logs {sorted(new - old) or sorted(new)} for a batch of {traced.rows} rows "
                f"but {sorted(old - new) or sorted(old)} for the first batch. Log the same metrics, with the same "
                "arguments, for every batch."
            )
        traced.table = Table(metrics) if known is None else known.table
        self.traced[stage] = traced


def _describe(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {leaf_name(path[1:]): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def num_rows(batch: Any) -> int:
    """Return the leading size of a batch's arrays; 1 if it holds scalars only."""
    return next((x.shape[0] for x in jax.tree.leaves(batch) if x.ndim), 1)


def _sync_batchnorm(module: nnx.Module, axis: str) -> None:
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.BatchNorm) and node.axis_name is None:
            node.axis_name = axis


def _fold_keys(module: nnx.Module, replica: Replica, batch_idx: jax.Array | None) -> Callable[[], None]:
    """Give each replica, or each evaluation batch, random numbers of its own.

    Returns:
        A function that puts the original keys back, so that keys leave the step as they came.
    """
    folds = [] if batch_idx is None else [batch_idx]
    if replica.splits:
        folds.append(jax.lax.axis_index(str(replica.axis)))
    keys = [v for _, v in nnx.iter_graph(module) if isinstance(v, nnx.RngKey)] if folds else []
    held = []
    for variable in keys:
        key = original = variable.get_value()
        for number in folds:
            key = jax.random.fold_in(key, number)
        variable.set_value(key)
        held.append((variable, original, key))

    def put_back() -> None:
        for variable, original, key in held:
            # A key that the step replaced stays as it is; if it differs between replicas it is refused later.
            if variable.get_value() is key:
                variable.set_value(original)

    return put_back


def read_output(output: Any, stage: str, name: str) -> tuple[jax.Array | None, Any]:
    """Return the loss and the other outputs of what a step returned.

    Raises:
        ModuleError: A training step returned no scalar floating loss, or an output is no array.
    """
    where = f"{name}.{STEPS[stage]}"
    loss, outputs = None, output
    if stage == "training":
        if isinstance(output, dict):
            if "loss" not in output:
                raise ModuleError(f"{where} returned a dict without 'loss', with {sorted(output)}. Add the loss to it.")
            loss, outputs = output["loss"], {k: v for k, v in output.items() if k != "loss"}
        else:
            loss, outputs = output, {}
        dtype, shape = getattr(loss, "dtype", None), getattr(loss, "shape", None)
        if not isinstance(loss, jax.Array) or not jnp.issubdtype(loss.dtype, jnp.floating):
            given = type(loss).__name__ if dtype is None else f"an array of {dtype}"
            raise ModuleError(f"{where} must return its loss as a floating () array, or in a dict, got {given}.")
        if shape != ():
            raise ModuleError(f"{where} must return a scalar loss, got shape {shape}. Return loss.mean().")
    if stage == "predict" and not jax.tree.leaves(output):
        raise ModuleError(f"{where} returned {output!r}. Return the predictions, an array or a pytree of arrays.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        if not (hasattr(leaf, "shape") or isinstance(leaf, (bool, int, float))):
            raise ModuleError(f"{where} returned a {type(leaf).__name__} at {leaf_name(path) or 'top'}. Return arrays.")
    return loss, jax.tree.map(jnp.asarray, outputs)


def reduce_state(replica: Replica, state: Any, changed: tuple[bool, ...]) -> Any:
    """Make state the same on every replica: floating leaves that a step changed are averaged.

    Raises:
        StateError: Another leaf differs between replicas.
    """
    if not replica.splits:
        return state
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)

    def reduce(path: tuple[Any, ...], x: jax.Array, written: bool) -> jax.Array:
        if not written or not replica.varies(x):
            return x
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jax.lax.pmean(x, str(replica.axis))
        if replica.varying_types:
            raise StateError(
                f"{leaf_name(path[1:])} ({x.dtype}) differs between replicas after training_step, and only floating "
                "state can be averaged. Update it with values that do not depend on the batch, or use strategy='ddp'."
            )
        return x

    return treedef.unflatten([reduce(path, x, w) for (path, x), w in zip(leaves, changed, strict=True)])


def reduce_outputs(replica: Replica, outputs: Any, rows: int) -> Any:
    """Average what is no row of the batch, so that each replica returns its rows and shared values."""

    def reduce(x: jax.Array) -> jax.Array:
        if is_row(x, rows) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return replica.pmean(x)

    return jax.tree.map(reduce, outputs)


def is_row(x: Any, rows: int) -> bool:
    """Tell whether an output has one row for each row of the batch."""
    return x.ndim > 0 and x.shape[0] == rows


@dataclass(frozen=True)
class TrainStep:
    """Builds the training steps of a model.

    Args:
        model: The model.
        tx: The optimizer.
        layout: How the flat state is laid out.
        nan_policy: "raise", "skip" or "ignore".
    """

    model: Model
    tx: optax.GradientTransformation
    layout: Layout
    nan_policy: str

    def micro(self, replica: Replica, leaves: list[Any], batch: Any) -> tuple[list[Any], jax.Array, jax.Array, Any]:
        """Add one batch to the accumulation window.

        Returns:
            The state, the window's table so far (of this replica), and this batch's loss and outputs.
        """
        state = self.layout.unflatten(leaves)
        state, loss, outputs = self._accumulate(replica, state, batch)
        assert state.window is not None
        table, state = state.window.metrics, state.advance(steps=0)
        return self.layout.flatten(state), self._logs(table, state), loss, outputs

    def update(self, replica: Replica, leaves: list[Any], batch: Any) -> tuple[list[Any], jax.Array, Any, Any]:
        """Take an optimizer step with one batch, or with the window that it completes.

        Returns:
            The state, the table of the batch or window, the batch's loss if it ends a window, and its outputs.
        """
        old = self.layout.unflatten(leaves)
        if old.window is None:
            new, grads, table, _, outputs = self._gradient(replica, old, batch, 1.0)
            loss = None  # it is in the table
            grads = replica.pmean(grads)
            if replica.splits:
                table = self.table.reduce(table, replica.psum, str(replica.axis))
        else:
            new, loss, outputs = self._accumulate(replica, old, batch)
            assert new.window is not None
            table, rows = new.window.metrics, new.window.rows
            if replica.axis is not None:
                table = self.table.reduce(table, replica.psum, replica.axis)
            grads, rows = replica.psum((new.window.grads, rows))
            grads = jax.tree.map(lambda g, p: (g / rows).astype(p.dtype), grads, old.params)
            new = replace(new, window=self._empty_window(new.window))
        new = self._apply(old, new, replica.constrain_grads(grads), table)
        return self.layout.flatten(new), self._logs(table, new), loss, outputs

    @property
    def table(self) -> Table:
        """The training metrics."""
        return self.model.traced["training"].table

    def _gradient(
        self, replica: Replica, state: TrainState, batch: Any, share: float
    ) -> tuple[TrainState, Any, jax.Array, jax.Array, Any]:
        """Return the state after the batch, this body's gradients, table and loss, and the outputs."""
        batch = replica.constrain_batch(batch)
        body = self.model.body("training", replica)
        # The marking is outside the gradient: its transpose inside would be the sum that it prevents.
        (loss, aux), grads = jax.value_and_grad(body, has_aux=True)(
            replica.vary(state.params), state.frozen, state.model_state, batch, state.step, state.epoch, state.batch_idx
        )
        frozen, model_state, values, weights, outputs = aux
        frozen, model_state = reduce_state(replica, (frozen, model_state), self.model.traced["training"].changed)
        state = replace(state, frozen=frozen, model_state=model_state)
        outputs = reduce_outputs(replica, outputs, num_rows(batch))
        # Not reduced here: a replica's loss leaves the step as its own, and costs no collective.
        return state, grads, self.table.entry(values, weights, share), loss, outputs

    def _accumulate(self, replica: Replica, old: TrainState, batch: Any) -> tuple[TrainState, jax.Array, Any]:
        """Return the state with the batch in its window, this body's loss, and the outputs."""
        new, grads, table, loss, outputs = self._gradient(replica, old, batch, replica.share)
        window = old.window
        assert window is not None
        weight = num_rows(batch) * replica.share
        grads = jax.tree.map(lambda total, g: total + weight * g.astype(total.dtype), window.grads, grads)
        window = Window(replica.constrain_grads(grads), window.rows + weight, self.table.combine(window.metrics, table))
        frozen, model_state = new.frozen, new.model_state
        if self.nan_policy != "ignore":
            # The window itself may turn NaN: the update step sees it. Statistics have no second chance.
            frozen, model_state = jax.tree.map(_keep_finite, (old.frozen, old.model_state), (frozen, model_state))
        return replace(new, frozen=frozen, model_state=model_state, window=window), loss, outputs

    def _empty_window(self, window: Window) -> Window:
        return Window(
            jax.tree.map(jnp.zeros_like, window.grads),
            jnp.zeros_like(window.rows),
            jnp.broadcast_to(self.table.empty(), window.metrics.shape),
        )

    def _apply(self, old: TrainState, new: TrainState, grads: Any, table: jax.Array) -> TrainState:
        def update() -> tuple[Any, ...]:
            tx = optax.with_extra_args_support(self.tx)
            updates, opt_state = tx.update(grads, old.opt_state, old.params, value=loss, grad=grads)
            params = optax.apply_updates(old.params, updates)
            opt_state = jax.tree.map(_like, old.opt_state, opt_state)
            return params, opt_state, new.frozen, new.model_state

        loss, sums = table[0, 0] / table[1, 0], self.table.combine(old.sums, table)
        if self.nan_policy == "ignore":
            params, opt_state, _, _ = update()
            return replace(new, params=params, opt_state=opt_state, sums=sums).advance(steps=1)
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(grads))
        sticky = self.nan_policy == "raise"
        ok = finite & (old.bad_step < 0) if sticky else finite

        def keep() -> tuple[Any, ...]:
            frozen, model_state = jax.tree.map(
                _keep_counters, (old.frozen, old.model_state), (new.frozen, new.model_state)
            )
            return old.params, old.opt_state, frozen, model_state

        # cond, not where: where computes both sides and holds a second copy of the state.
        params, opt_state, frozen, model_state = jax.lax.cond(ok, update, keep)
        mark = ~finite & ((old.bad_step < 0) | (not sticky))
        new = replace(new, params=params, opt_state=opt_state, frozen=frozen, model_state=model_state)
        new = replace(new, sums=jnp.where(ok, sums, old.sums))
        return new.advance(steps=1, bad_step=jnp.where(mark, old.step, old.bad_step))

    def _logs(self, table: jax.Array, state: TrainState) -> jax.Array:
        if self.nan_policy == "ignore":
            return table
        # One small array out of the step: the flag is one more column of it.
        bad = (state.bad_step >= 0).astype(jnp.float32)
        return jnp.concatenate([table, jnp.stack([bad, bad])[:, None]], axis=1)


def _keep_counters(old: jax.Array, new: jax.Array) -> jax.Array:
    return old if jnp.issubdtype(new.dtype, jnp.floating) else new


def _keep_finite(old: jax.Array, new: jax.Array) -> jax.Array:
    if old is new or not jnp.issubdtype(new.dtype, jnp.floating):
        return new
    return jnp.where(jnp.isfinite(new).all(), new, old)


def _like(old: jax.Array, new: jax.Array) -> jax.Array:
    # An optimizer that widens its state would compile the step a second time.
    return new if is_key(old) else jnp.asarray(new, old.dtype)


@dataclass(frozen=True)
class EvalStep:
    """Builds the validation, test or predict step of a model.

    Args:
        model: The model.
        stage: "validation", "test" or "predict".
        layout: How (counters, params, frozen, model_state) is laid out flat.
    """

    model: Model
    stage: str
    layout: Layout

    def run(
        self, replica: Replica, leaves: list[Any], sums: list[jax.Array], batch: Any
    ) -> tuple[list[jax.Array], Any]:
        """Add one batch to the metrics; the state is only read.

        Args:
            replica: What this body sees.
            leaves: The flat state.
            sums: The table so far, (2, num_metrics) float32 of this replica, and () int32 batches seen.
            batch: The batch.

        Returns:
            The new `sums`, and what the step returned.
        """
        counters, params, frozen, model_state = self.layout.unflatten(leaves)
        step, epoch = counters[0], counters[1]
        batch = replica.constrain_batch(batch)
        table, batch_idx = sums
        body = self.model.body(self.stage, replica)
        _, (_, _, values, weights, outputs) = body(params, frozen, model_state, batch, step, epoch, batch_idx)
        metrics = self.model.traced[self.stage].table
        table = metrics.combine(table, metrics.entry(values, weights, replica.share))
        return [table, batch_idx + 1], reduce_outputs(replica, outputs, num_rows(batch))
