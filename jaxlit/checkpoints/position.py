"""How far training is, as a checkpoint has it, and what a checkpoint's state.json may contain.

The file may come from a stranger, or from a disk that lost bits. A schema is a type, a function that returns whether a
value is right, a list of one schema for lists, a tuple of schemas for lists of that length, a dict of schemas by key,
or with the key `...` for all keys. `_maybe(schema)` allows None.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxlit.errors import CheckpointError


@dataclass
class Position:
    """How far training is: where the arrays are, and what a checkpoint contains.

    Training continues at one kind of place only: between two batches, or after an epoch. There a validation, and the
    end of the epoch, may still have to be done.
    """

    epoch: int = 0  # epochs finished
    batch_idx: int = 0  # batches of this epoch done
    total_batch_idx: int = 0  # batches of all epochs done
    global_step: int = 0  # optimizer steps taken
    first_step: int = 0  # those taken before this epoch
    filled: int = 0  # batches in the accumulation window
    over: bool = False  # this epoch has no batch left
    validated: bool = True  # no validation is left to do after the last batch
    data: Any = None  # the state of the training loader after the last batch that was used
    cut: bool = False  # training has ended in this epoch, which counts for hooks; in no checkpoint

    @property
    def inside(self) -> bool:
        """Whether an epoch has begun and not ended."""
        return self.batch_idx > 0 or self.over

    @property
    def epochs(self) -> int:
        """Epochs finished, with one that a stop has cut."""
        return self.epoch + self.cut

    def advance(self, data: Any, *, stepping: int, last: bool, batches: int = 1) -> None:
        """Move after a dispatch of batches, in which the optimizer took `stepping` steps; nothing else counts them.

        `data` is the loader's state after it, `last` whether it had the last batch of the epoch.
        """
        self.batch_idx = self.batch_idx + batches
        self.total_batch_idx = self.total_batch_idx + batches
        self.global_step = self.global_step + stepping
        self.filled = 0 if stepping else self.filled + 1
        self.validated = False
        self.over = last
        self.data = data

    def end_batches(self, data: Any) -> None:
        """End the epoch here; the loader may have more batches."""
        self.over = True
        self.data = data

    def advance_epoch(self, data: Any) -> None:
        """Move before the next epoch, whose loader continues from `data`."""
        self.epoch = self.epoch + 1
        self.batch_idx = 0
        self.over = False
        self.data = data
        self.first_step = self.global_step

    def move_before(self, step: int, batch_idx: int, data: Any, *, filled: int = 0) -> None:
        """Move before an earlier step and batch of this epoch, with the loader's state and the filled window then."""
        self.total_batch_idx -= self.batch_idx - batch_idx
        self.batch_idx = batch_idx
        self.global_step = step
        self.filled = filled
        self.validated = True
        self.over = False
        self.data = data

    def go_back(self, was: "Position") -> bool:
        """Count optimizer steps from an earlier position on; the batches since then stay used.

        Return whether that position was in this epoch: then its metrics continue.
        """
        self.global_step = was.global_step
        self.filled = 0
        within = was.epoch == self.epoch and not was.over
        if not within:
            self.first_step = was.global_step
        return within


FORMAT = 3  # of state.json; one of another is refused


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**53


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)


def _is_reduction(x: Any) -> bool:
    return type(x) is str and x in ("mean", "sum", "min", "max")


def _maybe(schema: Any) -> tuple[None, Any]:
    return (None, schema)


# The fields of `Position` in state.json; `jaxlit.loop.snapshot` saves `data` as the loader's state, and not `cut`.
_COUNTS = ("epoch", "batch_idx", "total_batch_idx", "global_step", "first_step", "filled")
POSITION = dict.fromkeys(_COUNTS, _is_count) | dict.fromkeys(("over", "validated"), bool)

_METRIC = {
    "name": str,
    "prog_bar": bool,
    "logger": bool,
    "on_step": bool,
    "on_epoch": bool,
    "reduce_fx": _is_reduction,
    "add_dataloader_idx": bool,
    "is_integer": bool,
}
_NEW = {"is_integer", "batches"}  # which others may not have
_TOTAL = {"metric": _METRIC, "hook": str, "total": _maybe(_is_number), "weight": _is_number}
_ARRAY = {"shape": [_is_count], "data": str}
_LOADER = {
    "idx": _is_count,
    "states": [{"epoch": _is_count, "at": object, "fingerprint": _maybe(dict), "batches": [(_is_count, str)]}],
}

STATE = {
    "format": _is_count,
    "global_step": _is_count,
    "epoch": _is_count,
    "position": POSITION,
    "loaders": {"training": _maybe(_LOADER)},
    "arrays": [(str, [_is_count], str)],
    "optimizer": str,
    "metrics": [_METRIC],
    "latest": _maybe(_ARRAY),
    "results": [(str, _METRIC, _is_number, bool, bool, _maybe(_is_count))],
    "log": {"window": [(str, _TOTAL)], "epoch": [(str, _TOTAL)]},
    "callbacks": {...: dict},
    "datamodule": dict,
    "module": {"class": str, "hparams": dict},
    "strategy": str,
    "accumulate": _is_count,
    "window_replicas": _maybe(_is_count),
    "processes": _is_count,
}

# What a checkpoint also has if training ended before a step that was not finite: the step, its batches in the epoch
# (the first, and the one after the last), and the optimizer's arrays that are not finite.
NOT_FINITE = {"step": _is_count, "epoch": _is_count, "batches": (_is_count, _is_count), "optimizer": [str]}
OPTIONAL = {
    "added_hparams": dict,
    "auto_size": _is_count,  # the batches of a dispatch that steps_per_execution="auto" has chosen
    "accumulate_set": (_is_count, _is_count),
    "evaluated": {...: str},  # by a parameter's name, that of the array which validations saw in its place
    "hyperparams": {...: _is_number},  # of `optax.inject_hyperparams`, as training began with them
    "not_finite": NOT_FINITE,
    "stopped": str,  # why the run was stopped, and ends at once when it is resumed
    "numbers": {...: object},  # in Variables of the module, by path; see `encode`
}


def check_state(state: Mapping[str, Any], place: str) -> None:
    """Refuse a state in a file that is not what `jaxlit.loop.snapshot.take` makes; it may have other keys too."""
    if (version := state.get("format", 1)) != FORMAT:
        raise CheckpointError(
            f"{place} is of format {version!r:.20}, and this version of jaxlit reads format {FORMAT}. Continue from it "
            "with the version that wrote it."
        )
    for key in sorted(STATE.keys() - state.keys()):
        raise CheckpointError(f"{place} has no {key!r}: it is damaged, or was changed.")
    for key, schema in (*STATE.items(), *((key, _maybe(schema)) for key, schema in OPTIONAL.items())):
        _check(state.get(key), schema, f"{place}[{key!r}]")
    position = state["position"]
    for key in ("global_step", "epoch"):
        if position[key] != state[key]:
            raise CheckpointError(f"{place} has two values of {key!r}, {state[key]} and {position[key]}.")
    names = [name for name, _, _ in state["arrays"]]
    _expect(len(set(names)) == len(names), names, f"{place}['arrays']")
    inside = position["batch_idx"] > 0 or position["over"]
    _expect(inside or (position["validated"] and not position["filled"]), position, f"{place}['position']")
    check_loaders(state["loaders"], f"{place}['loaders']")


def check_loaders(loaders: Any, place: str) -> None:
    """Refuse states of loaders that are not what `jaxlit.loop.snapshot.take` makes; see `check_state`."""
    _check(loaders, STATE["loaders"], place)
    for loader in filter(None, loaders.values()):
        _expect(bool(loader["states"]), loader, place)


def _check(x: Any, schema: Any, place: str) -> None:
    if isinstance(schema, tuple) and schema[0] is None:
        if x is None:
            return
        schema = schema[1]
    if isinstance(schema, dict):
        _expect(isinstance(x, dict) and (... in schema or x.keys() in (schema.keys(), schema.keys() - _NEW)), x, place)
        inside = [(key, schema[... if ... in schema else key]) for key in x]
    elif isinstance(schema, (list, tuple)):
        _expect(isinstance(x, list) and (isinstance(schema, list) or len(x) == len(schema)), x, place)
        inside = list(enumerate(schema * len(x) if isinstance(schema, list) else schema))
    else:
        is_type = isinstance(schema, type)
        _expect(schema is object or type(x) is schema if is_type else schema(x), x, place)
        return
    for key, part in inside:
        _check(x[key], part, f"{place}[{key!r}]")


def _expect(is_right: bool, x: Any, place: str) -> None:
    if not is_right:
        raise CheckpointError(f"{place} is {x!r:.60}, which no checkpoint has there: it is damaged, or was changed.")
