"""A module taken apart once, and the user's step of it as a pure function."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit.core.device_sums import Table
from jaxlit.core.leaves import Leaf, leaves_of
from jaxlit.core.log import Collector, Metric, collecting
from jaxlit.core.module import TrainModule, call_step
from jaxlit.core.plain_attributes import AttributesOfStep
from jaxlit.core.precision import Precision, cast
from jaxlit.core.reads import Reads, reading
from jaxlit.core.reduction import Reduction
from jaxlit.core.replica import Replica, is_row, num_rows
from jaxlit.core.side_tables import share_side_tables
from jaxlit.core.stage import STAGES
from jaxlit.core.step_module import fold_keys, set_modes, sync_batchnorm
from jaxlit.core.step_notes import note_step_error
from jaxlit.errors import JaxlitError, ModuleError, StateError
from jaxlit.leaf_names import leaf_name


@dataclass
class Traced:
    """What the trace of a stage's step found out."""

    table: Table
    outputs: Any = None  # jax.ShapeDtypeStructs of what the step returns beside the loss
    rows: int = 0  # rows of the batch that the body saw
    changed: tuple[bool, ...] = ()  # which leaves of (params, frozen, model_state) a training step wrote to
    rows_of: tuple[bool, ...] = ()  # which leaves of outputs have one row for each row of the batch
    batch: Any = None  # the structure of the batch
    reduction: Reduction | None = None  # how values of replicas become those of the batch; None without replicas
    reads: Reads = field(default_factory=Reads)  # of the Trainer
    stepped: str | None = None  # the path of an optimizer in the module that has taken a step


@dataclass(repr=False)  # jax shows what it compiles, and showing the module would touch it
class PureModule:
    """A module taken apart once: its graph here, its arrays in the state.

    Args:
        graphdef: The module's graph.
        wrt: The filter of trained variables.
        origin: The module itself, for its side tables and messages.
    """

    graphdef: Any
    wrt: Any
    origin: TrainModule
    precision: Precision = Precision()  # noqa: RUF009 - frozen
    traced: dict[tuple[str, int | None], Traced] = field(default_factory=dict)
    # Called with the rows that a replica's step is traced for, by stage and loader.
    row_checks: dict[tuple[str, int | None], Callable[[int], None]] = field(default_factory=dict)
    _bodies: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The module's class name."""
        return type(self.origin).__name__

    def split(self, module: nnx.Module) -> tuple[nnx.State, nnx.State, nnx.State]:
        """Return the trained, frozen and other variables of a module as raw arrays."""
        _, *states = nnx.split(module, self.wrt, nnx.Param, ...)
        return tuple(nnx.as_pure(state) for state in states)  # type: ignore[return-value]

    def merge(self, params: nnx.State, frozen: nnx.State, model_state: nnx.State) -> nnx.Module:
        """Return a copy of the module with these arrays, parameters in the precision of a step."""
        compute = self.precision.compute
        return nnx.merge(self.graphdef, cast(params, compute), cast(frozen, compute), model_state, copy=True)

    def leaves(self, params: nnx.State, frozen: nnx.State, model_state: nnx.State) -> list[Leaf]:
        """Return what each leaf of the state is, given arrays or their shapes."""
        found: list[Leaf] = []

        def rebuild(*state: nnx.State) -> None:  # traced, as nnx takes a mere shape for no array
            found.extend(leaves_of(nnx.merge(self.graphdef, *state, copy=True), self.wrt))

        jax.eval_shape(rebuild, params, frozen, model_state)
        return found

    @property
    def rounded(self) -> tuple[Any, ...]:
        """The two dtypes between which a step's parameters are cast; none if they stay as they are."""
        compute = self.precision.compute
        return () if compute is None else (jnp.dtype(jnp.float32), jnp.dtype(compute))

    def table(self, stage: str, loader: int | None = None) -> Table:
        """Return the metrics that a stage's step logs; it must have been traced."""
        return self.trace_of(stage, loader).table

    def trace_of(self, stage: str, loader: int | None = None) -> Traced:
        """Return what the trace of a stage's step found out."""
        return self.traced[stage, loader]

    def untraced(self) -> "PureModule":
        """Return the same with no step traced: what a trace finds out is true of one program only."""
        return replace(self, traced={}, row_checks={}, _bodies={})

    def body(self, stage: str, replica: Replica, loader: int | None = None) -> Callable[..., Any]:
        """Return the user's step of a stage as a pure function, always the same one.

        It takes (params, frozen, model_state, batch, step, epoch, batch_idx) and returns (loss, (state, values,
        weights, outputs)). In training `state` is the (params, frozen, model_state) that the step leaves; in an
        evaluation it is a dict of the leaves that came out as other values, by their place.
        """
        key = (stage, replica, loader)
        if key not in self._bodies:
            # jit(inline=True) leaves nothing behind in the step, but shares one trace between the
            # look-ahead that finds the metrics and the gradient: the user's code is traced once.
            self._bodies[key] = jax.jit(partial(self.run, stage, replica, loader), inline=True)
        return self._bodies[key]

    def run(
        self,
        stage: str,
        replica: Replica,
        loader: int | None,
        params: nnx.State,
        frozen: nnx.State,
        model_state: nnx.State,
        batch: Any,
        step: jax.Array,
        epoch: jax.Array,
        batch_idx: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """Run the user's step of a stage; `body` says what it takes and returns."""
        compute, training = self.precision.compute, stage == "training"
        held = (params, frozen, model_state)
        given = (cast(params, compute), cast(frozen, compute), model_state)
        module: Any = nnx.merge(self.graphdef, *given, copy=True)
        share_side_tables(module, self.origin)
        set_modes(module, training)
        replica.prepare(module)
        if replica.splits and replica.sync_batchnorm:
            sync_batchnorm(module, str(replica.axis))
        put_back = fold_keys(module, replica, None if training else batch_idx)
        rows = num_rows(batch)
        attributes, name = AttributesOfStep(module), f"{self.name}.{STAGES[stage].step}"
        optimizers = {path: x for path, x in nnx.iter_graph(module) if isinstance(x, nnx.Optimizer)}
        steps = {path: x.step.get_value() for path, x in optimizers.items()}
        with (
            collecting(Collector(stage, rows, step, epoch, _held_metrics(module))) as collector,
            reading() as reads,
        ):
            try:
                output = call_step(module, stage, loader)(cast(batch, compute), batch_idx)
            except Exception as error:
                if not isinstance(error, JaxlitError):
                    note_step_error(error, name, batch)
                raise
        loss, outputs = read_output(output, stage, self.name)
        # An optimizer of nnx that has taken a step is refused later, where the loss has a gradient.
        stepped = next(
            (leaf_name(path) for path, x in optimizers.items() if x.step.get_value() is not steps[path]), None
        )
        if stepped is None:
            attributes.check(module, name)
        put_back()
        new = self.split(module)
        if training:
            new = tuple(_keep_dtypes(*trees, compute) for trees in zip(held, given, new, strict=True))
            self._check_structure(held, new)
        else:
            new = _written(given, new)
        traced = Traced(Table([]), outputs, rows, batch=jax.tree.structure(batch), reads=reads, stepped=stepped)
        self._keep(stage, loader, collector, traced)
        if replica.splits and (check := self.row_checks.pop((stage, loader), None)) is not None:
            check(rows)  # traces this step as well
            self.row_checks[stage, loader] = check
        loss = jnp.zeros((), jnp.float32) if loss is None else loss.astype(jnp.float32)
        values, weights = list(collector.values.values()), list(collector.weights.values())
        if training:
            values, weights = [loss, *values], [jnp.float32(rows), *weights]
        return loss, (new, values, weights, outputs)

    def _check_structure(self, old: Any, new: Any) -> None:
        before, after = _describe(old), _describe(new)
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                raise StateError(
                    f"{self.name}.training_step changed {name} from {before.get(name, 'nothing')} to "
                    f"{after.get(name, 'nothing')}. State must keep its structure, shapes and dtypes: create "
                    "variables in __init__, and take what layers sow out again: nnx.pop(self, nnx.Intermediate)."
                )

    def _check_outputs(self, stage: str, first: Any, now: Any) -> None:
        if jax.tree.structure(first) != jax.tree.structure(now):
            raise ModuleError(
                f"{self.name}.{STAGES[stage].step} returned {jax.tree.structure(now)} for a batch, and "
                f"{jax.tree.structure(first)} for the first one. Return the same structure for every batch, or take "
                "dataloader_idx as an argument, if it differs by loader."
            )

    def _check_batch(self, stage: str, first: Traced, now: Traced) -> None:
        if first.reduction is not None and first.batch != now.batch:
            raise ModuleError(
                f"{self.name}.{STAGES[stage].step} is given batches of another structure than the first, {now.batch}, "
                "and each replica sees its own rows of them. Take dataloader_idx as an argument, so that each loader "
                "has a step of its own, or use strategy='ddp'."
            )

    def _keep(self, stage: str, loader: int | None, collector: Collector, traced: Traced) -> None:
        metrics = list(collector.metrics.values())
        if stage == "training":
            metrics = [Metric("loss", logger=False), *metrics]
        traced.outputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.outputs)
        known = self.traced.get((stage, loader))
        if known is not None and list(known.table.metrics) != metrics:
            old, new = {m.name for m in known.table.metrics}, {m.name for m in metrics}
            raise StateError(
                f"{self.name}.{STAGES[stage].step} logs {sorted(new - old) or sorted(new)} for a batch of "
                f"{traced.rows} rows but {sorted(old - new) or sorted(old)} for the first batch. Log the same metrics, "
                "with the same arguments, for every batch."
            )
        traced.table = Table(metrics) if known is None else known.table
        if known is None:
            traced.rows_of = tuple(is_row(x, traced.rows) for x in jax.tree.leaves(traced.outputs))
        else:
            self._check_outputs(stage, known.outputs, traced.outputs)
            self._check_batch(stage, known, traced)
            traced.changed, traced.rows_of, traced.reduction = known.changed, known.rows_of, known.reduction
            traced.reads += known.reads
        self.traced[stage, loader] = traced


def _keep_dtypes(held: Any, given: Any, new: Any, compute: Any) -> Any:
    """Return state in the dtypes in which it is held, and what a step left alone as it was."""
    if compute is None:
        return new
    before = {path: pair for path, *pair in _zip_paths(held, given)}

    def keep(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        if (pair := before.get(jax.tree_util.keystr(path))) is None:
            return x
        old, passed = pair
        if x is passed:
            return old
        floating = all(jnp.issubdtype(y.dtype, jnp.floating) for y in (old, x))
        return x.astype(old.dtype) if floating else x

    return jax.tree_util.tree_map_with_path(keep, new)


def _written(given: Any, new: Any) -> dict[int, jax.Array]:
    """Return the leaves of an evaluation's state that came out as other values; what it has sown is left out."""
    after = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(new)}
    before = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(given)]
    return {i: after[path] for i, (path, x) in enumerate(before) if path in after and after[path] is not x}


def _zip_paths(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(a)
    return [(jax.tree_util.keystr(path), x, y) for (path, x), y in zip(leaves, jax.tree.leaves(b), strict=True)]


def _held_metrics(module: nnx.Module) -> dict[int, jax.Array]:
    found = (node for _, node in nnx.iter_graph(module))
    return {id(x): x.get_value() for x in found if isinstance(x, nnx.metrics.MetricState)}


def _describe(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {leaf_name(path[1:]): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def read_output(output: Any, stage: str, name: str) -> tuple[jax.Array | None, Any]:
    """Return the loss and the other outputs of what a step returned.

    Raises:
        ModuleError: A training step returned no scalar floating loss, or an output is no array.
    """
    where = f"{name}.{STAGES[stage].step}"
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
            raise ModuleError(
                f"{where} must return its loss as a floating () array, or in a dict, got {given}. Return loss, or "
                "{'loss': loss, 'logits': logits}: what else a dict holds reaches on_train_batch_end."
            )
        if shape != ():
            raise ModuleError(f"{where} must return a scalar loss, got shape {shape}. Return loss.mean().")
    if stage == "predict" and not jax.tree.leaves(output):
        raise ModuleError(f"{where} returned {output!r}. Return the predictions, an array or a pytree of arrays.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        if not (hasattr(leaf, "shape") or isinstance(leaf, (bool, int, float))):
            raise ModuleError(f"{where} returned a {type(leaf).__name__} at {leaf_name(path) or 'top'}. Return arrays.")
    return loss, jax.tree.map(jnp.asarray, outputs)
