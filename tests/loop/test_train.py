"""The training loop: where it skips and stops, what it waits for, what a second fit begins from, what a step costs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit.batches import numbered, random
from kit.by_hand import HandLoop, assert_same, mean
from kit.costs import calls_per_step as calls_per_step_of
from kit.costs import reads
from kit.journal import Journal, Rows, at_batch, hooks
from kit.modules import Linear, Mean, module
from kit.refusals import warnings_of
from kit.trainers import BARE, FOUR, STRATEGIES, THREE, fit, make_trainer, thinned

import jaxlit as jl


def weight(model: Any) -> float:
    return float(model.w[...][0])


BEFORE, ONE_BATCH, ONE_EPOCH, ALL = (0, 0), (1, 1), (1, 3), (3, 9)
EARLY = ("setup", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start")
PARTS = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
STOPPED = {
    **dict.fromkeys(EARLY, BEFORE),
    "on_train_epoch_start": (1, 0),
    **dict.fromkeys(("on_train_batch_start", "on_train_batch_end"), ONE_BATCH),
    "on_log": (1, 2),  # a row comes one step late
    **dict.fromkeys((*(f"on_validation_{part}" for part in PARTS), "on_train_epoch_end"), ONE_EPOCH),
    **dict.fromkeys(("on_train_end", "on_fit_end", "teardown"), ALL),
}


@pytest.mark.parametrize("hook", thinned(STOPPED, *[*STOPPED][::2]))
def test_stop_in_a_hook_ends_at_the_next_safe_place(hook: str) -> None:
    journal = Journal()

    def stop(trainer: jl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking or "sanity" in hook:
            trainer.stop(hook)
            trainer.stop("a second reason, which is not kept")

    arguments = {"max_epochs": 3, "log_every_n_steps": 1}
    trainer = fit(Mean(), numbered(3), numbered(2), hooks(**{hook: stop}), journal, **arguments)
    epochs, steps = STOPPED[hook]
    # An epoch that a stop has left without a batch does not count.
    assert (trainer.current_epoch or epochs, trainer.global_step) == (epochs, steps)
    assert (trainer.should_stop, trainer.stop_reason) == (True, hook)
    assert ("on_train_start" in journal.names) == ("on_train_end" in journal.names) == (hook not in EARLY[:-1])
    assert journal.names[-2:] == ["on_fit_end", "teardown"]
    # Nothing is cut off: what has started ends, and is validated once an epoch at most.
    for what in ("train_epoch", "train_batch", "validation", "validation_batch", "sanity_check"):
        assert journal.names.count(f"on_{what}_start") == journal.names.count(f"on_{what}_end")
    in_fit = [event for event in journal.named("on_validation_start") if event[-1] > 0]
    assert len(in_fit) == (trainer.current_epoch if steps else 0)


def test_a_run_that_a_hook_has_stopped_stays_finished(caplog: pytest.LogCaptureFixture) -> None:
    """The same command trains nothing more, also without the hook; a path continues, and a stop that is not final."""
    given: dict[str, Any] = {"default_root_dir": "run", "resume": "auto", "max_epochs": 4}
    stop = hooks(on_train_epoch_end=lambda t, m: t.stop("enough", final=t.max_epochs < 5))
    first = fit(Mean(), numbered(3), numbered(1), stop, **given)
    for callbacks in ([stop], []):
        again = fit(Mean(), numbered(3), numbered(1), *callbacks, **given)
        assert (again.global_step, again.stop_reason, again.is_finished) == (3, "enough", True)
        assert "the run was stopped (enough)" in warnings_of(caplog)[-1]
    path = first.checkpoint_callback.last_model_path
    more = fit(Mean(), numbered(3), numbered(1), **given | {"resume": path})
    assert (more.global_step, more.is_finished) == (12, False)
    for steps in (15, 18):
        assert fit(Mean(), numbered(3), numbered(1), stop, **given | {"max_epochs": 9}).global_step == steps


def test_a_stop_holds_for_one_fit() -> None:
    trainer = make_trainer(max_epochs=2)
    trainer.stop("before fit")
    trainer.fit(Mean(), numbered(2))
    assert (trainer.current_epoch, trainer.global_step, trainer.should_stop) == (2, 4, False)


@pytest.mark.parametrize("owner", ["module", "callback"])
def test_minus_one_skips_the_rest_of_the_epoch(owner: str) -> None:
    skip = hooks(on_train_batch_start=lambda trainer, module, batch, i: -1 if i == 1 else None)
    skips = module(on_train_batch_start=lambda self, batch, i: -1 if i == 1 else None)
    model = Mean() if owner == "callback" else skips
    # Every callback is asked, also after the one that skips.
    journals = [Journal(), Journal()]
    callbacks = [journals[0], *([skip] if owner == "callback" else []), journals[1]]
    arguments = {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    trainer = fit(model, numbered(3), numbered(1), *callbacks, **arguments)
    for journal in journals:
        assert [index for index, *_ in journal.named("on_train_batch_start")] == [0, 1] * 2
        assert "on_validation_start" not in journal.names
    assert (trainer.current_epoch, trainer.global_step) == (2, 2)
    assert weight(model) == mean([[1], [1]])


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, *THREE, full=FOUR))
def test_a_skip_drops_the_accumulation_window(strategy: str) -> None:
    drops = lambda trainer, module, batch, i: -1 if (trainer.current_epoch, i) == (0, 3) else None  # noqa: E731
    model, rows = Mean(), Rows()
    arguments = {"max_epochs": 2, "accumulate_grad_batches": 2, "strategy": strategy, "log_every_n_steps": 1}
    trainer = fit(model, numbered(5), None, hooks(on_train_batch_start=drops), rows, **arguments)
    assert (trainer.current_epoch, trainer.global_step) == (2, 4)
    assert weight(model) == pytest.approx(mean([[1, 2], [1, 2], [3, 4], [5]]), rel=1e-6)
    w = mean([[1, 2]])
    assert rows.of("loss")[1] == pytest.approx(((1 - w) ** 2 + (2 - w) ** 2) / 2, rel=1e-6)  # nothing of the batch 3


CUTS = [("stop", 1, "single"), ("stop", 3, "pmap"), ("skip", 5, "ddp")]
MORE_CUTS = [("skip", 0, "single"), ("skip", 1, "shard_map"), ("skip", 3, "single"), ("stop", 5, "single")]


@pytest.mark.parametrize(("how", "at", "strategy"), thinned([*CUTS, *MORE_CUTS, ("stop", 5, "pmap")], *CUTS))
def test_a_window_cut_by_the_epoch_takes_no_step(how: str, at: int, strategy: str) -> None:
    def step(self: Any, batch: Any) -> Any:
        loss = jnp.mean(self.error(batch) ** 2)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    stop = at_batch(at - 1, lambda trainer, module: trainer.stop("enough"))
    skip = hooks(on_train_batch_start=lambda trainer, module, batch, i: -1 if i == at else None)
    model, rows, journal = module(step), Rows(), Journal()
    arguments = {"strategy": strategy, "accumulate_grad_batches": 4, "log_every_n_steps": 1}
    trainer = fit(model, numbered(8), None, {"stop": stop, "skip": skip}[how], rows, journal, **arguments)
    windows = [[1, 2, 3, 4]] * (at > 4)
    assert (len(journal.named("on_train_batch_end")), trainer.global_step) == (at, len(windows))
    assert weight(model) == mean(windows)
    assert rows.rows == [(0, {f"loss_{kind}": 7.5, "epoch": 0}) for _ in windows for kind in ("step", "epoch")]
    assert trainer.current_epoch == 1 and all(np.isfinite(x) for x in trainer.callback_metrics.values())


def test_a_second_fit_of_a_trainer_is_that_of_a_fresh_one() -> None:
    def run(trainer: jl.Trainer, journal: Journal, rows: Rows) -> tuple[Any, ...]:
        journal.events.clear()
        rows.rows.clear()
        model = Mean()
        trainer.fit(model, numbered(5, 2), numbered(2))
        counts = (trainer.current_epoch, trainer.global_step, int(trainer.state.step))
        return weight(model), counts, list(journal.events), list(rows.rows), dict(trainer.callback_metrics)

    def make() -> tuple[jl.Trainer, Journal, Rows]:
        journal, rows = Journal(), Rows()
        arguments = {"max_steps": 4, "accumulate_grad_batches": 2, "log_every_n_steps": 1, "val_check_interval": 3}
        arguments |= {"max_epochs": None, "check_val_every_n_epoch": None, "enable_checkpointing": False}
        return make_trainer(journal, rows, **arguments), journal, rows

    used = make()
    used[0].fit(Mean(), numbered(4, 70), numbered(1))
    assert run(*used) == run(*make())


@pytest.mark.smoke
def test_a_second_fit_keeps_weights_and_resets_the_optimizer() -> None:
    model, batches = Linear(), random(4)
    loader = jl.ArrayLoader({key: np.concatenate([batch[key] for batch in batches]) for key in ("x", "y")}, 8)
    trainer = make_trainer(max_epochs=None, max_steps=2)
    for _ in range(2):
        trainer.fit(model, loader)
        assert (trainer.current_epoch, trainer.global_step) == (1, 2)
    assert_same(model, HandLoop(HandLoop(Linear())(*batches[:2]).module)(*batches[:2]).module)


def test_a_trainer_may_fit_again_after_an_error() -> None:
    failed: list[bool] = []

    def fail(trainer: jl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1 and not failed:
            failed.append(True)
            raise RuntimeError("once")

    model, trainer = Mean(), make_trainer(hooks(on_train_batch_end=fail))
    with pytest.raises(RuntimeError, match="once"):
        trainer.fit(model, numbered(2))
    assert weight(model) == mean([[1]])
    trainer.fit(model, numbered(2))
    assert weight(model) == mean([[1], [1], [2]])


def waits(monkeypatch: pytest.MonkeyPatch, verb: str, **arguments: Any) -> int:
    result: list[int] = []
    cls = type(jnp.zeros(()))
    original = cls.block_until_ready
    with monkeypatch.context() as patch:
        patch.setattr(cls, "block_until_ready", lambda self: (result.append(1), original(self))[1])
        trainer = make_trainer(log_every_n_steps=0, prefetch=0, nan_policy="ignore", **BARE, **arguments)
        getattr(trainer, verb)(Mean(), numbered(24))
    return len(result)


@pytest.mark.parametrize(
    ("verb", "limit", "times"), [("fit", 1, 24), ("fit", 2, 23), ("fit", 8, 5), ("validate", 2, 24), ("validate", 8, 6)]
)
def test_a_run_waits_for_steps_in_flight(verb: str, limit: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    free = waits(monkeypatch, verb, max_in_flight=100)
    assert waits(monkeypatch, verb, max_in_flight=limit) == free + times


def calls_per_step(strategy: str, metrics: int, log_every: int) -> float:
    def step(self: Any, batch: Any) -> jax.Array:
        loss = jnp.mean(self.error(batch) ** 2)
        for i in range(metrics):
            self.log(f"metric_{i}", loss, on_step=True, on_epoch=True)
        return loss

    # By default a thread draws batches if the first ones are slow to come, as they are on a busy machine.
    given = {"strategy": strategy, "log_every_n_steps": log_every, "prefetch": 0}
    return calls_per_step_of(make_trainer(**given, **BARE), module(step))


MOST = [("single", 1000, 11), ("single", 1, 60), ("ddp", 1000, 21)]


@pytest.mark.parametrize(("strategy", "log_every", "most"), thinned(MOST, MOST[0]))
def test_a_step_costs_few_python_calls_whatever_it_logs(strategy: str, log_every: int, most: int) -> None:
    one, five = calls_per_step(strategy, 1, log_every), calls_per_step(strategy, 5, log_every)
    assert abs(one - five) < 0.5
    assert 5 <= one <= most  # fewer, and the counter has seen nothing


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
def test_what_hooks_log_stays_on_the_device(policy: str) -> None:
    def log(trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        counts.append(len(seen))
        module.log("x", outputs["loss"], on_step=True, on_epoch=True)

    counts = list[int]()
    given = BARE | {"strategy": "ddp", "devices": 2, "log_every_n_steps": 0, "max_epochs": 1, "nan_policy": policy}
    with reads() as seen:
        fit(Mean(), numbered(40), None, hooks(on_train_batch_end=log), **given)
    assert counts[-1] == counts[5]
