"""What `Trainer.follow` does: each new checkpoint of a run that trains in another process is validated."""

import contextlib
import logging
import math
import time
from collections.abc import Iterator
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
    rows, sign, least = list[dict[str, float]](), -1 if mode == "max" else 1, math.inf
    for path, order in _checkpoints(run, None if monitor is None else run / "best", every, timeout):
        try:
            step = files.read_state(path)["global_step"]
            results = trainer.validate(**given, ckpt_path=str(path))
            given["model"] = trainer.module  # with its compiled step
            if files.order_of(path) > order:
                continue  # it was written again meanwhile: the next look finds it
            rows.append(row := {"step": step} | {name: x for result in results for name, x in result.items()})
            if monitor is not None and monitor not in row:
                raise ArgumentError(f"Trainer.follow(monitor={monitor!r}): validation_step logs {[*row][1:]}.")
            if monitor is not None and sign * row[monitor] < least:
                if trainer.is_global_zero and path != run / "best":
                    files.copy(path, run / "best")
                least = sign * row[monitor]
        except (CheckpointError, FileNotFoundError) as error:
            is_intact = False
            with contextlib.suppress(CheckpointError, FileNotFoundError):
                files.verify(path)
                is_intact = files.order_of(path) == order
            if is_intact:
                raise
            _logger.warning("%s is left out, as it is damaged, deleted or written again: %s", path, error)
    return rows


def _checkpoints(run: Place, best: Place | None, every: float, timeout: Any) -> Iterator[tuple[Place, float]]:
    """Yield each new checkpoint and its order, as they were written; first the best if what it copies is gone."""
    seen, since = set[tuple[str, float]](), time.monotonic()  # when something new was seen last
    while True:
        is_late, has_ended, found = timeout is not None and time.monotonic() - since > timeout, False, []
        try:
            ended = (run / ENDED).exists()  # before the list, which is then all
            paths = files.candidates(files.checkpoints_in(run))[::-1]
            has_ended, found = ended, [(str(path), files.order_of(path)) for path in paths]
            if best is not None and not seen and files.order_of(best) not in (-1, *(order for _, order in found)):
                found.insert(0, (str(best), files.order_of(best)))
        except (CheckpointError, OSError) as error:  # of a store, for example, that does not answer now
            _logger.warning("follow: %s", error)
        has_ended, is_late, found = team().agree("the run that is followed", [has_ended, is_late, found])[0]
        new = [(path, order) for path, order in found if (path, order) not in seen]
        for path, order in new:
            seen.add((path, order))
            yield place_of(path), order
        if has_ended or (is_late and not new):
            if not has_ended:
                _logger.warning("follow: %s has not ended, and had no new checkpoint for %s s.", run, timeout)
            return
        since = time.monotonic() if new else since
        time.sleep(every)
