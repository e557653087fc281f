"""Processes of one training as threads of this one: what they tell each other, without a start or a device."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxlit.data import batch_validator as agreement
from jaxlit.distributed import team as team_file
from jaxlit.distributed.fate import Fate
from jaxlit.errors import PeerError


class Store:
    """jax's key-value store of several processes."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed, self.is_broken = threading.Condition(), False

    def key_value_set(self, key: str, value: str) -> None:
        with self.changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.changed.notify_all()

    def key_value_increment(self, key: str, by: int) -> int:
        with self.changed:
            self.values[key] = str(int(self.values.get(key, "0")) + by)
            return int(self.values[key])

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        with self.changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(f"{folder.rstrip('/')}/")]

    def key_value_delete(self, folder: str) -> None:
        with self.changed:
            for key in [key for key in self.values if key.startswith(f"{folder}/")]:
                del self.values[key]

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        with self.changed:
            self.changed.wait_for(lambda: key in self.values or self.is_broken, timeout_ms / 1000)
            if key not in self.values:
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def end(self) -> None:
        """Let nobody wait for a process that has failed."""
        with self.changed:
            self.is_broken = True
            self.changed.notify_all()


class Watched(Fate):
    """What tells a process that another one has failed."""

    def check(self) -> None:
        if self.client.is_broken:
            raise PeerError("another process has failed")


def as_processes(monkeypatch: pytest.MonkeyPatch, work: Callable[[int], Any], count: int = 2) -> list[Any]:
    """Run `work(index)` as so many processes that talk to each other; return what each returned, or its error."""
    store, mine, result = Store(), threading.local(), [None] * count

    class Agreements:
        def __next__(self) -> int:
            return next(mine.agreements)

    def join_rows(x: np.ndarray, rows: Any) -> np.ndarray:
        return np.concatenate([np.asarray(part, x.dtype) for part in team_file.team().agree("rows", x.tolist())])

    def run(index: int) -> None:
        mine.index, mine.agreements = index, itertools.count()
        try:
            result[index] = work(index)
        except Exception as error:
            result[index] = error  # type: ignore[call-overload]
            store.end()

    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: count)
        patch.setattr(jax, "process_index", lambda: mine.index)
        patch.setattr(team_file, "_client", lambda: store)
        patch.setattr(team_file, "_agreements", Agreements())
        patch.setattr(team_file, "fate", lambda: Watched(store, mine.index, count, ""))
        patch.setattr(agreement, "join_rows", join_rows)
        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return result
