"""EarlyStopping against sequences worked out by hand."""

import json
import math

import pytest

import jaxlit as jl
from jaxlit.callbacks import EarlyStopping
from jaxlit.errors import ArgumentError, JaxlitError


def stopped_at(callback, trainer, values):
    """Return the index of the validation that stopped training."""
    trainer.start(callback)
    for i, value in enumerate(values):
        trainer.train_epoch(callback, val={"val/loss": value})
        if trainer.should_stop:
            return i
    return None


@pytest.mark.parametrize(
    ("arguments", "values", "expected"),
    [
        ({"patience": 2}, [3, 2, 2, 2, 2], 3),
        ({"patience": 2}, [3, 2, 2, 1, 1, 1], 5),
        ({"patience": 1, "mode": "max"}, [1, 2, 3, 2], 3),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.4, 2.0], 2),
        ({"patience": 1, "min_delta": 0.5, "mode": "max"}, [1.0, 1.6, 2.0], 2),
        ({"patience": 0}, [3, 2, 3], 2),
        ({"patience": 1}, [3, math.nan], 1),
        ({"patience": 3}, [math.inf], 0),
        ({"patience": 3, "check_finite": False}, [3, math.nan, math.nan, math.nan], 3),
        ({"patience": 9, "stopping_threshold": 1.0}, [2.0, 1.0, 0.9], 2),
        ({"patience": 9, "stopping_threshold": 1.0, "mode": "max"}, [0.5, 1.0, 1.1], 2),
        ({"patience": 9, "divergence_threshold": 5.0}, [2.0, 5.0, 5.1], 2),
        ({"patience": 9, "divergence_threshold": 5.0, "mode": "max"}, [9.0, 5.0, 4.9], 2),
        ({"patience": 2}, [5, 4, 3, 2, 1], None),
    ],
)
def test_stops_at_the_check_that_the_rules_name(make_trainer, arguments, values, expected):
    assert stopped_at(EarlyStopping("val/loss", **arguments), make_trainer(), values) == expected


def test_attributes_tell_what_happened(make_trainer):
    callback, trainer = EarlyStopping("val/loss", patience=2), make_trainer()
    stopped_at(callback, trainer, [3, 1, 2, 2])
    assert (callback.wait_count, callback.stopped_epoch, callback.best_score) == (2, 3, 1)
    assert callback.stopping_reason == trainer.stop_reason
    assert "val/loss" in trainer.stop_reason


def test_patience_does_not_run_while_min_epochs_blocks(make_trainer):
    # Epochs 0 to 3 are blocked: the first check that counts is that of the epoch that ends min_epochs.
    assert stopped_at(EarlyStopping("val/loss", patience=2), make_trainer(min_epochs=5), [1] * 9) == 5


def test_patience_does_not_run_while_min_steps_blocks(make_trainer):
    # Epochs of 4 steps: the check that ends epoch 2 is the first one with 10 steps behind it.
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
    ],
)
def test_the_default_checks_where_lightning_does(make_trainer, arguments, asked, checks):
    callback = EarlyStopping("val/loss", patience=9, check_on_train_epoch_end=asked)
    trainer = make_trainer(**arguments)
    trainer.start(callback)
    for _ in range(3):
        trainer.validate(callback, {"val/loss": 1.0})
    callback.on_train_epoch_end(trainer, trainer.module)
    assert callback.wait_count == checks - 1  # the first value is an improvement


def test_an_epoch_that_was_cut_short_before_its_validation_is_no_check(make_trainer):
    callback, trainer = EarlyStopping("val/loss", patience=1), make_trainer()
    trainer.start(callback)
    trainer.train_epoch(callback, val={"val/loss": 1.0})
    trainer.train_epoch(callback)
    assert callback.wait_count == 0 and not trainer.should_stop


def test_without_validation_a_missing_metric_is_an_error_at_the_end_of_the_epoch(make_trainer):
    callback = EarlyStopping("val/loss", check_on_train_epoch_end=False)
    trainer = make_trainer(num_val_batches=[])
    trainer.start(callback)
    with pytest.raises(JaxlitError, match="val/loss.*Logged: nothing"):
        trainer.train_epoch(callback)


def test_a_second_fit_counts_from_zero(make_trainer):
    callback = EarlyStopping("val/loss", patience=2)
    assert stopped_at(callback, make_trainer(), [1, 2, 2]) == 2
    assert stopped_at(callback, make_trainer(), [5, 4, 3]) is None
    assert callback.stopping_reason is None


def test_sanity_checking_is_no_check(make_trainer):
    callback, trainer = EarlyStopping("val/loss"), make_trainer(sanity_checking=True)
    trainer.start(callback)
    trainer.validate(callback, {"val/loss": math.nan})
    assert not trainer.should_stop


def test_a_validation_outside_fit_is_no_check(make_trainer):
    callback, trainer = EarlyStopping("val/loss"), make_trainer()
    callback.setup(trainer, trainer.module, "validate")
    trainer.validate(callback, {"val/loss": math.nan})
    assert not trainer.should_stop


def test_check_on_train_epoch_end_leaves_validations_alone(make_trainer):
    callback = EarlyStopping("train/loss", patience=1, check_on_train_epoch_end=True)
    trainer = make_trainer()
    trainer.start(callback)
    trainer.callback_metrics.values_of["train/loss"] = 1.0
    for _ in range(3):
        trainer.validate(callback, {})
    assert callback.best_score == math.inf
    trainer.train_epoch(callback)
    trainer.train_epoch(callback)
    assert trainer.should_stop


def test_a_missing_metric_is_an_error_that_lists_the_known_ones(make_trainer):
    callback, trainer = EarlyStopping("val/los"), make_trainer()
    trainer.start(callback)
    with pytest.raises(JaxlitError, match=r"val/los'.*val/loss.*train/loss, val/loss"):
        trainer.train_epoch(callback, val={"val/loss": 1.0, "train/loss": 1.0})


def test_a_missing_metric_is_passed_over_unless_strict(make_trainer):
    callback, trainer = EarlyStopping("val/los", strict=False), make_trainer()
    trainer.start(callback)
    trainer.train_epoch(callback, val={"val/loss": 1.0})
    assert not trainer.should_stop


@pytest.mark.parametrize("seen", [[], [3], [3, 2, 2]])
def test_state_goes_through_json_in_the_middle_of_a_run(make_trainer, seen):
    rest = [2, 2, 2, 2]
    first, trainer = EarlyStopping("val/loss", patience=3), make_trainer()
    assert stopped_at(first, trainer, seen) is None
    text = json.dumps(first.state_dict(), allow_nan=False)
    second = EarlyStopping("val/loss", patience=3)
    other = make_trainer()
    other.start(second)
    second.load_state_dict(json.loads(text))
    for value in rest:
        trainer.train_epoch(first, val={"val/loss": value})
        other.train_epoch(second, val={"val/loss": value})
        assert (first.wait_count, first.best_score) == (second.wait_count, second.best_score)
    assert other.should_stop == trainer.should_stop


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("monitor", "", "name"),
        ("monitor", 3, "name"),
        ("min_delta", -0.1, "at least 0"),
        ("min_delta", "0", "at least 0"),
        ("patience", -1, "at least 0"),
        ("patience", 1.5, "int"),
        ("patience", True, "int"),
        ("mode", "auto", "'min' or 'max'"),
        ("check_finite", 1, "True or False"),
        ("check_on_train_epoch_end", 1, "True, False or None"),
        ("strict", "no", "True or False"),
        ("stopping_threshold", "low", "number"),
        ("divergence_threshold", "high", "number"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name, value, allowed):
    arguments = {"monitor": "val/loss"} | {name: value}
    with pytest.raises(ArgumentError) as error:
        EarlyStopping(**arguments)
    assert name in str(error.value) and repr(value) in str(error.value) and allowed in str(error.value)


def test_it_sees_what_the_module_logs_at_the_end_of_an_epoch():
    assert jl.callbacks.EarlyStopping.runs_last
