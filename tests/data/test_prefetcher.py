"""How batches come from a loader to the step: threads, the order of placing, errors, and what waiting costs."""

import itertools
import threading
import time
from types import SimpleNamespace

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit.batches import Stream, counted, numbered, rows_of
from kit.by_hand import mean
from kit.compiles import compiles
from kit.inside import Clock
from kit.journal import Batches, hooks, raising
from kit.modules import Mean, module
from kit.refusals import refuses
from kit.trainers import BARE, fit, make_trainer
from kit.waiting import held, interrupts

import jaxlit as jl
from jaxlit.data import prefetcher
from jaxlit.errors import DataError
from jaxlit.strategies.single import SingleDevice

PREFETCH = "jaxlit-prefetch"
TRAIN, VAL = "Trainer.fit(train_dataloaders=...)", "Trainer.fit(val_dataloaders=...)"
fails = raising(LookupError, "mine")


class Loader:
    """Gives batches 0, 1, ... or, by number, others `instead`, notes who draws, and lets time pass in draws."""

    def __init__(self, count, clock=None, seconds=0.0, instead=None):
        self.count, self.clock, self.seconds, self.instead = count, clock or Clock(), seconds, instead or {}
        self.drawn, self.closed, self.threads = 0, 0, []

    def __iter__(self):
        try:
            for k in range(self.count):
                self.threads.append(threading.current_thread().name)
                self.drawn += 1
                self.clock.now += self.seconds.get(k, 0.0) if isinstance(self.seconds, dict) else self.seconds
                if self.instead.get(k) is OSError:
                    raise OSError("disk")
                yield self.instead.get(k, {"x": np.full((2, 1), k, np.float32)})
        finally:
            self.closed += 1


@pytest.fixture
def clock(monkeypatch):
    """Draws take as long as their loader says, whatever else the machine does."""
    stopped = Clock()
    monkeypatch.setattr(prefetcher, "time", SimpleNamespace(perf_counter=stopped))
    return stopped


def draw(loader, *callbacks, **arguments):
    return fit(Mean(), loader, None, *callbacks, **(BARE | arguments))


def left(loader):
    return loader.closed, [thread for thread in threading.enumerate() if thread.name == PREFETCH]


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_a_thread_comes_to_draw_its_number_ahead_and_never_more(prefetch):
    # Batch k is used, k + 1 is in hand since it is known by then whether k is the last, and the thread holds
    # `prefetch` beyond it. The loader itself lets the test wait for a draw, and the next one would be noted.
    came, drawn = [threading.Event() for _ in range(40)], []

    def batches():
        for k in range(40):
            drawn.append(k)
            came[k].set()
            yield numbered(1, k, rows=2)[0]

    def look(trainer, module, batch, batch_idx):
        newest = min(batch_idx + 1 + prefetch, 39)
        assert came[newest].wait(60)
        assert len(drawn) <= newest + 1

    draw(batches(), hooks(on_train_batch_start=look), prefetch=prefetch)
    assert drawn == [*range(40)]


@pytest.mark.parametrize("prefetch", [0, "auto"])
def test_without_a_thread_one_batch_is_drawn_ahead(prefetch):
    loader, ahead = Loader(7), []  # fewer than "auto" looks at
    draw(loader, hooks(on_train_batch_start=lambda *_: ahead.append(loader.drawn)), prefetch=prefetch)
    assert ahead == [2, 3, 4, 5, 6, 7, 7]


MAIN = threading.main_thread().name


@pytest.mark.parametrize(
    ("prefetch", "count", "seconds", "who"),
    [
        (0, 20, 1.0, [MAIN] * 40),
        (0, 1, 0.0, [MAIN] * 2),
        ("auto", 9, 0.002, [MAIN] * 8 + [PREFETCH] * 10),
        (3, 1, 0.0, [MAIN, PREFETCH]),
        (1, 2, 0.0, [MAIN] + [PREFETCH] * 3),
        (2, 20, 0.0, [MAIN] + [PREFETCH] * 39),  # the first is looked at before anything is compiled
        ("auto", 12, 0.002, [MAIN] * 8 + [PREFETCH] * 16),  # at once in the second epoch
        ("auto", 40, 0.0, [MAIN] * 80),
        ("auto", 40, {3: 0.05}, [MAIN] * 80),  # one slow draw is not enough
    ],
)
def test_who_draws_each_batch_once_and_in_order(prefetch, count, seconds, who, clock):
    loader, seen = Loader(count, clock, seconds), Batches()
    draw(loader, seen, prefetch=prefetch, max_epochs=2)
    assert loader.threads == who
    assert [[int(batch["x"][0, 0]) for batch in epoch] for epoch in seen.train] == [[*range(count)]] * 2


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_run_that_ends_early_closes_its_loader(prefetch):
    for limits in ({"max_steps": 3, "max_epochs": -1}, {"limit_train_batches": 3}, {}):
        loader = Loader(30)
        draw(loader, prefetch=prefetch, **limits)
        assert left(loader) == (1, []), limits


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"])
def test_an_error_in_a_hook_closes_the_loader(hook, prefetch):
    loader = Loader(30)
    fail = hooks(**{hook: lambda trainer, *_: trainer.global_step < 3 or fails()})
    error = refuses(LookupError, lambda: draw(loader, fail, prefetch=prefetch), "mine")
    assert left(loader) == (1, [])
    (note,) = error.__notes__
    assert note.startswith(f"It was raised by Made.{hook} in epoch 0, batch "), "the loader has no part in it"


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_in_a_step_closes_every_loader(prefetch):
    step = lambda self, batch: fails() if batch["x"].shape[0] == 3 else jnp.mean(self.error(batch))  # noqa: E731
    loader = Loader(30, instead={3: {"x": np.ones((3, 1), np.float32)}})
    refuses(LookupError, lambda: fit(module(step), loader, prefetch=prefetch), "mine")
    assert left(loader) == (1, [])
    train, val = Loader(30), Loader(30)
    given = {"prefetch": prefetch, "val_check_interval": 2, "num_sanity_val_steps": 0}
    refuses(LookupError, lambda: fit(Mean(), train, val, hooks(on_validation_batch_end=fails), **given), "mine")
    assert left(train) == left(val) == (1, [])


@pytest.mark.parametrize("prefetch", [0, 3])
def test_grains_threads_end_with_a_run_that_stops_early(prefetch):
    before = {*threading.enumerate()}
    rows = grain.MapDataset.source([{"x": np.zeros(1, np.float32)} for _ in range(400)]).batch(2)
    begun = []
    begins = hooks(on_train_batch_end=lambda *_: begun.append({*threading.enumerate()} - before))
    draw(rows, begins, max_steps=3, max_epochs=-1, prefetch=prefetch)
    assert len(begun) == 3 and all(begun)
    for thread in {*threading.enumerate()} - before:
        thread.join(60)  # a pool's threads are told to end, and nobody waits for them
        assert not thread.is_alive(), thread.name


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize(
    ("given", "words"),
    [(OSError, "disk"), ({"other": np.ones(2)}, "structure of the batch changed"), ({"x": np.ones((0, 1))}, "0 rows")],
)
def test_a_loaders_error_comes_after_its_batches(given, words, prefetch):
    heard, made = [], Mean()
    watch = hooks(on_exception=lambda trainer, module, exception: heard.append(exception))
    loader = Stream(Loader(4), bad := Loader(9, instead={3: given}))
    call = lambda: fit(made, loader, None, watch, max_epochs=3, prefetch=prefetch)  # noqa: E731
    error = refuses((OSError, DataError), call, words)
    assert error.__notes__ == [f"It was raised by {TRAIN} in epoch 1, batch 3 (global_step 7)."] and heard == [error]
    assert float(made.w[0]) == pytest.approx(mean([[k] for k in (0, 1, 2, 3, 0, 1, 2)]), rel=1e-6)
    assert left(bad) == (1, [])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_of_loaders_name_the_loader_and_batch(prefetch):
    def notes(verb, *given):
        trainer = make_trainer(max_epochs=3, num_sanity_val_steps=0, prefetch=prefetch)
        error = refuses(OSError, lambda: getattr(trainer, verb)(Mean(), *given), "disk")
        return [note.removeprefix("It was raised by ") for note in error.__notes__]

    broken = lambda at: Loader(5, instead={at: OSError})  # noqa: E731
    with compiles() as compiled:
        assert notes("fit", broken(0)) == [f"{TRAIN} in epoch 0, batch 0 (global_step 0)."]
    assert not any("_step" in name for name in compiled)
    val = [numbered(2, rows=2), Stream(Loader(2), broken(2))]
    assert notes("fit", numbered(3, rows=2), val) == [f"{VAL}[1] in epoch 1, batch 2 (global_step 6)."]
    for verb, batch in (("validate", 0), ("test", 3), ("predict", 3)):
        told = f"Trainer.{verb}(dataloaders=...) in epoch 0, batch {batch} (global_step 0)."
        assert notes(verb, broken(batch)) == [told]


def test_ctrl_c_while_a_threaded_loader_hangs_ends_fit():
    def hangs():
        yield from numbered(3, rows=2)
        interrupt()
        over.wait(60)

    with held() as over, interrupts() as interrupt:
        assert draw(hangs(), prefetch=2).interrupted


EVENTS = []


@jl.register_strategy("noted_placing")
class NotedPlacing(SingleDevice):
    def shard_batch(self, batch):
        if "x" in batch:
            EVENTS.append(("place", *rows_of([batch])))
        return super().shard_batch(batch)

    def compile(self, program):
        run = super().compile(program)

        def call(*arguments):
            if program.name == "train_step":
                EVENTS.append(("step", *rows_of([arguments[-1]])))
            return run(*arguments)

        return call


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_batch_is_placed_after_the_step_before_it(prefetch):
    EVENTS.clear()
    draw(counted(*[1] * 6), strategy="noted_placing", prefetch=prefetch)
    assert [*itertools.chain(*([("place", k), ("step", k)] for k in range(6)))] == EVENTS


@jl.register_strategy("fails_once")
class FailsOnce(SingleDevice):
    def shard_batch(self, batch):
        if any(3 in x for x in jax.tree.leaves(batch)) and not EVENTS:
            EVENTS.append("failed")
            raise OSError("no room")
        return super().shard_batch(batch)


def test_an_error_while_a_dispatch_is_placed_trains_none_of_it():
    EVENTS.clear()
    model = Mean()
    fits = lambda: fit(model, numbered(4), None, strategy="fails_once", steps_per_execution=2, **BARE)  # noqa: E731
    refuses(OSError, fits, "no room")
    assert float(model.w[0]) == mean([[1], [2]])


def test_data_wait_counts_only_idle_devices(monkeypatch):
    clock, waits = Clock(), []
    monkeypatch.setattr(time, "perf_counter", clock)
    watch = hooks(on_train_epoch_end=lambda trainer, module: waits.append(trainer.data_wait))
    # debug waits for each step, so that devices are idle whenever a batch is drawn.
    fit(Mean(), Loader(4, clock, 3.0), Loader(4, clock, 100.0), watch, max_epochs=3, debug=True, prefetch=0)
    assert waits[1:] == [12.0, 12.0]
    assert 9.0 <= waits[0] <= 12.0  # the first batch was drawn before training began


@pytest.mark.parametrize(("prefetch", "rows", "in_thread"), [("auto", 32, False), (0, 32, False), (2, 8, True)])
def test_a_dispatch_is_drawn_by_a_thread_where_prefetch_asks_for_it(prefetch, rows, in_thread):
    drawn = []

    class Columns:
        shape, dtype = (64, 1), np.dtype(np.float32)

        def __getitem__(self, rows):
            x = np.ones(self.shape, np.float32)[rows]
            drawn.append((len(x), threading.current_thread().name == PREFETCH))
            return x

    loader = jl.ArrayLoader({"x": Columns()}, 8)
    fit(Mean(), loader, None, steps_per_execution=4, prefetch=prefetch, log_every_n_steps=0, **BARE)
    assert drawn[-1] == (rows, in_thread)
    assert any(drew for _, drew in drawn) == in_thread
