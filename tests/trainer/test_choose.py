"""Which checkpoint a run begins with: `resume` and `ckpt_path`, by a word or a path."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from kit.batches import numbered
from kit.by_hand import mean
from kit.checkpoints import keep_all, names
from kit.journal import Journal, hooks
from kit.modules import Mean, module
from kit.refusals import refuses
from kit.trainers import fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError


class Line(Mean):
    """Its metrics and predictions are its weight, which tells its step: see `weight`."""

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.w[...][0])

    def test_step(self, batch: Any) -> None:
        self.log("test", self.w[...][0])

    def predict_step(self, batch: Any) -> Any:
        return self.w[...] + 0 * batch["x"][:, 0]


def weight(steps: int) -> float:
    return mean([[1.0]] * steps)


def train(root: Any = "run", epochs: int = 3, *callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    """Train epochs of one step each, and keep the checkpoint of each."""
    given = {"default_root_dir": root, "max_epochs": epochs} | arguments
    return fit(Line(), numbered(1), None, *(callbacks or (keep_all(),)), **given)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained") / "run"
    train(root)
    return root


@pytest.fixture
def run(trained: Path) -> Path:
    """A copy of a run of three epochs."""
    return Path(shutil.copytree(trained, "run"))


def at(step: int, root: Any = "run") -> Path:
    return Path(root, "checkpoints", f"step_{step:08d}")


def begins(root: Any = "other", epochs: int = 4, **arguments: Any) -> int:
    """Return the step at which a fit begins, with the weight of that step."""
    steps: list[int] = []

    def look(trainer: Any, module: Any) -> None:
        steps.append(trainer.global_step)
        assert float(module.w[...][0]) == weight(trainer.global_step)

    trainer = train(root, epochs, hooks(on_fit_start=look), **arguments)
    assert trainer.global_step == epochs and float(trainer.module.w[...][0]) == weight(epochs)  # type: ignore[union-attr]
    return steps[0]


@pytest.mark.parametrize("argument", thinned(["resume", "ckpt_path"], "ckpt_path"))
def test_a_checkpoint_or_a_run_can_be_named_by_its_path(argument, run) -> None:
    """Every way to write one is in checkpoints/test_files.py."""
    assert begins("a", **{argument: at(2)}) == 2
    assert begins("b", **{argument: f"{run}/"}) == 3
    with pytest.raises(CheckpointError, match=rf"{argument}=\.\.\.\): 'run/checkpoints/step_2' is .*step_00000003"):
        begins("c", **{argument: "run/checkpoints/step_2"})


def test_another_folder_gets_the_rest_and_the_resumed_run_stays_as_it_was(run) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert begins("other", 5, resume="run") == 3
    assert at(5, "other").exists()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_fit_without_a_folder_goes_on_in_the_run_that_it_resumes(run) -> None:
    trainer = train(None, 4, resume="run")
    assert trainer.run_dir.resolve() == run.resolve() and at(4).exists() and not Path("runs").exists()
    trainer = train(None, 5, ckpt_path="run")  # which only begins with it
    assert trainer.run_dir.parts[0] == "runs" and not at(5).exists()


@pytest.mark.parametrize("made", thinned([False, True], True))
def test_auto_in_an_empty_folder_begins_anew_and_says_so(made, capsys) -> None:
    if made:
        at(1).parent.mkdir(parents=True)
    assert begins("run", 1, resume="auto") == 0
    assert "resume: no checkpoint in run/checkpoints, starting from scratch" in capsys.readouterr().out
    assert begins("run", 2, resume="auto") == 1
    assert "resume: run/checkpoints/step_00000001 (step 1, epoch 1)" in capsys.readouterr().out


def test_last_and_best_are_those_of_the_callback_and_in_another_process_those_of_the_folder() -> None:
    scores = hooks(on_train_epoch_end=lambda t, m: scores.log("score", [3.0, 1.0, 2.0, 4.0, 5.0][t.global_step - 1]))
    make = lambda: make_trainer(  # noqa: E731
        scores, ModelCheckpoint(monitor="score"), default_root_dir="run", max_epochs=3
    )
    trainer = make()
    trainer.fit(Line(), numbered(1))
    for one in (trainer, make()):
        assert one.validate(Line(), numbered(1), ckpt_path="best") == [{"val": weight(2)}]
        assert one.validate(Line(), numbered(1), ckpt_path="last") == [{"val": weight(3)}]
    trainer.max_epochs = 4
    trainer.fit(Line(), numbered(1), ckpt_path="best")
    assert trainer.global_step == 4 and float(trainer.module.w[...][0]) == weight(4)  # type: ignore[union-attr]
    assert trainer.validate(Line(), numbered(1), ckpt_path="last") == [{"val": weight(4)}]


def test_best_is_the_word_though_a_folder_has_that_name_and_a_subclass_saved_it() -> None:
    class Mine(ModelCheckpoint):
        pass

    make = lambda: Mine("best", monitor="val", mode="min", save_top_k=2)  # noqa: E731
    fit(Line(), numbered(1), numbered(1), make(), default_root_dir="run", max_epochs=2)
    assert names("best") == ["step_00000001", "step_00000002"]
    trainer = make_trainer(make(), default_root_dir="run")
    assert trainer.validate(Line(), numbered(1), ckpt_path="best") == [{"val": weight(1)}]


@pytest.mark.parametrize(
    ("gone", "first"), thinned([("all", "one"), ("newest", "two"), ("newest", "one")], ("newest", "one"))
)
def test_auto_takes_the_checkpoint_that_has_seen_most_of_all_folders(gone, first) -> None:
    every = {"one": 3, "two": 2}
    order = [first, *({*every} - {first})]

    def train(journal: Journal, **arguments: Any) -> jl.Trainer:
        savers = [ModelCheckpoint(k, every_n_train_steps=every[k], save_top_k=-1) for k in order]
        return fit(Line(), numbered(4), None, *savers, journal, default_root_dir="run", **arguments)

    train(Journal())
    assert names("one") == [f"step_0000000{k}" for k in (3, 4)]
    shutil.rmtree("one/step_00000004")
    if gone == "all":
        shutil.rmtree("one")
    journal = Journal()
    assert train(journal, max_epochs=2, resume="auto").global_step == 8
    assert journal.batches["train"] == [1, 2, 3, 4]  # of the second epoch


def test_a_folder_without_one_that_verifies_is_passed_over_where_another_has_one(run, caplog) -> None:
    shutil.copytree(at(2), "two/step_00000002")
    for step in (1, 2, 3):
        (at(step) / "state.json").unlink()
    trainer = train("run", 3, keep_all(), keep_all(dirpath="two"), resume="auto")
    assert trainer.global_step == 3 and "None of the 3 checkpoints" in caplog.text


RUN = {"default_root_dir": "run"}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (RUN | {"resume": "run", "ckpt_path": "run"}, ArgumentError, "resume='run'.*ckpt_path='run'.*Leave one out"),
    ({"default_root_dir": None, "resume": "auto"}, ArgumentError, r"resume='auto'.*default_root_dir=\.\.\."),
    (RUN, ArgumentError, "default_root_dir='run'.*of another run.*resume='auto'"),
    (RUN | {"resume": "auto", "max_epochs": 2}, ArgumentError, r"max_epochs=2.*3 epochs.*step_00000003.*Raise"),
    ({"ckpt_path": "run", "max_epochs": 1}, ArgumentError, "max_epochs=1.*3 epochs.*Raise"),
    ({"ckpt_path": "last"}, CheckpointError, "'last' was asked for, and there is no checkpoint in .*other"),
    ({"ckpt_path": "best"}, CheckpointError, "'best' was asked for, and there is no checkpoint in .*other"),
    ({"resume": 3}, ArgumentTypeError, "resume.*'auto', a path or None, got 3"),
    ({"resume": ""}, ArgumentTypeError, "resume.*got ''"),
    ({"ckpt_path": 3}, ArgumentTypeError, r"Trainer\.fit\(ckpt_path=\.\.\.\) takes 'last', 'best' or a path, got 3"),
    (RUN | {"resume": "auto", "fast_dev_run": True}, ArgumentError, "resume='auto'.*fast_dev_run"),
    ({"strict": False}, ArgumentError, "strict=False.*ckpt_path"),
    ({"reset_optimizer": True}, ArgumentError, "reset_optimizer=True"),
    ({"ckpt_path": "run", "strict": 0}, ArgumentTypeError, "strict.*got 0"),
]


@pytest.mark.parametrize(("given", "error", "match"), REFUSED, ids=range(len(REFUSED)))
def test_what_names_no_checkpoint_is_refused_before_anything_runs(given, error, match, run) -> None:
    before = sorted(Path().rglob("*"))
    with pytest.raises(error, match=match):
        train(**({"default_root_dir": "other"} | given))
    assert sorted(Path().rglob("*")) == before


def test_evaluation_takes_the_weights_of_a_checkpoint_and_the_module_keeps_its_own(run) -> None:
    model, wide = Line(), module(base=Line, name="Wide", init=lambda self: setattr(self, "w", nnx.Param(np.zeros(2))))
    model.w[...] = np.full(1, 7.0, np.float32)
    trainer = make_trainer(default_root_dir="other", resume="nothing that a fit would find")
    assert trainer.validate(model, numbered(1), ckpt_path=at(2)) == [{"val": weight(2)}]
    assert trainer.test(model, numbered(1), ckpt_path=at(2)) == [{"test": weight(2)}]
    assert np.asarray(trainer.predict(model, numbered(1), ckpt_path=at(2))[0]).tolist() == [weight(2)] * 8
    assert float(model.w[...][0]) == 7.0
    refuses(CheckpointError, lambda: trainer.test(wide, numbered(1), ckpt_path="run"), "does not fit Wide")
    assert not Path("other/checkpoints").exists()


def test_a_relative_folder_stays_where_it_was_when_the_working_directory_changes() -> None:
    home = os.getcwd()

    def move(*_: Any) -> None:
        os.makedirs(f"{home}/sub", exist_ok=True)
        os.chdir(f"{home}/sub")

    train("run", 3, hooks(on_train_epoch_start=move), log_every_n_steps=1)
    os.chdir(home)
    assert list(Path("sub").iterdir()) == []
    assert names() == ["step_00000003"] and len(Path("run/metrics.csv").read_text().splitlines()) == 4
