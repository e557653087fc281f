"""An error in a hook says where it was raised; a logger that raises stands aside, and training continues."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.journal import HOOKS, hooks, raising
from kit.modules import Mean
from kit.refusals import fit_refuses, warnings_of
from kit.trainers import BARE, fit, thinned

import jaxlit as jl
from jaxlit.callbacks import CSVLogger, Logger
from jaxlit.errors import LoggerError

gone = raising(ConnectionError, "the server is gone")


def of_class(**members: Any) -> Any:
    return type("Mine", (Logger,), members)()


def logger_with(**functions: Any) -> Any:
    return of_class(**{name: staticmethod(function) for name, function in functions.items()})


def note_of(call: Any) -> str:
    """Return the only note of its place on the error that a call raises; jax has one of its own."""
    with pytest.raises(ConnectionError) as raised:
        call()
    (note,) = [note for note in raised.value.__notes__ if "JAX has removed" not in note]
    return note


@pytest.mark.parametrize(
    ("hook", "place"),
    [
        ("on_train_batch_start", "in epoch 1, batch 2 (global_step 5)"),
        ("on_train_batch_end", "in epoch 1, batch 2 (global_step 6)"),
        ("on_log", "in epoch 1, batch 3 (global_step 6)"),
        ("on_validation_batch_end", "in epoch 1, batch 1 (global_step 6)"),
    ],
)
def test_the_note_names_callback_hook_epoch_batch_and_step(hook: str, place: str) -> None:
    """Of the third call in the second epoch of three batches, or of the second batch of the second validation."""
    calls: list[str] = []

    def third(*_: Any) -> None:
        calls.append(hook)
        if len(calls) == (4 if "validation" in hook else 7 if hook == "on_log" else 6):
            gone()

    given = {"max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    # Rows of the first epoch: one of each of three steps, one of the validation; the epoch's own has nothing to show.
    note = note_of(lambda: fit(Mean(), numbered(3), numbered(2), hooks(**{hook: third}), **given))
    assert note == f"It was raised by Made.{hook} {place}."


def keeping(**functions: Any) -> dict[str, Any]:
    """Return the functions of a callback that keeps an array, and looks into each step."""
    arrays = {"init_arrays": lambda params: {"a": jnp.zeros(())}, "update_arrays": lambda a, params, *_: (a, params)}
    return arrays | {"trace_step": lambda *_: {"seen": jnp.ones(())}} | functions


TRACED = ["init_arrays", "update_arrays", "trace_step"]


@pytest.mark.parametrize("hook", TRACED)
def test_what_is_traced_of_a_callback_is_named_as_well(hook: str) -> None:
    note = note_of(lambda: fit(Mean(), numbered(3), None, hooks(**keeping(**{hook: gone})), **BARE))
    assert note.startswith(f"It was raised by Made.{hook} ") and note.endswith("(global_step 0).")


NO_HOOKS = ("load_state_dict", "location", "state_key")
OFTEN = ("log_hyperparams", "on_log", "on_exception", "teardown")
SELDOM = ("setup", "on_checkpoint_saved", "state_dict")
OF_LOGGER = [hook for hook in HOOKS if not any(word in hook for word in ("sanity", "test", "predict", "load", "trace"))]


@pytest.mark.parametrize("hook", thinned([*OF_LOGGER, "log_hyperparams", "state_dict"], *OFTEN, full=SELDOM))
def test_a_logger_that_raises_is_warned_of_once(hook: str, caplog: Any) -> None:
    torn: list[str] = []
    bad = logger_with(**{"teardown": lambda *_: torn.append("down"), hook: gone})
    data = numbered(4), numbered(1)
    trainer = fit(Mean(), *data, max_epochs=2, log_every_n_steps=1, logger=[bad, CSVLogger()], default_root_dir="run")
    result = [text for text in warnings_of(caplog) if "Mine" in text]
    if hook == "on_exception":  # there was none
        assert result == []
    else:
        (line,) = result
        assert line.startswith(f"Mine.{hook} failed in epoch ") and "the server is gone" in line and "continues" in line
    assert float(trainer.module.w[...][0]) == pytest.approx(mean([[1], [2], [3], [4]] * 2), rel=1e-6)
    lines = Path("run/metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + 8  # of steps, with validations in the last of each epoch
    assert torn == ([] if hook == "teardown" else ["down"])


@pytest.mark.parametrize("hook", thinned([*TRACED, *NO_HOOKS], TRACED[0], *NO_HOOKS[:2]))
def test_a_logger_stands_aside_also_for_what_is_no_hook(hook: str, caplog: Any) -> None:
    resumes: Any = {"default_root_dir": "run", "resume": "auto", "log_every_n_steps": 1}
    state = {"state_dict": lambda self: {"a": 1}}
    fit(Mean(), numbered(4), logger=of_class(**state), **resumes)
    bad = property(gone) if hook in ("state_key", "location") else staticmethod(gone)
    statics = {name: staticmethod(function) for name, function in keeping().items()} if hook in TRACED else {}
    logger = of_class(**state | statics | {hook: bad})
    traced: list[int] = []  # of another callback, which looks into every step
    look = hooks(trace_step=lambda *_: {"other": jnp.ones(2)}, on_trace=lambda t, values, step: traced.append(step))
    trainer = fit(Mean(), numbered(4), None, look, logger=logger, max_epochs=2, **resumes)
    assert len(traced) == 4
    assert float(trainer.module.w[...][0]) == pytest.approx(mean([[1], [2], [3], [4]] * 2), rel=1e-6)
    (line,) = [text for text in warnings_of(caplog) if text.startswith(f"Mine.{hook} failed")]
    assert "the server is gone" in line


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConnectionError])
def test_on_error_raise_and_interrupts_end_training(error: Any) -> None:
    bad = logger_with(on_train_batch_end=raising(error, "now"))
    if error is ConnectionError:
        bad.on_error = "raise"
    with pytest.raises(error) as raised:
        fit(Mean(), numbered(2), logger=bad)
    assert raised.value.__notes__ == ["It was raised by Mine.on_train_batch_end in epoch 0, batch 0 (global_step 1)."]


def test_errors_of_loggers_before_training_are_raised(caplog: Any) -> None:
    refuse = raising(LoggerError, "give it a name")
    for hook in ("setup", "on_fit_start"):
        fit_refuses(LoggerError, "give it a name", logger=logger_with(**{hook: refuse}))
    fit(Mean(), numbered(1), logger=logger_with(on_train_end=refuse))
    assert len(warnings_of(caplog)) == 1

    def write(trainer: jl.Trainer, module: Any, *_: Any) -> None:
        module.w[...] += 1

    with pytest.raises(jl.errors.StateError, match=r"Mine\.on_train_batch_end wrote to w"):
        fit(Mean(), numbered(1), logger=logger_with(on_train_batch_end=write))


class Summed(Mean):
    """Logs a loss in the rows of steps and of the epoch."""

    def training_step(self, batch: Any) -> Any:
        loss = jnp.mean(self.error(batch) ** 2)
        self.log("both", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("steps_per_execution", [1, 4])
@pytest.mark.parametrize("at", [(1, "both_step"), (3, "val"), (7, "both_epoch")])
def test_an_error_in_on_log_costs_other_loggers_no_row(at: tuple[int, str], steps_per_execution: int) -> None:
    """Neither that row nor those of later steps, and after a resume each is there once."""

    def train(fails: bool) -> list[tuple[int, str]]:
        rows: list[tuple[int, str]] = []
        collect = hooks(on_log=lambda trainer, values, step: rows.append((step, next(iter(values)))))

        def fail(trainer: Any, values: Any, step: int) -> None:
            if fails and (step, next(iter(values))) == at:
                gone()

        given = {"max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0, "val_check_interval": 4}
        given |= {"steps_per_execution": steps_per_execution, "enable_checkpointing": True, "resume": "auto"}
        given["default_root_dir"] = f"run {fails}"
        for first in (True, False)[not fails :]:
            look = hooks(on_log=fail if first else lambda *_: None)
            try:
                fit(Summed(), numbered(8), numbered(2), look, collect, **given)
            except ConnectionError:
                assert first
        return rows

    assert train(True) == train(False)
