"""Callbacks that look into steps, after a resume and behind a step that was not finite."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tracing_model import Sees, batches, fit, walk

import jaxlit as jl

HOOKS = (
    ("on_train_batch_start", 3),
    ("on_train_batch_end", 3),
    ("on_train_batch_end", 4),
    ("on_train_batch_end", 5),
    ("on_safe_point", 4),
    ("on_safe_point", 5),
    ("on_log", 4),
    ("on_log", 9),
    ("on_trace", 9),
    ("on_validation_start", 4),
    ("on_validation_batch_end", 4),
    ("on_validation_end", 4),
    ("on_train_epoch_end", 6),
    ("on_train_epoch_start", 6),
    ("on_train_end", 12),
)


class Saves(jl.Callback):
    """Writes a checkpoint the first time that a hook comes at a step, and notes how much was told by then."""

    trace_every_n_steps = 2

    def __init__(self, told: list[Any]) -> None:
        self.told, self.at = told, {}
        for hook in {hook for hook, _ in HOOKS}:
            setattr(self, hook, self._saver(hook, getattr(jl.Callback, hook)))

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        return {"unused": jnp.zeros(2)}

    def _saver(self, hook: str, like: Any) -> Any:
        def save(trainer: Any, *arguments: Any, **named: Any) -> None:
            place = hook, trainer.global_step
            if place in HOOKS and place not in self.at:
                trainer.save_checkpoint(name_of(place))
                self.at[place] = len(self.told)

        names = [name for name in like.__code__.co_varnames[1 : like.__code__.co_argcount] if name != "trainer"]
        scope = {"save": save}
        exec(f"def made(trainer, {', '.join(names)}): return save(trainer)", scope)
        return scope["made"]


def name_of(place: tuple[str, int]) -> str:
    return f"kept/{place[0]}_{place[1]}"


def of_kind(kind: str, told: list[Any]) -> list[Any]:
    return [event for event in told if event[0] == kind]


def run(callbacks: Any, **arguments: Any) -> None:
    steps = {"val_check_interval": 4, "log_every_n_steps": 3, "accumulate_grad_batches": 1, **arguments}
    fit(callbacks, range(1, 7), val=batches([7, 8]), **steps)


def test_a_resume_from_any_hook_goes_on_exactly() -> None:
    told: list[Any] = []
    saves = Saves(told)
    run([Sees(2, told=told), saves])
    assert set(saves.at) == set(HOOKS)
    fresh = Sees(2)
    run(fresh)
    for kind in ("trace", "log", "end"):  # saving itself changes nothing but when a trace arrives
        assert of_kind(kind, told) == of_kind(kind, fresh.told)
    for place in HOOKS:
        sees = Sees(2)
        run(sees, ckpt_path=name_of(place))
        both = told[: saves.at[place]] + sees.told
        for kind in ("trace", "log"):
            assert of_kind(kind, both) == of_kind(kind, told), place


def test_hooks_may_log_behind_a_checkpoint_that_they_write() -> None:
    class SavesAndLogs(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint("kept/here")
            self.log("batch", batch_idx + 10)

    sees = Sees(1)
    fit([sees, SavesAndLogs()], max_epochs=1, log_every_n_steps=1)
    assert {step: row["batch"] for step, row in sees.rows().items()} == {i: i + 10 for i in range(5)}


@pytest.mark.parametrize("bad", [3, 4])  # a step that fires, and one that does not
def test_a_bad_step_that_is_left_out_keeps_its_place(bad: int) -> None:
    values = [math.nan if i == bad else i + 1.0 for i in range(8)]
    sees = Sees(2)
    trainer = fit(sees, values, max_epochs=1, nan_policy="skip", log_every_n_steps=1)
    assert trainer.global_step == 8
    assert sees.steps("trace") == [1, 3, 5, 7]
    known = walk([v for v in values if v == v])
    known.insert(bad, [math.nan, known[bad][1]])
    found = np.array([event[2:] for event in sees.told if event[0] == "trace"])
    np.testing.assert_array_equal(found, np.array(known)[1::2])
    np.testing.assert_array_equal([sees.rows()[s]["grad"] for s in (1, 3, 5, 7)], found[:, 0])


@pytest.mark.parametrize("bad", [4, 5])
@pytest.mark.parametrize("log_every", [0, 1, 2])
def test_steps_behind_a_rollback_fire_by_their_new_numbers(bad: int, log_every: int) -> None:
    values, learnt = [math.nan if i == bad else i + 1.0 for i in range(12)], []

    class Notes(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            del learnt[trainer.global_step - 1 :]
            learnt.append(values[batch_idx])

    sees = Sees(2)
    callbacks = [sees, Notes(), jl.callbacks.ModelCheckpoint(every_n_train_steps=3)]
    arguments = {"enable_checkpointing": True, "default_root_dir": "run", "log_every_n_steps": log_every}
    trainer = fit(callbacks, values, max_epochs=1, nan_policy="rollback", **arguments)
    assert trainer.global_step == len(learnt) < len(values) and not np.isnan(learnt).any()
    known = walk(learnt)
    last = {event[1]: list(event[2:]) for event in sees.told if event[0] == "trace"}
    assert last == {s: known[s] for s in range(1, len(learnt), 2)}
    rows = {event[1]: event[2] for event in sees.told if event[0] == "log"}
    assert {s: row["grad"] for s, row in rows.items() if "grad" in row} == {s: known[s][0] for s in last}
    logged = range(log_every - 1, len(learnt), log_every) if log_every else []
    assert {s: row["value"] for s, row in rows.items() if "value" in row} == {s: learnt[s] for s in logged}
