"""What a callback holds after a training that was cut and resumed is what it holds after one that was not."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from kit.batches import numbered
from kit.every_callback import KINDS, MADE, Model
from kit.trainers import BARE, make_trainer, thinned

import jaxlit as jl

BATCHES = 6
BOUND_TO_THE_RUN = {
    "Timer": r'"(total|begun|fit|train)[^,}]*',  # seconds of a clock
    "WandbLogger": r'"id": "[^"]*"|"(elapsed|runtime)[^,}]*',
}


def train(name: str, folder: str, *stops: int) -> tuple[Any, Any, Any]:
    for steps in stops:
        callback, model = MADE[name](), Model()
        given = BARE | {"default_root_dir": folder, "enable_checkpointing": True, "log_every_n_steps": 2}
        given |= {KINDS[name]: True} if name in KINDS else {}
        saver = jl.ModelCheckpoint(every_n_train_steps=1)
        trainer = make_trainer(callback, saver, **given, resume="auto", max_epochs=2, max_steps=steps)
        trainer.fit(model, numbered(BATCHES), numbered(1))
    keeps = type(callback).init_arrays is not jl.Callback.init_arrays
    arrays = jax.tree.leaves(trainer.callback_arrays(callback)) if keeps else []
    # Without what belongs to a folder or a clock.
    state = json.dumps(callback.state_dict(), sort_keys=True).replace("whole", "RUN").replace("cut", "RUN")
    told = re.sub(BOUND_TO_THE_RUN.get(name, "$^"), "", state)
    return told, [np.asarray(x) for x in arrays], np.asarray(model.w[...])


# Where a training was cut a ModelCheckpoint has saved once more.
KEEPING = [name for name in MADE if name != "ModelCheckpoint"]


SELDOM = ["EMA", "ThroughputMonitor", "CSVLogger", "ReduceLROnPlateau", "WandbLogger", "WeightAveraging"]


@pytest.mark.parametrize("name", thinned(KEEPING, "EarlyStopping", full=SELDOM))
def test_a_callback_goes_on_where_it_stood(name: str) -> None:
    whole, cut = train(name, "whole", -1), train(name, "cut", 4, -1)
    assert whole[0] == cut[0]
    assert all((a == b).all() for a, b in zip(whole[1], cut[1], strict=True)) and (whole[2] == cut[2]).all()
    assert Path("cut").exists()
