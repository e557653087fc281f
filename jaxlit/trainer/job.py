"""What the processes of a training must have been given in common."""

import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxlit.callbacks.base import Callback
from jaxlit.core.hparams import hparams_of
from jaxlit.core.module import TrainModule
from jaxlit.distributed.same_job import environment, same_job
from jaxlit.engine.lazy import lazy
from jaxlit.fingerprint import stable_text
from jaxlit.loop.settings import Arguments, Settings
from jaxlit.reporting.secrets import hide

MAY_DIFFER = (
    *("callbacks", "logger", "enable_progress_bar", "enable_model_summary"),  # what a process prints and writes
    *(
        "compile_cache",
        "prefetch",
        "max_in_flight",
        "data_timeout",
        "hang_timeout",
        "fail_timeout",
    ),  # how it compiles and waits
)
"""The Trainer's arguments that processes of one training may have otherwise, as well as every path. Of callbacks it is
compared whether one logs, and what those have that change the step, end training or write checkpoints."""


def check_job(method: str, settings: Settings, model: Any, callbacks: Sequence[Callback] = ()) -> None:
    """Refuse in every process a run that was given something else in one of them.

    Args:
        method: The Trainer's method that runs.
        settings: The Trainer's arguments.
        model: The module, or a lazy one.
        callbacks: Its callbacks.

    Raises:
        ProcessError: It differs, with the names, the values and the processes.
    """
    same_job(f"Trainer.{method}", partial(_items, settings, model, callbacks))


def _items(settings: Settings, model: Any, callbacks: Sequence[Callback]) -> dict[str, str]:
    items = environment()
    for name in Arguments.__annotations__:
        if name not in MAY_DIFFER:
            value = getattr(settings, name)
            is_path = name in ("default_root_dir", "resume") and value not in (None, "auto")
            items[f"Trainer({name}=)"] = "a path" if is_path else _text(value)
    items["Trainer(logger=)"] = "some" if any(c.is_logger for c in callbacks) else "none"
    ends = ("checkpoint", "early_stopping", "mirror")
    matter = [c for c in callbacks if c.changes_step or c.limits_time or c.frozen_part is not None or c.role in ends]
    # A checkpoint's folder is a path.
    texts = [type(c).__name__ if c.role == "checkpoint" else _text(c) for c in matter]
    items["Trainer(callbacks=)"] = ", ".join(texts)
    if isinstance(model, lazy):
        names = [*inspect.signature(model.cls.__init__).parameters][1:]
        cls, given = model.cls, dict(zip(names, model.args, strict=False)) | model.kwargs
    else:  # what is no module is refused by its type later
        cls, given = type(model), hparams_of(model).readable() if isinstance(model, TrainModule) else {}
    items["the module's class"] = cls.__qualname__
    for name, value in hide(given, []).items():
        items[f"{cls.__name__}({name}=)"] = _text(value)
    return items


def _text(value: Any) -> str:
    is_path = isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute())
    return "a path" if is_path else stable_text(value)
