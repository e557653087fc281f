"""A PredictionWriter writes what numpy computes of the rows, in their order; what is cut short leaves nothing."""

import os
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pytest
from kit.batches import Stream, random
from kit.journal import hooks
from kit.modules import Linear, module
from kit.processes import launch, say
from kit.refusals import refuses
from kit.trainers import BARE, STRATEGIES, make_trainer, thinned

import jaxlit as jl
from jaxlit.callbacks import PredictionWriter
from jaxlit.errors import ArgumentError, DataError

(DATA,) = random(1, rows=36)  # four batches of 8 rows and one of 4
KERNEL = np.linspace(-1.0, 1.0, 3)[:, None]

OUTPUTS: dict[str, Any] = {
    "an array": (lambda y: y, {"predictions": 1}),
    "a dict": (lambda y: {"mean": y, "sides": {"up": y > 0, "n": (10 * y).astype(jnp.int32)}}, None),
    "a sequence": (lambda y: [y[:, 0], (jnp.stack([y, 2 * y], 1), (y > 0).astype(jnp.bfloat16))], None),
}


def expected(case: str, x: np.ndarray) -> Any:
    """Return what a step makes of rows, computed by numpy."""
    y = (x.astype(np.float64) @ KERNEL).astype(np.float32)
    if case == "an array":
        return y
    if case == "a dict":
        return {"mean": y, "sides": {"up": y > 0, "n": (10 * y).astype(np.int32)}}
    return [y[:, 0], [np.stack([y, 2 * y], 1), (y > 0).astype(np.float32)]]


def same(loaded: Any, wanted: Any) -> None:
    """Compare two trees of arrays, whose dicts and lists are the same."""
    assert jax.tree.structure(loaded) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, strict=True)


def predicts(make: Any) -> Any:
    return module(base=Linear, predict=lambda self, batch: make(Linear.__call__(self, batch["x"])))


def predict(model: Any, loader: Any, *callbacks: jl.Callback, **given: Any) -> Any:
    trainer = make_trainer(*callbacks, **({"max_epochs": None} | BARE | given))
    return trainer.predict(model, loader, return_predictions=False)


def loader() -> jl.ArrayLoader:
    return jl.ArrayLoader(DATA, 8)


FILES = {
    "a dict": ["index.json", "mean.npy", "sides.n.npy", "sides.up.npy"],
    "an array": ["index.json", "predictions.npy"],
    "a sequence": ["0.npy", "1_0.npy", "1_1.npy", "index.json"],
}
OFTEN = ("a dict", "fsdp"), ("a sequence", "single"), ("an array", "pmap")


@pytest.mark.parametrize(("case", "strategy"), thinned([(c, s) for c in OUTPUTS for s in STRATEGIES], *OFTEN))
@pytest.mark.parametrize("interval", ["batch", "epoch"])
def test_rows_are_those_of_numpy_in_order(case: str, strategy: str, interval: str) -> None:
    model, writer = predicts(OUTPUTS[case][0]), PredictionWriter("made/here", interval)
    predict(model, loader(), writer, strategy=strategy)
    same(PredictionWriter.load("made/here"), expected(case, DATA["x"]))
    assert sorted(os.listdir("made")) == ["here"]
    assert sorted(os.listdir("made/here")) == FILES[case]
    if case == "an array":
        assert np.load("made/here/predictions.npy").shape == (36, 1)


@pytest.mark.parametrize("case", OUTPUTS)
def test_parquet_holds_the_same_and_texts(case: str) -> None:
    for interval in ("batch", "epoch"):
        predict(predicts(OUTPUTS[case][0]), loader(), PredictionWriter("made", interval, format="parquet"))
        same(PredictionWriter.load("made"), expected(case, DATA["x"]))
    batches = [{**batch, "id": np.array([f"row {i * 'x'}{k}" for k in range(8)])} for i, batch in enumerate(random(3))]
    writer = PredictionWriter("made", format="parquet")
    predict(predicts(lambda y: {"y": y}), batches, writer, host_keys=("id",))
    loaded = PredictionWriter.load("made")
    assert loaded["id"].tolist() == [f"row {i * 'x'}{k}" for i in range(3) for k in range(8)]
    same(loaded["y"], np.concatenate([b["x"] @ KERNEL for b in batches]).astype(np.float32))


def test_loaders_have_a_folder_each_and_a_new_run_replaces_it() -> None:
    model, writer = predicts(lambda y: y), PredictionWriter("made")
    trainer = make_trainer(writer, **BARE)
    several = [random(k, seed=k) for k in range(1, 12)]
    trainer.predict(model, several, return_predictions=False)
    for loaded, batches in zip(PredictionWriter.load("made"), several, strict=True):
        same(loaded, expected("an array", np.concatenate([b["x"] for b in batches])))
    kept = trainer.predict(model, loader())
    same(PredictionWriter.load("made"), np.concatenate(kept))
    assert sorted(os.listdir("made")) == ["index.json", "predictions.npy"]


def test_an_interrupted_run_keeps_earlier_predictions() -> None:
    model, ours = predicts(lambda y: y), PredictionWriter("made")
    predict(model, loader(), ours)
    before = {path.name: path.read_bytes() for path in Path("made").iterdir()}
    seen: list[list[str]] = []

    def fail(trainer: Any, module: Any, outputs: Any, batch: Any, idx: int, loader: int) -> None:
        seen.append(sorted(os.listdir(".")))
        if idx == 3:
            raise error

    for error in (OSError("the disk is full"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            predict(model, loader(), ours, hooks(on_predict_batch_end=fail))
        assert {path.name: path.read_bytes() for path in Path("made").iterdir()} == before
        assert sorted(os.listdir(".")) == ["made"]
    assert seen[-1] == [".made.partial", "made"]
    Path(".made.partial/of a process that was killed").mkdir(parents=True)
    predict(model, Stream(random(1)), ours)
    assert PredictionWriter.load("made").shape == (8, 1) and sorted(os.listdir(".")) == ["made"]


def test_at_most_two_batches_are_in_memory() -> None:
    refs: list[Any] = []
    alive: list[int] = []

    def count(trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        refs.append(weakref.ref(outputs))
        alive.append(sum(ref() is not None for ref in refs))

    predict(predicts(lambda y: y), random(9), PredictionWriter("made"), hooks(on_predict_batch_end=count))
    assert max(alive) <= 2 and len(alive) == 9


def predict_in_a_process() -> None:
    """Predict in one of two processes, with batches that divide among them and a tail that does not."""
    writer = PredictionWriter("made")
    predict(predicts(lambda y: {"y": y}), loader(), writer, strategy="ddp")
    say("whole", Path("made/index.json").exists())
    own = predicts(lambda y: {"y": y})
    rows = {**DATA, "id": np.arange(36)}
    with pytest.raises(ArgumentError, match="in several processes predictions are of all rows"):
        predict(own, jl.ArrayLoader(rows, 8), PredictionWriter("other"), strategy="ddp", host_keys=("id",))
    os.makedirs("taken/by", exist_ok=True)
    with pytest.raises(ArgumentError, match="holds no predictions"):
        predict(own, loader(), PredictionWriter("taken"), strategy="ddp")


@pytest.mark.full
def test_two_processes_write_all_rows_in_order(tmp_path: Path) -> None:
    for ended in launch(predict_in_a_process, tmp_path):
        assert ended.code == 0, ended.errors
    same(PredictionWriter.load(tmp_path / "made"), {"y": expected("an array", DATA["x"])})


REFUSED: list[Any] = [
    ("a scalar", lambda y: {"y": y, "mean": y.mean()}, r"one row for each row.*'mean': float32\[\]"),
    ("other rows", lambda y: {"y": y, "half": y[:4]}, r"one row for each row.*'half': float32\[4"),
]


@pytest.mark.parametrize(("case", "make", "words"), REFUSED)
def test_outputs_without_a_row_for_each_row_are_refused(case: str, make: Any, words: str) -> None:
    refuses(DataError, lambda: predict(predicts(make), loader(), PredictionWriter("made")), words)
    assert os.listdir(".") == []


def test_outputs_of_another_shape_in_a_later_batch_are_refused() -> None:
    batches = [random(1)[0], random(1, features=2)[0]]
    model = module(base=Linear, predict=lambda self, batch: batch["x"])
    refuses(DataError, lambda: predict(model, batches, PredictionWriter("made")), r"\[8, 2\].*\[3\].*Pad them")


def test_host_keys_that_are_texts_are_refused_in_npy_files() -> None:
    named = [{**batch, "id": np.array(["a"] * 8)} for batch in random(2)]
    run = lambda *given: predict(predicts(given[0]), named, PredictionWriter("made"), host_keys=("id",))  # noqa: E731
    refuses(DataError, lambda: run(lambda y: {"y": y}), "'id' holds texts")
    run(lambda y: y)  # host keys do not join outputs that are one array
    assert PredictionWriter.load("made").shape[0] == 16


def test_a_link_stays_and_its_target_is_replaced() -> None:
    Path("disk/here").mkdir(parents=True)
    Path("link").symlink_to("disk/here")
    for scale in (1, 2):
        predict(predicts(lambda y, scale=scale: scale * y), loader(), PredictionWriter("link"))
        same(PredictionWriter.load("disk/here"), scale * expected("an array", DATA["x"]))
    assert Path("link").is_symlink() and os.listdir("disk") == ["here"] and sorted(os.listdir(".")) == ["disk", "link"]


UNUSABLE: list[Any] = [
    (["a/b", "a/b"], "replace each other's files"),
    (["a", "a/b"], "replace each other's files"),
    (["a", "a/../a"], "replace each other's files"),
    (["file/made"], "cannot be made"),
    (["work"], "holds no predictions"),
]


@pytest.mark.parametrize(("folders", "words"), UNUSABLE)
def test_an_unusable_folder_is_refused_before_the_first_batch(folders: list[str], words: str) -> None:
    Path("file").write_text("")
    Path("work").mkdir()
    Path("work/index.json").write_text("{}")
    begun: list[Any] = []
    watch = hooks(on_predict_batch_start=lambda *_: begun.append(1))
    writers = map(PredictionWriter, folders)
    refuses(ArgumentError, lambda: predict(predicts(lambda y: y), loader(), watch, *writers), words)
    assert begun == []
    assert sorted(os.listdir(".")) == ["file", "work"]
    assert os.listdir("work") == ["index.json"]
    refuses(ArgumentError, lambda: PredictionWriter.load("work"), "finds no predictions")


def test_predictions_that_cannot_be_renamed_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(self: Path, target: Path) -> None:
        raise OSError(16, "Device or resource busy", str(self))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="resource busy.*partial"):
        patch.setattr(Path, "rename", busy)
        predict(predicts(lambda y: y), loader(), PredictionWriter("volume"))
    same(PredictionWriter.load(".volume.partial")[0], expected("an array", DATA["x"]))


@pytest.mark.parametrize("format", ["npy", "parquet"])
def test_names_differ_on_a_case_insensitive_disk(format: str) -> None:
    make = lambda y: {"a_b_2": y, "a{b": y + 1, "a|b": y + 2, "A_b": y + 3, "a_b_3": y + 4}  # noqa: E731
    predict(predicts(make), loader(), PredictionWriter("made", format=format))
    y = expected("an array", DATA["x"])
    same(PredictionWriter.load("made"), make(y))
    if format == "npy":
        assert len({name.casefold() for name in os.listdir("made")}) == 6


@pytest.mark.parametrize("sizes", [[1, 0, 2], [0, 1], [1, 0]])
@pytest.mark.parametrize(("format", "interval"), [("npy", "batch"), ("npy", "epoch"), ("parquet", "batch")])
def test_a_loader_without_rows_keeps_its_place(sizes: list[int], format: str, interval: str) -> None:
    loaders = [random(k, seed=k) for k in sizes]
    predict(predicts(lambda y: y), loaders, PredictionWriter("made", interval, format=format))
    loaded = PredictionWriter.load("made")
    assert [x is None for x in loaded] == [k == 0 for k in sizes]
    for x, batches in zip(loaded, loaders, strict=True):
        if batches:
            same(x, expected("an array", np.concatenate([b["x"] for b in batches])))


def test_host_keys_that_are_dates_are_written() -> None:
    rows = {**DATA, "day": np.datetime64("2026-01-01", "D") + np.arange(36)}
    for format in ("npy", "parquet"):
        predict(
            predicts(lambda y: {"y": y}),
            jl.ArrayLoader(rows, 8),
            PredictionWriter("made", format=format),
            host_keys=("day",),
        )
        assert PredictionWriter.load("made")["day"].tolist() == rows["day"].tolist()


@pytest.mark.parametrize("make", [lambda y: {"x": y + 1j}, lambda y: {"x": y[:, :0], "y": y}])
def test_npy_files_hold_what_parquet_cannot(make: Any) -> None:
    with pytest.raises(pyarrow.ArrowException):
        predict(predicts(make), loader(), PredictionWriter("made", format="parquet"))
    predict(predicts(make), loader(), PredictionWriter("made"))
    loaded, wanted = PredictionWriter.load("made"), make(expected("an array", DATA["x"]))
    for name, x in wanted.items():
        np.testing.assert_allclose(loaded[name], x, rtol=1e-5, atol=1e-6)
