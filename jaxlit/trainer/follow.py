"""What `Trainer.follow` does: each new checkpoint of a run that trains in another process is validated."""

import logging
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxlit.checkpoints import files
from jaxlit.checkpoints.files import MANIFEST
from jaxlit.checkpoints.places import Place, read_claim
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentError, CheckpointError
from jaxlit.reporting.terminal import say

if TYPE_CHECKING:
    from jaxlit.trainer.trainer import Trainer

_logger = logging.getLogger("jaxlit")


@dataclass
class Follower:
    """Validates what a run saves, and keeps the best of it."""

    trainer: "Trainer"
    run: Place
    given: dict[str, Any]  # the arguments of `validate`
    monitor: str | None
    mode: str
    best: float = math.nan  # the score of the checkpoint in `<run>/best`
    rows: list[dict[str, float]] = field(default_factory=list)

    def follow(self, every: float, timeout: float | None) -> list[dict[str, float]]:
        """Return the rows of the checkpoints that could be validated, once the training has ended."""
        seen = set[tuple[str, float]]()
        since = time.monotonic()  # nothing new was there
        say(f"follow: {self.run}, until its training has ended")
        while True:
            folder = files.checkpoints_in(self.run)
            is_late = timeout is not None and time.monotonic() - since > timeout
            has_ended = read_claim(folder).get("ended", False)  # before the list, which is then all
            found = [(str(path), files.order_of(path)) for path in reversed(files.candidates(folder))]
            if not seen and self.monitor is not None and (self.run / "best" / MANIFEST).exists():
                found.insert(0, (str(self.run / "best"), 0))  # of an earlier start: what it was copied from may be gone
            has_ended, is_late, found = team().agree("the run that is followed", [has_ended, is_late, found])[0]
            new = [(path, order) for path, order in found if (path, order) not in seen]
            for path, order in new:
                seen.add((path, order))
                self._validate(files.place_of(path))
            if has_ended or (is_late and not new):
                if not has_ended:
                    _logger.warning("follow: %s has not ended, and had no new checkpoint for %s s.", self.run, timeout)
                return self.rows
            since = time.monotonic() if new else since
            time.sleep(every)

    def _validate(self, path: Place) -> None:
        """Add the row of a checkpoint, and keep it if it is the best; leave out one that is damaged, or is gone."""
        try:
            step = files.read_state(path)["global_step"]
            results = self.trainer.validate(**self.given, ckpt_path=str(path))
            self.given["model"] = self.trainer.module  # with its compiled step
            self.rows.append({"step": step, **{name: x for result in results for name, x in result.items()}})
            if self.monitor is not None:
                self._rank(path, self.rows[-1])
        except (CheckpointError, FileNotFoundError) as error:
            try:
                files.verify(path)
            except (CheckpointError, FileNotFoundError):
                _logger.warning("%s is left out, as it was deleted or is damaged: %s", path, error)
                return
            raise

    def _rank(self, path: Place, row: dict[str, float]) -> None:
        if self.monitor not in row:
            raise ArgumentError(f"Trainer.follow(monitor={self.monitor!r}): validation_step logs {[*row][1:]}.")
        score = row[self.monitor]
        is_better = score > self.best if self.mode == "max" else score < self.best
        if is_better or (math.isnan(self.best) and not math.isnan(score)):
            if self.trainer.is_global_zero and path != self.run / "best":
                files.copy(path, self.run / "best")
            self.best = score
