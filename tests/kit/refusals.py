"""What is refused: the class of the error, the words of its message, and that nothing was trained before."""

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

import jaxlit as jl
from kit.batches import numbered
from kit.modules import Mean
from kit.trainers import OF_FIT


def refuses(kind: type[BaseException], call: Callable[[], Any], *patterns: str) -> BaseException:
    """See a call refused, with a message of at most 600 characters that matches every pattern; return the error."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert [pattern for pattern in patterns if not re.search(pattern, message, re.DOTALL)] == [], message
    assert len(message) <= 600, message
    assert not re.search(r"Traceback|jax\._src|jax\.errors|Tracer|site-packages", message), message
    return caught.value


def fit_refuses(
    kind: type[BaseException],
    *patterns: str,
    model: Any = None,
    train: Any = None,
    val: Any = None,
    loaders: dict[str, Any] | None = None,
    **arguments: Any,
) -> jl.Trainer | None:
    """See a fit refused before a batch was trained on; return the Trainer, None if it was refused itself.

    `loaders` are arguments of `fit` in place of `train` and `val`, `arguments` those of the Trainer and of `fit`.
    """
    made: list[jl.Trainer] = []
    of_fit = {key: arguments.pop(key) for key in OF_FIT if key in arguments and key != "datamodule"}
    limits = {"max_epochs", "max_steps", "max_time", "fast_dev_run"}
    defaults = {"strategy": "single"} | ({} if arguments.keys() & limits else {"max_epochs": 1})

    def call() -> None:
        made.append(jl.Trainer(**(defaults | arguments)))
        given = {"train_dataloaders": numbered(2) if train is None else train, "val_dataloaders": val}
        made[0].fit(Mean() if model is None else model, **(given if loaders is None else loaders), **of_fit)

    refuses(kind, call, *patterns)
    assert not made or made[0].global_step == 0
    return made[0] if made else None


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "jaxlit" and r.levelno >= logging.WARNING]
