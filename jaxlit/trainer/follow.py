"""What `Trainer.follow` does: each new checkpoint of a run that trains in another process is validated."""

import logging
import time
from typing import TYPE_CHECKING, Any

from jaxlit.checkpoints import files
from jaxlit.checkpoints.places import Place, read_claim
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentError, CheckpointError
from jaxlit.reporting.terminal import say

if TYPE_CHECKING:
    from jaxlit.trainer.trainer import Trainer

_logger = logging.getLogger("jaxlit")


def follow(
    trainer: "Trainer",
    run: Place,
    given: dict[str, Any],
    monitor: str | None,
    mode: str,
    every: float,
    timeout: float | None,
) -> list[dict[str, float]]:
    """Return the rows of the checkpoints that were there to be validated; `given` are the arguments of `validate`."""
    rows, seen, best = list[dict[str, float]](), set[tuple[str, float]](), None
    since = time.monotonic()  # nothing new was there
    say(f"follow: {run}, until its training has ended")
    while True:
        folder, is_late = files.checkpoints_in(run), timeout is not None and time.monotonic() - since > timeout
        has_ended = read_claim(folder).get("ended", False)  # before the list, which is then all
        found = [(path.name, files.order_of(path)) for path in reversed(files.candidates(folder))]
        has_ended, is_late, found = team().agree("the run that is followed", [has_ended, is_late, found])[0]
        new = [(name, order) for name, order in found if (name, order) not in seen]
        for name, order in new:
            seen.add((name, order))
            path = folder / name
            try:
                step = files.read(path).state["global_step"]
                results = trainer.validate(**given, ckpt_path=path)
                given["model"] = trainer.module  # with its compiled step
                row = {"step": step, **{name: x for result in results for name, x in result.items()}}
                score = None if monitor is None else _score(row, monitor)
                if score is not None and (best is None or (score > best if mode == "max" else score < best)):
                    if trainer.is_global_zero:
                        files.copy(path, run / "best")
                    best = score
            except (CheckpointError, FileNotFoundError) as error:
                if files.order_of(path) >= 0:
                    raise
                _logger.warning("%s was deleted before it was validated: %s", path, error)
                continue
            rows.append(row)
        if has_ended:
            return rows
        if is_late and not new:
            _logger.warning("follow: %s has not ended, and had no new checkpoint for %s seconds.", run, timeout)
            return rows
        since = time.monotonic() if new else since
        time.sleep(every)


def _score(row: dict[str, float], monitor: str) -> float:
    if monitor not in row:
        raise ArgumentError(f"Trainer.follow(monitor={monitor!r}): validation_step logs {[*row][1:]}.")
    return row[monitor]
