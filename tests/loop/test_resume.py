"""A checkpoint brings everything back: training continues as if it had never stopped, bit by bit.

One that a hook asks for is written at the next safe point.
"""

from pathlib import Path
from typing import Any

import pytest
from kit.resume_model import SavesAt, assert_same, final, fit, journal, make_trainer
from kit.trainers import thinned

import jaxlit as jl

# The n-th call of a hook. An epoch has 23 batches, 8 optimizer steps, 3 validations of 3 and 2 batches.
WINDOW = ("on_train_batch_end", 32)  # after a window's first batch, and a row that is not read yet
EPOCHS = ("on_safe_point", 22)  # between two of them
OFTEN = {"fsdp": [WINDOW, EPOCHS]}
# Every hook once, in a training of one device, of global arrays or of replicas.
MORE = {
    "single": [
        EPOCHS,
        WINDOW,
        ("on_validation_batch_end", 18),  # the first batch of the second loader
        ("on_fit_start", 0),
        ("on_train_start", 0),
        ("on_train_batch_start", 25),
        ("on_train_batch_end", 45),
        ("on_validation_start", 2),
        ("on_validation_epoch_start", 3),
        ("on_validation_batch_start", 3),
        ("on_validation_end", 4),
        ("on_train_epoch_end", 0),
        ("on_train_end", 0),
    ],
    "fsdp": [("on_train_epoch_start", 1), ("on_validation_epoch_end", 5), ("on_safe_point", 6), ("on_fit_end", 0)],
    "pmap": [WINDOW, ("on_safe_point", 45)],
}
# Where no training is left to do.
LAST = [("on_train_batch_end", 45), ("on_safe_point", 45), ("on_train_end", 0), ("on_fit_end", 0)]
CASES = {mark: [(s, p) for s, places in by.items() for p in places] for mark, by in (("often", OFTEN), ("full", MORE))}
PLACES = CASES["often"] + CASES["full"]


def after(reference: list[Any], place: tuple[str, int], mark: int) -> list[Any]:
    """Return what a resume must do: what a training without a stop did after a place in its journal."""
    epoch, step = reference[mark - 1][1:3]
    begins = [["on_fit_start", epoch, step]]
    if place in LAST:
        return [*begins, reference[-1]]
    return [*begins, ["on_train_start", epoch, step], *without(reference[mark:], "on_fit_start", "on_train_start")]


def without(lines: list[Any], *hooks: str) -> list[Any]:
    return [line for line in lines if line[0] not in hooks]


def assert_same_training(result: list[Any], wanted: list[Any]) -> None:
    """Compare hooks with hooks and rows with rows: a checkpoint logs the newest row, which else comes a step later."""
    for rows in (True, False):
        parts = [[x[3:] if rows else x for x in lines if (x[0] == "on_log") == rows] for lines in (result, wanted)]
        assert_same(*parts)


class Snapshots(SavesAt):
    """Notes also what there is in the state where checkpoints are taken."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.states: dict[tuple[str, int], dict[str, Any]] = {}

    def on_save_checkpoint(self, trainer: jl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        before = len(self.marks)
        super().on_save_checkpoint(trainer, module, checkpoint)
        if len(self.marks) > before:
            self.states[list(self.marks)[-1]] = final(trainer)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the journal and the end of a training without a stop, and its saver, made once for each strategy."""
    done: dict[str, Any] = {}

    def get(strategy: str) -> Any:
        if strategy not in done:
            folder = tmp_path_factory.mktemp(strategy)
            saver = Snapshots(folder / "kept", [place for name, place in PLACES if name == strategy])
            trainer = fit(make_trainer(strategy, folder / "run", [saver], logger=False))
            assert set(saver.marks) == saver.places
            done[strategy] = (journal(trainer), final(trainer), saver)
        return done[strategy]

    return get


@pytest.mark.full
def test_saving_does_not_change_training(trained: Any, tmp_path: Path) -> None:
    lines, end, _ = trained("single")
    plain = fit(make_trainer("single", tmp_path / "plain", logger=False))
    assert_same_training(journal(plain), lines)
    assert final(plain) == end


@pytest.mark.parametrize(
    ("strategy", "place"),
    thinned(PLACES, full=[*CASES["often"], *CASES["full"][::6]]),
    ids=lambda x: x if isinstance(x, str) else f"{x[0]}-{x[1]}",
)
def test_resume_from_a_checkpoint_of_any_hook_is_exact(
    strategy: str, place: tuple[str, int], trained: Any, tmp_path: Path
) -> None:
    lines, end, saver = trained(strategy)
    resumed = fit(make_trainer(strategy, tmp_path / "run", logger=False), ckpt_path=saver.path(place))
    assert_same_training(journal(resumed), after(lines, place, saver.marks[place]))
    assert final(resumed) == end


@pytest.mark.full
@pytest.mark.smoke
def test_resuming_twice_from_one_checkpoint_gives_the_same(trained: Any, tmp_path: Path) -> None:
    _, end, saver = trained("fsdp")
    files = {path: path.read_bytes() for path in saver.path(WINDOW).rglob("*") if path.is_file()}
    for name in ("first", "second"):
        assert final(fit(make_trainer("fsdp", tmp_path / name, logger=False), ckpt_path=saver.path(WINDOW))) == end
    assert files == {path: path.read_bytes() for path in saver.path(WINDOW).rglob("*") if path.is_file()}
