"""What belongs to a module but not to its graph."""

import argparse
import inspect
import json
import weakref
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from jaxlit.errors import ArgumentError, ArgumentTypeError

_T = TypeVar("_T")


class Watcher(Protocol):
    """What is told when a module is touched while a run has its arrays."""

    def touch(self) -> None:
        """Bring the module's arrays up to date."""

    def refuse_attribute(self, name: str) -> None:
        """Refuse to set an attribute where the compiled steps could not follow."""


class _SideTable(Generic[_T]):
    """Values by module, forgotten with it; by identity, as a dataclass module has no hash."""

    def __init__(self) -> None:
        self._values: dict[int, _T] = {}

    def __setitem__(self, module: Any, value: _T) -> None:
        if id(module) not in self._values:
            weakref.finalize(module, self._values.pop, id(module), None)
        self._values[id(module)] = value

    def get(self, module: Any, default: Any = None) -> Any:
        """Return the module's value."""
        return self._values.get(id(module), default)


# What belongs to a module but not to its graph: an attribute would change the graphdef, and with it
# every compiled step.
_hparams: "_SideTable[Hparams]" = _SideTable()
_trainers: "_SideTable[weakref.ref[Any]]" = _SideTable()

# By id of the module; empty outside a run, so that touching a module then costs nothing.
watchers: dict[int, Watcher] = {}


def attach(module: Any, trainer: Any) -> Any:
    """Make `module.trainer` the trainer, and return the one that it was."""
    outer = _trainers.get(module)
    _trainers[module] = weakref.ref(trainer)
    return outer() if outer else None


def trainer_of(module: Any) -> Any:
    """Return the Trainer that runs, or ran, the module; None without one."""
    found = _trainers.get(module)
    return found() if found else None


class Hparams(dict[str, Any]):
    """Hyperparameters: a dict, whose keys are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"hparams has no {name!r}, and has {list(self)}. Constructor arguments that are JSON values are kept."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def hparams_of(module: Any) -> Hparams:
    """Return the module's hyperparameters, always the same dict, without touching the module."""
    if (found := _hparams.get(module)) is None:
        found = _hparams[module] = Hparams()
    return found


def keep_hparams(module: Any, chosen: tuple[Any, ...], ignore: tuple[str, ...]) -> None:
    """Keep only some of a module's hyperparameters.

    Args:
        module: The module.
        chosen: Names of those that stay, and dicts of more; none for all of them.
        ignore: Names of those that go.

    Raises:
        ArgumentError: The constructor has no argument of a name.
    """
    kept, names = hparams_of(module), [x for x in chosen if isinstance(x, str)]
    more = [x for x in chosen if not isinstance(x, str)]
    owner, known = (
        f"{type(module).__name__}.save_hyperparameters",
        [*inspect.signature(type(module).__init__).parameters],
    )
    if unknown := [x for x in (*names, *ignore) if x not in (*known, *kept)]:
        raise ArgumentError(f"{owner} names {unknown[0]!r}, which is no argument of the constructor.")
    found = {k: v for k, v in kept.items() if (k in names or not names) and k not in ignore}
    for values in more:
        values = vars(values) if isinstance(values, argparse.Namespace) else values
        if not isinstance(values, Mapping):
            raise ArgumentTypeError(f"{owner} takes names of the constructor's arguments, and dicts, got {values!r}.")
        found |= {k: v for k, v in values.items() if is_json(v)}
    _hparams[module] = Hparams(found)


def share_hparams(copy: Any, module: Any) -> None:
    """Give a copy the module's hyperparameters."""
    if (hparams := _hparams.get(module)) is not None:
        _hparams[copy] = hparams


def share_side_tables(copy: Any, module: Any) -> None:
    """Give the copy that a step sees the module's hyperparameters and Trainer."""
    share_hparams(copy, module)
    if (trainer := _trainers.get(module)) is not None:
        _trainers[copy] = trainer


def set_hparams(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep those of a constructor's arguments that are JSON values."""
    try:
        # In part: jl.lazy leaves out rngs.
        bound = inspect.signature(type(module).__init__).bind_partial(module, *args, **kwargs)
    except TypeError:
        return  # the constructor itself will say what is wrong
    bound.apply_defaults()
    arguments = dict(list(bound.arguments.items())[1:])
    for parameter in inspect.signature(type(module).__init__).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    _hparams[module] = Hparams({k: v for k, v in arguments.items() if is_json(v)})


def is_json(value: Any) -> bool:
    """Tell whether a value can be kept in a checkpoint."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
