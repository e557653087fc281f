"""One training, and its results that every strategy must reproduce."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxlit.callbacks.base import Callback
from jaxlit.leaf_names import is_key, leaf_name
from jaxlit.notes import noting_place

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.strategies.base import Strategy


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
        return KeepFirstGrads(jnp.zeros((), "int32"), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, KeepFirstGrads]:
        first = state.count == 0
        kept = jax.tree.map(lambda old, new: jnp.where(first, new, old), state.grads, updates)
        return updates, KeepFirstGrads(state.count + 1, kept)

    return optax.GradientTransformation(init, update)


@dataclass
class Training:
    """The results of one training.

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
    """Train a new model for some steps and return the results that every strategy must reproduce.

    Args:
        model_fn: Returns a new module with the same weights at each call.
        data: A loader.
        strategy: The strategy.
        devices: The number of devices.
        steps: Optimizer steps.
        tx: The optimizer in place of the module's own.
        **trainer_arguments: Other arguments of the Trainer.
    """
    from jaxlit.core.optimizer import Optimizer
    from jaxlit.core.optimizer_of import optimizer_of
    from jaxlit.trainer import Trainer

    module = model_fn()
    cls = type(module)

    def configure_optimizers(self: Any) -> Optimizer:
        own = optimizer_of(self, cls)
        return Optimizer(optax.chain(keep_first_grads(), tx or own.tx), own.wrt)

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
    counts = lambda: by_path(nnx.as_pure(nnx.state(module, nnx.RngCount)))  # noqa: E731
    before, kept = counts(), nnx.as_pure(nnx.state(module, nnx.Not(nnx.RngState)))
    with noting_place(f"the training under {training.name}, of {trainer_arguments}"):
        trainer.fit(module, data)
    state = trainer.state
    training.grads = by_path(state.opt_state[0].grads)
    for part in state.variables:
        training.params |= by_path(part)
    # By a stream, which counts, or by a key that the module holds besides them.
    drawn = any((x != before[name]).any() for name, x in counts().items())
    training.random = drawn or any(map(is_key, jax.tree.leaves(kept)))
    return training


def by_path(tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a pytree by their paths, keys as raw data and 16-bit floats as float32."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [(leaf_name(path), jax.random.key_data(x) if is_key(x) else x) for path, x in leaves]
    # numpy does not know bfloat16 as a float.
    return {name: np.asarray(x, np.float32 if x.dtype in (jnp.bfloat16, jnp.float16) else None) for name, x in arrays}
