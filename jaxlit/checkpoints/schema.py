"""What a checkpoint's state.json may hold: it may come from a stranger, or from a disk that lost bits.

A schema is a type, a function that tells whether a value is right, a list of one schema for lists, a tuple of schemas
for lists of that length, or a dict of schemas by key.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxlit.errors import CheckpointError


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 2**53


def _is_number(x: Any) -> bool:
    return type(x) in (int, float)


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda x: any(type(x) is type(value) and x == value for value in values)


class _Maybe:
    """None, or what a schema says."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema


class _Values:
    """A dict of any keys, whose values a schema describes."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema


_ANY = object
_METRIC = {
    "name": str,
    "prog_bar": bool,
    "logger": bool,
    "on_step": bool,
    "on_epoch": bool,
    "reduce_fx": _one_of("mean", "sum", "min", "max"),
    "add_dataloader_idx": bool,
}
_TOTAL = {"metric": _METRIC, "hook": str, "total": _Maybe(_is_number), "weight": _is_number}
_ARRAY = {"shape": [_is_count], "data": str}
_LOADER = {"idx": _is_count, "states": [{"epoch": _is_count, "at": _ANY, "fingerprint": _Maybe(dict)}]}

STATE = {
    "global_step": _is_count,
    "epoch": _is_count,
    "position": {
        **dict.fromkeys(("epoch", "batch_idx", "total_batch_idx", "global_step", "first_step", "filled"), _is_count),
        **dict.fromkeys(("begun", "starting", "over", "cut"), bool),
        **dict.fromkeys(("left", "ended"), _one_of(0, 1, 2)),
    },
    "loaders": {"training": _Maybe(_LOADER), "validation": _Maybe(_LOADER)},
    "evaluation": _Maybe(
        {
            "begun": _one_of(0, 1, 2),
            "loader": _is_count,
            "batch_idx": _is_count,
            "starting": bool,
            "found": [_Values(_is_number)],
            "row": _Values(_is_number),
            "ended": _one_of(0, 1, 2),
            "sums": _Maybe((_ARRAY, _is_count)),
            "metrics": [_METRIC],
        }
    ),
    "arrays": [(str, [_is_count], str)],
    "optimizer": str,
    "metrics": [_METRIC],
    "latest": _Maybe(_ARRAY),
    "pending": _Maybe((_Maybe(_ARRAY), _Values(_is_number), _is_count)),
    "results": [(str, _METRIC, _is_number, bool, bool, _Maybe(_is_count))],
    "log": {
        "window": [(str, _TOTAL)],
        "epoch": [(str, _TOTAL)],
        "evaluation": [(str, _Maybe(_is_count), _TOTAL)],
    },
    "callbacks": _Values(dict),
    "datamodule": dict,
    "module": {"class": str, "hparams": dict},
    "strategy": str,
    "accumulate": _is_count,
    "window_replicas": _Maybe(_is_count),
    "processes": _is_count,
}


def check_state(state: Mapping[str, Any], where: str) -> None:
    """Refuse a state that is not what `jaxlit.loop.snapshot.take` makes; other keys may stand beside its own.

    Args:
        state: The state.
        where: The file, for messages.

    Raises:
        CheckpointError: Naming the value.
    """
    for key in STATE.keys() - state.keys():
        raise CheckpointError(f"{where} has no {key!r}: it is damaged, or was changed.")
    _check({key: state[key] for key in STATE}, STATE, where)
    position = state["position"]
    for key in ("global_step", "epoch"):
        if position[key] != state[key]:
            raise CheckpointError(f"{where} has two values of {key!r}, {state[key]} and {position[key]}.")
    names = [name for name, _, _ in state["arrays"]]
    _expect(len(set(names)) == len(names), names, f"{where}['arrays']")
    fresh = not any(position[key] for key in ("batch_idx", "filled", "left", "over", "ended"))
    _expect(position["begun"] or fresh, position, f"{where}['position']")
    for loader in filter(None, state["loaders"].values()):
        _expect(bool(loader["states"]), loader, f"{where}['loaders']")


def _check(x: Any, schema: Any, where: str) -> None:
    if isinstance(schema, _Maybe):
        if x is not None:
            _check(x, schema.schema, where)
    elif isinstance(schema, _Values):
        _expect(isinstance(x, dict), x, where)
        for key, value in x.items():
            _check(value, schema.schema, f"{where}[{key!r}]")
    elif isinstance(schema, dict):
        _expect(isinstance(x, dict) and x.keys() == schema.keys(), x, where)
        for key, inside in schema.items():
            _check(x[key], inside, f"{where}[{key!r}]")
    elif isinstance(schema, list):
        _expect(isinstance(x, list), x, where)
        for i, value in enumerate(x):
            _check(value, schema[0], f"{where}[{i}]")
    elif isinstance(schema, tuple):
        _expect(isinstance(x, list) and len(x) == len(schema), x, where)
        for i, (value, inside) in enumerate(zip(x, schema, strict=True)):
            _check(value, inside, f"{where}[{i}]")
    elif isinstance(schema, type):
        _expect(schema is object or type(x) is schema, x, where)
    else:
        _expect(schema(x), x, where)


def _expect(is_right: bool, x: Any, where: str) -> None:
    if not is_right:
        raise CheckpointError(f"{where} is {x!r:.60}, which no checkpoint has there: it is damaged, or was changed.")
