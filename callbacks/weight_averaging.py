"""Averages of the weights, which evaluations see and the module has after a fit."""

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback, steps_of
from jaxlit.errors import ArgumentError

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


class WeightAveraging(Callback):
    """Keep the mean of the weights of many steps: stochastic weight averaging.

    The mean is kept in the training state, split over the devices as the weights are, saved in checkpoints and restored
    bit by bit. Validations of a fit and `trainer.apply` run with it, and `fit` leaves it in the module; what is trained
    never sees it. Until the first average it is the weights themselves. Batch statistics stay those of the training.

    A learning rate that stays high, or rises again, is a matter of the optimizer's schedule.

    Source: Izmailov et al., Averaging weights leads to wider optima and better generalization, arXiv 1803.05407.

    Args:
        update_every_n_steps: Optimizer steps between weights that are averaged.
        update_starting_at_step: The first step whose weights are, from 0.
        update_starting_at_epoch: The first epoch whose weights are, from 0; it needs a loader with a length.

    Raises:
        ArgumentError: An argument is out of its set, or both starts are given.

    Example:
        >>> import jaxlit as jl
        >>> swa = jl.callbacks.WeightAveraging(update_every_n_steps=10, update_starting_at_epoch=8)
        >>> trainer = jl.Trainer(max_epochs=10, callbacks=swa, logger=False)
    """

    def __init__(
        self,
        *,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        name = type(self).__name__
        check.integer("update_every_n_steps", update_every_n_steps, low=1, owner=name)
        check.integer("update_starting_at_step", update_starting_at_step, low=0, also=(None,), owner=name)
        check.integer("update_starting_at_epoch", update_starting_at_epoch, low=0, also=(None,), owner=name)
        if update_starting_at_step is not None and update_starting_at_epoch is not None:
            raise ArgumentError(f"{name} takes update_starting_at_step or update_starting_at_epoch, got both.")
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step, self.update_starting_at_epoch = update_starting_at_step, update_starting_at_epoch
        self._start = update_starting_at_step or 0

    def average(self, average: jax.Array, weights: jax.Array, count: jax.Array) -> jax.Array:
        """Return the average with one more array of weights in it; a pure function, to be overridden.

        Args:
            average: The average so far, float32 or wider.
            weights: The weights, of the same dtype.
            count: () int32, how many arrays the average is of, at least 1.
        """
        return average + (weights - average) / (count + 1).astype(average.dtype)

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Find the first step."""
        if self.update_starting_at_epoch:
            batches = trainer.num_training_batches
            if batches == math.inf:
                raise ArgumentError(
                    f"{type(self).__name__}(update_starting_at_epoch={self.update_starting_at_epoch}) does not know "
                    "when that epoch begins: the training loader has no length. Give update_starting_at_step."
                )
            given = trainer.callbacks, trainer.accumulate_grad_batches, int(batches)
            self._start = steps_of(*given, self.update_starting_at_epoch)

    def init_arrays(self, params: Any) -> dict[str, Any]:
        """Return the average, how many arrays it is of, and what low precision makes of it."""
        arrays = {"average": jax.tree.map(_wide, params), "count": jnp.zeros((), jnp.int32)}
        low = any(_wide(x).dtype != x.dtype for x in jax.tree.leaves(params))
        return arrays | ({"rounded": params} if low else {})

    def update_arrays(
        self, arrays: dict[str, Any], params: Any, grads: Any, global_step: jax.Array
    ) -> tuple[dict[str, Any], Any]:
        """Average the weights of a step."""
        count = arrays["count"]
        due = (global_step >= self._start) & (global_step % self.update_every_n_steps == 0)

        def averaged(average: jax.Array, weights: jax.Array) -> jax.Array:
            weights = _wide(weights)
            if not jnp.issubdtype(weights.dtype, jnp.inexact):
                return weights
            mixed = jnp.where(due, self.average(average, weights, count), average)
            return jnp.where(count == 0, weights, mixed)

        average = jax.tree.map(averaged, arrays["average"], params)
        made = {"average": average, "count": count + due}
        if "rounded" in arrays:
            made["rounded"] = jax.tree.map(lambda x, old: x.astype(old.dtype), average, arrays["rounded"])
        return made, params

    def eval_params(self, arrays: dict[str, Any]) -> Any:
        """Return the average."""
        return arrays.get("rounded", arrays["average"])

    def on_fit_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Leave the average in the module."""
        nnx.update(module, self.eval_params(trainer.callback_arrays(self)))


class EMA(WeightAveraging):
    """Keep an exponential moving average of the weights; see `WeightAveraging` for who sees it.

    The first weights that are averaged are taken as they are; from then on each makes it
    `decay * average + (1 - decay) * weights`.

    Args:
        decay: How much of the average stays, in [0, 1).
        **arguments: Those of `WeightAveraging`.

    Raises:
        ArgumentError: An argument is out of its set.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=10, callbacks=jl.callbacks.EMA(0.999), logger=False)
    """

    def __init__(self, decay: float = 0.999, **arguments: Any) -> None:
        self.decay = check.number("decay", decay, low=0, owner="EMA")
        check.require(self.decay < 1, "decay", decay, "takes a number below 1", owner="EMA")
        super().__init__(**arguments)

    def average(self, average: jax.Array, weights: jax.Array, count: jax.Array) -> jax.Array:
        """Return the average with one more array of weights in it."""
        return self.decay * average + (1 - self.decay) * weights


def _wide(x: jax.Array) -> jax.Array:
    """Return an array in which small changes do not get lost."""
    low = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if low else x
