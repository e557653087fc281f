"""A module taken apart once, and the user's step of it as a pure function."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core

from jaxlit.errors import ModuleError, StateError
from jaxlit.metrics import Collector, Metric, Table, collecting
from jaxlit.module import STEPS, call_step
from jaxlit.replica import Replica, num_rows
from jaxlit.state import leaf_name


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
        (loss, (frozen, model_state, values, weights, outputs, written)), where `written` holds the trained
        variables that came out as other values, by name.
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
            self._check_structure((params, frozen, model_state), (new_params, new_frozen, new_state))
        pairs = zip(jax.tree.leaves((frozen, model_state)), jax.tree.leaves((new_frozen, new_state)), strict=False)
        self._note(stage, collector, Traced(Table([]), outputs, rows, tuple(a is not b for a, b in pairs)))
        loss = jnp.zeros((), jnp.float32) if loss is None else loss.astype(jnp.float32)
        values, weights = list(collector.values.values()), list(collector.weights.values())
        if training:
            values, weights = [loss, *values], [jnp.float32(rows), *weights]
        pairs = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(new_params), strict=False)
        written = {leaf_name(path): new for (path, old), new in pairs if new is not old} if training else {}
        return loss, (new_frozen, new_state, values, weights, outputs, written)

    def check_writes(self, body: Callable[..., Any], *args: Any) -> None:
        """Refuse a training step that writes to what the optimizer trains.

        nnx.scan and its like hand every variable back as a new value, so a new value alone is no write:
        it must have been computed.

        Args:
            body: The training body.
            *args: Its arguments, abstract.

        Raises:
            StateError: Naming the variable.
        """
        jaxpr, (_, (*_, written)) = jax.make_jaxpr(body, return_shape=True)(*args)
        # The dict comes last among the outputs, its leaves in the order of its keys.
        for name, var in zip(sorted(written), jaxpr.jaxpr.outvars[-len(written) :], strict=True):
            if _is_computed(jaxpr.jaxpr, var):
                raise StateError(
                    f"{self.name}.training_step wrote to {name}, which the optimizer trains. Return a loss instead, or "
                    "leave the variable out of jl.Optimizer(wrt=...)."
                )

    def _check_structure(self, old: Any, new: Any) -> None:
        before, after = _describe(old), _describe(new)
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                raise StateError(
                    f"{self.name}.training_step changed {name} from {before.get(name, 'nothing')} to "
                    f"{after.get(name, 'nothing')}. State must keep its structure, shapes and dtypes: create "
                    "variables in __init__, and log values instead of sowing them."
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


def _is_computed(jaxpr: Any, var: Any) -> bool:
    """Tell whether a value of a program is computed in it, and not just an input handed through."""
    made_by = next((eqn for eqn in jaxpr.eqns if any(var is out for out in eqn.outvars)), None)
    if made_by is None:
        return False
    place = next(i for i, out in enumerate(made_by.outvars) if out is var)
    inner = [x for value in made_by.params.values() for x in (value if isinstance(value, tuple) else (value,))]
    inner = [getattr(x, "jaxpr", x) for x in inner if isinstance(x, (core.Jaxpr, core.ClosedJaxpr))]
    # scan, remat, cond and jit run programs whose outputs are theirs, one by one.
    inner = [x for x in inner if len(x.outvars) == len(made_by.outvars)]
    return not inner or any(_is_computed(x, x.outvars[place]) for x in inner)


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
