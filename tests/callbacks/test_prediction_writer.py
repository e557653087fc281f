"""A PredictionWriter writes what numpy computes of the rows, in their order; what is cut short leaves nothing."""

import os
import weakref
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from kit.batches import Stream, random
from kit.journal import hooks
from kit.modules import Linear, module
from kit.processes import launch
from kit.refusals import refuses
from kit.trainers import BARE, STRATEGIES, make_trainer, thinned

import jaxlit as jl
from jaxlit.callbacks import PredictionWriter, prediction_writer
from jaxlit.errors import ArgumentError, DataError

(DATA,) = random(1, rows=36)  # four batches of 8 rows and one of 4
KEYS = {"id": np.array([f"row {k * 'x'}" for k in range(36)]), "day": np.datetime64("2026-01-01") + np.arange(36)}
KERNEL = np.linspace(-1.0, 1.0, 3)[:, None]

OUTPUTS: dict[str, Any] = {
    "an array": lambda y: y,
    "a dict": lambda y: {"mean": y, "sides": {"up": y > 0, "n": (10 * y).astype(jnp.int32)}},
    "a sequence": lambda y: [y[:, 0], (jnp.stack([y, 2 * y], 1), (y > 0).astype(jnp.bfloat16))],
}


def expected(case: str, x: np.ndarray = DATA["x"]) -> dict[str, np.ndarray]:
    y = (x.astype(np.float64) @ KERNEL).astype(np.float32)
    if case == "an array":
        return {"predictions": y}
    if case == "a dict":
        return {"mean": y, "sides.up": y > 0, "sides.n": (10 * y).astype(np.int32)}
    return {"[0]": y[:, 0], "[1][0]": np.stack([y, 2 * y], 1), "[1][1]": (y > 0).astype(np.float32)}


def same(loaded: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert loaded.keys() == wanted.keys()
    for name, x in wanted.items():
        assert loaded[name].dtype == x.dtype
        np.testing.assert_allclose(loaded[name], x, rtol=1e-5, atol=1e-6, strict=True)


def predicts(make: Any) -> Any:
    return module(base=Linear, predict=lambda self, batch: make(Linear.__call__(self, batch["x"])))


def predict(model: Any, loader: Any, *callbacks: jl.Callback, **given: Any) -> Any:
    trainer = make_trainer(*callbacks, **({"max_epochs": None} | BARE | given))
    return trainer.predict(model, loader, return_predictions=False)


def loader() -> jl.ArrayLoader:
    return jl.ArrayLoader(DATA, 8)


OFTEN = ("a dict", "fsdp"), ("a sequence", "single"), ("an array", "pmap")


@pytest.mark.parametrize(("case", "strategy"), thinned([(c, s) for c in OUTPUTS for s in STRATEGIES], *OFTEN))
def test_rows_are_those_of_numpy_in_order(case: str, strategy: str) -> None:
    predict(predicts(OUTPUTS[case]), loader(), PredictionWriter("made/here"), strategy=strategy)
    same(PredictionWriter.load("made/here"), expected(case))
    assert sorted(os.listdir("made")) == ["here"]
    assert sorted(os.listdir("made/here")) == ["predictions_0_00000.npz"]


@pytest.mark.parametrize(("rows", "files"), [(1, 5), (20, 2)])
def test_a_file_is_written_when_its_rows_are_complete(rows: int, files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_writer, "_FILE_BYTES", rows * 4)
    predict(predicts(OUTPUTS["an array"]), loader(), PredictionWriter("made"))
    same(PredictionWriter.load("made"), expected("an array"))
    assert len(os.listdir("made")) == files


def test_parquet_holds_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_writer, "_FILE_BYTES", 100)
    cube = jnp.arange(6.0).reshape(1, 3, 2)
    flat = lambda y: {"y": y, "up": y[:, 0] > 0, "half": y[:, 0].astype(jnp.float16)}  # noqa: E731
    make = lambda y: {**flat(y), "cube": y[..., None] * cube}  # noqa: E731
    writer = PredictionWriter("made", format="parquet")
    predict(predicts(make), jl.ArrayLoader(DATA | KEYS, 8), writer, host_keys=(*KEYS,))
    table = pyarrow.parquet.read_table("made")  # of all files in the folder
    assert len(os.listdir("made")) > 1 and set(table.column_names) == {"id", "day", "y", "up", "half", "cube"}
    y = expected("an array")["predictions"]
    np.testing.assert_allclose(np.stack(table["y"].to_numpy()), y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(table["cube"].to_pylist(), y[..., None] * cube, rtol=1e-5, atol=1e-6)
    assert table["half"].type == pyarrow.float32()
    assert table["up"].to_pylist() == (y[:, 0] > 0).tolist()
    for name, x in KEYS.items():
        assert table[name].to_pylist() == x.tolist()
    refuses(ArgumentError, lambda: PredictionWriter.load("made"), "finds no such files")


def test_host_keys_are_written() -> None:
    batches = jl.ArrayLoader(DATA | KEYS, 8)
    predict(predicts(lambda y: {"y": y}), batches, PredictionWriter("made"), host_keys=(*KEYS,))
    loaded = PredictionWriter.load("made")
    for name, x in KEYS.items():
        assert loaded.pop(name).tolist() == x.tolist()
    same(loaded, {"y": expected("an array")["predictions"]})


def test_loaders_have_files_of_their_own_and_a_new_run_replaces_them() -> None:
    model, writer = predicts(lambda y: y), PredictionWriter("made")
    trainer = make_trainer(writer, **BARE)
    several = [random(k, seed=k) for k in (1, 0, 2, 3, 1, 1, 1, 1, 1, 1, 2)]
    trainer.predict(model, several, return_predictions=False)
    for i, batches in enumerate(several):
        if batches:
            wanted = expected("an array", np.concatenate([b["x"] for b in batches]))
            same(PredictionWriter.load("made", i), wanted)
        else:
            refuses(ArgumentError, lambda i=i: PredictionWriter.load("made", i), "finds no such files")
    kept = trainer.predict(model, loader())
    same(PredictionWriter.load("made"), {"predictions": np.concatenate(kept or [])})
    assert sorted(os.listdir("made")) == ["predictions_0_00000.npz"]


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
    assert PredictionWriter.load("made")["predictions"].shape == (8, 1) and sorted(os.listdir(".")) == ["made"]


def test_at_most_two_batches_and_a_file_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_writer, "_FILE_BYTES", 1)
    refs, alive = list[Any](), list[int]()

    def count(trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        refs.append(weakref.ref(outputs))
        alive.append(sum(ref() is not None for ref in refs))

    predict(predicts(lambda y: y), random(9), PredictionWriter("made"), hooks(on_predict_batch_end=count))
    assert max(alive) <= 3 and len(alive) == 9


def predict_in_a_process() -> None:
    """Predict in one of two processes, with batches that divide among them and a tail that does not."""
    model = predicts(lambda y: {"y": y})
    predict(model, loader(), PredictionWriter("made"), strategy="ddp")
    os.makedirs("taken/by", exist_ok=True)
    predict(model, loader(), PredictionWriter("taken"), strategy="ddp")


@pytest.mark.full
def test_two_processes_write_all_rows_in_order(tmp_path: Path) -> None:
    first, second = launch(predict_in_a_process, tmp_path)
    same(PredictionWriter.load(tmp_path / "made"), {"y": expected("an array")["predictions"]})
    assert "ArgumentError" in first.errors and "holds no predictions" in first.errors
    assert second.code != 0 and "process 0" in second.errors


REFUSED: dict[str, Any] = {
    "a scalar": (lambda y: {"y": y, "mean": y.mean()}, r"one row for each row.*'mean': float32\[\]"),
    "other rows": (lambda y: {"y": y, "half": y[:4]}, r"one row for each row.*'half': float32\[4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_outputs_that_are_no_rows_are_refused(case: str) -> None:
    make, words = REFUSED[case]
    refuses(DataError, lambda: predict(predicts(make), loader(), PredictionWriter("made")), words)
    assert os.listdir(".") == []


def test_rows_of_other_shapes_are_an_error() -> None:
    other = [{"x": np.zeros((8, width), np.float32)} for width in (3, 2)]
    with pytest.raises(DataError, match="of the same shapes and dtypes in all batches"):
        predict(module(base=Linear, predict=lambda self, batch: batch["x"]), other, PredictionWriter("made"))
    assert os.listdir(".") == []


def test_a_link_stays_and_its_target_is_replaced() -> None:
    Path("disk/here").mkdir(parents=True)
    Path("link").symlink_to("disk/here")
    for scale in (1, 2):
        predict(predicts(lambda y, scale=scale: scale * y), loader(), PredictionWriter("link"))
        same(PredictionWriter.load("disk/here"), {"predictions": scale * expected("an array")["predictions"]})
    assert Path("link").is_symlink() and os.listdir("disk") == ["here"] and sorted(os.listdir(".")) == ["disk", "link"]


@pytest.mark.parametrize(
    ("folders", "error", "words"),
    [
        (["a", "b/../a"], ArgumentError, "two PredictionWriters of one folder"),
        (["file/made"], OSError, "file"),
        (["work"], ArgumentError, "holds no predictions"),
        ([".."], ArgumentError, "would replace"),
        (["a", "a/b"], ArgumentError, "would replace"),
    ],
)
def test_an_unusable_folder_is_refused_before_the_first_batch(folders: list[str], error: type, words: str) -> None:
    Path("file").write_text("")
    Path("work").mkdir()
    Path("work/predictions.npz").write_text("")
    begun: list[Any] = []
    watch, writers = hooks(on_predict_batch_start=lambda *_: begun.append(1)), map(PredictionWriter, folders)
    with pytest.raises(error, match=words):
        predict(predicts(lambda y: y), loader(), watch, *writers)
    assert begun == [] and sorted(os.listdir(".")) == ["file", "work"]
    assert os.listdir("work") == ["predictions.npz"]


def test_predictions_that_cannot_be_renamed_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(self: Path, target: Path) -> None:
        raise OSError(16, "Device or resource busy", str(self))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="resource busy.*partial"):
        patch.setattr(Path, "rename", busy)
        predict(predicts(lambda y: y), loader(), PredictionWriter("volume"))
    same(PredictionWriter.load(".volume.partial"), expected("an array"))
