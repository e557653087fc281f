"""The order of the hooks is the one that Callback's docstring spells out: its pseudocode is run and compared."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl

Event = tuple[str, tuple[int, ...]]
HOOKS = [name for name in vars(jl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
OF_MODULE = ("configure_callbacks", "prepare_data", "train_dataloader", "val_dataloader", "configure_optimizers")


def rows(count: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.ones(2, np.float32)}] * count


def indices_of(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the indices among a hook's arguments."""
    return tuple(x for x in args if isinstance(x, int))


def pseudocode() -> str:
    (block,) = re.findall(r"```\n(.*?)```", inspect.cleandoc(jl.Callback.__doc__ or ""), re.S)
    return block


def run_pseudocode(
    *,
    train: int,
    val: list[int],
    epochs: int,
    sanity: int,
    due: Callable[[int], bool],
    skip: Callable[[int, int], bool],
    log_every: int,
) -> list[Event]:
    """Run the docstring's program on stand-ins that keep the order of the calls."""
    events: list[Event] = []
    epoch, step, batch_of = -1, 0, 0
    sanity_check = False

    def hook(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal epoch, sanity_check, batch_of
            events.append((name, indices_of(args)))
            epoch += name == "on_train_epoch_start"
            sanity_check = name == "on_sanity_check_start" or (sanity_check and name != "on_sanity_check_end")
            if name == "on_train_batch_start":
                batch_of = args[1]
                return -1 if skip(epoch, batch_of) else None
            return None

        return call

    def training_step(*_: Any) -> None:
        nonlocal step
        step += 1

    def log(row: int | None) -> None:
        if row is not None and not sanity_check:
            events.append(("on_log", (row,)))

    scope: dict[str, Any] = {name: hook(name) for name in (*HOOKS, *OF_MODULE)}
    scope |= {
        "training_step": training_step,
        "validation_step": lambda *_: None,
        "outputs": None,
        "num_sanity_val_steps": sanity,
        "max_epochs": epochs,
        "train_batches": rows(train),
        "val_batches": [rows(n) for n in val],
        "validation_is_due": lambda: due(batch_of),
        "log": log,
        "checkpoint": None,
        "training_is_over": lambda: epoch + 1 == epochs,
        "row_of_step": lambda: step - 1 if step % log_every == 0 else None,
        "row_of_epoch": lambda: step - 1,
        "row_of_validation": lambda: step - 1,
    }
    exec(pseudocode(), scope)
    scope["fit"]()
    return events


def run_trainer(train: int, val: list[int], skip: Callable[[int, int], bool], **arguments: Any) -> list[Event]:
    """Train for real, and keep the order of the calls."""
    events: list[Event] = []

    def of_callback(name: str) -> Callable[..., Any]:
        def call(self: Any, trainer: jl.Trainer, *args: Any) -> int | None:
            if name == "on_log":
                events.append((name, (args[1],)))
            else:
                events.append((name, indices_of(args)))
            if name == "on_train_batch_start" and skip(trainer.current_epoch, args[2]):
                return -1
            return None

        return call

    class Model(jl.TrainModule):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(()))

        def training_step(self, batch: Any) -> Any:
            loss = (self.w * batch["x"]).mean() ** 2
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any) -> None:
            self.log("val", batch["x"].mean())

        def configure_callbacks(self) -> list[Any]:
            events.append(("configure_callbacks", ()))
            return []

        def prepare_data(self) -> None:
            events.append(("prepare_data", ()))

        def train_dataloader(self) -> Any:
            events.append(("train_dataloader", ()))
            return rows(train)

        def val_dataloader(self) -> Any:
            events.append(("val_dataloader", ()))
            return [jl.ArrayLoader({"x": np.ones(2 * n, np.float32)}, 2) for n in val]

        def configure_optimizers(self) -> Any:
            events.append(("configure_optimizers", ()))
            return optax.sgd(0.1)

    keep = type("Keep", (jl.Callback,), {name: of_callback(name) for name in HOOKS})()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "strategy": "single"}
    jl.Trainer(callbacks=keep, **quiet, **arguments).fit(Model())
    return events


CASES: dict[str, dict[str, Any]] = {
    "validation at the end of each epoch": {},
    "validation inside the epoch": {"interval": 2, "train": 5},
    "two validation loaders": {"val": [2, 1]},
    "no sanity check": {"sanity": 0},
    "the rest of an epoch skipped": {"skip": lambda epoch, batch: (epoch, batch) == (0, 2), "epochs": 2},
    "rows every second step": {"log_every": 2, "train": 5},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_hooks_come_as_the_docstring_of_callback_says(case: dict[str, Any]) -> None:
    train, val, epochs, sanity = (case.get(k, d) for k, d in (("train", 3), ("val", [2]), ("epochs", 2), ("sanity", 1)))
    skip, log_every, interval = case.get("skip", lambda *_: False), case.get("log_every", 1), case.get("interval")
    due = (lambda i: (i + 1) % interval == 0) if interval else (lambda i: i == train - 1)
    expected = run_pseudocode(
        train=train, val=val, epochs=epochs, sanity=sanity, due=due, skip=skip, log_every=log_every
    )
    limits = {"max_epochs": epochs, "num_sanity_val_steps": sanity, "log_every_n_steps": log_every}
    if interval:
        limits["val_check_interval"] = interval
    assert run_trainer(train, val, skip, **limits) == expected


def test_the_docstring_names_every_hook_of_a_fit() -> None:
    of_fit = {name for name in HOOKS if not re.search("test|predict", name)} - {
        "on_log",
        "on_trace",
    }  # which `log` calls
    assert of_fit <= set(re.findall(r"\w+", pseudocode()))
