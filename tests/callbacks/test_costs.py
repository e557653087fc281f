"""What callbacks cost a training: no value is read for them between rows, and a step pays a call or two."""

from typing import Any

import numpy as np
import pytest
from kit.batches import numbered
from kit.costs import calls_per_step, reads
from kit.every_callback import KINDS, MADE, Model
from kit.journal import hooks
from kit.trainers import BARE, make_trainer, thinned

import jaxlit as jl

PAID = {"Profiler": 2, "ThroughputMonitor": 2}


def trainer_with(name: str, *others: jl.Callback, log_every: int, **more: Any) -> jl.Trainer:
    made = [] if name == "none" else [MADE[name]()]
    # With prefetch="auto" a machine that is busy starts a thread, whose calls count as well.
    arguments = BARE | {"log_every_n_steps": log_every, "prefetch": 0} | ({KINDS[name]: True} if name in KINDS else {})
    return make_trainer(*others, *made, **arguments | more)


def calls(name: str) -> float:
    # Hooks that others have anyway, so that what the loop pays for having any is in both.
    nothing = lambda *_: None  # noqa: E731
    return calls_per_step(
        trainer_with(name, hooks(on_train_batch_end=nothing, on_safe_point=nothing), log_every=1000), Model()
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("bare"))
        return calls("none")


@pytest.mark.parametrize(
    "name", thinned(MADE, "DeviceStatsMonitor", "ProgressBar", "ThroughputMonitor", "Profiler", "RunReport")
)
def test_a_step_pays_for_a_callback_its_hook_and_no_more(name: str, bare: float) -> None:
    result = calls(name) - bare
    assert result < PAID.get(name, 0) + 0.5, result


@pytest.mark.parametrize(
    "name", thinned(MADE, "DeviceStatsMonitor", "ModelCheckpoint", "ThroughputMonitor", "Profiler", "RunReport")
)
def test_nothing_is_read_from_a_device_between_rows(name: str) -> None:
    """Rows are due after the batches 9 and 19, and read one step late; only there may anything be read."""
    at: list[int] = []
    with reads() as seen:
        count = hooks(on_train_batch_end=lambda *_: at.append(len(seen)))
        trainer = trainer_with(name, count, log_every=10, strategy="ddp")  # the counter sees arrays of several devices
        trainer.fit(Model(), numbered(30))
    assert {int(batch) for batch in np.flatnonzero(np.diff(at)) + 1} <= {11, 21}, np.diff(at)
    assert at[-1] > at[1], "the counter has seen nothing"
