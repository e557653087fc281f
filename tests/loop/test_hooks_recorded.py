"""The hooks, with their counters, come as Lightning recorded them, but for the differences listed with the cases."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from kit.batches import Stream, numbered
from kit.journal import HOOKS, hooks, raising
from kit.modules import module
from kit.refusals import warnings_of
from kit.trainers import FOUR, SEVERAL, make_trainer, thinned

import jaxlit as jl

DATA = Path(__file__).parents[1] / "data"
CASES = {case["name"]: case for case in json.loads((DATA / "lightning_hooks.json").read_text())}


class Lines(jl.Callback):
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
    if _hook not in ("on_log", "on_safe_point") and "checkpoint" not in _hook:  # Lightning has none, or others
        setattr(Lines, _hook, lambda self, trainer, *args, hook=_hook: self.note(hook, trainer, *args))


def log_epoch_loss(self: Any, batch: Any) -> Any:
    self.log("loss", 1.0, on_step=False, on_epoch=True)
    return jnp.mean(self.error(batch) ** 2)


def staircase(self: Any) -> jl.Optimizer:
    schedule = optax.exponential_decay(0.01, transition_steps=2, decay_rate=0.1, staircase=True)
    return jl.Optimizer(optax.sgd(schedule), lr_schedule=schedule)


class Loader:
    """A loader that says another length than it has."""

    def __init__(self, batches: list[Any], length: int) -> None:
        self.batches, self.length = batches, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return self.length


def stop_in(hook: str) -> Callable[[], jl.Callback]:
    """Return a factory of a callback that stops in a hook, in batch 1 if it is a batch hook."""

    def stop(trainer: jl.Trainer, module: Any, *args: Any) -> None:
        if not args or args[-1] == 1:
            trainer.should_stop = True

    return lambda: hooks(**{hook: stop})


def early_stopping(**arguments: Any) -> Callable[[], jl.Callback]:
    return lambda: jl.callbacks.EarlyStopping(**({"monitor": "val_loss", "patience": 1} | arguments))


@dataclass(frozen=True)
class Script:
    """What a case does beside fitting `Mean`: callbacks stand before or after the recorder."""

    members: dict[str, Any]  # of the module
    before: Callable[[], jl.Callback] | None = None
    after: Callable[[], jl.Callback] | None = None
    loader: Callable[[list[Any]], Any] = list
    then: tuple[str, ...] = ()  # what the trainer does after fit
    datamodule: bool = False


RISES = {"validation": lambda m, batch: m.log("val_loss", jnp.asarray([1.0, 0.9, 0.95, 0.96, 0.97])[m.current_epoch])}
RAISES = {"training": raising(ValueError, "boom")}
SCRIPTS = {
    "": Script({}),
    "stop in on_train_start": Script({}, after=stop_in("on_train_start")),
    "stop in on_train_batch_end": Script({}, after=stop_in("on_train_batch_end")),
    "stop in on_train_epoch_end": Script({}, after=stop_in("on_train_epoch_end")),
    "module skips": Script({"on_train_batch_start": lambda self, batch, batch_idx: -1 if batch_idx == 1 else None}),
    "step returns None": Script({"training": lambda self, batch: None}),
    "early stopping on val": Script(RISES, before=early_stopping(patience=2)),
    "early stopping on train": Script({"training": log_epoch_loss}, before=early_stopping(monitor="loss")),
    "early stopping at once": Script({}, before=early_stopping()),
    "early stopping after validation": Script({}, before=early_stopping(check_on_train_epoch_end=False)),
    "callback raises": Script({}, after=lambda: hooks(on_train_batch_end=raising(ValueError, "boom in callback"))),
    "setup raises": Script({"setup": raising(ValueError, "boom in setup")}),
    "on_exception raises": Script(RAISES, before=lambda: hooks(on_exception=raising(ValueError, "second boom"))),
    "fit, validate, test, predict": Script({}, then=("validate", "test", "predict")),
    "datamodule": Script({}, datamodule=True, then=("test",)),
    "datamodule, step raises": Script(RAISES, datamodule=True),
    "schedule": Script({"configure_optimizers": staircase}),
    "plateau": Script({"tx": optax.chain(optax.sgd(0.01), optax.contrib.reduce_on_plateau(patience=1))}),
    "no length": Script({}, loader=Stream),
    "short loader": Script({}, loader=lambda batches: Loader(batches, len(batches) + 1)),
    "long loader": Script({}, loader=lambda batches: Loader(batches, len(batches) // 2)),
}


def run(case: dict[str, Any], recorder: Lines) -> jl.Trainer:
    """Run a case, and return its trainer; after an error it is in `recorder.trainer`."""
    script = SCRIPTS[case.get("script", "")]
    result = [script.before and script.before(), recorder, script.after and script.after()]
    recorder.trainer = trainer = make_trainer(*[c for c in result if c], **({"max_epochs": None} | case["trainer"]))
    loaders: dict[str, Any] = {stage: numbered(n) for stage, n in case["batches"].items() if stage != "val"}
    val = [numbered(n) for n in case["batches"].get("val", [])]
    loaders["validate"] = val if len(val) > 1 else val[0] if val else None
    model = module(**({"validation": lambda self, batch: self.log("val_loss", 1.0)} | script.members))
    if script.datamodule:
        names = {"train": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader"}
        hooks_of_data = {names[stage]: lambda self, x=x: x for stage, x in loaders.items()}
        data = type("Data", (jl.DataModule,), hooks_of_data)()
        trainer.fit(model, datamodule=data)
        for verb in script.then:
            getattr(trainer, verb)(model, datamodule=data)
    elif case["method"] == "fit":
        trainer.fit(model, script.loader(loaders["train"]), loaders["validate"])
        for verb in script.then:
            getattr(trainer, verb)(model, loaders[verb])
    else:
        getattr(trainer, case["method"])(model, loaders[case["method"]])
    return trainer


NAMES = list(CASES)


@pytest.mark.parametrize("name", thinned(NAMES, *NAMES[1::3], full=NAMES[::3]))
def test_hooks_and_counters_are_those_recorded(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where jaxlit differs on purpose, the case has `here`: what comes in place of what Lightning did, and why."""
    case, recorder = CASES[name], Lines()
    expected = case.get("here", case)
    if "error" in expected:
        kind, word = expected["error"]
        with pytest.raises(getattr(jl.errors, kind, ValueError), match=word):
            run(case, recorder)
    else:
        run(case, recorder)
    assert recorder.lines == expected["hooks"].split(" | "), expected.get("reason")
    assert [recorder.trainer.current_epoch, recorder.trainer.global_step] == expected["final"]
    assert all(any(word in text for text in warnings_of(caplog)) for word in expected.get("warning", []))


@pytest.mark.parametrize("strategy", thinned(SEVERAL, "fsdp", "shard_map", full=FOUR[1:]))
def test_hooks_come_in_the_same_order_under_every_strategy(strategy: str) -> None:
    case, recorder = CASES["02_fit_with_val"], Lines()
    run({**case, "trainer": {**case["trainer"], "strategy": strategy}}, recorder)
    assert recorder.lines == case["hooks"].split(" | ")
