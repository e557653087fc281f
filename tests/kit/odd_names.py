"""Names of metrics that trackers refuse or change, and a training that logs all of them."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlit.callbacks import Logger
from kit.batches import numbered
from kit.journal import hooks
from kit.modules import Mean
from kit.trainers import fit

LONG = "x" * 250
# By name, the name in MLflow: letters, digits, `_-. :/`, at most 250, in the normal form of a path; # is a checksum.
MLFLOW_NAMES = {
    "/loss": "_/loss",
    "a//b": "a/_/b",
    "a/": "a/_",
    "/": "_/_",
    ".": "_",
    "..": "_-#",
    "../up": "_/up",
    "...": "_.",
    "a/./b": "a/_/b-#",
    "a b": "a b",
    "a_b": "a_b",
    " a": " a",
    "a ": "a ",
    "ä/ö": "ä/ö",
    "损失": "损失",
    "精度": "精度",
    "a:b": "a:b",
    "a\\b": "a_b-#",
    "a?b": "a_b-#",
    "a%b": "a_b-#",
    'a"b': "a_b-#",
    "a\nb": "a_b-#",
    "a\rb": "a_b-#",
    "a\tb": "a_b-#",
    "a,b": "a_b-#",
    "a'b": "a_b-#",
    "a*b": "a_b-#",
    "a[0]": "a_0_",
    "loss (mean)": "loss _mean_",
    "acc@5": "acc_5",
    f"{LONG}{LONG[:50]}": LONG,
    f"{LONG}y": f"{LONG[:241]}-#",
    "Loss": "Loss",
    "LOSS": "LOSS",
    "🙂": "_-#",
    "_x": "_x",
    "loss.train": "loss.train",
    "loss.": "loss.",
    "-x": "-x",
    "=x": "_x-#",
    "global_step": "global_step",
    "_step": "_step",
    "_runtime": "_runtime",
    "_timestamp": "_timestamp",
    "trainer/global_step": "trainer/global_step",
}


# For each name, what a reader of the run must find: pairs of step and value. "mine" is logged in a hook at each step.
LOGGED = {name: [(step, number + 100.0 * (step + 1)) for step in (1, 3)] for number, name in enumerate(MLFLOW_NAMES)}
LOGGED["mine"] = [(step, float(step)) for step in range(4)]


class OddNames(Mean):
    """Logs the number of each name plus 100 times the batch's number."""

    def training_step(self, batch: Any) -> jax.Array:
        for number, name in enumerate(MLFLOW_NAMES):
            self.log(name, number + 100 * jnp.mean(batch["x"]))
        return super().training_step(batch)


def train_odd_names(*loggers: Logger) -> None:
    """Train four steps in the folder "run", with a row every two of them."""

    def log(trainer: Any, *_: Any) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"mine": trainer.global_step - 1})

    every_batch = hooks(on_train_batch_end=log)
    arguments = {"log_every_n_steps": 2, "default_root_dir": "run"}
    fit(OddNames(), numbered(4), None, every_batch, logger=[*loggers], **arguments)
