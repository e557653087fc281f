"""Configurations of OmegaConf, as Hydra passes them: the Trainer takes them, and hyperparameters keep them."""

from typing import Any

import pytest
from kit.batches import numbered
from kit.modules import Mean
from kit.pages import needing
from kit.trainers import BARE

import jaxlit as jl
from jaxlit.errors import CheckpointError

CONFIG = {
    "trainer": {
        "_target_": "jaxlit.Trainer",
        "max_epochs": 1,
        "host_keys": ["name"],
        "max_time": {"hours": 1},
        "strategy": {"_target_": "jaxlit.strategies.FSDP", "min_size": 4},
        "enable_progress_bar": False,
    },
    "callbacks": [
        {"_target_": "jaxlit.callbacks.EarlyStopping", "monitor": "loss", "patience": 7},
        {"_target_": "jaxlit.callbacks.ModelCheckpoint", "save_top_k": 2, "monitor": "loss"},
    ],
    "model": {"lr": 0.25, "layers": [1, 2], "tx": {"betas": [0.9, 0.99], "steps": "${trainer.max_epochs}"}},
}


@pytest.mark.parametrize("package", needing("hydra"))
def test_hydra_makes_a_trainer_with_callbacks(package: str) -> None:
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    config = OmegaConf.create(CONFIG)
    callbacks = instantiate(config.callbacks)
    assert type(callbacks).__name__ == "ListConfig"
    trainer = instantiate(config.trainer, callbacks=callbacks)
    stopping, saving = trainer.callbacks[0], trainer.checkpoint_callback
    assert (stopping.patience, saving.save_top_k, trainer.max_epochs) == (7, 2, 1)
    assert trainer.host_keys == ("name",) and trainer.max_time.total_seconds() == 3600
    assert trainer.strategy.min_size == 4


class Configured(Mean):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = list(config.layers)


@pytest.mark.parametrize("package", needing("omegaconf"))
def test_a_configuration_is_a_hyperparameter(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    config = OmegaConf.create(CONFIG).model
    model = Configured(config)
    config.lr = 3.0  # later, of the caller's
    assert model.hparams.config.lr == 0.25
    trainer = jl.Trainer(**BARE | {"max_epochs": 1})
    trainer.fit(model, numbered(2))
    trainer.save_checkpoint("kept")
    loaded = Configured.load_from_checkpoint("kept")
    plain = {"lr": 0.25, "layers": [1, 2], "tx": {"betas": [0.9, 0.99], "steps": 1}}
    assert OmegaConf.to_container(loaded.hparams.config) == plain and loaded.hparams.config.tx.betas[1] == 0.99
    assert type(loaded.hparams.config) is type(config)
    monkeypatch.setitem(__import__("sys").modules, "omegaconf", None)  # where it is not installed
    with pytest.raises(CheckpointError, match="pass config=") as e:
        Configured.load_from_checkpoint("kept")
    assert "omegaconf" in str(e.value)
