"""What WandbLogger sends beside numbers, with the real SDK without network."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from matplotlib.figure import Figure
from PIL import Image
from wandb_model import Line, data
from wandb_offline import history, run_file, summary

import jaxlit as jl
from jaxlit.callbacks import WandbLogger
from jaxlit.errors import ArgumentError, LoggerError

STEP = "trainer/global_step"
COLORS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
GRAYS = np.linspace(0, 1, 20, dtype=np.float32).reshape(4, 5)
WILD = np.array([[-1.0, 0.0, 0.5], [2.0, np.nan, np.inf]])
VALUES = np.array([[0.0, 1.0, 1.0], [4.0, np.nan, np.inf]])

# What is given, and the picture that it must become.
IMAGES: dict[str, tuple[Any, Any]] = {
    "colors": (COLORS, COLORS),
    "with alpha": (np.dstack([COLORS, COLORS[..., :1]]), np.dstack([COLORS, COLORS[..., :1]])),
    "one channel": (COLORS[..., :1], COLORS[..., 0]),
    "float grays": (GRAYS, np.uint8(np.round(GRAYS * 255))),
    "float colors": (COLORS / 255, COLORS),
    "of the device": (jnp.asarray(GRAYS), np.uint8(np.round(GRAYS * 255))),
    "bfloat16": (jnp.ones((2, 3), jnp.bfloat16), np.full((2, 3), 255, np.uint8)),
    "bool": (np.eye(3, dtype=bool), np.eye(3, dtype=np.uint8) * 255),
    "out of range": (WILD, np.array([[0, 0, 128], [255, 0, 255]], np.uint8)),
    "Pillow": (Image.fromarray(COLORS), COLORS),
}


class Media(jl.Callback):
    """Logs one of everything at the end of training."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        (logger,) = (c for c in trainer.callbacks if isinstance(c, WandbLogger))
        for name, (given, _) in IMAGES.items():
            logger.log_image(name, given)
        reused = COLORS.copy()
        logger.log_image("reused", reused)
        reused[:] = 0
        Image.fromarray(COLORS).save("picture.png")
        logger.log_image("from a file", [Path("picture.png")])
        logger.log_image("two", [COLORS, COLORS + 1], captions=["first", "second"])
        logger.log_table("table", ["name", "value"], [("one", 1), ["two", 2.5]])
        logger.log_table("mixed", ["name", "value"], [["one", 1], [2, "two"], [None, 2.5]])
        logger.log_histogram("histogram", VALUES, bins=4)
        logger.log_text("note", "a text")
        logger.log_text("note", "another", step=7)
        figure = Figure(figsize=(2, 1), dpi=100, facecolor="#ff0000")
        logger.log_figure("figure", figure)
        figure.set_facecolor("#00ff00")


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The summary of a training that logged one of everything, and the folder of the run's files."""
    folder = tmp_path_factory.mktemp("media")
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_checkpointing": False}
    callbacks = [WandbLogger(offline=True), Media()]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        jl.Trainer(max_epochs=1, default_root_dir=folder, callbacks=callbacks, **quiet).fit(
            Line(rngs=nnx.Rngs(0)), data()
        )
    return summary(folder)["summary"], run_file(folder).parent / "files"


def picture(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_arrives_pixel_by_pixel(logged: tuple[dict[str, Any], Path], name: str) -> None:
    entry, files = logged[0][name], logged[1]
    (path,) = entry["filenames"]
    np.testing.assert_array_equal(picture(files / path), IMAGES[name][1])


def test_an_array_may_be_overwritten_once_it_was_given(logged: tuple[dict[str, Any], Path]) -> None:
    (path,) = logged[0]["reused"]["filenames"]
    np.testing.assert_array_equal(picture(logged[1] / path), COLORS)


def test_an_image_may_be_a_file(logged: tuple[dict[str, Any], Path]) -> None:
    (path,) = logged[0]["from a file"]["filenames"]
    np.testing.assert_array_equal(picture(logged[1] / path), COLORS)


def test_several_images_have_a_caption_each(logged: tuple[dict[str, Any], Path]) -> None:
    entry, files = logged[0]["two"], logged[1]
    assert entry["captions"] == ["first", "second"]
    for path, expected in zip(entry["filenames"], (COLORS, COLORS + 1), strict=True):
        np.testing.assert_array_equal(picture(files / path), expected)


def test_a_table_arrives_with_its_cells(logged: tuple[dict[str, Any], Path]) -> None:
    expected = {"table": [["one", 1], ["two", 2.5]], "mixed": [["one", 1], [2, "two"], [None, 2.5]]}
    for name, cells in expected.items():
        table = json.loads((logged[1] / logged[0][name]["path"]).read_text())
        assert (table["columns"], table["data"]) == (["name", "value"], cells)


def test_a_histogram_counts_what_is_finite(logged: tuple[dict[str, Any], Path]) -> None:
    entry = logged[0]["histogram"]
    assert (entry["values"], entry["bins"]) == ([1, 2, 0, 1], [0.0, 1.0, 2.0, 3.0, 4.0])


def test_a_text_arrives_with_the_step_that_was_given_or_the_newest(logged: tuple[dict[str, Any], Path]) -> None:
    rows = history(logged[1].parents[2])
    assert [row for row in rows if "note" in row] == [
        {"note": "a text", STEP: 1},
        {"note": "another", STEP: 7},
    ]


def test_a_figure_arrives_as_it_was_drawn_then(logged: tuple[dict[str, Any], Path]) -> None:
    pixels = picture(logged[1] / logged[0]["figure"]["path"])
    assert pixels.shape[:2] == (100, 200) and (pixels[..., :3] == [255, 0, 0]).all()


@pytest.fixture
def logger(make_trainer: Callable[..., Any]) -> WandbLogger:
    """A logger after the start of a training, in a process that has no run: nothing is opened."""
    trainer, found = make_trainer(is_global_zero=False), WandbLogger(offline=True)
    trainer.start(found)
    return found


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3, np.uint8),
        np.zeros((2, 3, 4, 5), np.uint8),
        np.zeros((4, 5, 2), np.uint8),
        np.zeros((3, 4, 5), np.uint8),
        np.zeros((0, 5), np.uint8),
        np.zeros((4, 5), np.int32),
        np.zeros((4, 5), np.complex64),
        np.array([["a"]]),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
def test_what_is_no_image_is_refused_with_its_shape(logger: WandbLogger, array: np.ndarray) -> None:
    with pytest.raises(ArgumentError) as error:
        logger.log_image("key", [array])
    assert "'key'" in str(error.value) and f"{array.dtype}{list(array.shape)}" in str(error.value)


@pytest.mark.parametrize(
    ("rows", "message"), [([[1]], "row 0 has 1 cells"), ([[1, 2], [1, 2, 3]], "row 1 has 3 cells")]
)
def test_a_row_of_another_length_is_refused_with_its_number(logger: WandbLogger, rows: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"log_table\\('key', .*{message}, and there are 2 columns"):
        logger.log_table("key", ["a", "b"], rows)


@pytest.mark.parametrize("bins", [0, -1, 513, 1000, 2.0, True, None])
def test_more_bins_than_wandb_takes_are_refused(logger: WandbLogger, bins: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"log_histogram\(bins=\.\.\.\) takes an int from 1 to 512.*got {bins}"):
        logger.log_histogram("key", [1.0], bins=bins)


@pytest.mark.parametrize("key", ["step", "epoch", "", 3])
def test_a_name_that_every_row_has_is_refused(logger: WandbLogger, key: Any) -> None:
    calls = {"log_text": "x", "log_table": (["a"], [[1]]), "log_histogram": [1.0], "log_image": COLORS}
    for name, value in calls.items():
        given = value if isinstance(value, tuple) else (value,)
        with pytest.raises(ArgumentError, match=f"^WandbLogger logs under a name .*got {key!r}"):
            getattr(logger, name)(key, *given)


def test_another_number_of_captions_is_refused(logger: WandbLogger) -> None:
    with pytest.raises(ArgumentError, match="2 images and 1 captions"):
        logger.log_image("key", [COLORS, COLORS], captions=["one"])


@pytest.mark.parametrize(("method", "value"), [("log_image", COLORS), ("log_figure", Figure())])
def test_without_pillow_the_error_says_what_to_do(
    logger: WandbLogger, monkeypatch: pytest.MonkeyPatch, method: str, value: Any
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(LoggerError, match="pip install pillow"):
        getattr(logger, method)("key", value)
