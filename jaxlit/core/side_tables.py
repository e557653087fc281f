"""What belongs to a module but not to its graph."""

import weakref
from typing import Any, Protocol

from jaxlit.core.hparams import share_hparams
from jaxlit.core.side_table import SideTable


class Watcher(Protocol):
    """What is called when a module is touched while a run has its arrays."""

    def touch(self) -> None:
        """Bring the module's arrays up to date."""

    def refuse_attribute(self, name: str) -> None:
        """Refuse to set an attribute where the compiled steps could not follow."""


# What belongs to a module but not to its graph: an attribute would change the graphdef, and with it
# every compiled step.
_trainers: SideTable[weakref.ref[Any]] = SideTable()

# By id of the module; empty outside a run, so that touching a module then costs nothing.
watchers: dict[int, Watcher] = {}


def attach(module: Any, trainer: Any) -> Any:
    """Make `module.trainer` the trainer, and return the one that it was."""
    outer = _trainers.get(module)
    _trainers[module] = weakref.ref(trainer)
    return outer() if outer else None


def trainer_of(module: Any) -> Any:
    """Return the Trainer that runs, or ran, the module; None without one."""
    reference = _trainers.get(module)
    return reference() if reference else None


def share_side_tables(copy: Any, module: Any) -> None:
    """Give the copy that a step sees the module's hyperparameters and Trainer."""
    share_hparams(copy, module)
    if (trainer := _trainers.get(module)) is not None:
        _trainers[copy] = trainer
