"""Which checkpoints of `ModelCheckpoint` stay, and their names: no Trainer, no disk, no arrays."""

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, NamedTuple

from jaxlit.errors import ArgumentError


class Record(NamedTuple):
    """A checkpoint that stays, or that is being written."""

    name: str  # of its folder
    step: int
    score: float | None  # the monitored value; None if it is not among the best
    is_finite: bool = True  # whether all of its parameters are
    stays: bool = False  # whether it is kept whatever comes later


@dataclass
class Kept:
    """The checkpoints that stay: the newest, the newest whose parameters are finite, and the `save_top_k` best.

    `written` or `failed` is called once the one that was added is, or is not. A score must be better than one of the
    best to replace it; of equal ones the oldest is replaced first.
    """

    mode: str | None = None  # "min" or "max" of the scores is best; None if the newest checkpoint is
    save_top_k: int = 1  # how many of the best stay; with -1 no checkpoint is deleted
    save_last: bool = True  # whether checkpoints that are not among the best are wanted
    keep_every: int | None = None  # of so many steps the first checkpoint stays whatever comes later
    order: int = 0  # of the newest in its folder: larger for what is written later
    records: list[Record] = field(default_factory=list)  # the oldest first
    replaced: list[str] = field(default_factory=list)  # deleted once the newest is written
    _before: list[Record] | None = None  # without the newest, while that is being written

    @property
    def newest(self) -> str:
        """The name of the newest checkpoint; "" if there is none."""
        return self.records[-1].name if self.records else ""

    @property
    def scores(self) -> dict[str, float]:
        """The scores of the best checkpoints, by name."""
        return {x.name: x.score for x in self.records if x.score is not None}

    @property
    def best(self) -> str:
        """The name of the best checkpoint, of equal ones the oldest; "" if there is none."""
        scores = self.scores
        extreme = max if self.mode == "max" else min
        return self.newest if self.mode is None else extreme(scores, key=lambda name: scores[name], default="")

    def is_best(self, score: float | None) -> bool:
        """Return whether a checkpoint with this score would be among the best."""
        if score is None or not math.isfinite(score):
            return False
        as_good = [x for x in self.scores.values() if (x >= score if self.mode == "max" else x <= score)]
        return self.save_top_k == -1 or len(as_good) < self.save_top_k

    def wants(self, score: float | None, step: int) -> bool:
        """Return whether a checkpoint with this score is worth writing if training continues."""
        return self.mode is None or self.save_last or self.is_best(score) or self.is_to_stay(step)

    def is_to_stay(self, step: int) -> bool:
        """Return whether a checkpoint at a step stays whatever comes later."""
        every = self.keep_every
        return (
            every is not None
            and all(x.step // every < step // every for x in self.records if x.stays)
            and step >= every
        )

    def add(self, new: Record) -> None:
        """Add a checkpoint that begins to be written; one of the same name is overwritten."""
        self._before, self.order = self.records, self.order + 1
        has_score = new.score is not None and math.isfinite(new.score)
        if new.name == self.newest and new.is_finite and not has_score:  # the same weights again
            new = new._replace(score=self.scores.get(new.name))
        self.records = [x for x in self.records if x.name != new.name]
        if not self.is_best(new.score):
            new = new._replace(score=None)
        elif len(scores := self.scores) >= self.save_top_k > 0:
            worst = (min if self.mode == "max" else max)(scores, key=lambda name: scores[name])
            self.records = [x._replace(score=None) if x.name == worst else x for x in self.records]
        self.records = [*self.records, new := new._replace(stays=self.is_to_stay(new.step))]
        names = {new.name, *self.scores, *[x.name for x in self.records if x.is_finite][-1:]}
        names |= {x.name for x in self.records if x.stays}
        self.records = [x for x in self.records if x.name in names]
        self.replaced = [] if self.save_top_k == -1 else [x.name for x in self._before if x.name not in names]

    def written(self) -> list[str]:
        """Return the names of the checkpoints to delete now that the newest is written."""
        names, self.replaced, self._before = self.replaced, [], None
        return names

    def failed(self) -> None:
        """Take back the checkpoint that is being written, if there is one."""
        if self._before is not None:
            self.records, self.replaced, self._before = self._before, [], None

    def state(self) -> dict[str, Any]:
        """Return what `restore` takes, as JSON values, and the best for those who only read a checkpoint."""
        return {"checkpoints": [[*x] for x in self.records], "replaced": self.replaced, "best_model": self.best}

    def restore(self, state: Mapping[str, Any], existing: Collection[str]) -> None:
        """Restore the checkpoints that still exist; a crash may have come before the replaced ones were deleted."""
        rows = [row for row in state["checkpoints"] if row[0] in existing]
        self.records = [Record(str(name), int(step), x if x is None else float(x), *y) for name, step, x, *y in rows]
        is_written = [row[0] for row in rows[-1:]] == [row[0] for row in state["checkpoints"][-1:]]
        self.replaced = [name for name in state["replaced"] if name in existing and is_written]

    def unused(self, name: str, existing: Collection[str]) -> str:
        """Return a name, or the first version of it that none of the existing checkpoints has."""
        return next(x for i in itertools.count() if (x := f"{name}-v{i}" if i else name) not in existing)


def check_filename(filename: str | None) -> None:
    """Refuse what is no format of names."""
    try:
        filled(filename or "", {"epoch": 1, "step": 1}, lambda name: 1.0)
    except ValueError as error:
        text = f"ModelCheckpoint(filename={filename!r}) is no format: {error}. Write for example"
        raise ArgumentError(f"{text} '{{epoch}}-{{val/loss:.2f}}'.") from None


def filled(filename: str, counts: Mapping[str, int], metric: Callable[[str], Any]) -> str:
    """Return a filename with the values that it names, from the counts or the metrics, fit for a folder's name."""
    result = ""
    for text, name, form, _ in Formatter().parse(filename):
        if name == "":
            raise ValueError("a pair of braces is empty")
        value = "" if name is None else format(counts[name] if name in counts else metric(name), form or "")
        result += text if name is None else f"{text}{name}={value}"
    return re.sub(r"[^\w=.,+-]", "_", result)
