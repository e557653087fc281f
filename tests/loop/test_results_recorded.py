"""`self.log` gives the rows and the metrics that Lightning recorded, but for the differences listed here."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
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
from jaxlit.errors import DataError, LogError, ModuleError

DATA = Path(__file__).parents[1] / "data"
CASES = {case["name"]: case for case in json.loads((DATA / "lightning_log.json").read_text())}
MAPPINGS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
BOTH = {"on_step": True, "on_epoch": True}

Row = tuple[int, dict[str, float]]  # the step, and the values with "epoch"
Seen = tuple[Any, ...]  # a hook, and the three mappings there


# What a case logs ------------------------------------------------------------------------------------

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


# What differs on purpose -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How a case differs from what Lightning recorded, and why: an error, or other rows and metrics."""

    reason: str
    error: Exception | None = None  # its type and a part of its message
    rows: Callable[[list[Row]], list[Row]] = lambda rows: rows  # from the recorded rows
    seen: Callable[[list[Seen]], list[Seen]] = lambda seen: seen  # from the recorded metrics


def without_evaluation_steps(rows: list[Row]) -> list[Row]:
    """Return the rows that have an epoch: Lightning's rows of evaluation steps have none."""
    return [(step, values) for step, values in rows if "epoch" in values]


def window_mean(value: float) -> float:
    """Return the mean so far of a window of two, given the value of its newest batch, which counts from 0."""
    return value - 0.5 * (value % 2)


def window_rows(rows: list[Row]) -> list[Row]:
    return [(step, {k: window_mean(v) if k == "x_step" else v for k, v in row.items()}) for step, row in rows]


def window_seen(seen: list[Seen]) -> list[Seen]:
    return [
        (where, *({k: window_mean(v) if _is_of_step(k, where) else v for k, v in found.items()} for found in mappings))
        for where, *mappings in seen
    ]


def _is_of_step(name: str, where: str) -> bool:
    return name == "x_step" or (name == "x" and where.startswith("on_train_batch_end"))


def average_rows(rows: list[Row]) -> list[Row]:
    steps = [(step, {"tm_step": float(step % 3 + 10 * (step // 3)), "epoch": step // 3}) for step in range(6)]
    return [*steps[:3], rows[0], *steps[3:], rows[1]]


def average_seen(seen: list[Seen]) -> list[Seen]:
    values = [0.0, 1.0, 2.0, 2.0, 10.0, 11.0, 12.0, 12.0, 12.0]  # of the newest step, at each hook
    return [
        (where, callback | {"tm_step": value, "tm": _bare(where, callback, value)}, logged | {"tm_step": value}, bar)
        for (where, callback, logged, bar), value in zip(seen, values, strict=True)
    ]


def _bare(where: str, callback: dict[str, float], value: float) -> float:
    return value if where.startswith("on_train_batch_end") else callback["tm"]


def only_hooks(rows: list[Row]) -> list[Row]:
    return [(step, {k: v for k, v in row.items() if k in LOGGED}) for step, row in rows]


def only_hooks_seen(seen: list[Seen]) -> list[Seen]:
    early = {"on_train_epoch_start": 7.0}
    return [
        (where, *({k: v for k, v in found.items() if k in LOGGING_HOOKS} | early for found in (callback, logged)), bar)
        for where, callback, logged, bar in seen
    ]


NO_STEP_ROWS = "the values of evaluation steps never share the axis of training: they make no row"
WINDOW = "an accumulation window logs its mean, not the value of its last batch"
NO_ARGUMENT = "metrics are reduced inside the compiled step, so log has no arguments for it"

DIFFERENCES = {
    "log02_val_step_epoch": Difference(NO_STEP_ROWS, rows=without_evaluation_steps),
    "log03_multi_dl_step_epoch": Difference(NO_STEP_ROWS, rows=without_evaluation_steps),
    "log16_test": Difference(NO_STEP_ROWS, rows=without_evaluation_steps),
    "log08_every1_accum": Difference(WINDOW, rows=window_rows, seen=window_seen),
    "log08_every2_accum": Difference(WINDOW, rows=window_rows, seen=window_seen),
    "log10_hooks": Difference(
        "what is inside the compiled step has no hooks; a value of on_train_epoch_start shows at once",
        rows=only_hooks,
        seen=only_hooks_seen,
    ),
    **{
        f"log11_where_{hook}": Difference("the hook has no place here and is refused", error=ModuleError(hook))
        for hook in ("configure_model", "on_validation_model_eval", "on_validation_model_train")
    },
    "log13_value_metric_attr": Difference(NO_ARGUMENT, error=TypeError("metric_attribute")),
    "log13_value_rank_zero": Difference(NO_ARGUMENT, error=TypeError("rank_zero_only")),
    "log13_value_sync": Difference(NO_ARGUMENT, error=TypeError("sync_dist")),
    "log13_value_one_elem": Difference("a logged array is a scalar: shape (1,) is refused", error=LogError("scalar")),
    "log13_value_step_name": Difference("every row has a step of its own", error=LogError("step")),
    "log13_value_suffix_clash": Difference("two metrics may not make one name", error=LogError("x_step")),
    "log13_value_twice_same": Difference("a name is logged once a step", error=LogError("twice")),
    "log15_torchmetrics": Difference(
        "an nnx metric takes the place of a torchmetrics one, and its share of each step is a value of that step",
        rows=average_rows,
        seen=average_seen,
    ),
    "log22_no_trainer": Difference("logging without a trainer is an error, not a warning", error=LogError("Trainer")),
    "log25_none": Difference("a training step that returns None is an error", error=ModuleError("training_step")),
    "log27_ambiguous_bs": Difference("the leaves of a batch have the same rows", error=DataError("leading sizes")),
}

# Lightning refuses these as well; a word of what the message here says.
REFUSED = {name: case["hook"] for name, case in CASES.items() if "raised" in case and "hook" in case} | {
    "log01_train_none": "on_epoch=False",
    "log03_multi_dl_no_idx": "add_dataloader_idx",
    "log13_value_both_false": "on_epoch=False",
    "log13_value_dictv": "a.: 1.0",
    "log13_value_dlname": "dataloader_idx",
    "log13_value_list": r"\[1, 2\]",
    "log13_value_name_int": "str",
    "log13_value_none": "got None",
    # No hooks of the loop: the message need not name them.
    "log11_where_configure_optimizers": "configure_optimizers|outside",
    "log11_where_on_before_batch_transfer": "on_before_batch_transfer|outside",
    "log11_where_val_dataloader": "val_dataloader|outside",
}

# Left out of the recorded cases: logging in on_save_checkpoint, which is no hook here, and the rows of a
# LearningRateMonitor, whose names are others.


def approximately(values: dict[str, float]) -> Any:
    return pytest.approx(values, rel=1e-6, abs=1e-5, nan_ok=True)  # the recorded values are rounded to 1e-5


def assert_recorded(recorder: Recorder, rows: list[Row], seen: list[Seen]) -> None:
    assert [step for step, _ in recorder.rows] == [step for step, _ in rows]
    for (step, values), (_, expected) in zip(recorder.rows, rows, strict=True):
        assert values == approximately(expected), f"row at step {step}"
    hooks = {where.split()[0] for where, *_ in seen}  # not every case recorded every hook
    found = [line for line in recorder.seen if line[0].split()[0] in hooks]
    assert [where for where, *_ in found] == [where for where, *_ in seen]
    for (where, *mappings), (_, *wanted) in zip(found, seen, strict=True):
        for mapping, values, expected in zip(MAPPINGS, mappings, wanted, strict=True):
            assert values == approximately(expected), f"{mapping} at {where}"


ALIKE = [name for name, case in CASES.items() if name not in DIFFERENCES and "raised" not in case]


@pytest.mark.parametrize("name", thinned(ALIKE, *ALIKE[1::3], full=ALIKE[::3]))
def test_rows_and_metrics_are_those_that_lightning_recorded(name: str) -> None:
    case, recorder = CASES[name], Recorder()
    run(case, recorder)
    assert_recorded(recorder, case["rows"], case["seen"])


@pytest.mark.parametrize("name", [name for name, c in CASES.items() if name not in DIFFERENCES and "raised" in c])
def test_what_lightning_refuses_to_log_is_a_log_error(name: str) -> None:
    with pytest.raises(LogError, match=REFUSED[name]):
        run(CASES[name], Recorder())


@pytest.mark.parametrize("name", thinned(DIFFERENCES, *[*DIFFERENCES][::2]))
def test_rows_and_metrics_differ_from_lightning_only_as_said(name: str) -> None:
    case, recorder, difference = CASES[name], Recorder(), DIFFERENCES[name]
    if difference.error is not None:
        with pytest.raises(type(difference.error), match=str(difference.error)):
            run(case, recorder)
        return
    run(case, recorder)
    assert_recorded(recorder, difference.rows(case["rows"]), difference.seen(case["seen"]))


@pytest.mark.parametrize("hook", [name for name in CASES["log10_hooks"]["rows"][0][1] if name not in LOGGED])
def test_hooks_inside_the_compiled_step_are_refused_by_name(hook: str) -> None:
    with pytest.raises(ModuleError, match=hook):
        run(CASES["log11_where_setup"] | {"hook": hook}, Recorder())
