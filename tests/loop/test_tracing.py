"""At which optimizer steps callbacks look into the step, where what they saw arrives, and what is refused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit import trainers
from kit.batches import numbered
from kit.by_hand import mean
from kit.compiles import compiles
from kit.journal import hooks, without_rates
from kit.modules import module
from kit.refusals import fit_refuses
from kit.trainers import FOUR, SEVERAL, thinned

import jaxlit as jl
from jaxlit.errors import LogError, ModuleError


class Sees(jl.Callback):
    """Shows the gradient as a scalar and as an array, and keeps in order all that it is told."""

    def __init__(self, every: int | None = None, *, scalar: str = "grad", told: list[Any] | None = None) -> None:
        self.trace_every_n_steps, self.scalar = every, scalar
        self.told: list[Any] = [] if told is None else told

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        found = {"array": jnp.stack([grads["w"][0], params["w"][0]])}
        return found | ({self.scalar: grads["w"][0]} if self.scalar else {})

    def on_trace(self, trainer: jl.Trainer, values: dict[str, np.ndarray], step: int) -> None:
        self.told.append(("trace", step, *np.round(values["array"].astype(float), 4).tolist()))

    def on_log(self, trainer: jl.Trainer, values: dict[str, float], step: int) -> None:
        self.told.append(("log", step, {k: round(v, 4) for k, v in without_rates(values).items()}))

    def on_train_batch_end(self, trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.told.append(("end", trainer.global_step - 1))

    def steps(self, kind: str) -> list[int]:
        return [event[1] for event in self.told if event[0] == kind]

    def traces(self) -> list[Any]:
        return [event[1:] for event in self.told if event[0] == "trace"]

    def rows(self) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        for event in self.told:
            if event[0] == "log":
                assert event[1] not in found
                found[event[1]] = {k: v for k, v in event[2].items() if k != "epoch"}
        return found


def fit(callbacks: Any, values: Sequence[float] = range(1, 6), *, val: Any = None, **arguments: Any) -> jl.Trainer:
    """Train on batches of these values for two epochs, whose mean the step logs."""

    def step(self: Any, batch: Any) -> jax.Array:
        self.log("value", batch["x"].mean())
        return jnp.mean(self.error(batch) ** 2)

    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    batches = [{"x": np.full((8, 1), value, np.float32)} for value in values]
    validation = lambda self, batch: self.log("val", batch["x"].mean())  # noqa: E731
    arguments = {"max_epochs": 2, "num_sanity_val_steps": 0, "log_every_n_steps": 50} | arguments
    return trainers.fit(module(step, validation=validation), batches, val, *callbacks, **arguments)


def walk(values: Sequence[float]) -> list[list[float]]:
    """Return (gradient, weight before) of each step."""
    before = [mean([[x] for x in values[:k]]) for k in range(len(values))]
    return [[round(2 * (w - x), 4), round(w, 4)] for w, x in zip(before, values, strict=True)]


KNOWN = walk(range(1, 6))

# When ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "accumulate"),
    thinned(
        [(1, 1), (1, 2), (2, 2), (3, 1), (3, 2), (7, 1), (10, 1), (11, 1), (11, 2), (0, 1)], (1, 2), (3, 1), (0, 1)
    ),
)
def test_it_fires_on_the_last_step_of_each_n_across_epochs(every: int, accumulate: int) -> None:
    sees = Sees(every)
    trainer = fit(sees, range(1, 6), accumulate_grad_batches=accumulate)
    count = {1: 10, 2: 6}[accumulate]  # with 2: 2, 2 and 1 batches an epoch
    assert trainer.global_step == count
    expected = list(range(every - 1, count, every)) if every else []
    known = walk({1: [1, 2, 3, 4, 5], 2: [1.5, 3.5, 5]}[accumulate] * 2)
    assert sees.traces() == [(step, *known[step]) for step in expected]
    assert sees.rows() == {step: {"grad": known[step][0]} for step in expected}


@pytest.mark.parametrize(("interval", "expected"), [(4, [3, 7]), (0, []), (1, list(range(10)))])
def test_none_is_the_interval_of_rows(interval: int, expected: list[int]) -> None:
    sees = Sees(None)
    fit(sees, log_every_n_steps=interval)
    assert sees.steps("trace") == list(sees.rows()) == expected


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_skipped_rest_of_an_epoch_shifts_nothing(accumulate: int) -> None:
    sees, skip = Sees(2), hooks(on_train_batch_start=lambda trainer, module, batch, i: -1 if i == 3 else None)
    trainer = fit([sees, skip], range(1, 6), max_epochs=3, accumulate_grad_batches=accumulate)
    used = {1: [1, 2, 3] * 3, 2: [1.5] * 3}[accumulate]  # half a window is dropped
    assert trainer.global_step == len(used)
    steps = list(range(1, len(used), 2))
    assert sees.traces() == [(s, *walk(used)[s]) for s in steps]
    assert sees.rows() == {s: {"grad": walk(used)[s][0]} for s in steps}


def test_callbacks_with_other_intervals_have_other_steps() -> None:
    both = [Sees(2, scalar="a"), Sees(3, scalar="b")]
    fit(both, range(1, 7), max_epochs=1)
    assert [callback.steps("trace") for callback in both] == [[1, 3, 5], [2, 5]]
    known = walk(range(1, 7))
    names = {1: "a", 2: "b", 3: "a", 5: "ab"}
    assert both[0].rows() == {s: dict.fromkeys(names[s], known[s][0]) for s in (1, 2, 3, 5)}


def test_equal_callbacks_get_their_own_traced_values() -> None:
    @dataclass
    class Scaled(jl.Callback):
        factor: float

        def __post_init__(self) -> None:
            told[id(self)] = []
            self.trace_every_n_steps = 2

        def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
            return {"array": grads["w"][...] * self.factor}

        def on_trace(self, trainer: Any, values: dict[str, np.ndarray], step: int) -> None:
            told[id(self)].append(step)

    told: dict[int, list[int]] = {}
    fit([Scaled(2.0), Scaled(2.0)], max_epochs=1)
    assert list(told.values()) == [[1, 3], [1, 3]]


# Where it arrives ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "log_every", "prefetch"), [(1, 1, 0), (1, 2, 2), (2, 1, 2), (2, 2, 0), (1, 0, 0), (2, 0, 2)]
)
def test_what_was_seen_arrives_one_step_late_and_before_its_row(every: int, log_every: int, prefetch: int) -> None:
    sees, count = Sees(every), 5
    fit(sees, max_epochs=1, log_every_n_steps=log_every, prefetch=prefetch)
    expected: list[Any] = []
    for step in range(count + 1):
        expected += [("end", step)] if step < count else []
        if (late := step - 1) >= 0:
            fired, logged = (late + 1) % every == 0, log_every and (late + 1) % log_every == 0
            row = ({"value": late + 1.0} if logged else {}) | ({"grad": KNOWN[late][0]} if fired else {})
            expected += [("trace", late, *KNOWN[late])] if fired else []
            expected += [("log", late, row | {"epoch": 0.0})] if row else []
    assert sees.told == expected


def test_only_traced_scalars_make_rows() -> None:
    sees = Sees(2, scalar="")
    fit(sees, max_epochs=1, log_every_n_steps=0)
    assert sees.steps("trace") == [1, 3] and sees.steps("log") == []
    sees = Sees(2)
    logs = hooks(on_train_batch_end=lambda t, module, o, b, i: module.log("batch", i))
    trainer = fit([sees, logs], range(1, 7), max_epochs=1, log_every_n_steps=3)
    names = {1: {"grad"}, 2: {"value", "batch"}, 3: {"grad"}, 5: {"grad", "value", "batch"}}
    assert {step: set(row) for step, row in sees.rows().items()} == names
    assert trainer.callback_metrics["grad"] == pytest.approx(walk(range(1, 7))[5][0], abs=1e-4)


def test_validation_comes_behind_what_its_step_showed() -> None:
    sees = Sees(2)
    trainer = fit(sees, [1, 2, 3, 4], val=numbered(1, 7), max_epochs=1, val_check_interval=2)
    assert trainer.callback_metrics["val"] == 7
    order = [(event[0], event[1], sorted(event[2])) for event in sees.told if event[0] == "log"]
    assert order == [(kind, s, ["epoch", x]) for s in (1, 3) for kind, x in (("log", "grad"), ("log", "val"))]


@pytest.mark.parametrize("strategy", thinned(SEVERAL, "fsdp", "pmap", full=FOUR[1:]))
def test_it_fires_alike_under_every_strategy_also_on_a_tail(strategy: str) -> None:
    sees, known = Sees(2), walk([1, 2, 3] * 2)
    batches = [{"x": np.full((n, 1), x, np.float32)} for n, x in ((16, 1), (16, 2), (5, 3))]
    step = lambda self, batch: (self.log("value", batch["x"].mean()), jnp.mean(self.error(batch) ** 2))[1]  # noqa: E731
    trainers.fit(module(step), batches, None, sees, strategy=strategy, max_epochs=2, log_every_n_steps=3)
    assert sees.traces() == [(s, *known[s]) for s in (1, 3, 5)]
    grads = {s: {"grad": known[s][0]} for s in (1, 3, 5)}
    assert sees.rows() == grads | {2: {"value": 3}, 5: grads[5] | {"value": 3}}


# What is refused -------------------------------------------------------------------------------------


def shows(value: Any, every: Any = 100) -> jl.Callback:
    """Return a callback whose `trace_step` returns a value, or a function's of the gradients."""
    seen = lambda grads, updates, params, opt_state: value(grads) if callable(value) else value  # noqa: E731
    found = hooks("Shows", trace_step=seen)
    found.trace_every_n_steps = every
    return found


def fails(grads: Any) -> Any:
    raise RuntimeError("not today")


NO_DICT = r"Shows\.trace_step must return a dict of names and arrays, got"
INTERVAL = r"Shows\.trace_every_n_steps takes an int of at least 0, or None .*got"
REFUSED: dict[str, tuple[type[Exception], str, Any]] = {
    **{
        f"no dict {i}": (ModuleError, NO_DICT, lambda x=x: [shows(x)])
        for i, x in enumerate((None, 1.0, lambda g: g, lambda g: g["w"][...], lambda g: [1.0]))
    },
    "a tree": (ModuleError, NO_DICT, lambda: [shows(lambda g: {"tree": {"inner": g["w"][...]}})]),
    **{
        f"every {x!r}": (ModuleError, INTERVAL, lambda x=x: [shows({}, x)]) for x in (-1, 2.0, True, "2", np.float32(2))
    },
    "a step's name": (
        LogError,
        "Sees.trace_step returns 'loss', which training_step",
        lambda: [Sees(50, scalar="loss")],
    ),
    "another's name": (
        LogError,
        r"Shows\.trace_step returns 'grad', which Sees\.trace_step logs",
        lambda: [Sees(50), shows({"grad": jnp.zeros(())}, 70)],
    ),
    "its own class's": (LogError, r"Sees\.trace_step returns 'grad', which Sees", lambda: [Sees(50), Sees(70)]),
    "an error": (RuntimeError, "not today", lambda: [shows(fails)]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shown_is_refused_before_the_first_step(case: str) -> None:
    kind, words, made = REFUSED[case]
    with compiles() as found:
        fit_refuses(kind, words, callbacks=made())
    assert not any("train_step" in name for name in found)


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
    words = rf"Sees\.{hook}\(.*is called with \({names}\)\. Give it these arguments\."
    fit_refuses(ModuleError, words, callbacks=[callback])


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_the_name_that_a_hook_logs_is_refused(hook: str) -> None:
    logs = hooks(**{hook: lambda trainer, module, *_: module.log("grad", 1.0)})
    with pytest.raises(LogError, match=r"'grad'.*trace_step|trace_step.*'grad'"):
        fit([Sees(1), logs])


# After a resume, and after a step that was not finite ----------------------------------------------

# A hook, and the steps taken when it comes: beside steps that fire, rows, a validation, and the end of an epoch.
PLACES = (
    *(("on_train_batch_start", 3), ("on_train_batch_end", 4), ("on_train_batch_end", 5), ("on_safe_point", 4)),
    *(("on_log", 9), ("on_trace", 9), ("on_validation_batch_end", 4), ("on_train_epoch_end", 6), ("on_train_end", 12)),
)


def name_of(place: tuple[str, int]) -> str:
    return f"kept/{place[0]}_{place[1]}"


def saves(told: list[Any], at: dict[tuple[str, int], int]) -> jl.Callback:
    """Return a callback that saves the first time a hook comes at one of the places, and how much was told by then."""

    def save(hook: str, trainer: Any) -> None:
        place = hook, trainer.global_step
        if place in PLACES and place not in at:
            trainer.save_checkpoint(name_of(place))
            at[place] = len(told)

    found = shows({"unused": jnp.zeros(2)}, 2)
    for hook, _ in PLACES:
        setattr(found, hook, lambda trainer, *_, hook=hook: save(hook, trainer))
    return found


@pytest.mark.full
def test_a_resume_from_any_hook_goes_on_exactly() -> None:
    def run(callbacks: Any, **arguments: Any) -> None:
        fit(callbacks, range(1, 7), val=numbered(2, 7), val_check_interval=4, log_every_n_steps=3, **arguments)

    def of_kind(kind: str, told: list[Any]) -> list[Any]:
        return [event for event in told if event[0] == kind]

    told, at, fresh = list[Any](), dict[tuple[str, int], int](), Sees(2)
    run([Sees(2, told=told), saves(told, at)])
    assert set(at) == set(PLACES)
    run(fresh)
    for kind in ("trace", "log", "end"):  # saving itself changes nothing but when a trace arrives
        assert of_kind(kind, told) == of_kind(kind, fresh.told)
    for place in PLACES:
        sees = Sees(2)
        run(sees, ckpt_path=name_of(place))
        both = told[: at[place]] + sees.told
        for kind in ("trace", "log"):
            assert of_kind(kind, both) == of_kind(kind, told), place


@pytest.mark.parametrize("bad", [3, 4])  # a step that fires, and one that does not
def test_a_bad_step_that_is_left_out_keeps_its_place(bad: int) -> None:
    values = [math.nan if i == bad else i + 1.0 for i in range(8)]
    sees = Sees(2)
    trainer = fit(sees, values, max_epochs=1, nan_policy="skip", log_every_n_steps=1)
    assert trainer.global_step == 8
    assert sees.steps("trace") == [1, 3, 5, 7]
    known = walk([v for v in values if v == v])
    known.insert(bad, [math.nan, known[bad][1]])
    found = np.array([event[1:] for event in sees.traces()])
    np.testing.assert_array_equal(found, np.array(known)[1::2])
    np.testing.assert_array_equal([sees.rows()[s]["grad"] for s in (1, 3, 5, 7)], found[:, 0])


@pytest.mark.parametrize(("bad", "log_every"), thinned([(4, 0), (5, 1), (4, 2), (5, 2)], (5, 1), (4, 2)))
def test_steps_behind_a_rollback_fire_by_their_new_numbers(bad: int, log_every: int) -> None:
    values, learnt = [math.nan if i == bad else i + 1.0 for i in range(12)], []

    def note(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        del learnt[trainer.global_step - 1 :]
        learnt.append(values[batch_idx])

    sees = Sees(2)
    callbacks = [sees, hooks(on_train_batch_end=note), jl.callbacks.ModelCheckpoint(every_n_train_steps=3)]
    trainer = fit(callbacks, values, max_epochs=1, nan_policy="rollback", log_every_n_steps=log_every)
    assert trainer.global_step == len(learnt) < len(values) and not np.isnan(learnt).any()
    known = walk(learnt)
    last = {step: list(seen) for step, *seen in sees.traces()}
    assert last == {s: known[s] for s in range(1, len(learnt), 2)}
    rows = {event[1]: event[2] for event in sees.told if event[0] == "log"}
    assert {s: row["grad"] for s, row in rows.items() if "grad" in row} == {s: known[s][0] for s in last}
    logged = range(log_every - 1, len(learnt), log_every) if log_every else []
    assert {s: row["value"] for s, row in rows.items() if "value" in row} == {s: learnt[s] for s in logged}
