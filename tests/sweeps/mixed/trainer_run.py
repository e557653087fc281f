"""The same training by jaxlit's Trainer."""

import tempfile
from typing import Any

import jax
from flax import nnx
from kit.trainers import BARE, fit, splitting
from sweeps.mixed.case import PER_REPLICA, Case
from sweeps.mixed.hand_loop import CLIP
from sweeps.mixed.net import LOGS, data_of, make_net, make_tx, wrt_of
from sweeps.mixed.record import Record

import jaxlit as jl
from jaxlit.errors import JaxlitError


class Refused(Exception):
    """jaxlit refused a training before its first step."""


class Wrapped(jl.TrainModule):
    def __init__(self, case: Case) -> None:
        self.net, self.case = make_net(case), case

    def note(self, logs: dict[str, Any], prefix: str) -> None:
        for name, (value, weight) in logs.items():
            by_step = {"on_step": prefix == "" and name == "loss", "on_epoch": True}
            self.log(prefix + name, value, **by_step, reduce_fx=LOGS[name], batch_size=weight)

    def training_step(self, batch: Any) -> jax.Array:
        loss, logs = self.net.loss(batch)
        self.note(logs, "")
        return loss

    def validation_step(self, batch: Any) -> None:
        self.note(self.net.loss(batch)[1], "val/")

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.case, self.trainer)


def make_optimizer(case: Case, trainer: jl.Trainer) -> Any:
    """Return the optimizer by the Trainer's own count of batches, which the other side works out from the case."""
    tx = make_tx(case, -(-int(trainer.num_training_batches) // trainer.accumulate_grad_batches))
    if case.wrt == "all" and not case.nested:
        return tx
    return jl.Optimizer(tx.gradient_transformation() if hasattr(tx, "gradient_transformation") else tx, wrt_of(case))


class Outer(jl.TrainModule):
    """A module that leaves everything to the one that it holds."""

    def __init__(self, case: Case) -> None:
        self.inner = Wrapped(case)

    @property
    def net(self) -> nnx.Module:
        return self.inner.net

    def training_step(self, batch: Any) -> jax.Array:
        return self.inner.training_step(batch)

    def validation_step(self, batch: Any) -> None:
        self.inner.validation_step(batch)

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.inner.case, self.trainer)


class Listen(jl.Callback):
    def __init__(self, record: Record, fit: int) -> None:
        self.record, self.fit, self.begun = record, fit, False

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.begun = True
        self.record.losses.append(float(outputs["loss"]))

    def on_log(self, trainer: Any, values: dict[str, float], step: int) -> None:
        if "loss_step" in values:
            # The row of the step before a checkpoint comes once more when training continues.
            self.record.steps[self.fit, step] = values["loss_step"]

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            result = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
            self.record.validations.append((trainer.global_step, result))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        named = {name: "loss_epoch" if name == "loss" else name for name in LOGS}
        result = {name: float(trainer.callback_metrics[shown]) for name, shown in named.items()}
        # An epoch that was cut ends again where training continues, with all of its batches.
        self.record.epochs[self.fit, trainer.current_epoch] = result


def train(case: Case) -> Record:
    """Train a case by jaxlit.

    Raises:
        Refused: It said before the first step of a fit that it cannot.
    """
    record, make = Record(), Outer if case.nested else Wrapped
    module: Any = make(case)
    with tempfile.TemporaryDirectory() as folder:
        saves = {"enable_checkpointing": bool(case.cut), "default_root_dir": folder}
        _fit(case, record, module, case.strategy, 0, max_steps=case.cut or -1, **saves)
        if case.cut:
            module = make(case)
            _fit(case, record, module, case.resume_on or case.strategy, 0, ckpt_path="last", **saves)
        elif case.again:
            _fit(case, record, module, case.again, 1, **saves)
    record.take(module.net)
    return record


def _fit(case: Case, record: Record, module: Any, strategy: str, number: int, **options: Any) -> None:
    batches, val = data_of(case)
    listener = Listen(record, number)
    options |= {"val_check_interval": case.val_every} if case.val_every else {}
    options |= {"limit_train_batches": case.limit} if case.limit else {}
    options |= {"gradient_clip_val": CLIP, "gradient_clip_algorithm": case.clip} if case.clip else {}
    options |= {"max_epochs": case.epochs, "accumulate_grad_batches": case.accumulate, "precision": case.precision}
    options |= {"num_sanity_val_steps": 1, "log_every_n_steps": 1} | _layout(case, strategy)
    try:
        fit(module, batches, val or None, listener, **(BARE | options))
    except JaxlitError as error:
        if listener.begun:
            raise
        raise Refused(f"{type(error).__name__}: {error}") from error


def _layout(case: Case, strategy: str) -> dict[str, Any]:
    """Return the Trainer's strategy and devices; what is small is split as well."""
    kinds = jl.strategies
    given = {"loss_reduction": case.loss_reduction} if case.loss_reduction and strategy in PER_REPLICA else {}
    if strategy == "replicas":
        return {"strategy": kinds.Replicas(case.devices, **given)}
    if strategy == "single":
        return {"strategy": "single", "devices": 1}
    replicas = {"shard_map": kinds.ShardMapDDP, "pmap": kinds.PMap}.get(strategy)
    return {"strategy": splitting(strategy) if replicas is None else replicas(**given), "devices": case.devices}
