"""The hooks, with their counters, come as Lightning recorded them, but for the differences listed here."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import DataError, ModuleError

CASES = {c["name"]: c for c in json.loads((Path(__file__).parent / "data" / "lightning_hooks.json").read_text())}
HOOKS = [name for name in vars(jl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]


class Linear(jl.TrainModule):
    """Linear regression without an intercept."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(2))

    def training_step(self, batch: Any) -> jax.Array | None:
        loss = jnp.mean((batch["x"] @ self.w[...]) ** 2)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.validation_loss())

    def validation_loss(self) -> Any:
        return 1.0

    def test_step(self, batch: Any) -> None:
        self.log("test_loss", jnp.mean(batch["x"]))

    def predict_step(self, batch: Any) -> jax.Array:
        return batch["x"] @ self.w[...]

    def configure_optimizers(self) -> optax.GradientTransformation | jl.Optimizer:
        return optax.sgd(0.01)


class Recorder(jl.Callback):
    """Writes every hook down as the recorded lines do."""

    trainer: jl.Trainer

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, hook: str, trainer: jl.Trainer, *args: Any) -> None:
        words = [hook]
        if hook in ("setup", "teardown"):
            words.append(args[-1])
        elif "batch" in hook:
            held = 1 if hook.endswith("start") else 2  # what comes before the index: the batch, and the outputs
            index, *dataloader = args[1 + held :]
            words += [f"b{index}"] + [f"dl{idx}" for idx in dataloader if idx]
        words += [f"@e{trainer.current_epoch}", f"s{trainer.global_step}"]
        self.lines.append(" ".join(words + ["sanity"] * trainer.sanity_checking + ["stop"] * trainer.should_stop))


for _hook in HOOKS:
    if _hook not in ("on_log", "on_safe_point"):  # which Lightning does not have
        setattr(Recorder, _hook, lambda self, trainer, *args, hook=_hook: self.note(hook, trainer, *args))


# What a case does beside fitting ---------------------------------------------------------------------


class SkipsFromBatch1(Linear):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


class ReturnsNone(Linear):
    def training_step(self, batch: Any) -> None:
        return None


class RaisesInStep(Linear):
    def training_step(self, batch: Any) -> None:
        raise ValueError("boom")


class RaisesInSetup(Linear):
    def setup(self, stage: str) -> None:
        raise ValueError("boom in setup")


class ValidatesWorseFromEpoch2(Linear):
    def validation_loss(self) -> jax.Array:
        return jnp.asarray([1.0, 0.9, 0.95, 0.96, 0.97])[self.current_epoch]


class LogsEpochLoss(Linear):
    def training_step(self, batch: Any) -> jax.Array:
        self.log("loss", 1.0, on_step=False, on_epoch=True)
        return jnp.mean(batch["x"] @ self.w[...])


class HasSchedule(Linear):
    def configure_optimizers(self) -> jl.Optimizer:
        schedule = optax.exponential_decay(0.01, transition_steps=2, decay_rate=0.1, staircase=True)
        return jl.Optimizer(optax.sgd(schedule), lr_schedule=schedule)


class HasPlateau(Linear):
    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.chain(optax.sgd(0.01), optax.contrib.reduce_on_plateau(patience=1))


class Loader:
    """A loader that says another length than it has, or none."""

    def __init__(self, batches: list[Any], length: int | None) -> None:
        self.batches, self.length = batches, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("no length")
        return self.length


class Data(jl.DataModule):
    """The loaders of a case as a data module."""

    def __init__(self, train: Any, val: Any, test: Any) -> None:
        self.train, self.val, self.test = train, val, test

    def train_dataloader(self) -> Any:
        return self.train

    def val_dataloader(self) -> Any:
        return self.val

    def test_dataloader(self) -> Any:
        return self.test


def make_callback(**hooks: Any) -> jl.Callback:
    """Return a callback with these functions of (trainer, module, ...) as its hooks."""
    return type("Made", (jl.Callback,), {k: staticmethod(v) for k, v in hooks.items()})()


def stop_in(hook: str) -> Callable[[], jl.Callback]:
    """Return a factory of a callback that stops in a hook, in batch 1 if it is a batch hook."""

    def stop(trainer: jl.Trainer, module: Any, *args: Any) -> None:
        if not args or args[-1] == 1:
            trainer.should_stop = True

    return lambda: make_callback(**{hook: stop})


def raise_error(error: Exception) -> Callable[..., None]:
    """Return a hook that raises."""

    def hook(*_: Any) -> None:
        raise error

    return hook


def early_stopping(**arguments: Any) -> Callable[[], jl.Callback]:
    """Return a factory of an EarlyStopping."""
    return lambda: jl.callbacks.EarlyStopping(**({"monitor": "val_loss", "patience": 1} | arguments))


@dataclass(frozen=True)
class Script:
    """What a case does beside fitting `Linear`: callbacks stand before or after the recorder."""

    module: type[Linear] = Linear
    before: Callable[[], jl.Callback] | None = None
    after: Callable[[], jl.Callback] | None = None
    loader: Callable[[list[Any]], Any] = list
    then: tuple[str, ...] = ()  # what the trainer does after fit
    datamodule: bool = False


SCRIPTS = {
    "": Script(),
    "stop in on_train_start": Script(after=stop_in("on_train_start")),
    "stop in on_train_batch_end": Script(after=stop_in("on_train_batch_end")),
    "stop in on_train_epoch_end": Script(after=stop_in("on_train_epoch_end")),
    "module skips": Script(SkipsFromBatch1),
    "step returns None": Script(ReturnsNone),
    "early stopping on val": Script(ValidatesWorseFromEpoch2, before=early_stopping(patience=2)),
    "early stopping on train": Script(LogsEpochLoss, before=early_stopping(monitor="loss")),
    "early stopping at once": Script(before=early_stopping()),
    "early stopping after validation": Script(before=early_stopping(check_on_train_epoch_end=False)),
    "callback raises": Script(
        after=lambda: make_callback(on_train_batch_end=raise_error(ValueError("boom in callback")))
    ),
    "setup raises": Script(RaisesInSetup),
    "on_exception raises": Script(
        RaisesInStep, before=lambda: make_callback(on_exception=raise_error(ValueError("second boom")))
    ),
    "fit, validate, test, predict": Script(then=("validate", "test", "predict")),
    "datamodule": Script(datamodule=True, then=("test",)),
    "datamodule, step raises": Script(RaisesInStep, datamodule=True),
    "schedule": Script(HasSchedule),
    "plateau": Script(HasPlateau),
    "no length": Script(loader=lambda batches: Loader(batches, None)),
    "short loader": Script(loader=lambda batches: Loader(batches, len(batches) + 1)),
    "long loader": Script(loader=lambda batches: Loader(batches, len(batches) // 2)),
}


def run(case: dict[str, Any], recorder: Recorder) -> jl.Trainer:
    """Run a case, and return its trainer; after an error it is in `recorder.trainer`."""
    script = SCRIPTS[case.get("script", "")]
    found = [script.before and script.before(), recorder, script.after and script.after()]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "strategy": "single"}
    recorder.trainer = trainer = jl.Trainer(callbacks=[c for c in found if c], **(quiet | case["trainer"]))
    loaders: dict[str, Any] = {stage: make_batches(n) for stage, n in case["batches"].items() if stage != "val"}
    val = [make_batches(n) for n in case["batches"].get("val", [])]
    loaders["validate"] = val if len(val) > 1 else val[0] if val else None
    module = script.module()
    if script.datamodule:
        data = Data(loaders["train"], loaders["validate"], loaders.get("test"))
        trainer.fit(module, datamodule=data)
        for verb in script.then:
            getattr(trainer, verb)(module, datamodule=data)
    elif case["method"] == "fit":
        trainer.fit(module, script.loader(loaders["train"]), loaders["validate"])
        for verb in script.then:
            getattr(trainer, verb)(module, loaders[verb])
    else:
        getattr(trainer, case["method"])(module, loaders[case["method"]])
    return trainer


def make_batches(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(2, 2)).astype(np.float32)} for _ in range(count)]


# Where jaxlit differs on purpose ---------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How a case differs from what Lightning recorded, and why."""

    reason: str
    lines: Callable[[list[str]], list[str]]  # from the recorded lines
    error: Exception | None = None  # its type and a part of its message
    final: list[int] | None = None
    warning: str | None = None


TEARDOWN = ["teardown fit @e0 s0"]
START = ["setup fit @e0 s0", "on_fit_start @e0 s0", "on_train_start @e0 s0", "on_train_epoch_start @e0 s0"]


def stops_later(recorded: list[str]) -> list[str]:
    """Return the lines with the stop flag in the last three alone."""
    return [line.removesuffix(" stop") for line in recorded[:-3]] + recorded[-3:]


def with_tail(epoch: int) -> list[str]:
    """Return the lines of an epoch of three batches in windows of two, validated."""
    steps, wide = 2 * epoch, ["on_validation_start", "on_validation_epoch_start"]
    for batch in range(3):
        wide += [f"on_validation_batch_start b{batch}", f"on_validation_batch_end b{batch}"]
    wide += ["on_validation_epoch_end", "on_validation_end", "on_train_epoch_end"]
    return [
        f"on_train_epoch_start @e{epoch} s{steps}",
        f"on_train_batch_start b0 @e{epoch} s{steps}",
        f"on_train_batch_end b0 @e{epoch} s{steps}",
        f"on_train_batch_start b1 @e{epoch} s{steps}",
        f"on_train_batch_end b1 @e{epoch} s{steps + 1}",
        f"on_train_batch_start b2 @e{epoch} s{steps + 1}",
        f"on_train_batch_end b2 @e{epoch} s{steps + 2}",
        *(f"{line} @e{epoch} s{steps + 2}" for line in wide),
    ]


DIFFERENCES = {
    "36_training_step_none": Difference(
        "a step that returns None is an error, not an optimizer step without an update",
        lambda recorded: [*recorded[:5], "on_exception @e0 s0", *TEARDOWN],
        error=ModuleError("training_step"),
        final=[0, 0],
    ),
    "41_early_stopping_min_epochs": Difference(
        "patience does not run while min_epochs blocks: it stops in the last epoch, not before", stops_later
    ),
    "51_exc_callback": Difference(
        "teardown runs after an error",
        lambda _: [
            *START,
            "on_train_batch_start b0 @e0 s0",
            "on_train_batch_end b0 @e0 s1",
            "on_exception @e0 s1",
            "teardown fit @e0 s1",
        ],
        error=ValueError("boom in callback"),
    ),
    "53_exc_setup": Difference(
        "teardown runs after an error", lambda recorded: recorded + TEARDOWN, error=ValueError("boom in setup")
    ),
    "54_exc_in_on_exception": Difference(
        "an error in on_exception neither hides the first nor skips other callbacks; teardown runs",
        lambda _: [*START, "on_train_batch_start b0 @e0 s0", "on_exception @e0 s0", *TEARDOWN],
        error=ValueError("boom"),
    ),
    "74_datamodule_exc": Difference(
        "teardown runs after an error", lambda recorded: recorded + TEARDOWN, error=ValueError("boom")
    ),
    "88_empty_train": Difference(
        "a training loader without a batch is an error, before anything begins",
        lambda _: [START[0], "on_exception @e0 s0", *TEARDOWN],
        error=DataError("gave no batch"),
    ),
    "93_loader_short": Difference(
        "a loader shorter than its length still steps its tail, validates, and warns",
        lambda recorded: [
            *recorded[:3],
            *with_tail(0),
            *with_tail(1),
            *(line.replace("s2", "s4") for line in recorded[-3:]),
        ],
        final=[2, 4],
        warning=r"\b3\b.*\b4\b|\b4\b.*\b3\b",  # what it gave and what it said, in either order
    ),
}


@pytest.mark.parametrize("name", [name for name in CASES if name not in DIFFERENCES])
def test_hooks_and_counters_are_those_that_lightning_recorded(name: str) -> None:
    case, recorder = CASES[name], Recorder()
    trainer = run(case, recorder)
    assert recorder.lines == case["hooks"].split(" | ")
    assert [trainer.current_epoch, trainer.global_step] == case["final"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate:8"])
def test_hooks_come_in_the_same_order_under_every_strategy(strategy: str) -> None:
    case, recorder = CASES["02_fit_with_val"], Recorder()
    run({**case, "trainer": {**case["trainer"], "strategy": strategy}}, recorder)
    assert recorder.lines == case["hooks"].split(" | ")


@pytest.mark.parametrize("name", DIFFERENCES)
def test_hooks_and_counters_differ_from_lightning_only_as_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    case, recorder, difference = CASES[name], Recorder(), DIFFERENCES[name]
    if difference.error is None:
        run(case, recorder)
    else:
        with pytest.raises(type(difference.error), match=str(difference.error)):
            run(case, recorder)
    assert recorder.lines == difference.lines(case["hooks"].split(" | ")), difference.reason
    trainer = recorder.trainer
    assert [trainer.current_epoch, trainer.global_step] == (difference.final or case["final"]), difference.reason
    if difference.warning is not None:
        told = [r.getMessage() for r in caplog.records if r.name == "jaxlit" and r.levelname == "WARNING"]
        assert any(re.search(difference.warning, message) for message in told), difference.reason


def test_a_data_module_hears_of_an_error_before_its_teardown(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    monkeypatch.setattr(Data, "on_exception", lambda self, error: heard.append(repr(error)))
    monkeypatch.setattr(Data, "teardown", lambda self, stage: heard.append(stage))
    with pytest.raises(ValueError, match="boom"):
        run(CASES["74_datamodule_exc"], Recorder())
    assert heard == ["ValueError('boom')", "fit"]


def test_an_error_in_on_exception_is_noted_on_the_first() -> None:
    with pytest.raises(ValueError, match="^boom") as caught:
        run(CASES["54_exc_in_on_exception"], Recorder())
    assert "second boom" in "".join(caught.value.__notes__)
