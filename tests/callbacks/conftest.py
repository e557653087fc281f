"""A stand-in for the Trainer: what callbacks read, with values that a test sets."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx


class Metrics(Mapping[str, float]):
    """Metrics that count how often a value is read, as each reading waits for the device."""

    def __init__(self) -> None:
        self.values_of: dict[str, float] = {}
        self.reads = 0

    def __getitem__(self, name: str) -> float:
        self.reads += 1
        return self.values_of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.values_of))

    def __len__(self) -> int:
        return len(self.values_of)


class StandInModule(nnx.Module):
    """Six parameters, and hyperparameters that are no part of the graph."""

    def __init__(self, hparams: dict[str, Any]) -> None:
        self.weight = nnx.Param(jnp.zeros((3, 2)))
        _hparams[id(self)] = hparams

    @property
    def hparams(self) -> dict[str, Any]:
        return _hparams[id(self)]


_hparams: dict[int, dict[str, Any]] = {}


class StandInTrainer:
    def __init__(self, run_dir: Path, **attributes: Any) -> None:
        self.run_dir = run_dir
        self.current_epoch = self.global_step = 0
        self.max_epochs: int | None = 10
        self.max_steps = -1
        self.min_epochs = self.min_steps = 0
        self.val_check_interval: int | float = 1.0
        self.check_val_every_n_epoch: int | None = 1
        self.num_training_batches: int | float = 4
        self.num_val_batches: list[int | float] = [2]
        self.sanity_checking = self.should_stop = False
        self.stop_reason: str | None = None
        self.callback_metrics = self.logged_metrics = self.progress_bar_metrics = Metrics()
        mesh = SimpleNamespace(shape={"data": 8}, size=8)
        self.strategy = SimpleNamespace(describe=lambda: "DDP on mesh data=8", mesh=mesh, num_processes=1)
        self.config: dict[str, Any] = {"max_epochs": 10}
        self.module = StandInModule(attributes.pop("hparams", {}))
        self.state: Any = None
        self.is_global_zero, self.data_wait, self.resume = True, 0.0, None
        self.interrupted, self.compile_seconds = False, {}
        self.is_running = True
        self.callbacks: list[Any] = []
        self.loggers: list[Any] = []
        self.checkpoint_callbacks: list[Any] = []
        vars(self).update(attributes)

    def stop(self, reason: str) -> None:
        self.should_stop, self.stop_reason = True, reason

    def log(self, callback: Any, values: dict[str, float], step: int) -> None:
        """Log a row as the loop does."""
        self.callback_metrics.values_of |= values
        callback.on_log(self, {**values, "epoch": self.current_epoch}, step)

    def validate(self, callback: Any, values: dict[str, float]) -> None:
        """Validate as the loop does."""
        callback.on_validation_start(self, self.module)
        self.callback_metrics.values_of |= values
        callback.on_validation_epoch_end(self, self.module)
        if not self.sanity_checking:
            callback.on_log(self, {**values, "epoch": self.current_epoch}, max(self.global_step - 1, 0))
        callback.on_validation_end(self, self.module)

    def train_epoch(self, callback: Any, *, batches: int = 4, val: dict[str, float] | None = None) -> None:
        """Train an epoch as the loop does."""
        callback.on_train_epoch_start(self, self.module)
        for i in range(batches):
            self.global_step += 1
            callback.on_train_batch_end(self, self.module, {}, None, i)
        if val is not None:
            self.validate(callback, val)
        callback.on_train_epoch_end(self, self.module)
        self.current_epoch += 1

    def start(self, callback: Any) -> None:
        callback.setup(self, self.module, "fit")
        callback.on_fit_start(self, self.module)

    def end(self, callback: Any) -> None:
        callback.on_train_end(self, self.module)
        callback.on_fit_end(self, self.module)
        callback.teardown(self, self.module, "fit")


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., StandInTrainer]:
    """Return a function that makes a stand-in with the attributes given."""
    return lambda **attributes: StandInTrainer(attributes.pop("run_dir", tmp_path / "run"), **attributes)
