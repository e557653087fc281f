"""EarlyStopping against sequences worked out by hand."""

import math
import random
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from kit.batches import numbered
from kit.journal import hooks
from kit.modules import Mean, module
from kit.refusals import refuses, warnings_of
from kit.trainers import fit

from jaxlit.callbacks import EarlyStopping, EarlyStoppingReason, monitor
from jaxlit.errors import JaxlitError

NAN, INF = math.nan, math.inf


def stopped_at(callback: Any, trainer: Any, values: Any) -> int | None:
    trainer.start(callback)
    for i, value in enumerate(values):
        trainer.train_epoch(callback, val={"val/loss": value})
        if trainer.should_stop:
            return i
    return None


def lightnings(values: Any, mode: str, min_delta: float, patience: int, **rules: Any) -> tuple[Any, ...]:
    """Return where Lightning 2.6's rule stops, for which of its reasons, the best value and the checks waited."""
    sign = 1 if mode == "min" else -1
    best, wait, reason = sign * INF, 0, "NOT_STOPPED"
    for i, value in enumerate(values):
        if rules["check_finite"] and not math.isfinite(value):
            reason = "NON_FINITE_METRIC"
        elif (limit := rules["stopping_threshold"]) is not None and sign * value < sign * limit:
            reason = "STOPPING_THRESHOLD"
        elif (limit := rules["divergence_threshold"]) is not None and sign * value > sign * limit:
            reason = "DIVERGENCE_THRESHOLD"
        elif sign * value + min_delta < sign * best:
            best, wait = value, 0
        elif (wait := wait + 1) >= patience:
            reason = "PATIENCE_EXHAUSTED"
        if reason != "NOT_STOPPED":
            return i, reason, best, wait
    return None, reason, best, wait


def test_random_sequences_stop_where_lightnings_rule_stops(make_trainer) -> None:
    rng, reasons = random.Random(0), set()
    for _ in range(400):
        arguments = {
            "mode": rng.choice(["min", "max"]),
            "min_delta": rng.choice([0.0, 0.25, 1.0]),
            "patience": rng.randrange(5),
            "check_finite": rng.random() < 0.8,
            "stopping_threshold": rng.choice([None, None, -1.0, 4.0]),
            "divergence_threshold": rng.choice([None, None, -1.5, 3.5]),
        }
        # Quarters, whose sums and differences are exact.
        values = [rng.choice([NAN, INF]) if rng.random() < 0.05 else rng.randrange(-8, 20) / 4 for _ in range(12)]
        callback = EarlyStopping("val/loss", **arguments)
        at = stopped_at(callback, make_trainer(), values)
        result = at, callback.stopping_reason.name, callback.best_score, callback.wait_count
        assert result == lightnings(values, **arguments), (arguments, values)
        reasons.add(callback.stopping_reason)
    assert reasons == {*EarlyStoppingReason}


def test_verbose_prints_improvements(make_trainer, capsys) -> None:
    for verbose, said in ((True, ["improved to 3.", "improved by 1 to 2.", "improved by 0.5 to 1.5."]), (False, [])):
        capsys.readouterr()
        stopped_at(EarlyStopping("val/loss", patience=9, verbose=verbose), make_trainer(), [3, 2, 2.5, 1.5, 1.5])
        printed = [line for line in capsys.readouterr().out.splitlines() if "improved" in line]
        assert printed == [f"val/loss {words}" for words in said]


def test_a_second_fit_counts_from_zero(make_trainer) -> None:
    callback, trainer = EarlyStopping("val/loss", patience=2), make_trainer()
    assert stopped_at(callback, trainer, [3, 1, 2, 2]) == 3
    assert (callback.wait_count, callback.stopped_epoch, callback.best_score) == (2, 3, 1)
    assert callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    assert callback.stopping_reason_message == trainer.stop_reason and "val/loss" in trainer.stop_reason
    assert stopped_at(callback, make_trainer(), [5, 4, 3]) is None
    assert callback.stopping_reason is EarlyStoppingReason.NOT_STOPPED and callback.stopping_reason_message is None


def test_patience_does_not_run_while_min_epochs_blocks(make_trainer) -> None:
    # Epochs 0 to 3 are blocked: the first check that counts is that of the epoch that ends min_epochs.
    assert stopped_at(EarlyStopping("val/loss", patience=2), make_trainer(min_epochs=5), [1] * 9) == 5
    # Epochs of 4 steps: the check that ends epoch 2 is the first one with 10 steps after it.
    assert stopped_at(EarlyStopping("val/loss", patience=1), make_trainer(min_steps=10), [1] * 9) == 2


@pytest.mark.parametrize(
    ("arguments", "asked", "checks"),
    [
        ({}, None, 1),  # one validation, at the end of the epoch
        ({}, True, 1),
        ({}, False, 3),
        ({"val_check_interval": 0.5}, None, 3),
        ({"check_val_every_n_epoch": 2}, None, 3),
        ({"check_val_every_n_epoch": 2}, True, 1),
        ({"sanity_checking": True}, False, 0),
        ({"stage": "validate"}, False, 0),
    ],
)
def test_the_default_checks_where_lightning_does(make_trainer, arguments, asked, checks) -> None:
    callback = EarlyStopping("val/loss", patience=9, check_on_train_epoch_end=asked)
    stage = arguments.pop("stage", "fit")
    trainer = make_trainer(**arguments)
    callback.setup(trainer, trainer.module, stage)
    for _ in range(3):
        trainer.validate(callback, {"val/loss": 1.0})
    if checks:
        callback.on_train_epoch_end(trainer, trainer.module)
    assert (callback.wait_count, callback.best_score) == ((checks - 1, 1.0) if checks else (0, INF))


def test_a_missing_metric_is_an_error_if_strict(make_trainer) -> None:
    def train(callback: Any, *values: Any, **arguments: Any) -> Any:
        trainer = make_trainer(**arguments)
        trainer.start(callback)
        for value in values:
            trainer.train_epoch(callback, val=value)
        return trainer

    both, wrong = {"val/loss": 1.0, "train/loss": 1.0}, EarlyStopping("val/los")
    refuses(JaxlitError, lambda: train(wrong, both), r"val/los'.*val/loss.*train/loss, val/loss")
    assert not train(EarlyStopping("val/los", strict=False), both).should_stop
    late = EarlyStopping("val/loss", check_on_train_epoch_end=False)
    refuses(JaxlitError, lambda: train(late, None, num_val_batches=[]), "val/loss.*Logged: nothing")
    cut = EarlyStopping("val/loss", patience=1)  # before its validation, which so is no check
    assert not train(cut, both, None).should_stop and cut.wait_count == 0


def test_without_validation_it_watches_the_epochs() -> None:
    late = module(on_train_epoch_end=lambda self: self.log("flat", 1.0))
    logged = module(lambda self, batch: self.log("flat", 1.0, on_step=False, on_epoch=True) or jnp.sum(self.w[...]))
    for made in (late, logged):
        stop = EarlyStopping("flat", patience=1)
        trainer = fit(made, numbered(3), None, stop, max_epochs=5, val_check_interval=2)
        assert trainer.current_epoch == 2 and trainer.early_stopping_callback is stop


def test_a_monitor_that_no_check_has_reached_is_told(caplog) -> None:
    fit(Mean(), numbered(3), numbered(1), EarlyStopping("nope"), max_epochs=None, max_steps=2)
    (message,) = [m for m in warnings_of(caplog) if "monitor" in m]
    assert "monitor='nope'" in message


def test_a_resume_between_validation_and_epoch_end_checks() -> None:
    save = hooks(on_validation_end=lambda t, m: t.current_epoch == 1 and t.save_checkpoint("half"))
    flat, given = {"validation": lambda self, batch: self.log("val", jnp.zeros(()))}, {"max_epochs": 9}
    stops = lambda: EarlyStopping("val", patience=2)  # noqa: E731
    whole = fit(module(**flat), numbered(1), numbered(1), stops(), save, **given)
    resumed = fit(module(**flat), numbered(1), numbered(1), stops(), ckpt_path="half", **given)
    assert whole.current_epoch == resumed.current_epoch == 3


RULES: dict[str, Any] = {  # with what lets a resume continue
    "patience": ({"patience": 2}, [3.0, 3.0, 3.0, 2.0, 1.0], {"patience": 9}),
    "threshold": ({"stopping_threshold": 2.5}, [3.0, 3.0, 2.0, 3.0, 3.0], {"stopping_threshold": 1.0}),
    "divergence": ({"divergence_threshold": 9.0}, [3.0, 3.0, 10.0, 3.0, 3.0], {"divergence_threshold": 20.0}),
    "not finite": ({}, [3.0, 3.0, NAN, 3.0, 3.0], {"check_finite": False}),
}


def scripted(values: Any, stop: Any, **given: Any) -> Any:
    """Train with a metric of these values, epoch by epoch."""
    log = hooks(on_train_epoch_end=lambda t, m: stop.log("m", values[t.current_epoch]))
    arguments = {"max_epochs": len(values), "default_root_dir": "run", "resume": "auto", "num_sanity_val_steps": 0}
    return fit(Mean(), numbered(2), None, log, stop, **arguments | given)


@pytest.mark.parametrize("rule", RULES)
def test_a_stopped_run_stays_stopped_until_its_rule_changes(rule: str, caplog: Any) -> None:
    given, values, changed = RULES[rule]
    make = lambda **more: EarlyStopping("m", **{"patience": 9} | given | more)  # noqa: E731
    steps, reasons = zip(
        *[(t.global_step, t.stop_reason) for t in (scripted(values, make()) for _ in range(3))], strict=True
    )
    assert steps == (6, 6, 6)
    assert len(set(reasons)) == 1
    assert "another patience or threshold" in warnings_of(caplog)[-1]
    stop = make(**changed)
    assert scripted(values, stop).global_step == 10
    assert stop.stopping_reason is EarlyStoppingReason.NOT_STOPPED


def test_a_verdict_goes_with_the_callback_that_gave_it() -> None:
    given, values, _ = RULES["patience"]
    assert scripted(values, EarlyStopping("m", **given)).global_step == 6
    trainer = fit(Mean(), numbered(2), max_epochs=5, default_root_dir="run", resume="auto")
    assert trainer.global_step == 10


@pytest.mark.parametrize("rule", RULES)
def test_a_verdict_that_min_epochs_blocks_is_taken_again(rule: str) -> None:
    given, values, _ = RULES[rule]
    stop = EarlyStopping("m", **{"patience": 9} | given)
    assert scripted(values, stop, min_epochs=4).current_epoch == 5
    assert stop.best_score == min(value for value in values if not math.isnan(value))


def test_a_check_within_the_last_blocked_epoch_does_not_count() -> None:
    """The first of two validations in the only blocked epoch is above the threshold, the second not."""
    values = iter([0.0, 5.0, 5.0, 5.0])
    model = module(on_validation_epoch_end=lambda self: self.log("m", next(values)))
    stop = EarlyStopping("m", stopping_threshold=1.0, patience=9)
    given = {"min_epochs": 1, "max_epochs": 2, "val_check_interval": 1, "num_sanity_val_steps": 0}
    assert fit(model, numbered(2), numbered(1), stop, **given).global_step == 4


@pytest.mark.parametrize("logged", [False, True])
def test_of_several_processes_all_compare_before_one_returns(logged: bool, monkeypatch: Any, make_trainer: Any) -> None:
    """One has logged the metric in a hook of the first window, and another has not."""
    compared = list[str]()
    monkeypatch.setattr(monitor, "team", lambda: SimpleNamespace(size=2))
    monkeypatch.setattr(monitor, "same_job", lambda name, values, rule: compared.append(name))
    trainer, stop = make_trainer(), EarlyStopping("m")
    trainer.callback_metrics = Metrics({"m": 1.0} if logged else {})
    trainer.start(stop)
    stop.on_validation_end(trainer, trainer.module)
    stop.on_train_epoch_end(trainer, trainer.module)
    assert len(compared) == 1


class Metrics(dict):
    """Metrics that hooks have logged."""

    def hook(self, name: str) -> str:
        return "on_train_batch_end"


def test_a_stop_inside_the_first_window_is_no_missing_metric(caplog) -> None:
    def train(stop_in: int, **given: Any) -> Any:
        stop = hooks(on_train_batch_end=lambda t, *_: t.stop("now") if t.current_epoch == stop_in else None)
        logged = lambda self, batch: self.log("loss", 1.0, on_step=False, on_epoch=True) or jnp.sum(self.w[...])  # noqa: E731
        return fit(module(logged), numbered(4), None, EarlyStopping("loss"), stop, accumulate_grad_batches=2, **given)

    assert train(0).global_step == 0
    assert "was never checked" in warnings_of(caplog)[-1]
    saved = train(9, default_root_dir="whole").checkpoint_callback.last_model_path
    resumed = train(1, max_epochs=2, ckpt_path=saved)
    assert resumed.global_step == 2
    assert resumed.stop_reason == "now"
