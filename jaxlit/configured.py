"""Objects that are made by arguments: they refuse those that they do not have, and show those that they were given."""

import inspect
import reprlib
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from jaxlit.porting import refuse_unknown

_PLAIN = (bool, int, float, str, Path, timedelta, dict, list, tuple)
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


class Configured:
    """The base of callbacks and strategies, whose attributes are called as the constructor's arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse an argument that the constructor does not have, with what takes its place."""
        refuse_unknown(cls, args, kwargs)
        return super().__new__(cls)

    def __repr__(self) -> str:
        """Return the call that makes such an object, without arguments that have their defaults."""
        held, shown = vars(self), list[str]()
        for parameter in [*inspect.signature(type(self).__init__).parameters.values()][1:]:
            value = held.get(parameter.name)
            if isinstance(value, _PLAIN) and value != parameter.default and (value or parameter.default is not None):
                first = parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
                shown.append(_short.repr(value) if first else f"{parameter.name}={_short.repr(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"
