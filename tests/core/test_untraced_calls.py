"""What a step calls while it is traced, and no compiled step repeats, is told of once, with the word to use."""

import builtins
import datetime
import logging
import random
import threading
import time
from collections.abc import Callable
from time import time as now
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import numbered
from kit.batches import random as random_batches
from kit.modules import Net, module
from kit.refusals import warnings_of
from kit.trainers import fit, thinned
from numpy.random import normal

CALLS: dict[str, tuple[Callable[[jax.Array], Any], str, str]] = {
    "numpy": (lambda loss: np.random.normal(size=3), "draws from np.random.normal", "self.rngs.normal"),
    "numpy's shuffle": (lambda loss: np.random.permutation(3), "draws from np.random.permutation", "self.rngs"),
    "random": (lambda loss: random.random(), "draws from random.random", "self.rngs"),
    "a clock": (lambda loss: time.perf_counter(), "reads time.perf_counter", "callback"),
    "a generator without a seed": (
        lambda loss: np.random.default_rng(),
        "draws from np.random.default_rng",
        "self.rngs",
    ),
    "a generator of its own": (
        lambda loss: GENERATOR.normal(),
        "draws from GENERATOR, a generator of numpy's or Python's",
        "self.rngs",
    ),
    "an imported clock": (lambda loss: now(), "reads time.time", "callback"),
    "imported chance": (lambda loss: normal(), "draws from np.random.normal", "self.rngs"),
    "a date": (lambda loss: datetime.datetime.now(), "reads datetime.now", "callback"),
    "a helper": (lambda loss: helper(), "reads time.time", "callback"),
    "logging": (
        lambda loss: logging.getLogger("mine").info("loss %s", loss),
        "shows a traced array by logging",
        "jax.debug.print",
    ),
    "a print": (lambda loss: print("loss", loss), "shows a traced array by print", "jax.debug.print"),
    "a print of a text": (lambda loss: print(f"loss {loss}"), "shows a traced array by print", "jax.debug.print"),
    "a print of a dict": (lambda loss: print({"loss": [loss]}), "shows a traced array by print", "jax.debug.print"),
}


GENERATOR = np.random.default_rng(0)


def helper() -> list[float]:
    return [now() for _ in range(2)]


def originals() -> tuple[Any, ...]:
    mine = now, normal, logging.Logger.handle, np.random.default_rng
    return *mine, np.random.normal, np.random.permutation, random.random, time.time, time.perf_counter, builtins.print


def step_calling(do: Callable[[jax.Array], Any]) -> Callable[..., Any]:
    def step(self: Any, batch: Any) -> jax.Array:
        loss = jnp.mean(self.error(batch) ** 2)
        do(loss)
        return loss

    return step


@pytest.mark.parametrize("call", thinned(CALLS, *[*CALLS][::3]))
def test_a_call_is_told_of_once_with_the_word_to_use(call: str, caplog: pytest.LogCaptureFixture) -> None:
    do, what, remedy = CALLS[call]
    caplog.set_level(logging.INFO, "mine")
    before = originals()
    batches = [*numbered(2), *numbered(2, rows=3)]  # of two shapes: the step is traced again
    fit(module(step_calling(do)), batches, max_epochs=2)
    (line,) = warnings_of(caplog)
    assert line.startswith(f"Made.training_step {what}, once") and remedy in line
    assert originals() == before


@pytest.mark.parametrize("strategy", ["shard_map", "fsdp"])
def test_each_step_and_kind_of_call_is_told_of_also_where_a_step_is_traced_for_each_replica(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    def both(loss: jax.Array) -> None:
        print(loss, np.random.rand(), np.random.randn())

    made = module(step_calling(both), validation=step_calling(lambda loss: time.time()))
    fit(made, numbered(2, rows=8), numbered(1, rows=8), strategy=strategy)
    found = sorted(line.partition(", once")[0] for line in warnings_of(caplog))
    assert found == [
        "Made.training_step draws from np.random.rand",
        "Made.training_step shows a traced array by print",
        "Made.validation_step reads time.time",
    ]


def test_what_is_meant_for_the_trace_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def harmless(loss: jax.Array) -> None:
        print("traced", loss.shape, loss.dtype)
        logging.getLogger("mine").warning("a record has a time of its own")
        np.random.default_rng(0).normal()
        jax.debug.print("loss {}", loss)

    fit(module(step_calling(harmless)), numbered(2))
    fit(Net(rate=0.5, rngs=nnx.Rngs(0)), random_batches(2))
    assert warnings_of(caplog) == []


def test_other_threads_may_draw_and_print_while_a_step_is_traced(caplog: pytest.LogCaptureFixture) -> None:
    def beside(loss: jax.Array) -> None:
        def draw() -> None:
            np.random.normal(), time.time(), print("from a thread", loss)

        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()

    fit(module(step_calling(beside)), numbered(1))
    assert warnings_of(caplog) == []


def test_two_threads_that_trace_leave_the_functions_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    before, first_traces, second_traced = originals(), threading.Event(), threading.Event()

    def first(loss: jax.Array) -> None:
        first_traces.set()
        assert second_traced.wait(60)
        random.random()  # the other one has ended meanwhile

    def second() -> None:
        assert first_traces.wait(60)
        fit(module(step_calling(lambda loss: time.time()), name="Second"), numbered(1), default_root_dir="second")
        second_traced.set()

    thread = threading.Thread(target=second)
    thread.start()
    fit(module(step_calling(first), name="First"), numbered(1), default_root_dir="first")
    thread.join()
    found = sorted(line.partition(", once")[0] for line in warnings_of(caplog))
    assert found == ["First.training_step draws from random.random", "Second.training_step reads time.time"]
    assert originals() == before


def test_a_step_that_raises_leaves_the_functions_as_they_were() -> None:
    def fail(loss: jax.Array) -> None:
        raise LookupError("mine")

    before = originals()
    with pytest.raises(LookupError):
        fit(module(step_calling(fail)), numbered(1))
    assert originals() == before


def test_without_a_trace_nothing_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    draws: list[float] = []
    with jax.disable_jit():
        fit(module(step_calling(lambda loss: draws.append(random.random()))), numbered(2))
    assert len(set(draws)) >= 2  # one for each step at least
    assert warnings_of(caplog) == []
