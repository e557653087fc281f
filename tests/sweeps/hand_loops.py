"""Models of many kinds under every strategy, each compared with a training loop that is written by hand.

    python tests/sweeps/hand_loops.py [a case's name, or how it begins ...]

Prints for each case and strategy the largest difference in losses, metrics, parameters and other state, relative to the
largest magnitude, and fails where it is above the case's tolerance or a strategy refuses what it must train.
"""

import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

GLOBAL = ("single", "ddp", "fsdp", "zero1")
PER_REPLICA = ("shard_map", "pmap", "simulate")
LAYOUTS = (("single", 1), *((name, n) for name in (*GLOBAL[1:], *PER_REPLICA) for n in (1, 2, 8)))


class Wrong(Exception):
    """Numbers that are not those of the hand-written loop, or a refusal of what must train."""


def train(case: Any, strategy: str, devices: int, kept: Any) -> None:
    """Train a case by jaxlit.

    Args:
        case: The case.
        strategy: The strategy's name.
        devices: Devices, or replicas of "simulate".
        kept: A new `Trained`, filled as training continues.
    """
    import jaxlit as jl

    class Keep(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            kept.losses.append(float(outputs["loss"]))
            if "draws" in outputs:
                kept.draws.append(np.asarray(outputs["draws"]))

        def on_log(self, trainer: Any, values: dict[str, float], step: int) -> None:
            kept.metrics.append({k.removesuffix("_step"): v for k, v in values.items()})

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            kept.validated.append(float(trainer.callback_metrics["val/loss"]))

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer = jl.Trainer(
        strategy=strategy_of(case, strategy),
        devices=devices,
        max_epochs=1,
        log_every_n_steps=1,
        callbacks=[Keep()],
        val_check_interval=1,
        **quiet,
    )
    module = case.make()
    trainer.fit(module, case.batches(), case.validation() if case.validation else None)
    kept.epoch = {k.removesuffix("_epoch"): float(v) for k, v in trainer.callback_metrics.items() if "_epoch" in k}
    kept.keep_module(module)


def strategy_of(case: Any, name: str) -> Any:
    """Return the strategy of a name; the sharding ones split even the smallest array."""
    import jaxlit as jl

    sharded = {"fsdp": 3, "zero1": 1}
    if name in sharded:
        return jl.strategies.FSDP(stage=sharded[name], min_size=0)
    if name in PER_REPLICA and case.replica_options:
        classes = {
            "shard_map": jl.strategies.ShardMapDDP,
            "pmap": jl.strategies.PMap,
            "simulate": jl.strategies.Simulated,
        }
        return classes[name](**case.replica_options)
    return name


class Checked:
    """A case and the hand-written loops that it was compared with so far.

    Args:
        case: The case.
    """

    def __init__(self, case: Any) -> None:
        self.case = case
        self._by_hand: dict[Any, Any] = {}
        self._witness: dict[int, Any] = {}

    def outcome(self, strategy: str, devices: int) -> str:
        """Train under a strategy, and return `equal (...)`, `refused (...)` or `FAILED ...`."""
        from sweeps.models.case import Trained

        from jaxlit.errors import JaxlitError, NonFiniteError

        kept = Trained()
        several = strategy in PER_REPLICA and devices > 1
        must = self.case.refused or (self.case.refused_by_replicas if several else "")
        try:
            train(self.case, strategy, devices, kept)
            if must:
                raise Wrong(f"it trains, and was to be refused with {must!r}")
            return f"equal ({self.difference(kept, strategy, devices):.0e})"
        except Wrong as error:
            return f"FAILED {error}"
        except Exception as error:
            message = " ".join(str(error).split())
            if not isinstance(error, JaxlitError) or isinstance(error, NonFiniteError) or kept.losses:
                return f"FAILED {type(error).__name__}: {message}"
            if re.search(must, message) and (must or strategy in PER_REPLICA):
                return f"refused ({message})"
            return f"FAILED refused: {message}"

    def difference(self, kept: Any, strategy: str, devices: int) -> float:
        """Return the largest difference from what is right.

        Raises:
            Wrong: It is above the tolerance.
        """
        several = strategy in PER_REPLICA and devices > 1
        if several and self.case.draws:
            check_draws(kept.draws, devices)
        worst = 0.0
        for expected in self.expected(kept, strategy, devices) if several else [self.by_hand(None)]:
            worst = max(worst, largest_difference(expected, kept, self.case.tolerance))
        if self.case.epoch is not None:
            truth = self.case.epoch(self.case.batches())
            worst = max(worst, compare("epoch", truth, kept.epoch, self.case.tolerance))
        return worst

    def expected(self, kept: Any, strategy: str, devices: int) -> Iterator[Any]:
        """Give the trainings that one of several replicas must equal."""
        if not self.case.draws:
            yield self.by_hand(devices)
            return
        if self.case.draws == "again":
            # Replicas draw other numbers than one device; a loop by hand that is given them must come out alike.
            yield self.by_hand(devices, kept.draws)
        if strategy != "simulate":
            yield self.witness(devices)

    def by_hand(self, replicas: int | None, draws: Sequence[np.ndarray] = ()) -> Any:
        """Return the hand-written loop's training.

        Args:
            replicas: None for strategies whose step sees the global batch.
            draws: The random numbers of each step, if it is not to draw its own.
        """
        from sweeps.models.by_hand import by_hand
        from sweeps.models.case import Trained

        loop, replicas = self.case.by_hand or by_hand, replicas if self.case.by_hand else None
        key = (replicas, *(drawn.tobytes() for drawn in draws))
        if key not in self._by_hand:
            batches = self.case.batches()
            if draws:
                batches = [batch | {"draws": drawn} for batch, drawn in zip(batches, draws, strict=True)]
            trained = loop(self.case, batches, replicas)
            fresh = Trained()
            fresh.keep_module(self.case.make())
            # A loop that stands still, or is NaN from the start, would be equal to another one that does.
            assert np.isfinite(trained.losses).all(), trained.losses
            assert any((fresh.params[k] != x).any() for k, x in trained.params.items()), "it moves no parameter"
            self._by_hand[key] = trained
        return self._by_hand[key]

    def witness(self, devices: int) -> Any:
        """Return the training of as many replicas on one device."""
        from sweeps.models.case import Trained

        if devices not in self._witness:
            train(self.case, "simulate", devices, kept := Trained())
            self._witness[devices] = kept
        return self._witness[devices]


def check_draws(draws: list[np.ndarray], replicas: int) -> None:
    """Check that each replica drew numbers of its own.

    Raises:
        Wrong: Two replicas drew the same.
    """
    for i, drawn in enumerate(draws):
        if len(drawn) % replicas == 0:
            shares = drawn.reshape(replicas, -1)
            if len(np.unique(shares, axis=0)) != replicas:
                raise Wrong(f"two replicas drew the same numbers in step {i}")


def largest_difference(expected: Any, got: Any, tolerance: float) -> float:
    """Return the largest relative difference of two trainings.

    Raises:
        Wrong: It is above the tolerance, or they hold different things.
    """
    from sweeps.models.case import Trained

    assert isinstance(expected, Trained) and isinstance(got, Trained)
    if expected.modes != got.modes:
        changed = [k for k in expected.modes if expected.modes[k] != got.modes.get(k)]
        raise Wrong(f"modes differ at {changed[:3]}")
    names = sorted({name for row in expected.metrics for name in row})
    # Rows of a validation or an epoch have none of these names.
    by_name = lambda t: {name: [row[name] for row in t.metrics if name in row] for name in names}  # noqa: E731
    parts = [
        ("losses", {"loss": expected.losses}, {"loss": got.losses}, 0.0),
        ("metrics", by_name(expected), by_name(got), 0.0),
        ("validation", {"val/loss": expected.validated}, {"val/loss": got.validated}, 0.0),
        # An array whose true value is zero holds rounding noise of the size of the others.
        ("params", expected.params, got.params, max(np.abs(x).max() for x in expected.params.values())),
        ("state", expected.state, got.state, 1.0),
    ]
    return max(compare(part, left, right, tolerance, floor) for part, left, right, floor in parts)


def compare(part: str, expected: Any, got: Any, tolerance: float, floor: float = 0.0) -> float:
    """Return the largest difference of named arrays, relative to the largest magnitude of each; ints are exact.

    Args:
        part: What is compared, for messages.
        expected: What is right.
        got: What came out.
        tolerance: The largest difference that is right.
        floor: The magnitude of arrays with a smaller one.

    Raises:
        Wrong: A difference is above the tolerance.
    """
    if expected.keys() != got.keys():
        raise Wrong(f"{part}: {sorted(expected.keys() ^ got.keys())} is on one side only")
    worst, where = 0.0, ""
    for name, value in expected.items():
        x, y = np.atleast_1d(value), np.atleast_1d(got[name])
        if x.shape != y.shape or x.dtype != y.dtype:
            raise Wrong(f"{part} {name}: {x.dtype}{list(x.shape)} by hand, {y.dtype}{list(y.shape)} by jaxlit")
        if not np.issubdtype(x.dtype, np.floating) and x.dtype.name != "bfloat16":
            if not np.array_equal(x, y):
                raise Wrong(f"{part} {name}: {x.ravel()[:3]} by hand, {y.ravel()[:3]} by jaxlit")
            continue
        x, y = x.astype(np.float64), y.astype(np.float64)
        if (np.isnan(x) != np.isnan(y)).any():
            hand, jaxlit = (np.flatnonzero(np.isnan(z)).tolist() for z in (x, y))
            raise Wrong(f"{part} {name}: NaN at {hand} by hand, at {jaxlit} by jaxlit")
        scale = max(np.abs(np.nan_to_num(x)).max(initial=0.0), floor) or 1.0
        difference = np.abs(np.nan_to_num(x - y)).max(initial=0.0) / scale
        if difference > worst:
            worst, where = float(difference), name
    if worst > tolerance:
        raise Wrong(f"{part} {where}: {worst:.1e} off")
    return worst


def main(names: list[str]) -> int:
    """Run all cases, or those of which a name is the beginning; returns how many outcomes are wrong."""
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    from jaxlit.testing import fake_devices

    fake_devices(8)
    from sweeps.models import CASES

    failed, count = 0, 0
    for case in CASES:
        if names and not any(case.name.startswith(name) for name in names):
            continue
        checked, start = Checked(case), time.monotonic()
        outcomes = {layout: checked.outcome(*layout) for layout in LAYOUTS}
        count, wrong = count + len(outcomes), sum(x.startswith("FAILED") for x in outcomes.values())
        failed += wrong
        because = f", {case.tolerance:.0e} because {case.because}" if case.because else ""
        print(f"{case.name}: {len(outcomes) - wrong} of {len(outcomes)}, {time.monotonic() - start:.0f} s{because}")
        for text, layouts in grouped(outcomes).items():
            print(f"    {layouts:<40} {text[:200]}")
        sys.stdout.flush()
    print(f"{count} trainings, {failed} of them wrong")
    return failed


def grouped(outcomes: dict[tuple[str, int], str]) -> dict[str, str]:
    """Return the layouts of each outcome: `ddp 1 2 8, single`; those that are equal come with the worst of them."""
    equal = [x for x in outcomes.values() if x.startswith("equal")]
    worst = max(equal, key=lambda x: float(x[7:-1]), default="")
    layouts: dict[str, dict[str, list[int]]] = {}
    for (strategy, devices), text in outcomes.items():
        layouts.setdefault(worst if text in equal else text, {}).setdefault(strategy, []).append(devices)
    return {
        text: ", ".join(f"{strategy} {' '.join(map(str, counts))}" for strategy, counts in by_strategy.items())
        for text, by_strategy in layouts.items()
    }


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
