"""The largest batch that fits into the memory of the devices, by compiling and not by running out of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxlit import checks as check
from jaxlit.core.module import TrainModule
from jaxlit.core.replica import abstract_batch, num_rows, with_rows
from jaxlit.engine.lazy import lazy
from jaxlit.errors import ArgumentError, OutOfMemoryError
from jaxlit.mesh_context import out_of_meshes
from jaxlit.strategies.auto import memory_limit
from jaxlit.table import size
from jaxlit.trainer.planning import first_batch, named_strategies, plan_trial
from jaxlit.trainer.step_cost import cost_of_step, shapes_of
from jaxlit.trainer.trial import copied, trial_of

_MOST = 2**25  # batches of a row on each device, as in Lightning
_MOST_TIMES = 16  # as large as the largest that fits may the next one be


@dataclass(frozen=True)
class BatchSize:
    """What `jl.scale_batch_size` returns.

    Attributes:
        batch_size: The rows of a batch, of all devices together.
        accumulate_grad_batches: How many such batches make the batch that was asked for.
        strategy: The strategy's name.
        memory: Bytes that a step with this batch takes of a device, as compiled.
        tried: The same for each number of rows that was compiled, infinite where that ran out of memory.
    """

    batch_size: int
    accumulate_grad_batches: int
    strategy: str
    memory: float
    tried: dict[int, float]


@out_of_meshes
def scale_batch_size(
    trainer: Any,
    model: TrainModule | lazy,
    train_dataloaders: Any = None,
    memory_bytes: int | None = None,
    *,
    effective_batch_size: int | None = None,
) -> BatchSize:
    """Find the largest batch whose training step fits into the devices' memory.

    Steps are compiled from shapes alone; what two of them take gives the next number of rows. One step is taken at the
    end, on a copy of the module and the rows of the loader's first batch, repeated. `trainer` and the module do not
    change. Use the result as `jl.ArrayLoader(..., batch_size=found.batch_size)`.

    Args:
        trainer: The Trainer that will train the module.
        model: The module.
        train_dataloaders: A loader, or a `jl.DataModule`, of batches of any size.
        memory_bytes: What a step may take of a device; None for 95 % of what jax reports, less all arrays.
        effective_batch_size: Rows of an optimizer step. The batch is then the largest part of it that fits, and
            `accumulate_grad_batches` the number of parts. None for one batch a step.

    Raises:
        ArgumentError: Not even one row a device fits, the rows of a step do not divide into batches that do, or other
            arrays take all memory.

    Example:
        >>> import jax.numpy as jnp, jaxlit as jl, numpy as np, optax
        >>> from flax import nnx
        >>> class Line(jl.TrainModule):
        ...     def __init__(self):
        ...         self.slope = nnx.Param(jnp.zeros(()))
        ...     def training_step(self, batch):
        ...         return jnp.mean((self.slope * batch - 1) ** 2)
        ...     def configure_optimizers(self):
        ...         return optax.sgd(0.1)
        >>> trainer = jl.Trainer(strategy="single", max_steps=1, logger=False)
        >>> found = jl.scale_batch_size(trainer, Line(), [np.ones(8, np.float32)], memory_bytes=10_000)
        >>> found.memory <= 10_000 and found.accumulate_grad_batches
        1
    """
    owner = "jl.scale_batch_size"
    limit = _limit(check.integer("memory_bytes", memory_bytes, low=1, also=(None,), owner=owner), owner)
    check.integer("effective_batch_size", effective_batch_size, low=1, also=(None,), owner=owner)
    raw, batch, num_batches = first_batch(trainer, model, train_dataloaders)
    like = abstract_batch(batch)
    shapes = model if isinstance(model, lazy) else shapes_of(model)

    def tries(strategy: Any, accumulate: int) -> _Tries:
        trial = plan_trial(trainer, strategy, None, accumulate_grad_batches=accumulate)
        cost = lambda rows: cost_of_step(trial, shapes, with_rows(like, rows), num_batches).total  # noqa: E731
        return _Tries(cost, trial.strategy.num_replicas, limit)

    name, strategy, tried, rows, accumulate = _scaled(trainer, tries, effective_batch_size)
    real = jax.tree.map(lambda x: _repeated(x, num_rows(batch), rows), raw)
    window = min(accumulate, 2)
    trial_of(trainer, strategy=strategy, max_steps=1, accumulate_grad_batches=window).fit(
        copied(model), [real] * window
    )
    return BatchSize(rows, accumulate, name, tried.needs(rows), tried.tried)


def _limit(memory_bytes: int | None, owner: str) -> int:
    """Return the bytes that a step may take of a device, as given or as the devices report it."""
    limit = memory_limit() if memory_bytes is None else memory_bytes
    check.require(limit is not None, "memory_bytes", limit, "has to be given where devices report none", owner=owner)
    assert limit is not None
    if limit < 0:
        raise ArgumentError(
            f"{owner}: other arrays take {size(-limit)} more than 95 % of a device's memory. Delete some of them."
        )
    return limit


def _scaled(trainer: Any, tries: Callable[[Any, int], "_Tries"], wanted: int | None) -> Any:
    """Return the strategy's name, the strategy, what was tried, and the rows and the number of batches of a step."""
    accumulate = trainer.settings.accumulate_grad_batches if wanted is None else 1
    pairs = named_strategies(trainer, trainer.settings.strategy, None)
    each = [(name, strategy, tries(strategy, accumulate)) for name, strategy in pairs]
    name, strategy, tried = next((x for x in each if x[2].fits(x[2].unit)), each[-1])
    if wanted is None:
        return name, strategy, tried, tried.largest(), accumulate
    if wanted % tried.unit == 0 and tried.fits(wanted):
        return name, strategy, tried, wanted, 1
    tried = tries(strategy, 2)  # a window of accumulated gradients takes memory, however many batches it has
    return name, strategy, tried, *_part_of(wanted, tried.largest(), tried.unit)


class _Tries:
    """What steps with batches of several sizes take.

    Args:
        cost: A function of the rows of a batch to the bytes of a step.
        unit: Rows come in multiples of it.
        limit: The bytes that a device may use.
    """

    def __init__(self, cost: Callable[[int], int], unit: int, limit: int) -> None:
        self.cost = cost
        self.unit = unit
        self.limit = limit
        self.tried: dict[int, float] = {}

    def needs(self, rows: int) -> float:
        """Return the bytes of a step; infinite if there is too little memory to compile it."""
        if rows not in self.tried:
            try:
                self.tried[rows] = self.cost(rows)
            except OutOfMemoryError:
                self.tried[rows] = math.inf
        return self.tried[rows]

    def fits(self, rows: int) -> bool:
        """Return whether a step fits."""
        return self.needs(rows) <= self.limit

    def largest(self) -> int:
        """Return the most rows that fit.

        Raises:
            ArgumentError: Not even one unit fits.
        """
        unit = self.unit
        if not self.fits(unit):
            needs = self.needs(unit)
            why = f"need{'s' * (unit == 1)} {size(needs)} of {size(self.limit)}"
            if needs == math.inf:
                why = "cannot be compiled in the free memory of a device"
            raise ArgumentError(
                f"jl.scale_batch_size: {unit} row{'s' * (unit > 1)}, the fewest, {why}. Use more devices or 'fsdp'."
            )
        fits = 1
        fails = None
        in_a_row = 0  # how many tries fitted since one failed; negative, how many failed since one fitted
        while fails is None or fails - fits > 1:
            if fails is None and fits >= _MOST:
                break
            top = _MOST_TIMES * fits if fails is None else fails - 1
            # The compiler's limit is on no line: a guess by what fits would overshoot each time.
            if fails is not None and (abs(in_a_row) > 1 or self.needs(fails * unit) == math.inf):
                middle = (fits + fails) // 2
            else:
                middle = self._guess(fits, fails)
            middle = min(max(middle, fits + 1), top)
            if self.fits(middle * unit):
                fits = middle
                in_a_row = max(in_a_row, 0) + 1
            else:
                fails = middle
                in_a_row = min(in_a_row, 0) - 1
        return fits * unit

    def _guess(self, fits: int, fails: int | None) -> int:
        """Return the most units that fit, by the line through two sizes: memory grows along pieces of such lines."""
        known = {rows // self.unit: needs for rows, needs in self.tried.items()}
        other = max((x for x in known if x < fits), default=None) if fails is None else fails
        if other is None:
            return 2 * fits
        rate = (known[fits] - known[other]) / (fits - other)
        if rate <= 0:
            return _MOST if fails is None else (fits + fails) // 2
        return fits + int((self.limit - known[fits]) / rate)


def _part_of(rows: int, most: int, unit: int) -> tuple[int, int]:
    """Return the largest equal parts of at most so many rows, a multiple of the unit, and how many they are."""
    parts = [count for count in range(1, rows + 1) if rows % count == 0]
    fitting = [count for count in parts if rows // count <= most and (rows // count) % unit == 0]
    if not fitting:
        raise ArgumentError(
            f"jl.scale_batch_size(effective_batch_size={rows}) does not divide into batches of at most {most} rows, a "
            f"multiple of {unit}. Ask for another number, such as {max(rows // most, 1) * most}."
        )
    return rows // fitting[0], fitting[0]


def _repeated(x: Any, rows: int, wanted: int) -> Any:
    """Return an array of rows with others in number, the same ones again and again."""
    x = np.asarray(x)
    return np.take(x, np.arange(wanted) % rows, axis=0) if x.ndim and x.shape[0] == rows else x
