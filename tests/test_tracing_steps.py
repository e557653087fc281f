"""At which optimizer steps callbacks look into the step, where what they saw arrives, and what is refused."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit.compiles import compiles
from tracing_model import QUIET, Sees, Walk, batches, fit, walk

import jaxlit as jl
from jaxlit.errors import JaxlitError, LogError, ModuleError

# When ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 3, 5, 7, 10, 11, 0])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_fires_on_the_last_step_of_each_n_across_epochs(every: int, accumulate: int) -> None:
    sees = Sees(every)
    trainer = fit(sees, range(1, 6), accumulate_grad_batches=accumulate)
    count = {1: 10, 2: 6}[accumulate]  # with 2: 2, 2 and 1 batches an epoch
    assert trainer.global_step == count
    expected = list(range(every - 1, count, every)) if every else []
    assert sees.steps("trace") == expected
    means = {1: [1, 2, 3, 4, 5], 2: [1.5, 3.5, 5]}[accumulate] * 2
    known = walk(means)
    assert [event[2:] for event in sees.told if event[0] == "trace"] == [tuple(known[step]) for step in expected]
    assert sees.rows() == {step: {"grad": known[step][0]} for step in expected}


@pytest.mark.parametrize(("interval", "expected"), [(4, [3, 7]), (0, []), (1, list(range(10)))])
def test_none_is_the_interval_of_rows(interval: int, expected: list[int]) -> None:
    sees = Sees(None)
    fit(sees, log_every_n_steps=interval)
    assert sees.steps("trace") == expected
    assert list(sees.rows()) == expected


def test_the_last_step_of_max_steps_arrives() -> None:
    sees = Sees(3)
    fit(sees, max_epochs=None, max_steps=6)
    assert sees.steps("trace") == [2, 5] and list(sees.rows()) == [2, 5]


def test_a_stop_in_the_middle_delivers_what_was_seen() -> None:
    class Stops(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 4:
                trainer.stop("enough")

    sees = Sees(4)
    fit([sees, Stops()])
    assert sees.steps("trace") == [3] and sees.rows()[3]["grad"] == walk(range(1, 6))[3][0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_skipped_rest_of_an_epoch_shifts_nothing(accumulate: int) -> None:
    class Skips(jl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    sees = Sees(2)
    trainer = fit([sees, Skips()], range(1, 6), max_epochs=3, accumulate_grad_batches=accumulate)
    used = {1: [1, 2, 3] * 3, 2: [1.5] * 3}[accumulate]  # half a window is dropped
    assert trainer.global_step == len(used)
    steps = list(range(1, len(used), 2))
    assert [event[1:] for event in sees.told if event[0] == "trace"] == [(s, *walk(used)[s]) for s in steps]
    assert sees.rows() == {s: {"grad": walk(used)[s][0]} for s in steps}


def test_callbacks_of_different_intervals_each_have_their_own_steps() -> None:
    told: list[Any] = []
    both = [Sees(2, scalar="a", told=told), Sees(3, scalar="b", told=[])]
    fit(both, range(1, 7), max_epochs=1)
    assert [callback.steps("trace") for callback in both] == [[1, 3, 5], [2, 5]]
    known = walk(range(1, 7))
    assert both[0].rows() == {
        s: {k: known[s][0] for k, n in (("a", 2), ("b", 3)) if (s + 1) % n == 0} for s in (1, 2, 3, 5)
    }


# Where it arrives ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("every", "log_every"), [(1, 1), (1, 2), (2, 1), (2, 2), (1, 0), (2, 0)])
def test_what_was_seen_arrives_one_step_late_and_before_its_row(every: int, log_every: int, prefetch: int) -> None:
    sees, known, count = Sees(every), walk(range(1, 6)), 5
    fit(sees, max_epochs=1, log_every_n_steps=log_every, prefetch=prefetch)
    expected: list[Any] = []
    for step in range(count + 1):
        expected += [("end", step)] if step < count else []
        if (late := step - 1) >= 0:
            fired, logged = (late + 1) % every == 0, log_every and (late + 1) % log_every == 0
            row = ({"value": late + 1.0} if logged else {}) | ({"grad": known[late][0]} if fired else {})
            expected += [("trace", late, *known[late])] if fired else []
            expected += [("log", late, row | {"epoch": 0.0})] if row else []
    assert sees.told == expected


def test_arrays_alone_make_no_row() -> None:
    sees = Sees(2, scalar="")
    fit(sees, max_epochs=1, log_every_n_steps=0)
    assert sees.steps("trace") == [1, 3] and sees.steps("log") == []


def test_a_row_that_is_made_for_a_scalar_holds_nothing_else() -> None:
    class Logs(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("batch", batch_idx)

    sees = Sees(2)
    fit([sees, Logs()], range(1, 7), max_epochs=1, log_every_n_steps=3)
    assert {step: set(row) for step, row in sees.rows().items()} == {
        1: {"grad"},
        2: {"value", "batch"},
        3: {"grad"},
        5: {"grad", "value", "batch"},
    }


def test_a_scalar_is_among_the_callback_metrics() -> None:
    trainer = fit(Sees(2), range(1, 6), max_epochs=1)
    assert trainer.callback_metrics["grad"] == pytest.approx(walk(range(1, 6))[3][0], abs=1e-4)


def test_validation_comes_behind_what_its_step_showed() -> None:
    sees = Sees(2)
    trainer = fit(sees, [1, 2, 3, 4], val=batches([7]), max_epochs=1, val_check_interval=2)
    assert trainer.callback_metrics["val"] == 7
    order = [(event[0], event[1], sorted(event[2])) for event in sees.told if event[0] == "log"]
    assert order == [(kind, s, ["epoch", x]) for s in (1, 3) for kind, x in (("log", "grad"), ("log", "val"))]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "shard_map", "pmap", "simulate:8"])
def test_it_fires_alike_under_every_strategy(strategy: str) -> None:
    sees = Sees(2)
    trainer = jl.Trainer(strategy=strategy, max_epochs=2, callbacks=sees, log_every_n_steps=3, **QUIET)
    trainer.fit(Walk(), [*batches([1, 2], 16), *batches([3], 5)])
    known = walk([1, 2, 3] * 2)
    assert [event[1:] for event in sees.told if event[0] == "trace"] == [(s, *known[s]) for s in (1, 3, 5)]
    assert sees.rows() == {
        1: {"grad": known[1][0]},
        2: {"value": 3},
        3: {"grad": known[3][0]},
        5: {"grad": known[5][0], "value": 3},
    }


# What is refused -------------------------------------------------------------------------------------


class Returns(jl.Callback):
    trace_every_n_steps = 100

    def __init__(self, value: Any) -> None:
        self.value = value

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> Any:
        return self.value(grads) if callable(self.value) else self.value


def refuse(callbacks: Any, kind: type[Exception], match: str) -> None:
    class Trains(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            raise AssertionError("a step was taken")

    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    with compiles() as found, pytest.raises(kind, match=match):
        fit([*callbacks, Trains()])
    assert not any("train_step" in name for name in found)


@pytest.mark.parametrize(
    "value",
    [None, 1.0, lambda g: g, lambda g: g["w"][...], lambda g: [1.0], lambda g: {"tree": {"inner": g["w"][...]}}],
)
def test_what_is_no_dict_of_arrays_is_refused(value: Any) -> None:
    refuse(Returns(value), ModuleError, r"Returns\.trace_step must return a dict of names and arrays, got")


@pytest.mark.parametrize("value", [{3: jnp.zeros(())}, {3: jnp.zeros(2)}])
def test_a_name_that_is_no_text_is_refused(value: Any) -> None:
    refuse(Returns(value), ModuleError, r"Returns\.trace_step must return a dict of names and arrays, got")


def test_a_scalar_that_is_no_real_number_is_refused() -> None:
    refuse(Returns({"z": jnp.zeros((), jnp.complex64)}), JaxlitError, r"Returns\.trace_step.*'z'")


@pytest.mark.parametrize("every", [-1, 2.0, True, "2", np.float32(2)])
def test_a_wrong_interval_is_refused(every: Any) -> None:
    refuse(Sees(every), ModuleError, r"Sees\.trace_every_n_steps is an int of at least 0, or None .*got")


def test_a_name_that_the_step_logs_is_refused() -> None:
    refuse(Sees(50, scalar="value"), LogError, r"Sees\.trace_step returns 'value', which training_step logs")


def test_the_name_of_another_callback_is_refused() -> None:
    class Other(Sees):
        pass

    refuse([Sees(50), Other(70)], LogError, r"Other\.trace_step returns 'grad', which Sees\.trace_step logs")
    refuse([Sees(50), Sees(70)], LogError, r"Sees\.trace_step returns 'grad', which Sees\.trace_step logs")


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_the_name_that_a_hook_logs_is_refused(hook: str) -> None:
    class Logs(jl.Callback):
        def _log(self, *arguments: Any) -> None:
            self.log("grad", 1.0)

    def start(self: Any, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._log()

    def end(self: Any, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._log()

    setattr(Logs, hook, start if hook == "on_train_batch_start" else end)
    with pytest.raises(LogError, match="'grad'.*trace_step|trace_step.*'grad'"):
        fit([Sees(1), Logs()])


def test_two_callbacks_of_one_class_are_told_their_own() -> None:
    both = [Sees(2, scalar="a"), Sees(2, scalar="b")]
    fit(both, max_epochs=1)
    assert both[0].told == both[1].told and both[0].steps("trace") == [1, 3]
    assert both[0].rows() == {s: dict.fromkeys("ab", walk(range(1, 6))[s][0]) for s in (1, 3)}


def test_callbacks_that_compare_equal_are_told_apart() -> None:
    @dataclass
    class Scaled(jl.Callback):
        factor: float

        def __post_init__(self) -> None:
            told[id(self)] = []
            self.trace_every_n_steps = 2

        def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
            return {"array": grads["w"][...][None] * self.factor}

        def on_trace(self, trainer: Any, values: dict[str, np.ndarray], step: int) -> None:
            told[id(self)].append(step)

    told: dict[int, list[int]] = {}
    fit([Scaled(2.0), Scaled(2.0)], max_epochs=1)
    assert list(told.values()) == [[1, 3], [1, 3]]


def test_an_error_in_a_trace_step_comes_before_the_first_step() -> None:
    def fails(grads: Any) -> Any:
        raise RuntimeError("not today")

    refuse(Returns(fails), RuntimeError, "not today")


@pytest.mark.parametrize(
    ("hook", "takes"),
    [
        ("trace_step", lambda grads, updates: {}),
        ("trace_step", lambda grads, updates, params, opt_state, more: {}),
        ("on_trace", lambda trainer, values: None),
        ("on_trace", lambda trainer, module, values, step: None),
    ],
)
def test_other_arguments_are_refused(hook: str, takes: Any) -> None:
    callback = Sees(100)
    setattr(callback, hook, takes)
    names = {"trace_step": "grads, updates, params, opt_state", "on_trace": "trainer, values, step"}[hook]
    refuse(callback, ModuleError, rf"Sees\.{hook}\(.*is called with \({names}\)\. Give it these arguments\.")


def test_an_error_in_on_trace_ends_training() -> None:
    class Fails(Sees):
        def on_trace(self, trainer: Any, values: dict[str, np.ndarray], step: int) -> None:
            raise RuntimeError(f"not at {step}")

    with pytest.raises(RuntimeError, match="not at 1"):
        fit(Fails(2))


@pytest.mark.parametrize("how", ["debug", "eager"])
def test_it_works_where_nothing_is_compiled_or_donated(how: str) -> None:
    sees = Sees(2)
    with jax.disable_jit(how == "eager"):
        fit(sees, max_epochs=1, debug=how == "debug")
    assert [event[1:] for event in sees.told if event[0] == "trace"] == [(s, *walk(range(1, 6))[s]) for s in (1, 3)]
