"""Data and its loaders in one object."""

from typing import Any

from jaxlit.core.hparams import KeepsHparams
from jaxlit.porting import no_such_name


class DataModule(KeepsHparams):
    """Data and its loaders in one object, for `Trainer.fit(model, datamodule=...)`.

    Override what is needed. `prepare_data` comes first and is for downloads, `setup` builds datasets, the
    loader hooks return a loader, or for validation, test and prediction a list of them.

    Example:
        >>> import jaxlit as jl, numpy as np
        >>> class Squares(jl.DataModule):
        ...     def setup(self, stage):
        ...         self.rows = {"x": np.arange(8.0), "y": np.arange(8.0) ** 2}
        ...     def train_dataloader(self):
        ...         return jl.ArrayLoader(self.rows, 4, shuffle=True)
        >>> data = Squares()
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        raise no_such_name("DataModule", name, dir(self), called=type(self).__name__)

    trainer: Any = None
    """The `Trainer` that runs it, from the start of a run on."""

    def prepare_data(self) -> None:
        """Download or write files; runs before `setup`, in one process of each computer while the others wait."""

    def setup(self, stage: str) -> None:
        """Build datasets; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Clean up, also after an error."""

    def train_dataloader(self) -> Any:
        """Return the training loader."""
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """Return a validation loader, or a list of several."""
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        """Return a test loader, or a list of several."""
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        """Return a loader to predict, or a list of several."""
        raise NotImplementedError

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to train on, still as numpy."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep of the data, as JSON values; where loaders stand is kept anyway."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, after `setup`."""

    def on_exception(self, exception: BaseException) -> None:
        """Run when the run raised, before `teardown`."""
