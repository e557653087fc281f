"""When a checkpoint is written and which are on the disk after each save, against a model of the rule."""

import json
import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from kit.batches import numbered
from kit.checkpoints import names, state_of
from kit.inside import files
from kit.journal import hooks
from kit.modules import Mean, module
from kit.trainers import fit, make_trainer

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint, model_checkpoint
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError, LoggerError, NonFiniteError
from jaxlit.testing import Crash, faults

NAN, INF = math.nan, math.inf


class Scores(jl.Callback):
    """Log a scripted value at each validation, by the optimizer step, and note what is on the disk after each save.

    A save is over, and what it replaces is gone, when `ModelCheckpoint.finish` returns.
    """

    def __init__(self, scores: Sequence[float] = (), name: str = "score") -> None:
        self.scores, self.name, self.listings = scores, name, dict[int, list[str]]()

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.scores and not trainer.sanity_checking:
            self.log(self.name, self.scores[trainer.global_step - 1])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for callback in trainer.checkpoint_callbacks:
            callback.finish(trainer)
            self.listings[trainer.global_step] = listing(callback)


def listing(callback: Any) -> list[str]:
    path = callback.best_model_path or callback.last_model_path
    return sorted(path.name for path in Path(path).parent.glob("step_*"))


def train(
    callback: Any, scores: Sequence[float] = (), epochs: int | None = None, per_epoch: int = 1, **given: Any
) -> tuple[jl.Trainer, dict[int, list[str]]]:
    """Train, with a validation and so a score behind each epoch; returns the Trainer and the listings by step."""
    watch = Scores(scores)
    given = {"default_root_dir": "run", "max_epochs": epochs or len(scores) or 1} | given
    trainer = fit(Mean(), numbered(per_epoch), numbered(1) if scores else None, watch, callback, **given)
    watch.listings[trainer.global_step] = listing(callback)
    return trainer, watch.listings


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


@pytest.mark.parametrize(
    ("mode", "top_k", "save_last"),
    [
        *[("min", k, last) for k, last in [(0, True), (1, False), (2, True), (-1, True), (-1, False)]],
        *[("max", k, last) for k, last in [(1, True), (3, False)]],
    ],
)
def test_the_best_and_the_newest_are_on_the_disk_after_each_epoch(mode, top_k, save_last) -> None:
    scores = [3.0, 1.0, NAN, 2.0, 1.0, INF, -INF, 0.5, 4.0, 4.0, 2.0]
    callback = ModelCheckpoint(monitor="score", mode=mode, save_top_k=top_k, save_last=save_last)
    with faults("run") as seen:
        _, listings = train(callback, scores)
    expected, best = rule(scores, mode, top_k, save_last)
    for step, found in enumerate(expected, 1):
        assert listings[step] == found, f"after step {step}"
    assert kept(callback) == best
    found = (min if mode == "min" else max)(best.values(), default=None)
    first = next((k for k in best if best[k] == found), None)
    assert callback.best_model_score == found
    assert callback.best_model_path == ("" if first is None else str(Path("run/checkpoints", name(first)).absolute()))
    assert callback.last_model_path.endswith(expected[-1][-1])
    assert names() == expected[-1]  # nothing but checkpoints
    assert manifests(seen) == sorted({int(x[5:]) for listing in expected for x in listing}), "each is written once"


def test_without_a_monitor_the_newest_or_all_are_kept() -> None:
    for given, left in (({}, [3]), ({"save_top_k": 0}, [3]), ({"save_top_k": -1}, [1, 2, 3])):
        callback = ModelCheckpoint(f"kept{len(given)}{len(left)}", **given)
        train(callback, epochs=3)
        assert steps(listing(callback)) == left
        assert Path(callback.best_model_path).name == Path(callback.last_model_path).name == name(3)
        assert callback.best_model_score is None and callback.best_k_models == {}


def test_a_value_of_an_earlier_validation_does_not_score_a_later_step() -> None:
    callback = ModelCheckpoint(monitor="score", save_top_k=9, every_n_train_steps=1)
    scores = [NAN, 7.0, NAN, 6.0, NAN, 5.0]
    train(callback, scores, epochs=2, per_epoch=3, val_check_interval=2, check_val_every_n_epoch=None)
    assert kept(callback) == {2: 7.0, 4: 6.0, 6: 5.0}


def test_a_value_logged_by_the_module_at_the_epochs_end_is_known() -> None:
    late = module(on_train_epoch_end=lambda self: self.log("late", float(-self.global_step)))
    callback = ModelCheckpoint(monitor="late", save_top_k=2)
    fit(late, numbered(2), None, callback, default_root_dir="run", max_epochs=3)
    assert kept(callback) == {4: -4.0, 6: -6.0}


def test_a_monitor_that_nobody_logs_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(LoggerError, match=r"monitor='scor'.*Did you mean 'score'\?.*loss.*score"):
        train(ModelCheckpoint(monitor="scor"), [1.0, 2.0])


def test_the_last_finite_checkpoint_is_not_deleted_under_nan_policy_ignore() -> None:
    def poison(trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.w[...] = jnp.full(1, jnp.nan)

    given = {"default_root_dir": "run", "max_epochs": 3, "nan_policy": "ignore"}
    fit(Mean(), numbered(1), None, hooks(on_train_epoch_start=poison), ModelCheckpoint(every_n_epochs=1), **given)
    assert names() == [name(1), name(3)]
    assert float(Mean.load_from_checkpoint(f"run/checkpoints/{name(1)}").w[...][0]) == 0.5


def test_an_old_checkpoint_that_cannot_be_deleted_is_only_told_of(monkeypatch, caplog) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError("busy")

    monkeypatch.setattr(files, "remove", refuse)
    trainer, _ = train(ModelCheckpoint(every_n_epochs=1), epochs=2)
    assert trainer.global_step == 2 and names() == [name(1), name(2)]
    assert f"{name(1)} could not be deleted: busy" in caplog.text


@pytest.mark.parametrize("epochs", [2, 3])  # nothing is left to do, or an epoch
def test_an_old_checkpoint_that_a_crash_has_kept_is_deleted_after_the_resume(epochs) -> None:
    with faults("counted") as seen:
        train(ModelCheckpoint(every_n_epochs=1), epochs=2, default_root_dir="counted")
    at = next(i for i, (what, path) in enumerate(seen.operations, 1) if what == "os.rename" and "/step_" in path)
    with pytest.raises(Crash, match=f"os.rename .*{name(1)}"), faults("run", at=at):
        train(ModelCheckpoint(every_n_epochs=1), epochs=2)
    assert names() == [name(1), name(2)]
    train(ModelCheckpoint(every_n_epochs=1), epochs=epochs, resume="auto")
    assert names() == [name(epochs)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(model_checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


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
        ({"every_n_train_steps": 3, "every_n_epochs": 1}, {}, [3, 4, 6, 8, 9, 12]),
        ({"train_time_interval": timedelta(seconds=2.5)}, {}, [3, 6, 9, 12]),
        ({"train_time_interval": {"seconds": 5}, "every_n_epochs": 1}, {}, [4, 8, 12]),
        ({"train_time_interval": "00:00:00:01", "every_n_train_steps": 1, "every_n_epochs": 1}, {}, [*range(1, 13)]),
        ({"every_n_train_steps": 1}, {"accumulate_grad_batches": 2}, [1, 2, 3, 4, 5, 6]),
        ({"every_n_train_steps": 2}, {"max_steps": 7}, [2, 4, 6, 7]),
    ],
)
def test_one_checkpoint_is_written_for_each_place_however_many_triggers_ask_for_it(
    triggers, arguments, written, clock
) -> None:
    def tick(*_: Any) -> None:  # a batch takes a second
        clock[0] += 1.0

    callback = ModelCheckpoint(save_top_k=-1, **triggers)
    given = {"default_root_dir": "run", "max_epochs": 3} | arguments
    with faults("run") as seen:
        fit(Mean(), numbered(4), None, hooks(on_train_batch_end=tick), callback, **given)
    assert manifests(seen) == written == steps(listing(callback))


@pytest.mark.parametrize(("seconds", "written"), [(0.5, [1, 2, 3, 4, 5, 6]), (2.0, [1, 5, 6])])
def test_where_only_the_newest_is_kept_writing_takes_a_tenth_of_the_time_at_most(
    seconds, written, clock, monkeypatch
) -> None:
    """An epoch takes five seconds by the clock."""
    wait = model_checkpoint.Saving.wait

    def waited(self: Any) -> None:
        wait(self)
        self.seconds = seconds

    monkeypatch.setattr(model_checkpoint.Saving, "wait", waited)

    def tick(trainer: Any, module: Any) -> None:
        trainer.checkpoint_callback.finish(trainer)
        clock[0] += 5.0

    with faults("run") as seen:
        fit(Mean(), numbered(1), None, hooks(on_train_epoch_start=tick), default_root_dir="run", max_epochs=6)
    assert manifests(seen) == written


def test_nothing_is_deleted_before_the_newer_one_is_verified(monkeypatch) -> None:
    seen, verify = faults("run"), files.manifest.verify

    def noted(folder: Path, **arguments: Any) -> None:
        verify(folder, **arguments)
        seen.operations.append(("verified", str(folder)))

    monkeypatch.setattr(files.manifest, "verify", noted)
    with seen:
        train(ModelCheckpoint(monitor="score"), [1.0, 2.0, 3.0, 0.5])
    done: list[tuple[str, str]] = [(operation, Path(path).name) for operation, path in seen.operations]
    deleted = [i for i, (what, where) in enumerate(done) if what == "os.rename" and where.startswith("step_")]
    assert done[deleted[0]][1] == name(2) and sorted(done[i][1] for i in deleted[1:]) == [name(1), name(3)]
    for i, newer in zip(deleted, (3, 4, 4), strict=True):
        (put,) = [k for k, (what, where) in enumerate(done) if what == "os.rename" and f".tmp-{name(newer)}-" in where]
        # Its name, which is on the disk before it is looked at: then the older one goes.
        assert put < done.index(("jaxlit.fsync", "checkpoints"), put) < done.index(("verified", name(newer)), put) < i


@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
def test_a_checkpoint_that_does_not_verify_replaces_nothing(on_save_error, monkeypatch, caplog) -> None:
    verify = files.manifest.verify

    def refuse(folder: Path, **arguments: Any) -> None:
        verify(folder, **arguments)
        if folder.name == name(2):
            raise CheckpointError("the disk lies")

    monkeypatch.setattr(files.manifest, "verify", refuse)
    callback = ModelCheckpoint(monitor="score", on_save_error=on_save_error)
    if on_save_error == "raise":
        with pytest.raises(CheckpointError, match="the disk lies"):
            train(callback, [2.0, 1.0])
    else:
        train(callback, [2.0, 1.0, 3.0])
        assert "the disk lies" in caplog.text
    assert steps(callback.best_k_models) == [1]
    assert callback.last_model_path.endswith(name(1 if on_save_error == "raise" else 3))
    assert Path(callback.best_model_path, "MANIFEST.json").exists()


def test_a_step_whose_checkpoint_failed_has_another_try_where_training_ends(monkeypatch, caplog) -> None:
    left, write = [OSError(28, "No space left")], files.manifest.write

    def full_once(path: Path, data: bytes) -> None:
        if left and path.name == "state.json":
            raise left.pop()
        write(path, data)

    def again(trainer: Any, module: Any) -> None:
        trainer.checkpoint_callback.finish(trainer)
        trainer.checkpoint_callback.on_safe_point(trainer, module, False, True)

    monkeypatch.setattr(files.manifest, "write", full_once)
    callback = ModelCheckpoint(on_save_error="warn", every_n_epochs=1)
    fit(Mean(), numbered(1), None, hooks(on_train_end=again), callback, default_root_dir="run")
    assert "No space left" in caplog.text and names() == [name(1)]


@pytest.mark.parametrize(
    ("own", "off"),
    [(False, {"enable_checkpointing": False}), (False, {"fast_dev_run": 2}), (True, {"fast_dev_run": 1})],
)
def test_switched_off_nothing_is_written(own, off) -> None:
    trainer = fit(Mean(), numbered(2), None, *([ModelCheckpoint("own")] if own else []), default_root_dir="run", **off)
    assert trainer.checkpoint_callback is None
    assert list(Path().glob("**/step_*")) == [] and not Path("run/checkpoints").exists()


def test_a_module_that_brings_one_has_no_other_beside_it() -> None:
    mine = ModelCheckpoint(monitor="val")
    brings = module(configure_callbacks=lambda self: [mine])
    trainer = fit(brings, numbered(1), numbered(1), default_root_dir="run", max_epochs=2)
    assert [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)] == [mine]
    assert steps([mine.best_model_path]) == [2]  # the mean error falls


@pytest.mark.parametrize("where", ["a file", "denied", "held"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(where) -> None:
    began: list[int] = []
    savers, words = [ModelCheckpoint("taken")], "No checkpoint can be written in .*taken"
    if where == "a file":
        Path("taken").write_text("in the way")
    if where == "held":
        savers = [ModelCheckpoint(), ModelCheckpoint("run/checkpoints")]
        words = "Two ModelCheckpoints .*run/checkpoints"
    with faults("taken", at=1, kind="denied"), pytest.raises(CheckpointError, match=words):
        watch = hooks(on_train_batch_start=lambda *_: began.append(1))
        fit(Mean(), numbered(1), None, watch, *savers, default_root_dir="run")
    assert began == []


def test_a_step_that_was_not_finite_leaves_no_name_of_a_checkpoint() -> None:
    callback = ModelCheckpoint(every_n_train_steps=4)
    batches = numbered(8)
    batches[3]["x"][:] = NAN
    with pytest.raises(NonFiniteError):
        fit(Mean(), batches, None, callback, default_root_dir="run")
    assert callback.last_model_path == "" and names() == []


@pytest.mark.parametrize(("good", "expected"), [(1, []), (2, [name(1)])])  # the first is before training
def test_a_state_dict_that_raises_leaves_the_name_of_what_was_written(good, expected) -> None:
    class Raises(jl.Callback):
        count = 0

        def state_dict(self) -> dict[str, Any]:
            self.count += 1
            if self.count > good:
                raise ValueError("mine")
            return {}

    callback = ModelCheckpoint(on_save_error="warn", every_n_epochs=1)
    with pytest.raises(ValueError, match="mine"):
        fit(Mean(), numbered(1), None, Raises(), callback, default_root_dir="run", max_epochs=2)
    assert [Path(callback.last_model_path).name] * bool(expected) == expected == names()


@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
def test_a_name_that_is_too_long_for_the_disk(on_save_error, caplog) -> None:
    callback = ModelCheckpoint(filename="x" * 260, on_save_error=on_save_error)
    if on_save_error == "raise":
        with pytest.raises(CheckpointError, match="(?i)too long.*Give a shorter name"):
            train(callback, epochs=1)
    else:
        assert fit(Mean(), numbered(1), None, callback, default_root_dir="run").global_step == 1
        assert "too long" in caplog.text
    assert callback.last_model_path == "" and names() == []


def test_a_filename_is_a_suffix_with_the_metrics_that_it_names_and_found_by_a_resume() -> None:
    callback = ModelCheckpoint(filename="{epoch}-{val/loss:.3f}")
    fit(Mean(), numbered(1), numbered(1), Scores([0.12345], "val/loss"), callback, default_root_dir="run")
    assert listing(callback) == [f"{name(1)}-epoch=0-val_loss=0.123"]
    assert fit(Mean(), numbered(1), default_root_dir="run", resume="auto").global_step == 1
    with pytest.raises(CheckpointError, match=r"names 'scor', which was not logged\. Did you mean 'score'\?"):
        train(ModelCheckpoint(filename="{scor}"), [1.0], default_root_dir="other")


def test_a_second_fit_leaves_the_checkpoints_of_the_first_and_is_the_newest() -> None:
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


@pytest.mark.parametrize(
    ("mode", "cut"), [("min", {"max_epochs": 3}), ("max", {"max_steps": 8})], ids=["at an epoch's end", "in mid-epoch"]
)
def test_a_resumed_training_keeps_what_the_uninterrupted_one_keeps(mode, cut) -> None:
    by_epoch = [3.0, 1.0, 2.0, 0.5, 4.0, 2.5]
    scores = [by_epoch[step // 3] for step in range(18)]

    def run(folder: str, **limits: Any) -> Any:
        callback = ModelCheckpoint(monitor="score", mode=mode, save_top_k=2)
        train(callback, scores, per_epoch=3, **({"default_root_dir": folder, "max_epochs": 6} | limits))
        return callback

    whole = run("whole")
    run("parts", **cut)
    again = run("parts", resume="auto")
    assert listing(again) == listing(whole) and kept(again) == kept(whole)
    assert [*kept(again)] == [*kept(whole)]  # in the same order
    for path in ("best_model_path", "last_model_path"):
        assert Path(getattr(again, path)).name == Path(getattr(whole, path)).name


def test_what_was_seen_and_where_a_trigger_fired_come_back() -> None:
    """Behind a resume, the value of a validation before it scores no checkpoint, and a step has no second one."""
    given = {"check_val_every_n_epoch": None, "val_check_interval": 2, "default_root_dir": "run"}
    scores, make = (
        [NAN, 7.0, NAN, 6.0, NAN, 5.0],
        lambda: ModelCheckpoint(monitor="score", save_top_k=9, every_n_train_steps=1),
    )
    fit(Mean(), numbered(6), numbered(1), Scores(scores), make(), max_steps=4, **given)
    callback = make()
    with faults("run") as seen:
        fit(Mean(), numbered(6), numbered(1), Scores(scores), callback, max_steps=5, resume="auto", **given)
    assert kept(callback) == {2: 7.0, 4: 6.0} and manifests(seen) == [5]


def test_another_monitor_begins_without_the_scores_of_the_one_before() -> None:
    class Two(Mean):
        def validation_step(self, batch: Any) -> None:
            self.log("loss", 0.5 - self.global_step * 0.001)
            self.log("err", jnp.float32(0.05))  # less than any loss

    run = lambda monitor, epochs, **given: fit(  # noqa: E731
        Two(), numbered(1), numbered(1), monitor, default_root_dir="run", max_epochs=epochs, **given
    )
    run(ModelCheckpoint(monitor="err"), 2)
    callback = ModelCheckpoint(monitor="loss")
    run(callback, 4, resume="auto")
    assert kept(callback) == {4: pytest.approx(0.5 - 0.004, abs=1e-6)}


def test_two_with_two_folders_keep_each_its_own() -> None:
    make = lambda **given: (ModelCheckpoint(monitor="score"), ModelCheckpoint("often", save_top_k=-1, **given))  # noqa: E731
    best, often = make(every_n_train_steps=1)
    given: Any = {"default_root_dir": "run", "max_epochs": 2}
    trainer = fit(Mean(), numbered(2), numbered(1), Scores([0.0, 1.0, 0.0, 2.0]), best, often, **given)
    assert trainer.checkpoint_callbacks == [best, often] and trainer.checkpoint_callback is best
    assert steps(listing(best)) == [2, 4] and steps(listing(often)) == [1, 2, 3, 4]
    best, often = make()
    given |= {"max_epochs": 3, "resume": "auto"}
    fit(Mean(), numbered(2), numbered(1), best, often, Scores([0.0] * 6), **given)
    assert steps(listing(best)) == [6] and steps(listing(often)) == [1, 2, 3, 4, 6]
    assert kept(best) == {6: 0.0}


def test_the_state_names_checkpoints_by_their_names_and_those_that_are_gone_are_forgotten() -> None:
    callback = ModelCheckpoint(monitor="score", save_top_k=2)
    train(callback, [1.0, 2.0, 3.0])
    state = state_of(callback.last_model_path)["callbacks"]["ModelCheckpoint[score, min]"]
    assert state["best_k_models"] == [[name(1), 1.0], [name(2), 2.0]] and state["best_model"] == name(1)
    assert state["last_model"] == state["newest_finite"] == name(3) and state["replaced"] == []
    callback.load_state_dict(json.loads(json.dumps(state)) | {"best_k_models": [["gone", 0.0], [name(2), 2.0]]})
    assert kept(callback) == {2: 2.0}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dirpath": ""}, "dirpath.*got ''"),
        ({"filename": ""}, "filename.*got ''"),
        ({"filename": "{epoch:d"}, "filename=.*brace"),
        ({"monitor": ""}, "monitor.*got ''"),
        ({"mode": "auto"}, "mode.*'min' or 'max', got 'auto'"),
        ({"save_top_k": -2}, "save_top_k.*at least -1, got -2"),
        ({"save_top_k": True}, "save_top_k.*got True"),
        ({"save_top_k": 2}, "save_top_k=2.*without monitor"),
        ({"save_top_k": 0, "save_last": False}, "keeps nothing"),
        ({"save_last": "link"}, "save_last.*got 'link'"),
        ({"every_n_train_steps": 0}, "every_n_train_steps.*at least 1, got 0"),
        ({"every_n_train_steps": 2.5}, r"every_n_train_steps.*got 2\.5"),
        ({"every_n_epochs": 0}, "every_n_epochs.*at least 1, got 0"),
        ({"train_time_interval": 5}, "ModelCheckpoint.*train_time_interval.*got 5"),
        ({"train_time_interval": timedelta(seconds=-1)}, "ModelCheckpoint.*train_time_interval"),
        ({"train_time_interval": "soon"}, "ModelCheckpoint.*train_time_interval.*'soon'"),
        ({"save_on_exception": 1}, "save_on_exception.*got 1"),
        ({"on_save_error": "ignore"}, "on_save_error.*'raise' or 'warn', got 'ignore'"),
    ],
)
def test_an_argument_out_of_its_set_is_refused_by_name(arguments, match) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=match):
        ModelCheckpoint(**arguments)
