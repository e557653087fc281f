"""What is said when training has ended: what came of it, where it is, and how to continue."""

import contextlib
import re
import signal

import pytest
from kit import trainers
from kit.batches import numbered
from kit.journal import hooks
from kit.modules import Mean
from kit.trainers import thinned
from kit.waiting import interrupts

from jaxlit.callbacks import EarlyStopping, Logger, ModelCheckpoint
from jaxlit.callbacks.progress_bar import closing_lines

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
        f"done 2 epochs · 5 steps · the loss is flat|checkpoint {STEP}5 (last)|{AGAIN}",
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
