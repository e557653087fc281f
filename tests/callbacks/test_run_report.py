"""RunReport: the page of a fit, read back by an XML parser."""

import contextlib
import itertools
import re
import signal
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.batches import numbered
from kit.journal import Rows, hooks
from kit.modules import Mean, logging, module
from kit.refusals import refuses, warnings_of
from kit.trainers import fit, make_trainer

import jaxlit as jl
from jaxlit.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint, NoLogger, RunReport
from jaxlit.errors import ArgumentError

EVIL = "<script>alert('x')</script>"
KEY = "hf_" + "Ab1" * 12  # as Hugging Face's keys are made


class Page:
    """The tags, tables and texts of a page, whose every tag is closed."""

    def __init__(self, text: str) -> None:
        self.root = ET.fromstring(re.sub("<!doctype html>|<meta[^>]*>", "", text))
        self.tags = [(x.tag, x.attrib) for x in self.root.iter()]
        self.text = "".join(self.root[1].itertext())

    def rows(self, title: str) -> dict[str, list[str]]:
        pairs = (pair for parent in self.root.iter() for pair in itertools.pairwise(parent))
        (table,) = (after for head, after in pairs if head.tag in ("h2", "summary") and head.text == title)
        cells = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
        return {first: rest for first, *rest in cells[1:]}


def read(path: str | Path = "run/report.html") -> Page:
    return Page(Path(path).read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, str, jl.Trainer, Rows]]:
    """A training of two epochs whose texts would break a page, and its page."""

    def init(self: Any, width: int = 3, note: str = EVIL, api_key: str = KEY) -> None:
        Mean.__init__(self)

    def step(self: Any, batch: Any) -> Any:
        loss = (self.error(batch) ** 2).mean()
        self.log("<b>loss</b>", loss)
        self.log("train/loss", loss)
        return loss

    folder, rows = tmp_path_factory.mktemp("report"), Rows()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        best = ModelCheckpoint(monitor="val", mode="max", save_top_k=2)
        callbacks = [RunReport(), best, rows]
        arguments = {"max_epochs": 2, "log_every_n_steps": 1, "default_root_dir": "run"}
        trainer = fit(module(step, init=init), numbered(4), numbered(1, 9), *callbacks, **arguments)
        text = Path("run/report.html").read_text()
        yield read(), text, trainer, rows


def test_the_page_needs_nothing_beside_itself(trained: Any) -> None:
    page, text, *_ = trained
    assert not re.search(r"https?:|//|@import|url\(|<script|<link|<iframe|<img", text.replace("<!doctype", ""))
    assert all(not {"src", "href"} & attrs.keys() for _, attrs in page.tags)
    assert len(text.encode()) < 60_000


def test_texts_of_the_user_are_escaped_and_secrets_hidden(trained: Any) -> None:
    page, text, *_ = trained
    assert EVIL not in text and "<b>loss</b>" not in text
    assert page.rows("Hyperparameters")["note"] == [EVIL] and "<b>loss</b>" in page.rows("Metrics")
    assert KEY not in text and page.rows("Hyperparameters")["api_key"] == ["<redacted>"]


def test_the_numbers_are_those_that_were_logged(trained: Any) -> None:
    page, _, trainer, rows = trained
    result = page.rows("Metrics")
    for name in ("train/loss", "val"):
        values = rows.of(name)
        last, least, largest = (float(cell.split(" at ")[0]) for cell in result[name])
        assert (last, least, largest) == pytest.approx((values[-1], min(values), max(values)), rel=1e-4)
        at = {step for step, row in rows.rows if row.get(name) == max(values)}
        assert int(result[name][2].split(" at ")[1]) in at
    assert [attrs["class"] for tag, attrs in page.tags if tag == "td" and "best" in attrs.get("class", "")] == [
        "n best"
    ]
    assert f"{max(rows.of('val')):.4g}best val" in page.text  # a tile
    assert "8optimizer steps" in page.text and "2epochs" in page.text and "1parameters" in page.text
    best, last = Path(trainer.checkpoint_callback.best_model_path).name, "step_00000008"
    marks = {Path(name).name: rest[0] for name, rest in page.rows("Checkpoints").items()}
    assert "best" in marks[best] and "last" in marks[last]
    assert page.rows("Environment")["strategy"] == [trainer.strategy.describe()]
    assert page.rows("Trainer, where it is not the default")["max_epochs"] == ["2"]
    assert "train_step" in page.text and str(trainer.explain()).splitlines()[-1] in page.text


def test_best_is_that_of_the_checkpoints_everywhere(capsys: Any) -> None:
    saves = [ModelCheckpoint("plain"), ModelCheckpoint(monitor="val", mode="max")]
    callbacks = [EarlyStopping("loss", min_delta=0), *saves, RunReport()]
    arguments = {"default_root_dir": "run", "logger": False, "log_every_n_steps": 1}
    assert fit(Mean(), numbered(2), numbered(1, 9), *callbacks, **arguments).checkpoint_callback.monitor == "val"
    assert "best val 7.75" in capsys.readouterr().out
    assert "7.75best val" in read().text


def test_the_loggers_that_were_given_are_named() -> None:
    fit(Mean(), numbered(1), None, RunReport(), default_root_dir="run", logger=[NoLogger(), CSVLogger()])
    assert read().rows("Trainer, where it is not the default")["logger"] == ["NoLogger, CSVLogger"]


def test_two_reports_of_one_file_are_refused() -> None:
    refuses(ArgumentError, lambda: make_trainer(RunReport(), RunReport()), "two RunReports of one report.html")
    make_trainer(RunReport(), RunReport("other.html"))


ENDINGS: dict[str, tuple[int, Any, str]] = {  # the step, what happens then, and what the page says
    "done": (99, None, "done"),
    "a stop": (1, lambda t: t.stop("flat & low"), "done"),
    "an error": (7, lambda t: {}[KEY], "ended by KeyError"),
    "Ctrl-C": (5, lambda t: signal.raise_signal(signal.SIGINT), "interrupted"),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_however_a_fit_ends_the_page_says_so(case: str, capsys: Any) -> None:
    step, do, state = ENDINGS[case]
    callback = hooks(on_train_batch_end=lambda t, *_: do(t) if t.global_step == step else None)
    trainer = make_trainer(RunReport(), callback, default_root_dir="run", max_epochs=2, log_every_n_steps=1)
    model = logging(lambda module, batch, i: module.log("count", 1.0 * module.global_step))
    with pytest.raises(KeyError) if case == "an error" else contextlib.nullcontext():
        trainer.fit(model, numbered(4))
    page = read()
    assert state in page.text and ("flat & low" in page.text) == (case == "a stop")
    # The row of the step whose hook has failed as well, and the checkpoint that the error has left.
    assert int(page.rows("Metrics")["count"][2].split(" at ")[1]) == trainer.global_step - 1
    assert any(f"step_0000000{trainer.global_step}" in name for name in page.rows("Checkpoints"))
    assert "report      run/report.html · run/metrics.csv" in capsys.readouterr().out


def test_a_resumed_training_shows_its_curves_from_the_beginning() -> None:
    for epochs in (1, 2):
        arguments = {"default_root_dir": "run", "resume": "auto", "max_epochs": epochs, "log_every_n_steps": 1}
        trainer = fit(Mean(), numbered(4), None, RunReport(), **arguments)
    assert [*trainer.history["loss"][0]] == [4, 5, 6, 7]
    points, _ = (attrs["points"] for tag, attrs in read().tags if tag == "polyline")  # the loss, the rate
    assert len(points.split()) == 8


def test_a_page_that_cannot_be_written_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    block = hooks(on_train_end=lambda *_: Path("run/report.html").mkdir())
    trainer = fit(Mean(), numbered(2), None, report := RunReport(), block, default_root_dir="run")
    assert trainer.global_step == 2 and report.location is None
    (told,) = warnings_of(caplog)
    assert "RunReport cannot write" in told
