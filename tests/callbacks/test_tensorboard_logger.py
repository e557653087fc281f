"""TensorBoardLogger, read back by the format of its files."""

import struct
import sys
import time
from collections import defaultdict
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.journal import hooks
from kit.modules import Mean
from kit.odd_names import LOGGED, train_odd_names
from kit.refusals import fit_refuses, refuses
from kit.trainers import fit
from kit.wandb_runs import PIXELS
from matplotlib.figure import Figure
from PIL import Image

from jaxlit.callbacks import TensorBoardLogger
from jaxlit.errors import ArgumentError, LoggerError

GIVEN = np.array([[0.0, 1.0, 1.0], [4.0, np.nan, np.inf]])
LOSSES = [1.0, (2 - mean([[1]])) ** 2, (3 - mean([[1], [2]])) ** 2]


class Scaled(Mean):
    def __init__(self, width: int = 3, api_key: str = "k", sizes: tuple = (1, 2)) -> None:
        super().__init__()


def events(folder):
    """Return the events of all files of a folder: each is its length, a checksum of it, the event and another."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    result = []
    for file in sorted(Path(folder).glob("events.*"), key=lambda file: file.stat().st_mtime_ns):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            result.append(event_pb2.Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return result


def values(folder):
    """Return what was logged: by name a list of (step, value)."""
    result = defaultdict(list)
    for event in events(folder):
        for value in event.summary.value:
            result[value.tag].append((event.step, value))
    return result


def scalars(folder, name="loss"):
    return [(at, value.simple_value) for at, value in values(folder)[name]]


def draw(trainer, *_):
    log = trainer.logger
    log.log_image("image", PIXELS)
    log.log_image("two", [PIXELS[..., 0], Image.fromarray(PIXELS)], caption=["first", "second"], step=7)
    log.log_text("note", "a text")
    log.log_table("table", ["name", "value"], [("one", 1), ["a|b", None]])
    log.log_histogram("histogram", GIVEN, bins=4)
    log.log_figure("figure", Figure(figsize=(1, 0.5), dpi=40))


def train(**arguments):
    pytest.importorskip("tensorboardX")
    given = {"logger": TensorBoardLogger(), "default_root_dir": "run", "log_every_n_steps": 1} | arguments
    return fit(Scaled(), numbered(3), None, hooks(on_train_end=draw), **given)


def test_rows_and_what_is_no_number_are_in_the_file():
    trainer = train()
    result = values("run")
    assert scalars("run") == [*enumerate(LOSSES)]
    assert scalars("run", "epoch") == [(0, 0.0), (1, 0.0), (2, 0.0)]
    for name, at, pixels in (("image", 2, PIXELS), ("two/0", 7, PIXELS[..., 0])):
        ((step, value),) = result[name]
        with Image.open(BytesIO(value.image.encoded_image_string)) as image:
            np.testing.assert_array_equal(np.asarray(image.convert("RGB" if pixels.ndim == 3 else "L")), pixels)
        assert step == at
    assert (result["figure"][0][1].image.width, result["figure"][0][1].image.height) == (40, 20)
    texts = {k: result[k][0][1].tensor.string_val[0].decode() for k in result if "text_summary" in k}
    assert texts["note/text_summary"] == "a text" and texts["two/captions/text_summary"] == "first\n\nsecond"
    assert texts["table/text_summary"] == "| name | value |\n| --- | --- |\n| one | 1 |\n| a\\|b | None |"
    histogram, finite = result["histogram"][0][1].histo, GIVEN[np.isfinite(GIVEN)]
    counts, edges = np.histogram(finite, 4)
    assert ([*histogram.bucket], [*histogram.bucket_limit]) == ([*counts], [*edges[1:]])
    assert (histogram.num, histogram.sum, histogram.sum_squares) == (4, finite.sum(), (finite**2).sum())
    told = result["_hparams_/session_start_info"][0][1].metadata.plugin_data.content
    assert all(word in told for word in (b"width", b"[1, 2]", b"<redacted>"))
    logger = trainer.logger
    assert logger.log_dir == Path("run").absolute() and logger.experiment is not None


def test_odd_names_stay_as_they_are():
    pytest.importorskip("tensorboardX")
    train_odd_names(TensorBoardLogger())
    assert {name: scalars("run", name) for name in LOGGED} == LOGGED


def test_a_resume_drops_rows_that_it_makes_again(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9)  # which names the files
    train(max_epochs=1)
    train(max_epochs=2, logger=TensorBoardLogger(), resume="auto")
    assert [event.step for event in events("run") if event.HasField("session_log")] == [3]
    assert [step for step, _ in scalars("run")] == [0, 1, 2, 3, 4, 5]


def test_folders_and_names_are_chosen():
    logger = TensorBoardLogger("logs", name="digits", version="one", prefix="mine")
    train(logger=logger)
    assert (logger.name, logger.version, logger.log_dir) == ("digits", "one", Path("logs/digits/one").absolute())
    assert scalars("logs/digits/one", "mine/loss") == [*enumerate(LOSSES)]
    refuses(ArgumentError, lambda: TensorBoardLogger(name="x"), r"name='x'.* are folders in save_dir")


def test_without_the_package_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    fit_refuses(LoggerError, r"needs tensorboardX.*pip install tensorboardX", logger=TensorBoardLogger())
