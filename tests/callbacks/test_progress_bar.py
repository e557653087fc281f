"""ProgressBar on a stream that is a terminal, and on one that is not. What is said when training has ended: what
came of it, where it is, and how to continue.
"""

import contextlib
import io
import itertools
import math
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyte
import pytest
from kit import trainers
from kit.batches import numbered
from kit.journal import Losses, hooks
from kit.modules import Mean, logging
from kit.trainers import thinned
from kit.waiting import interrupts

import jaxlit as jl
from jaxlit.callbacks import EarlyStopping, Logger, ModelCheckpoint, ProgressBar
from jaxlit.callbacks.progress_bar import closing_lines
from jaxlit.errors import ArgumentTypeError

NAN, SEVENTEEN = float("nan"), 1 / 17


class Terminal(io.StringIO):
    def isatty(self):
        return True

    @property
    def lines(self):
        """What a reader sees in the end."""
        screen = pyte.Screen(160, 100)
        pyte.Stream(screen).feed(self.getvalue().replace("\n", "\r\n"))
        return [line.rstrip() for line in screen.display if line.strip()]


@pytest.fixture
def open_terminal(monkeypatch):
    """Return a function that puts a terminal in stdout's place; called in the test, after pytest's own capture."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def open_it():
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr(sys, "stdout", Terminal())
        return sys.stdout

    return open_it


@pytest.fixture
def begin(make_trainer):
    """Return a function that begins the first epoch of a Trainer with these attributes; returns it and the bar."""

    def begin_it(**attributes):
        trainer, bar = make_trainer(**attributes), ProgressBar()
        trainer.start(bar)
        bar.on_train_epoch_start(trainer, trainer.module)
        return trainer, bar

    return begin_it


def batch(trainer, bar, index=0):
    trainer.batches_done = index + 1
    bar.on_train_batch_end(trainer, trainer.module, {}, None, index)


def fit(trainer, *vals):
    """Train an epoch for each of these metrics, two if there are none; returns the bar."""
    bar = ProgressBar()
    trainer.start(bar)
    for val in vals or ({"val/loss": 0.5}, {"val/loss": 0.25}):
        trainer.train_epoch(bar, val=val)
    trainer.end(bar)
    return bar


def monitoring(trainer, monitor="val/loss", mode="min", best=None, last=None):
    """Give a Trainer the like of a ModelCheckpoint that has written checkpoints of these steps, or nothing yet."""
    place = lambda step: str(trainer.run_dir / "checkpoints" / f"step_{step:08d}")  # noqa: E731
    checkpoint = SimpleNamespace(monitor=monitor, mode=mode, best_model_path="", best_model_score=None)
    if best is not None:
        checkpoint.best_model_path, checkpoint.best_model_score = place(best[0]), best[1]
    checkpoint.last_model_path = "" if last is None else place(last)
    trainer.checkpoint_callbacks = trainer.callbacks = [checkpoint]


def epoch_lines(capsys, start="epoch "):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("writes", [True, False])
def test_the_header_names_devices_strategy_and_folder(make_trainer, capsys, writes):
    trainer = make_trainer(run_dir=Path("runs/mine"))
    trainer.checkpoint_callbacks = [ModelCheckpoint()] if writes else []
    ProgressBar().setup(trainer, trainer.module, "fit")  # before anything is opened
    line = capsys.readouterr().out
    assert line.startswith("jaxlit ") and " jax " in line and "8 x cpu" in line and "DDP on mesh data=8" in line
    assert ("run runs/mine" in line) == writes and " of 8" not in line
    trainer.strategy.mesh.size = 2
    ProgressBar().setup(trainer, trainer.module, "fit")
    assert "2 of 8 x cpu" in capsys.readouterr().out


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_without_a_terminal_an_epoch_is_one_plain_line(make_trainer, capsys, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")  # as build servers do
    fit(make_trainer(compile_seconds={"eval_step": 0.1, "train_step": 123.0}))
    text = capsys.readouterr().out
    assert not re.search(r"[^\x20-\x7e\n·]", text)
    told, first, second = [line for line in text.splitlines() if line.startswith(("compiled ", "epoch "))]
    assert told == "compiled eval_step in 0.10 s, train_step in 0:02:03"
    assert first.startswith("epoch  1/10 ") and second.startswith("epoch  2/10 ")
    assert "4/4" in second and second.endswith("val/loss 0.25")


def test_what_the_first_step_compiles_is_printed_once(make_trainer, capsys):
    trainer, bar = make_trainer(compile_seconds={"eval_step": 0.25, "sanity": 0.004, "train_step": 2.0}), ProgressBar()
    trainer.start(bar)
    bar.on_train_epoch_start(trainer, trainer.module)
    assert bar.due_in_seconds() == -math.inf
    batch(trainer, bar)
    trainer.compile_seconds = {"eval_step": 0.75, "train_step": 3.104}
    assert bar.due_in(1) is None
    batch(trainer, bar, 1)
    assert epoch_lines(capsys, "compiled ") == ["compiled eval_step in 0.25 s, train_step in 2.0 s"]


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_the_metrics_of_an_evaluation_are_printed_if_verbose(verb, capsys):
    trainer, rows = trainers.make_trainer(logger=False), jl.ArrayLoader({"x": np.zeros((3, 1), np.float32)}, 3)
    printed, step = [], {"validate": "eval_step", "test": "test_step"}[verb]
    for given in ({}, {"verbose": False}, {"verbose": True}):
        (metrics,) = getattr(trainer, verb)(Mean(), rows, **given)
        compiled, *lines = capsys.readouterr().out.splitlines()
        assert re.fullmatch(rf"compiled {step} in [\d.]+ s", compiled)
        printed.append(lines)
    line = f"{verb.removesuffix('e')}ed  {next(iter(metrics))} 0"
    assert printed == [[line], [], [line]]
    with pytest.raises(ArgumentTypeError, match=rf"Trainer\.{verb}\(verbose=\.\.\.\) takes True or False, got 'no'"):
        getattr(trainer, verb)(Mean(), rows, verbose="no")


def test_a_callback_knows_whether_to_print():
    seen = []
    look = hooks(on_validation_end=lambda trainer, module: seen.append(trainer.verbose))
    trainer = trainers.make_trainer(look, num_sanity_val_steps=0)
    for verbose in (False, True, False):
        trainer.validate(Mean(), numbered(1), verbose=verbose)
    trainer.fit(Mean(), numbered(1), numbered(1))
    assert seen == [False, True, False, True]


def test_an_endless_loader_has_no_total(make_trainer, capsys):
    fit(make_trainer(num_training_batches=float("inf"), max_epochs=None))
    line = epoch_lines(capsys)[0]
    assert line.startswith("epoch 1 ") and "inf" not in line and "/4" not in line


def test_metrics_stand_below_one_another(begin, capsys, clock):
    trainer, bar = begin()
    for loss, seconds in ((SEVENTEEN, 0.2), (0.5, 0.01), (-2.0, 0.0002)):
        trainer.callback_metrics["train/loss"] = loss
        bar.on_train_epoch_start(trainer, trainer.module)
        clock.now += 4 * seconds
        batch(trainer, bar, 3)
        trainer.validate(bar, {"val/loss": loss})
        bar.on_train_epoch_end(trainer, trainer.module)
    assert len({(line.index("train/loss"), line.index("val/loss")) for line in epoch_lines(capsys)}) == 1


def test_the_best_epochs_are_marked(make_trainer, capsys):
    trainer = make_trainer()
    trainer.callback_metrics["train/loss"] = SEVENTEEN
    monitoring(trainer, "val/accuracy", "max")
    fit(trainer, *[None if score is None else {"val/accuracy": score} for score in (0.5, None, 0.7, 0.6, NAN, 0.8)])
    lines = epoch_lines(capsys)
    assert ["* best" in line for line in lines] == [True, False, True, False, False, True]
    assert all("train/loss" in line and "val/accuracy" in line for line in lines)


@pytest.mark.parametrize("kind", ["checkpoint", "stopping"])
def test_a_resumed_training_knows_the_earlier_best(make_trainer, capsys, kind):
    trainer = make_trainer(global_step=8, current_epoch=2)
    if kind == "checkpoint":
        monitoring(trainer, best=(4, 0.3), last=8)
    else:
        stopping = EarlyStopping("val/loss")
        stopping.best_score, trainer.callbacks = 0.3, [stopping]
    fit(trainer, {"val/loss": 0.4}, {"val/loss": 0.2})
    assert ["* best" in line for line in epoch_lines(capsys)] == [False, True]


def test_the_rate_is_that_of_training_alone(begin, capsys, clock):
    trainer, bar = begin(num_training_batches=11)
    for i in range(11):
        # 29 s of compiling in the first batch, and 7 s for a last one of another shape.
        clock.now += 29.5 if i == 0 else 7.5 if i == 10 else 0.5
        trainer.compile_seconds = {"train_step": 29.0 + 7.0 * (i == 10), "eval_step": 4.0}
        batch(trainer, bar, i)
        if i in (5, 10):
            bar.on_validation_start(trainer, trainer.module)
            clock.now += 60.0
            bar.on_validation_end(trainer, trainer.module)
    bar.on_train_epoch_end(trainer, trainer.module)
    # Eleven batches of half a second each.
    assert "11/11  2.00 it/s" in epoch_lines(capsys)[0]


@pytest.mark.parametrize(
    ("seconds", "waited", "said"), [(8.0, 4.0, "waits for data 50%"), (8.0, 0.7, None), (0.5, 0.4, None)]
)
def test_a_slow_loader_is_told_of(begin, capsys, clock, seconds, waited, said):
    trainer, bar = begin()
    for _ in range(2):
        trainer.data_wait = 0.0
        bar.on_train_epoch_start(trainer, trainer.module)
        clock.now += seconds
        trainer.data_wait += waited
        batch(trainer, bar, 3)
        bar.on_train_epoch_end(trainer, trainer.module)
    line = epoch_lines(capsys)[1]
    assert line.endswith(said) if said else "waits" not in line


def test_the_live_line_shows_the_row_and_the_time_left(begin, open_terminal, clock):
    terminal = open_terminal()
    trainer, bar = begin(num_training_batches=1000)
    print("hello from the user")
    trainer.log(bar, {"train/loss": SEVENTEEN}, 0)
    for i in range(101):
        clock.now += 0.5
        batch(trainer, bar, i)
    seen = terminal.lines[-1]
    assert seen.startswith("epoch  1/10") and "train/loss 0.05882" in seen and "epoch 0" not in seen
    assert "101/1000  2.00 it/s  0:07:30 left" in seen  # 899 batches at two a second
    bar.on_train_epoch_end(trainer, trainer.module)
    trainer.end(bar)
    assert "hello from the user" in terminal.lines


@pytest.mark.parametrize(("hook", "argument"), [("on_exception", ValueError()), ("teardown", "fit")])
def test_stdout_and_cursor_are_given_back(begin, open_terminal, hook, argument):
    terminal = open_terminal()
    trainer, bar = begin()
    assert "\x1b[?25l" in terminal.getvalue()
    getattr(bar, hook)(trainer, trainer.module, argument)
    assert sys.stdout is terminal
    assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")


@pytest.mark.parametrize(("rate", "batches"), [(10, 1), (10, 20), (10, 2000), (2, 20)])
def test_nothing_is_drawn_more_often_than_the_rate_says(make_trainer, open_terminal, clock, monkeypatch, rate, batches):
    """Over an epoch of two seconds or a hundred of 20 ms, with validations: each drawing counts."""
    open_terminal()
    drawn = []
    monkeypatch.setattr("jaxlit.reporting.terminal.TerminalLine.show", lambda self, text: drawn.append(clock.now))
    trainer, bar = make_trainer(num_training_batches=batches, max_epochs=None), ProgressBar(refresh_rate=rate)
    trainer.start(bar)
    for _ in range(2000 // batches):
        bar.on_train_epoch_start(trainer, trainer.module)
        for i in range(batches):
            clock.now += 0.001
            batch(trainer, bar, i)
        bar.on_validation_start(trainer, trainer.module)
        for i in range(batches):
            clock.now += 0.001
            bar.on_validation_batch_end(trainer, trainer.module, {}, None, i)
        bar.on_validation_end(trainer, trainer.module)
        bar.on_train_epoch_end(trainer, trainer.module)
    trainer.end(bar)
    assert min(later - earlier for earlier, later in itertools.pairwise(drawn)) > 1 / rate - 1e-6
    assert 0.8 * 4 * rate <= len(drawn) <= 4 * rate + 1  # in four seconds


def test_a_module_that_logs_nothing_shows_its_loss(capsys):
    seen, collect = [], Losses()
    look = hooks(on_train_batch_end=lambda t, *_: seen.append(t.loss))
    trainer = trainers.fit(logging(), numbered(4), None, look, collect, log_every_n_steps=2, max_epochs=2)
    row = collect.losses[1::4]  # which is read one step late; each epoch begins without one
    assert seen == [None, None, None, row[0], None, None, None, row[1]]
    assert trainer.history == {}
    assert epoch_lines(capsys)[0].endswith(f"loss {np.mean(collect.losses[:4]):.4g}")


@pytest.mark.parametrize(
    ("name", "bar", "shown"), [("acc", True, True), ("g_Loss", True, False), ("x_loss", False, True)]
)
def test_the_loss_is_shown_unless_the_step_logs_one_for_the_bar(name, bar, shown, capsys):
    trainers.fit(logging(lambda m, *_: m.log(name, 1.0, prog_bar=bar)), numbered(4))
    line = epoch_lines(capsys)[0]
    assert (" loss " in line) == shown
    assert (f" {name} 1" in line) == bar


def test_a_loss_of_validation_does_not_replace_that_of_training(capsys):
    module = logging(None, lambda m, *_: m.log("loss", 1000.0, prog_bar=True))
    trainers.fit(module, numbered(4), numbered(2), collect := Losses())
    assert re.search(rf" train_loss {np.mean(collect.losses):.4g} +loss 1000$", epoch_lines(capsys)[0])


def test_sanity_validation_and_other_processes_print_nothing(make_trainer, open_terminal, clock):
    terminal = open_terminal()
    trainer, bar = make_trainer(sanity_checking=True), ProgressBar()
    trainer.start(bar)
    before = terminal.getvalue()
    clock.now += 1.0
    bar.on_validation_batch_end(trainer, trainer.module, {}, None, 0)
    trainer.validate(bar, {"val/loss": 1.0})
    trainer = make_trainer(is_global_zero=False, compile_seconds={"train_step": 1.0})
    monitoring(trainer, last=8)
    fit(trainer)
    assert terminal.getvalue() == before


@pytest.mark.parametrize("gone", ["broken", "closed", "none"])
@pytest.mark.parametrize("isatty", [True, False])
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_stdout_that_is_gone_does_not_end_training(
    make_trainer, open_terminal, clock, monkeypatch, gone, isatty, epochs
):
    def fail(*text):
        raise BrokenPipeError(32, "Broken pipe")

    terminal, trainer, bar = open_terminal(), make_trainer(), ProgressBar()
    monkeypatch.setattr(Terminal, "isatty", lambda self: isatty)
    if gone == "closed":
        terminal.close()
    elif gone == "none":
        monkeypatch.setattr(sys, "stdout", None)
    trainer.start(bar)
    for _ in range(epochs):  # after which a line is live
        trainer.train_epoch(bar)
        clock.now += 1.0
        bar.on_train_epoch_start(trainer, trainer.module)
    if gone == "broken":
        monkeypatch.setattr(Terminal, "write", fail)
    for _ in range(2):
        clock.now += 1.0
        trainer.train_epoch(bar, val={"val/loss": 1.0})
    trainer.end(bar)
    assert trainer.current_epoch == 2 + epochs and sys.stdout is (None if gone == "none" else terminal)


@pytest.mark.parametrize("isatty", [True, False])
def test_a_stdout_of_ascii_gets_readable_lines(make_trainer, open_terminal, monkeypatch, isatty):
    open_terminal()
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(stdout, "isatty", lambda: isatty)
    monkeypatch.setattr(sys, "stdout", stdout)
    fit(make_trainer())
    stdout.flush()
    text = stdout.buffer.getvalue().decode("ascii")
    assert "?" not in text.replace("\x1b[?", "")
    assert text.count("val/loss 0.5") == text.count("val/loss 0.25") == 1 and "done 2 epochs" in text
    assert ("====" in text) == isatty  # the bar


STEP = "run/checkpoints/step_0000000"
MORE = "resume pass resume='run' and a larger max_epochs"
AGAIN = "resume run the same command again"


class Somewhere(Logger):
    location = "https://example.org/run/1"


class InFolder(Logger):
    location = "."


def at_five(do):
    """Return a callback that does something after the fifth step, in the second epoch."""
    return hooks(on_train_batch_end=lambda t, *rest: do(t) if t.global_step == 5 else None)


# Callbacks, the Trainer's arguments, and all closing lines, but for the time.
CASES = {
    "its limit": (lambda: [], {}, f"done 2 epochs · 8 steps|checkpoint {STEP}8 (last)|report run/metrics.csv|{MORE}"),
    "other limits": (
        lambda: [],
        {"max_epochs": None, "max_steps": 3, "logger": Somewhere()},
        f"done 1 epoch · 3 steps|checkpoint {STEP}3 (last)|report {Somewhere.location}|"
        + MORE.replace("epochs", "steps"),
    ),
    "a logger of a folder": (
        lambda: [],
        {"max_epochs": 1, "logger": InFolder(), "enable_checkpointing": False},
        "done 1 epoch · 4 steps|logs .",
    ),
    "the best within an epoch": (
        lambda: [ModelCheckpoint(monitor="loss", every_n_train_steps=1)],
        {"max_epochs": 1, "resume": "auto", "logger": False},
        f"done 1 epoch · 4 steps · best loss 1 at step 1|checkpoint {STEP}1 (best) · {STEP}4 (last)"
        "|resume run the same command with a larger max_epochs",
    ),
    "the best at the end": (
        lambda: [ModelCheckpoint("kept", monitor="val")],
        {"max_epochs": 1, "logger": False},
        "done 1 epoch · 4 steps · best val -2.062 at step 4|checkpoint kept/step_00000004 (best, last)"
        "|resume pass resume='kept/step_00000004' and a larger max_epochs",
    ),
    "no checkpoint": (
        lambda: [EarlyStopping("val", patience=9), at_five(lambda t: t.stop("the loss is flat"))],
        {"enable_checkpointing": False, "logger": False},
        "done 2 epochs · 5 steps · best val -2.062 at step 4 · the loss is flat",
    ),
    "stopped": (
        lambda: [at_five(lambda t: t.stop("the loss is flat"))],
        {"resume": "auto", "logger": False},
        f"done 2 epochs · 5 steps · the loss is flat|checkpoint {STEP}5 (last)"
        "|resume run the same command with the path of a checkpoint as resume=",
    ),
    "stopped, in its own folder": (
        lambda: [at_five(lambda t: t.stop("the loss is flat"))],
        {"logger": False},
        f"done 2 epochs · 5 steps · the loss is flat|checkpoint {STEP}5 (last)|resume pass resume='run'",
    ),
    "max_steps in the last epoch": (
        lambda: [],
        {"max_steps": 5, "logger": False},
        f"done 2 epochs · 5 steps|checkpoint {STEP}5 (last)|" + MORE.replace("epochs", "steps"),
    ),
    "a rule in the last epoch": (
        lambda: [EarlyStopping("val", stopping_threshold=9.0, patience=9)],
        {"max_epochs": 1, "resume": "auto", "logger": False},
        f"done 1 epoch · 4 steps · best val -2.062 at step 4 · val = -2.062 reached the threshold 9.0"
        f"|checkpoint {STEP}4 (last)"
        "|resume run the same command with a larger max_epochs and the path of a checkpoint as resume=",
    ),
    "the time of a run": (
        lambda: [at_five(lambda t: t.stop_after(0.0, "enough time"))],
        {"resume": "auto", "logger": False},
        f"done 2 epochs · 5 steps · enough time|checkpoint {STEP}5 (last)|{AGAIN}",
    ),
    "an error": (
        lambda: [at_five(lambda t: {}[0])],
        {"logger": False},
        f"ended by KeyError in epoch 2 · 5 steps|checkpoint {STEP}5 (last)|resume pass resume='run'",
    ),
    "Ctrl-C": (
        lambda: [at_five(lambda t: signal.raise_signal(signal.SIGINT))],
        {"logger": False, "resume": "auto"},
        f"interrupted in epoch 2 · 5 steps|checkpoint {STEP}5 (last)|{AGAIN}",
    ),
    "an error before the first step": (lambda: [hooks(on_train_start=lambda t, m: {}[0])], {}, ""),
}


@pytest.mark.parametrize("case", thinned(CASES, *[*CASES][::2]))
def test_the_closing_lines_say_how_it_ended_and_how_to_go_on(case, capsys):
    callbacks, arguments, expected = CASES[case]
    given = {"default_root_dir": "run", "max_epochs": 2, "log_every_n_steps": 1, "enable_model_summary": False}
    trainer = trainers.make_trainer(*callbacks(), **(given | arguments))
    with contextlib.suppress(KeyError), interrupts():
        trainer.fit(Mean(), numbered(4), numbered(1))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    begin = next((i for i, line in enumerate(lines) if re.match("done|ended|interrupted", line)), len(lines))
    assert "|".join(re.sub(r" · [\d.]+ s\b( \([\d.]+ s compiling\))?", "", line) for line in lines[begin:]) == expected


@pytest.mark.parametrize(
    ("seconds", "told"), [({"train_step": 60.0, "eval_step": 90.0}, " (0:02:30 compiling)"), ({"train_step": 0.04}, "")]
)
def test_the_time_of_compiling_is_told_apart(seconds, told, make_trainer):
    trainer = make_trainer(current_epoch=1, global_step=1234, compile_seconds=seconds)
    assert closing_lines(trainer, seconds=3.0, error=None, best="") == f"done 1 epoch · 1,234 steps · 3.0 s{told}"
