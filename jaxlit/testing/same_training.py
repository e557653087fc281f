"""The same training under every strategy, compared number by number."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxlit.callbacks.base import Callback
from jaxlit.core.replica import num_rows
from jaxlit.data.datamodule import DataModule
from jaxlit.errors import ArgumentError
from jaxlit.leaf_names import is_key, leaf_name

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.strategies.base import Strategy

PARTS = ("loss", "metrics", "grads", "params")


class KeepFirstGrads(NamedTuple):
    """The state of `keep_first_grads`."""

    count: jax.Array  # () int32
    grads: Any  # the gradients of step 0, the shape of the parameters


def keep_first_grads() -> optax.GradientTransformation:
    """Return a transform that keeps the gradients of the first step; put it first in a chain.

    They become part of the optimizer state, so every strategy is read alike.

    Example:
        >>> import jaxlit as jl, optax
        >>> tx = optax.chain(jl.testing.keep_first_grads(), optax.adamw(1e-3))
    """

    def init(params: Any) -> KeepFirstGrads:
        return KeepFirstGrads(jax.numpy.zeros((), "int32"), jax.tree.map(jax.numpy.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, KeepFirstGrads]:
        first = state.count == 0
        kept = jax.tree.map(lambda old, new: jax.numpy.where(first, new, old), state.grads, updates)
        return updates, KeepFirstGrads(state.count + 1, kept)

    return optax.GradientTransformation(init, update)


@dataclass
class Training:
    """What one training gave.

    Attributes:
        name: Strategy and device count.
        loss: One float a batch.
        metrics: One dict a step of the logged values.
        grads: Gradients of the first step by path.
        params: The module's arrays after the last step by path: parameters and all other state.
        random: Whether the step drew random numbers.
    """

    name: str
    loss: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    grads: dict[str, np.ndarray] = field(default_factory=dict)
    params: dict[str, np.ndarray] = field(default_factory=dict)
    random: bool = False


class _Keep(Callback):
    def __init__(self, training: Training) -> None:
        self.training = training

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.training.loss.append(float(outputs["loss"]))

    def on_log(self, trainer: Any, values: dict[str, float], step: int) -> None:
        self.training.metrics.append(values)


def train(
    model_fn: "Callable[[], TrainModule]",
    data: Any,
    *,
    strategy: "str | Strategy",
    devices: int | str = "auto",
    steps: int = 5,
    tx: optax.GradientTransformation | None = None,
    **trainer_arguments: Any,
) -> Training:
    """Train a fresh model for some steps and return what every strategy must agree on.

    Args:
        model_fn: Returns a new module with the same weights at each call.
        data: A loader.
        strategy: The strategy.
        devices: The number of devices.
        steps: Optimizer steps.
        tx: The optimizer in place of the module's own.
        **trainer_arguments: Other arguments of the Trainer.
    """
    from jaxlit.core.module import optimizer_of
    from jaxlit.core.optimizer import Optimizer
    from jaxlit.trainer import Trainer

    module = model_fn()
    cls = type(module)

    def configure_optimizers(self: Any) -> Optimizer:
        own = optimizer_of(self, cls)
        return Optimizer(optax.chain(keep_first_grads(), tx or own.tx), own.wrt)

    # The class, not the object: an attribute would become part of the module's graph.
    module.__class__ = type(cls.__name__, (cls,), {"configure_optimizers": configure_optimizers})
    plain = type(strategy).__str__ is object.__str__  # which would show where in memory it is
    training = Training(f"{type(strategy).__name__ if plain else strategy} on {devices}")
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        strategy=strategy,
        devices=devices,
        max_steps=steps,
        log_every_n_steps=1,
        callbacks=[_Keep(training)],
        **(quiet | trainer_arguments),
    )
    before, own_keys = _by_path(nnx.as_pure(nnx.state(module, nnx.RngCount))), _has_own_keys(module)
    try:
        trainer.fit(module, data)
    except Exception as error:
        error.add_note(f"It was raised by the training under {training.name}.")
        raise
    state = trainer.state
    training.grads = _by_path(state.opt_state[0].grads)
    for part in (state.params, state.frozen, state.model_state):
        training.params |= _by_path(part)
    after = _by_path(nnx.as_pure(nnx.state(module, nnx.RngCount)))
    training.random = own_keys or any((before[k] != after[k]).any() for k in before)
    return training


def assert_same_training(
    model_fn: "Callable[[], TrainModule]",
    data: Any,
    *,
    strategies: "Sequence[str | Strategy]",
    devices: Sequence[int] = (1, 2, 8),
    steps: int = 5,
    tx: optax.GradientTransformation | None = None,
    rtol: float = 1e-5,
    compare: Sequence[str] = PARTS,
    reference: "Callable[[TrainModule, list[Any]], Sequence[Any]] | None" = None,
    **trainer_arguments: Any,
) -> None:
    """Assert that a model trains to the same numbers under every strategy as on a single device.

    Losses, logged metrics and first-step gradients agree under any optimizer. Parameters and other floating state
    agree under SGD or AdamW(eps=1e-3): under Adam with its default eps a parameter whose true gradient is zero moves
    by the sign of rounding noise. Whole numbers must be equal. Where all batches divide among the devices, a part of
    the first is put behind them as one step more, so that a tail is trained on too. Strategies that run the step once
    a replica draw other random numbers than `single`; if the model draws some, they are compared with `simulate`, and
    `simulate` with `shard_map`, on as many replicas.

    Strategies share the steps that they compile, and with them a fault: only a loop of your own, `reference`, knows
    what the numbers should be.

    Args:
        model_fn: Returns a new module with the same weights at each call.
        data: A loader that gives the same batches each time, or a DataModule.
        strategies: Names or objects.
        devices: Device counts to run each on; `single` runs on one.
        steps: Optimizer steps, beside that of a tail.
        tx: The optimizer in place of the module's own.
        rtol: Tolerance relative to the largest magnitude: of the metric, or among all gradients or parameters.
        compare: Which of "loss", "metrics", "grads", "params"; the last is the module's whole state.
        reference: Trains a module in place on a list of batches, without a Trainer, and returns the loss of each
            batch; `single` is compared with it in losses and parameters.
        **trainer_arguments: Other arguments of the Trainer.

    Raises:
        AssertionError: Two trainings differ; it names them, the part and the difference.
        ArgumentError: `compare` holds an unknown part, or there is nothing to compare with.

    Example:
        >>> import jaxlit as jl, numpy as np
        >>> def check(model_fn):
        ...     data = jl.ArrayLoader({"x": np.ones((16, 2)), "y": np.ones((16, 1))}, 8)
        ...     jl.testing.assert_same_training(model_fn, data, strategies=["ddp", "fsdp"])
    """
    others = _others(strategies, compare, reference)
    batches, tails = _some_batches(data, steps * trainer_arguments.get("accumulate_grad_batches", 1), devices)
    options = {"steps": steps + tails, "tx": tx, **trainer_arguments}
    single = train(model_fn, batches, strategy="single", **options)
    if reference is not None:
        told = [part for part in ("loss", "params") if part in compare]  # all that such a loop tells
        _assert_close(told, _train_by_hand(reference, model_fn(), batches), single, rtol)
    for count, strategy in itertools.product(devices, others):
        other = train(model_fn, batches, strategy=strategy, devices=count, **options)
        kin = _kin_of(strategy) if single.random and _is_per_replica(strategy) else None
        first = single if kin is None else train(model_fn, batches, strategy=kin, devices=count, **options)
        _assert_close(compare, first, other, rtol)


def _others(strategies: Sequence[Any], compare: Sequence[str], reference: Any) -> list[Any]:
    """Return what is compared with `single`; refuse an unknown part, and a comparison of nothing."""
    for part in compare:
        if part not in PARTS:
            raise ArgumentError(f"assert_same_training(compare=...) takes {PARTS}, got {part!r}.")
    others = [s for s in strategies if s != "single"]
    if not others and reference is None:
        raise ArgumentError(
            f"assert_same_training(strategies={list(strategies)}) has nothing to compare 'single' with. Name another "
            "strategy, or give a loop of your own as reference=."
        )
    return others


def _some_batches(data: Any, count: int, devices: Sequence[int]) -> tuple[list[Any], int]:
    """Return the first batches of a loader, begun again where it ends, and how many tails were put behind them."""
    if isinstance(data, DataModule):
        data.setup("fit")
        data = data.train_dataloader()
    batches: list[Any] = []
    while len(batches) < count:
        some = list(itertools.islice(iter(data), count - len(batches)))
        if not some:
            raise ArgumentError("assert_same_training(data=...) gave no batch. Give a loader that begins again.")
        batches += some
    several = [n for n in devices if n > 1]
    rows = num_rows(batches[0])
    if all(any(num_rows(batch) % n for batch in batches) for n in several) or rows == 1:
        return batches, 0
    size = next((r for r in range(rows - 1, 0, -1) if all(r % n for n in several)), rows - 1)
    return [*batches, jax.tree.map(lambda x: x[:size] if np.ndim(x) else x, batches[0])], 1


def _train_by_hand(reference: Any, module: Any, batches: list[Any]) -> Training:
    losses = [float(x) for x in reference(module, batches)]
    if len(losses) != len(batches):
        raise ArgumentError(
            f"assert_same_training(reference=...) must return the loss of each of {len(batches)} batches, got "
            f"{len(losses)}."
        )
    kept = nnx.as_pure(nnx.state(module, nnx.Not(nnx.Intermediate)))
    return Training("the reference", loss=losses, params=_by_path(kept))


def _is_per_replica(strategy: Any) -> bool:
    from jaxlit.strategies.registry import resolve_strategy
    from jaxlit.strategies.replicas import PerReplica

    return isinstance(resolve_strategy(strategy, None), PerReplica)


def _kin_of(strategy: Any) -> "Strategy":
    """Return another strategy that draws the same random numbers on as many replicas."""
    from jaxlit.strategies.registry import resolve_strategy
    from jaxlit.strategies.shard_map import ShardMapDDP
    from jaxlit.strategies.simulated import Simulated

    given: Any = resolve_strategy(strategy, None)
    cls = ShardMapDDP if isinstance(given, Simulated) else Simulated
    return cls(sync_batchnorm=given.sync_batchnorm, loss_reduction=given.loss_reduction)


def _assert_close(parts: Sequence[str], a: Training, b: Training, rtol: float) -> None:
    for part in parts:
        _assert_part_close(part, a, b, rtol)


def _assert_part_close(part: str, a: Training, b: Training, rtol: float) -> None:
    def named(training: Training) -> dict[str, Any]:
        value = getattr(training, part)
        if part == "loss":
            return {"loss": np.array(value)}
        if part == "metrics":
            names = sorted({k for row in value for k in row})
            return {k: np.array([row[k] for row in value if k in row]) for k in names}
        return value

    left, right = named(a), named(b)
    what = "the gradient of the first step under " if part == "grads" else ""
    assert left.keys() == right.keys(), f"{part}: {a.name} has {sorted(left)}, {b.name} has {sorted(right)}"
    for name, x in left.items():
        y = right[name]
        assert x.shape == y.shape, f"{part} {name}: {a.name} has shape {x.shape}, {b.name} has {y.shape}"
        if not np.issubdtype(x.dtype, np.inexact):
            assert (x == y).all(), f"{part} {name}: {a.name} has {x}, {b.name} has {y}"
            continue
        scale = np.abs(x).max(initial=0.0)
        worst = np.abs(x - y).max(initial=0.0)
        # An array whose true value is zero holds rounding noise of the size of the others.
        floor = max(np.abs(v).max(initial=0.0) for v in left.values()) if part in ("grads", "params") else 0.0
        assert worst <= rtol * max(scale, floor), (
            f"{part} {name}: {what}{a.name} and {b.name} differ by {worst:.3g} where the largest value is {scale:.3g} "
            f"(rtol={rtol})"
        )


def _by_path(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [(leaf_name(path), jax.random.key_data(x) if is_key(x) else x) for path, x in leaves]
    # numpy takes bfloat16 for no float.
    return {name: np.asarray(x, np.float32 if x.dtype in (jnp.bfloat16, jnp.float16) else None) for name, x in arrays}


def _has_own_keys(module: Any) -> bool:
    """Tell whether a module holds keys beside those of its streams."""
    state = nnx.as_pure(nnx.state(module, nnx.Not(nnx.RngState)))
    return any(is_key(x) for x in jax.tree.leaves(state))
