"""From a loader to the step: the `Prefetcher` draws, checks and places batches ahead of the step that takes them."""

import itertools
import queue
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, final

from jaxlit.background import Background
from jaxlit.control import Control, Interrupted
from jaxlit.core.derived_steps import Stack, stacked
from jaxlit.data.batch_validator import Agreement, BatchValidator, InStep
from jaxlit.data.source import Source, located
from jaxlit.data.watchdog import Watchdog
from jaxlit.distributed.team import team
from jaxlit.strategies.base import ReplicatedBatch

# A hand-over from a thread costs 30 to 50 us, so batches that come sooner than this are drawn without one.
_SLOW_S = 300e-6
_NOTED_S = 20e-6  # less is no wait
_TIMED = 8  # draws that are timed before choosing
_AHEAD = 2  # batches that the thread keeps ready under prefetch="auto"


@final
class Batch(NamedTuple):
    """What a dispatch takes: a batch of an epoch, ready for its step, or several."""

    arrays: Any  # what the step takes, on the devices; a `Stack` if there are several batches
    host: Any  # what hooks see: the batch of the loader, with its host keys; a sequence if there are several
    index: int  # the number of the first batch in the epoch, from 0
    is_last: bool  # whether the last batch is the last of the epoch
    position: Any  # the loader's state after the batch; a sequence if there are several
    count: int = 1


class Dispatches(Protocol):
    """How many batches the loop takes at once."""

    size: int
    """The most batches; a full dispatch begins at a multiple of `size`."""

    def fits(self) -> bool:
        """Return whether the next `size` batches may be one dispatch."""
        ...


class _Failed(NamedTuple):
    """What a loader raised in place of a batch; raised after the batches before it."""

    error: BaseException


class _End:
    """What comes after the last batch: the loader, or its limit, is at its end."""


_OVER = _End()


class Prefetcher:
    """Draws, checks and places the batches of a run's steps.

    Batch k + 1 is placed after step k was dispatched, so that the device computes meanwhile. A thread draws only
    from loaders whose first batches were slow, or if `prefetch` asks for it.

    `place` puts a batch on the devices, None if a step takes host arrays. `prefetch` is the number of batches that a
    thread draws ahead, 0 for no thread, "auto" to decide by the first draws. `splits` is that of `Agreement`.
    """

    def __init__(
        self,
        place: Callable[[Any], Any] | None,
        *,
        validator_of: Callable[[Source], BatchValidator] = lambda source: BatchValidator(source.argument),
        splits: Callable[[Any], bool],
        prefetch: int | str,
        watchdog: Watchdog,
        epoch: Callable[[], int] = lambda: 0,
    ) -> None:
        self._place, self._validator_of, self._splits = place, validator_of, splits
        self._is_auto = prefetch == "auto"
        self._depth = _AHEAD if isinstance(prefetch, str) else prefetch
        self._epoch = epoch
        self._control = watchdog.control
        self._watchdog = watchdog if watchdog.has_limit else None
        self.token: Any = None  # a result of the newest step; draws cost no time until it is ready
        # the shapes and dtypes of the newest batch as the step takes it: the global batch in several processes
        self.example: Any = None
        self.drawn = 0  # batches that were asked for
        self.now, self.seconds = 0.0, 0.0  # of the newest draw, by `time.perf_counter()`, and of all draws
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        # Weak: a loader that is opened again is another source, and the old one must not stay alive.
        self._agreements: weakref.WeakKeyDictionary[Source, Agreement] = weakref.WeakKeyDictionary()

    def batches(self, source: Source, epoch: int, limit: int | None, start: int = 0) -> Iterator[Batch]:
        """Return an iterator over the batches of one epoch, from batch `start`.

        One batch is drawn ahead, so that the last is known even if the loader has no length. An error of the loader is
        raised after the batches before it, with a note of its place.
        """
        batches = self._batches(source, epoch, limit, start)
        self._open.add(batches)
        return batches

    def dispatches(
        self, source: Source, epoch: int, limit: int | None, start: int, steps: Dispatches
    ) -> Iterator[Batch]:
        """Return an iterator like `batches`, which yields several batches where one dispatch may take them."""
        validator = self._validator_of(source)
        # A thread that was asked for draws batches one by one: which are wanted next is known when they are due.
        has_thread = not self._is_auto and self._depth > 0
        gather = source.gatherer(epoch) if team().size == 1 and validator.is_plain and not has_thread else None
        if gather is not None and (total := source.length):
            batches = self._gathered(source, gather, start, total if limit is None else min(total, limit), steps)
        else:
            batches = self._grouped(self._batches(source, epoch, limit, start, placing=False), validator, steps)
        self._open.add(batches)
        return batches

    def close(self) -> None:
        """Stop the threads and loaders of iterators that did not come to their end."""
        for batches in list(self._open):
            batches.close()

    def _batches(
        self, source: Source, epoch: int, limit: int | None, start: int, *, placing: bool = True
    ) -> Iterator[Batch]:
        validator, source.waited = self._validator_of(source), 0.0
        agreement = self._agreement(source, validator) if team().size > 1 else None
        control, watchdog, place = self._control, self._watchdog, self._place if placing else None
        draws, thread, drawn = source.epoch(epoch), None, ()
        limited = itertools.islice(draws, None if limit is None else max(limit - start, 0))
        stream: Iterator[Any] = limited if agreement is None else agreement.in_step(limited)
        is_timing, is_slow = len(source.times) < _TIMED, self._is_slow(source)
        alike = source.alike if agreement is None and validator.is_plain else 0
        host = batch = placed = at = None  # of the batch before the draw, which shows whether that batch is the last
        try:
            # This runs in each step, so it makes no call that can be spared.
            for k in itertools.count(start):
                if is_slow and thread is None and type(drawn) is tuple:
                    stream, thread = self._in_thread(stream)
                begun, self.drawn = time.perf_counter(), self.drawn + 1
                try:
                    try:
                        if watchdog is not None:
                            watchdog.watch(source.argument, self._epoch(), k)
                        control.drawing = True
                        drawn = next(stream, _OVER)
                    finally:  # inside the outer try: a signal that comes here is caught as well
                        control.drawing = False
                        if watchdog is not None:
                            watchdog.rest()
                except (Interrupted, Exception) as error:
                    if control.interrupted or isinstance(error, Interrupted):
                        return
                    drawn = _Failed(error)
                self.now = time.perf_counter()
                self.seconds += (took := self.now - begun)
                if took > _NOTED_S and (self.token is None or self.token.is_ready()):
                    source.waited += took
                if is_timing:
                    is_timing, is_slow = self._time(source, took)
                if k > start:
                    if agreement is not None:
                        self.example, batch = agreement(batch, at, last=drawn is _OVER)
                        placed = batch if place is None else place(batch)
                    yield tuple.__new__(Batch, (placed, host, k - 1, drawn is _OVER, at, 1))  # no call of Python
                if type(drawn) is not tuple:
                    if isinstance(drawn, _Failed):
                        raise located(drawn.error, source.argument, self._epoch(), k)
                    return
                host = batch = drawn[0]
                at = drawn[1]
                if k == start or k >= alike or not validator.kind.as_is:
                    try:
                        host, batch = validator(host)
                    except Exception as error:
                        located(error, validator.blamed, self._epoch(), k)
                        raise
                if agreement is None:
                    self.example, placed = validator.kind.example, batch if place is None else place(batch)
        finally:
            if thread is None or thread.close(10.0 if source.continues else 1.0):
                draws.close()

    def _agreement(self, source: Source, validator: BatchValidator) -> Agreement:
        """Return the processes' agreement on a source's batches, which is built in its first epoch."""
        if source not in self._agreements:
            self._agreements[source] = Agreement(source.loader, source.argument, validator.prepares, self._splits)
        return self._agreements[source]

    def _in_thread(self, stream: Iterator[Any]) -> tuple[Iterator[Any], "_Thread"]:
        """Return a stream that is drawn in a thread, and the thread; processes agree outside of it."""
        if isinstance(stream, InStep):
            thread = stream.stream = _Thread(stream.stream, self._depth, self._control)
            return stream, thread
        thread = _Thread(stream, self._depth, self._control)
        return thread, thread

    def _is_slow(self, source: Source) -> bool:
        """Return whether a thread shall draw from a source."""
        if not self._is_auto:
            return self._depth > 0
        return len(source.times) == _TIMED and statistics.median(source.times) > _SLOW_S

    def _time(self, source: Source, seconds: float) -> tuple[bool, bool]:
        """Note how long a draw took; return whether the next is timed as well, and whether a thread shall draw."""
        source.times.append(seconds)
        return len(source.times) < _TIMED, self._is_slow(source)

    def _placed(self, batch: Any) -> Any:
        return batch if self._place is None else self._place(batch)

    def _grouped(self, draws: Iterator[Batch], validator: BatchValidator, steps: Dispatches) -> Iterator[Batch]:
        """Stack batches of one kind, as many as a dispatch takes."""
        group = list[Batch]()
        kind = validator.kind
        may_stack = False
        try:
            for batch in draws:
                if may_stack and validator.kind is not kind:  # a dispatch may begin with this batch
                    batches, group = group, []
                    yield from self._one_by_one(batches)
                if not group:
                    kind = validator.kind
                    may_stack = steps.fits() and type(batch.arrays) is not ReplicatedBatch
                group.append(batch)
                if may_stack and len(group) < steps.size and not batch.is_last:
                    continue
                batches, group = group, []  # before they are placed: an error there must not yield them again
                if may_stack and len(batches) == steps.size:
                    arrays, hosts, indices, _, positions, _ = zip(*batches, strict=True)
                    placed = self._placed(stacked(arrays))
                    yield Batch(placed, hosts, indices[0], batch.is_last, positions, len(batches))
                else:
                    yield from self._one_by_one(batches)
        except Exception:  # of the loader: the batches before it are yielded first
            yield from self._one_by_one(group)
            raise
        finally:
            draws.close()  # type: ignore[attr-defined]

    def _one_by_one(self, group: list[Batch]) -> Iterator[Batch]:
        return (batch._replace(arrays=self._placed(batch.arrays)) for batch in group)

    def _gathered(
        self, source: Source, gather: Callable[[int, int], Any], start: int, total: int, steps: Dispatches
    ) -> Iterator[Batch]:
        """Take the batches of a dispatch from arrays at once."""
        validator, watchdog = self._validator_of(source), self._watchdog
        source.waited = 0.0
        index = start
        if start < total:  # all batches are of one kind
            validator(gather(start, 1))
            self.example = validator.kind.example
        while index < total:
            self.drawn += 1
            self.now = time.perf_counter()
            size = steps.size if steps.size <= total - index and steps.fits() else 1
            try:  # an array may be on a disk that hangs
                if watchdog is not None:
                    watchdog.watch(source.argument, self._epoch(), index)
                batch = gather(index, size)
            finally:
                if watchdog is not None:
                    watchdog.rest()
            self.seconds += time.perf_counter() - self.now
            if type(batch) is Stack:
                first = index
                index += size
                positions = range(first + 1, index + 1)
                yield Batch(self._placed(validator.narrow(batch)), batch, first, index == total, positions, size)
                continue
            try:
                host, batch = validator(batch)
            except Exception as error:
                located(error, validator.blamed, self._epoch(), index)
                raise
            self.example = validator.kind.example
            index += 1
            yield Batch(self._placed(batch), host, index - 1, index == total, index)


class _Thread(Background[None]):
    """Draws from an iterator in a thread, at most `depth` items ahead; nothing else may draw from the iterator."""

    def __init__(self, stream: Iterator[Any], depth: int, control: Control) -> None:
        self._stream, self._control = stream, control
        # Both queues are C code and hand over without Python.
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._tokens.put(None)
        super().__init__("jaxlit-prefetch", self._fill)
        self.start()

    def __iter__(self) -> "_Thread":
        return self

    def __next__(self) -> Any:
        while True:
            try:
                item = self._out.get(timeout=0.2)
            except queue.Empty:
                if self._control.interrupted:
                    raise Interrupted from None
                continue
            self._tokens.put(None)
            if item is _OVER:
                self._out.put(item)  # for the next call
                raise StopIteration
            if isinstance(item, _Failed):
                raise item.error
            return item

    def close(self, patience: float) -> bool:
        """Stop the thread; return whether it has ended within `patience` seconds and the iterator is free."""
        self.stop()
        self._tokens.put(None)
        # A thread that hangs in the loader ends with the process.
        return self.join(0.5 if self._control.interrupted else patience)

    def _fill(self) -> None:
        item = None
        while not isinstance(item, (_End, _Failed)):
            self._tokens.get()
            if self.stopping.is_set():
                return
            try:
                item = next(self._stream, _OVER)
            except BaseException as error:
                item = _Failed(error)
            self._out.put(item)
