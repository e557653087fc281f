"""Calls that a traced step makes once, while it is traced, and no compiled step repeats: chance, clocks and prints."""

import builtins
import contextlib
import datetime
import functools
import logging
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxlit.core.reached import Named, is_of_library

_logger = logging.getLogger("jaxlit")

_REMEDIES = {
    "draws from": "What it drew is in every step since: draw from an nnx.Rngs that the module holds, "
    "self.rngs.normal(shape) say, or pass it in the batch.",
    "reads": "That one time is in every step since: read clocks in the hooks of a callback, or look at "
    "print(trainer.explain()).",
    "shows a traced array by": "It has no value yet: jax.debug.print('loss {}', loss) shows one in every step.",
}
_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
_DATES = (datetime, datetime.datetime, datetime.date)  # whose methods cannot be replaced: they are known by their names
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_KINDS = (type, type(datetime))
_TRACER_AS_TEXT = re.compile(r"Tracer[(<]|Traced<")


class _Wrappers:
    """What stands in the place of functions while any thread traces a step; others' calls pass through it."""

    def __init__(self) -> None:
        self._lock, self._tracing = threading.Lock(), 0
        self._placed: list[tuple[Any, str, Any, Any]] = []  # module, name, the original, what is in its place

    def place(self) -> dict[int, Any]:
        """Put them there, unless another thread has; returns them by what they are of."""
        with self._lock:
            self._tracing += 1
            if self._tracing == 1:
                self._placed = [
                    (module, name, function, _noting(function, what, shown))
                    for module, name, function, what, shown in _watched()
                ]
                handle = logging.Logger.handle
                self._placed.append((logging.Logger, "handle", handle, _noting_records(handle)))
                for module, name, _, wrapper in self._placed:
                    setattr(module, name, wrapper)
            return {id(function): wrapper for _, _, function, wrapper in self._placed}

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
def telling_of_untraced_calls(step: str, told: set[tuple[str, str]], around: Sequence[Named]) -> Iterator[None]:
    """Warn of what a step that is traced inside the block calls, and no compiled step will.

    Args:
        step: The step, for the message.
        told: What was told of so far, which is not told again.
        around: What it reaches by names: functions that were imported by themselves, and generators.
    """
    outer, found = getattr(_thread, "found", None), dict[str, str]()
    _thread.found = found
    wrappers = _wrappers.place()
    imported = [(x, wrappers[id(x.value)]) for x in around if id(x.value) in wrappers]
    generators = [(x, _state(x.value)) for x in around if isinstance(x.value, _GENERATORS)]
    for x, wrapper in imported:
        x.space[x.name] = wrapper
    try:
        yield
    finally:
        for x, wrapper in imported:
            if x.space.get(x.name) is wrapper:
                x.space[x.name] = x.value
        _wrappers.remove()
        _thread.found = outer
    for x, before in generators:
        if _state(x.value) != before:
            found.setdefault("draws from", f"{x.name}, a generator of numpy's or Python's")
    if any(x.value in _DATES and x.beside & {"now", "today", "utcnow"} for x in around if isinstance(x.value, _KINDS)):
        found.setdefault("reads", "datetime.now")
    for what, name in found.items():
        if (step, what) not in told:
            told.add((step, what))
            _logger.warning("%s %s %s, once, while it is traced. %s", step, what, name, _REMEDIES[what])


def has_told_of_chance(step: str, told: set[tuple[str, str]]) -> bool:
    """Tell whether it is known why a step is another each time that it is traced."""
    return (step, "draws from") in told or (step, "reads") in told


def _state(generator: Any) -> str:
    """Return the state of a generator as a text, which can be compared."""
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    return repr(generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state())


def _watched() -> Iterator[tuple[Any, str, Any, str, str]]:
    """Yield each function: its module, its name, itself, what a call of it is, and how a user writes it."""
    for module, source, shown, more in (
        (np.random, np.random.mtrand._rand, "np.random", ("default_rng", "ranf", "sample", "seed")),
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
            # Who calls a clock in a library does it for a purpose of its own; a generator with a seed is meant.
            seeded = shown.endswith("default_rng") and any(x is not None for x in (*args, *kwargs.values()))
            harmless = seeded or (shown == "print" and not _shows_tracer(args))
            if not harmless and not is_of_library(sys._getframe(1).f_globals.get("__name__")):
                found[what] = shown
        return original(*args, **kwargs)

    return noting


def _noting_records(handle: Callable[..., Any]) -> Callable[..., Any]:
    """Return `logging.Logger.handle` that notes a record of the user's with a traced array in it."""

    @functools.wraps(handle)
    def noting(self: logging.Logger, record: logging.LogRecord) -> Any:
        found = getattr(_thread, "found", None)
        if found is not None and not is_of_library(record.name) and _shows_tracer((record.msg, record.args)):
            found.setdefault("shows a traced array by", "logging")
        return handle(self, record)

    return noting


def _shows_tracer(args: tuple[Any, ...]) -> bool:
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
        return True
    return any(isinstance(x, str) and _TRACER_AS_TEXT.search(x) for x in args)
