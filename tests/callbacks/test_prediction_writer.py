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
from kit.processes import launch
from kit.refusals import refuses
from kit.trainers import BARE, STRATEGIES, make_trainer, thinned

import jaxlit as jl
from jaxlit.callbacks import PredictionWriter
from jaxlit.errors import ArgumentError, DataError

(DATA,) = random(1, rows=36)  # four batches of 8 rows and one of 4
KERNEL = np.linspace(-1.0, 1.0, 3)[:, None]

OUTPUTS: dict[str, Any] = {
    "an array": lambda y: y,
    "a dict": lambda y: {"mean": y, "sides": {"up": y > 0, "n": (10 * y).astype(jnp.int32)}},
    "a sequence": lambda y: [y[:, 0], (jnp.stack([y, 2 * y], 1), (y > 0).astype(jnp.bfloat16))],
}


def expected(case: str, x: np.ndarray) -> Any:
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
    model, writer = predicts(OUTPUTS[case]), PredictionWriter("made/here", interval)
    predict(model, loader(), writer, strategy=strategy)
    same(PredictionWriter.load("made/here"), expected(case, DATA["x"]))
    assert sorted(os.listdir("made")) == ["here"]
    assert sorted(os.listdir("made/here")) == FILES[case]


@pytest.mark.parametrize("case", OUTPUTS)
def test_parquet_holds_the_same_rows(case: str) -> None:
    for interval in ("batch", "epoch"):
        predict(predicts(OUTPUTS[case]), loader(), PredictionWriter("made", interval, format="parquet"))
        same(PredictionWriter.load("made"), expected(case, DATA["x"]))


@pytest.mark.parametrize("format", ["npy", "parquet"])
def test_host_keys_are_written(format: str) -> None:
    day = np.datetime64("2026-01-01", "D") + np.arange(36)
    keys = {"day": day} | ({"id": np.array([f"row {k * 'x'}" for k in range(36)])} if format == "parquet" else {})
    batches = jl.ArrayLoader({**DATA, **keys}, 8)
    predict(predicts(lambda y: {"y": y}), batches, PredictionWriter("made", format=format), host_keys=(*keys,))
    loaded = PredictionWriter.load("made")
    for name, x in keys.items():
        assert loaded[name].tolist() == x.tolist()
    same(loaded["y"], expected("an array", DATA["x"]))


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

    def fail(trainer: Any, module: Any, outputs: Any, batch: Any, idx: int, loader: int) -> None:
        assert sorted(os.listdir(".")) == [".made.partial", "made"]
        if idx == 3:
            raise error

    for error in (OSError("the disk is full"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            predict(model, loader(), ours, hooks(on_predict_batch_end=fail))
        assert {path.name: path.read_bytes() for path in Path("made").iterdir()} == before
        assert sorted(os.listdir(".")) == ["made"]
    Path(".made.partial/of a process that was killed").mkdir(parents=True)
    predict(model, Stream(random(1)), ours)
    assert PredictionWriter.load("made").shape == (8, 1) and sorted(os.listdir(".")) == ["made"]


def test_at_most_two_batches_are_in_memory() -> None:
    refs, alive = list[Any](), list[int]()

    def count(trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        refs.append(weakref.ref(outputs))
        alive.append(sum(ref() is not None for ref in refs))

    predict(predicts(lambda y: y), random(9), PredictionWriter("made"), hooks(on_predict_batch_end=count))
    assert max(alive) <= 2 and len(alive) == 9


def predict_in_a_process() -> None:
    """Predict in one of two processes, with batches that divide among them and a tail that does not."""
    own = predicts(lambda y: {"y": y})
    predict(own, loader(), PredictionWriter("made"), strategy="ddp")
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


REFUSED: dict[str, Any] = {
    "a scalar": (lambda y: {"y": y, "mean": y.mean()}, {}, r"one row for each row.*'mean': float32\[\]"),
    "other rows": (lambda y: {"y": y, "half": y[:4]}, {}, r"one row for each row.*'half': float32\[4"),
    "texts": (lambda y: {"y": y}, {"host_keys": ("id",)}, "'id' holds texts"),
}


@pytest.mark.parametrize("interval", ["batch", "epoch"])
@pytest.mark.parametrize("case", REFUSED)
def test_outputs_that_are_no_rows_of_numbers_are_refused(case: str, interval: str) -> None:
    (make, given, words), rows = REFUSED[case], {**DATA, "id": np.array(["a"] * 36)}
    data = jl.ArrayLoader(rows if given else DATA, 8)
    writer = PredictionWriter("made", write_interval=interval)
    refuses(DataError, lambda: predict(predicts(make), data, writer, **given), words)
    assert os.listdir(".") == []
    other = [{"x": np.zeros((8, width), np.float32)} for width in (3, 2)]
    model = module(base=Linear, predict=lambda self, batch: batch["x"])
    refuses(DataError, lambda: predict(model, other, writer), r"\[8, 2\].*\[3\].*Pad them")


def test_host_keys_do_not_join_outputs_that_are_one_array() -> None:
    rows = {**DATA, "id": np.arange(36)}
    predict(predicts(lambda y: y), jl.ArrayLoader(rows, 8), PredictionWriter("made"), host_keys=("id",))
    same(PredictionWriter.load("made"), expected("an array", DATA["x"]))


def test_a_link_stays_and_its_target_is_replaced() -> None:
    Path("disk/here").mkdir(parents=True)
    Path("link").symlink_to("disk/here")
    for scale in (1, 2):
        predict(predicts(lambda y, scale=scale: scale * y), loader(), PredictionWriter("link"))
        same(PredictionWriter.load("disk/here"), scale * expected("an array", DATA["x"]))
    assert Path("link").is_symlink() and os.listdir("disk") == ["here"] and sorted(os.listdir(".")) == ["disk", "link"]


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        *[(["a", other], "replace each other's files") for other in ("a", "a/b", "b/../a")],
        (["file/made"], "cannot be made"),
        (["work"], "holds no predictions"),
    ],
)
def test_an_unusable_folder_is_refused_before_the_first_batch(folders: list[str], words: str) -> None:
    Path("file").write_text("")
    Path("work").mkdir()
    Path("work/index.json").write_text("{}")
    begun: list[Any] = []
    watch, writers = hooks(on_predict_batch_start=lambda *_: begun.append(1)), map(PredictionWriter, folders)
    refuses(ArgumentError, lambda: predict(predicts(lambda y: y), loader(), watch, *writers), words)
    assert begun == [] and sorted(os.listdir(".")) == ["file", "work"] and os.listdir("work") == ["index.json"]
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


@pytest.mark.parametrize("make", [lambda y: {"x": y + 1j}, lambda y: {"x": y[:, :0], "y": y}])
def test_npy_files_hold_what_parquet_cannot(make: Any) -> None:
    with pytest.raises(pyarrow.ArrowException):
        predict(predicts(make), loader(), PredictionWriter("made", format="parquet"))
    predict(predicts(make), loader(), PredictionWriter("made"))
    loaded, wanted = PredictionWriter.load("made"), make(expected("an array", DATA["x"]))
    for name, x in wanted.items():
        np.testing.assert_allclose(loaded[name], x, rtol=1e-5, atol=1e-6)
