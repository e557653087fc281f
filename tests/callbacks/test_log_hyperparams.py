"""Hyperparameters reach every logger that can hold them, and a logger of one's own gets the module's."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.inside import stop_clocks

import jaxlit as jl
from jaxlit.callbacks import CSVLogger, JSONLLogger, Logger, NoLogger
from jaxlit.errors import LoggerError, ModuleError, StateError

QUIET = {"strategy": "single", "max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False}


class Scaled(jl.TrainModule):
    def __init__(self, width: int, api_key: str = "k") -> None:
        self.w = nnx.Param(jnp.ones(width))

    def training_step(self, batch: Any) -> jax.Array:
        return jnp.mean((self.w[...] - batch["x"]) ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


BATCHES = [{"x": np.ones((2, 3), np.float32)}]


class Mine(Logger):
    """A logger written from what `Logger` says alone."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.seen.append(("setup", module.hparams["width"], trainer.config["max_epochs"]))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.seen.append(("hyperparams", dict(params)))

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.seen.append("on_fit_start")


def test_a_logger_of_ones_own_is_given_the_modules_before_the_fit_starts() -> None:
    mine = Mine()
    jl.Trainer(logger=mine, enable_checkpointing=False, **QUIET).fit(Scaled(3), BATCHES)
    assert mine.seen == [("setup", 3, 1), ("hyperparams", {"width": 3, "api_key": "k"}), "on_fit_start"]


def test_a_logger_that_reads_them_itself_is_not_called() -> None:
    class Reads(Mine):
        hyperparams_of_module = False

    mine = Reads()
    jl.Trainer(logger=mine, enable_checkpointing=False, **QUIET).fit(Scaled(3), BATCHES)
    assert mine.seen == [("setup", 3, 1), "on_fit_start"]


def test_an_override_on_the_instance_counts() -> None:
    seen: list[Any] = []
    logger = Logger()
    logger.log_hyperparams = seen.append  # type: ignore[method-assign]
    jl.Trainer(logger=logger, enable_checkpointing=False, **QUIET).fit(Scaled(3), BATCHES)
    assert seen == [{"width": 3, "api_key": "k"}]


def test_each_logger_has_hyperparameters_of_its_own() -> None:
    class Adds(Mine):
        def log_hyperparams(self, params: Mapping[str, Any]) -> None:
            super().log_hyperparams(params)
            params["added"] = 1  # type: ignore[index]

    loggers, module = [Adds(), Mine()], Scaled(3)
    jl.Trainer(logger=loggers, enable_checkpointing=False, **QUIET).fit(module, BATCHES)
    assert loggers[1].seen[1] == ("hyperparams", {"width": 3, "api_key": "k"})
    assert module.hparams == {"width": 3, "api_key": "k"}


def test_its_time_is_told_with_that_of_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = stop_clocks(monkeypatch)

    class Slow(Mine):
        def log_hyperparams(self, params: Mapping[str, Any]) -> None:
            clock.now += 0.25

    trainer = jl.Trainer(logger=Slow(), enable_checkpointing=False, **QUIET)
    trainer.fit(Scaled(3), BATCHES)
    found = {(x.owner, x.hook): (x.calls, x.seconds) for x in trainer.explain().hooks}
    assert found["Slow", "log_hyperparams"] == (1, 0.25)


def test_what_it_does_wrong_is_told_by_its_name() -> None:
    class Empty(Logger):
        def log_hyperparams(self) -> None:  # type: ignore[override]
            pass

    class Changes(Logger):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            self.module = module

        def log_hyperparams(self, params: Mapping[str, Any]) -> None:
            self.module.more = 3

    for kind, error, message in (
        (Empty, ModuleError, r"Empty\.log_hyperparams\(\).* is called with \(params\)\. Give it these"),
        (Changes, StateError, r"Changes\.log_hyperparams changed the structure of Scaled"),
    ):
        with pytest.raises(error, match=message):
            jl.Trainer(logger=kind(), enable_checkpointing=False, **QUIET).fit(Scaled(3), BATCHES)


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])
def test_a_file_logger_keeps_those_it_is_given_in_hparams_json_without_secrets(kind: Any) -> None:
    class Logs(jl.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            trainer.logger.log_hyperparams({"rate": 0.1, "shape": (1, 2), "token": "secret"})

        def on_train_end(self, trainer: Any, module: Any) -> None:
            trainer.logger.log_hyperparams({"rate": 0.2, "best": np.float32(0.5)})

    trainer = jl.Trainer(logger=kind(), callbacks=Logs(), enable_checkpointing=False, **QUIET)
    trainer.fit(Scaled(3), BATCHES)
    found = json.loads((trainer.run_dir / "hparams.json").read_text())
    assert found == {"rate": 0.2, "shape": [1, 2], "token": "<redacted>", "best": "0.5"}


def test_nothing_is_written_unless_asked_for() -> None:
    trainer = jl.Trainer(log_every_n_steps=1, **QUIET)
    trainer.fit(Scaled(3), BATCHES)
    assert not (trainer.run_dir / "hparams.json").exists()


def test_a_logger_that_cannot_hold_them_refuses_by_name() -> None:
    with pytest.raises(LoggerError, match="Plain cannot hold hyperparameters"):
        type("Plain", (Logger,), {})().log_hyperparams({"rate": 0.1})
    NoLogger().log_hyperparams({"rate": 0.1})


def test_before_a_run_there_is_no_folder() -> None:
    with pytest.raises(LoggerError, match="CSVLogger has no folder yet.*from a hook"):
        CSVLogger().log_hyperparams({"rate": 0.1})
