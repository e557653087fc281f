"""The same training under every strategy, compared number by number."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.core.module import TrainModule
from jaxlit.core.optimizer import Optimizer
from jaxlit.core.parts import optimizer_of
from jaxlit.core.replica import num_rows
from jaxlit.data.loaders import DataModule
from jaxlit.errors import ArgumentError, noting_place
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.registry import resolve_strategy
from jaxlit.strategies.replicas import Replicas
from jaxlit.strategies.shard_map import ShardMapDDP
from jaxlit.texts import is_key, leaf_name
from jaxlit.trainer.trainer import Trainer

PARTS = ("loss", "metrics", "grads", "params")

RTOL: Mapping[str, float] = {"32-true": 1e-5, "bf16-mixed": 2e-2, "16-mixed": 2.5e-3}
"""How far trainings may differ, by precision.

Strategies add up rows in different orders, and round differently: in float32 by 2**-24 each time, so that 1e-5 allows
170 roundings. The tolerances of the 16-bit floats allow five roundings, of 2**-8 and of 2**-11; a gradient that misses
one of eight replicas is off by an eighth.
"""


@dataclass
class Training:
    """The results of one training."""

    name: str  # strategy and device count
    loss: list[float] = field(default_factory=list)  # of each batch
    metrics: list[dict[str, float]] = field(default_factory=list)  # the logged values of each step
    grads: dict[str, np.ndarray] = field(default_factory=dict)  # of the first step by path
    params: dict[str, np.ndarray] = field(default_factory=dict)  # after the last step by path, with all other state
    random: bool = False  # whether the step drew random numbers


_NONE: Mapping[str, Sequence[Any]] = MappingProxyType({})


def assert_same_training(
    model_fn: Callable[[], TrainModule],
    data: Any,
    *,
    strategies: Sequence[str | Strategy],
    devices: Sequence[int] = (1, 2, 8),
    steps: int = 5,
    tx: optax.GradientTransformation | None = None,
    rtol: float | Mapping[str, float] = RTOL,
    compare: Sequence[str] = PARTS,
    reference: Callable[..., Sequence[Any]] | None = None,
    factors: Mapping[str, Sequence[Any]] = _NONE,
    **trainer_arguments: Any,
) -> dict[str, float]:
    """Assert that a model trains to the same numbers under every strategy as on a single device.

    Losses, logged metrics and first-step gradients agree under any optimizer. Parameters and other floating state
    agree under SGD or AdamW(eps=1e-3): under Adam with its default eps a parameter whose true gradient is zero moves
    by the sign of rounding noise. Whole numbers must be equal. Where all batches divide among the devices, a part of
    the first is put after them as one step more, so that a tail is trained on too. Strategies that run the step once
    a replica draw other random numbers than `single`; if the model draws some, they are compared with `replicas`, and
    `replicas` with `shard_map`, on as many replicas. All share the compiled step: only `reference` finds a fault in it.

    Args:
        model_fn: Returns a new module with the same weights at each call.
        data: A loader that gives the same batches each time, or a DataModule.
        strategies: Names or objects.
        devices: Device counts to run on; `single` runs on one.
        steps: Optimizer steps, without that of a tail.
        tx: The optimizer in place of the module's own.
        rtol: Tolerance relative to the largest magnitude: of the metric, or among all gradients or parameters. One
            number, or one for each precision.
        compare: Which of "loss", "metrics", "grads", "params"; the last is the module's entire state.
        reference: Trains a module in place on a list of batches, without a Trainer, and returns the loss of each
            batch; takes the value of each factor by its name. `single` is compared with it in losses and parameters.
        factors: Values of arguments of the Trainer, by its name. The comparison is repeated for each combination.
        **trainer_arguments: Other arguments of the Trainer.

    Returns:
        The largest difference of each training, relative as `rtol` is, by its name.

    Raises:
        AssertionError: Two trainings differ; it names them, the part and the difference.
        ArgumentError: An argument is out of its set, or nothing is compared.

    Example:
        >>> import jaxlit as jl, numpy as np
        >>> def check(model_fn):
        ...     data = [np.ones((8, 2), np.float32)]
        ...     jl.testing.assert_same_training(model_fn, data, strategies=["ddp"], factors={"max_epochs": [1, 2]})
    """
    comparison = _Comparison(model_fn, data, tuple(devices), steps, rtol, compare, reference)
    return comparison.run([x for x in strategies if x != "single"], factors, {"tx": tx, **trainer_arguments})


@dataclass(frozen=True)
class _Comparison:
    """The arguments of `assert_same_training`; see there."""

    model_fn: Callable[[], TrainModule]
    data: Any
    devices: tuple[int, ...]
    steps: int
    rtol: float | Mapping[str, float]
    compare: Sequence[str]
    reference: Any

    def run(
        self, strategies: Sequence[Any], factors: Mapping[str, Sequence[Any]], arguments: Mapping[str, Any]
    ) -> dict[str, float]:
        """Compare the trainings for each combination of the factors' values, and return the differences by name."""
        for name, values in factors.items():  # the letters of a str would be values too
            valid, rule = bool(values) and not isinstance(values, str), f"takes a sequence of values of {name!r}"
            check.require(valid, "factors", factors, rule, owner="assert_same_training")
        if not strategies and self.reference is None:
            raise ArgumentError(
                "assert_same_training(strategies=...) has nothing to compare 'single' with. Name another strategy, or "
                "give a loop of your own as reference=."
            )
        differences: dict[str, float] = {}
        for values in itertools.product(*factors.values()):
            case = dict(zip(factors, values, strict=True))
            precision = {**arguments, **case}.get("precision", "32-true")
            rtol = self.rtol[precision] if isinstance(self.rtol, Mapping) else self.rtol
            for parts, first, other in self._pairs(strategies, {**arguments, **case}, case):
                other.name = ", ".join([other.name, *(f"{name}={value}" for name, value in case.items())])
                for part in parts:
                    difference = _assert_close(part, first, other, rtol) if part in self.compare else 0.0
                    # Two objects of one class have one name.
                    differences[other.name] = max(difference, differences.get(other.name, 0.0))
        return differences

    def _pairs(
        self, strategies: Sequence[Any], arguments: dict[str, Any], case: dict[str, Any]
    ) -> Iterator[tuple[Sequence[str], Training, Training]]:
        """Yield the parts to compare, the training that is right, and the other one."""
        batches, tails = self._batches(self.steps * arguments.get("accumulate_grad_batches", 1))
        run = partial(train, self.model_fn, batches, steps=self.steps + tails, **arguments)
        single = run(strategy="single")
        if self.reference is not None:
            module = self.model_fn()
            losses = [float(loss) for loss in self.reference(module, batches, **case)]
            state = nnx.as_pure(nnx.state(module, nnx.Not(nnx.Intermediate), graph=True))
            by_hand = Training("the reference", loss=losses, params=by_path(state))
            yield ("loss", "params"), by_hand, replace(single)  # a loop returns no other parts
        for strategy, count in itertools.product(strategies, self.devices):
            other, (kin, replicas) = run(strategy=strategy, devices=count), _kin_of(strategy, count)
            first = run(strategy=kin, devices=replicas) if single.random and kin is not None else single
            yield PARTS, first, other

    def _batches(self, count: int) -> tuple[list[Any], int]:
        """Return the first batches of the loader, repeated if it ends, and how many tails were added."""
        data = self.data
        if isinstance(data, DataModule):
            data.setup("fit")
            data = data.train_dataloader()
        batches: list[Any] = []
        while len(batches) < count:
            more = list(itertools.islice(iter(data), count - len(batches)))
            if not more:
                raise ArgumentError("assert_same_training(data=...) gave no batch. Give a re-iterable loader.")
            batches += more
        counts = [n for n in self.devices if n > 1]
        rows = num_rows(batches[0])
        if all(any(num_rows(batch) % n for batch in batches) for n in counts) or rows == 1:
            return batches, 0
        size = next((r for r in range(rows - 1, 0, -1) if all(r % n for n in counts)), rows - 1)
        return [*batches, jax.tree.map(lambda x: x[:size] if np.ndim(x) else x, batches[0])], 1


def _kin_of(strategy: Any, devices: int) -> tuple[Strategy | None, int]:
    """Return another strategy that draws the same random numbers, and its devices; None if they draw as `single`."""
    resolved: Any = resolve_strategy(strategy, None)
    if not resolved.per_replica:
        return None, devices
    names = [name for name in ("sync_batchnorm", "loss_reduction") if hasattr(resolved, name)]
    cls = ShardMapDDP if isinstance(resolved, Replicas) else Replicas
    replicas = getattr(resolved, "count", None) or devices
    return cls(**{name: getattr(resolved, name) for name in names}), replicas


class _Keep(Callback):
    def __init__(self, training: Training) -> None:
        self.training = training

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.training.loss.append(float(outputs["loss"]))

    def on_log(self, trainer: Any, values: dict[str, float], step: int) -> None:
        self.training.metrics.append(values)


def train(
    model_fn: Callable[[], TrainModule],
    data: Any,
    *,
    strategy: str | Strategy,
    devices: int | str = "auto",
    steps: int = 5,
    tx: optax.GradientTransformation | None = None,
    **trainer_arguments: Any,
) -> Training:
    """Train a new model for some steps and return the results that every strategy must reproduce.

    The arguments are those of `assert_same_training`.
    """
    module = model_fn()
    cls = type(module)

    def configure_optimizers(self: Any) -> Optimizer:
        optimizer = optimizer_of(self, cls)
        return Optimizer(optax.chain(keep_first_grads(), tx or optimizer.tx), optimizer.wrt)

    # The class, not the object: an attribute would become part of the module's graph.
    module.__class__ = type(cls.__name__, (cls,), {"configure_optimizers": configure_optimizers})
    plain = type(strategy).__str__ is object.__str__  # which would print its address
    training = Training(f"{type(strategy).__name__ if plain else strategy} on {devices}")
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        strategy=strategy,  # type: ignore[arg-type]  # a registered name as well
        devices=devices,
        max_steps=steps,
        log_every_n_steps=1,
        callbacks=[_Keep(training)],
        **(quiet | trainer_arguments),
    )

    def counts() -> dict[str, np.ndarray]:
        return by_path(nnx.as_pure(nnx.state(module, nnx.RngCount, graph=True)))

    before = counts()
    other_state = nnx.as_pure(nnx.state(module, nnx.Not(nnx.RngState), graph=True))
    with noting_place(f"the training under {training.name}, of {trainer_arguments}"):
        trainer.fit(module, data)
    state = trainer.state
    training.grads = by_path(state.opt_state[0].grads)
    for part in state.variables:
        training.params |= by_path(part)
    # By a stream, which counts, or by a key that the module holds besides them.
    has_drawn = any((x != before[name]).any() for name, x in counts().items())
    training.random = has_drawn or any(map(is_key, jax.tree.leaves(other_state)))
    return training


def by_path(tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a pytree by their paths, keys as raw data and 16-bit floats as float32."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [(leaf_name(path), jax.random.key_data(x) if is_key(x) else x) for path, x in leaves]
    # numpy does not know bfloat16 as a float.
    return {name: np.asarray(x, np.float32 if x.dtype in (jnp.bfloat16, jnp.float16) else None) for name, x in arrays}


class KeepFirstGrads(NamedTuple):
    """The state of `keep_first_grads`."""

    count: jax.Array  # () int32
    grads: Any  # the gradients of step 0, the shape of the parameters


def keep_first_grads() -> optax.GradientTransformation:
    """Return a transform that keeps the gradients of the first step; put it first in a chain.

    They become part of the optimizer state, so every strategy is read alike.
    """

    def init(params: Any) -> KeepFirstGrads:
        return KeepFirstGrads(jnp.zeros((), "int32"), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, KeepFirstGrads]:
        first = state.count == 0
        grads = jax.tree.map(lambda old, new: jnp.where(first, new, old), state.grads, updates)
        return updates, KeepFirstGrads(state.count + 1, grads)

    return optax.GradientTransformation(init, update)


def _assert_close(part: str, a: Training, b: Training, rtol: float) -> float:
    """Assert that two trainings agree in a part; return their largest difference, relative to the magnitude."""
    left, right = _arrays(part, a), _arrays(part, b)
    prefix = "the gradient of the first step under " if part == "grads" else ""
    assert left.keys() == right.keys(), f"{part}: {a.name} has {sorted(left)}, {b.name} has {sorted(right)}"
    sizes = {name: np.abs(x).max(initial=0.0) for name, x in left.items() if np.issubdtype(x.dtype, np.inexact)}
    # An array whose true value is zero holds rounding noise of the size of the others; counts and keys have none.
    floor, largest = max(sizes.values(), default=0.0) if part in ("grads", "params") else 0.0, 0.0
    for name, x in left.items():
        y = right[name]
        assert x.shape == y.shape, f"{part} {name}: {a.name} has shape {x.shape}, {b.name} has {y.shape}"
        if name not in sizes:
            assert (x == y).all(), f"{part} {name}: {a.name} has {x}, {b.name} has {y}"
            continue
        scale, worst = max(sizes[name], floor), np.abs(x - y).max(initial=0.0)
        assert worst <= rtol * scale, (
            f"{part} {name}: {prefix}{a.name} and {b.name} differ by {worst:.3g} where the largest value is "
            f"{sizes[name]:.3g} (rtol={rtol})"
        )
        largest = max(largest, float(worst / scale) if worst else 0.0)
    return largest


def _arrays(part: str, training: Training) -> dict[str, Any]:
    value = getattr(training, part)
    if part == "loss":
        return {"loss": np.array(value)}
    if part == "metrics":
        names = sorted({k for row in value for k in row})
        return {k: np.array([row[k] for row in value if k in row]) for k in names}
    return value
