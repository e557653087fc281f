"""Looks at the program of a step for mistakes that its numbers would not show.

First what a training or an evaluation step writes; then, from the results on one batch and the traced program, how what
each of n replicas computes becomes what one device computes, with refusals of what cannot.
"""

import contextlib
import itertools
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlit.core.attributes import RETURN_THE_LOSS, check_hidden
from jaxlit.core.log import REDUCTIONS, Metric
from jaxlit.core.module import STAGES, watchers
from jaxlit.core.pure_module import Leaf, PureModule
from jaxlit.core.replica import Reduction, Replica
from jaxlit.errors import ModuleError, StateError
from jaxlit.programs import jaxpr
from jaxlit.programs.costs import Flops, count_flops
from jaxlit.programs.jaxpr import CONSTANT, LINEAR, ROWS, dependence, growing
from jaxlit.texts import is_key, leaf_name, listed, named_leaves
from jaxlit.variables import is_array

_logger = logging.getLogger("jaxlit")
_warned_of = set[str]()


def inspect_step(pure: PureModule, replica: Replica, *args: Any, twice: bool = False) -> None:
    """Note what a training step writes to, and refuse or warn of a program that is not what its author means.

    `args` are the abstract arguments of the step's body. With `twice` it is traced twice more, and a warning is logged
    if the programs differ.
    """
    closed = pure.body("training", replica).trace(*args).jaxpr
    traced, trained = pure.trace_of("training"), len(jax.tree.leaves(args[0]))
    traced.program = closed
    _check_hidden(pure, "training", closed)
    traced.changed = written_to(pure, closed, *args[:3])
    precision = pure.precision
    if any(traced.changed[:trained]) and precision.compute is not None and precision.held is None:
        raise StateError(
            f"{pure.name}.training_step writes to {pure.leaves(*args[:3])[traced.changed.index(True)].name}, which is "
            f"trained, and under precision={precision.name!r} it sees it as {jnp.dtype(precision.compute).name}: each "
            "step would round the weights to that. Use precision='32-true'."
        )
    flops = count_flops(closed.jaxpr) if precision.compute is not None else Flops()
    wide = sum(count for kind, count in flops.by_dtype.items() if kind.startswith("float32"))
    if 2 * wide > flops.count:
        kind, first = jnp.dtype(precision.compute).name, _first_wide_layer(pure, replica, args)
        cause = "a constant of float32, or a layer without dtype=, makes what comes after it so. Pass "
        cause = f"{first} gives float32, and so does what comes after it. Pass it, and its like, " if first else cause
        _logger.warning(
            f"Under precision={precision.name!r}, {wide / flops.count:.0%} of the matrix products of "
            f"{pure.name}.training_step take float32: {cause}dtype=jnp.{kind}."
        )
    gradients = jaxpr.reaches(closed.jaxpr, [0], gradient=True)
    reached = gradients[:trained]
    if traced.stepped is not None and any(traced.changed[:trained]) and any(reached):
        raise ModuleError(
            f"{pure.name}.training_step has updated parameters by self.{traced.stepped}, an optimizer of nnx. "
            f"{RETURN_THE_LOSS}"
        )
    if not pure.resumed:
        _warn_of_gradients(pure, gradients, args)
    # Two new functions: a trace of the body itself would be taken from the cache.
    traces = [jax.make_jaxpr(partial(pure.run, "training", replica, None))(*args) for _ in range(2 * twice)]
    texts = [[text for text, _ in jaxpr.described(x)] for x in traces]
    if twice and texts[0] != texts[1]:
        _logger.warning(
            f"{pure.name}.training_step gave a different program when it was traced again: it draws from numpy or "
            "random, or reads a clock. What it reads is frozen into the compiled step. Draw from nnx.Rngs, or pass it "
            "in the batch."
        )


def _first_wide_layer(pure: PureModule, replica: Replica, args: Any) -> str:
    """Return the path and class of the first layer that gives float32 without having received it, "" for none."""
    if sys.getprofile() is not None:  # one that runs cannot always be put back
        return ""
    names, inputs, found = dict[int, str](), dict[Any, list[Any]](), list[str]()

    def floats(x: Any) -> list[Any]:
        return [y.dtype for y in jax.tree.leaves(x) if is_array(y) and jnp.issubdtype(y.dtype, jnp.floating)]

    def watch(frame: Any, event: str, result: Any) -> None:
        layer = frame.f_locals.get("self") if frame.f_code.co_name in ("__call__", "training_step") else None
        if event == "call" and isinstance(layer, nnx.Module):
            if not names:  # of the module itself, whose step begins
                names.update((id(x), leaf_name(path)) for path, x in nnx.iter_graph(layer, graph=True))
            inputs[frame] = floats([x for name, x in frame.f_locals.items() if name != "self"])
        elif event == "return" and frame in inputs:
            is_first = jnp.float32 in floats(result) and jnp.float32 not in inputs.pop(frame)
            path = names.get(id(layer), "a layer")  # a transformation of nnx calls a copy
            found.extend([f"{path} ({type(layer).__name__})"] * (is_first and path != ""))

    with contextlib.suppress(Exception):  # it only adds to a warning
        try:
            sys.setprofile(watch)  # of one more trace; an inner layer returns first
            jax.make_jaxpr(partial(pure.run, "training", replica, None))(*args)
        finally:
            sys.setprofile(None)
    return next(iter(found), "")


def _warn_of_gradients(pure: PureModule, reached: Sequence[bool], args: Sequence[Any]) -> None:
    """Warn of parameters without a gradient, and of arrays in no Variable with one, which no optimizer trains."""
    changed, paths = pure.trace_of("training").changed, [path for path, _ in named_leaves(args[0])]
    used = [a or b for a, b in zip(reached, changed, strict=False)]  # a step may train its parameters itself
    if unused := [path for path, is_used in zip(paths, used, strict=False) if not is_used]:
        number = f"{len(unused)} of {len(paths)} parameters"
        if len(unused) == len(paths):
            number = "any parameter: nothing is trained"
        *_, leaf = around = unused[0].split(".")
        is_shared = any(path.split(".")[-1] == leaf for path, is_used in zip(paths, used, strict=False) if is_used)
        part = re.sub(r"\[.*", "", around[-2] if is_shared and len(around) > 1 else leaf)
        text = (
            f"The loss of {pure.name}.training_step does not depend on {number}. The gradient is zero: "
            f"{listed(unused)}. Call the layer in the step, or leave it out of training: "
            f"jl.Optimizer(tx, wrt=nnx.All(nnx.Param, nnx.Not(nnx.PathContains({part!r}))))."
        )
        if text not in _warned_of or len(unused) == len(paths):  # a public model may have some: once for several fits
            _logger.warning(text)
        _warned_of.add(text)
    leaves, arrays = pure.leaves(*args[:3]), jax.tree.leaves(args[:3])
    plain = [
        leaf
        for leaf, x, is_reached, writes in zip(leaves, arrays, reached, changed, strict=False)
        if leaf.kind is None and is_reached and not writes and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    if plain:
        of_flax = any(leaf.owner == "weightnorm" for leaf in plain)
        why = f" (nnx.WeightNorm holds its scale so in flax {flax.__version__})" * of_flax
        _logger.warning(
            f"The loss of {pure.name}.training_step has a gradient by arrays that are in no nnx.Variable, and stay as "
            f"they are: {listed([leaf.name for leaf in plain])}{why}. Hold what shall be trained in an nnx.Param, and "
            "a constant in an nnx.Variable."
        )


def _check_hidden(pure: PureModule, stage: str, closed: Any) -> None:
    """Refuse a step whose constants are arrays of Variables that nnx does not see in the module."""
    if not (constants := [x for x in jaxpr.numbers_of(closed) if isinstance(x, (jax.Array, np.ndarray))]):
        return

    def is_used(value: Any) -> bool:  # a numpy array becomes another one in a trace
        pairs = itertools.product(jax.tree.leaves(value), constants)
        return any(x is y or (isinstance(x, np.ndarray) and np.array_equal(x, y)) for x, y in pairs)

    watcher = watchers.pop(id(pure.origin), None)  # the module as the trace has seen it, without newer arrays
    try:
        check_hidden(pure.origin, f"{pure.name}.{STAGES[stage].step}", is_used)
    finally:
        if watcher is not None:
            watchers[id(pure.origin)] = watcher


def written_to(pure: PureModule, closed: Any, params: Any, frozen: Any, model_state: Any) -> tuple[bool, ...]:
    """Return for each leaf of the state whether a training step, given its program, writes to it."""
    parameters, count = (len(jax.tree.leaves(x)) for x in ((params, frozen), (params, frozen, model_state)))
    origins = _origins_of_state(pure, closed.jaxpr, [*range(count)], parameters)
    # nnx.scan and its like return every variable as a new value: what leaves as it came in was not written to.
    return tuple(x != i for i, x in enumerate(origins))


def _origins_of_state(pure: PureModule, program: Any, leaves: list[int], parameters: int) -> list[int | None]:
    """Return which input each of some leaves of the state is, of those that come after a step's loss."""
    compute = pure.precision.compute
    casts = () if compute is None else (jnp.dtype(jnp.float32), jnp.dtype(compute))
    exact, rounded = (jaxpr.origins(program, dtypes)[1:] for dtypes in ((), casts))
    # Only parameters are cast.
    return [(rounded if leaf < parameters else exact)[i] for i, leaf in enumerate(leaves)]


def inspect_evaluation(stage: str, loader: int | None, pure: PureModule, replica: Replica, *args: Any) -> None:
    """Refuse an evaluation step that writes to the module's state, but to metrics: only training changes it.

    The `args` are those of the step's body, abstract; the first three are the state.
    """
    trace = pure.body(stage, replica, loader).trace(*args)
    closed, (_, (written, *_)) = trace.jaxpr, trace.out_info
    pure.trace_of(stage, loader).program = closed
    _check_hidden(pure, stage, closed)
    leaves, state, parameters = pure.leaves(*args[:3]), jax.tree.leaves(args[:3]), len(jax.tree.leaves(args[:2]))
    indices, carried = sorted(written), []  # the order of a dict's leaves
    scratch = (nnx.RngState, nnx.Cache, nnx.Intermediate)  # what a step writes there is meant for itself
    for i, origin in zip(indices, _origins_of_state(pure, closed.jaxpr, indices, parameters), strict=True):
        is_scratch = leaves[i].owner == "normalizing" or issubclass(leaves[i].kind or object, scratch)
        if origin != i and leaves[i].owner == "metric" and stage != "predict" and not replica.splits:
            carried.append(i)
        # A key differs between replicas already.
        elif origin != i and not (is_scratch or (is_key(state[i]) and replica.splits)):
            raise StateError(
                f"{pure.name}.{STAGES[stage].step} wrote to {leaves[i].name}. Only training changes the state, so the "
                "write would be lost. Return the value, or log it; log an nnx metric itself: "
                f"self.log('acc', metric). Or write to the variable in on_{stage}_end. Draw random numbers from an "
                "nnx.Rngs that the module holds, whose streams differ between batches."
            )
    pure.trace_of(stage, loader).carried = tuple(carried)


@dataclass(frozen=True)
class StepTraces:
    """The program of a step's body on the rows of one of n replicas, and on the rows of all."""

    replica: Replica  # what the step sees
    program: Any  # the `ClosedJaxpr` for the rows of one replica
    longer: Any  # the one for the rows of all, on a single replica; None if the step could not be traced with them
    arguments: tuple  # what they take, abstract: (params, frozen, model_state, counters, batch)
    # what they return, abstract: (state, values, weights, outputs); in training the first value is the loss
    results: Any
    rows_of: tuple[bool, ...]  # which outputs have one row for each row of the batch
    step: str  # the name for messages, `Model.training_step`
    metrics: Sequence[Metric]  # what it logs
    rtol: float  # the relative difference of numbers that are taken for equal
    is_weighted: bool  # whether the loss comes with its weight

    @cached_property
    def places(self) -> list[range]:
        """The places of the state, values, weights and outputs among the leaves of the results."""
        ends = itertools.accumulate((len(jax.tree.leaves(x)) for x in self.results), initial=0)
        return list(itertools.starmap(range, itertools.pairwise(ends)))

    def dependence(self, parts: Collection[int] = ()) -> list[int]:
        """Return how each result depends on rows, and on the leaves of the state that replicas hold in parts."""
        *state, batch = map(jax.tree.leaves, self.arguments)
        inputs = [LINEAR if i in parts else CONSTANT for i in range(sum(map(len, state)))]
        inputs += [ROWS if x.ndim else CONSTANT for x in batch]
        grows = None if self.longer is None else growing(self.program.jaxpr, self.longer.jaxpr)
        bits, draws_alike = dependence(self.program.jaxpr, inputs, grows, str(self.replica.axis))
        if draws_alike:
            raise StateError(
                f"{self.step} draws random numbers for its rows from a key that is the same on every replica: each "
                "would draw the same for its own rows. Draw from nnx.Rngs, or from a typed key (jax.random.key) that "
                "the module holds in an nnx.Variable; or use strategy='ddp', whose steps see the entire batch."
            )
        return bits


# What a `Reduction` makes of the values of replicas, (n, ...).
_MADE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "keep": lambda x: x,
    **{name: partial(getattr(np, name), axis=0, keepdims=True) for name in REDUCTIONS},
    "times": lambda x: x * len(x),
    "over": lambda x: x / len(x),
}


class Seen:
    """A result of a step on a batch: of each replica, (n, ...), and of one device.

    `before` is what the two were before the step: what it has added is compared, to a relative difference of `rtol`.
    """

    def __init__(self, parts: Any, whole: Any, rtol: float, before: Sequence[Any] = (0, 0), later: Any = None) -> None:
        self.later = later
        rounding = float(jnp.finfo(whole.dtype).eps) if jnp.issubdtype(whole.dtype, jnp.inexact) else 0
        kind = complex if jnp.iscomplexobj(whole) else float  # an infinite complex number has no mean
        pairs = zip((parts, whole), before, strict=True)
        self.parts, self.whole = (x.astype(kind) - np.asarray(y).astype(kind) for x, y in pairs)
        sizes = [np.abs(x[np.isfinite(x)]).max(initial=0) for x in (self.parts, self.whole, whole)]
        self.tolerance = rtol * max(sizes[:2]) + rounding * sizes[2]

    def near(self, x: Any) -> np.ndarray:
        """Return which entries of an array are those of the batch's value."""
        return np.isclose(x, self.whole, rtol=0, atol=self.tolerance, equal_nan=True)

    def fits(self, *actions: str, total: Callable[[np.ndarray], Any] = lambda x: x) -> str:
        """Return the first action that makes the batch's value of the replicas', in total, or ""."""
        if self.parts.shape[1:] != self.whole.shape:
            return ""
        seen = [self, *[self.later] * (self.later is not None and bool(np.isfinite(self.later.parts).all()))]
        known = (x for x in actions if x in _MADE)
        return next((x for x in known if all(s.near(total(_MADE[x](s.parts))).all() for s in seen)), "")


SAY_WEIGHT = (
    "A mean over something else, such as the words that are no padding, takes its weight along: return "
    "{'loss': loss, 'total_weight': mask.sum()}, and call self.log(name, value, batch_size=mask.sum())."
)
Measure = Callable[[frozenset[int], int | None], list[Any]]


def reduction_of(
    traces: StepTraces,
    leaves: Sequence[Leaf] = (),
    changed: Sequence[bool] = (),
    measure: Measure | None = None,
    why: str = "",
) -> Reduction:
    """Return how a step's state, values and outputs become those of the entire batch.

    `leaves` are those of a training step's state, `changed` says which of them it writes to. `measure` is a function of
    the leaves that are held in parts, and of the replica whose rows all replicas get, None for their own, to what is
    `Seen` of each result. Without arrays there is none: what is declared is then taken for true, and anything else for
    a mean. `why` says why there is none though there are arrays.

    Raises:
        ModuleError: The loss is a sum where a mean is meant or the other way round, or an output differs.
        StateError: A leaf that the step writes to does not follow from those of the replicas, or the step draws the
            same random numbers on every replica.
    """
    bits, seen = traces.dependence(), None if measure is None else measure(frozenset(), None)
    actions, written, unclear = ["keep"] * len(bits), list(itertools.compress(traces.places[0], changed)), []
    for i in written:
        actions[i] = _of_leaf(traces, i, leaves[i], bits[i], measure, why)
    if parts := frozenset(i for i in written if actions[i] == "sum"):
        bits, seen = traces.dependence(parts), None if measure is None else measure(parts, None)
    for i in written:
        if actions[i] and i not in parts:
            continue
        adds_up = (bits[i] in (CONSTANT, LINEAR) or leaves[i].assumed == "sum") and (not seen or seen[i].fits("sum"))
        if not actions[i] or not adds_up:
            _refuse(traces, leaves[i], why)
    if parts:
        _check_reads(traces, leaves, parts, bits, seen)
    if measure is not None and seen is not None:
        loss = traces.places[1][0] if leaves else None
        if loss is not None and _is_unclear_loss(traces, measure, loss):
            unclear.append("the loss")
        for i, action, name in (*_of_values(traces, bits, seen), *_of_outputs(traces, bits, seen)):
            if i != loss:
                actions[i] = action
                unclear += [name] * bool(name)
    if unclear:
        _logger.warning(
            "%s: %s may differ from one device. On the first batch it is not a mean or a sum over rows, or rows that "
            "depend on no other row, and each of %d replicas sees its own rows. strategy='ddp' sees all of them. %s",
            *(traces.step, ", ".join(unclear), traces.replica.count, SAY_WEIGHT),
        )
    return Reduction(tuple(actions), parts)


def _of_leaf(traces: StepTraces, i: int, leaf: Leaf, bits: int, measure: Measure | None, why: str) -> str:
    """Return what is done with a leaf that a step writes to: "" if that is not known, "sum" if it may be one."""
    dtype, kind = jax.tree.leaves(traces.arguments)[i].dtype, leaf.kind or object
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "first"
    inexact, seen = jnp.issubdtype(dtype, jnp.inexact), None if measure is None else measure(frozenset(), None)[i]
    if issubclass(kind, nnx.RngState) or (bits == CONSTANT and not why and (not seen or seen.fits("keep"))):
        return "keep"
    if leaf.owner == "batchnorm":  # of a mask, or averaged on purpose
        return "mean"
    if seen is None or measure is None:
        return leaf.assumed or ("" if why else "mean" if inexact else "sum")
    if leaf.reduce_fx:
        return "sum" if leaf.reduce_fx == "sum" else seen.fits(leaf.reduce_fx)
    if not inexact or not seen.fits("mean") or (bits != LINEAR and leaf.assumed != "mean"):
        return "" if dtype == jnp.bool_ else "sum"
    if leaf.assumed or not seen.fits("keep"):
        return "sum" if leaf.assumed == "sum" and seen.fits("keep") else "mean"
    # Each replica has the batch's value: if no replica has added anything, it may be a sum as well.
    return "" if measure(frozenset([i]), None)[i].fits("sum") else "mean"


def _refuse(traces: StepTraces, leaf: Leaf, why: str) -> None:
    reason = why or "the program and the first batch do not show a sum or a mean over all rows"
    if leaf.reduce_fx:
        reason = f"it is declared by reduce_fx={leaf.reduce_fx!r}, which the first batch does not show"
    raise StateError(
        f"{traces.step} writes a value to {leaf.name} that depends on the rows of a batch, and each of "
        f"{traces.replica.count} replicas sees its own rows: {reason}. Write a mean or a running sum over rows, and "
        "declare one that is not seen: nnx.Variable(x, reduce_fx='sum'), 'mean', 'min' or 'max'. Or log the value "
        "instead, or use strategy='ddp', whose steps see the entire batch."
    )


def _check_reads(
    traces: StepTraces, leaves: Sequence[Leaf], parts: frozenset[int], bits: list[int], seen: list[Any] | None
) -> None:
    """Refuse a step that uses what replicas count in parts: each would see its own part only."""
    state, (loss, *_), *_ = traces.places
    for i, inputs in enumerate(jaxpr.sources(traces.program.jaxpr)):
        read = [leaves[k].name for k in sorted(parts) if inputs >> k & 1]
        # What adds up may depend on a part, but for the loss, which is differentiated on each replica.
        adds_up = bits[i] == LINEAR and i != loss and (seen is None or seen[i].fits("sum"))
        if read and i not in parts and (i in state or not adds_up):
            raise StateError(
                f"{traces.step} reads {read[0]}, which adds up over the rows that each of {traces.replica.count} "
                "replicas sees: a replica has its part only until the step ends. Read it in a hook, log the metric "
                "itself by self.log(name, metric), or use strategy='ddp'."
            )


def _is_unclear_loss(traces: StepTraces, measure: Measure, place: int) -> bool:
    """Return whether a loss may differ from one device; refuse one that is not what the strategy takes it for."""
    seen, wanted, n = measure(frozenset(), None), traces.replica.loss_reduction, traces.replica.count
    loss = seen[place]
    if traces.is_weighted:
        return not loss.fits("keep", total=partial(_weighted_mean, seen[traces.places[2][0]].parts))
    if loss.fits(wanted):
        return False
    kind, parts = loss.fits("sum", "mean"), loss.parts
    if not kind:
        # With the rows of one replica n times over, a sum is n times that of the replica, and another term stays.
        low, high = (measure(frozenset(), int(i))[place] for i in (parts.argmin(), parts.argmax()))
        grows = abs((high.whole - low.whole) / (high.parts[0] - low.parts[0]) / n - 1) < 0.01
        terms = [(x.parts.sum() - x.whole) / (n - 1) for x in (loss, high)]
        if not grows or abs(terms[0] - terms[1]) > n * loss.tolerance:
            return True
    raise ModuleError(
        f"{traces.step} returns a {kind or 'sum and another term'} over the rows of a batch under "
        f"loss_reduction={wanted!r}, and each of {n} replicas sees its own rows: their losses do not make that of the "
        "entire batch. Return a mean over the rows, or a sum under jl.strategies.ShardMapDDP(loss_reduction='sum'), or "
        "use 'ddp' or 'fsdp', whose steps see the entire batch."
    )


def _of_values(traces: StepTraces, bits: list[int], seen: list[Any]) -> Iterator[tuple[int, str, str]]:
    """Yield what is done with each logged value and weight: its place, the action, and its name if it may differ."""
    as_sum = {CONSTANT: ("over", "keep")}  # what is the same on each replica counts once
    _, values, weights, _ = traces.places
    for metric, i, k in zip(traces.metrics, values, weights, strict=True):
        of_weight = seen[k].fits(*as_sum.get(bits[k], ("keep", "over")), total=np.sum) or "keep"
        weight = _MADE[of_weight](seen[k].parts)
        if metric.reduce_fx == "mean":
            action = seen[i].fits("keep", "times", "mean", "sum", total=partial(_weighted_mean, weight))
        elif metric.reduce_fx == "sum":
            action = seen[i].fits(*as_sum.get(bits[i], ("keep", "over")), total=np.sum)
        else:
            order = ("mean", "sum", "keep") if bits[i] == LINEAR else ("keep", "mean", "sum")
            action = seen[i].fits(*order, total=getattr(np, metric.reduce_fx)) or "keep"
        yield k, of_weight, ""
        yield i, action or "keep", "" if action else f"the logged {metric.name!r}"


def _weighted_mean(weights: np.ndarray, x: np.ndarray) -> Any:
    return np.where(weights == 0, 0, x * weights).sum() / (weights.sum() or 1)


def _of_outputs(traces: StepTraces, bits: list[int], seen: list[Any]) -> Iterator[tuple[int, str, str]]:
    """Yield as `_of_values` what is done with outputs; refuse one without rows that differs and has no mean."""
    places, named = traces.places[3], named_leaves(traces.results[3])
    for i, (name, x), has_rows in zip(places, named, traces.rows_of, strict=True):
        output, inexact, action = seen[i], jnp.issubdtype(x.dtype, jnp.inexact), "keep"
        if has_rows:
            is_clear = output.near(output.parts.reshape(output.whole.shape)).mean() > 1 - 10 * traces.rtol
        else:
            action = output.fits(*["keep"] * (bits[i] == CONSTANT), *["mean"] * inexact, "sum")
            is_clear = bool(action)
            # A number of each replica, such as a masked mean: the replicas' are averaged.
            is_number = inexact and output.parts.shape[1:] == output.whole.shape
            if not action and (not is_number or traces.step.endswith("predict_step")):
                raise ModuleError(
                    f"{traces.step} returned {name or 'an array'}, {x.dtype}{list(x.shape)}, which differs between the "
                    "replicas and has no row for each row of the batch. Return rows, log it with self.log, or use "
                    "strategy='ddp', whose steps see the entire batch."
                )
        yield i, action or "mean", "" if is_clear else f"the output {name!r}" if name else "what it returns"
