"""How a population trains: the arguments of `jl.fit_many`, checked."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxlit import checks as check
from jaxlit.callbacks.early_stopping import EarlyStopping
from jaxlit.core.precision import PRECISIONS, Precision
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.shown import shown

OWNER = "jl.fit_many"


@dataclass(frozen=True)
class Options:
    """How a population trains; the attributes are the arguments of `jl.fit_many`, see there.

    Raises:
        ArgumentError: One is out of its set, or they do not fit each other.
        ArgumentTypeError: One is of another type.
    """

    max_epochs: int
    early_stopping: EarlyStopping | None = None
    log: Callable[[int, int, dict[str, float]], object] | None = None
    log_every_n_steps: int = 50
    limit_train_batches: int | None = None
    default_root_dir: str | Path | None = None
    every_n_train_steps: int | None = None
    resume: str | None = None
    devices: int | str = "auto"
    precision: str = "32-true"

    def __post_init__(self) -> None:
        for name in ("max_epochs", "log_every_n_steps"):
            check.integer(name, getattr(self, name), low=1, owner=OWNER)
        for name in ("limit_train_batches", "every_n_train_steps"):
            check.integer(name, getattr(self, name), low=1, also=(None,), owner=OWNER)
        check.integer("devices", self.devices, low=1, also=("auto",), owner=OWNER)
        check.one_of("precision", self.precision, [x for x in PRECISIONS if x != "16-mixed"], owner=OWNER)
        check.require(self.resume in (None, "auto"), "resume", self.resume, "takes None or 'auto'", owner=OWNER)
        if not isinstance(self.early_stopping, EarlyStopping | None):
            raise _type_error("early_stopping", "a jl.callbacks.EarlyStopping", self.early_stopping)
        for name in ("check", "setup", "teardown", *(x for x in dir(EarlyStopping) if x.startswith("on_"))):
            if self.early_stopping and getattr(type(self.early_stopping), name) is not getattr(EarlyStopping, name):
                raise ArgumentError(
                    f"{OWNER}(early_stopping=...) calls no hooks and no check, which take a Trainer, and "
                    f"{type(self.early_stopping).__name__} has its own {name}. Override judge instead."
                )
        if self.log is not None and not callable(self.log):
            raise _type_error("log", "a function of (member, step, metrics)", self.log)
        for name in ("resume", "every_n_train_steps"):
            if self.default_root_dir is None and getattr(self, name) is not None:
                raise ArgumentError(f"{OWNER}({name}=...) needs default_root_dir, the folder of the checkpoints.")
        check.on_disk("default_root_dir", self.default_root_dir, owner=OWNER)
        if (count := jax.process_count()) > 1:
            raise ArgumentError(f"{OWNER} trains in one process, and there are {count}. Call it in one of its own.")

    @property
    def dtypes(self) -> Precision:
        """The dtypes of the training."""
        return Precision(self.precision)

    @property
    def most_devices(self) -> int | None:
        """How many devices may be used; None for all."""
        return None if isinstance(self.devices, str) else int(self.devices)


def _type_error(name: str, wanted: str, given: Any) -> ArgumentTypeError:
    return ArgumentTypeError(f"{OWNER}({name}=...) takes {wanted}, got {shown(given)}.")
