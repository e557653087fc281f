"""Python values as JSON's types."""

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np


class NotJSONError(TypeError):
    """JSON has no such value.

    Args:
        path: Where the value is in the one that was converted: "['callbacks'][0]".
        problem: Its type or its key, as the rest of a sentence.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or 'the value'} {problem}")
        self.path, self.problem = path, problem


def to_json(x: Any, *, lenient: bool = False, path: str = "") -> Any:
    """Return a value as dicts, lists, bools, ints, floats, strs and None: numpy scalars as numbers, tuples as lists.

    Args:
        x: The value.
        lenient: Convert everything, for people and other programs to read: an array to a list, a number that is not
            finite to "NaN", "Infinity" or "-Infinity", keys and objects to their `str`.
        path: Where the value is in a larger one, for the error.

    Raises:
        NotJSONError: A part of it is no such value; never if `lenient`.
    """
    if isinstance(x, Mapping):
        if not lenient and (wrong := [key for key in x if not isinstance(key, str)]):
            raise NotJSONError(path, f"has the key {wrong[0]!r}")
        return {str(key): to_json(item, lenient=lenient, path=f"{path}[{key!r}]") for key, item in x.items()}
    if isinstance(x, (list, tuple)):
        return [to_json(item, lenient=lenient, path=f"{path}[{i}]") for i, item in enumerate(x)]
    if isinstance(x, (np.generic, IntEnum)):
        x = int(x) if isinstance(x, IntEnum) else x.item()
    if lenient and isinstance(x, float) and not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if lenient:  # `tolist` is numpy's and jax's
        return to_json(np.asarray(x).tolist(), lenient=True) if hasattr(x, "tolist") else str(x)
    raise NotJSONError(path, f"is of type {type(x).__name__}")
