"""What belongs to a module but not to its graph: an attribute would change the graphdef, and every compiled step."""

import weakref
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class SideTable(Generic[_T]):
    """Values by object, forgotten with it; by identity, as a dataclass module has no hash."""

    def __init__(self) -> None:
        self._values: dict[int, _T] = {}

    def __setitem__(self, owner: Any, value: _T) -> None:
        if id(owner) not in self._values:
            weakref.finalize(owner, self._values.pop, id(owner), None)
        self._values[id(owner)] = value

    def get(self, owner: Any) -> _T | None:
        """Return the object's value, None without one."""
        return self._values.get(id(owner))

    def share(self, copy: Any, owner: Any) -> None:
        """Give a copy the object's value, if it has one."""
        if (value := self.get(owner)) is not None:
            self[copy] = value


trainers: SideTable[weakref.ref[Any]] = SideTable()
# The `ModuleSync` of a module by its id, called when the module is touched while a run has its arrays. Empty outside
# of a run, so that touching a module then costs nothing.
watchers: dict[int, Any] = {}


def attach(module: Any, trainer: Any) -> Any:
    """Make `module.trainer` the trainer, and return the one that it was."""
    outer = trainer_of(module)
    trainers[module] = weakref.ref(trainer)
    return outer


def trainer_of(module: Any) -> Any:
    """Return the Trainer that runs, or ran, the module; None without one."""
    reference = trainers.get(module)
    return reference() if reference else None
