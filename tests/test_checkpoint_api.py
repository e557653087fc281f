"""How a checkpoint is named, found and refused: `resume`, `ckpt_path`, `save_checkpoint`."""

import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError, JaxlitError

STEP = 0.25  # of SGD: a step takes half of the way to the batch's value


class Line(jl.TrainModule):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(1))

    def training_step(self, batch: Any) -> Any:
        loss = jnp.mean((self.w[...] - batch["x"]) ** 2)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.w[...][0] + 0 * jnp.mean(batch["x"]))

    def test_step(self, batch: Any) -> None:
        self.log("test", self.w[...][0] + 0 * jnp.mean(batch["x"]))

    def predict_step(self, batch: Any) -> Any:
        return self.w[...][0] + 0 * batch["x"][:, 0]

    def configure_optimizers(self) -> Any:
        return optax.sgd(STEP)


def batches(count: int = 1) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((2, 1), k, np.float32)} for k in range(1, count + 1)]


def weight(steps: int, per_epoch: int = 1) -> float:
    """The weight after some steps, by hand."""
    w = np.float32(0)
    for k in range(steps):
        w += np.float32(STEP) * 2 * (np.float32(k % per_epoch + 1) - w)
    return float(w)


def trainer_of(root: str | Path | None = "run", epochs: int = 3, **arguments: Any) -> jl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    given = {"strategy": "single", "enable_checkpointing": True, **quiet, **arguments}
    return jl.Trainer(default_root_dir=root, max_epochs=epochs, **given)


def keep_all(**arguments: Any) -> Any:
    return jl.callbacks.ModelCheckpoint(save_top_k=-1, **arguments)


def trained(epochs: int = 3, root: str = "run", **arguments: Any) -> jl.Trainer:
    """Train an epoch of one step at a time, and keep the checkpoint of each."""
    trainer = trainer_of(root, epochs, callbacks=[keep_all()], **arguments)
    trainer.fit(Line(), batches())
    return trainer


def first(trainer: jl.Trainer, **arguments: Any) -> int:
    """The step at which a fit begins."""

    class Note(jl.Callback):
        step = -1

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            Note.step = trainer.global_step
            assert float(module.w[...][0]) == pytest.approx(weight(trainer.global_step), abs=1e-7)

    trainer.callbacks.insert(0, Note())
    trainer.fit(Line(), batches(), **arguments)
    return Note.step


def at(step: int, root: str = "run") -> Path:
    return Path(root, "checkpoints", f"step_{step:08d}")


# resume and ckpt_path --------------------------------------------------------------------------------


def test_auto_goes_on_from_the_newest() -> None:
    trained(3)
    trainer = trainer_of(epochs=5, resume="auto")
    assert first(trainer) == 3
    assert trainer.global_step == 5
    assert float(trainer.module.w[...][0]) == weight(5)


@pytest.mark.parametrize("make", [False, True])
def test_auto_in_an_empty_folder_begins_anew_and_says_so(make: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if make:
        Path("run/checkpoints").mkdir(parents=True)
    assert first(trainer_of(resume="auto")) == 0
    out, err = capsys.readouterr()
    assert "no checkpoint" in out + err and "begins anew" in out + err


@pytest.mark.parametrize("make", [Path, "{}/".format, Path.absolute])
@pytest.mark.parametrize("argument", ["resume", "ckpt_path"])
def test_a_checkpoint_can_be_named_by_its_path(argument: str, make: Any) -> None:
    trained(3)
    path = make(at(2))
    if argument == "resume":
        assert first(trainer_of("other", resume=path)) == 2
    else:
        assert first(trainer_of("other"), ckpt_path=path) == 2


@pytest.mark.parametrize("make", [str, "{}/".format, "{}/checkpoints".format, os.path.abspath])
@pytest.mark.parametrize("argument", ["resume", "ckpt_path"])
def test_a_runs_folder_stands_for_its_newest_checkpoint(argument: str, make: Any) -> None:
    trained(3)
    path = make("run")
    if argument == "resume":
        assert first(trainer_of("other", epochs=4, resume=path)) == 3
    else:
        assert first(trainer_of("other", epochs=4), ckpt_path=path) == 3


def test_last_and_best_are_those_of_the_callback() -> None:
    class Scores(jl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.log("score", [3.0, 1.0, 2.0, 4.0, 5.0, 6.0][trainer.global_step - 1])

    def make(**arguments: Any) -> jl.Trainer:
        callbacks = [Scores(), jl.callbacks.ModelCheckpoint(monitor="score")]
        return trainer_of(epochs=3, callbacks=callbacks, **arguments)

    trainer = make()
    trainer.fit(Line(), batches())
    assert trainer.validate(Line(), batches(), ckpt_path="best") == [{"val": weight(2)}]
    assert trainer.validate(Line(), batches(), ckpt_path="last") == [{"val": weight(3)}]
    # Another process has only the folder.
    assert make().validate(Line(), batches(), ckpt_path="best") == [{"val": weight(2)}]
    assert make().validate(Line(), batches(), ckpt_path="last") == [{"val": weight(3)}]
    trainer.max_epochs = 4
    assert first(trainer, ckpt_path="best") == 2
    assert trainer.global_step == 4
    assert first(trainer, ckpt_path="last") == 4


def test_a_newer_checkpoint_that_is_damaged_is_passed_over_by_name(caplog: pytest.LogCaptureFixture) -> None:
    trained(3)
    state = at(3) / "state.json"
    state.write_text(state.read_text()[:-1])
    assert first(trainer_of(resume="auto")) == 2
    assert str(at(3)) in caplog.text and "state.json" in caplog.text


def test_a_named_checkpoint_that_is_damaged_is_an_error() -> None:
    trained(3)
    (at(3) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000003: state\.json is missing"):
        first(trainer_of("other"), ckpt_path=at(3))


@pytest.mark.parametrize("argument", ["resume", "ckpt_path"])
def test_a_path_that_is_wrong_names_what_is_there(argument: str) -> None:
    trained(2)
    for path in ("run/checkpoints/step_00000007", "run/checkpoints/step_2"):
        with pytest.raises(CheckpointError, match=rf"{argument}=.*{path}.*step_00000002, step_00000001"):
            if argument == "resume":
                trainer_of("other", resume=path).fit(Line(), batches())
            else:
                trainer_of("other").fit(Line(), batches(), ckpt_path=path)


def test_a_fit_without_a_folder_goes_on_in_the_run_that_it_resumes() -> None:
    trained(2)
    trainer = trainer_of(None, epochs=4, resume="run", log_every_n_steps=1)
    assert first(trainer) == 2
    assert trainer.run_dir.resolve() == Path("run").resolve()
    assert at(4).exists() and not Path("runs").exists()


def test_another_folder_gets_the_rest_and_the_resumed_run_stays_as_it_was() -> None:
    trained(3)
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    trainer = trainer_of("other", epochs=5, resume="run")
    assert first(trainer) == 3
    assert at(5, "other").exists()
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def fit(root: str | None = "run", *, ckpt_path: Any = None, data: Any = None, **arguments: Any) -> None:
    trainer_of(root, **arguments).fit(Line(), data or batches(), ckpt_path=ckpt_path)


@pytest.mark.parametrize(
    ("attempt", "error", "match"),
    [
        (lambda: fit(resume="run", ckpt_path="run"), ArgumentError, "resume='run'.*ckpt_path='run'.*Leave one out"),
        (lambda: fit(None, resume="auto"), ArgumentError, r"resume='auto'.*default_root_dir=\.\.\."),
        (lambda: fit(), ArgumentError, "default_root_dir='run'.*checkpoints of another run.*resume='auto'"),
        (lambda: fit(resume="auto", epochs=2), ArgumentError, r"max_epochs=2.*3 epochs.*step_00000003.*Raise"),
        (lambda: fit("other", ckpt_path="run", epochs=1), ArgumentError, "max_epochs=1.*3 epochs.*Raise"),
        (lambda: fit("other", ckpt_path="last"), CheckpointError, "'last'.*no checkpoint in .*other"),
        (lambda: fit("other", ckpt_path="best"), CheckpointError, "'best'.*no checkpoint in .*other"),
        (lambda: fit("other", resume=3), ArgumentTypeError, "resume.*'auto', a path or None, got 3"),
        (lambda: fit("other", resume=""), ArgumentTypeError, "resume.*got ''"),
        (lambda: fit("other", ckpt_path=3), ArgumentTypeError, "ckpt_path.*got 3"),
        (lambda: fit("other", ckpt_path=True), ArgumentTypeError, "ckpt_path.*got True"),
        (lambda: fit("other", ckpt_path=""), JaxlitError, "ckpt_path"),
        (lambda: fit(resume="auto", fast_dev_run=True), ArgumentError, "resume='auto'.*fast_dev_run"),
        (lambda: trainer_of("o").fit(Line(), batches(), strict=False), ArgumentError, "strict=False.*ckpt_path"),
        (lambda: trainer_of("o").fit(Line(), batches(), reset_optimizer=True), ArgumentError, "reset_optimizer=True"),
        (lambda: trainer_of("o").fit(Line(), batches(), ckpt_path="run", strict=0), JaxlitError, "strict"),
    ],
)
def test_what_names_no_checkpoint_is_refused_before_anything_runs(attempt: Any, error: Any, match: str) -> None:
    trained(3, logger=False)
    before = sorted(Path().rglob("*"))
    with pytest.raises(error, match=match):
        attempt()
    assert sorted(Path().rglob("*")) == before


# validate, test and predict --------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluation_takes_the_weights_of_a_checkpoint_and_the_module_keeps_its_own(verb: str) -> None:
    trained(3)
    module = Line()
    module.w[...] = jnp.full(1, 7.0)
    trainer = trainer_of("other")
    found = getattr(trainer, verb)(module, batches(), ckpt_path=at(2))
    if verb == "predict":
        np.testing.assert_array_equal(found[0], np.full(2, weight(2), np.float32))
    else:
        assert found == [{"val" if verb == "validate" else "test": weight(2)}]
    assert float(module.w[...][0]) == 7.0
    assert not at(2, "other").exists()


def test_evaluation_of_another_model_is_refused_with_a_table() -> None:
    class Wide(Line):
        def __init__(self) -> None:
            self.w, self.more = nnx.Param(jnp.zeros(2)), nnx.Param(jnp.zeros(()))

    trained(1)
    with pytest.raises(CheckpointError) as refused:
        trainer_of("other").test(Wide(), batches(), ckpt_path="run")
    lines = str(refused.value).splitlines()
    assert "does not fit Wide" in lines[0]
    assert [line.split() for line in lines if line.startswith("  module.")] == [
        ["module.more", "nothing", "float32[]"],
        ["module.w", "float32[1]", "float32[2]"],
    ]


# save_checkpoint -------------------------------------------------------------------------------------


def test_a_checkpoint_can_be_saved_in_hooks_and_after_fit() -> None:
    class Save(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint(f"kept/batch_{trainer.global_step}")

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(Path("kept") / f"epoch_{trainer.current_epoch}")

    trainer = trainer_of(epochs=2, callbacks=[Save()], enable_checkpointing=False)
    trainer.fit(Line(), batches(2))
    trainer.save_checkpoint("end")
    names = ["batch_1", "batch_2", "batch_3", "batch_4", "epoch_0", "epoch_1"]
    assert sorted(path.name for path in Path("kept").iterdir()) == names
    for path, step in [(f"kept/{n}", int(n[-1]) if n[0] == "b" else 2 * int(n[-1]) + 2) for n in names] + [("end", 4)]:
        module = Line.load_from_checkpoint(path)
        assert float(module.w[...][0]) == weight(step, per_epoch=2), path
        again = trainer_of(f"again/{path}", epochs=2, enable_checkpointing=False)
        again.fit(Line(), batches(2), ckpt_path=path)
        assert again.global_step == 4 and float(again.module.w[...][0]) == weight(4, per_epoch=2), path


def test_there_is_nothing_to_save_before_fit() -> None:
    trainer = trainer_of()
    with pytest.raises(CheckpointError, match="no training to save.*hook of fit, or after it"):
        trainer.save_checkpoint("end")
    trainer.validate(Line(), batches())
    with pytest.raises(CheckpointError, match="no training to save"):
        trainer.save_checkpoint("end")
    assert not Path("end").exists()


def test_a_folder_that_is_no_checkpoint_is_not_overwritten() -> None:
    trainer = trained(1)
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years")
    Path("file").write_text("more years")
    for path in ("mine", "file", ".", "run", "run/checkpoints"):
        with pytest.raises(ArgumentError, match="no checkpoint, and would be overwritten"):
            trainer.save_checkpoint(path)
    assert Path("mine/thesis.txt").read_text() == "years" and Path("file").read_text() == "more years"
    assert at(1).exists() and not list(Path().glob("*.tmp*"))
    Path("empty").mkdir()
    trainer.save_checkpoint("empty")
    assert float(Line.load_from_checkpoint("empty").w[...][0]) == weight(1)


def test_a_checkpoint_that_is_there_is_replaced_by_a_whole_one() -> None:
    trainer = trained(1)
    trainer.save_checkpoint("mine")
    with jl.testing.faults(".") as seen:
        trainer.save_checkpoint("mine")
    first_of_ours = next(k for k, (_, name) in enumerate(seen.operations, 1) if name.endswith("state.json"))
    trainer = trainer_of("other", 2, callbacks=[keep_all()])
    trainer.fit(Line(), batches(), ckpt_path="mine")
    with (
        jl.testing.faults(".", at=first_of_ours, kind="full"),
        pytest.raises(CheckpointError, match="mine could not be written"),
    ):
        trainer.save_checkpoint("mine")
    assert float(Line.load_from_checkpoint("mine").w[...][0]) == weight(1)
    trainer.save_checkpoint("mine")
    assert float(Line.load_from_checkpoint("mine").w[...][0]) == weight(2)
    assert sorted(path.name for path in Path().iterdir()) == ["mine", "other", "run"]


@pytest.mark.parametrize("path", [3, "", None])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="save_checkpoint.*path"):
        trained(1).save_checkpoint(path)


def test_the_state_is_json_and_holds_no_code() -> None:
    trained(1)
    state = json.loads((at(1) / "state.json").read_text())
    assert state["global_step"] == 1 and state["epoch"] == 1
    assert {p.suffix for p in at(1).rglob("*") if p.is_file()} & {".pkl", ".pickle", ".py", ".npy"} == set()
