"""The first batch of a loader is drawn before anything is compiled."""

import grain
import numpy as np
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.compiles import compiles
from kit.modules import Mean
from kit.refusals import refuses, warnings_of
from kit.trainers import fit, make_trainer

import jaxlit as jl
from jaxlit.errors import DataError

EMPTY = {
    "list": list,
    "tuple": tuple,
    "iterator": lambda: iter(()),
    "dropped": lambda: jl.ArrayLoader({"x": np.ones((3, 1), np.float32)}, 4, drop_remainder=True),
    "no rows": lambda: jl.ArrayLoader({"x": np.ones((0, 3), np.float32)}, 4),
    "grain": lambda: grain.MapDataset.source([{"x": np.float32(1)}] * 3).batch(4, drop_remainder=True),
    "grain stream": lambda: grain.MapDataset.source([]).batch(4).to_iter_dataset(),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_training_loader_is_refused_before_any_compile(name):
    trainer, module = make_trainer(), Mean()
    with compiles() as compiled:
        refuses(DataError, lambda: trainer.fit(module, EMPTY[name]()), r"Trainer\.fit\(train_dataloaders=.*no batch")
    assert compiled == []


def test_empty_validation_loaders_warn_once(caplog):
    module, empty = Mean(), [make() for name, make in EMPTY.items() if name != "tuple"]  # which in a list is a batch
    trainer = fit(module, numbered(2), [*empty, numbered(3)], max_epochs=3)
    told = warnings_of(caplog)
    assert len(told) == len(empty) and all("no batch" in message for message in told)
    assert all(f"val_dataloaders=...)[{k}]" in message for k, message in enumerate(told))
    assert float(module.w[0]) == pytest.approx(w := mean([[1], [2]] * 3), rel=1e-6)
    assert trainer.callback_metrics[f"val/dataloader_idx_{len(empty)}"] == pytest.approx(2 - w, rel=1e-5)


@pytest.mark.parametrize("argument", ["train", "val"])
def test_a_lazy_module_is_built_after_its_loaders_are_checked(argument):
    built, bad = [], [{"x": np.zeros((0, 4), np.float32)}]

    class Watched(Mean):
        def __init__(self):
            built.append(True)
            super().__init__()

    loaders = (bad, numbered(1)) if argument == "train" else (numbered(1), bad)
    refuses(DataError, lambda: fit(jl.lazy(Watched), *loaders), rf"{argument}_dataloaders.*0 rows")
    assert built == []


def test_a_single_sample_of_grain_in_place_of_a_batch_is_doubted(caplog):
    rows = grain.MapDataset.source([{"x": np.ones(4, np.float32), "y": np.float32(k)} for k in range(3)])
    fit(Mean(), rows)
    assert any("batch them, by .batch(32)" in message for message in warnings_of(caplog))
