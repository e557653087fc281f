"""Values by object, which are no attributes of it."""

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

    def get(self, owner: Any, default: Any = None) -> Any:
        """Return the object's value."""
        return self._values.get(id(owner), default)
