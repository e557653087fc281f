"""`WeightAveraging` and `EMA`, averages of the weights that evaluations see and the module has after a fit."""

import logging
import math
from collections.abc import Callable
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

_logger = logging.getLogger("jaxlit")


class WeightAveraging(Callback):
    """Compute the mean of the weights of many steps: stochastic weight averaging.

    The mean is stored in the training state, split over the devices like the weights, saved in checkpoints and restored
    bit by bit. Validations of a fit and `trainer.apply` use it, and the module has it after `fit`; training does not
    use it. Until the first average it is the weights themselves. Batch statistics stay those of the training. The
    optimizer's schedule decides whether the learning rate stays high.

    Source: Izmailov et al., Averaging weights leads to wider optima and better generalization, arXiv 1803.05407.

    Args:
        update_every_n_steps: Optimizer steps between weights that are averaged.
        update_starting_at_step: The first step whose weights are averaged, from 0.
        update_starting_at_epoch: The first epoch whose weights are averaged, from 0; it needs a loader with a length.

    Raises:
        ArgumentError: An argument is out of its set, or both starts are set.

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

    from_initial = False
    """Whether the average begins with the weights before the first step that is averaged."""

    def average(self, average: jax.Array, weights: jax.Array, count: jax.Array) -> jax.Array:
        """Return the average with one more array of weights; a pure function that a subclass may override.

        Args:
            average: The average so far, float32 or wider.
            weights: The weights, of the same dtype.
            count: () int32, the number of arrays in the average; 0 only with `from_initial`.
        """
        return average + (weights - average) / (count + 1).astype(average.dtype)

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Find the first step, and warn if the average will be of one step that is not the last."""
        if self.update_starting_at_epoch:
            batches = trainer.num_training_batches
            if batches == math.inf:
                raise ArgumentError(
                    f"{type(self).__name__}(update_starting_at_epoch={self.update_starting_at_epoch}) does not know "
                    "when that epoch begins: the training loader has no length. Give update_starting_at_step."
                )
            accumulate, epochs = trainer.accumulate_grad_batches, self.update_starting_at_epoch
            self._start = steps_of(trainer.callbacks, accumulate, int(batches), epochs)
        every = self.update_every_n_steps
        first = -(-self._start // every) * every
        is_counted = trainer.num_training_batches < math.inf and not trainer.fast_dev_run
        if is_counted and first + 1 < (steps := trainer.estimated_stepping_batches) <= first + every:
            text = "%s(update_every_n_steps=%d) takes the weights of step %d of %d alone. Give a smaller number."
            _logger.warning(text, type(self).__name__, every, first + 1, steps)

    def init_arrays(self, params: Any) -> dict[str, Any]:
        """Return the average, its number of arrays, and for parameters of low precision the rounded average."""
        arrays = {"average": jax.tree.map(_wide, params), "count": jnp.zeros((), jnp.int32)}
        is_low = any(_wide(x).dtype != x.dtype for x in jax.tree.leaves(params))
        return arrays | ({"rounded": params} if is_low else {})

    def update_arrays(
        self, arrays: dict[str, Any], params: Any, grads: Any, global_step: jax.Array
    ) -> tuple[dict[str, Any], Any]:
        """Average the weights of a step."""
        count = arrays["count"]
        is_due = (global_step >= self._start) & (global_step % self.update_every_n_steps == 0)

        def averaged(average: jax.Array, weights: jax.Array) -> jax.Array:
            weights = _wide(weights)
            if not jnp.issubdtype(weights.dtype, jnp.inexact):
                return weights
            mixed = jnp.where(is_due, self.average(average, weights, count), average)
            return jnp.where((count == 0) & ~(is_due & self.from_initial), weights, mixed)

        average = jax.tree.map(averaged, arrays["average"], params)
        updated = {"average": average, "count": count + is_due}
        if "rounded" in arrays:
            updated["rounded"] = jax.tree.map(lambda x, old: x.astype(old.dtype), average, arrays["rounded"])
        return updated, params

    def eval_params(self, arrays: dict[str, Any]) -> Any:
        """Return the average."""
        return arrays.get("rounded", arrays["average"])

    def on_fit_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Write the average to the module."""
        nnx.update(module, self.eval_params(trainer.callback_arrays(self)))


class EMA(WeightAveraging):
    """Compute an exponential moving average of the weights, which is used like that of `WeightAveraging`.

    The average begins with the weights of the first step that is averaged, as Lightning's does; then it becomes `decay
    * average + (1 - decay) * weights`. Loops of JAX often begin with the weights before that step: `from_initial=True`.

    Args:
        decay: The share of the average that stays, in [0, 1); or a function of the number of averaged steps before,
            () int32 from 0, for example `lambda n: jnp.minimum(0.999, (1 + n) / (10 + n))`.
        from_initial: Begin with the weights before the first step that is averaged, such as the initial ones.
        **arguments: Those of `WeightAveraging`.

    Raises:
        ArgumentError: An argument is out of its set.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=10, callbacks=jl.callbacks.EMA(0.999), logger=False)
    """

    def __init__(
        self, decay: float | Callable[[jax.Array], Any] = 0.999, *, from_initial: bool = False, **arguments: Any
    ) -> None:
        self.decay = decay if callable(decay) else check.number("decay", decay, low=0, owner="EMA")
        below = callable(self.decay) or self.decay < 1
        check.require(below, "decay", decay, "takes a number below 1, or a function of a count", owner="EMA")
        self.from_initial = check.boolean("from_initial", from_initial, owner="EMA")
        super().__init__(**arguments)

    def average(self, average: jax.Array, weights: jax.Array, count: jax.Array) -> jax.Array:
        """Return the average with one more array of weights."""
        decay = self.decay(count) if callable(self.decay) else self.decay
        return decay * average + (1 - decay) * weights


def _wide(x: jax.Array) -> jax.Array:
    """Return an array in which small changes are not lost."""
    is_low = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if is_low else x
