"""When a checkpoint is written and which are on the disk after each save, against a model of the rule."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from kit.batches import numbered
from kit.checkpoints import names
from kit.faults import Crash, faults
from kit.inside import files
from kit.journal import at_batch, hooks, raising
from kit.modules import Mean, module
from kit.refusals import fit_refuses, warnings_of
from kit.trainers import fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint, model_checkpoint
from jaxlit.checkpoints import places
from jaxlit.errors import CheckpointError, LoggerError, NonFiniteError

NAN, INF = math.nan, math.inf


class Scores(jl.Callback):
    """Log a scripted value at each validation, by the optimizer step, and note what is on the disk after each save.

    A save is over, and what it replaces is gone, when `ModelCheckpoint.finish` returns.
    """

    def __init__(self, scores: Sequence[float] = ()) -> None:
        self.scores, self.listings, self.written, self.savers = scores, dict[int, list[str]](), list[int](), list[Any]()

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.scores and not trainer.sanity_checking:
            self.log("score", self.scores[trainer.global_step - 1])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for callback in trainer.checkpoint_callbacks:
            callback.finish(trainer)
            self.listings[trainer.global_step] = listing(callback)


def listing(callback: Any) -> list[str]:
    path = callback.best_model_path or callback.last_model_path
    return sorted(path.name for path in Path(path).parent.glob("step_*"))


def train(
    *callbacks: Any, scores: Any = (), epochs: int | None = None, per_epoch: int = 1, model: Any = None, **given: Any
) -> Scores:
    """Train, with a validation and so a score after each epoch; returns what was written and left on the way."""
    watch = Scores(scores)
    given = {"default_root_dir": "run", "max_epochs": epochs or len(scores) or 1} | given
    with faults(".") as seen:
        val = numbered(1) if scores or model else None
        trainer = fit(model or Mean(), numbered(per_epoch), val, watch, *callbacks, **given)
    watch.savers = trainer.checkpoint_callbacks
    assert trainer.checkpoint_callback is (watch.savers[0] if watch.savers else None)
    if watch.savers:
        watch.listings[trainer.global_step] = listing(watch.savers[0])
    manifests = [path for operation, path in seen.operations if operation == "open" and "/.MANIFEST.json-" in path]
    watch.written = [int(path.rpartition("step_")[2][:8]) for path in manifests]
    return watch


def name(step: int) -> str:
    return f"step_{step:08d}"


def steps(paths: Any) -> list[int]:
    return sorted(int(Path(path).name[5:13]) for path in paths)


def kept(callback: Any) -> dict[int, float]:
    return {int(Path(k).name[5:13]): v for k, v in callback.best_k_models.items()}


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
        kept = range(1, step + 1) if top_k == -1 and save_last else {*best, newest} - {0}
        after.append(sorted(name(k) for k in kept))
    return after, best


@pytest.mark.parametrize(("mode", "top_k", "save_last"), [("min", 2, True), ("max", 3, False)])
def test_the_best_and_the_newest_are_on_disk_after_each_epoch(mode, top_k, save_last) -> None:
    scores = [3.0, 1.0, NAN, 2.0, 1.0, INF, -INF, 0.5, 4.0, 4.0, 2.0]
    callback = ModelCheckpoint(monitor="score", mode=mode, save_top_k=top_k, save_last=save_last)
    watch = train(callback, scores=scores)
    expected, best = rule(scores, mode, top_k, save_last)
    for step, result in enumerate(expected, 1):
        assert watch.listings[step] == result, f"after step {step}"
    assert kept(callback) == best
    first = (min if mode == "min" else max)(best, key=lambda k: best[k], default=None)  # the oldest of equal ones
    assert callback.best_model_score == (None if first is None else best[first])
    assert callback.best_model_path == ("" if first is None else str(Path("run/checkpoints", name(first)).absolute()))
    assert callback.last_model_path.endswith(expected[-1][-1])
    assert names() == expected[-1]  # nothing but checkpoints
    assert watch.written == sorted({int(x[5:]) for listing in expected for x in listing}), "each is written once"


@pytest.mark.parametrize(
    ("top_k", "every", "left"),
    [(-1, None, [1, 2, 3, 4, 5]), (1, None, [5]), (3, None, [3, 4, 5]), (2, 3, [3, 4, 5]), (1, 2, [2, 4, 5])],
)
def test_without_a_monitor_the_newest_or_all_are_kept(top_k, every, left) -> None:
    callback = ModelCheckpoint(save_top_k=top_k, keep_every_n_steps=every, every_n_epochs=1)
    train(callback, epochs=5)
    assert steps(listing(callback)) == left
    assert callback.best_model_path == callback.last_model_path == str(Path("run/checkpoints", name(5)).absolute())
    assert callback.best_model_score is None
    assert sorted(callback.best_k_models.values()) == ([5 - k for k in range(top_k)][::-1] if top_k > 1 else [])


def test_some_stay_for_ever_without_the_last_and_whatever_their_score() -> None:
    given: Any = {"save_last": False, "every_n_epochs": 1, "keep_every_n_steps": 2}
    callback = ModelCheckpoint(monitor="score", save_top_k=1, **given)
    train(callback, scores=[1.0, 2.0, 3.0, 4.0, 0.5], epochs=5)
    assert steps(listing(callback)) == [2, 4, 5] and kept(callback) == {5: 0.5}


def test_an_earlier_validation_does_not_score_a_later_step() -> None:
    make = lambda: ModelCheckpoint(monitor="score", save_top_k=9, every_n_train_steps=1)  # noqa: E731
    given: Any = {"scores": [NAN, 7.0, NAN, 6.0, NAN, 5.0], "val_check_interval": 2, "check_val_every_n_epoch": None}
    callback = make()
    train(callback, per_epoch=3, **given | {"epochs": 2, "default_root_dir": "other"})
    assert kept(callback) == {2: 7.0, 4: 6.0, 6: 5.0}
    train(make(), per_epoch=6, max_steps=4, **given)
    callback = make()
    # Nor has the step where a trigger fired a second one.
    assert train(callback, per_epoch=6, max_steps=5, resume="auto", **given).written == [5]
    assert kept(callback) == {2: 7.0, 4: 6.0}


def test_a_value_logged_by_the_module_at_the_epochs_end_is_known() -> None:
    late = module(on_train_epoch_end=lambda self: self.log("late", float(-self.global_step)))
    callback = ModelCheckpoint(monitor="late", save_top_k=2)
    train(callback, model=late, per_epoch=2, epochs=3)
    assert kept(callback) == {4: -4.0, 6: -6.0}


def test_an_unknown_metric_and_a_long_name_are_refused() -> None:
    with pytest.raises(LoggerError, match=r"monitor='scor'.*Did you mean 'score'\?.*loss.*score"):
        train(ModelCheckpoint(monitor="scor"), scores=[1.0, 2.0], default_root_dir="other")
    callback = ModelCheckpoint(filename="x" * 260)
    with pytest.raises(CheckpointError, match="(?i)too long.*Give a shorter name"):
        train(callback)
    assert callback.last_model_path == "" and names() == []


def test_the_last_finite_checkpoint_is_kept() -> None:
    poison = lambda t, m: t.current_epoch == 1 and m.w.set_value(jnp.full(1, NAN))  # noqa: E731
    train(hooks(on_train_epoch_start=poison), ModelCheckpoint(every_n_epochs=1), epochs=3, nan_policy="ignore")
    assert names() == [name(1), name(3)]
    assert float(Mean.load_from_checkpoint(f"run/checkpoints/{name(1)}").w[...][0]) == 0.5


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(monkeypatch, caplog) -> None:
    monkeypatch.setattr(files, "remove", raising(PermissionError, "busy"))
    train(ModelCheckpoint(every_n_epochs=1), epochs=2)
    assert names() == [name(1), name(2)] and f"{name(1)} could not be deleted: busy" in caplog.text


@pytest.mark.parametrize("epochs", thinned([2, 3], 2))  # nothing is left to do, or an epoch
def test_an_old_checkpoint_kept_by_a_crash_is_deleted_later(epochs) -> None:
    def run(folder: str, epochs: int = 2, **given: Any) -> None:
        saver = ModelCheckpoint(every_n_epochs=1)
        fit(Mean(), numbered(1), None, saver, default_root_dir=folder, max_epochs=epochs, **given)

    with faults("counted") as seen:
        run("counted")
    gone = ("os.remove", f"{name(1)}/MANIFEST.json")
    at = next(i for i, (what, path) in enumerate(seen.operations, 1) if what == gone[0] and path.endswith(gone[1]))
    with pytest.raises((Crash, CheckpointError), match=f"os.remove .*{gone[1]}|metrics"), faults("run", at=at):
        run("run")
    assert names() == [name(1), name(2)]
    run("run", epochs, resume="auto")
    assert names() == [name(epochs)]


WRITTEN = [
    ({}, {}, [4, 8, 12]),
    ({"every_n_epochs": 2}, {}, [8, 12]),
    ({"every_n_train_steps": 5}, {}, [5, 10, 12]),
    ({"every_n_train_steps": 3, "every_n_epochs": 1}, {}, [3, 4, 6, 8, 9, 12]),
    ({"train_time_interval": timedelta(seconds=2.5)}, {}, [3, 6, 9, 12]),
    ({"train_time_interval": {"seconds": 5}, "every_n_epochs": 1}, {}, [4, 8, 12]),
    ({"train_time_interval": "00:00:00:01", "every_n_train_steps": 1, "every_n_epochs": 1}, {}, [*range(1, 13)]),
    ({"every_n_train_steps": 1}, {"accumulate_grad_batches": 2}, [1, 2, 3, 4, 5, 6]),
    ({"every_n_train_steps": 2}, {"max_steps": 7}, [2, 4, 6, 7]),
    ({"train_time_interval": {"seconds": 0}}, {}, [*range(1, 13)]),
]


@pytest.mark.parametrize(("triggers", "arguments", "written"), thinned(WRITTEN, *WRITTEN[::3]))
def test_several_triggers_write_one_checkpoint_at_a_step(triggers, arguments, written, clock) -> None:
    tick = lambda *_: setattr(clock, "now", clock.now + 1.0)  # noqa: E731 - a batch takes a second
    callback = ModelCheckpoint(save_top_k=-1, **triggers)
    watch = train(hooks(on_train_batch_end=tick), callback, epochs=3, per_epoch=4, **arguments)
    assert watch.written == written == steps(listing(callback))


@pytest.mark.parametrize(("seconds", "written"), [(0.5, [1, 2, 3, 4, 5, 6]), (2.0, [1, 5, 6])])
def test_writing_takes_a_tenth_of_the_time_at_most(seconds, written, clock, monkeypatch) -> None:
    """An epoch takes five seconds by the clock."""
    wait = model_checkpoint.Saving.wait
    monkeypatch.setattr(model_checkpoint.Saving, "wait", lambda self: (wait(self), setattr(self, "seconds", seconds)))

    def tick(trainer: Any, module: Any) -> None:
        trainer.checkpoint_callback.finish(trainer)
        clock.now += 5.0

    assert train(hooks(on_train_epoch_start=tick), epochs=6).written == written


def test_nothing_is_deleted_before_the_newer_one_is_complete() -> None:
    saver, seen = ModelCheckpoint(monitor="score"), faults("run")
    with seen:
        fit(Mean(), numbered(1), numbered(1), Scores([1.0, 2.0, 3.0, 0.5]), saver, default_root_dir="run", max_epochs=4)
    done = [(operation, Path(path).parent.name, Path(path).name) for operation, path in seen.operations]
    deleted = [i for i, x in enumerate(done) if x[0] == "os.remove" and x[2] == "MANIFEST.json"]
    assert done[deleted[0]][1] == name(2) and sorted(done[i][1] for i in deleted[1:]) == [name(1), name(3)]
    for i, newer in zip(deleted, (3, 4, 4), strict=True):
        (put,) = [k for k, x in enumerate(done) if x[:2] == ("os.rename", name(newer)) and "MANIFEST" in x[2]]
        # Its name is on the disk: then the older one goes, before all of its files.
        assert put < done.index(("os.fsync", "run", "checkpoints"), put) < i
        assert i < min(k for k, x in enumerate(done) if x[:2] == ("shutil.rmtree", done[i][1]))


@pytest.mark.parametrize(("on_save_error", "last"), [("raise", 1), ("warn", 3)])
def test_a_checkpoint_that_cannot_be_written_replaces_nothing(on_save_error, last, monkeypatch, caplog) -> None:
    seal = files.seal

    def refuse(folder: Path, *arguments: Any) -> None:
        if folder.name == name(2):
            raise OSError("the disk lies")
        seal(folder, *arguments)

    monkeypatch.setattr(files, "seal", refuse)
    callback = ModelCheckpoint(monitor="score", on_save_error=on_save_error)
    with pytest.raises(CheckpointError, match="the disk lies") if last == 1 else nullcontext():
        train(callback, scores=[2.0, 1.0, 3.0])
    assert last == 1 or "the disk lies" in caplog.text
    assert steps(callback.best_k_models) == [1] and callback.last_model_path.endswith(name(last))
    assert Path(callback.best_model_path, "MANIFEST.json").exists()


def test_a_failed_checkpoint_is_tried_again_at_the_end(monkeypatch, caplog) -> None:
    left, write = [OSError(28, "No space left")], places.write

    def full_once(path: Path, data: bytes) -> None:
        if left and path.name == "state.json":
            raise left.pop()
        write(path, data)

    def again(trainer: Any, module: Any) -> None:
        trainer.checkpoint_callback.finish(trainer)
        trainer.checkpoint_callback.on_safe_point(trainer, module, False, True)

    monkeypatch.setattr(places, "write", full_once)
    callback = ModelCheckpoint(on_save_error="warn", every_n_epochs=1)
    train(hooks(on_train_end=again), callback)
    assert "No space left" in caplog.text and names() == [name(1)]


def test_a_module_that_brings_one_has_no_other_beside_it() -> None:
    mine = ModelCheckpoint(monitor="val")
    assert train(model=module(configure_callbacks=lambda self: [mine]), epochs=2).savers == [mine]


@pytest.mark.parametrize("where", ["a file", "denied", "held"])
def test_an_unwritable_folder_is_refused_before_the_first_step(where) -> None:
    savers, words = [ModelCheckpoint("taken")], "No checkpoint can be written in .*taken"
    if where == "a file":
        Path("taken").write_text("in the way")
    if where == "held":
        savers = [ModelCheckpoint(), ModelCheckpoint("run/checkpoints")]
        words = "Two ModelCheckpoints .*run/checkpoints"
    with faults("taken", at=1, kind="denied"):
        fit_refuses(CheckpointError, words, callbacks=savers, default_root_dir="run")


def test_a_checkpoint_due_after_a_bad_step_is_written_before() -> None:
    callback, batches = ModelCheckpoint(every_n_train_steps=4), numbered(8)
    batches[3]["x"][:] = NAN
    with pytest.raises(NonFiniteError):
        fit(Mean(), batches, None, callback, default_root_dir="run")
    assert Path(callback.last_model_path).name == "step_00000003" and names() == ["step_00000003"]


@pytest.mark.parametrize(("good", "expected"), [(1, []), (2, [name(1)])])  # the first is before training
def test_a_state_dict_that_raises_keeps_the_newest_name(good, expected) -> None:
    left = [{}] * good
    callback = ModelCheckpoint(on_save_error="warn", every_n_epochs=1)
    with pytest.raises(IndexError, match="pop from empty"):
        train(hooks(state_dict=left.pop), callback, epochs=2)
    assert [Path(callback.last_model_path).name] * bool(expected) == expected == names()


def test_a_filename_is_a_suffix_with_metrics() -> None:
    callback = ModelCheckpoint(filename="{epoch}-{score:.3f}")
    train(callback, scores=[0.12345])
    assert listing(callback) == [f"{name(1)}-epoch=0-score=0.123"]
    assert train(epochs=1, resume="auto").written == []
    slash = ModelCheckpoint("slash", "{a/b:.1f}")
    train(slash, hooks(on_train_epoch_end=lambda t, m: slash.log("a/b", 1.0)), default_root_dir="other")
    assert listing(slash) == [f"{name(1)}-a_b=1.0"]


def test_a_second_fit_keeps_the_checkpoints_of_the_first() -> None:
    callback = ModelCheckpoint()
    trainer = make_trainer(callback, default_root_dir="run", max_epochs=3)
    trainer.fit(Mean(), numbered(1))
    trainer.max_epochs = 1
    trainer.fit(Mean(), numbered(1))
    assert listing(callback) == [name(1), name(3)]
    trainer.fit(Mean(), numbered(1))
    assert listing(callback) == [name(1), f"{name(1)}-v1", name(3)]
    assert callback.last_model_path.endswith(f"{name(1)}-v1")
    trainer.max_epochs = 2
    trainer.fit(Mean(), numbered(1), ckpt_path="last")  # from the one that was written last, not of the largest step
    assert trainer.global_step == 2 and listing(callback) == [name(1), name(2), name(3)]


def test_a_resumed_training_keeps_the_same_checkpoints() -> None:
    by_epoch = [3.0, 1.0, 2.0, 0.5, 4.0, 2.5]

    def run(folder: str, **limits: Any) -> Any:
        callback = ModelCheckpoint(monitor="score", mode="max", save_top_k=2)
        scores = [by_epoch[step // 3] for step in range(18)]
        train(callback, scores=scores, epochs=6, per_epoch=3, default_root_dir=folder, **limits)
        return callback

    whole = run("whole")
    run("parts", max_steps=8)
    again = run("parts", resume="auto")
    assert listing(again) == listing(whole) and [*kept(again).items()] == [*kept(whole).items()], "in the same order"
    for path in ("best_model_path", "last_model_path"):
        assert Path(getattr(again, path)).name == Path(getattr(whole, path)).name


def test_another_monitor_begins_without_earlier_scores() -> None:
    first, other = ModelCheckpoint(monitor="loss"), ModelCheckpoint(monitor="score", save_top_k=2)
    train(first, scores=[1e9] * 2, epochs=2)  # any loss is less
    train(other, scores=[0.0, 0.0, 1e9, 2e9], resume="auto")
    assert kept(other) == {3: 1e9, 4: 2e9}


def test_two_with_two_folders_keep_each_its_own() -> None:
    make = lambda **given: (ModelCheckpoint(monitor="score"), ModelCheckpoint("often", save_top_k=-1, **given))  # noqa: E731
    best, often = make(every_n_train_steps=1)
    assert train(best, often, scores=[0.0, 1.0, 0.0, 2.0], per_epoch=2, epochs=2).savers == [best, often]
    assert steps(listing(best)) == [2, 4] and steps(listing(often)) == [1, 2, 3, 4]
    best, often = make()
    train(best, often, scores=[0.0] * 6, per_epoch=2, epochs=3, resume="auto")
    assert steps(listing(best)) == [6] and steps(listing(often)) == [1, 2, 3, 4, 6]
    assert kept(best) == {6: 0.0}


def test_a_stop_between_two_epochs_keeps_the_best_score() -> None:
    """The checkpoint of the first epoch's end is the best; where no batch was taken since it is not written again."""
    best = ModelCheckpoint(monitor="score")
    stop = hooks(on_train_epoch_start=lambda trainer, module: trainer.current_epoch and trainer.stop("here"))
    assert train(best, stop, scores=[1.0, 2.0, 3.0]).written == [1]
    assert kept(best) == {1: 1.0}
    more = ModelCheckpoint(monitor="score")
    train(more, scores=[1.0, 2.0, 3.0], resume="auto")
    assert kept(more) == {1: 1.0} and steps(listing(more)) == [1, 3]


@pytest.mark.parametrize("killed", [False, True])
def test_a_resume_from_one_of_two_lets_the_other_save_too(killed: bool) -> None:
    """The state of the second in the first one's checkpoint is that before its own checkpoint of that step."""
    scores = [4.0, 1.0, 3.0, 2.0]
    make = lambda: [ModelCheckpoint(monitor="score"), ModelCheckpoint("best", monitor="score", save_weights_only=True)]  # noqa: E731
    train(*make(), scores=scores, epochs=2)
    if killed:  # before the second had written it
        Path("best", name(2)).rename("lost")
    for epochs, left in ((2, [name(2)]), (4, [name(2), name(4)])):
        train(*(both := make()), scores=scores, epochs=epochs, resume="auto")
        assert kept(both[1]) == {2: 1.0}
        assert listing(both[1]) == left


def test_the_second_of_two_keeps_the_score_of_the_step_at_which_a_training_is_cut() -> None:
    given: Any = {"scores": [NAN, 3.0, NAN, 5.0], "per_epoch": 4, "val_check_interval": 2, "epochs": 9}
    make = lambda: [ModelCheckpoint(monitor="score"), ModelCheckpoint("best", monitor="score")]  # noqa: E731
    for _ in range(2):
        train(*(both := make()), **given, max_steps=2, resume="auto")
        assert kept(both[1]) == {2: 3.0}
    train(*(both := make()), **given, max_steps=4, resume="auto")
    assert kept(both[1]) == {2: 3.0} and steps(listing(both[1])) == [2, 4]


def test_a_checkpoint_that_is_written_again_does_not_compete_with_itself() -> None:
    """The second value of the same step is worse than the first, and still the best of all other steps."""
    best, scores = ModelCheckpoint(monitor="score"), iter([5.0, 1.0, 2.0])
    log = lambda self: self.log("score", next(scores))  # noqa: E731
    fail = lambda self: self.trainer.global_step == 2 and raising(ZeroDivisionError)()  # noqa: E731
    given = {"default_root_dir": "run", "max_epochs": 2, "num_sanity_val_steps": 0}
    with pytest.raises(ZeroDivisionError):
        fit(module(on_validation_epoch_end=log, on_validation_end=fail), numbered(1), numbered(1), best, **given)
    assert kept(best) == {2: 1.0}
    best = ModelCheckpoint(monitor="score")
    fit(module(on_train_epoch_end=log), numbered(1), numbered(1), best, **given, resume="auto")
    assert kept(best) == {2: 2.0}
    assert best.best_model_path.endswith(name(2))


def test_a_cut_training_does_not_score_its_weights_by_an_older_validation() -> None:
    """The value after the second of four batches is that of its checkpoint alone."""
    given: Any = {"scores": [NAN, 1.0, NAN, 5.0], "per_epoch": 4, "val_check_interval": 2}
    best, stop = ModelCheckpoint(monitor="score"), at_batch(2, lambda trainer, module: trainer.stop("here"))
    assert train(best, stop, **given, epochs=1, check_val_every_n_epoch=None).written == [2, 3]
    assert kept(best) == {2: 1.0}
    path, best = best.last_model_path, ModelCheckpoint(monitor="score")
    train(best, **given, epochs=1, check_val_every_n_epoch=None, resume=path)
    assert kept(best) == {2: 1.0}


@pytest.mark.parametrize("save_last", [True, False])
def test_validations_that_do_not_end_an_epoch_are_ranked(save_last: bool, caplog: Any) -> None:
    """An epoch of five batches that is validated after the second and the fourth, as 0.25 of 469 batches is."""
    best = ModelCheckpoint(monitor="score", save_last=save_last)
    train(best, scores=[5.0, 4.0, 3.0, 2.0, 1.0], per_epoch=5, epochs=1, val_check_interval=2)
    assert kept(best) == {4: 2.0}
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    ("every", "val_every", "scored", "warns"),
    [(3, 4, [12], False), (4, 4, [4, 8, 12], False), (2, 4, [4, 8, 12], False), (5, 4, [12], True)],
)
def test_best_is_ranked_by_values_of_its_own_step_alone(
    every: int, val_every: int, scored: list[int], warns: bool, caplog: Any
) -> None:
    """One epoch of 12 steps; the score after a step is its number, and so shows which weights a checkpoint has."""
    keeps = ModelCheckpoint(monitor="score", save_top_k=-1, every_n_train_steps=every, filename="{score:.0f}")
    train(keeps, scores=[float(x) for x in range(1, 13)], per_epoch=12, epochs=1, val_check_interval=val_every)
    assert kept(keeps) == {step: float(step) for step in scored}
    names = {Path(path).name for path in listing(keeps)}
    assert names == {f"{name(s)}-score={s if s in scored else 'nan'}" for s in {*range(every, 13, every), 12}}
    messages = [m for m in warnings_of(caplog) if "ModelCheckpoint" in m]
    assert [f"val_check_interval={val_every}" in m for m in messages] == [True] * warns


def test_a_value_that_a_batch_hook_logs_seldom_ranks_its_own_step() -> None:
    log = hooks(on_train_batch_end=lambda t, *_: t.global_step % 4 == 0 and saves.log("seen", float(t.global_step)))
    saves = ModelCheckpoint(monitor="seen", save_top_k=-1, every_n_train_steps=2)
    train(saves, log, per_epoch=8, epochs=1)
    assert kept(saves) == {4: 4.0, 8: 8.0}


@pytest.mark.parametrize("at", ["on_train_epoch_start", "on_train_end"])
def test_two_that_name_the_epoch_leave_no_folder_behind(at: str) -> None:
    """The second has not written when an error comes at an epoch's end; it then writes the name of that epoch."""
    make = lambda: [ModelCheckpoint("a", "{epoch}"), ModelCheckpoint("b", "{epoch}", every_n_train_steps=5)]  # noqa: E731
    given: Any = {"per_epoch": 2, "epochs": 2, "resume": "auto"}
    fail = hooks(**{at: lambda t, m: t.global_step and raising(ZeroDivisionError)()})
    with pytest.raises(ZeroDivisionError):
        train(*make(), fail, **given)
    train(*make(), **given)
    assert [sorted(path.name for path in Path(folder).glob("step_*")) for folder in "ab"] == [
        [f"{name(4)}-epoch=1"]
    ] * 2


def test_files_of_the_users_go_with_their_checkpoint_and_others_stay() -> None:
    def write(trainer: Any, module: Any, callback: Any, path: Path) -> None:
        (path / "files" / "deep").mkdir(parents=True)
        (path / "files" / "deep" / "norm.json").write_text(f"{trainer.global_step}")
        if trainer.global_step == 2:
            (path / "notes.txt").write_text("mine")

    train(hooks(on_checkpoint_saved=write), ModelCheckpoint(every_n_epochs=1), epochs=4)
    left = sorted(str(x.relative_to("run/checkpoints")) for x in Path("run/checkpoints").rglob("*") if x.suffix)
    kept = [x for x in left if "MANIFEST" not in x and "data-" not in x]
    assert kept == ["step_00000002/notes.txt", "step_00000004/files/deep/norm.json"]
    assert Path("run/checkpoints", kept[1]).read_text() == "4"
    resumed = fit(Mean(), numbered(1), max_epochs=5, default_root_dir="run", resume="auto")
    assert resumed.global_step == 5, "what is not in the manifest is never read"
