"""What can be set on a Trainer holds from then on, and what a user writes between runs is used where it should be."""

import datetime
import itertools
from collections import UserDict, UserList
from typing import Any

import numpy as np
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.journal import at_batch, hooks
from kit.modules import Mean
from kit.refusals import refuses
from kit.trainers import fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError
from jaxlit.loop.settings import Arguments
from jaxlit.trainer.properties import TrainerProperties

COUNTS = ((2, 1, 3), (2, 4, None), (3, None, 2))  # batches of a step in each epoch; None leaves it as it is
FIELDS = [*Arguments.__annotations__]
FIXED = {"strategy", "devices", "mesh", "logger", "default_root_dir"} | {x for x in FIELDS if x.startswith("enable_")}

# Of each argument that can be set another value than a Trainer has.
OTHERS: dict[str, Any] = {"precision": "bf16-mixed", "nan_policy": "skip", "seed": 5, "host_keys": ("id",)}
OTHERS |= {"max_epochs": 3, "min_epochs": 1, "max_steps": 9, "min_steps": 2, "max_time": datetime.timedelta(hours=1)}
OTHERS |= {f"limit_{stage}_batches": 3 for stage in ("train", "val", "test", "predict")}
OTHERS |= {"overfit_batches": 2, "fast_dev_run": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 7, "resume": "kept"}
OTHERS |= {"val_check_interval": 2, "check_val_every_n_epoch": 2, "reload_dataloaders_every_n_epochs": 1}
OTHERS |= {"accumulate_grad_batches": 2, "gradient_clip_val": 2.0, "gradient_clip_algorithm": "value"}
OTHERS |= {"data_timeout": 3.0, "hang_timeout": 4.0, "fail_timeout": 5.0, "steps_per_execution": 4}
OTHERS |= {"prefetch": 0, "max_in_flight": 1, "max_recompiles": 3}
OTHERS |= {"callbacks": [jl.Callback()], "debug": True, "compile_cache": False}


def test_arguments_that_are_set_hold_for_the_next_run() -> None:
    trainer, model = make_trainer(fast_dev_run=2), Mean()
    trainer.fit(model, numbered(4))
    assert (trainer.max_epochs, trainer.max_steps, trainer.global_step) == (1, 2, 2)
    trainer.fast_dev_run, trainer.max_steps, trainer.max_epochs = 0, -1, 3
    trainer.fit(model, numbered(4))
    assert trainer.global_step == 12
    assert len(trainer.predict(model, numbered(4))) == 4
    trainer.limit_predict_batches, trainer.limit_train_batches = 3, 0.5
    assert len(trainer.predict(model, numbered(4))) == 3
    trainer.fit(model, numbered(4))
    assert trainer.global_step == 6


def test_every_argument_can_be_set_or_says_that_it_is_fixed() -> None:
    for name in FIELDS:
        trainer = jl.Trainer(max_epochs=1, gradient_clip_val=1.0)
        value = OTHERS.get(name)
        if name in FIXED:
            with pytest.raises(
                AttributeError, match=rf"^Trainer\.{name} is fixed when.*set to .*with Trainer\({name}="
            ):
                setattr(trainer, name, value)
            continue
        assert getattr(trainer, name) != value
        setattr(trainer, name, value)
        assert getattr(trainer, name) == value
        if name != "callbacks":  # which the Trainer itself has
            assert getattr(trainer.settings, name) == value


def test_every_property_is_documented_at_run_time() -> None:
    properties = {name: x for name, x in vars(TrainerProperties).items() if isinstance(x, property)}
    assert properties.keys() >= {*FIELDS}
    assert [name for name, x in properties.items() if not x.__doc__] == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_epoch", 3, r"Trainer has no attribute 'max_epoch'.*set to 3\. Did you mean .max_epochs.\?"),
        ("global_step", 3, r"Trainer\.global_step is a result of the runs, and would be set to 3\. Set an argument"),
        ("max_steps", -2, r"Trainer\(max_steps=\.\.\.\) takes an int of at least -1"),
        ("callbacks", [jl.Callback()] * 2, "the same Callback object twice"),
        ("callbacks", jl.Callback, "in a list, got <class"),
        ("callbacks", [3], r"takes callbacks .* in a list, got 3"),
    ],
)
def test_wrong_and_unknown_attributes_are_refused_when_set(name, value, words) -> None:
    trainer = make_trainer()
    before = list(trainer.callbacks)
    with pytest.raises((AttributeError, ValueError, TypeError), match=words):
        setattr(trainer, name, value)
    assert trainer.callbacks == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("callbacks", UserList([jl.EarlyStopping("val_loss")])),
        ("logger", UserList([jl.callbacks.CSVLogger()])),
        ("host_keys", UserList(["name"])),
        ("val_check_interval", UserDict(hours=1)),
        ("max_time", UserDict(hours=1)),
    ],
)
def test_sequences_and_mappings_of_a_config_are_taken(name, value) -> None:
    """Hydra passes OmegaConf's, which are no lists and dicts."""
    trainers = [jl.Trainer(max_epochs=1, strategy="single", **{name: x}) for x in (value, value.data)]
    seen = [[type(c) for c in trainer.callbacks] for trainer in trainers]
    assert seen[0] == seen[1]
    settings = [str(getattr(trainer.settings, name)) for trainer in trainers]
    assert settings[0] == settings[1]


def windows(*counts: int) -> jl.Callback:
    return hooks(on_train_epoch_start=lambda t, m: setattr(t, "accumulate_grad_batches", counts[t.current_epoch]))


def test_accumulation_can_be_switched_off_and_on_by_epoch() -> None:
    model = Mean()
    trainer = fit(model, numbered(4), None, windows(2, 1, 2), max_epochs=3, accumulate_grad_batches=2)
    pairs, single = [[1.0, 2.0], [3.0, 4.0]], [[float(k)] for k in (1, 2, 3, 4)]
    assert trainer.global_step == 8 and float(model.w[0]) == pytest.approx(mean([*pairs, *single, *pairs]), rel=1e-5)
    trainer = make_trainer(windows(1, 2, 2), max_epochs=3)
    words = r"is set to 2 in a fit that began with 1, whose state.*Begin with Trainer\(accumulate_grad_batches=2\)"
    refuses(ArgumentError, lambda: trainer.fit(Mean(), numbered(4)), words)
    assert (trainer.accumulate_grad_batches, trainer.global_step) == (1, 4)
    trainer.callbacks = None
    trainer.accumulate_grad_batches, trainer.max_epochs = 2, 1
    trainer.fit(Mean(), numbered(4))
    assert trainer.global_step == 2


CUTS = list(itertools.product((1, 2, 4), COUNTS))


@pytest.mark.parametrize(("batch", "counts"), thinned(CUTS, CUTS[4], full=[CUTS[0], CUTS[8]]))
def test_a_resume_keeps_an_accumulation_set_by_a_hook(counts: Any, batch: int) -> None:
    def train(folder: str, *callbacks: jl.Callback) -> Any:
        sets = lambda t, m: (n := counts[t.current_epoch]) and setattr(t, "accumulate_grad_batches", n)  # noqa: E731
        arguments = {"max_epochs": 3, "accumulate_grad_batches": 2, "default_root_dir": folder, "resume": "auto"}
        trainer = fit(Mean(), numbered(5), None, hooks(on_train_epoch_start=sets), *callbacks, **arguments)
        return trainer.global_step, trainer.accumulate_grad_batches, np.asarray(trainer.module.w[...])

    for epoch in (1, 2):
        train(
            "cut",
            at_batch(batch, lambda t, m, epoch=epoch: t.request_stop("enough") if t.current_epoch == epoch else None),
        )
    assert train("cut") == train("whole")
