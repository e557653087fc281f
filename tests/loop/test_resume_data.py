"""Resumed data: every kind of loader continues after the last batch that a step has used; and after SIGKILL."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from kit.batches import sized
from kit.by_hand import params_of
from kit.modules import Linear
from kit.resume_model import RaisesAt, Stopped, digest, make_trainer
from kit.resume_model import fit as fit_everything
from kit.resume_runs import ended, problems_of, start_child, write_final
from kit.trainers import fit, thinned

import jaxlit as jl

COUNT, BATCHES, BATCH_SIZE = 101, 13, 8  # rows and batches of an epoch, of which the last is a tail of five rows
(DATA,) = sized(COUNT)


class Again:
    """Begins again each time it is iterated, and tells nothing of where it is."""

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, COUNT, BATCH_SIZE):
            yield {name: x[start : start + BATCH_SIZE] for name, x in DATA.items()}


class KeepsState:
    """Shuffles again in each epoch, which it counts itself; it continues where its state says."""

    def __init__(self) -> None:
        self.epoch, self.next = 0, 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        if self.next == BATCHES:
            self.epoch, self.next = self.epoch + 1, 0
        order = np.random.default_rng(self.epoch).permutation(COUNT)
        while self.next < BATCHES:
            chosen = order[self.next * BATCH_SIZE : (self.next + 1) * BATCH_SIZE]
            self.next += 1
            yield {name: x[chosen] for name, x in DATA.items()}

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.next = state_dict["epoch"], state_dict["next"]


class Records:
    """Rows for a grain DataLoader."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return {name: x[index] for name, x in DATA.items()}

    def __repr__(self) -> str:
        return "Records()"


def map_dataset() -> Any:
    records = [{name: x[i] for name, x in DATA.items()} for i in range(COUNT)]
    return grain.MapDataset.source(records).seed(5).shuffle().batch(BATCH_SIZE)


def data_loader() -> Any:
    sampler = grain.samplers.IndexSampler(COUNT, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=5)
    batch = grain.transforms.Batch(BATCH_SIZE, drop_remainder=False)
    return grain.DataLoader(data_source=Records(), sampler=sampler, operations=[batch], worker_count=0)


KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: list(Again()),
    "re-iterable": Again,
    "loader with a state": KeepsState,
    "ArrayLoader": lambda: jl.ArrayLoader(DATA, BATCH_SIZE, shuffle=True),
    "MapDataset": map_dataset,
    "IterDataset": lambda: map_dataset().to_iter_dataset(),
    "DataLoader": data_loader,
}


class Seen(jl.Callback):
    """Keeps what each step was given, bit by bit."""

    def __init__(self) -> None:
        self.batches: list[str] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(digest(batch))


AHEAD = [*zip(KINDS, (0, 2, 2, 2, 2, 0, 2), strict=True)]


@pytest.mark.parametrize(("kind", "prefetch"), thinned(AHEAD, ("IterDataset", 0), full=AHEAD[1::2]))
def test_loader_goes_on_behind_the_last_batch_that_was_used(kind: str, prefetch: int) -> None:
    def run(root: str, *callbacks: jl.Callback, **arguments: Any) -> dict[str, np.ndarray]:
        given = {"default_root_dir": root, "max_epochs": 2, "prefetch": prefetch} | arguments
        module = Linear()
        fit(module, KINDS[kind](), None, *callbacks, **given)
        return params_of(module)

    whole, parts = Seen(), (Seen(), Seen(), Seen())
    expected = run("whole", whole)
    # In the middle of an epoch; and where the second epoch would begin.
    for part, at in zip(parts, (7, 4), strict=False):
        with pytest.raises(Stopped):
            run("cut", part, RaisesAt("on_safe_point", at), resume="auto")
    result = run("cut", parts[2], resume="auto")
    assert [len(part.batches) for part in parts] == [8, 5, 13]
    assert [batch for part in parts for batch in part.batches] == whole.batches
    assert {name: x.tobytes() for name, x in result.items()} == {name: x.tobytes() for name, x in expected.items()}


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
