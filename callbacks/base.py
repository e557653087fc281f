"""The base of every callback."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxlit.module import TrainModule
    from jaxlit.trainer import Trainer


class Callback:
    """What a user adds to training: override the hooks that are needed.

    A callback's hook comes before the module's hook of the same name. Only hooks that are
    overridden are called, so an empty hook costs nothing. The order:

    ```
    setup(stage="fit")
    on_fit_start
    if num_sanity_val_steps:
        on_sanity_check_start
        validate
        on_sanity_check_end
    on_train_start
    for epoch in range(max_epochs):
        on_train_epoch_start
        for batch_idx, batch in enumerate(train_dataloader):
            on_train_batch_start      # -1 skips the rest of the epoch
            training_step             # compiled: gradients, optimizer, metrics
            on_train_batch_end
            on_log                    # every log_every_n_steps optimizer steps, one step late
            if last batch of the epoch and validation is due:
                validate
                on_log                # validation metrics
        on_train_epoch_end            # callbacks, module, then callbacks with `runs_last`
        on_log                        # epoch metrics
    on_train_end
    on_fit_end
    teardown(stage="fit")

    validate:
        on_validation_start
        on_validation_epoch_start
        for dataloader_idx, loader in enumerate(val_dataloaders):
            for batch_idx, batch in enumerate(loader):
                on_validation_batch_start
                validation_step       # compiled
                on_validation_batch_end
        on_validation_epoch_end
        on_validation_end
    ```

    `trainer.test` and `trainer.predict` call the hooks of `validate` with `test` or `predict` in
    place of `validation`, between `setup` and `teardown`.

    `batch` is the host batch as the loader gave it; `outputs` holds device arrays: reading one waits
    for the step. The `module` in a hook is the object given to `fit`; touching it brings its arrays up
    to date. Writing to its Variables is allowed in every hook but the batch hooks and `on_log`.

    Example:
        >>> import jaxlit as jl
        >>> class StopAtLoss(jl.Callback):
        ...     def __init__(self, target):
        ...         self.target = target
        ...     def on_log(self, trainer, values, step):
        ...         if values.get("train/loss", float("inf")) <= self.target:
        ...             trainer.stop(f"train/loss reached {self.target}")
    """

    runs_last: bool = False
    """Whether `on_train_epoch_end` comes after the module's own, so that it sees what the module logged."""

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Run first; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Run last, also after an error."""

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run when the state is on its devices and nothing has been trained."""

    def on_fit_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run after `on_train_end`."""

    def on_sanity_check_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run before the few validation batches that precede training."""

    def on_sanity_check_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run after them; their metrics are dropped."""

    def on_train_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run before the first epoch."""

    def on_train_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run after the last epoch."""

    def on_train_epoch_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run after the last batch of an epoch and its validation."""

    def on_train_batch_start(self, trainer: "Trainer", module: "TrainModule", batch: Any, batch_idx: int) -> int | None:
        """Run before a training step; returning -1 skips the rest of the epoch."""

    def on_train_batch_end(
        self, trainer: "Trainer", module: "TrainModule", outputs: Mapping[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Run after a training step was dispatched; `outputs["loss"]` is its loss."""

    def on_validation_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run before validation."""

    def on_validation_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run after validation, when its metrics have been logged."""

    def on_validation_epoch_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run before the first validation batch."""

    def on_validation_epoch_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run after the last validation batch; its metrics are in `trainer.callback_metrics`."""

    def on_validation_batch_start(
        self, trainer: "Trainer", module: "TrainModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before a validation step."""

    def on_validation_batch_end(
        self,
        trainer: "Trainer",
        module: "TrainModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Run after a validation step; `outputs` is what the step returned, as device arrays."""

    def on_test_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run before testing."""

    def on_test_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run after testing."""

    def on_test_epoch_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run before the first test batch."""

    def on_test_epoch_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run after the last test batch."""

    def on_test_batch_start(
        self, trainer: "Trainer", module: "TrainModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before a test step."""

    def on_test_batch_end(
        self,
        trainer: "Trainer",
        module: "TrainModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Run after a test step."""

    def on_predict_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run before prediction."""

    def on_predict_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run after prediction."""

    def on_predict_epoch_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run before the first batch to predict."""

    def on_predict_epoch_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Run after the last batch to predict."""

    def on_predict_batch_start(
        self, trainer: "Trainer", module: "TrainModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before a predict step."""

    def on_predict_batch_end(
        self,
        trainer: "Trainer",
        module: "TrainModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Run after a predict step; `outputs` is what the step returned, as device arrays."""

    def on_log(self, trainer: "Trainer", values: dict[str, float], step: int) -> None:
        """Receive one logged row.

        Args:
            trainer: The trainer.
            values: The row's metrics and `epoch`, as Python floats.
            step: 0-based index of the optimizer step that made the values.
        """

    def on_exception(self, trainer: "Trainer", module: "TrainModule", exception: BaseException) -> None:
        """Run when training raised, before `teardown`; the exception is raised again."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep of this callback, as JSON values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
