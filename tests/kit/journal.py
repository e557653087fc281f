"""Callbacks that write down what happens."""

from collections.abc import Callable
from typing import Any

import jaxlit as jl
from kit.batches import number_of

HOOKS = tuple(name for name in vars(jl.Callback) if name.startswith("on_") or name in ("setup", "teardown"))


def hooks(name: str = "Made", **functions: Callable[..., Any]) -> jl.Callback:
    """Return a callback with these functions of (trainer, module, ...) as its hooks."""
    return type(name, (jl.Callback,), {k: staticmethod(v) for k, v in functions.items()})()


def raising(error: Any, *args: Any) -> Callable[..., Any]:
    """Return a function that raises `error`, or an `error` of these arguments, another one each time."""

    def raises(*_: Any, **__: Any) -> Any:
        raise error(*args) if args else error

    return raises


def at_batch(number: int, do: Callable[[jl.Trainer, Any], Any]) -> jl.Callback:
    """Return a callback that does something at the end of a training batch, given by its index."""
    return hooks(on_train_batch_end=lambda t, m, outputs, batch, idx: do(t, m) if idx == number else None)


class Rows(jl.Callback):
    """Keeps the rows that are logged, as (step, values).

    Args:
        rates: Keep the learning rates, too.
    """

    def __init__(self, rates: bool = False) -> None:
        self.rates = rates
        self.rows: list[tuple[int, dict[str, float]]] = []

    def on_log(self, trainer: jl.Trainer, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values if self.rates else without_rates(values)))

    def of(self, name: str) -> list[float]:
        """Return the values of one name, in order."""
        return [values[name] for _, values in self.rows if name in values]


def without_rates(values: dict[str, Any]) -> dict[str, Any]:
    """Return a row without learning rates, which stand in the row of each step."""
    return {name: x for name, x in values.items() if name.partition("/")[0] != "lr"}


class Losses(jl.Callback):
    """Keeps each step's loss, and what else it returned."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


class Batches(jl.Callback):
    """Keeps the host batches: those of training by epoch, those of validation by validation."""

    def __init__(self) -> None:
        self.train: list[list[Any]] = []
        self.val: list[list[Any]] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.train.append([])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.train[-1].append(batch)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.val.append([])

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.val[-1].append(batch)


class Journal(jl.Callback):
    """Writes down every hook as (name, batch_idx, dataloader_idx, epoch, global_step), and the numbers of batches."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.batches: dict[str, list[int]] = {"train": [], "validation": [], "test": [], "predict": [], "sanity": []}

    def put(self, hook: str, trainer: jl.Trainer, *args: Any) -> None:
        index = loader = None
        if "_batch_" in hook:
            batch, index, *rest = args if hook.endswith("start") else args[1:]
            loader = rest[0] if rest else None
            if hook.endswith("start") and isinstance(batch, dict) and "x" in batch:
                self.batches["sanity" if trainer.sanity_checking else hook.split("_")[1]].append(number_of(batch))
        self.events.append((hook, index, loader, trainer.current_epoch, trainer.global_step))

    def named(self, hook: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == hook]

    @property
    def names(self) -> list[str]:
        return [event[0] for event in self.events]


for _hook in HOOKS:
    if _hook not in ("on_log", "on_trace"):
        setattr(Journal, _hook, lambda self, trainer, module, *args, hook=_hook: self.put(hook, trainer, *args))
