"""Checkpoints of several real processes: exact where as many go on, and fit for another number of them."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from distributed.test_processes import Again, Net, rows
from flax import nnx
from kit.inside import position_of
from kit.processes import launch, say

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint
from jaxlit.distributed.exchange import fetch
from jaxlit.distributed.start import own_rows
from jaxlit.errors import CheckpointError, DataError

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
STRATEGIES = ("ddp", "fsdp", "shard_map")
ROWS = 103


class SaveAt(jl.Callback):
    """Save where so many batches are done."""

    def __init__(self, batches: int, path: Path) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if position_of(trainer).total_batch_idx == self.batches:
            trainer.save_checkpoint(self.path)


def data() -> jl.ArrayLoader:
    return jl.ArrayLoader(rows(ROWS), 16, shuffle=True, seed=3)


def train(strategy: str, *callbacks: jl.Callback, loader: Any = None, **arguments: Any) -> list[np.ndarray]:
    """Train two epochs of seven batches, two to a step, and return the parameters."""
    given = {"max_epochs": 2, "accumulate_grad_batches": 2, "strategy": strategy, **QUIET, **arguments}
    trainer = jl.Trainer(callbacks=list(callbacks), **given)
    trainer.fit(Net(0.2, rngs=nnx.Rngs(0)), loader if loader is not None else data(), data())
    return [fetch(x) for x in jax.tree.leaves(trainer.state.params)]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


# What the processes do --------------------------------------------------------------------------------


def stop_and_go_on() -> None:
    for strategy in STRATEGIES:
        folder = Path("..") / "of_two" / strategy
        whole = train(strategy, SaveAt(10, folder / "window"), ModelCheckpoint(folder / "auto", every_n_train_steps=1))
        resumed = train(strategy, resume=folder / "window")  # one batch into a window of the second epoch
        say(strategy, same(whole, resumed))
        say(f"{strategy} weights", [float(np.abs(x, dtype=np.float64).sum()) for x in whole])


def meet_a_damaged_checkpoint() -> None:
    """Only one process sees the damage; both pass over it."""
    root = Path("..") / "of_two" / "ddp" / "auto"
    trainer = jl.Trainer(strategy="ddp", max_epochs=2, accumulate_grad_batches=2, **QUIET)
    trainer.fit(Net(0.2, rngs=nnx.Rngs(0)), data(), data(), ckpt_path=root)
    say("step", trainer.global_step)


def go_on_from_one() -> None:
    for strategy in STRATEGIES:
        weights = train(strategy, resume=Path("..") / "of_one" / strategy / "window")
        say(strategy, [float(np.abs(x, dtype=np.float64).sum()) for x in weights])
    try:
        train("ddp", resume=Path("..") / "of_one" / "own", loader=own_batches())
    except DataError as error:
        say("refused", str(error))


def own_batches() -> Again:
    """Return a loader of the user's own, which gives this process's rows."""
    batch = {key: x[:16] for key, x in rows(ROWS).items()}
    return Again(lambda: ({key: x[own_rows(16)] for key, x in batch.items()} for _ in range(7)))


# The tests --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Two processes with four devices each have trained, saved and gone on."""
    folder = tmp_path_factory.mktemp("of_two")
    ended = launch(stop_and_go_on, folder / "run")
    assert [x.code for x in ended] == [0, 0], ended[0].errors + ended[1].errors
    return folder / "of_two", [x.said for x in ended]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_as_many_processes_go_on_bit_by_bit_in_the_middle_of_a_window(
    of_two: tuple[Path, list[dict[str, Any]]], strategy: str
) -> None:
    assert [said[strategy] for said in of_two[1]] == [True, True]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_process_goes_on_where_two_stopped(of_two: tuple[Path, list[dict[str, Any]]], strategy: str) -> None:
    folder, said = of_two
    weights = train(strategy, resume=folder / strategy / "window")
    expected = said[0][f"{strategy} weights"]
    np.testing.assert_allclose([np.abs(x, dtype=np.float64).sum() for x in weights], expected, rtol=1e-6, atol=1e-6)
    again = train(strategy)  # never interrupted, in this process
    for x, y in zip(weights, again, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_two_processes_pass_over_a_damaged_checkpoint_together(of_two: tuple[Path, list[dict[str, Any]]]) -> None:
    folder = of_two[0] / "ddp" / "auto"
    (newest,) = [path for path in folder.iterdir() if path.name.startswith("step_")]
    twin = folder / "step_00000099"
    twin.mkdir()
    for path in newest.rglob("*"):
        if path.is_file():
            (twin / path.relative_to(newest)).parent.mkdir(parents=True, exist_ok=True)
            (twin / path.relative_to(newest)).write_bytes(path.read_bytes())
    state = twin / "state.json"
    state.write_bytes(state.read_bytes().replace(b"8", b"9", 1))
    ended = launch(meet_a_damaged_checkpoint, of_two[0].parent / "damaged")
    assert [x.code for x in ended] == [0, 0], ended[0].errors + ended[1].errors
    step = json.loads((newest / "state.json").read_text())["global_step"]
    assert [x.said["step"] for x in ended] == [step, step]
    assert all("step_00000099" in x.errors and "state.json is damaged" in x.errors for x in ended)


def test_two_processes_go_on_where_one_stopped_except_with_a_loader_that_only_it_knows(tmp_path: Path) -> None:
    expected = {}
    for strategy in STRATEGIES:
        weights = train(strategy, SaveAt(10, tmp_path / "of_one" / strategy / "window"))
        expected[strategy] = [float(np.abs(x, dtype=np.float64).sum()) for x in weights]
    train("ddp", SaveAt(3, tmp_path / "of_one" / "own"), loader=own_batches())
    ended = launch(go_on_from_one, tmp_path / "run")
    assert [x.code for x in ended] == [0, 0], ended[0].errors + ended[1].errors
    for x in ended:
        for strategy in STRATEGIES:
            np.testing.assert_allclose(x.said[strategy], expected[strategy], rtol=1e-6, atol=1e-6)
        assert "middle of an epoch in 1 process" in x.said["refused"] and "ArrayLoader" in x.said["refused"]


def test_a_checkpoint_that_one_process_cannot_begin_fails_in_both(tmp_path: Path) -> None:
    ended = launch(write_into_a_file, tmp_path / "run")
    assert [x.code for x in ended] == [0, 0], ended[0].errors + ended[1].errors
    assert all("No checkpoint can be written" in x.said["refused"] for x in ended)


def write_into_a_file() -> None:
    Path("taken").write_text("a file in the folder's place")
    try:
        train("ddp", ModelCheckpoint("taken"))
    except CheckpointError as error:
        say("refused", str(error))
