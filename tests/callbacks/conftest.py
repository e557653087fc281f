"""A stand-in for the Trainer: what callbacks read, with values that a test sets."""

from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from flax import nnx
from kit.inside import Clock, stop_clocks


class StandInModule(nnx.Module):
    """3 x 2 parameters."""

    def __init__(self):
        self.weight = nnx.Param(jnp.zeros((3, 2)))


class StandInTrainer:
    def __init__(self, run_dir, **attributes):
        self.run_dir, self.module, self.state = run_dir, StandInModule(), None
        self.resume = self.default_root_dir = None
        self.current_epoch = self.global_step = self.batches_done = self.min_epochs = self.min_steps = 0
        self.max_epochs, self.max_steps = 10, -1
        self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1
        self.num_training_batches, self.num_val_batches = 4, [2]
        self.sanity_checking = self.should_stop = self.interrupted = False
        self.stop_reason = self.loss = None
        self.is_finished = False
        self.epoch_is_over = True  # where a validation or an epoch ends
        self.callback_metrics = self.progress_bar_metrics = {}
        mesh = SimpleNamespace(shape={"data": 8}, size=8)
        self.strategy = SimpleNamespace(describe=lambda: "DDP on mesh data=8", mesh=mesh, num_processes=1, notes={})
        self.is_global_zero, self.data_wait, self.compile_seconds = True, 0.0, {}
        self.callbacks, self.loggers, self.checkpoint_callbacks = [], [], []
        self.saver = SimpleNamespace(root=Path(run_dir).absolute())
        vars(self).update(attributes)

    def stop(self, reason, final=True):
        self.should_stop, self.stop_reason = True, reason

    def log(self, callback, values, step):
        self.callback_metrics.update(values)
        callback.on_log(self, {**values, "epoch": self.current_epoch}, step)

    def validate(self, callback, values):
        callback.on_validation_start(self, self.module)
        self.callback_metrics.update(values)
        callback.on_validation_epoch_end(self, self.module)
        if not self.sanity_checking:
            callback.on_log(self, {**values, "epoch": self.current_epoch}, max(self.global_step - 1, 0))
        callback.on_validation_end(self, self.module)

    def train_epoch(self, callback, *, batches=4, val=None):
        self.batches_done = 0
        callback.on_train_epoch_start(self, self.module)
        for i in range(batches):
            self.global_step += 1
            self.batches_done += 1
            callback.on_train_batch_end(self, self.module, {}, None, i)
        if val is not None:
            self.validate(callback, val)
        callback.on_train_epoch_end(self, self.module)
        self.current_epoch += 1

    def start(self, callback):
        callback.setup(self, self.module, "fit")
        callback.on_fit_start(self, self.module)

    def end(self, callback):
        callback.on_train_end(self, self.module)
        callback.on_fit_end(self, self.module)
        callback.teardown(self, self.module, "fit")


@pytest.fixture
def make_trainer(tmp_path):
    """Return a function that makes a stand-in with the attributes given."""
    return lambda **attributes: StandInTrainer(attributes.pop("run_dir", tmp_path / "run"), **attributes)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return stop_clocks(monkeypatch)
