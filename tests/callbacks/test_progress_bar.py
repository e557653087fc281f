"""ProgressBar on a stream that is a terminal, and on one that is not."""

import io
import re
import sys
import time

import pytest

from jaxlit.callbacks import ProgressBar
from jaxlit.errors import ArgumentError


class Terminal(io.StringIO):
    """A terminal that keeps all that was written to it."""

    def isatty(self):
        return True

    @property
    def lines(self):
        """What a reader sees in the end: cursor movements are carried out."""
        seen, row = [""], 0
        for token in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", self.getvalue()):
            if token == "\n":
                row += 1
                seen += [""] * (row + 1 - len(seen))
            elif token.endswith("A") and token.startswith("\x1b"):
                row -= int(token[2:-1] or 1)
            elif token == "\x1b[2K":
                seen[row] = ""
            elif not token.startswith("\x1b") and token != "\r":
                seen[row] += token
        return [line.rstrip() for line in seen]


@pytest.fixture
def open_terminal(monkeypatch):
    """Return a function that puts a terminal in stdout's place; called in the test, after pytest's own capture."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")

    def open_it():
        monkeypatch.setattr(sys, "stdout", Terminal())
        return sys.stdout

    return open_it


def fit(trainer, bar, *, epochs=2):
    trainer.start(bar)
    for epoch in range(epochs):
        trainer.train_epoch(bar, val={"val/loss": 0.5 / (epoch + 1)})
    trainer.end(bar)


def test_without_a_terminal_an_epoch_is_one_line(make_trainer, capsys):
    fit(make_trainer(), ProgressBar())
    lines = capsys.readouterr().out.splitlines()
    assert [line[:12] for line in lines[1:-1]] == ["epoch  1/10 ", "epoch  2/10 "]


def test_without_a_terminal_no_control_codes_are_written(make_trainer, capsys):
    fit(make_trainer(), ProgressBar())
    assert "\x1b" not in capsys.readouterr().out


def test_a_line_shows_count_and_metrics(make_trainer, capsys):
    fit(make_trainer(), ProgressBar())
    line = capsys.readouterr().out.splitlines()[2]
    assert "4/4" in line and line.endswith("val/loss 0.25")


def test_the_header_names_the_strategy(make_trainer, capsys):
    fit(make_trainer(), ProgressBar())
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("jaxlit ") and "8 cpu devices" in line and line.endswith("DDP on mesh data=8")


def test_the_last_line_counts_what_was_done_and_says_why_it_ended(make_trainer, capsys):
    trainer, bar = make_trainer(), ProgressBar()
    trainer.start(bar)
    trainer.train_epoch(bar)
    trainer.stop("the loss is flat")
    trainer.end(bar)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("done 1 epoch, 4 steps in ") and line.endswith("the loss is flat")


def test_on_a_terminal_each_epoch_leaves_its_final_line(make_trainer, open_terminal):
    terminal = open_terminal()
    fit(make_trainer(), ProgressBar())
    left = [line for line in terminal.lines if line.startswith("epoch")]
    assert len(left) == 2
    assert [line.split()[-1] for line in left] == ["0.5", "0.25"]


def test_a_users_print_stays_a_line_of_its_own(make_trainer, open_terminal):
    terminal = open_terminal()
    trainer, bar = make_trainer(), ProgressBar()
    trainer.start(bar)
    bar.on_train_epoch_start(trainer, trainer.module)
    bar.on_train_batch_end(trainer, trainer.module, {}, None, 0)
    print("hello from the user")
    bar.on_train_epoch_end(trainer, trainer.module)
    trainer.end(bar)
    assert "hello from the user" in terminal.lines


@pytest.mark.parametrize("hook", ["on_exception", "teardown"])
def test_stdout_and_cursor_are_given_back(make_trainer, open_terminal, hook):
    terminal = open_terminal()
    trainer, bar = make_trainer(), ProgressBar()
    trainer.start(bar)
    bar.on_train_epoch_start(trainer, trainer.module)
    if hook == "on_exception":
        bar.on_exception(trainer, trainer.module, ValueError())
    else:
        bar.teardown(trainer, trainer.module, "fit")
    assert sys.stdout is terminal
    assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")


def test_the_bar_is_drawn_only_when_the_interval_has_passed(make_trainer, open_terminal, monkeypatch):
    terminal = open_terminal()
    trainer, bar = make_trainer(num_training_batches=1000), ProgressBar(refresh_rate=10)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    trainer.start(bar)
    bar.on_train_epoch_start(trainer, trainer.module)
    drawn = []
    for i in range(1000):
        before = len(terminal.getvalue())
        now[0] = 100.0 + i / 1000
        bar.on_train_batch_end(trainer, trainer.module, {}, None, i)
        drawn += [i] if len(terminal.getvalue()) > before else []
    bar.on_exception(trainer, trainer.module, ValueError())
    assert 8 <= len(drawn) <= 11  # ten a second, in one second


@pytest.mark.parametrize("on_terminal", [True, False])
def test_no_metric_is_read_during_an_epoch(make_trainer, open_terminal, on_terminal):
    if on_terminal:
        open_terminal()
    trainer, bar = make_trainer(), ProgressBar()
    trainer.start(bar)
    trainer.callback_metrics.values_of["train/loss"] = 1.0
    bar.on_train_epoch_start(trainer, trainer.module)
    for i in range(4):
        bar.on_train_batch_end(trainer, trainer.module, {}, None, i)
    bar.on_log(trainer, {"train/loss": 1.0, "epoch": 0}, 3)
    reads = trainer.progress_bar_metrics.reads
    bar.on_exception(trainer, trainer.module, ValueError())
    assert reads == 0


def test_sanity_validation_prints_nothing(make_trainer, capsys):
    trainer, bar = make_trainer(sanity_checking=True), ProgressBar()
    trainer.start(bar)
    capsys.readouterr()
    trainer.validate(bar, {"val/loss": 1.0})
    assert capsys.readouterr().out == ""


def test_only_the_first_process_prints(make_trainer, capsys):
    fit(make_trainer(is_global_zero=False), ProgressBar())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), ValueError("I/O operation on closed file.")])
@pytest.mark.parametrize("isatty", [True, False])
def test_a_stdout_that_is_gone_does_not_end_training(make_trainer, open_terminal, monkeypatch, error, isatty):
    terminal = open_terminal()
    trainer, bar = make_trainer(), ProgressBar()
    monkeypatch.setattr(Terminal, "isatty", lambda self: isatty)
    trainer.start(bar)

    def fail(*text):
        raise error

    monkeypatch.setattr(Terminal, "write", fail)
    for _ in range(2):
        trainer.train_epoch(bar, val={"val/loss": 1.0})
    trainer.end(bar)
    assert trainer.current_epoch == 2 and sys.stdout is terminal


def test_an_endless_loader_has_no_total(make_trainer, capsys):
    fit(make_trainer(num_training_batches=float("inf"), max_epochs=None), ProgressBar())
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("epoch 1 ") and "inf" not in line and "/4" not in line


@pytest.mark.parametrize("rate", [0, -1, 10.1, float("nan"), "fast", True, None])
def test_a_wrong_refresh_rate_is_refused(rate):
    with pytest.raises(ArgumentError, match=re.escape(repr(rate))):
        ProgressBar(refresh_rate=rate)
