"""Every strategy and that of the examples through the check of strategies: pairs of all that it is given.

    python tests/sweeps/same_training.py [a strategy's name ...]

Each strategy meets one, two and eight devices, accumulation, clipping and bfloat16, every two of them together;
`single` is compared with a loop that is written by hand. Prints the largest difference of each strategy, relative to
the largest magnitude, by precision. Fails if one is above its tolerance.
"""

import logging
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def checks() -> dict[str, dict[str, Any]]:
    """Return the arguments of each strategy's check, by its name."""
    from flax import nnx
    from kit.batches import sized
    from kit.by_hand import train_net
    from kit.inside import own_strategies
    from kit.modules import Wide

    wide: dict[str, Any] = {"model_fn": lambda: Wide(rngs=nnx.Rngs(0)), "data": sized(16, 16, 16)}
    result = {name: {**wide, "strategies": [name]} for name in own_strategies() if name != "pipeline"}
    result["single"]["reference"] = train_net
    example = runpy.run_path(str(ROOT / "examples" / "custom_strategy.py"))
    transformer = {"model_fn": lambda: example["Transformer"](rngs=nnx.Rngs(0)), "data": example["token_batches"](4)}
    return result | {"TensorParallel": {**transformer, "strategies": [example["TensorParallel"]()]}}


def main() -> int:
    """Run all, or those that are named; returns how many failed."""
    import jaxlit as jl

    precisions, failed = jl.testing.FACTORS["precision"], 0
    print(f"{'strategy':<16}{'trainings':>10}" + "".join(f"{p:>12}" for p in precisions) + f"{'':>10}")
    for name, arguments in checks().items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        start = time.monotonic()
        try:
            result = jl.testing.assert_same_training(**arguments, factors=jl.testing.FACTORS)
        except Exception as error:
            failed += 1
            print(f"{name:<16}FAILED {type(error).__name__}: {error}", flush=True)
            continue
        worst = [max(result[key] for key in result if f"precision={p}" in key) for p in precisions]
        seconds = f"{time.monotonic() - start:.0f} s"
        print(f"{name:<16}{len(result):>10}" + "".join(f"{x:>12.1e}" for x in worst) + f"{seconds:>10}", flush=True)
    return failed


if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "tests")]
    from jaxlit.testing import fake_devices

    fake_devices(8)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(min(main(), 1))
