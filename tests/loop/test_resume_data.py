"""Resumed data: every kind of loader continues after the last batch that a step has used; and after SIGKILL."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.batches import Stream, counted, rows_of
from kit.grain_rows import BATCH, ROWS, data_loader, shuffled
from kit.journal import hooks
from kit.modules import Mean
from kit.resume_model import STEPS_PER_EPOCH, RaisesAt, Stopped
from kit.resume_runs import ended, problems_of, start_child
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


EPOCHS = 4  # of 8 optimizer steps
# The hook that kills changes from step to step. In `on_train_batch_start` a checkpoint may just be being written.
KILLS = ("on_train_batch_end", "on_safe_point", "on_validation_batch_end", "on_log", "on_train_batch_start")
KILLS += ("on_validation_end", "on_safe_point", "on_train_epoch_end", "on_validation_start")
STEPS = range(1, EPOCHS * STEPS_PER_EPOCH + 1)
KILLED = [("fsdp", [14]), ("fsdp", STEPS), *((strategy, STEPS[4::5]) for strategy in ("single", "ddp", "pmap"))]


@pytest.mark.parametrize(("strategy", "steps"), thinned(KILLED, full=KILLED[:1]))
def test_killed_training_goes_on_exactly(strategy: str, steps: Sequence[int], tmp_path: Path) -> None:
    whole, lost = tmp_path / "whole", 0
    code, output = ended(start_child(whole, 0, strategy, epochs=EPOCHS, every=5))
    assert code == 0, output
    for step in steps:
        # After the last step there is no validation.
        hook = "on_train_epoch_end" if step == STEPS[-1] else KILLS[step % len(KILLS)]
        # Every third training is killed before as well, where no checkpoint may be there yet.
        kills = [("on_log", step // 2)] * (step % 3 == 1) + [(hook, step)]
        folder = tmp_path / str(step)
        for number, kill in enumerate([*kills, None]):
            child = start_child(folder, number, strategy, epochs=EPOCHS, every=(5, 1, 3)[step % 3], kill=kill)
            code, output = ended(child)
            assert code == (-signal.SIGKILL if kill else 0), output
        result = problems_of(folder, whole, len(kills) + 1)
        lost += result.pop("lost")
        assert not result, f"step {step}, {hook}"
    assert lost > 0  # something was done again, so the kills came where they should
