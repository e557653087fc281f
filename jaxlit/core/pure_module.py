"""A module that is split once, and the user's step of it as a pure function.

First what a trace notes: the attributes of a Trainer that it reads (`Reads`), the leaves of the state (`Leaf`), and
what the step logs, returns and writes (`Traced`). After `PureModule`: checks of a step's results, and how the copy of
the module that a step runs is prepared, with its modes, its statistics over replicas, and its random keys.
"""

import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit.core.attributes import AttributesOfStep, check_hidden, copied, note_step_error, same
from jaxlit.core.log import NO_WEIGHT, Collector, Metric, Table, collecting
from jaxlit.core.module import STAGES, TrainModule, attach, call_step, trainer_of
from jaxlit.core.replica import Reduction, Replica, is_row, num_rows
from jaxlit.core.train_state import Precision, cast
from jaxlit.errors import JaxlitError, ModuleError, StateError
from jaxlit.texts import is_key, leaf_name, named_leaves, shown
from jaxlit.variables import Constant, ModuleLeaf, arrays_of, fits, is_array, is_shape, leaves_of, merge, split

_logger = logging.getLogger("jaxlit")

# Read by every attribute of a Trainer, in hooks of every step: hence the variable itself, and no function around it.
READS: ContextVar["Reads | None"] = ContextVar("jaxlit_reads", default=None)


class Reads(list[tuple["weakref.ref[Any]", str, Any]]):
    """The attributes that a trace has read, and their values then.

    A value is compiled into the program, which is right only for as long as the attribute has it.
    """

    def note(self, owner: Any, name: str, value: Any) -> None:
        """Note an attribute's value, unless it is an array, which follows the argument of the trace."""
        if not isinstance(value, jax.Array):
            # Weakly: jax keeps what it has compiled, which would hold a Trainer and all its arrays.
            self.append((weakref.ref(owner), name, copied(value)))

    def hold(self) -> bool:
        """Return whether every recorded attribute still has the value that the trace read.

        False if two traces read different values.
        """
        try:
            return all(same(was, getattr(owner(), name)) for owner, name, was in self)
        except AttributeError:  # the Trainer is gone, or no longer has it
            return False


@contextlib.contextmanager
def reading() -> Iterator[Reads]:
    """Note what is read inside the block, where something is traced."""
    reads = Reads()
    token = READS.set(reads)
    try:
        yield reads
    finally:
        READS.reset(token)


@dataclass(frozen=True)
class Leaf:
    """One leaf of (params, frozen, model_state)."""

    name: str  # its path in the module, as a user writes it
    kind: type | None  # its class of Variable; None for an array that is in none
    # "batchnorm" or "normalizing" if it belongs to such a layer, "metric" to an object with `update`, `compute` and
    # `reset`, "weightnorm" for the scale of such a layer, else ""
    owner: str = ""
    reduce_fx: str = ""  # how the values of replicas become that of the batch, as its author declares, or ""

    @property
    def assumed(self) -> str:
        """How the values of replicas become that of the batch where the step's program does not show it, or ""."""
        is_metric = self.owner == "metric" or issubclass(self.kind or object, nnx.metrics.MetricState)
        by_kind = "sum" if is_metric else "mean" if issubclass(self.kind or object, nnx.BatchStat) else ""
        return self.reduce_fx or by_kind

    def continues(self, dtype: Any) -> bool:
        """Return whether a step that is left out keeps what it wrote: counts and random keys, but no statistic."""
        is_metric = self.kind is not None and issubclass(self.kind, nnx.metrics.MetricState)
        return not (is_metric or jnp.issubdtype(dtype, jnp.inexact))


@dataclass
class Traced:
    """What the trace of a stage's step has shown."""

    table: Table
    outputs: Any = None  # jax.ShapeDtypeStructs of what the step returns besides the loss
    rows: int = 0  # rows of the batch that the body saw
    changed: tuple[bool, ...] = ()  # which leaves of (params, frozen, model_state) a training step wrote to
    rows_of: tuple[bool, ...] = ()  # which leaves of outputs have one row for each row of the batch
    batch: Any = None  # the structure of the batch
    reduction: Reduction | None = None  # how values of replicas become those of the batch; None without replicas
    reads: Reads = field(default_factory=Reads)  # of the Trainer
    program: Any = None  # of the first trace, with the places of its equations in the user's code
    carried: tuple[int, ...] = ()  # the leaves of metrics that an evaluation step writes
    stepped: str | None = None  # the path of an optimizer in the module that has taken a step
    is_weighted: bool = False  # whether a training step returns the `total_weight` of its loss


@dataclass(repr=False)  # jax shows what it compiles, and showing the module would touch it
class PureModule:
    """A module split once: its graph is here, its arrays are in the state."""

    graphdef: Any  # the module's graph
    wrt: Any  # the filter of trained variables
    origin: TrainModule  # the module, for its side tables and messages
    precision: Precision = Precision()  # noqa: RUF009 - frozen
    traced: dict[tuple[str, int | None], Traced] = field(default_factory=dict)
    resumed: bool = False  # training continues, and was warned of what it does where it began
    told: set[tuple[str, str]] = field(default_factory=set)  # what was said to be dropped, by step
    unbound: set[str] = field(default_factory=set)  # axis names of layers that no map of the step binds
    _bodies: dict[Any, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The module's class name."""
        return type(self.origin).__name__

    def split(self, module: nnx.Module) -> tuple[nnx.State, nnx.State, nnx.State]:
        """Return the trained, frozen and other variables of a module as raw arrays."""
        return split(module, self.wrt, nnx.Param, ...)[1:]

    def merge(self, params: nnx.State, frozen: nnx.State, model_state: nnx.State) -> nnx.Module:
        """Return a copy of the module with these arrays, parameters in the precision of a step."""
        compute = self.precision.compute
        return merge(self.graphdef, cast(params, compute), cast(frozen, compute), model_state)

    def leaves(self, params: nnx.State, frozen: nnx.State, model_state: nnx.State) -> list[Leaf]:
        """Return what each leaf of the state is, given arrays or their shapes."""
        leaves = []

        def rebuild(*state: nnx.State) -> None:  # traced, as nnx takes a mere shape for no array
            leaves.extend(described_leaves(merge(self.graphdef, *state), self.wrt))

        jax.eval_shape(rebuild, params, frozen, model_state)
        return leaves

    def table(self, stage: str, loader: int | None = None) -> Table:
        """Return the metrics that a stage's step logs; it must have been traced."""
        return self.trace_of(stage, loader).table

    def trace_of(self, stage: str, loader: int | None = None) -> Traced:
        """Return what the trace of a stage's step has shown."""
        return self.traced[stage, loader]

    def body(self, stage: str, replica: Replica, loader: int | None = None) -> Any:
        """Return the user's step of a stage as a pure function, always the same one.

        It takes (params, frozen, model_state, batch, step, epoch, batch_idx) and returns (loss, (state, values,
        weights, outputs)). In training `state` is the (params, frozen, model_state) that the step leaves; in an
        evaluation it is a dict of the leaves that came out as other values, by index.
        """
        key = (stage, replica, loader)
        if key not in self._bodies:
            # jit(inline=True) leaves no call in the step, but shares one trace between the
            # look-ahead that finds the metrics and the gradient: the user's code is traced once.
            self._bodies[key] = retraced(jax.jit(partial(self.run, stage, replica, loader), inline=True))
        return self._bodies[key]

    def run(self, stage: str, replica: Replica, loader: int | None, *args: Any) -> tuple[jax.Array, Any]:
        """Run the user's step of a stage; `body` documents the arguments and results."""
        params, frozen, model_state, batch, step, epoch, batch_idx = args
        compute, training, name = self.precision.compute, stage == "training", f"{self.name}.{STAGES[stage].step}"
        state = (params, frozen, model_state)
        step_state = (cast(params, compute), cast(frozen, compute), model_state)
        # The order matters: what the strategy prepares is no side effect of the step, and random keys are put back
        # before the state is split off.
        module: Any = merge(self.graphdef, *step_state)
        if (trainer := trainer_of(self.origin)) is not None:
            attach(module, trainer)
        set_modes(module, training)
        replica.prepare(module)
        for layer in _with_axis(module):
            layer.axis_name = None if layer.axis_name in self.unbound else layer.axis_name
        if replica.splits and replica.sync_batchnorm:
            sync_batchnorm(module, str(replica.axis))
        put_back = fold_keys(module, replica, None if training else batch_idx)
        attributes, rows, nodes = AttributesOfStep(module), num_rows(batch), list(nnx.iter_graph(module, graph=True))
        counts = [(path, x.step, x.step.get_value()) for path, x in nodes if isinstance(x, nnx.Optimizer)]
        metrics = {id(x): x.get_value() for _, x in nodes if isinstance(x, nnx.metrics.MetricState)}
        collector = Collector(stage, rows, step, epoch, metrics)
        with collecting(collector), reading() as reads:
            try:
                output = call_step(module, stage, loader)(cast(batch, compute), batch_idx)
            except JaxlitError:
                raise
            except Exception as error:
                # No axis is mapped where the batch is global: there such a layer sees all rows already.
                names = {x.axis_name for x in _with_axis(module) if f"unbound axis name: {x.axis_name}" in str(error)}
                if isinstance(error, NameError) and names - self.unbound:
                    self.unbound.update(names)
                    raise _UnboundError from error
                check_hidden(module, name, lambda x: any(map(is_shape, jax.tree.leaves(x))))  # of a lazy module
                note_step_error(error, name, batch)
                raise
        loss, weight, outputs = read_output(output, stage, self.name)
        # An optimizer of nnx that has taken a step is refused later, where the loss has a gradient.
        stepped = next((leaf_name(path) for path, x, before in counts if x.get_value() is not before), None)
        left = [] if stepped is not None else attributes.dropped(module, name, training=training)
        put_back()
        new, sown = self._kept(step_state, module, name)
        self._tell_dropped(name, left + sown)
        new = _keep_dtypes(state, step_state, new) if training else _written(step_state, new)
        traced = Traced(Table([]), outputs, rows, batch=jax.tree.structure(batch), reads=reads, stepped=stepped)
        traced.is_weighted = training and weight is not None
        if traced.is_weighted and replica.loss_reduction == "sum":
            raise ModuleError(
                f"{name} returns the weight of a mean, under loss_reduction='sum'. Leave one of them out."
            )
        self._note(stage, loader, list(collector.metrics.values()), traced)
        if weight is not None:
            returned = output["loss"]
            collector.weights |= {key: weight for key, x in collector.by_rows.items() if x is returned}
            loss, weight = jnp.where(weight == 0, 0, loss), jnp.where(weight == 0, NO_WEIGHT, weight)
        loss, values, weights = loss.astype(float), [*collector.values.values()], [*collector.weights.values()]
        if training:
            values, weights = [loss, *values], [jnp.asarray(rows, float) if weight is None else weight, *weights]
        return loss, (new, values, weights, outputs)

    def _kept(self, state: Any, module: nnx.Module, step: str) -> tuple[Any, list[str]]:
        """Return the state that a step has left in a module, in the structure of the one before it.

        What a step leaves in an attribute or an `nnx.Intermediate` where there was none of its structure is left out.

        Returns:
            The state, and the names of the Intermediates.
        """
        new = self.split(module)
        (old_leaves, structure), (leaves, other) = jax.tree.flatten(state), jax.tree.flatten(new)
        if structure == other and all(map(fits, old_leaves, leaves)):
            return new, []
        before = {x.name: x for x in leaves_of(self.merge(*state), self.wrt, nnx.Param, ...)}
        after = {x.name: x for x in leaves_of(module, self.wrt, nnx.Param, ...)}
        sown = []
        for path in before | after:
            old, now = before.get(path), after.get(path)
            if old is not None and now is not None and _fits(old.value, now.value):
                continue
            if all(x is None or x.variable is None for x in (old, now)):
                continue  # of an attribute
            if old is None and now is not None and isinstance(now.variable, nnx.Intermediate):
                sown.append(path)
                continue
            raise StateError(
                f"{step} changed {path} from {_described(old)} to {_described(now)}. State must keep its structure, "
                "shapes and dtypes: create variables in __init__."
            )
        kept = [
            x if (now := after.get(name)) is None or not _fits(x, now.value) else now.value
            for name, x in (pair for part in state for pair in named_leaves(part))
        ]
        return structure.unflatten(kept), sown

    def _tell_dropped(self, step: str, names: list[str]) -> None:
        new = [name for name in names if (step, name) not in self.told]
        self.told.update((step, name) for name in new)
        if new:
            _logger.warning(
                f"{step} left arrays or the like in {', '.join(new)}, where there were none of their kind before. "
                "They are dropped when the step ends. To keep one, hold it in an nnx.Variable made in __init__, of its "
                "shape; to see one, return it as an output or log it."
            )

    def _note(self, stage: str, loader: int | None, metrics: list[Metric], traced: Traced) -> None:
        """Note what a trace has shown, or refuse what differs from the first trace of the step."""
        metrics = [Metric("loss", logger=False), *metrics] if stage == "training" else metrics
        traced.outputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.outputs)
        known, name = self.traced.get((stage, loader)), f"{self.name}.{STAGES[stage].step}"
        if known is None:
            traced.table = Table(metrics)
            traced.rows_of = tuple(is_row(x, traced.rows) for x in jax.tree.leaves(traced.outputs))
        else:
            _check_same(name, known, metrics, traced)
            traced.table, traced.changed, traced.carried = known.table, known.changed, known.carried
            traced.rows_of, traced.reduction = known.rows_of, known.reduction
            traced.reads += known.reads
        self.traced[stage, loader] = traced


class _UnboundError(NameError):
    """A layer names an axis that nothing maps: the step is to be traced again, without that name."""


def retraced(trace: Any) -> Any:
    """Return a function that traces a step, and again for each name of an axis that nothing maps."""

    def call(*args: Any) -> Any:
        while True:
            with contextlib.suppress(_UnboundError):
                return trace(*args)

    if hasattr(trace, "trace"):
        call.trace = retraced(trace.trace)  # type: ignore[attr-defined]
    return call


def _with_axis(module: nnx.Module) -> list[Any]:
    """Return the layers that name an axis to reduce over, as code for `jax.pmap` has them."""
    layers = [x for _, x in nnx.iter_graph(module, graph=True) if isinstance(x, nnx.Module)]
    return [x for x in layers if isinstance(getattr(x, "axis_name", None), str)]


def _fits(old: Any, new: Any) -> bool:
    return fits(old, new) if is_array(old) and is_array(new) else Constant(old) == Constant(new)


def _described(leaf: ModuleLeaf | None) -> str:
    if leaf is None:
        return "nothing"
    return f"{leaf.value.dtype}{list(leaf.value.shape)}" if is_array(leaf.value) else shown(leaf.value)


def _check_same(name: str, first: Traced, metrics: list[Metric], now: Traced) -> None:
    """Refuse a step that logs or returns other things for one batch than for the first one."""
    if [replace(m, is_integer=False) for m in first.table.metrics] != [replace(m, is_integer=False) for m in metrics]:
        old, new = {m.name for m in first.table.metrics}, {m.name for m in metrics}
        raise StateError(
            f"{name} logs {sorted(new - old or new)} for a batch of {now.rows} rows but {sorted(old - new or old)} for "
            "the first batch. Log the same metrics, with the same arguments, for every batch."
        )
    if first.is_weighted != now.is_weighted:
        raise ModuleError(f"{name} returns total_weight for some batches only. Return it for every batch, or for none.")
    old, new = jax.tree.structure(first.outputs), jax.tree.structure(now.outputs)
    if old != new:
        raise ModuleError(
            f"{name} returned {new} for a batch, and {old} for the first one. Return the same structure for every "
            "batch, or take dataloader_idx as an argument, if it differs by loader."
        )
    if first.reduction is not None and first.batch != now.batch:
        raise ModuleError(
            f"{name} is given a batch of a different structure than the first, {now.batch}, and each replica sees its "
            "own rows of it. Take dataloader_idx as an argument, so that each loader has its own step, or use "
            "strategy='ddp'."
        )


def _keep_dtypes(state: Any, step_state: Any, new: Any) -> Any:
    """Return the state after a step in the dtypes of the one before it; what the step left alone is as it was."""

    def keep(old: jax.Array, passed: jax.Array, x: jax.Array) -> jax.Array:
        floating = all(jnp.issubdtype(y.dtype, jnp.floating) for y in (old, x))
        return old if x is passed else x.astype(old.dtype) if floating else x

    return jax.tree.map(keep, state, step_state, new)


def _written(step_state: Any, new: Any) -> dict[int, jax.Array]:
    """Return the leaves of an evaluation's state that came out as other values; what it has sown is left out."""
    after = dict(named_leaves(new))
    before = enumerate(named_leaves(step_state))
    return {i: after[name] for i, (name, x) in before if name in after and after[name] is not x}


def read_output(output: Any, stage: str, name: str) -> tuple[jax.Array, jax.Array | None, Any]:
    """Return the loss, zero in an evaluation, its weight if it has one, and the other outputs of what a step gave."""
    step = f"{name}.{STAGES[stage].step}"
    loss, weight, outputs = jnp.zeros(()), None, output
    if stage == "training":
        outputs = dict(output) if isinstance(output, dict) else {"loss": output}
        loss, weight = outputs.pop("loss", output), outputs.pop("total_weight", None)
        if not isinstance(loss, jax.Array) or loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise ModuleError(
                f"{step} must return its loss as a floating () array, or in a dict, got {shown(loss)}. Return "
                "loss.mean(), or {'loss': loss, 'logits': logits}: what else a dict holds reaches on_train_batch_end."
            )
    elif stage != "predict" and isinstance(output, dict) and "loss" in output:
        weight = output.get("total_weight")
    if stage == "predict" and not jax.tree.leaves(output):
        raise ModuleError(f"{step} returned {output!r}. Return the predictions, an array or a pytree of arrays.")
    for path, leaf in named_leaves(outputs):
        if not (hasattr(leaf, "shape") or isinstance(leaf, (bool, int, float))):
            raise ModuleError(f"{step} returned a {type(leaf).__name__} at {path or 'top'}. Return arrays.")
    if weight is not None:
        kind = getattr(weight, "dtype", type(weight))
        if jnp.shape(weight) or not (jnp.issubdtype(kind, jnp.integer) or jnp.issubdtype(kind, jnp.floating)):
            if stage != "training":
                return loss, None, jax.tree.map(jnp.asarray, outputs)
            raise ModuleError(
                f"{step} must return as total_weight a real () number, what its loss is a mean over, got "
                f"{shown(weight)}. Return, for example, {{'loss': loss, 'total_weight': mask.sum()}}."
            )
        weight = jax.lax.stop_gradient(jnp.asarray(weight, float))
    return loss, weight, jax.tree.map(jnp.asarray, outputs)


# Layers that normalize their parameters in place at each call, in evaluation too.
_NORMALIZING = (nnx.WeightNorm, nnx.SpectralNorm)


def described_leaves(module: nnx.Module, wrt: Any) -> list[Leaf]:
    """Return the leaves of a module in the order of `PureModule.split`."""
    owners, prefixes = {}, {}
    for path, node in nnx.iter_graph(module, graph=True):
        if path and all(hasattr(type(node), name) for name in ("update", "compute", "reset")):
            prefixes |= {f"{leaf_name(path)}{after}": "metric" for after in ".["}
        if isinstance(node, nnx.BatchNorm):
            owners |= {id(x): "batchnorm" for x in (node.mean, node.var)}
        elif isinstance(node, _NORMALIZING):
            prefixes |= {leaf_name((*path, "scales")): "weightnorm"} if isinstance(node, nnx.WeightNorm) else {}
            owners |= {id(x): "normalizing" for _, x in nnx.iter_graph(node.layer_instance, graph=True)}
    return [
        Leaf(
            x.name,
            None if x.variable is None else type(x.variable),
            next((prefixes[p] for p in prefixes if x.name.startswith(p)), owners.get(id(x.variable), "")),
            "" if x.variable is None else x.variable.get_metadata("reduce_fx", ""),
        )
        for x in arrays_of(module, wrt, nnx.Param, ...)
    ]


# What train() and eval() set, by name: the value in training.
_TRAINING = {"deterministic": False, "use_running_average": False}


def set_modes(module: nnx.Module, training: bool) -> None:
    """Put a copy of the module into the mode of a stage.

    In training each layer keeps the mode that it has, so that a part which its user has frozen stays so; one that
    has none yet is trained. A `train` method of the module's own is called.
    """
    if not training:
        with nnx.set_graph_mode(True):  # it walks the module in flax's default, and a tree shares nothing
            module.eval()
        return
    for node, name in _modes(module):
        if getattr(node, name) is None:
            setattr(node, name, _TRAINING[name])
    if type(module).train is not nnx.Module.train:
        module.train()


def is_in_eval_mode(module: nnx.Module) -> bool:
    """Return whether a module is entirely in evaluation mode, and not only in a part that its user has frozen.

    That is so if all of its layers with modes are, and every parameter is in the smallest sub-module around them.
    """
    if not (modes := _modes(module)) or type(module).train is not nnx.Module.train:
        return False
    if not all(getattr(node, name) for node, name in modes):
        return False
    with_modes, graph = {id(node) for node, _ in modes}, list(nnx.iter_graph(module, graph=True))
    paths = [path[:-1] for path, node in graph if id(node) in with_modes]
    around = tuple(keys[0] for keys in itertools.takewhile(lambda keys: len({*keys}) == 1, zip(*paths, strict=False)))
    return all(path[: len(around)] == around for path, node in graph if isinstance(node, nnx.Param))


def _modes(module: nnx.Module) -> list[tuple[Any, str]]:
    nodes = [node for _, node in nnx.iter_graph(module, graph=True) if isinstance(node, nnx.Module)]
    return [(node, name) for node in nodes for name in _TRAINING if name in vars(node)]


def sync_batchnorm(module: nnx.Module, axis: str) -> None:
    """Make each BatchNorm take its statistics over all replicas."""
    for _, node in nnx.iter_graph(module, graph=True):
        if isinstance(node, nnx.BatchNorm) and node.axis_name is None:
            node.axis_name = axis
            node.__class__ = SyncBatchNorm if type(node) is nnx.BatchNorm else type(node)


class SyncBatchNorm(nnx.BatchNorm):
    """A BatchNorm whose mask counts over all replicas: flax takes the mean of their means, of however many rows."""

    def __call__(self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None) -> jax.Array:
        """Normalize the rows of this replica."""
        averages = self.use_running_average if use_running_average is None else use_running_average
        if mask is None or averages:
            return super().__call__(x, use_running_average, mask=mask)
        features = {i % x.ndim for i in (self.axis if isinstance(self.axis, tuple) else (self.axis,))}
        dims, y = tuple({*range(x.ndim)} - features), x.astype(jnp.promote_types(x.dtype, jnp.float32))
        add = partial(jnp.sum, axis=dims, where=jnp.broadcast_to(mask, x.shape), keepdims=True)
        count, total = jax.lax.psum((add(jnp.ones(x.shape)), add(y)), str(self.axis_name))
        squares = jax.lax.psum(add(jnp.square(jnp.abs(y - total / count))), str(self.axis_name))
        now = jnp.squeeze(total / count, dims), jnp.squeeze(squares / count, dims)
        before, m = (self.mean[...], self.var[...]), self.momentum
        self.mean[...], self.var[...] = now
        outputs = super().__call__(x, use_running_average=True)
        self.mean[...], self.var[...] = (m * a + (1 - m) * b for a, b in zip(before, now, strict=True))
        return outputs


def fold_keys(module: nnx.Module, replica: Replica, batch_idx: jax.Array | None) -> Callable[[], None]:
    """Give each replica, and in an evaluation each `batch_idx`, other random numbers.

    Returns:
        A function that puts keys back, so that they leave the step as they came; not those that a step has written.
    """
    folded, keys = [], []
    differs = replica.splits and replica.count > 1
    for _, variable in nnx.iter_graph(module, graph=True):
        if not isinstance(variable, nnx.Variable) or not is_key(variable.get_value()):
            continue
        original = key = variable.get_value()
        if not isinstance(variable, nnx.RngKey):
            # A key of the user's own continues as it would on one device: there the first replica has it.
            if differs:
                key = jnp.where(replica.is_first, key, _fold(key, replica.index))
                variable.set_value(key)
                keys.append((variable, key, original))
            continue
        if batch_idx is not None:
            key = _fold(key, batch_idx)
        if differs:
            key = _fold(key, replica.index)
        if key is not original:
            variable.set_value(key)
            folded.append((variable, original))

    def put_back() -> None:
        # Always: nnx.remat and its like hand a key back as another value, though streams only ever count.
        for variable, original in folded:
            variable.set_value(original)
        for variable, key, original in keys:
            if variable.get_value() is key:  # nothing was written to it
                variable.set_value(original)

    return put_back


def _fold(key: jax.Array, number: jax.Array) -> jax.Array:
    fold = partial(jax.random.fold_in, data=number)
    for _ in range(key.ndim):  # layers that were built by nnx.vmap hold their keys stacked
        fold = jax.vmap(fold)
    return fold(key)
