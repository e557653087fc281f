"""Random trainings by jaxlit and by a plain NNX loop: every number is equal, or jaxlit says before that it cannot.

    python tests/sweeps/differential.py [--cases N] [--seed N]
    python tests/sweeps/differential.py --case "Case(parts=('norm',), strategy='fsdp', devices=8)"

Prints each case with its largest difference, and fails with a case that hypothesis has made as small as it can.
"""

import argparse
import contextlib
import io
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path[:1] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

# Nearly all time goes to compiling programs that run a few times: unoptimised, they compile three times as fast.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


def main() -> int:
    """Run all; return whether a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--case", help="run only this one")
    given = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)
    from jaxlit.testing import fake_devices

    fake_devices(8)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from sweeps.mixed.case import Case

    if given.case:
        return not check(eval(given.case, {"Case": Case}))
    return run(given.cases, given.seed)


def check(case: Any) -> bool:
    """Return whether a case is equal, or rightly refused, and print it."""
    import jax
    from sweeps.mixed.outcome import try_case

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        outcome = try_case(case)
    jax.clear_caches()  # one case's programs are of no use to the next
    print(f"{outcome.kind:<8} {outcome.error:.1e}  {case}  {outcome.message[:300]}\n{outcome.details}", flush=True)
    return outcome.kind != "failed"


def run(count: int, number: int) -> int:
    """Check `count` cases drawn by hypothesis from a seed; return whether one failed, after shrinking it."""
    import hypothesis
    from sweeps.mixed.generate import cases

    @hypothesis.seed(number)
    @hypothesis.settings(
        database=None, deadline=None, max_examples=count, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(cases())
    def each(case: Any) -> None:
        assert check(case), case

    try:
        each()
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    print(f"{count} cases, none failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
