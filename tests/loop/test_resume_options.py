"""Training continues exactly whatever the Trainer is told, and however it has ended."""

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from kit import journal as kit_journal
from kit.batches import numbered
from kit.checkpoints import names
from kit.journal import at_batch, hooks
from kit.modules import Mean, module
from kit.resume_model import (
    BATCH_SIZE,
    RaisesAt,
    SavesAt,
    Stopped,
    assert_same,
    final,
    fit,
    journal,
    loaders,
    make_trainer,
)
from kit.resume_runs import cut_and_resume
from kit.trainers import fit as kit_fit
from kit.trainers import make_trainer as kit_trainer
from kit.trainers import thinned

import jaxlit as jl
from jaxlit.errors import CheckpointError


def training(lines: list[Any]) -> list[Any]:
    # A checkpoint logs the newest row, which else comes a step later: rows are compared in the file.
    return [line for line in lines if line[0] not in ("on_fit_start", "on_train_start", "on_safe_point", "on_log")]


def assert_is_the_end_of(resumed: list[Any], whole: list[Any], batches: int) -> None:
    """Check that a resume is what an uninterrupted training did after so many batches."""
    resumed, whole = training(resumed), training(whole)
    assert resumed
    assert next(line for line in resumed if line[0] == "on_train_batch_end")[4] == batches + 1
    assert_same(resumed, whole[-len(resumed) :])


def skip(trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
    return -1 if batch_idx == 17 else None  # in the middle of a window


PER_EPOCH: dict[str, Any] = {"val_check_interval": 1.0}
# Each of what may be told, two at a time.
OPTIONS: dict[str, dict[str, Any]] = {
    "no accumulation, few rows": {"accumulate_grad_batches": 1, "log_every_n_steps": 3},
    "validation at the end of epochs, bf16-mixed": PER_EPOCH
    | {"precision": "bf16-mixed", "stops": [("on_validation_batch_end", 6)]},
    "validation every second epoch, limit_train_batches": PER_EPOCH
    | {"check_val_every_n_epoch": 2, "limit_train_batches": 10, "max_epochs": 3, "stops": [("on_safe_point", 12)]},
    "validation across epochs, skipped rest of the epoch": {
        **{
            "check_val_every_n_epoch": None,
            "val_check_interval": 11,
            "more": lambda: [hooks(on_train_batch_start=skip)],
        },
        "stops": [("on_safe_point", 16), ("on_safe_point", 1)],
    },
    "overfit_batches": PER_EPOCH | {"overfit_batches": 5, "max_epochs": 6, "stops": [("on_safe_point", 16)]},
}


@pytest.mark.parametrize("option", thinned(OPTIONS, full=[*OPTIONS][2:4]))
def test_training_goes_on_exactly_with(option: str, tmp_path: Path) -> None:
    assert cut_and_resume(tmp_path, **OPTIONS[option]) == {"lost": 0}


@pytest.mark.full
def test_loss_scale_goes_on_where_it_was(tmp_path: Path) -> None:
    def data() -> Any:
        train, val = loaders()
        train.arrays["y"][5] = 1e4  # whose gradient is no number of 16 bits when it is scaled
        return jl.ArrayLoader(train.arrays, BATCH_SIZE, shuffle=True, seed=3), val

    scales: list[Any] = []
    look = hooks(on_fit_end=lambda t, m: scales.append((*np.asarray(t.state.loss_scale), t.global_step)))
    assert cut_and_resume(tmp_path, data, precision="16-mixed", more=lambda: [look]) == {"lost": 0}
    _, steps, all_steps = scales[0]
    assert 0 < steps < all_steps  # it was lowered on the way, and there were steps since


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> jl.Trainer:
    return fit(make_trainer("single", tmp_path_factory.mktemp("whole") / "run", max_epochs=2))


def csv(trainer: jl.Trainer) -> bytes:
    return (trainer.run_dir / "metrics.csv").read_bytes()


# The batches that are done when training is cut, the callbacks that cut it, and arguments.
CUTS: dict[str, tuple[int, Callable[[], list[jl.Callback]], dict[str, int]]] = {
    "before its first checkpoint": (
        0,
        lambda: [jl.callbacks.ModelCheckpoint(save_on_exception=False), RaisesAt("on_safe_point", 20)],
        {"max_epochs": 2},
    ),
    "by max_steps": (23 + 9, list, {"max_steps": 11}),
}


@pytest.mark.parametrize("cut", thinned(CUTS, full=CUTS))
def test_training_that_was_cut_goes_on_and_has_each_row_once(cut: str, whole: jl.Trainer, tmp_path: Path) -> None:
    done, callbacks, arguments = CUTS[cut]
    with contextlib.suppress(Stopped):
        fit(make_trainer("single", tmp_path / "run", callbacks(), enable_checkpointing=True, **arguments))
    last = fit(make_trainer("single", tmp_path / "run", name="last", max_epochs=2, resume="auto"), seed=int(done > 0))
    assert_is_the_end_of(journal(last), journal(whole), done)
    assert final(last) == final(whole) and csv(last) == csv(whole)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[jl.Trainer, dict[str, Path]]:
    """A training of one epoch with its checkpoints, also of its last hooks."""
    folder = tmp_path_factory.mktemp("finished")
    saver = SavesAt(folder / "kept", [("on_train_end", 0), ("on_fit_end", 0)])
    trainer = fit(make_trainer("single", folder / "run", [saver], max_epochs=1, enable_checkpointing=True))
    trainer.save_checkpoint(folder / "kept" / "after")
    assert trainer.checkpoint_callback is not None
    result = {"its own": Path(trainer.checkpoint_callback.last_model_path), "after fit": saver.folder / "after"}
    return trainer, result | {place[0]: saver.path(place) for place in saver.places}


def test_finished_training_resumed_changes_no_file(finished: Any) -> None:
    trainer, _ = finished
    look = lambda: {  # noqa: E731
        path: path.read_bytes()
        for path in trainer.run_dir.rglob("*")
        if path.is_file() and path.name not in ("again", ".lock", ".run-lock")
    }
    before = look()
    given: dict[str, Any] = {"max_epochs": 1, "resume": "auto", "enable_checkpointing": True}
    again = fit(make_trainer("single", trainer.run_dir, name="again", **given), seed=1)
    assert look() == before
    assert final(again) == final(trainer)


@pytest.mark.full
def test_training_that_ended_inside_an_epoch_keeps_its_last_rows(tmp_path: Path) -> None:
    """Its checkpoint is from before the end of the epoch, whose rows are written again."""
    given: dict[str, Any] = {"max_epochs": 2, "max_steps": 11, "enable_checkpointing": True}
    first = fit(make_trainer("single", tmp_path / "run", **given))
    rows, metrics = csv(first), dict(first.callback_metrics)
    again = fit(make_trainer("single", tmp_path / "run", name="again", resume="auto", **given), seed=1)
    assert csv(again) == rows and rows.count(b"\n10,") == 1
    assert dict(again.callback_metrics) == metrics
    assert final(again) == final(first)


def test_a_validation_that_was_cut_at_the_last_step_is_finished(tmp_path: Path) -> None:
    best = lambda: jl.callbacks.ModelCheckpoint(monitor="v")  # noqa: E731
    model = lambda: module(validation=lambda self, batch: self.log("v", jnp.mean(batch["x"])))  # noqa: E731
    given: dict[str, Any] = {"max_steps": 2, "val_check_interval": 2, "default_root_dir": tmp_path / "run"}
    cut = hooks(on_validation_batch_end=lambda t, *_: t.sanity_checking or signal.raise_signal(signal.SIGINT))
    trainer = kit_fit(model(), numbered(4), numbered(3), best(), cut, **given)
    assert trainer.interrupted and "v" not in trainer.callback_metrics
    trainer = kit_fit(model(), numbered(4), numbered(3), saver := best(), resume="auto", **given)
    assert trainer.global_step == 2 and saver.best_model_score == np.mean([1, 2, 3])


@pytest.mark.parametrize("name", thinned(("its own", "on_train_end", "on_fit_end", "after fit"), "its own", full=()))
def test_raising_max_epochs_continues(name: str, finished: Any, whole: jl.Trainer, tmp_path: Path) -> None:
    more = make_trainer("single", tmp_path / "more", max_epochs=2)
    fit(more, ckpt_path=finished[1][name])
    assert_is_the_end_of(journal(more), journal(whole), 23)
    assert final(more) == final(whole)


def mean_fit(train: Any, *callbacks: Any, **arguments: Any) -> tuple[jl.Trainer, list[int]]:
    watch = kit_journal.Journal()
    return kit_fit(Mean(), train, None, watch, *callbacks, **({"max_epochs": 2} | arguments)), watch.batches["train"]


SAVE = kit_journal.at_batch(4, lambda t, m: t.save_checkpoint("at") if t.current_epoch == 0 else None)


def test_an_epoch_beyond_the_new_limit_ends_after_a_resume() -> None:
    mean_fit(numbered(8), SAVE)
    trainer, batches = mean_fit(numbered(8), limit_train_batches=3, ckpt_path="at")
    assert batches == [1, 2, 3] and (trainer.global_step, trainer.current_epoch) == (5 + 3, 2)


def test_another_accumulation_is_refused_inside_a_window() -> None:
    trainer, _ = mean_fit(numbered(8), SAVE, accumulate_grad_batches=3)
    trainer.save_checkpoint("end")
    for accumulate in (1, 2):
        words = f"2 of 3 batches.*accumulate_grad_batches={accumulate}. Resume with 3"
        with pytest.raises(CheckpointError, match=words):
            mean_fit(numbered(8), accumulate_grad_batches=accumulate, ckpt_path="at")
    trainer, _ = mean_fit(numbered(8), accumulate_grad_batches=2, max_epochs=3, ckpt_path="end")
    assert trainer.global_step == 3 + 3 + 4


# Each epoch begins seven batches, the last of which ends it before its step.
COUNTS = {"on_train_epoch_start": 1, "on_train_batch_start": 7, "on_train_batch_end": 6, "on_train_epoch_end": 1}


def logs_and_raises(hook: str = "", call: int = -1) -> jl.Callback:
    """Return a callback that counts its calls in the metrics, and raises in one call of a hook, after it has logged."""
    calls = list[str]()

    def log(name: str, module: Any, *args: Any) -> int | None:
        module.log(name, 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        calls.append(name)
        if name == hook and calls.count(hook) == call + 1:
            raise Stopped
        return -1 if name == "on_train_batch_start" and args[-1] == 6 else None

    return hooks(**{name: lambda trainer, *args, name=name: log(name, *args) for name in COUNTS})


STOPS = [(f"on_train_{hook}", i) for hook in ("epoch_start", "epoch_end", "batch_start", "batch_end") for i in (0, 1)]
STOPS += [
    ("on_train_batch_start", 5),
    ("on_train_batch_end", 5),
    ("on_train_batch_end", 6),
    ("on_train_batch_start", 7),
]


@pytest.mark.parametrize("accumulate", thinned([1, 2], 2))
@pytest.mark.parametrize(("hook", "call"), thinned(STOPS, *STOPS[1::3]))
def test_what_hooks_log_counts_once_after_an_error_and_a_resume(hook: str, call: int, accumulate: int) -> None:
    given: Any = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "default_root_dir": "run", "resume": "auto"}
    with pytest.raises(Stopped):
        kit_fit(Mean(), numbered(8), None, logs_and_raises(hook, call), **given)
    trainer = kit_fit(Mean(), numbered(8), None, logs_and_raises(), **given)
    assert {name: value for name, value in trainer.callback_metrics.items() if name.startswith("on_")} == COUNTS


def test_a_checkpoint_requested_by_a_hook_is_written_if_training_raises() -> None:
    def save(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.save_checkpoint("requested")
            raise Stopped

    with pytest.raises(Stopped):
        kit_fit(Mean(), numbered(4), None, hooks(on_train_batch_end=save), enable_checkpointing=False)
    seen = list[int]()
    watch = hooks(on_train_batch_end=lambda trainer, module, outputs, batch, i: seen.append(i))
    kit_fit(Mean(), numbered(4), None, watch, ckpt_path="requested")
    assert seen == [3]


def test_a_requested_checkpoint_that_fails_is_a_note_on_the_error() -> None:
    Path("file").write_text("")
    save = hooks(on_train_batch_end=lambda t, *_: [t.save_checkpoint("file/mine"), kit_journal.raising(Stopped)()])
    with pytest.raises(Stopped) as raised:
        kit_fit(Mean(), numbered(2), None, save)
    assert any("had requested was not written: CheckpointError" in note for note in raised.value.__notes__)


def test_a_user_who_ends_training_at_once_is_told_of_requested_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    end = kit_journal.raising(KeyboardInterrupt)
    save = hooks(on_train_batch_end=lambda trainer, *_: [trainer.save_checkpoint("mine"), end()])
    with pytest.raises(KeyboardInterrupt):
        kit_fit(Mean(), numbered(2), None, save)
    assert not Path("mine").exists()
    assert "1 checkpoints that hooks had requested were not written: training ended at once." in caplog.text


def test_errors_of_rows_do_not_cost_the_checkpoint() -> None:
    given: Any = {"steps_per_execution": 4, "log_every_n_steps": 1, "default_root_dir": "run"}
    trainer = kit_trainer(hooks(on_log=kit_journal.raising(Stopped)), **given)
    with pytest.raises(Stopped):
        trainer.fit(Mean(), numbered(8))
    assert names() == [f"step_{trainer.global_step:08}"]


def test_loaders_are_opened_again_after_a_resume_inside_an_epoch() -> None:
    opened, given = list[int](), {"reload_dataloaders_every_n_epochs": 1}
    model = module(train_dataloader=lambda self: opened.append(self.trainer.current_epoch) or numbered(4))
    save = at_batch(2, lambda trainer, module: trainer.save_checkpoint("half"))
    kit_fit(model, None, None, save, max_epochs=2, **given)
    del opened[:]
    kit_fit(model, ckpt_path="half", max_epochs=3, **given)
    assert len(opened) == 2  # at the start, for the rest of the second epoch, and for the third
