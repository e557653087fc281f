"""A case trained both ways, and what came out."""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sweeps.mixed import hand_loop, trainer_run
from sweeps.mixed.case import Case
from sweeps.mixed.record import Record
from sweeps.mixed.trainer_run import Refused

TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 2e-2}


@dataclass(frozen=True)
class Outcome:
    """What came out of a case.

    Attributes:
        kind: "equal", "refused" or "failed".
        error: The largest difference, relative to the largest magnitude around it.
        message: What was refused, or what failed.
        details: A traceback, if there is one.
    """

    kind: str
    error: float = 0.0
    message: str = ""
    details: str = ""


def try_case(case: Case) -> Outcome:
    """Train a case both ways and compare."""
    try:
        by_hand = hand_loop.train(case)
    except Exception as error:  # a fault of this sweep, which must not end it
        return Outcome("failed", message=f"by hand {type(error).__name__}: {error}", details=traceback.format_exc())
    try:
        record = trainer_run.train(case)
    except Refused as refusal:
        rightly = case.may_be_refused and "replica" in str(refusal)
        return Outcome("refused" if rightly else "failed", message=f"refused: {refusal}")
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        return Outcome("failed", message=f"raised {what}", details=traceback.format_exc())
    pairs = [(by_hand, record)]
    if case.draws_apart:
        # Replicas draw numbers of their own: the other way of mapping them draws the same, and takes a sum for a mean
        # as this one does.
        if case.per_replica and case.loss == "sum" and not case.loss_reduction and case.divides:
            return Outcome("failed", message="numbers: a sum over rows was neither refused nor told of")
        witness = trainer_run.train(replace(case, strategy="shard_map" if case.strategy == "simulate" else "simulate"))
        pairs = [(_drawn(by_hand), _drawn(record)), (witness, record)]
    worst, tolerance = 0.0, TOLERANCE[case.precision]
    for expected, got in pairs:
        for where, error, what in _differences(expected, got):
            if error > tolerance:
                return Outcome("failed", error, f"numbers: {where} {what}")
            worst = max(worst, error)
    return Outcome("equal", worst)


def _drawn(record: Record) -> Record:
    """Return what does not follow from the random numbers themselves: ints, and with them keys and modes."""
    state = {path: x for path, x in record.state.items() if not np.issubdtype(x.dtype, np.floating)}
    return Record(state=state, modes=record.modes)


def _differences(expected: Record, got: Record) -> Iterator[tuple[str, float, str]]:
    """Yield each thing compared: what it is, how far it is off, and what it reads."""
    for what, a, b in (
        ("losses of batches", expected.losses, got.losses),
        ("losses of steps", [*expected.steps.values()], [*got.steps.values()]),
    ):
        if len(a) != len(b):
            yield what, np.inf, f"are {len(b)}, by hand {len(a)}"
        elif a:
            yield what, _relative(np.array(a), np.array(b)), f"{b}, by hand {a}"
    # An array whose true value is zero holds rounding noise of the size of what it came from.
    largest = max((np.abs(x).max(initial=0.0) for x in expected.params.values()), default=1.0)
    yield from _arrays("parameter", expected.params, got.params, largest)
    yield from _arrays("state", expected.state, got.state, 1.0)
    yield from _metrics("metric of an epoch", expected.epochs, got.epochs)
    validations = [{(i, x[0]): x[1] for i, x in enumerate(record.validations)} for record in (expected, got)]
    yield from _metrics("metric of a validation", *validations)
    if expected.modes != got.modes:
        yield "mode", np.inf, f"of {sorted(dict(expected.modes.items() ^ got.modes.items()))} differ"


def _arrays(what: str, expected: dict[str, Any], got: dict[str, Any], floor: float) -> Iterator[tuple[str, float, str]]:
    if expected.keys() != got.keys():
        yield what, np.inf, f"paths {sorted(expected.keys() ^ got.keys())} are only on one side"
        return
    for path, a in expected.items():
        b = got[path]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield what, np.inf, f"{path} is {b.dtype}{b.shape}, by hand {a.dtype}{a.shape}"
        elif not np.issubdtype(a.dtype, np.floating):
            yield what, 0.0 if (a == b).all() else np.inf, f"{path} {b.ravel()[:4]}, by hand {a.ravel()[:4]}"
        else:
            yield what, _relative(a, b, floor), f"{path} {b.ravel()[:3]}, by hand {a.ravel()[:3]}"


def _metrics(what: str, expected: dict[Any, Any], got: dict[Any, Any]) -> Iterator[tuple[str, float, str]]:
    if expected.keys() != got.keys():
        yield what, np.inf, f"at {sorted(got)}, by hand at {sorted(expected)}"
        return
    for at, metrics in expected.items():
        if metrics.keys() != got[at].keys():
            yield what, np.inf, f"names {sorted(metrics.keys() ^ got[at].keys())} are only on one side"
            continue
        for name, a in metrics.items():
            yield what, _relative(np.array(a), np.array(got[at][name])), f"{name} at {at} {got[at][name]}, by hand {a}"


def _relative(a: np.ndarray, b: np.ndarray, floor: float = 1e-30) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    error = np.abs(a - b).max(initial=0.0) / max(np.abs(a).max(initial=0.0), floor)
    return float(error) if np.isfinite(error) else np.inf
