"""A module taken apart once, and the user's step of it as a pure function."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit import side_effects
from jaxlit.errors import JaxlitError, ModuleError, StateError
from jaxlit.metrics import Collector, Metric, collecting
from jaxlit.module import STEPS, TrainModule, call_step, share_side_tables
from jaxlit.precision import Precision, cast
from jaxlit.replica import Replica, is_row, num_rows
from jaxlit.state import leaf_name
from jaxlit.table import Table


@dataclass
class Traced:
    """What the trace of a stage's step found out."""

    table: Table
    outputs: Any = None  # jax.ShapeDtypeStructs of what the step returns beside the loss
    rows: int = 0  # rows of the batch that the body saw
    rows_of: tuple[bool, ...] = ()  # which leaves of outputs have one row for each row of the batch
    changed: tuple[bool, ...] = ()  # which leaves of (frozen, model_state) the step wrote to


@dataclass(repr=False)  # jax shows what it compiles, and showing the module would touch it
class Model:
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

    def table(self, stage: str, loader: int | None = None) -> Table:
        """Return the metrics that a stage's step logs; it must have been traced."""
        return self.noted(stage, loader).table

    def noted(self, stage: str, loader: int | None = None) -> Traced:
        """Return what the trace of a stage's step found out."""
        return self.traced[stage, loader]

    def body(self, stage: str, replica: Replica, loader: int | None = None) -> Callable[..., Any]:
        """Return the user's step of a stage as a pure function, always the same one.

        It takes (params, frozen, model_state, batch, step, epoch, batch_idx) and returns
        (loss, (frozen, model_state, values, weights, outputs, written)), where `written` holds the trained
        variables that came out as other values, by name.
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
        params, kept_frozen = cast(params, compute), frozen
        frozen = cast(frozen, compute)
        module = nnx.merge(self.graphdef, params, frozen, model_state, copy=True)
        share_side_tables(module, self.origin)
        module.train() if training else module.eval()
        if replica.splits and replica.sync_batchnorm:
            _sync_batchnorm(module, str(replica.axis))
        put_back = _fold_keys(module, replica, None if training else batch_idx)
        rows = num_rows(batch)
        plain = side_effects.snapshot(module)
        with (
            collecting(Collector(stage, rows, step, epoch, _held_metrics(module))) as collector,
            self._noting(stage, batch),
        ):
            output = call_step(module, stage, loader)(cast(batch, compute), batch_idx)
        loss, outputs = read_output(output, stage, self.name)
        side_effects.check_unchanged(plain, module, f"{self.name}.{STEPS[stage]}")
        put_back()
        new_params, new_frozen, new_state = self.split(module)
        if training:
            new_frozen = _keep_dtypes(kept_frozen, frozen, new_frozen, compute)
            new_state = _keep_dtypes(model_state, model_state, new_state, compute)
            self._check_structure((params, kept_frozen, model_state), (new_params, new_frozen, new_state))
        pairs = zip(jax.tree.leaves((kept_frozen, model_state)), jax.tree.leaves((new_frozen, new_state)), strict=False)
        traced = Traced(Table([]), outputs, rows, changed=tuple(a is not b for a, b in pairs))
        self._note(stage, loader, collector, traced)
        loss = jnp.zeros((), jnp.float32) if loss is None else loss.astype(jnp.float32)
        values, weights = list(collector.values.values()), list(collector.weights.values())
        if training:
            values, weights = [loss, *values], [jnp.float32(rows), *weights]
        pairs = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(new_params), strict=False)
        written = {leaf_name(path): new for (path, old), new in pairs if new is not old} if training else {}
        return loss, (new_frozen, new_state, values, weights, outputs, written)

    @contextlib.contextmanager
    def _noting(self, stage: str, batch: Any) -> Iterator[None]:
        """Note on whatever a step raises what it was given, and what a traced step can do instead."""
        try:
            yield
        except JaxlitError:
            raise
        except Exception as error:
            shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", batch)
            error.add_note(f"{self.name}.{STEPS[stage]} was traced with a batch of {shapes}.")
            if isinstance(error, (jax.errors.JAXTypeError, jax.errors.JAXIndexError)):
                error.add_note(
                    "A step is traced with arrays that have no values yet: Python's if, float, range and numpy need "
                    "some. Use jnp.where, jax.lax.cond or jnp in their place, log arrays as they are, or look at "
                    "values under jax.disable_jit()."
                )
            raise

    def _check_structure(self, old: Any, new: Any) -> None:
        before, after = _describe(old), _describe(new)
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                raise StateError(
                    f"{self.name}.training_step changed {name} from {before.get(name, 'nothing')} to "
                    f"{after.get(name, 'nothing')}. State must keep its structure, shapes and dtypes: create "
                    "variables in __init__, and log values instead of sowing them."
                )

    def _check_outputs(self, stage: str, first: Any, now: Any) -> None:
        if jax.tree.structure(first) != jax.tree.structure(now):
            raise ModuleError(
                f"{self.name}.{STEPS[stage]} returned {jax.tree.structure(now)} for a batch, and "
                f"{jax.tree.structure(first)} for the first one. Return the same structure for every batch, or take "
                "dataloader_idx as an argument, if it differs by loader."
            )

    def _note(self, stage: str, loader: int | None, collector: Collector, traced: Traced) -> None:
        metrics = list(collector.metrics.values())
        if stage == "training":
            metrics = [Metric("loss", logger=False), *metrics]
        traced.outputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.outputs)
        known = self.traced.get((stage, loader))
        if known is not None and list(known.table.metrics) != metrics:
            old, new = {m.name for m in known.table.metrics}, {m.name for m in metrics}
            raise StateError(
                f"{self.name}.{STEPS[stage]} logs {sorted(new - old) or sorted(new)} for a batch of {traced.rows} rows "
                f"but {sorted(old - new) or sorted(old)} for the first batch. Log the same metrics, with the same "
                "arguments, for every batch."
            )
        traced.table = Table(metrics) if known is None else known.table
        if known is None:
            traced.rows_of = tuple(is_row(x, traced.rows) for x in jax.tree.leaves(traced.outputs))
        else:
            self._check_outputs(stage, known.outputs, traced.outputs)
            traced.changed, traced.rows_of = known.changed, known.rows_of
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


def _zip_paths(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(a)
    return [(jax.tree_util.keystr(path), x, y) for (path, x), y in zip(leaves, jax.tree.leaves(b), strict=True)]


def _held_metrics(module: nnx.Module) -> dict[int, jax.Array]:
    found = (node for _, node in nnx.iter_graph(module))
    return {id(x): x.get_value() for x in found if isinstance(x, nnx.metrics.MetricState)}


def _describe(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {leaf_name(path[1:]): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


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
            fold = lambda k, number=number: jax.random.fold_in(k, number)  # noqa: E731
            for _ in range(key.ndim):  # layers that were built by nnx.vmap hold their keys stacked
                fold = jax.vmap(fold)
            key = fold(key)
        variable.set_value(key)
        held.append((variable, original))

    def put_back() -> None:
        # Always: nnx.remat and its like hand a key back as another value, though streams only ever count.
        for variable, original in held:
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
