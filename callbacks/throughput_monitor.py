"""`ThroughputMonitor`, which logs the speed of a training."""

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jaxlit import checks as check
from jaxlit.callbacks.base import Measure, Measured
from jaxlit.core.replica import num_rows
from jaxlit.distributed.team import team
from jaxlit.programs.costs import Flops, peak_flops

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


class _Point(NamedTuple):
    """The counts of a training at one time."""

    steps: int  # optimizer steps
    batches: int
    samples: int
    lengths: int
    seconds: float = 0.0


class ThroughputMonitor(Measure):
    """Log how many batches, samples, tokens and operations a second training takes, and the share of the devices' peak.

    In the rows of steps, and in `trainer.history`, of all processes together:

    - `train/samples`, `train/lengths`: the counts so far;
    - `train/batches_per_sec`, `train/samples_per_sec`, `train/items_per_sec`, the last with `length_fn`;
    - `train/flops_per_sec`: by the matrix products and convolutions of the compiled step, see `trainer.step_flops`;
    - `train/mfu`: the share of the devices' peak, if that is known.

    The time of a row is when its values have arrived, so that steps which are only dispatched do not count. The time of
    validations does not count, nor do the steps of a window in which a program was compiled.

    Args:
        batch_size_fn: Returns the samples of a batch of the loader; None for its rows.
        length_fn: Returns the items of a batch, for example tokens; None for none.
        window_size: The number of batches of a rate; at least those from one row to the next.
        available_flops: Peak operations per second of one device; None for its data sheet's, by the step's dtypes.

    Example:
        >>> import jaxlit as jl
        >>> monitor = jl.callbacks.ThroughputMonitor(length_fn=lambda batch: batch["tokens"].size)
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=monitor, logger=False)
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        window_size: int = 100,
        *,
        available_flops: float | None = None,
    ) -> None:
        self.batch_size_fn, self.length_fn = batch_size_fn, length_fn
        self.window_size = check.integer("window_size", window_size, low=1, owner="ThroughputMonitor")
        self.available_flops = available_flops
        if available_flops is not None:
            check.positive("available_flops", available_flops, owner="ThroughputMonitor")
        self._reset()

    def _reset(self) -> None:
        self._batches = self._samples = self._lengths = 0
        self._rows = dict[int, _Point]()  # of rows that have not arrived, by step
        self._begin()

    def _begin(self) -> None:
        self._points = deque[_Point]()
        self._compiled: dict[str, float] = {}
        self._validation_start = self._validation_seconds = 0.0
        self._first_samples: int | None = None  # of the batch that `step_flops` is for
        self._key: Any = None  # of an array in a batch that has its rows

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Count each fit from zero."""
        super().setup(trainer, module, stage)
        if stage == "fit":
            self._reset()

    def on_train_batch_end(
        self, trainer: "Trainer", module: "TrainModule", outputs: "Mapping[str, Any]", batch: Any, batch_idx: int
    ) -> None:
        """Count the batch."""
        if self._first_samples is None:
            rows = num_rows(batch)
            # By a key if there is one: this runs in every step, and walking a tree would cost calls.
            items = batch.items() if type(batch) is dict else ()
            self._key = next((key for key, x in items if getattr(x, "ndim", 0) and len(x) == rows), None)
            self._first_samples = rows if self.batch_size_fn is None else self.batch_size_fn(batch)
        self._batches += 1
        if self.batch_size_fn is not None:
            self._samples += self.batch_size_fn(batch)
        else:
            self._samples += num_rows(batch) if self._key is None else len(batch[self._key])
        if self.length_fn is not None:
            self._lengths += self.length_fn(batch)
        if not self._points:  # the clock begins after a step, for which all programs were compiled
            _ = trainer.step_flops  # traces a step again, which must not count
            self._compiled = trainer.compile_seconds
            self._points.append(_of_all(self._now(trainer.global_step))[0])

    def on_validation_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Stop the clock: the steps before it are done."""
        self._validation_start = perf_counter()

    def on_validation_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Let the clock continue."""
        self._validation_seconds += perf_counter() - self._validation_start

    def begin_row(self, trainer: "Trainer", module: "TrainModule", step: int) -> None:
        """Remember the counts of the row, before the next batch is counted."""
        self._rows[step] = self._now(step + 1)

    def fill_row(self, trainer: "Trainer", module: "TrainModule", row: Measured, step: int) -> None:
        """Add the rates up to the row's step, which is done by now."""
        former, self._compiled = self._compiled, trainer.compile_seconds
        seconds = perf_counter() - self._validation_seconds
        point, has_compiled = _of_all(self._rows.pop(step)._replace(seconds=seconds), former != self._compiled)
        values = {"samples": point.samples} | ({"lengths": point.lengths} if self.length_fn else {})
        points = self._points
        if has_compiled or (points and point.steps < points[-1].steps):  # a rollback has undone steps
            points.clear()
        points.append(point)
        while len(points) > 2 and point.batches - points[1].batches >= self.window_size:
            points.popleft()
        if point.batches > points[0].batches and point.seconds > points[0].seconds:
            values |= self._rates(trainer, _Point(*(b - a for a, b in zip(points[0], point, strict=True))))  # type: ignore[arg-type]
        row.put(self, {f"train/{name}": float(value) for name, value in values.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        rows = [list(point[:4]) for point in self._rows.values()]
        return {"counted": [self._batches, self._samples, self._lengths], "rows": rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counts; rates start again."""
        self._batches, self._samples, self._lengths = state_dict["counted"]
        self._rows = {row[0] - 1: _Point(*row) for row in state_dict["rows"]}
        self._begin()

    def _now(self, steps: int) -> _Point:
        return _Point(steps, self._batches, self._samples, self._lengths, perf_counter() - self._validation_seconds)

    def _rates(self, trainer: "Trainer", difference: _Point) -> dict[str, float]:
        steps, batches, samples, lengths, seconds = difference
        rates = {"batches_per_sec": batches / seconds, "samples_per_sec": samples / seconds}
        if self.length_fn is not None:
            rates["items_per_sec"] = lengths / seconds
        step_flops = trainer.step_flops
        step = step_flops.get("train_step") or step_flops.get("train_step_traced")
        if step is None:
            return rates
        flops = step * steps + step_flops.get("micro_step", step) * (batches - steps)
        # A batch of fewer rows counts as a share of the first batch.
        first = (self._first_samples or 0) * jax.process_count()
        share = samples / (batches * first) if first else 1.0
        rates["flops_per_sec"] = flops.count * share / seconds
        if (least := self._least_seconds(trainer, flops)) is not None:
            rates["mfu"] = least * share / seconds
        return rates

    def _least_seconds(self, trainer: "Trainer", flops: Flops) -> float | None:
        """Return how long operations take on all devices at their peak, None if that is not known."""
        mesh = trainer.strategy.mesh
        if (available := self.available_flops) is not None:
            return flops.count / available / mesh.size
        kind = mesh.devices.flat[0].device_kind
        seconds = 0.0
        for dtype, count in flops.by_dtype.items():
            if (peak := peak_flops(kind, dtype)) is None:
                return None
            seconds += count / peak
        return seconds / mesh.size or None


def _of_all(point: _Point, compiled: bool = False) -> tuple[_Point, bool]:
    """Return the counts of all processes together by the clock of the first, and whether any has compiled."""
    rows = team().agree("ThroughputMonitor's row", [point.samples, point.lengths, point.seconds, compiled])
    samples, lengths, seconds, each = zip(*rows, strict=True)
    return point._replace(samples=sum(samples), lengths=sum(lengths), seconds=seconds[0]), any(each)
