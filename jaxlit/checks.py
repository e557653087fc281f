"""Checks of arguments: each error names the owner, the argument, the value and the allowed set.

`owner` is the class or function that was called, as a user writes it. Below are the checks for optional packages and
paths, and the user's cache folder.
"""

import contextlib
import datetime
import importlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from jaxlit.errors import ArgumentError, ArgumentTypeError, JaxlitError, LoggerError, did_you_mean
from jaxlit.texts import shown


def require(
    allowed: bool, name: str, value: Any, rule: str, *, owner: str, kind: type[JaxlitError] = ArgumentError
) -> None:
    """Raise an error unless a value is allowed; `rule` is the message's "takes an int of at least 0"."""
    if not allowed:
        raise kind(f"{owner}({name}=...) {rule}, got {shown(value)}.")


def is_int(value: Any, *, low: int) -> bool:
    """Return whether a value is an int of at least `low`; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= low)


def integer(name: str, value: Any, *, low: int, also: Sequence[Any] = (), owner: str = "Trainer") -> Any:
    """Return an int of at least `low`; for a value in `also` the first of these."""
    if any(type(value) is type(x) and value == x for x in also):
        return also[0]
    rule = f"takes an int of at least {low}{''.join(f' or {x!r}' for x in also)}"
    return _number(name, value, rule, owner, lambda x: x >= low, kinds=(int, np.integer))


def boolean(name: str, value: Any, *, owner: str = "Trainer") -> bool:
    """Return True or False."""
    fits = isinstance(value, (bool, np.bool_))
    require(fits, name, value, "takes True or False", owner=owner, kind=ArgumentTypeError)
    return bool(value)


def one_of(name: str, value: Any, allowed: Sequence[str], *, owner: str = "Trainer") -> str:
    """Return one of the allowed strings."""
    if not isinstance(value, str) or value not in allowed:
        hint = did_you_mean(value, allowed) if isinstance(value, str) else ""
        raise ArgumentError(
            f"{owner}({name}=...) takes one of {', '.join(map(repr, allowed))}, got {shown(value)}.{hint}"
        )
    return value


def limit(name: str, value: Any) -> int | float:
    """Return a number of batches, or a fraction of them."""
    rule = "takes an int of at least 0 (batches) or a float from 0.0 to 1.0 (a fraction)"
    return _number(name, value, rule, "Trainer", lambda x: 0 <= x <= (math.inf if isinstance(x, int) else 1.0))


def number(name: str, value: Any, *, low: float = -math.inf, owner: str = "Trainer") -> float:
    """Return a finite number of at least `low`."""
    rule = "takes a number" if low == -math.inf else f"takes a number of at least {low:g}"
    return float(_number(name, value, rule, owner, lambda x: low <= x and math.isfinite(x)))


def positive(name: str, value: Any, *, owner: str = "Trainer", rule: str = "takes a number above 0 or None") -> float:
    """Return a finite number above 0."""
    return float(_number(name, value, rule, owner, lambda x: 0 < x < math.inf))


def seconds(name: str, value: Any, *, owner: str = "Trainer") -> float:
    """Return a finite number of seconds above 0, also of a timedelta."""
    rule = "takes seconds above 0, a datetime.timedelta or None"
    number = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    return positive(name, number, owner=owner, rule=rule)


def duration(name: str, value: Any, owner: str = "Trainer") -> float:
    """Return the seconds of a timedelta, a dict of its arguments, or "DD:HH:MM:SS"."""
    rule, parts = "takes a datetime.timedelta, a dict of its arguments, or a str 'DD:HH:MM:SS'", value
    if isinstance(value, str) and re.fullmatch(r"\d+:\d\d:\d\d:\d\d", value.strip()):
        parts = dict(zip(("days", "hours", "minutes", "seconds"), map(int, value.split(":")), strict=True))
    if isinstance(parts, Mapping):
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # another key, NaN, or too many days
            parts = datetime.timedelta(**parts)
    kind = ArgumentError if isinstance(value, (str, Mapping, datetime.timedelta)) else ArgumentTypeError
    if not isinstance(parts, datetime.timedelta) or parts < datetime.timedelta():
        raise kind(f"{owner}({name}=...) {rule}, of at least 0, got {shown(value)}.")
    return parts.total_seconds()


def interval(name: str, value: Any) -> int | float | datetime.timedelta:
    """Return a number of batches, a fraction of an epoch, or a duration."""
    if isinstance(value, (str, Mapping, datetime.timedelta)):
        seconds = duration(name, value)
        require(seconds > 0, name, value, "takes a duration above 0", owner="Trainer")
        return datetime.timedelta(seconds=seconds)
    rule = "takes an int of at least 1 (batches), a float above 0.0 up to 1.0 (of an epoch) or a duration"
    return _number(name, value, rule, "Trainer", lambda x: x >= 1 if isinstance(x, int) else 0.0 < x <= 1.0)


def keys(name: str, value: Any) -> tuple[str | int, ...]:
    """Return a sequence of strings, and of places in a tuple, as a tuple."""
    is_collection = isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes))
    fits = is_collection and all(isinstance(x, (str, int)) and not isinstance(x, bool) for x in value)
    rule = "takes a list or tuple of strings, or of ints for places in a tuple"
    require(fits, name, value, rule, owner="Trainer", kind=ArgumentTypeError)
    return tuple(value)


def is_url(value: Any) -> bool:
    """Return whether a path is the URL of a remote file system, `gs://bucket/run` for example."""
    return isinstance(value, (str, Path)) and re.match(r"(\w+::)*[A-Za-z][\w+.-]+:/", str(value)) is not None


def url(name: str, value: Any, *, owner: str = "Trainer") -> Any:
    """Return a path, or a URL whose file system is installed; refuse any other URL."""
    if is_url(value):
        if re.search(r"://[^/@]*:[^/]*@", str(value)):
            raise ArgumentError(
                f"{owner}({name}=...) has a password in its URL, which would be printed. Give it to fsspec by the "
                "environment or its configuration files."
            )
        from fsspec.registry import get_filesystem_class

        for part in str(value).split("::"):
            try:
                get_filesystem_class(part.partition("://")[0])
            except (ImportError, ValueError) as error:
                remedy = " Pass a string: pathlib shortens URLs." if isinstance(value, Path) else ""
                raise ArgumentError(f"{owner}({name}={str(value)!r}) cannot be opened: {error}.{remedy}") from error
    return value


def on_disk(name: str, value: Any, *, owner: str = "Trainer") -> Any:
    """Return a path of this machine; a URL would become the name of a local folder."""
    if is_url(value):
        raise ArgumentError(
            f"{owner}({name}=...) takes a path on a disk of this machine, got {str(value)!r}. A run with its rows and "
            "checkpoints is in a bucket by Trainer(default_root_dir=url): see docs/checkpoints.md."
        )
    return value


_NUMBERS = (int, float, np.integer, np.floating)


def _number(
    name: str, value: Any, rule: str, owner: str, is_allowed: Callable[[int | float], bool], kinds: tuple = _NUMBERS
) -> int | float:
    """Return a number as an int or a float; refuse another value, and one that is not allowed."""
    fits = isinstance(value, kinds) and not isinstance(value, bool)
    require(fits, name, value, rule, owner=owner, kind=ArgumentTypeError)
    number = int(value) if isinstance(value, (int, np.integer)) else float(value)
    require(is_allowed(number), name, value, rule, owner=owner)
    return number


def import_package(name: str, *, owner: str, install: str, kind: type[JaxlitError] = LoggerError) -> Any:
    """Return a module of an optional dependency; if it is missing, raise an error that says what pip installs."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        raise kind(f"{owner} needs {package}, which is not installed. Run `pip install {install}`.") from error


def cache_folder(name: str) -> Path:
    """Return a folder of jaxlit's in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlit" / name
