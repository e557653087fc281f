"""Calls that a traced step makes once, while it is traced, and no compiled step repeats: chance, clocks and prints."""

import builtins
import contextlib
import functools
import logging
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

_logger = logging.getLogger("jaxlit")

_REMEDIES = {
    "draws from": "What it drew is in every step since: draw from an nnx.Rngs that the module holds, "
    "self.rngs.normal(shape) say, or pass it in the batch.",
    "reads": "That one time is in every step since: read clocks in the hooks of a callback, or look at "
    "print(trainer.explain()).",
    "shows a traced array by": "It has no value yet: jax.debug.print('loss {}', loss) shows one in every step.",
}
_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
# Who calls a clock there does it for a purpose of its own.
_LIBRARIES = {*sys.stdlib_module_names, "chex", "einops", "flax", "jax", "jaxlib", "jaxlit", "numpy", "optax"}
_TRACER_AS_TEXT = re.compile(r"Tracer[(<]|Traced<")


class _Wrappers:
    """What stands in the place of functions while any thread traces a step; others' calls pass through it."""

    def __init__(self) -> None:
        self._lock, self._tracing = threading.Lock(), 0
        self._placed: list[tuple[Any, str, Any, Any]] = []  # module, name, the original, what is in its place

    def place(self) -> None:
        """Put them there, unless another thread has."""
        with self._lock:
            self._tracing += 1
            if self._tracing == 1:
                self._placed = [
                    (module, name, function, _noting(function, what, shown))
                    for module, name, function, what, shown in _watched()
                ]
                for module, name, _, wrapper in self._placed:
                    setattr(module, name, wrapper)

    def remove(self) -> None:
        """Put the originals back, unless another thread still traces."""
        with self._lock:
            self._tracing -= 1
            if self._tracing == 0:
                for module, name, original, wrapper in self._placed:
                    if getattr(module, name) is wrapper:  # else somebody has put another one there
                        setattr(module, name, original)


_wrappers = _Wrappers()
_thread = threading.local()  # .found: what the step that this thread traces has called, by what that is


@contextlib.contextmanager
def telling_of_untraced_calls(step: str, told: set[tuple[str, str]]) -> Iterator[None]:
    """Warn of what a step that is traced inside the block calls, and no compiled step will.

    Args:
        step: The step, for the message.
        told: What was told of so far, which is not told again.
    """
    outer, found = getattr(_thread, "found", None), dict[str, str]()
    _thread.found = found
    _wrappers.place()
    try:
        yield
    finally:
        _wrappers.remove()
        _thread.found = outer
    for what, name in found.items():
        if (step, what) not in told:
            told.add((step, what))
            _logger.warning("%s %s %s, once, while it is traced. %s", step, what, name, _REMEDIES[what])


def has_told_of_chance(step: str, told: set[tuple[str, str]]) -> bool:
    """Tell whether it is known why a step is another each time that it is traced."""
    return (step, "draws from") in told or (step, "reads") in told


def _watched() -> Iterator[tuple[Any, str, Any, str, str]]:
    """Yield each function: its module, its name, itself, what a call of it is, and how a user writes it."""
    for module, source, shown, more in (
        (np.random, np.random.mtrand._rand, "np.random", ("sample", "ranf", "seed")),
        (random, random._inst, "random", ()),  # type: ignore[attr-defined]
    ):
        for name in module.__all__:
            function = getattr(module, name)
            if getattr(function, "__self__", None) is source or name in more:
                yield module, name, function, "draws from", f"{shown}.{name}"
    for name in _CLOCKS:
        yield time, name, getattr(time, name), "reads", f"time.{name}"
    yield builtins, "print", print, "shows a traced array by", "print"


def _noting(original: Callable[..., Any], what: str, shown: str) -> Callable[..., Any]:
    """Return a function that notes a call which the user's code makes in this thread's step."""

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        found = getattr(_thread, "found", None)
        if found is not None and what not in found:
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if caller not in _LIBRARIES and (shown != "print" or _shows_tracer(args)):
                found[what] = shown
        return original(*args, **kwargs)

    return noting


def _shows_tracer(args: tuple[Any, ...]) -> bool:
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
        return True
    return any(isinstance(x, str) and _TRACER_AS_TEXT.search(x) for x in args)
