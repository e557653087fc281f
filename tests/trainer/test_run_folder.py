"""Which checkpoint a run begins with: `resume`, `ckpt_path` and `init_from`, by a word or a path."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import numbered, random
from kit.by_hand import assert_same, mean
from kit.checkpoints import keep_all, names
from kit.journal import Journal, hooks
from kit.modules import Linear, Mean, module
from kit.refusals import refuses
from kit.trainers import fit, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.callbacks import EMA, ModelCheckpoint
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


def test_a_fit_without_a_folder_continues_in_the_resumed_run(run) -> None:
    trainer = train(None, 4, resume="run")
    assert trainer.run_dir.resolve() == run.resolve() and at(4).exists() and not Path("runs").exists()
    trainer = train(None, 5, ckpt_path="run")  # which only begins with it
    assert trainer.run_dir.parts[0] == "runs" and not at(5).exists()


def test_an_evaluation_without_a_folder_writes_to_a_fresh_one(run) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    trainer = make_trainer()
    trainer.validate(Line(), numbered(1), ckpt_path=run)
    assert trainer.run_dir.parts[0] == "runs" and (trainer.run_dir / "metrics.csv").exists()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("made", thinned([False, True], True))
def test_auto_in_an_empty_folder_begins_anew_and_says_so(made, capsys) -> None:
    if made:
        at(1).parent.mkdir(parents=True)
    assert begins("run", 1, resume="auto") == 0
    assert "resume: no checkpoint in run/checkpoints, starting from scratch" in capsys.readouterr().out
    assert begins("run", 2, resume="auto") == 1
    assert "resume: run/checkpoints/step_00000001 (step 1, epoch 1)" in capsys.readouterr().out


def test_a_start_from_scratch_names_every_folder_that_was_searched(capsys) -> None:
    fit(Line(), numbered(1), None, ModelCheckpoint("elsewhere"), default_root_dir="run", resume="auto", max_epochs=1)
    assert "resume: no checkpoint in elsewhere or run/checkpoints, starting from scratch" in capsys.readouterr().out


def test_last_and_best_are_of_the_callback_or_the_folder() -> None:
    scores = hooks(on_train_epoch_end=lambda t, m: scores.log("score", [3.0, 1.0, 2.0, 4.0, 5.0][t.global_step - 1]))
    given = {"default_root_dir": "run", "max_epochs": 3}
    make = lambda: make_trainer(scores, ModelCheckpoint(monitor="score"), **given)  # noqa: E731
    trainer = make()
    trainer.fit(Line(), numbered(1))
    for one in (trainer, make()):
        assert one.validate(Line(), numbered(1), ckpt_path="best") == [{"val": weight(2)}]
        assert one.validate(Line(), numbered(1), ckpt_path="last") == [{"val": weight(3)}]
    trainer.max_epochs = 4
    trainer.fit(Line(), numbered(1), ckpt_path="best")
    assert trainer.global_step == 4 and float(trainer.module.w[...][0]) == weight(4)  # type: ignore[union-attr]
    assert trainer.validate(Line(), numbered(1), ckpt_path="last") == [{"val": weight(4)}]


@pytest.mark.parametrize("first", ["min", "max"])
def test_best_is_of_the_callback_that_a_new_trainer_has_or_that_writes_to_the_folder(first: str) -> None:
    scores = hooks(on_train_epoch_end=lambda t, m: scores.log("score", [3.0, 1.0, 2.0][t.global_step - 1]))
    given: dict[str, Any] = {"monitor": "score", "save_top_k": -1, "save_last": False}
    savers = {
        "min": lambda: ModelCheckpoint("min", mode="min", every_n_epochs=2, **given),  # an older newest one
        "max": lambda: ModelCheckpoint("max", mode="max", **given),
    }
    both = [first, *(x for x in savers if x != first)]
    fit(Line(), numbered(1), None, scores, *(savers[x]() for x in both), max_epochs=3)
    for mode, step in (("min", 2), ("max", 1)):
        others = [x for x in both if x != mode]
        for named in ([mode], [mode, *others]):
            trainer = make_trainer(*(savers[x]() for x in named))
            assert trainer.validate(Line(), numbered(1), ckpt_path="best") == [{"val": weight(step)}]
        assert make_trainer().validate(Line(), numbered(1), ckpt_path=f"{mode}/best") == [{"val": weight(step)}]


GONE = [("all", "one"), ("newest", "two"), ("newest", "one"), ("sound", "one")]


@pytest.mark.parametrize(("gone", "first"), thinned(GONE, *GONE[2:]))
def test_auto_uses_the_checkpoint_that_has_seen_most(gone, first) -> None:
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
    if gone == "sound":
        for path in Path("one").glob("step_*/*/state.json"):
            path.write_text("{}")
    journal = Journal()
    assert train(journal, max_epochs=2, resume="auto").global_step == 8
    assert journal.batches["train"] == [1, 2, 3, 4]  # of the second epoch


RUN = {"default_root_dir": "run"}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (RUN | {"resume": "run", "ckpt_path": "run"}, ArgumentError, "resume='run'.*ckpt_path='run'.*Leave one out"),
    (RUN, ArgumentError, "default_root_dir='run'.*of another run.*resume='auto'"),
    (RUN | {"resume": "auto", "max_epochs": 2}, ArgumentError, r"max_epochs=2.*3 epochs.*step_00000003.*Raise"),
    ({"ckpt_path": "last"}, CheckpointError, "'last' was asked for, and there is no checkpoint in .*other"),
    ({"ckpt_path": "best"}, CheckpointError, "'best' was asked for, and there is no checkpoint in .*other"),
    ({"ckpt_path": "auto"}, CheckpointError, "'auto' was asked for, and there is no checkpoint"),
    ({"strict": False}, ArgumentError, "strict=False.*ckpt_path"),
    ({"strict": False, "init_from": "run"}, ArgumentError, "strict=False.*init_from=... loads what fits"),
    ({"ckpt_path": "run", "init_from": "run"}, ArgumentError, r"init_from='run'\) begins a new training.*Leave one"),
    ({"init_from": "best"}, CheckpointError, r"fit\(init_from=\.\.\.\): 'best' was asked for.*other"),
    ({"init_from": 3}, ArgumentTypeError, r"Trainer\.fit\(init_from=\.\.\.\) takes .*'best' or a path, got 3"),
    (RUN | {"init_from": "run"}, ArgumentError, "default_root_dir='run'.*of another run.*resume='auto'"),
    ({"reset_optimizer": True}, ArgumentError, "reset_optimizer=True"),
    ({"ckpt_path": "run", "strict": 0}, ArgumentTypeError, "strict.*got 0"),
]


@pytest.mark.parametrize(("given", "error", "match"), REFUSED, ids=range(len(REFUSED)))
def test_what_names_no_checkpoint_is_refused_at_once(given, error, match, run) -> None:
    before = sorted(Path().rglob("*"))
    with pytest.raises(error, match=match):
        train(**({"default_root_dir": "other"} | given))
    assert sorted(Path().rglob("*")) == before


def test_evaluating_a_checkpoint_leaves_the_module_unchanged(run) -> None:
    model, wide = Line(), module(base=Line, name="Wide", init=lambda self: setattr(self, "w", nnx.Param(np.zeros(2))))
    model.w[...] = np.full(1, 7.0, np.float32)
    trainer = make_trainer(default_root_dir="other", resume="nothing that a fit would find")
    assert trainer.validate(model, numbered(1), ckpt_path=at(2)) == [{"val": weight(2)}]
    assert trainer.test(model, numbered(1), ckpt_path=at(2)) == [{"test": weight(2)}]
    assert np.asarray(trainer.predict(model, numbered(1), ckpt_path=at(2))[0]).tolist() == [weight(2)] * 8
    assert float(model.w[...][0]) == 7.0
    refuses(CheckpointError, lambda: trainer.test(wide, numbered(1), ckpt_path="run"), "does not fit Wide")
    assert not Path("other/checkpoints").exists()


class Rich(Linear):
    """A linear model with a second, adaptable output, statistics and a generator."""

    def __init__(self, width: int = 1, *, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.kernel[...] = jax.random.normal(rngs.params(), (3, 1))
        self.head = nnx.Param(jax.random.normal(rngs.params(), (width,)))
        self.count = nnx.BatchStat(jnp.zeros(()))
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def loss(self, batch: Any) -> jax.Array:
        return super().loss(batch) + jnp.sum(self.head[...] ** 2) + 0 * self.drop(batch["x"]).sum()

    def training_step(self, batch: Any) -> jax.Array:
        self.count[...] = self.count[...] + 1
        return super().training_step(batch)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pretrained") / "old"
    fit(Rich(rngs=nnx.Rngs(1)), random(3), None, default_root_dir=root, max_epochs=2, strategy=splitting("fsdp"))
    return root


STRATEGIES = [("fsdp", True), ("single", False), ("shard_map", True), ("ddp", False), ("pmap", False), ("zero1", True)]


@pytest.mark.parametrize(("strategy", "is_lazy"), thinned(STRATEGIES, STRATEGIES[1], full=STRATEGIES[::2]))
def test_a_new_training_begins_with_the_weights_of_a_checkpoint(strategy, is_lazy, pretrained) -> None:
    model = jl.lazy(Rich) if is_lazy else Rich(rngs=nnx.Rngs(2))
    given = {"max_epochs": 1, "strategy": splitting(strategy), "log_every_n_steps": 1}
    trainer = fit(model, random(3), None, EMA(0.5), default_root_dir="new", init_from=pretrained, **given)
    assert trainer.global_step == 3
    assert [int(step) for step in trainer.history["loss"][0]] == [0, 1, 2]
    expected = Rich.load_from_checkpoint(pretrained, rngs=nnx.Rngs(2))
    fit(expected, random(3), None, EMA(0.5), default_root_dir="expected", **given)
    assert_same(trainer.module, expected)
    assert float(trainer.module.count[...]) == 9


def test_what_a_new_training_does_not_take_is_named(pretrained, caplog) -> None:
    model = Rich(2, rngs=nnx.Rngs(2))
    head, keys = model.head[...].tolist(), jax.random.key_data(model.drop.rngs.key[...])
    kernel = []
    look = hooks(on_fit_start=lambda t, m: kernel.append((m.head[...].tolist(), np.asarray(m.kernel[...]).tolist())))
    fit(model, random(1), None, look, default_root_dir="new", init_from=pretrained)
    assert kernel == [(head, Rich.load_from_checkpoint(pretrained).kernel[...].tolist())]
    assert (jax.random.key_data(model.drop.rngs.key[...]) == keys).all()
    assert "was loaded in part. Not taken from it:" in caplog.text
    (row,) = [line.split() for line in caplog.text.splitlines() if line.startswith("  module")]
    assert row == ["module.head", "float32[1]", "float32[2]"]


def test_a_path_may_end_in_best_and_a_folder_says_what_was_taken(capsys) -> None:
    scores = hooks(on_train_epoch_end=lambda t, m: scores.log("score", [3.0, 1.0, 2.0][t.global_step - 1]))
    train("run", 3, scores, ModelCheckpoint(monitor="score"))
    capsys.readouterr()
    for path, step in (("run", 3), ("run/last", 3), ("run/best", 2), ("run/checkpoints/best", 2)):
        assert float(Line.load_from_checkpoint(path).w[...][0]) == weight(step)
        said = f"load_from_checkpoint: run/checkpoints/step_0000000{step} (step {step}, epoch {step})\n"
        assert capsys.readouterr().out == said
    Line.load_from_checkpoint(at(2))
    assert capsys.readouterr().out == ""
    begun: list[float] = []
    train("new", 1, hooks(on_fit_start=lambda t, m: begun.append(float(m.w[...][0]))), init_from="run/best")
    assert begun == [weight(2)]
    with pytest.raises(CheckpointError, match="'none/best' is not a checkpoint"):
        Line.load_from_checkpoint("none/best")
