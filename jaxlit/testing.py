"""Proofs that users can run too: fake devices, and the same training under every strategy."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

from jaxlit.callbacks.base import Callback
from jaxlit.distributed import jax_runs
from jaxlit.errors import ArgumentError
from jaxlit.fault_points import Crash as Crash
from jaxlit.fault_points import faults as faults
from jaxlit.state import is_key, leaf_name

if TYPE_CHECKING:
    from jaxlit.module import TrainModule
    from jaxlit.strategies.base import Strategy

PARTS = ("loss", "metrics", "grads", "params")
_FLAG = "--xla_force_host_platform_device_count"


def fake_devices(count: int) -> None:
    """Simulate `count` CPU devices; call it before the first use of jax, in a conftest say.

    Once jax runs it only checks that there are at least `count` devices.

    Args:
        count: How many.

    Raises:
        ArgumentError: `count` is no positive int.
        RuntimeError: jax runs already, with fewer devices.

    Example:
        >>> import jaxlit as jl
        >>> jl.testing.fake_devices(1)
    """
    if not isinstance(count, int) or count < 1:
        raise ArgumentError(f"fake_devices(count) takes a positive int, got {count!r}.")
    if not jax_runs():
        flags = re.sub(rf"{_FLAG}=\d+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={count}".strip()
        os.environ.pop("JAX_NUM_CPU_DEVICES", None)  # it would win over the flag
        jax.config.update("jax_platforms", "cpu")
        return
    if jax.device_count() < count:
        raise RuntimeError(
            f"fake_devices({count}) came after the first use of jax, which runs with {jax.device_count()} devices. "
            f"Call it earlier, or start Python with XLA_FLAGS={_FLAG}={count}."
        )


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
        loss: One float an optimizer step.
        metrics: One dict a step of the logged values.
        grads: Gradients of the first step by path.
        params: Parameters and floating state after the last step by path.
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
    from jaxlit.module import Optimizer, optimizer_of
    from jaxlit.trainer import Trainer

    module = model_fn()
    cls = type(module)

    def configure_optimizers(self: Any) -> Optimizer:
        own = optimizer_of(self, cls)
        return Optimizer(optax.chain(keep_first_grads(), tx or own.tx), own.wrt)

    # The class, not the object: an attribute would become part of the module's graph.
    module.__class__ = type(cls.__name__, (cls,), {"configure_optimizers": configure_optimizers})
    training = Training(f"{strategy} on {devices}")
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        strategy=strategy,
        devices=devices,
        max_steps=steps,
        log_every_n_steps=1,
        callbacks=[_Keep(training)],
        **(quiet | trainer_arguments),
    )
    before = _by_path(nnx.as_pure(nnx.state(module, nnx.RngCount)))
    trainer.fit(module, data)
    state = trainer.state
    training.grads = _by_path(state.opt_state[0].grads)
    training.params = _by_path((state.params, state.frozen, state.model_state), floating=True)
    after = _by_path(nnx.as_pure(nnx.state(module, nnx.RngCount)))
    training.random = any((before[k] != after[k]).any() for k in before)
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
    **trainer_arguments: Any,
) -> None:
    """Assert that a model trains to the same numbers under every strategy as on a single device.

    Losses, logged metrics and first-step gradients agree under any optimizer. Parameters and BatchNorm
    statistics agree under SGD or AdamW(eps=1e-3): under Adam with its default eps a parameter whose
    true gradient is zero moves by the sign of rounding noise. Strategies that run the step once a
    replica draw other random numbers than `single`; if the model draws some, they are compared to each
    other on the same number of devices.

    Args:
        model_fn: Returns a new module with the same weights at each call.
        data: A loader that gives the same batches each time.
        strategies: Names or objects.
        devices: Device counts to run each on; `single` runs on one.
        steps: Optimizer steps.
        tx: The optimizer in place of the module's own.
        rtol: Tolerance relative to the largest magnitude: of the metric, or among all gradients or parameters.
        compare: Which of "loss", "metrics", "grads", "params".
        **trainer_arguments: Other arguments of the Trainer.

    Raises:
        AssertionError: Two trainings differ; it names them, the part and the difference.
        ArgumentError: `compare` holds an unknown part.

    Example:
        >>> import jaxlit as jl, numpy as np
        >>> def check(model_fn):
        ...     data = jl.ArrayLoader({"x": np.ones((16, 2)), "y": np.ones((16, 1))}, 8)
        ...     jl.testing.assert_same_training(model_fn, data, strategies=["ddp", "fsdp"])
    """
    for part in compare:
        if part not in PARTS:
            raise ArgumentError(f"assert_same_training(compare=...) takes {PARTS}, got {part!r}.")
    options = {"steps": steps, "tx": tx, **trainer_arguments}
    single = train(model_fn, data, strategy="single", **options)
    for count in devices:
        of_replicas: Training | None = None
        for strategy in strategies:
            if strategy == "single":
                continue
            other = train(model_fn, data, strategy=strategy, devices=count, **options)
            reference = single
            if single.random and _is_per_replica(strategy):
                of_replicas = reference = of_replicas or other
            for part in compare:
                _assert_close(part, reference, other, rtol)


def _is_per_replica(strategy: Any) -> bool:
    from jaxlit.strategies.registry import resolve_strategy
    from jaxlit.strategies.replicas import PerReplica

    return isinstance(resolve_strategy(strategy, None), PerReplica)


def _assert_close(part: str, a: Training, b: Training, rtol: float) -> None:
    def named(training: Training) -> dict[str, Any]:
        value = getattr(training, part)
        if part == "loss":
            return {"loss": np.array(value)}
        if part == "metrics":
            names = sorted({k for row in value for k in row})
            return {k: np.array([row[k] for row in value if k in row]) for k in names}
        return value

    left, right = named(a), named(b)
    assert left.keys() == right.keys(), f"{part}: {a.name} has {sorted(left)}, {b.name} has {sorted(right)}"
    for name, x in left.items():
        y = right[name]
        assert x.shape == y.shape, f"{part} {name}: {a.name} has shape {x.shape}, {b.name} has {y.shape}"
        scale = np.abs(x).max(initial=0.0)
        worst = np.abs(x - y).max(initial=0.0)
        # An array whose true value is zero holds rounding noise of the size of the others.
        floor = max(np.abs(v).max(initial=0.0) for v in left.values()) if part in ("grads", "params") else 0.0
        assert worst <= rtol * max(scale, floor), (
            f"{part} {name}: {a.name} and {b.name} differ by {worst:.3g} where the largest value is {scale:.3g} "
            f"(rtol={rtol})"
        )


def _by_path(tree: Any, floating: bool = False) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        leaf_name(path): np.asarray(x)
        for path, x in leaves
        if not is_key(x) and (not floating or jax.numpy.issubdtype(x.dtype, jax.numpy.floating))
    }
