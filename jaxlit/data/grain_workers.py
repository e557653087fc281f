"""Worker processes of grain that stay from epoch to epoch, and end with the process that began them.

grain starts the processes of `mp_prefetch` for each iteration of a dataset, which takes seconds, and joins them by an
`InterleaveIterDataset`, whose state is wrong once it was set back after its end (grain 0.2.18): `Workers` takes its
place. What a process iterates is an `InWorker`, which goes on with the next epoch where one ends.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grain

from jaxlit.compat import iterator_options


class Workers(grain.IterDataset):
    """The elements of several datasets in turn, each of which is iterated in a process of its own.

    Args:
        datasets: Of class `ProcessPrefetchIterDataset`.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        super().__init__(datasets)

    def __iter__(self) -> Any:
        """Return an iterator, whose processes start with its first element."""
        return _InTurn(list(map(iter, self.parents)))


class _InTurn(grain.DatasetIterator):
    """The iterator of `Workers`; `set_state` reaches processes that run."""

    def __init__(self, workers: list[Any]) -> None:
        super().__init__(workers)
        self._workers, self._next, self._ended = workers, 0, [0] * len(workers)

    def __next__(self) -> Any:
        self.start_prefetch()
        for _ in self._workers:
            k, self._next = self._next, (self._next + 1) % len(self._workers)
            if not self._ended[k]:
                element = next(self._workers[k], _END)
                if not isinstance(element, _End):
                    return element
                self._ended[k] = 1
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        """Return the state, by the keys of an `InterleaveIterDataset`."""
        states = [worker.get_state() for worker in self._workers]
        return {"next_index_in_cycle": self._next, "iterators_in_use_states": states, "exhausted": [*self._ended]}

    def set_state(self, state: dict[str, Any]) -> None:
        were_ended, self._ended = self._ended, [*state["exhausted"]]
        self._next = state["next_index_in_cycle"]
        for k, at in enumerate(state["iterators_in_use_states"]):
            is_there = were_ended[k] and self._workers[k].get_state() == at  # with elements drawn ahead
            if not (self._ended[k] or is_there):
                self._workers[k].set_state(at)


class InWorker(grain.IterDataset):
    """What a worker process iterates: epoch by epoch, with an end between them that `Workers` knows.

    Args:
        dataset: The dataset.
        epoch: The first epoch; None for a dataset of one order, whose elements and states stay as they are.
        ordered: Returns a copy of the dataset in the order of an epoch.
        step: What is added for the next epoch; 0 where all have one order.
    """

    def __init__(self, dataset: Any, epoch: int | None, ordered: Callable[[Any, int], Any], step: int) -> None:
        super().__init__(dataset)
        self._epoch, self._ordered, self._step = epoch, ordered, step

    def __iter__(self) -> Any:
        """Return an iterator; in a worker process, end with the one that began it, and not before."""
        if (parent := multiprocessing.parent_process()) is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all: the parent ends this one
            threading.Thread(target=_end_after, args=(parent,), name="jaxlit-parent", daemon=True).start()
        ordered = partial(self._ordered, self.parents[0])
        return iter(self.parents[0]) if self._epoch is None else _Epochs(ordered, self._epoch, self._step)


class _Epochs(grain.DatasetIterator):
    """The iterator of `InWorker`. A state is an epoch and the state in it, which is None at its beginning."""

    def __init__(self, ordered: Callable[[int], Any], epoch: int, step: int) -> None:
        super().__init__()
        self._ordered, self._epoch, self._step = ordered, epoch, step
        self._draws: Any = None

    def _begun(self) -> Any:
        # The options that were set after `mp_prefetch` come with the process.
        dataset = grain.experimental.WithOptionsIterDataset(self._ordered(self._epoch), iterator_options(self))
        return iter(dataset)

    def __next__(self) -> Any:
        if self._draws is None:
            self._draws = self._begun()
        try:
            return next(self._draws)
        except StopIteration:
            self._epoch, self._draws = self._epoch + self._step, None
            return _END

    def get_state(self) -> dict[str, Any]:
        return {"of_epoch": self._epoch, "state": None if self._draws is None else self._draws.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a state; one without an epoch is grain's own."""
        self._epoch, at = (state["of_epoch"], state["state"]) if "of_epoch" in state else (self._epoch, state)
        self._draws = None if at is None else self._begun()
        if at is not None:
            self._draws.set_state(at)


class _End:
    """Comes in place of an element where an epoch ends."""


_END = _End()


def alive() -> set[int]:
    """Return the worker processes of grain that this process has now."""
    return {x.pid or 0 for x in multiprocessing.active_children() if x.name.startswith("grain-process-prefetch")}


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)
