"""Training killed by SIGKILL at every step, and started again, equals the one that was not, bit by bit.

    python tests/sweeps/resume.py [steps between the kills of fsdp] [those of the others]

Each run is a process or two that kill themselves in some hook at some step, and another one with the same command
that continues from what is on the disk. Prints each run, and fails if a batch, a row, the CSV file or the final state
differs.
"""

import json
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from kit.processes import CHEAP  # noqa: E402
from kit.resume_model import STEPS_PER_EPOCH  # noqa: E402
from kit.resume_runs import ended, problems_of, start_child  # noqa: E402

STRATEGIES, EPOCHS, AT_ONCE = ("fsdp", "single", "ddp", "pmap"), 4, 2
# The hook that kills changes from step to step. In `on_train_batch_start` a checkpoint may just be being written.
KILLS = ("on_train_batch_end", "on_safe_point", "on_validation_batch_end", "on_log", "on_train_batch_start")
KILLS += ("on_validation_end", "on_safe_point", "on_train_epoch_end", "on_validation_start")


def run(root: Path, strategy: str, step: int) -> str:
    """Kill and resume once; returns what was seen, which begins with "ok" if all is as it must be."""
    every, hook = (5, 1, 3)[step % 3], KILLS[step % len(KILLS)]
    if step == EPOCHS * STEPS_PER_EPOCH:
        hook = "on_train_epoch_end"  # after the last step there is no validation
    folder, start = root / f"{strategy}-{step}", time.monotonic()
    # Every third training is killed before as well, where no checkpoint may be there yet.
    kills = [("on_log", step // 2), (hook, step)] if step % 3 == 1 else [(hook, step)]
    for number, kill in enumerate(kills):
        code, output = ended(start_child(folder, number, strategy, epochs=EPOCHS, every=every, kill=kill))
        if code != -signal.SIGKILL:
            return f"process {number} ended with {code}: {output[-2000:]}"
    code, output = ended(start_child(folder, len(kills), strategy, epochs=EPOCHS, every=every))
    if code:
        return f"the last process ended with {code}: {output[-2000:]}"
    result = problems_of(folder, root / f"{strategy}-whole", len(kills) + 1)
    lost = result.pop("lost")
    told = f"{hook}, checkpoint every {every}: {lost} steps done again, {time.monotonic() - start:.1f} s"
    return f"{told}; DIFFERENT: {json.dumps(result)[:2000]}" if result else f"ok, {told}"


def main(steps_of_fsdp: int = 1, steps_of_others: int = 5) -> int:
    """Run all, a few at once; returns how many runs were not as they must be."""
    failed = 0
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_ONCE) as pool:
        root = Path(name)
        os.environ |= CHEAP  # every process would compile the same programs
        whole = lambda name: ended(start_child(root / f"{name}-whole", 0, name, epochs=EPOCHS, every=5))  # noqa: E731
        for strategy, (code, output) in zip(STRATEGIES, pool.map(whole, STRATEGIES), strict=True):
            if code:
                print(f"{strategy}: the training without a kill ended with {code}: {output}")
                return 1
        every = {name: steps_of_fsdp if name == "fsdp" else steps_of_others for name in STRATEGIES}
        runs = [(name, k) for name in STRATEGIES for k in range(every[name], EPOCHS * STEPS_PER_EPOCH + 1, every[name])]
        for (strategy, step), seen in zip(runs, pool.map(lambda x: run(root, *x), runs), strict=True):
            print(f"{strategy:<8}killed at step {step:>2}: {seen}", flush=True)
            failed += not seen.startswith("ok")
    print(f"{len(runs)} runs, {failed} of them not as without a kill")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(*map(int, sys.argv[1:])), 1))
