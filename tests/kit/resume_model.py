"""A training with everything that a resume can forget, and a journal of it to compare bit by bit."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl
from kit.inside import engine_of

EPOCHS, BATCHES, ACCUMULATE, EVERY = 2, 23, 3, 7
STEPS_PER_EPOCH = 8  # 23 batches in windows of three, the last of two
BATCH_SIZE, TAIL, FEATURES = 8, 5, 4
_HOOKS = """
on_fit_start on_train_start on_train_epoch_start on_train_batch_start on_train_batch_end on_validation_start
on_validation_epoch_start on_validation_batch_start on_validation_batch_end on_validation_epoch_end on_validation_end
on_train_epoch_end on_safe_point on_train_end on_fit_end on_log
"""
HOOKS = tuple(_HOOKS.split())


class Net(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(FEATURES, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(6, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))[:, 0]

    def training_step(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        error = self(batch["x"]) - batch["y"]
        loss = jnp.mean(error**2)
        self.log("loss", loss, on_epoch=True)
        self.log("smallest", jnp.min(error), on_step=False, on_epoch=True, reduce_fx="min")
        self.log("largest", jnp.max(error), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("total", jnp.sum(error), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Mapping[str, jax.Array]) -> None:
        self.log("val_loss", jnp.mean((self(batch["x"]) - batch["y"]) ** 2), add_dataloader_idx=True)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.inject_hyperparams(optax.adamw)(learning_rate=0.05),
            optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 40)),
            optax.ema(0.9),
        )


class InEveryHook(jl.Callback):
    """Calls `at(trainer, hook, arguments)` in every hook of fit, after those of the module."""

    runs_last = True

    def at(self, trainer: jl.Trainer, hook: str, arguments: tuple[Any, ...]) -> None:
        raise NotImplementedError


for _name in HOOKS:  # `on_log` is not given the module
    _first = 0 if _name == "on_log" else 1
    setattr(InEveryHook, _name, lambda self, t, *args, n=_name, first=_first: self.at(t, n, args[first:]))


class Journal(InEveryHook):
    """Appends a line for each hook to a file: what it was given, and where training stood, bit by bit.

    What it counts is in checkpoints, so that a resume which forgets it shows.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.batches = 0

    def at(self, trainer: jl.Trainer, hook: str, arguments: tuple[Any, ...]) -> None:
        line: list[Any] = [hook, trainer.current_epoch, trainer.global_step]
        if trainer.sanity_checking:
            return
        if hook == "on_train_batch_end":
            outputs, batch, batch_idx = arguments
            self.batches += 1
            line += [batch_idx, self.batches, digest(batch), float(outputs["loss"]).hex()]
        elif hook == "on_validation_batch_end":
            _, batch, batch_idx, loader = arguments
            line += [loader, batch_idx, digest(batch)]
        elif hook == "on_log":
            values, step = arguments
            line += [step, {name: float(value).hex() for name, value in values.items()}]
        elif hook == "on_safe_point":
            line += arguments
        elif hook.endswith("_end"):
            line.append(shown(trainer))
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class LogsInHooks(jl.Callback):
    """Logs in hooks by every reduction: a value that is forgotten, or counted twice, shows."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_epoch_start(self, trainer: jl.Trainer, module: Any) -> None:
        self.log("epoch_starts", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    def on_train_batch_start(self, trainer: jl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch_starts", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    def on_train_batch_end(self, trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1
        mean = float(batch["x"].mean())
        self.log("in_window", mean, on_step=True, on_epoch=True)
        self.log("batch_max", mean, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("batch_min", mean, on_step=False, on_epoch=True, reduce_fx="min")

    def on_validation_batch_end(
        self, trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.log("val_rows", float(len(batch["x"])), reduce_fx="sum")

    def on_validation_epoch_end(self, trainer: jl.Trainer, module: Any) -> None:
        self.log("val_count", float(self.count))

    def on_train_epoch_end(self, trainer: jl.Trainer, module: Any) -> None:
        self.log("epoch_count", float(self.count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class SavesAt(InEveryHook):
    """Calls `trainer.save_checkpoint` at the n-th call of hooks; `marks` tells how long the journal was at the save.

    It comes last, so that everybody's hook has run.
    """

    def __init__(self, folder: Path, places: Sequence[tuple[str, int]]) -> None:
        self.folder, self.places = folder, set(places)
        self.marks: dict[tuple[str, int], int] = {}
        self._calls: dict[str, int] = {}
        self.asked: list[tuple[str, int]] = []  # and not written yet

    def path(self, place: tuple[str, int]) -> Path:
        return self.folder / f"{place[0]}_{place[1]}"

    def at(self, trainer: jl.Trainer, hook: str, arguments: tuple[Any, ...]) -> None:
        number = self._calls[hook] = self._calls.get(hook, -1) + 1
        if (hook, number) in self.places:
            self.asked.append((hook, number))
            trainer.save_checkpoint(self.path((hook, number)))

    def on_save_checkpoint(self, trainer: jl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.asked:  # else it is a ModelCheckpoint's
            self.marks[self.asked.pop(0)] = len(journal(trainer))


class Stopped(Exception):
    pass


class RaisesAt(InEveryHook):
    def __init__(self, hook: str, number: int) -> None:
        self.hook, self.left = hook, number

    def at(self, trainer: jl.Trainer, hook: str, arguments: tuple[Any, ...]) -> None:
        if hook == self.hook:
            self.left -= 1
            if self.left == -1:
                raise Stopped


def digest(batch: Any) -> str:
    result = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        x = np.ascontiguousarray(leaf)
        result.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape}".encode() + x.tobytes())
    return result.hexdigest()


def assert_same(result: list[Any], wanted: list[Any]) -> None:
    """Compare journals line by line: pytest takes seconds to show how long lists differ."""
    for k, (line, other) in enumerate(zip(result, wanted, strict=False)):
        assert line == other, f"line {k}"
    assert len(result) == len(wanted)


def shown(trainer: jl.Trainer) -> dict[str, str]:
    """Return every metric that callbacks see, exactly."""
    return {name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())}


def final(trainer: jl.Trainer) -> dict[str, Any]:
    """Return all that a training ends with: each device's part of each array as hash, and what is on the host."""
    state = engine_of(trainer).state
    arrays = {
        name: [hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest() for shard in x.addressable_shards]
        for (name, _, _), x in zip(state.spec.entries, state.leaves, strict=True)
    }
    files = (jl.callbacks.ModelCheckpoint, jl.callbacks.CSVLogger)  # which tell of files
    kept = [c.state_dict() for c in trainer.callbacks if not isinstance(c, files)]
    return {
        "arrays": arrays,
        "place": [trainer.current_epoch, trainer.global_step],
        "metrics": shown(trainer),
        "callbacks": [state for state in kept if state],
        "stopped": [trainer.should_stop, trainer.stop_reason],
    }


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return rows with labels that can be learned in part."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype(np.float32)
    return {"x": x, "y": (x.sum(1) + rng.normal(size=count)).astype(np.float32)}


def loaders(batches: int = BATCHES) -> tuple[Any, list[Any]]:
    """Return a shuffled training loader, whose last batch is a tail, and two validation loaders."""
    train = jl.ArrayLoader(rows((batches - 1) * BATCH_SIZE + TAIL), BATCH_SIZE, shuffle=True, seed=3)
    return train, [jl.ArrayLoader(rows(19, 1), BATCH_SIZE), jl.ArrayLoader(rows(11, 2), BATCH_SIZE)]


def make_trainer(
    strategy: str, root: Path, callbacks: Sequence[jl.Callback] = (), name: str = "journal", **arguments: Any
) -> jl.Trainer:
    given: dict[str, Any] = {"max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATE, "val_check_interval": EVERY}
    given |= {"log_every_n_steps": 1, "num_sanity_val_steps": 0, "strategy": strategy, "default_root_dir": root}
    given |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    monitored = "val_loss/dataloader_idx_0"
    watchers = [  # whose states decide how training continues
        LogsInHooks(),
        jl.callbacks.EarlyStopping(monitored, patience=1000),
        jl.callbacks.ReduceLROnPlateau(monitored, patience=1, factor=0.7, min_delta=1.0),
        jl.callbacks.GradientNorm(every_n_steps=2),  # whose values arrive a step late
    ]
    return jl.Trainer(callbacks=[*watchers, Journal(Path(root) / name), *callbacks], **given | arguments)


def journal(trainer: jl.Trainer) -> list[list[Any]]:
    return next(c for c in trainer.callbacks if isinstance(c, Journal)).lines()


def fit(trainer: jl.Trainer, data: Any = None, *, seed: int = 0, **arguments: Any) -> jl.Trainer:
    """Train from the same weights, unless a checkpoint brings others."""
    train, val = loaders() if data is None else data
    seed = 1 if arguments else seed  # a resume must not live on what is built alike
    trainer.fit(Net(rngs=nnx.Rngs(seed)), train, val, **arguments)
    return trainer
