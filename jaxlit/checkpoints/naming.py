"""The part of a checkpoint's name after its step: `{epoch}-{val/loss:.3f}` with the values in it."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxlit.errors import ArgumentError

_FIELD = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")


def check_filename(filename: str | None) -> None:
    """Refuse what is no format of names.

    Raises:
        ArgumentError: A brace is left over, or a value cannot be written so.
    """
    for name, form in _FIELD.findall(filename or ""):
        try:
            format(1 if name in ("epoch", "step") else 1.0, form[1:])
        except ValueError as error:
            raise ArgumentError(
                f"ModelCheckpoint(filename={filename!r}): {name}{form} is no format: {error}."
            ) from None
    if set("{}") & set(_FIELD.sub("", filename or "")):
        raise ArgumentError(
            f"ModelCheckpoint(filename={filename!r}) has a brace without its other, or an empty pair. Write "
            "for example '{epoch}-{val/loss:.2f}'."
        )


def filled(filename: str, counts: Mapping[str, int], metric: Callable[[str], Any]) -> str:
    """Return a filename with the values that it names, fit for a folder's name.

    Args:
        filename: The format.
        counts: "epoch" and "step".
        metric: Returns the value of a metric.
    """

    def fill(field: re.Match[str]) -> str:
        name, form = field[1], (field[2] or ":")[1:]
        return f"{name}={format(counts[name] if name in counts else metric(name), form)}"

    return re.sub(r"[^\w=.,+-]", "_", _FIELD.sub(fill, filename))
