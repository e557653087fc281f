"""Which checkpoints are on the disk after each save, against a model of the rule."""

import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.callbacks import model_checkpoint
from jaxlit.checkpoints import manifest
from jaxlit.errors import CheckpointError, LoggerError

NAN, INF = math.nan, math.inf


class Line(jl.TrainModule):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(1))

    def training_step(self, batch: Any) -> Any:
        loss = jnp.mean((self.w[...] - batch["x"]) ** 2)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("seen", jnp.mean(batch["x"]))

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.25)


class Scores(jl.Callback):
    """Log a scripted value at each validation, by the optimizer step, and note what is on the disk after each save.

    A save is over, and what it replaces is gone, when `ModelCheckpoint.finish` returns.
    """

    def __init__(self, scores: Sequence[float] = (), name: str = "val") -> None:
        self.scores, self.name, self.listings = scores, name, {}

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.scores and not trainer.sanity_checking:
            self.log(self.name, self.scores[trainer.global_step - 1])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for callback in trainer.checkpoint_callbacks:
            callback.finish(trainer)
            self.listings[trainer.global_step] = listing(callback)


def listing(callback: Any) -> list[str]:
    return sorted(
        path.name for path in Path(callback.best_model_path or callback.last_model_path).parent.glob("step_*")
    )


def batches(count: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((2, 1), k, np.float32)} for k in range(1, count + 1)]


def trainer_of(callbacks: Any, **arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    given = {"strategy": "single", "enable_checkpointing": True, "default_root_dir": "run", **quiet, **arguments}
    return jl.Trainer(callbacks=callbacks, **given)


def fit(callback: Any, scores: Sequence[float], epochs: int | None = None, per_epoch: int = 1, **arguments: Any) -> Any:
    """Train, with a validation and so a score behind each epoch; returns the Trainer and the listings by step."""
    watch = Scores(scores)
    trainer = trainer_of([watch, callback], max_epochs=epochs or len(scores), **arguments)
    trainer.fit(Line(), batches(per_epoch), batches(1) if scores else None)
    watch.listings[trainer.global_step] = listing(callback)
    return trainer, watch.listings


def name(step: int) -> str:
    return f"step_{step:08d}"


def steps(paths: Any) -> list[int]:
    return sorted(int(Path(path).name[5:13]) for path in paths)


# Which are kept --------------------------------------------------------------------------------------


def rule(scores: Sequence[float], mode: str, top_k: int, save_last: bool) -> tuple[list[list[str]], dict[int, float]]:
    """What is on the disk after each epoch of one step, and the best at the end: the rule in a few lines."""
    sign = 1 if mode == "min" else -1
    best: dict[int, float] = {}
    newest, after = 0, []
    for step, score in enumerate(scores, 1):
        worst = max(best, key=lambda k: (sign * best[k], -k), default=0)  # of equal ones the oldest
        room = top_k == -1 or len(best) < top_k
        if math.isfinite(score) and (room or (top_k > 0 and sign * score < sign * best[worst])):
            best[step] = score
            if not room:
                del best[worst]
        if step in best or save_last or step == len(scores):  # where training ends, one is written
            newest = step
        after.append(sorted(name(k) for k in {*best, newest} - {0}))
    return after, best


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    ("top_k", "save_last"), [(0, True), (1, True), (1, False), (2, True), (3, True), (3, False), (-1, False)]
)
def test_the_best_and_the_newest_are_on_the_disk_after_each_epoch(mode: str, top_k: int, save_last: bool) -> None:
    scores = [3.0, 1.0, NAN, 2.0, 1.0, INF, -INF, 0.5, 4.0, 4.0, 2.0]
    callback = jl.callbacks.ModelCheckpoint(monitor="val", mode=mode, save_top_k=top_k, save_last=save_last)
    _, listings = fit(callback, scores)
    expected, best = rule(scores, mode, top_k, save_last)
    for step, names in enumerate(expected, 1):
        assert listings[step] == names, f"after step {step}"
    assert {int(Path(k).name[5:]): v for k, v in callback.best_k_models.items()} == best
    found = (min if mode == "min" else max)(best.values(), default=None)
    first = next((k for k in best if best[k] == found), None)
    assert callback.best_model_score == found
    assert callback.best_model_path == ("" if first is None else str(Path("run/checkpoints", name(first)).absolute()))
    assert callback.last_model_path.endswith(expected[-1][-1])
    # Nothing but checkpoints and the lock.
    assert {p.name for p in Path("run/checkpoints").iterdir()} - {".lock"} == set(expected[-1])


def test_all_are_kept_with_minus_one_also_those_whose_metric_is_not_finite() -> None:
    callback = jl.callbacks.ModelCheckpoint(monitor="val", save_top_k=-1)
    _, listings = fit(callback, [2.0, NAN, 1.0, INF, 3.0])
    assert listings[5] == [name(k) for k in range(1, 6)]


@pytest.mark.parametrize(("top_k", "kept"), [(-1, [1, 2, 3]), (0, [3]), (1, [3])])
def test_without_a_monitor_the_newest_or_all_are_kept(top_k: int, kept: list[int]) -> None:
    callback = jl.callbacks.ModelCheckpoint(save_top_k=top_k)
    _, listings = fit(callback, [], epochs=3)
    assert listings[3] == [name(k) for k in kept]
    assert callback.best_model_path == callback.last_model_path == str(Path("run/checkpoints", name(3)).absolute())
    assert callback.best_model_score is None and callback.best_k_models == {}


def test_a_metric_that_comes_every_second_epoch_scores_a_checkpoint_once() -> None:
    callback = jl.callbacks.ModelCheckpoint(monitor="val", save_top_k=3)
    fit(callback, [NAN, 5.0, NAN, 4.0, NAN], check_val_every_n_epoch=2)
    assert {int(Path(k).name[5:]): v for k, v in callback.best_k_models.items()} == {2: 5.0, 4: 4.0}
    assert listing(callback) == [name(2), name(4), name(5)]


def test_a_value_of_an_earlier_validation_does_not_score_a_later_step() -> None:
    callback = jl.callbacks.ModelCheckpoint(monitor="val", save_top_k=9, every_n_train_steps=1)
    scores = [NAN, 7.0, NAN, 6.0, NAN, 5.0]
    fit(callback, scores, epochs=2, per_epoch=3, val_check_interval=2, check_val_every_n_epoch=None)
    assert {int(Path(k).name[5:]): v for k, v in callback.best_k_models.items()} == {2: 7.0, 4: 6.0, 6: 5.0}


def test_a_value_logged_by_the_module_at_the_epochs_end_is_known() -> None:
    class Late(Line):
        def on_train_epoch_end(self) -> None:
            self.log("late", float(-self.global_step))

    callback = jl.callbacks.ModelCheckpoint(monitor="late", save_top_k=2)
    trainer_of([callback], max_epochs=3).fit(Late(), batches(2))
    assert {int(Path(k).name[5:]): v for k, v in callback.best_k_models.items()} == {4: -4.0, 6: -6.0}


def test_a_monitor_that_nobody_logs_is_refused_with_the_nearest_name() -> None:
    callback = jl.callbacks.ModelCheckpoint(monitor="vall")
    with pytest.raises(LoggerError, match=r"monitor='vall'.*Did you mean 'val'\?.*loss.*val"):
        fit(callback, [1.0, 2.0])


# When one is written ---------------------------------------------------------------------------------


def manifests(seen: Any) -> list[int]:
    """The steps of the checkpoints that were written, one for each manifest that was opened."""
    paths = [Path(path) for operation, path in seen.operations if operation == "open"]
    return [int(path.parent.name.split("step_")[1][:8]) for path in paths if path.name == "MANIFEST.json"]


@pytest.mark.parametrize(
    ("triggers", "arguments", "written"),
    [
        ({}, {}, [4, 8, 12]),
        ({"every_n_epochs": 2}, {}, [8, 12]),
        ({"every_n_train_steps": 5}, {}, [5, 10, 12]),
        ({"every_n_train_steps": 2}, {}, [2, 4, 6, 8, 10, 12]),
        ({"every_n_train_steps": 3, "every_n_epochs": 1}, {}, [3, 4, 6, 8, 9, 12]),
        ({"train_time_interval": timedelta(seconds=2.5)}, {}, [3, 6, 9, 12]),
        ({"train_time_interval": {"seconds": 5}, "every_n_epochs": 1}, {}, [4, 8, 12]),
        ({"train_time_interval": "00:00:00:01", "every_n_train_steps": 1, "every_n_epochs": 1}, {}, [*range(1, 13)]),
        ({"every_n_train_steps": 1}, {"accumulate_grad_batches": 2}, [1, 2, 3, 4, 5, 6]),
        ({"every_n_train_steps": 2}, {"max_steps": 7}, [2, 4, 6, 7]),
    ],
)
def test_one_checkpoint_is_written_for_each_place_however_many_triggers_ask_for_it(
    triggers: dict[str, Any], arguments: dict[str, Any], written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(model_checkpoint, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Tick(jl.Callback):  # a batch takes a second
        def on_train_batch_end(self, *_: Any) -> None:
            clock[0] += 1.0

    callback = jl.callbacks.ModelCheckpoint(save_top_k=-1, **triggers)
    with jl.testing.faults("run") as seen:
        trainer_of([Tick(), callback], max_epochs=3, **arguments).fit(Line(), batches(4))
    assert manifests(seen) == written
    assert steps(listing(callback)) == written


def test_top_k_and_last_are_one_write() -> None:
    callback = jl.callbacks.ModelCheckpoint(monitor="val", save_top_k=1, save_last=True, every_n_train_steps=1)
    with jl.testing.faults("run") as seen:
        fit(callback, [3.0, 2.0, 1.0])
    assert manifests(seen) == [1, 2, 3]
    assert callback.last_model_path == callback.best_model_path


def test_nothing_is_deleted_before_the_newer_one_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = jl.testing.faults("run")
    verify = manifest.verify

    def noted(folder: Path, **arguments: Any) -> None:
        verify(folder, **arguments)
        seen.operations.append(("verified", str(folder)))

    monkeypatch.setattr(manifest, "verify", noted)
    with seen:
        fit(jl.callbacks.ModelCheckpoint(monitor="val"), [1.0, 2.0, 3.0, 0.5])
    done: list[tuple[str, str]] = [(operation, Path(path).name) for operation, path in seen.operations]
    deleted = [i for i, (what, where) in enumerate(done) if what == "os.rename" and where.startswith("step_")]
    assert done[deleted[0]][1] == name(2) and sorted(done[i][1] for i in deleted[1:]) == [name(1), name(3)]
    for i, newer in zip(deleted, (3, 4, 4), strict=True):
        (put,) = [k for k, (what, where) in enumerate(done) if what == "os.rename" and f".tmp-{name(newer)}-" in where]
        # Its name, which is on the disk before it is looked at: then the older one goes.
        assert put < done.index(("jaxlit.fsync", "checkpoints"), put) < done.index(("verified", name(newer)), put) < i


@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
def test_a_checkpoint_that_does_not_verify_replaces_nothing(
    on_save_error: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    verify = manifest.verify

    def refuse(folder: Path, **arguments: Any) -> None:
        verify(folder, **arguments)
        if folder.name == name(2):
            raise CheckpointError("the disk lies")

    monkeypatch.setattr(manifest, "verify", refuse)
    callback = jl.callbacks.ModelCheckpoint(monitor="val", on_save_error=on_save_error)
    if on_save_error == "raise":
        with pytest.raises(CheckpointError, match="the disk lies"):
            fit(callback, [2.0, 1.0])
        assert steps(callback.best_k_models) == [1] and callback.last_model_path.endswith(name(1))
    else:
        fit(callback, [2.0, 1.0, 3.0])
        assert "the disk lies" in caplog.text
        assert steps(callback.best_k_models) == [1] and callback.last_model_path.endswith(name(3))
    assert Path(callback.best_model_path, "MANIFEST.json").exists()


# Names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filename", "suffix"),
    [
        (None, ""),
        ("{epoch}-{val/loss:.3f}", "-epoch=0-val_loss=0.123"),
        ("{step:04d}", "-step=0001"),
        ("best of/{epoch:02d} é", "-best_of_epoch=00_é"),
        ("../../up", "-.._.._up"),
        ("{val/loss:.1e}", "-val_loss=1.2e-01"),
    ],
)
def test_a_filename_is_a_suffix_with_the_metrics_that_it_names(filename: str | None, suffix: str) -> None:
    callback = jl.callbacks.ModelCheckpoint(filename=filename)
    trainer = trainer_of([Scores([0.12345], "val/loss"), callback], max_epochs=1)
    trainer.fit(Line(), batches(1), batches(1))
    assert listing(callback) == [name(1) + suffix]
    again = trainer_of([], max_epochs=1, resume="auto")
    again.fit(Line(), batches(1), batches(1))
    assert again.global_step == 1  # found by its name


def test_a_filename_with_a_metric_that_nobody_logs_names_the_nearest() -> None:
    callback = jl.callbacks.ModelCheckpoint(filename="{vall}")
    with pytest.raises(CheckpointError, match=r"names 'vall', which was not logged\. Did you mean 'val'\?"):
        fit(callback, [1.0])


def test_a_second_fit_leaves_the_checkpoints_of_the_first_and_is_the_newest() -> None:
    callback = jl.callbacks.ModelCheckpoint()
    trainer = trainer_of([callback], max_epochs=3)
    trainer.fit(Line(), batches(1))
    trainer.max_epochs = 1
    trainer.fit(Line(), batches(1))
    assert listing(callback) == [name(1), name(3)]
    trainer.fit(Line(), batches(1))
    assert listing(callback) == [name(1), name(1) + "-v1", name(3)]
    assert callback.last_model_path.endswith(name(1) + "-v1")
    trainer.max_epochs = 2
    trainer.fit(Line(), batches(1), ckpt_path="last")  # from the one that was written last, not from the largest step
    assert trainer.global_step == 2
    assert listing(callback) == [name(1), name(2), name(3)]


# A resume --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [{"max_epochs": 3}, {"max_steps": 8}], ids=["at an epoch's end", "in mid-epoch"])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_resumed_training_keeps_what_the_uninterrupted_one_keeps(mode: str, cut: dict[str, int]) -> None:
    by_epoch = [3.0, 1.0, 2.0, 0.5, 4.0, 2.5]
    scores = [by_epoch[step // 3] for step in range(18)]

    def train(folder: str, **limits: Any) -> Any:
        callback = jl.callbacks.ModelCheckpoint(monitor="val", mode=mode, save_top_k=2)
        limits = {"max_epochs": 6, **limits}
        trainer = trainer_of([Scores(scores), callback], default_root_dir=folder, **limits)
        trainer.fit(Line(), batches(3), batches(1))
        return callback

    whole = train("whole")
    train("parts", **cut)
    again = train("parts", resume="auto")
    assert listing(again) == listing(whole)
    named = lambda callback: [(Path(k).name, v) for k, v in callback.best_k_models.items()]  # noqa: E731
    assert named(again) == named(whole)
    assert Path(again.best_model_path).name == Path(whole.best_model_path).name
    assert Path(again.last_model_path).name == Path(whole.last_model_path).name


def test_two_with_two_folders_keep_each_its_own() -> None:
    best, often = (
        jl.callbacks.ModelCheckpoint(monitor="val"),
        jl.callbacks.ModelCheckpoint("often", every_n_train_steps=1, save_top_k=-1),
    )
    trainer = trainer_of([Scores([0.0, 1.0, 0.0, 2.0]), best, often], max_epochs=2)
    trainer.fit(Line(), batches(2), batches(1))
    assert trainer.checkpoint_callbacks == [best, often] and trainer.checkpoint_callback is best
    assert steps(listing(best)) == [2, 4] and steps(listing(often)) == [1, 2, 3, 4]
    best, often = jl.callbacks.ModelCheckpoint(monitor="val"), jl.callbacks.ModelCheckpoint("often", save_top_k=-1)
    again = trainer_of([best, often, Scores([0.0] * 6)], max_epochs=3, resume="auto")
    again.fit(Line(), batches(2), batches(1))
    assert steps(listing(best)) == [6] and steps(listing(often)) == [1, 2, 3, 4, 6]
    assert best.best_k_models == {str(Path("run/checkpoints", name(6)).absolute()): 0.0}
