"""Attributes of the Trainer that its session keeps."""

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from jaxlit.core.reads import READS
from jaxlit.errors import did_you_mean
from jaxlit.loop.settings import Settings
from jaxlit.porting import advice
from jaxlit.shown import shown

_ARGUMENTS = {field.name for field in dataclasses.fields(Settings)}


class Attribute:
    """An attribute of the Trainer that is read from its session.

    Args:
        doc: What `help(Trainer)` says of it.
        part: The part of the session whose attribute of the same name it is; "" for the session itself.
        read: What reads it from the session instead.
    """

    def __init__(self, doc: str | None, part: str = "", read: Callable[[Any], Any] | None = None) -> None:
        self.__doc__, self._part, self._reader = doc, part, read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._read = name, self._reader or attrgetter(f"{self._part}.{name}".lstrip("."))

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        value = self._read(trainer._session)
        if (reads := READS.get()) is not None:  # a step is being traced, and this is compiled into it
            reads.note(trainer, self._name, value)
        return value

    def __set__(self, trainer: Any, value: Any) -> None:
        part = "callbacks" if self._name == "callbacks" else self._part
        if part not in ("settings", "control", "callbacks"):
            refuse(self._name, value)
        trainer._session.set(part, self._name, value)


def refuse(name: str, value: Any) -> None:
    """Refuse to set an attribute of the Trainer.

    Raises:
        AttributeError: Saying what it is, and what to do.
    """
    if name in _ARGUMENTS:
        raise AttributeError(
            f"Trainer.{name} is fixed when a Trainer is made, and would be set to {shown(value)}. Make another one "
            f"with Trainer({name}=...)."
        )
    raise AttributeError(
        f"Trainer.{name} tells of the runs, and would be set to {shown(value)}. Set an argument of the Trainer "
        "instead, or call what changes it: fit, validate, test, predict, stop."
    )


def check_known(trainer: type, name: str, value: Any) -> None:
    """Refuse a misspelt attribute of the Trainer, which nobody would ever read; a name of one's own may be set.

    Raises:
        AttributeError: Naming those that are like it.
    """
    if name.startswith("_") or hasattr(trainer, name):
        return
    if name in _ARGUMENTS:
        refuse(name, value)
    if text := advice("Trainer").get(name):
        raise AttributeError(f"Trainer has no attribute {name!r}, which would be set to {shown(value)}. {text}")
    if hint := did_you_mean(name, [x for x in dir(trainer) if not x.startswith("_")]):
        raise AttributeError(
            f"Trainer has no attribute {name!r}, which would be set to {shown(value)}.{hint} Keep what is your own in "
            "a callback, in the module, or under another name."
        )


# The annotation beside an attribute says the type of its value: hence Any.


def argument(doc: str, read: Callable[[Any], Any] | None = None) -> Any:
    """Return an argument of the Trainer as its runs take it; one that is set holds from then on."""
    return Attribute(doc, "settings", read)


def control(doc: str) -> Any:
    """Return what a run is told, and tells, while it goes."""
    return Attribute(doc, "control")


def of_session(doc: str, part: str = "") -> Any:
    """Return what the session keeps, or a part of it."""
    return Attribute(doc, part)


def fact(read: Callable[[Any], Any]) -> Any:
    """Return a fact of the session, which a function reads."""
    return Attribute(read.__doc__, read=read)
