"""Optuna chooses the learning rate and the width, and ends trials that fall behind after a validation.

python examples/optuna_sweep.py --trials 8    # after pip install optuna
"""

import argparse
from typing import Any

import jax
import numpy as np
import optax
import optuna
from flax import nnx
from sklearn.datasets import load_digits

import jaxlit as jl

QUIET: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Digits(jl.TrainModule):
    def __init__(self, width: int, lr: float, *, rngs: nnx.Rngs) -> None:
        self.net = nnx.Sequential(nnx.Linear(64, width, rngs=rngs), nnx.relu, nnx.Linear(width, 10, rngs=rngs))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(self.net(batch["x"]), batch["y"]).mean()

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        self.log("val/accuracy", (self.net(batch["x"]).argmax(-1) == batch["y"]).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(self.hparams.lr)


class Prune(jl.Callback):
    def __init__(self, trial: optuna.Trial, monitor: str) -> None:
        self.trial, self.monitor, self.pruned = trial, monitor, False

    def on_validation_end(self, trainer: jl.Trainer, module: Any) -> None:
        self.trial.report(trainer.callback_metrics[self.monitor], trainer.current_epoch)
        if self.trial.should_prune():
            self.pruned = True
            trainer.stop("Optuna prunes this trial")


def train(width: int, lr: float, *callbacks: jl.Callback) -> float:
    """Return the accuracy at the end."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
    data = jl.ArrayLoader({"x": x[:1408], "y": y[:1408]}, batch_size=64, shuffle=True)
    val = jl.ArrayLoader({"x": x[1408:1792], "y": y[1408:1792]}, batch_size=64)
    trainer = jl.Trainer(max_epochs=5, callbacks=callbacks, num_sanity_val_steps=0, **QUIET)
    trainer.fit(jl.lazy(Digits, width=width, lr=lr), data, val)
    return trainer.callback_metrics["val/accuracy"]


def main() -> optuna.Study:
    """Run the trials, and print the best."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", default=8, type=int)
    trials = parser.parse_args().trials

    def objective(trial: optuna.Trial) -> float:
        width, lr = trial.suggest_categorical("width", [32, 128]), trial.suggest_float("lr", 1e-5, 1e-1, log=True)
        accuracy = train(width, lr, prune := Prune(trial, "val/accuracy"))
        if prune.pruned:
            raise optuna.TrialPruned
        return accuracy

    sampler, pruner = optuna.samplers.TPESampler(seed=0), optuna.pruners.MedianPruner(n_startup_trials=2)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    study.optimize(objective, n_trials=trials)
    pruned = len(study.get_trials(states=[optuna.trial.TrialState.PRUNED]))
    print(f"best accuracy {study.best_value:.4f} with {study.best_params}; {pruned} of {trials} trials pruned")
    return study


if __name__ == "__main__":
    main()
