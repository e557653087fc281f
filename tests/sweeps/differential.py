"""Random trainings by jaxlit and by a plain NNX loop: every number is equal, or jaxlit says before that it cannot.

    python tests/sweeps/differential.py [--cases N] [--seed N]
    python tests/sweeps/differential.py --case "Case(parts=('norm',), strategy='fsdp', devices=8)"

Prints what failed, each made as small as it gets, and a table by strategy. Fails if anything failed.
"""

import argparse
import collections
import contextlib
import io
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path[:1] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

# Nearly all time goes to compiling programs that run a few times: unoptimised, they compile three times as fast.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
SHRINKS = 30  # trainings that one failure may cost to be made smaller
SECONDS = 60.0  # and the time


def main() -> int:
    """Run all; returns how many cases failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after these")
    parser.add_argument("--case", help="run only this one")
    given = parser.parse_args()

    os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)
    from jaxlit.testing import fake_devices

    fake_devices(8)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from sweeps.mixed.case import Case

    if given.case:
        case = eval(given.case, {"Case": Case})
        return _one(case)
    from sweeps.mixed.generate import mix

    return _many(mix(given.cases, given.seed), time.monotonic() + 60 * given.minutes)


def _one(case: Any) -> int:
    from sweeps.mixed.outcome import try_case

    outcome = try_case(case)
    print(f"{case}\n{outcome.kind}, largest difference {outcome.error:.1e} {outcome.message}\n{outcome.details}")
    return outcome.kind == "failed"


def _many(cases: list[Any], deadline: float) -> int:
    import jax

    table: dict[str, Any] = collections.defaultdict(list)
    refused: dict[str, list[Any]] = collections.defaultdict(list)
    failures: list[tuple[Any, Any, list[Any]]] = []  # the smallest case, its outcome, the cases with it
    for i, case in enumerate(cases):
        if time.monotonic() > deadline:
            print(f"stopped after {i} of {len(cases)} cases")
            break
        start = time.monotonic()
        outcome = _quietly(case)
        table[case.strategy].append((case, outcome))
        if outcome.kind == "refused":
            refused[outcome.head].append(case)
        if outcome.kind == "failed":
            known = next((f for f in failures if _is_in(f, case, outcome)), None)
            if known is None:
                smallest = _shrink(case, outcome)
                failures.append((*smallest, [case]))
            else:
                known[2].append(case)
        print(f"{i:>4} {outcome.kind:<8}{time.monotonic() - start:5.1f} s  {case}", flush=True)
        if outcome.message:
            print(f"     {outcome.message.splitlines()[0][:200]}", flush=True)
        if i % 20 == 19:
            jax.clear_caches()  # hundreds of programs
    _report(table, refused, failures)
    return len(failures)


def _quietly(case: Any) -> Any:
    from sweeps.mixed.outcome import try_case

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return try_case(case)


def _is_in(failure: tuple[Any, Any, list[Any]], case: Any, outcome: Any) -> bool:
    """Return whether a failure that is known is part of a case that failed in the same way."""
    from sweeps.mixed.case import KINDS, PER_REPLICA

    smallest, known, _ = failure
    if known.head.split(" ")[0] != outcome.head.split(" ")[0]:  # numbers, refused, raised
        return False
    if smallest.strategies & {*PER_REPLICA} and not case.strategies & {*PER_REPLICA}:
        return False
    if smallest.per_replica and not case.per_replica:
        return False
    plain = type(case)()
    given = {name for name, value in vars(smallest).items() if value != getattr(plain, name)}
    same = (getattr(smallest, name) == getattr(case, name) for name in given - {"strategy", "devices", "parts"})
    kinds = [{KINDS.get(part, part) for part in parts} for parts in (smallest.parts, case.parts)]
    return all(same) and kinds[0] - {*plain.parts} <= kinds[1]


def _shrink(case: Any, outcome: Any) -> tuple[Any, Any]:
    """Return the smallest case found that fails in the same way."""
    from sweeps.mixed.generate import smaller

    start, tried, left = time.monotonic(), {case}, SHRINKS
    again = True
    while again:
        again = False
        for candidate in smaller(case):
            if candidate in tried:
                continue
            if not left or time.monotonic() - start > SECONDS:
                return case, outcome
            tried.add(candidate)
            left -= 1
            found = _quietly(candidate)
            if found.kind == "failed" and found.head.split(" ")[0] == outcome.head.split(" ")[0]:
                case, outcome, again = candidate, found, True
                break
    return case, outcome


def _report(table: dict[str, Any], refused: dict[str, list[Any]], failures: list[tuple[Any, Any, list[Any]]]) -> None:
    for smallest, outcome, found in failures:
        print(f"\nFAILED in {len(found)} cases, off by {outcome.error:.1e}: {outcome.message.splitlines()[0][:400]}")
        print(f'  python tests/sweeps/differential.py --case "{smallest}"')
        print("\n".join(outcome.details.splitlines()[-12:]))
    print(
        f"\n{'strategy':<12}{'cases':>6}{'equal':>7}{'refused':>9}{'failed':>8}  largest difference (32 bits, 16 bits)"
    )
    for strategy, outcomes in table.items():
        count = collections.Counter(outcome.kind for _, outcome in outcomes)
        errors = {"32-true": 0.0, "bf16-mixed": 0.0}
        for case, outcome in outcomes:
            if outcome.kind == "equal":
                errors[case.precision] = max(errors[case.precision], outcome.error)
        told = ", ".join(f"{error:.1e}" for error in errors.values())
        print(f"{strategy:<12}{len(outcomes):>6}{count['equal']:>7}{count['refused']:>9}{count['failed']:>8}  {told}")
    for head, found in refused.items():
        print(f"refused {len(found)} times: {head}\n    {found[0]}")
    print(f"{sum(map(len, table.values()))} cases, {len(failures)} distinct failures")


if __name__ == "__main__":
    sys.exit(min(main(), 1))
