"""trainer.explain() tells which callback's hook kept the loop waiting, and compile_seconds what compiling took."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from kit import trainers
from kit.batches import numbered
from kit.inside import Clock, listeners, stop_clocks
from kit.journal import hooks
from kit.modules import Mean, module
from kit.refusals import refuses
from kit.trainers import BARE, make_trainer

import jaxlit as jl
from jaxlit.engine.engine import Engine
from jaxlit.trainer.session import Session


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return stop_clocks(monkeypatch)


def slow(clock: Clock, scale: float = 1.0) -> jl.Callback:
    def spend(seconds: float) -> None:
        clock.now += seconds * scale

    result = hooks(
        "Slow",
        on_train_batch_end=lambda t, m, outputs, batch, i: spend(1 + i),
        on_validation_end=lambda t, m: spend(32),
        on_log=lambda t, values, step: spend(0.25),
        trace_step=lambda grads, updates, params, opt_state: {"x": jnp.zeros(2)},
        on_trace=lambda t, values, step: spend(0.5),
        teardown=lambda t, m, stage: spend(64),
    )
    result.trace_every_n_steps = 2
    return result


def fit(*callbacks: Any, **arguments: Any) -> jl.Trainer:
    """Train for two epochs of four batches and a validation, with no callbacks but these."""
    arguments = BARE | {"max_epochs": 2, "log_every_n_steps": 2, "num_sanity_val_steps": 0} | arguments
    return trainers.fit(Mean(), numbered(4), numbered(1), *callbacks, **arguments)


def times(trainer: jl.Trainer) -> dict[tuple[str, str], tuple[int, float, float]]:
    return {(x.owner, x.hook): (x.calls, x.seconds, x.longest) for x in trainer.explain().hooks}


def test_each_hook_has_calls_time_and_longest_call(clock) -> None:
    def spend(seconds: float) -> Any:
        return lambda *_: setattr(clock, "now", clock.now + seconds)

    loaders = {"train_dataloader": lambda self: numbered(4), "val_dataloader": lambda self: numbered(1)}
    data = type("Data", (jl.DataModule,), {"setup": spend(5)} | loaders)()
    arguments = BARE | {"max_epochs": 2, "log_every_n_steps": 2, "num_sanity_val_steps": 0, "datamodule": data}
    model, twice = module(name="Timed", on_train_epoch_end=spend(3)), [slow(clock), slow(clock, 3.0)]
    type(twice[1]).__name__ = "Slower"
    trainer = trainers.fit(model, None, None, hooks("Quick", on_train_batch_end=lambda *_: None), *twice, **arguments)
    of_slow = {
        "on_train_batch_end": (8, 2 * (1 + 2 + 3 + 4), 4),
        "on_validation_end": (2, 64, 32),
        "on_trace": (4, 2, 0.5),
        "on_log": (6, 1.5, 0.25),  # two rows of steps and one of validation an epoch
        "teardown": (1, 64, 64),
    }
    assert {key: spent for key, spent in times(trainer).items() if spent[1]} == {
        **{("Slow", hook): spent for hook, spent in of_slow.items()},
        **{("Slower", hook): (calls, 3 * total, 3 * longest) for hook, (calls, total, longest) in of_slow.items()},
        ("Timed", "on_train_epoch_end"): (2, 6, 3),
        ("Data", "setup"): (1, 5, 5),
    }
    assert times(trainer)["Quick", "on_train_batch_end"] == (8, 0, 0)
    explanation = trainer.explain()
    seconds = [hook.seconds for hook in explanation.hooks]
    assert seconds == sorted(seconds, reverse=True), "the longest comes first"
    assert explanation.seconds == sum(seconds) == 4 * (20 + 64 + 2 + 1.5 + 64) + 6 + 5  # nothing else lets time pass
    clock.now += 1000
    assert trainer.explain() == explanation, "it does not grow afterwards"
    trainer.callbacks.remove(twice[1])
    trainer.validate(Mean(), numbered(1))
    assert times(trainer) == {
        ("Slow", "on_validation_end"): (1, 32, 32),
        ("Slow", "on_log"): (1, 0.25, 0.25),
        ("Slow", "teardown"): (1, 64, 64),
    }


def test_a_hook_inside_another_is_counted_once(clock) -> None:
    def save(trainer: Any, module: Any, epoch_over: bool, training_over: bool) -> None:
        if not epoch_over:
            return
        clock.now += 2
        trainer.save_checkpoint(f"step_{trainer.global_step}")
        clock.now += 1

    def inside(trainer: Any, module: Any, checkpoint: Any) -> None:
        clock.now += 5
        if trainer.global_step == 8:
            raise RuntimeError("no")

    def torn(*_: Any) -> None:
        clock.now += 7

    twice = [hooks(x, on_save_checkpoint=inside, teardown=torn, on_exception=torn) for x in ("Inside", "Second")]
    trainer = make_trainer(hooks("Saves", on_safe_point=save), *twice, max_epochs=2, **BARE)
    refuses(RuntimeError, lambda: trainer.fit(Mean(), numbered(4)), "no")
    result, explanation = times(trainer), trainer.explain()
    assert result["Inside", "on_save_checkpoint"] == (2, 10, 5)
    assert result["Second", "on_save_checkpoint"] == (1, 5, 5)
    assert result["Saves", "on_safe_point"] == (8, 5, 3)  # what follows the error is left out
    assert result["Inside", "teardown"] == result["Second", "teardown"] == (1, 7, 7)
    assert result["Inside", "on_exception"] == (1, 7, 7)
    assert sum(hook.seconds for hook in explanation.hooks) == explanation.seconds


def test_compile_seconds_are_those_jax_reports_for_the_run() -> None:
    said: dict[str, float] = {}

    def listen(event: str, seconds: float, **details: Any) -> None:
        name = str(details.get("fun_name"))
        for step in ("train_step", "micro_step", "eval_step", "train_step_traced"):
            if name in (step, f"jit({step})") and event.startswith("/jax/core/compile/"):
                said[step] = said.get(step, 0.0) + seconds

    before = listeners()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        trainer = fit(jl.callbacks.GradientNorm(every_n_steps=2), accumulate_grad_batches=2)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    result = trainer.compile_seconds
    assert result == pytest.approx(said)
    assert {*result} == {"micro_step", "train_step", "train_step_traced", "eval_step"}
    assert all(seconds > 0 for seconds in result.values())
    assert trainer.explain().compile_seconds == result
    assert all(f"{name} {seconds:.2g} s" in str(trainer.explain()) for name, seconds in result.items())
    trainer.validate(Mean(), numbered(1))
    newest = trainer.compile_seconds
    assert set(newest) == {"eval_step"}
    refuses(ZeroDivisionError, lambda: fit(hooks(on_train_start=lambda *_: 1 / 0)))  # another Trainer's
    assert trainer.compile_seconds == newest and listeners() == before


@pytest.mark.parametrize(("steps_per_execution", "limit"), [(1, 1), (2, 2)])
def test_the_parts_of_a_run_are_what_took_its_time(clock, monkeypatch, steps_per_execution: int, limit: int) -> None:
    passed = dict[str, float]()

    def let(seconds: float, part: str) -> None:
        clock.now += seconds
        passed[part] = passed.get(part, 0) + seconds

    def slow(cls: Any, name: str, seconds: float, part: str) -> None:
        original = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *args: (let(seconds, part), original(*args))[1])

    class Loader:
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Any:
            for batch in numbered(5):
                if begun:
                    let(3, "batches")
                yield batch

    begun: list[bool] = []
    monkeypatch.setattr(Session, "_compiled", lambda *_: None)  # by a real clock
    slow(Engine, "_train", 7, "steps")
    slow(Engine, "fused_steps", 14, "steps")
    slow(Engine, "eval_program", 11, "evaluation")
    slow(Engine, "prepare_training", 100, "compile")
    slow(Engine, "prepare_eval", 200, "compile")
    slow(type(jnp.zeros(())), "block_until_ready", 5, "device")
    callback = hooks(
        on_fit_start=lambda t, m: (let(30_000, "hooks"), begun.append(True)),
        on_train_batch_end=lambda *_: let(17, "hooks"),
        on_validation_end=lambda t, m: let(19, "hooks"),
    )
    model = module(name="Late", configure_optimizers=lambda self: (let(2000, "start"), optax.sgd(0.1))[1])
    arguments = BARE | {"max_epochs": 2, "num_sanity_val_steps": 0, "prefetch": 0, "max_in_flight": limit}
    begin = clock.now
    trainer = trainers.fit(model, Loader(), numbered(2), callback, **arguments, steps_per_execution=steps_per_execution)
    result = trainer.explain()
    assert {part.name: part.seconds for part in result.loop} == passed
    assert clock.now - begin == result.seconds == sum(passed.values())
    assert {*passed} == {"start", "compile", "batches", "steps", "device", "evaluation", "hooks"}


def test_all_seconds_of_compiling_are_in_one_part() -> None:
    model = module(lambda self, batch: jnp.mean(self.error(batch) ** 2) + 0.0 * jnp.sum(jnp.sort(jnp.ones(64))))
    explanation = trainers.fit(model, numbered(2), numbered(2), max_epochs=1, **BARE).explain()
    assert {*explanation.compile_seconds} == {"train_step", "eval_step"}
    assert all(part.seconds >= 0 for part in explanation.loop)
    (compiling,) = (part.seconds for part in explanation.loop if part.name == "compile")
    assert compiling >= sum(explanation.compile_seconds.values())


def test_the_parts_of_a_run_sum_to_its_time_by_real_clocks() -> None:
    seen: list[Any] = []
    trainer = fit(hooks(on_train_epoch_end=lambda t, m: seen.append(t.explain())), max_epochs=3)
    for explanation in (*seen, trainer.explain()):  # inside a hook, and afterwards
        assert sum(part.seconds for part in explanation.loop) == pytest.approx(explanation.seconds, rel=0.02)
