"""What `Trainer.follow` does: each new checkpoint of a run that trains in another process is validated."""

import logging
import time
from collections import Counter
from typing import Any

from jaxlit.checkpoints import files
from jaxlit.checkpoints.places import ENDED, Place, place_of
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentError, CheckpointError
from jaxlit.reporting.terminal import say

_logger = logging.getLogger("jaxlit")


def follow(
    trainer: Any, run: Place, given: dict[str, Any], monitor: str | None, mode: str, every: float, timeout: Any
) -> list[dict[str, float]]:
    """Return the rows of a run's checkpoints that could be validated, once it has ended; `given` are of `validate`."""
    say(f"follow: {run}, until its training has ended")
    rows, sign, least, best = dict[Any, dict[str, float]](), -1 if mode == "max" else 1, float("inf"), run / "best"
    tries, since = Counter[tuple[str, float]](), time.monotonic()  # of a path and order; when one was new
    while True:
        has_ended, is_late, new = False, timeout is not None and time.monotonic() - since > timeout, []
        try:
            ended = (run / ENDED).exists()  # before the list, which is then all
            paths = sorted(files.candidates(files.checkpoints_in(run)), key=lambda path: files.step_of(path) or 0)
            found = [(str(path), files.order_of(path), files.step_of(path)) for path in paths]
            if monitor is not None and (order := files.order_of(best)) not in (-1, *(x for _, x, _ in found)):
                found.insert(0, (str(best), order, None))  # what it is a copy of is gone
            has_ended, new = ended, [x for x in found if tries[x[:2]] < 2][:1]
        except (CheckpointError, OSError) as error:  # of a store, for example, that does not answer now
            _logger.warning("follow: %s", error)
        has_ended, is_late, new = team().agree("the run that is followed", [has_ended, is_late, new])[0]
        if not new and (has_ended or is_late):
            if not has_ended:
                _logger.warning("follow: %s has not ended, and had no new checkpoint for %s s.", run, timeout)
            return [*rows.values()]
        if not new:
            time.sleep(every)
            continue
        ((path, order, step),), since = new, time.monotonic()
        try:
            results = trainer.validate(**given, ckpt_path=path)
            given["model"] = trainer.module  # with its compiled step
            row = {"step": step or files.read_state(place_of(path))["global_step"]}
            row |= {name: x for result in results for name, x in result.items()}
            if files.order_of(place_of(path)) not in (order, -1):
                continue  # it was written again meanwhile
            rows[path, order] = row
            if monitor is not None and monitor not in row:
                raise ArgumentError(f"Trainer.follow(monitor={monitor!r}): validation_step logs {[*row][1:]}.")
            if monitor is not None and sign * row[monitor] < least:
                if trainer.is_global_zero and path != str(best):
                    files.copy(place_of(path), best)
                least, tries[str(best), order] = sign * row[monitor], 2
            tries[path, order] = 2
        except (CheckpointError, OSError) as error:
            tries[path, order] += 1
            if tries[path, order] == 2 and not rows and path != str(best):  # the module may be another one
                raise
            _logger.warning("follow: %s could not be read (try %d of 2): %s", path, tries[path, order], error)
            time.sleep(every)
