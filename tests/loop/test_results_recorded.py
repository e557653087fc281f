"""`self.log` gives the rows and the metrics that Lightning recorded, but for the differences listed with the cases."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.journal import Rows, at_batch
from kit.trainers import make_trainer, thinned

import jaxlit as jl
from jaxlit.errors import ModuleError

DATA = Path(__file__).parents[1] / "data"
# Left out: logging in on_save_checkpoint, which is no hook here, and a LearningRateMonitor, whose names are others.
CASES = {case["name"]: case for case in json.loads((DATA / "lightning_log.json").read_text())}
MAPPINGS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
BOTH = {"on_step": True, "on_epoch": True}

Row = tuple[int, dict[str, float]]  # the step, and the values with "epoch"
Seen = tuple[Any, ...]  # a hook, and the three mappings there


# By the word in the recorded case, what `training_step` logs: functions of (module, batch_idx).
TRAINING: dict[str, Callable[[Any, jax.Array], Any]] = {
    "batch_size": lambda module, i: module.log("x", i, batch_size=10 * (i + 1), **BOTH),
    "log_dict": lambda module, i: module.log_dict({"a": i, "b": 2 * i}, prog_bar=True, **BOTH),
    "both_false": lambda module, i: module.log("x", 1.0, on_step=False, on_epoch=False),
    "dictv": lambda module, i: module.log("x", {"a": 1.0}),
    "dlname": lambda module, i: module.log("x/dataloader_idx_0", 1.0),
    "grad": lambda module, i: module.log("x", module.w[...] * jnp.asarray([0.178906, 1.063945])[i]),
    "intv": lambda module, i: module.log("x", 3),
    "list": lambda module, i: module.log("x", [1, 2]),
    "metric_attr": lambda module, i: module.log("x", 1.0, metric_attribute="average"),
    "name_int": lambda module, i: module.log(1, 1.0),
    "nan": lambda module, i: module.log("x", math.nan),
    "none": lambda module, i: module.log("x", None),
    "one_elem": lambda module, i: module.log("x", jnp.ones(1)),
    "rank_zero": lambda module, i: module.log("x", 1.0, rank_zero_only=True),
    "step_name": lambda module, i: module.log("step", 100.0 + i),
    "suffix_clash": lambda module, i: [module.log("x", 1.0, **BOTH), module.log("x_step", 2.0)],
    "sync": lambda module, i: module.log("x", 1.0, sync_dist=True),
    "twice_same": lambda module, i: [module.log("x", value) for value in (1.0, 5.0)],
}


class Logs(jl.TrainModule):
    """Logs batch_idx + 10 * epoch as `x` in training and `v` elsewhere, where and as a case says."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.w = nnx.Param(jnp.ones(()))
        self.average = nnx.metrics.Average("value")
        self.where, self.what = nnx.static(case.get("log", {})), case.get("what", "")

    def position(self, batch_idx: jax.Array) -> jax.Array:
        return jnp.asarray(batch_idx + 10 * self.current_epoch)

    def training_step(self, batch: Any, batch_idx: jax.Array) -> jax.Array | None:
        if "training_step" in self.where:
            self.log("x", self.position(batch_idx), **self.where["training_step"])
        if self.what in TRAINING:
            TRAINING[self.what](self, batch_idx)
        if self.what == "average":
            self.average.update(value=self.position(batch_idx))
            self.log("tm", self.average, on_epoch=True)
        return None if self.what == "no loss" else jnp.mean(batch["x"]) * self.w[...]

    def validation_step(self, batch: Any, batch_idx: jax.Array) -> None:
        if "validation_step" in self.where:
            self.log("v", self.position(batch_idx), **self.where["validation_step"])

    def test_step(self, batch: Any, batch_idx: jax.Array) -> None:
        self.log("v", self.position(batch_idx), **self.where["test_step"])

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.0)


class Recorder(Rows):
    """Keeps the rows, and the three mappings at the hooks where they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def note(self, hook: str, trainer: jl.Trainer) -> None:
        where = f"{hook} @e{trainer.current_epoch} s{trainer.global_step}"
        self.seen.append((where, *(dict(getattr(trainer, name)) for name in MAPPINGS)))

    def on_train_batch_end(self, trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(f"on_train_batch_end b{batch_idx}", trainer)


for _hook in ("on_validation_end", "on_test_end", "on_train_epoch_end", "on_fit_end"):
    setattr(Recorder, _hook, lambda self, trainer, module, hook=_hook: self.note(hook, trainer))


def logging_in(base: type, hooks: list[str], name: str | None, value: float) -> type:
    """Return a subclass of a module or callback that logs in hooks, by default under the hook's name."""
    made = type("HookLogs", (base,), {})
    for hook in hooks:
        setattr(made, hook, lambda self, *_, hook=hook: self.log(name or hook, value))
    return made


# The hooks in which a module of Lightning may log, as far as they are hooks here.
LOGGING_HOOKS = ["on_train_start", "on_train_epoch_start", "on_train_epoch_end"]
LOGGING_HOOKS += [f"on_{stage}_batch_{end}" for stage in ("train", "validation") for end in ("start", "end")]
LOGGING_HOOKS += ["on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end"]
LOGGED = (*LOGGING_HOOKS, "epoch")


def run(case: dict[str, Any], recorder: Recorder) -> None:
    """Run a case under a recorder, which comes before the callback that a case may add."""
    what, hook = case.get("what"), case.get("hook", "")
    module: type = Logs
    callbacks: list[jl.Callback] = [recorder]
    if what == "module hook":
        module = logging_in(Logs, [hook], "x", 1.0)
    elif what == "module hooks":
        module = logging_in(Logs, LOGGING_HOOKS, None, 7.0)
    elif what == "callback hook":
        callbacks.append(logging_in(jl.Callback, [hook], "cbx", 3.0)())
    elif what == "stop":
        callbacks.append(at_batch(2, lambda trainer, module: trainer.stop("enough")))
    if what == "no trainer":
        module(case).log("x", 1.0)
        return
    trainer = make_trainer(*callbacks, **({"max_epochs": None} | case["trainer"]))
    if "test" in case:
        trainer.test(module(case), batches_of(case["test"]))
        return
    val = [batches_of(rows) for rows in case.get("val", [])]
    own = hook == "val_dataloader"  # then the module has the loader
    trainer.fit(
        module(case),
        batches_of(case["train"], unequal=what == "unequal"),
        None if own or not val else val if len(val) > 1 else val[0],
    )


def batches_of(rows: list[int], *, unequal: bool = False) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    batches = [{"x": rng.normal(size=n).astype(np.float32)} for n in rows]
    return [batch | {"y": np.zeros(len(batch["x"]) + 1, np.float32)} for batch in batches] if unequal else batches


def approximately(values: dict[str, float]) -> Any:
    return pytest.approx(values, rel=1e-6, abs=1e-5, nan_ok=True)  # the recorded values are rounded to 1e-5


def assert_recorded(recorder: Recorder, rows: list[Row], seen: list[Seen]) -> None:
    assert [step for step, _ in recorder.rows] == [step for step, _ in rows]
    for (step, values), (_, expected) in zip(recorder.rows, rows, strict=True):
        assert values == approximately(expected), f"row at step {step}"
    hooks = {where.split()[0] for where, *_ in seen}  # not every case recorded every hook
    result = [line for line in recorder.seen if line[0].split()[0] in hooks]
    assert [where for where, *_ in result] == [where for where, *_ in seen]
    for (where, *mappings), (_, *wanted) in zip(result, seen, strict=True):
        for mapping, values, expected in zip(MAPPINGS, mappings, wanted, strict=True):
            assert values == approximately(expected), f"{mapping} at {where}"


NAMES = list(CASES)


@pytest.mark.parametrize("name", thinned(NAMES, *NAMES[1::4], full=NAMES[::2]))
def test_rows_and_metrics_are_those_recorded(name: str) -> None:
    """Where jaxlit differs on purpose, the case has `here`: what comes in place of what Lightning did, and why."""
    case, recorder = CASES[name], Recorder()
    expected = case.get("here", case)
    if "error" in expected:
        kind, words = expected["error"]
        with pytest.raises(getattr(jl.errors, kind, TypeError), match=words):
            run(case, recorder)
        return
    run(case, recorder)
    assert_recorded(recorder, expected["rows"], expected["seen"])


@pytest.mark.parametrize("hook", [name for name in CASES["log10_hooks"]["rows"][0][1] if name not in LOGGED])
def test_hooks_inside_the_compiled_step_are_refused_by_name(hook: str) -> None:
    with pytest.raises(ModuleError, match=hook):
        run(CASES["log11_where_setup"] | {"hook": hook}, Recorder())
