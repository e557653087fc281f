"""At which optimizer steps callbacks look into the step, where what they saw arrives, and what is refused."""

import math
from collections.abc import Sequence
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
from kit.trainers import thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, LogError, ModuleError


class Sees(jl.Callback):
    """Shows the gradient as a scalar and as an array, and keeps in order all that it is told."""

    def __init__(self, every: int | None = None, *, scalar: str = "grad", told: list[Any] | None = None) -> None:
        self.trace_every_n_steps, self.scalar = every, scalar
        self.told: list[Any] = [] if told is None else told

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        result = {"array": jnp.stack([grads["w"][0], params["w"][0]])}
        return result | ({self.scalar: grads["w"][0]} if self.scalar else {})

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
        result: dict[int, dict[str, float]] = {}
        for event in self.told:
            if event[0] == "log":
                assert event[1] not in result
                result[event[1]] = {k: v for k, v in event[2].items() if k != "epoch"}
        return result


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


def shows(value: Any, every: Any = 100) -> jl.Callback:
    """Return a callback whose `trace_step` returns a value, or a function's of the gradients."""
    seen = lambda grads, updates, params, opt_state: value(grads) if callable(value) else value  # noqa: E731
    result = hooks("Shows", trace_step=seen)
    result.trace_every_n_steps = every
    return result


REFUSED: dict[str, tuple[type[Exception], str, Any]] = {
    "no dict": (ModuleError, r"Shows\.trace_step must return a dict of names and arrays, got", lambda: [shows(1.0)]),
    "a step's name": (LogError, "trace_step returns 'loss'", lambda: [Sees(50, scalar="loss")]),
    "another's": (LogError, "'grad'", lambda: [Sees(50), shows({"grad": jnp.zeros(())}, 70)]),
    "an error": (KeyError, "'gone'", lambda: [shows(lambda grads: grads["gone"])]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shown_is_refused_before_the_first_step(case: str) -> None:
    kind, words, made = REFUSED[case]
    with compiles() as result:
        fit_refuses(kind, words, callbacks=made())
    assert not any("train_step" in name for name in result)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_the_name_that_a_hook_logs_is_refused(hook: str) -> None:
    logs = hooks(**{hook: lambda trainer, module, *_: module.log("grad", 1.0)})
    with pytest.raises(LogError, match=r"'grad'.*trace_step|trace_step.*'grad'"):
        fit([Sees(1), logs])


# A hook, and the steps taken when it comes: beside steps that fire, rows, a validation, and the end of an epoch.
PLACES = (
    *(("on_train_batch_start", 3), ("on_train_batch_end", 4), ("on_train_batch_end", 5), ("on_safe_point", 4)),
    *(("on_log", 9), ("on_trace", 9), ("on_validation_batch_end", 4), ("on_train_epoch_end", 6), ("on_train_end", 12)),
)


def name_of(place: tuple[str, int]) -> str:
    return f"kept/{place[0]}_{place[1]}"


def saves(told: list[Any], at: dict[tuple[str, int], int]) -> jl.Callback:
    """Return a callback that saves the first time a hook comes at one of the places, and how much was told by then."""

    asked = list[tuple[str, int]]()

    def save(hook: str, trainer: Any) -> None:
        place = hook, trainer.global_step
        if place in PLACES and place not in at and place not in asked:
            asked.append(place)
            trainer.save_checkpoint(name_of(place))  # in most hooks it is written later

    def saved(trainer: Any, module: Any, checkpoint: Any) -> None:
        if asked:  # else it is the default's
            at[asked.pop(0)] = len(told)

    result = shows({"unused": jnp.zeros(2)}, 2)
    for hook, _ in PLACES:
        setattr(result, hook, lambda trainer, *_, hook=hook: save(hook, trainer))
    result.on_save_checkpoint = saved
    return result


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


@pytest.mark.parametrize("every", [-1, 2.5, True, "2"])
def test_an_interval_that_is_no_number_of_steps_is_refused(every: Any) -> None:
    fit_refuses((ArgumentError, ArgumentTypeError), r"Sees\(trace_every_n_steps=", callbacks=Sees(every))
