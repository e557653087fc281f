"""A transformer language model trains to the losses that a plain data-parallel JAX notebook printed.

    python tests/sweeps/notebook.py [strategy ...]

Prints each strategy's largest difference from what the notebook printed of fifty steps, and fails where it is not
what rounding makes.
"""

import sys
import time
from pathlib import Path

sys.path[:1] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

STRATEGIES, STEPS, TOLERANCE = ("ddp", "fsdp", "zero1", "shard_map", "pmap"), 50, 2e-4


def main(strategies: list[str]) -> int:
    """Train under each strategy, or those that are named; returns how many differ."""
    from jaxlit.testing import fake_devices

    fake_devices(8)
    from kit.notebook import PRINTED, losses

    wrong = 0
    for strategy in strategies or STRATEGIES:
        start, result = time.monotonic(), losses(strategy, STEPS)
        worst = max(abs(result[step] - printed) for step, printed in PRINTED.items())
        wrong += worst > TOLERANCE
        told = "ok" if worst <= TOLERANCE else f"DIFFERENT: {result}"
        print(f"{strategy:<10}{worst:.1e} {told}, {time.monotonic() - start:.0f} s", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
