"""Pictures, tables and texts under every logger: they change nothing, end nothing, and are found again."""

import csv
import inspect
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.journal import hooks
from kit.modules import Mean
from kit.refusals import refuses
from kit.trainers import fit, make_trainer, thinned
from kit.wandb_runs import PIXELS
from matplotlib.figure import Figure
from PIL import Image

from jaxlit.callbacks import CSVLogger, Logger, MLFlowLogger, NoLogger, TensorBoardLogger, WandbLogger
from jaxlit.errors import ArgumentError, LoggerError

GIVEN = np.arange(20.0).reshape(4, 5)
TWO = {"default_root_dir": "run", "max_epochs": 2}
KINDS = {"txt", "csv", "json", "png"}
STORE_ALL = (WandbLogger, TensorBoardLogger)


def draw(trainer, *_):
    log = trainer.logger
    log.log_text("kinds/text", "a text")
    log.log_table("kinds/table", ["name", "value"], [("one", 1), ["two, or more", None]])
    log.log_histogram("kinds/histogram", GIVEN, bins=4)
    log.log_image("kinds/image", PIXELS)
    log.log_figure("kinds/figure", Figure(figsize=(1, 0.5), dpi=40))


def media(folder="run/media"):
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*.*"))


@pytest.mark.parametrize(
    "logger",
    thinned([True, False, CSVLogger(), TensorBoardLogger(), WandbLogger(offline=True)], True, False, full=[]),
)
def test_media_that_a_logger_does_not_store_are_in_the_folder(logger, capsys):
    module = Mean()
    fit(module, numbered(3), None, hooks(on_train_epoch_end=draw), logger=logger, log_every_n_steps=1, **TWO)
    assert float(module.w[0]) == mean([[1], [2], [3]] * 2)
    kinds = set() if isinstance(logger, STORE_ALL) else KINDS
    names = {"text": "txt", "table": "csv", "histogram": "json", "image": "png", "figure": "png"}
    expected = [f"kinds/{name}/{step}.{kind}" for name, kind in names.items() for step in (2, 5) if kind in kinds]
    assert (media() if kinds else []) == sorted(expected)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("images, ")]
    assert told == ["images, tables and texts are saved in run/media: their logger does not store them"] * bool(kinds)


def test_files_of_the_folder_hold_what_was_logged():
    fit(Mean(), numbered(3), None, hooks(on_train_end=draw), default_root_dir="run", logger=False)
    folder = Path("run/media/kinds")
    with Image.open(folder / "image/2.png") as image:
        np.testing.assert_array_equal(np.asarray(image), PIXELS)
    with Image.open(folder / "figure/2.png") as figure:
        assert figure.size == (40, 20)
    assert (folder / "text/2.txt").read_text() == "a text"
    with (folder / "table/2.csv").open(newline="") as file:
        assert [*csv.reader(file)] == [["name", "value"], ["one", "1"], ["two, or more", ""]]
    counts, edges = np.histogram(GIVEN, 4)
    assert json.loads((folder / "histogram/2.json").read_text()) == {"counts": [*counts], "edges": [*edges]}


def test_media_of_one_step_are_numbered_and_overwritten_by_a_run():
    def log(trainer, *_):
        Image.fromarray(PIXELS).save("there.bmp")
        trainer.logger.log_image("a", [PIXELS, Image.fromarray(PIXELS), "there.bmp"], caption=["x", "y", "z"], step=7)
        trainer.logger.log_text("a", "again", step=np.int64(7))
        trainer.logger.log_text("../b/./c:d", "a key that is no path", step=0)

    trainer = make_trainer(hooks(on_fit_start=log), default_root_dir="run", logger=False)
    for _ in range(2):
        trainer.fit(Mean(), numbered(1))
        pictures = ["a/7.png", "a/7.txt", "a/7_1.png", "a/7_1.txt", "a/7_2.png", "a/7_2.txt", "a/7_3.txt"]
        assert media() == ["_/b/_/c_d/0.txt", *pictures]
    assert [Path(f"run/media/a/7{n}.txt").read_text() for n in ("", "_1", "_2", "_3")] == ["x", "y", "z", "again"]


class Holds(Logger):
    """Keeps texts and pictures, and passes tables on as its base does."""

    def __init__(self):
        self.texts, self.images, self.tables = [], [], 0

    def log_text(self, key, text, *, step=None):
        self.texts.append((key, text, step))

    def log_image(self, key, images, *, caption=None, step=None):
        self.images.append((key, caption))

    def log_table(self, key, columns, data, *, step=None):
        self.tables += 1
        super().log_table(key, columns, data, step=step)


def test_a_logger_stores_media_or_gives_them_to_the_folder():
    def log(trainer, *_):
        for logger in trainer.loggers:
            logger.log_text("note", "hello", step=7)
            logger.log_image("picture", PIXELS, caption=["a"])
            logger.log_table("table", ["x"], [[1]])
            logger.log_histogram("counts", GIVEN)

    holds = Holds()
    fit(Mean(), numbered(1), None, hooks(on_train_end=log), logger=[holds, CSVLogger()], default_root_dir="run")
    assert (holds.texts, holds.images, holds.tables) == ([("note", "hello", 7)], [("picture", ["a"])], 1)
    of_csv = ["note/7.txt", "picture/0.png", "picture/0.txt"]
    assert media() == ["counts/0.json", "counts/0_1.json", *of_csv, "table/0.csv", "table/0_1.csv"]


class Broken(Logger):
    def log_histogram(self, key, values, *, bins=64, step=None):
        raise OSError("no way out")


FAILS = {"log_image": ("a", "no_file.png"), "log_figure": ("a", None)}  # a figure is logged as an image


class Narrow(Logger):
    """Takes no step."""

    def log_text(self, key, text):
        raise AssertionError


def test_what_a_method_cannot_take_is_in_the_folder(caplog):
    log = hooks(on_train_end=lambda t, m: t.logger.log_text("note", "hello", step=3))
    with caplog.at_level(logging.WARNING, "jaxlit"):
        fit(Mean(), numbered(1), None, log, logger=Narrow(), default_root_dir="run")
    (message,) = [record.getMessage() for record in caplog.records]
    assert re.search(r"Narrow\.log_text failed: .*'step'.*It is kept", message)
    assert Path("run/media/note/3.txt").read_text() == "hello"


def test_a_failure_is_a_warning_and_ends_no_training(caplog):
    def log(trainer, *_):
        for name, given in FAILS.items():
            getattr(trainer.logger, name)(*given)
        trainer.loggers[1].log_histogram("kept", GIVEN)

    loggers, module = [CSVLogger(), Broken()], Mean()
    with caplog.at_level(logging.WARNING, "jaxlit"):
        fit(module, numbered(2), None, hooks(on_train_batch_end=log), logger=loggers, default_root_dir="run")
    assert float(module.w[0]) == mean([[1], [2]]) and media() == ["kept/0.json", "kept/1.json"]
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(" failed")[0] for line in told] == [*["CSVLogger.log_image"] * 2, "Broken.log_histogram"]
    assert "FileNotFoundError" in told[0] and ["It is left out, and training" in line for line in told] == [1, 1, 0]
    assert "no way out" in told[-1] and "It is kept in the run's media folder" in told[-1]


SIGNATURES = {
    "log_text": "(key, columns=None, data=None, dataframe=None, step=None)",
    "log_table": "(key, columns=None, data=None, dataframe=None, step=None)",
    "log_image": "(key, images, step=None, caption=None)",
}
CALLS = [
    ("log_image", ("a", [PIXELS]), {"captions": ["x"]}, r"log_image\(key, .*unexpected keyword argument 'captions'"),
    ("log_table", ("a", ["x"]), {}, r"log_table\(key, .*'NoneType' object is not iterable"),
    ("log_text", ("a", "b", 3), {}, r"log_text\(key, columns=None, .*'int' object is not iterable"),
    ("log_text", ("a",), {}, r"log_text\(key, columns=None, .*'NoneType' object is not iterable"),
    ("log_image", ("a", PIXELS), {"caption": "cat"}, r"log_image\('a', .*a caption for each .*1 images and 'cat'"),
    ("log_image", ("a", [PIXELS, PIXELS]), {"caption": ["a"]}, r"2 images and \['a'\]"),
    ("log_image", ("a", np.zeros((4, 5), np.int32)), {}, r"log_image\('a', .*int32\[4, 5\]"),
    ("log_text", ("", "text"), {}, "logs under a name .*got ''"),
]


def test_a_users_logger_may_take_other_arguments():
    class Captions(Logger):
        def log_image(self, key, image, caption="", step=None):
            self.given = key, caption, step

    logger = Captions()
    logger.log_image("cat", np.zeros((2, 2)), caption="cat", step="now")
    assert logger.given == ("cat", "cat", "now")


LOGGERS = (CSVLogger, TensorBoardLogger, Broken, NoLogger)


@pytest.mark.parametrize(
    ("logger", "name", "args", "named", "words"), [(kind, *call) for kind in LOGGERS for call in CALLS]
)
def test_a_wrong_call_is_a_warning_that_names_the_arguments(logger, name, args, named, words, caplog):
    wrong = hooks(on_train_batch_end=lambda t, *_: getattr(t.logger, name)(*args, **named))
    module, loggers = Mean(), logger is not NoLogger and logger()
    with caplog.at_level(logging.WARNING, "jaxlit"):
        fit(module, numbered(2), None, wrong, logger=loggers, default_root_dir="run")
    assert float(module.w[0]) == mean([[1], [2]])
    (message,) = [record.getMessage() for record in caplog.records]
    assert re.search(f"{logger.__name__}.{name} failed: .*{words}", message)
    refuses((ArgumentError, TypeError), lambda: fit(Mean(), numbered(1), None, wrong, fast_dev_run=True), words)


@pytest.mark.parametrize("logger", [CSVLogger, TensorBoardLogger, WandbLogger, MLFlowLogger, NoLogger])
def test_every_logger_has_lightnings_methods(logger):
    for name, expected in SIGNATURES.items():
        parameters = [*inspect.signature(getattr(logger, name)).parameters.values()][1:]
        assert f"({', '.join(str(x.replace(annotation=x.empty)) for x in parameters)})" == expected


class Lightnings(Logger):
    """Has the arguments of Lightning's logger."""

    def __init__(self):
        self.tables = []

    def log_table(self, key, columns=None, data=None, dataframe=None, step=None):
        self.tables.append((key, columns, data, dataframe, step))


def test_lightnings_calls_reach_every_logger():
    frame = SimpleNamespace(columns=["x", "y"], values=np.array([[1, "b"]], object))  # as of pandas

    def log(trainer, *_):
        for logger in trainer.loggers:
            logger.log_text(key="text", columns=["x", "y"], data=[[1, "b"]], step=5)
            logger.log_text(key="note", text="hello")
            logger.log_table("frame", dataframe=frame)
            logger.log_table("list", ["x"], [(1,)], None, 6)
            logger.log_image("image", [PIXELS], 7, caption=["a"])

    holds, lightnings = Holds(), Lightnings()
    fit(Mean(), numbered(1), None, hooks(on_train_end=log), logger=[holds, lightnings], default_root_dir="run")
    rows = [["x", "y"], [[1, "b"]], None]
    assert lightnings.tables == [("text", *rows, 5), ("frame", *rows, None), ("list", ["x"], [[1]], None, 6)]
    assert (holds.texts, holds.images, holds.tables) == ([("note", "hello", None)], [("image", ["a"])], 3)
    assert media() == ["frame/0.csv", "image/7.png", "image/7.txt", "list/6.csv", "note/0.txt", "text/5.csv"]
    assert Path("run/media/text/5.csv").read_text() == Path("run/media/frame/0.csv").read_text() == "x,y\n1,b\n"


@pytest.mark.parametrize("arguments", [{"fast_dev_run": True}, {"logger": CSVLogger(on_error="raise")}])
def test_a_failure_is_raised_in_a_trial_run_or_if_asked(arguments):
    fails = hooks(on_train_end=lambda t, m: t.logger.log_image(*FAILS["log_image"]))
    refuses(OSError, lambda: fit(Mean(), numbered(1), None, fails, **arguments), "no_file.png")


def test_a_trial_run_makes_everything_and_keeps_nothing():
    trainer = fit(Mean(), numbered(1), None, hooks(on_train_end=draw), default_root_dir="run", fast_dev_run=True)
    assert isinstance(trainer.logger, NoLogger) and not Path("run").exists()


def test_before_a_run_there_is_no_folder():
    refuses(LoggerError, lambda: CSVLogger().log_text("note", "hello"), "CSVLogger has no run yet.*from a hook")
