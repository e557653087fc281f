"""Resumed data: every kind of loader continues after the last batch that a step has used; and after SIGKILL."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.batches import Stream, counted, rows_of
from kit.grain_rows import BATCH, ROWS, data_loader, shuffled
from kit.journal import hooks
from kit.modules import Mean
from kit.resume_model import RaisesAt, Stopped, make_trainer
from kit.resume_model import fit as fit_everything
from kit.resume_runs import ended, problems_of, start_child, write_final
from kit.trainers import fit, thinned

import jaxlit as jl

KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: counted(*[BATCH] * 5),
    "re-iterable": lambda: Stream(counted(*[BATCH] * 5)),
    "ArrayLoader": lambda: jl.ArrayLoader({"x": np.arange(ROWS, dtype=np.float32)[:, None]}, BATCH, shuffle=True),
    "MapDataset": lambda: shuffled().batch(BATCH),
    "IterDataset": lambda: shuffled().to_iter_dataset().batch(BATCH),
    "DataLoader": data_loader,
}
AHEAD = [*zip(KINDS, (0, 2, 2, 2, 0, 2), strict=True)]


@pytest.mark.parametrize(("kind", "prefetch"), thinned(AHEAD, ("IterDataset", 0), full=AHEAD[1::2]))
def test_loader_goes_on_behind_the_last_batch_that_was_used(kind: str, prefetch: int) -> None:
    def run(root: str, *callbacks: jl.Callback, **arguments: Any) -> tuple[list[int], bytes]:
        seen, module = list[int](), Mean()
        look = hooks(on_train_batch_end=lambda t, m, outputs, batch, idx: seen.extend(rows_of([batch])))
        given = {"default_root_dir": root, "max_epochs": 2, "prefetch": prefetch} | arguments
        try:
            fit(module, KINDS[kind](), None, look, *callbacks, **given)
        except Stopped:
            assert callbacks
        return seen, np.asarray(module.w[...]).tobytes()

    whole, expected = run("whole")
    # In the middle of an epoch; and where the second epoch would begin.
    (first, _), (second, _) = (run("cut", RaisesAt("on_safe_point", at), resume="auto") for at in (2, 1))
    last, result = run("cut", resume="auto")
    assert [len(part) for part in (first, second, last)] == [3 * BATCH, 2 * BATCH, ROWS]
    assert first + second + last == whole
    assert result == expected


# Killed by SIGKILL, and started again; tests/sweeps/resume.py kills at every step under every strategy.

EPOCHS, EVERY = 2, 2  # 16 optimizer steps
KILL = ("on_train_batch_start", 13)  # where a checkpoint may just be being written


@pytest.mark.full
def test_killed_training_goes_on_exactly(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    code, output = ended(start_child(killed, 0, "fsdp", epochs=EPOCHS, every=EVERY, kill=KILL))
    assert code == -signal.SIGKILL, output
    last = start_child(killed, 1, "fsdp", epochs=EPOCHS, every=EVERY)
    try:
        # In this process, and without checkpoints.
        reference = fit_everything(make_trainer("fsdp", whole, name="journal0", max_epochs=EPOCHS))
        write_final(reference, whole)
    finally:
        code, output = ended(last)
    assert code == 0, output
    result = problems_of(killed, whole, 2)
    assert result.pop("lost") > 0  # something was done again, so the kill came where it should
    assert not result
