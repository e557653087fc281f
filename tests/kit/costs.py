"""What a training costs: Python calls of a step, and values that are read from devices."""

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import jaxlit as jl
from jaxlit.data import prefetcher
from jaxlit.loop import dispatch
from kit.batches import numbered


@contextlib.contextmanager
def reads() -> Iterator[list[str]]:
    """Record every read of an array's value; complete on arrays of two devices or more."""
    cls, seen, saved = type(jnp.zeros(())), [], {}
    value = saved["_value"] = cls.__dict__["_value"]
    cls._value = property(lambda self: (seen.append("_value"), value.fget(self))[1])
    for name in ("__array__", "__dlpack__", "__buffer__"):
        if name in cls.__dict__:
            old = saved[name] = cls.__dict__[name]
            setattr(cls, name, lambda self, *a, _old=old, _n=name, **k: (seen.append(_n), _old(self, *a, **k))[1])
    try:
        yield seen
    finally:
        for name, old in saved.items():
            setattr(cls, name, old)


class Profiled:
    """A loader that reads the number of Python calls at two of its batches."""

    def __init__(self, first: int, last: int, beside: str) -> None:
        self.calls, self._beside = 0, beside
        self._first, self._last, self._noted = first, last, {}

    def count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call" and not frame.f_code.co_filename.startswith(self._beside)

    def __iter__(self) -> Iterator[Any]:
        for k, batch in enumerate(numbered(self._last + 1)):
            self._noted[k] = self.calls
            yield batch

    @property
    def per_step(self) -> float:
        return (self._noted[self._last] - self._noted[self._first]) / (self._last - self._first)


def calls_per_step(trainer: jl.Trainer, model: Any) -> float:
    """Count the Python calls of the steps 20 to 60 of a fit, also those of helper threads.

    Without the one that notes how long a slow draw took, and with as many steps at once as an idle machine takes: on a
    busy one anything may be slow. On several devices without jax's own: to split one array over them jax alone makes
    more than a hundred.
    """
    loader = Profiled(20, 60, "no file" if trainer.strategy.mesh.size == 1 else str(Path(jax.__file__).parent))
    before = sys.getprofile()
    gc.collect()
    gc.disable()  # jax has a hook in the collector
    threading.setprofile(loader.count)
    sys.setprofile(loader.count)
    try:
        with mock.patch.object(prefetcher, "_NOTED_S", float("inf")), mock.patch.object(dispatch, "_AHEAD_S", 1e9):
            trainer.fit(model, loader)
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
        gc.enable()
    assert trainer.global_step == 61
    return loader.per_step


def report_memory(monkeypatch: pytest.MonkeyPatch, limit: int, in_use: Callable[[], int]) -> None:
    """Let devices report their memory, as GPUs do."""
    stats = lambda: {"bytes_limit": limit, "bytes_in_use": in_use()}  # noqa: E731
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=stats)])
