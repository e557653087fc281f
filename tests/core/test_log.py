"""`self.log` in steps and hooks: what may be logged and where, and what metrics add up to, against numpy."""

import csv
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import numbered, sized
from kit.inside import Metric
from kit.journal import Rows, hooks
from kit.modules import Mean, logging
from kit.refusals import fit_refuses, refuses
from kit.trainers import fit, make_trainer, thinned

from jaxlit.core.log import StepTable, Table
from jaxlit.errors import LogError


def test_what_a_metric_may_be() -> None:
    values = {"int": 3, "float": 0.5, "bool": True, "numpy": np.float64(2.5), "int32": jnp.int32(4), "nan": np.nan}
    rows = Rows()
    fit(logging(lambda m, batch, i: m.log_dict(values)), numbered(1), None, rows, log_every_n_steps=1)
    expected = {name: float(value) for name, value in values.items()}
    assert rows.rows == [(0, pytest.approx(expected | {"epoch": 0}, nan_ok=True))]
    assert {type(value) for name, value in rows.rows[0][1].items() if name != "epoch"} == {float}


# What cannot be logged: what a step calls, with the module, the batch's x, and the words of the message.
BOTH: Any = {"on_step": True, "on_epoch": True}
REFUSED: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "an array": (lambda m, x: m.log("a", x), (r"self\.log\('a'", r"float32\[8, 1\]", r"Log value\.mean\(\)")),
    "a matrix": (lambda m, x: m.log("a", jnp.eye(3)), (r"\[3, 3\]", "{'loss': loss,", "gets it as `outputs`")),
    **{
        f"a value {value!r}": (lambda m, x, v=value: m.log("a", v), (r"self\.log\('a', value\) in training_step", word))
        for value, word in (("high", "high"), (None, "None"), ([1.0], r"\[1\.0\]"), (1j, "1j"))
    },
    "a complex array": (lambda m, x: m.log("a", jnp.complex64(1)), ("complex64", r"abs\(value\)")),
    "a key": (lambda m, x: m.log("a", jax.random.key(0)), ("takes a real scalar number, got .*key",)),
    **{f"a name {n!r}": (lambda m, x, n=n: m.log(n, 1.0), ("takes a str as name",)) for n in (1, None, ("a",), "")},
    **{n: (lambda m, x, n=n: m.log(n, 1.0), (f"'{n}'", "adds")) for n in ("step", "epoch", "v/dataloader_idx_0")},
    "twice": (lambda m, x: [m.log("a", 1.0), m.log("a", 2.0)], ("'a'", "twice in training_step", "once")),
    "twice otherwise": (lambda m, x: [m.log("a", 1.0), m.log("a", 1.0, prog_bar=True)], ("twice in training_step",)),
    "a clash": (lambda m, x: [m.log("a", 1.0, **BOTH), m.log("a_epoch", 1.0)], ("both make 'a_epoch'", "Rename one")),
    **{
        f"size {size!r}": (lambda m, x, s=size: m.log("a", 1.0, batch_size=s), (r"self\.log\('a', batch_size", word))
        for size, word in ((0, "positive"), (np.int32(0), "positive"), ("8", "scalar"), (np.ones(2), "scalar"))
    },
    **{
        f"reduce_fx {fx!r:.10}": (lambda m, x, f=fx: m.log("a", 1.0, reduce_fx=f), ("reduce_fx", "'mean', 'sum', 'm"))
        for fx in ("median", jnp.mean, None)
    },
    "nowhere": (lambda m, x: m.log("a", 1.0, on_step=False), ("on_step=False, on_epoch=False", "logs nothing")),
    "no mapping": (lambda m, x: m.log_dict([1.0]), (r"log_dict\(dictionary\) takes names and values, got list",)),
    "another metric": (lambda m, x: m.log("a", nnx.metrics.Welford()), (r"Welford\(\)\)", "Average", "log_dict")),
    "a weighted metric": (lambda m, x: m.log("a", nnx.metrics.Average(), batch_size=3), ("own weights|of its own",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_logged_is_refused_by_its_name(case: str) -> None:
    log, words = REFUSED[case]
    fit_refuses(LogError, *words, model=logging(lambda m, batch, i: log(m, batch["x"])))


MISPLACED: dict[str, Callable[[Any, Any, Any], Any]] = {  # of the module, a function that logs, and an array
    "scan": lambda m, log, x: jax.lax.scan(lambda carry, v: (carry, log(v)), 0.0, x),
    "cond": lambda m, log, x: jax.lax.cond(x[0] > 0, log, lambda v: v, x[0]),
    "remat": lambda m, log, x: nnx.remat(lambda m, v: (m.log("x", v), v)[1])(m, x[0]),
    "vmap": lambda m, log, x: jax.vmap(log)(x),
    "grad": lambda m, log, x: jax.grad(log)(x[0]),
    "jit": lambda m, log, x: jax.jit(log)(x[0]),
}


@pytest.mark.parametrize("strategy", ["single", "shard_map", "pmap"])
@pytest.mark.parametrize("where", MISPLACED)
def test_log_inside_a_transformed_function_is_refused(where: str, strategy: str) -> None:
    run = lambda m, x: MISPLACED[where](m, lambda v: (m.log("x", v), v)[1], x)  # noqa: E731
    model = logging(lambda m, batch, i: run(m, batch["x"][:, 0]))
    fit_refuses(LogError, r"self\.log\('x', \.\.\.\)", "training_step itself", model=model, strategy=strategy)


def test_log_outside_of_a_step_and_in_predict_step_is_refused() -> None:
    words = r"self\.log\('x', \.\.\.\) is called outside of the steps and hooks"
    refuses(LogError, lambda: Mean().log("x", 1.0), words, "training_step")
    model = logging(validation=lambda m, batch, i: m.log("x", 1.0))
    refuses(LogError, lambda: make_trainer().predict(model, numbered(1)), "predict_step, where nothing can be logged")


@pytest.mark.parametrize(
    "hook", ["setup", "on_fit_start", "on_train_end", "on_validation_end", "on_fit_end", "on_sanity_check_start"]
)
def test_log_in_a_hook_with_nothing_to_log_to_is_refused(hook: str) -> None:
    logs = hooks(**{hook: lambda trainer, module, *_: module.log("x", 1.0)})
    with pytest.raises(LogError, match=f"{hook}, where nothing can be logged"):
        fit(Mean(), numbered(1), numbered(1), logs)


def calls(*names: str, **arguments: Any) -> Callable[..., None]:
    """Return a hook that logs these names."""
    return lambda t, module, *_: [module.log(name, 1.0, **arguments) for name in names] and None


ONCE, TWICE = (calls(*names, on_step=False, on_epoch=True) for names in ("x", "xx"))
OF_TWO = "'val' to two values, of two loaders or of a step and a hook"
# Hooks that log a name twice, or one of the step's, or to steps where there are none.
REFUSED_HOOKS: dict[str, tuple[dict[str, Any], str]] = {
    "in one hook": ({"on_train_batch_end": TWICE}, "'x'.*twice in one on_train_batch_end"),
    "in one of the epoch": ({"on_train_epoch_end": TWICE}, "'x'.*twice in one on_train_epoch_end"),
    "in two hooks": ({f"on_train_batch_{when}": ONCE for when in ("start", "end")}, "'x'.*or in on_train_batch_start"),
    "in two of validation": (
        {f"on_validation_{when}": ONCE for when in ("start", "epoch_end")},
        "'x'.*or in on_validation_start",
    ),
    "of the validation": ({"on_validation_epoch_end": calls("val")}, "gives 'val' to two values"),
    "of the validation step": ({"on_validation_batch_end": calls("val")}, OF_TWO),
    "of the training step": ({"on_train_batch_end": calls("loss")}, "'loss'.*training_step logs this name"),
    "no step": ({"on_train_epoch_end": calls("x", on_step=True)}, "on_step=True.*_epoch_end: there is no step there"),
}


@pytest.mark.parametrize("case", REFUSED_HOOKS)
def test_what_a_hook_may_not_log_is_refused(case: str) -> None:
    logs, words = REFUSED_HOOKS[case]
    with pytest.raises(LogError, match=words):
        fit(Mean(), numbered(2), numbered(2), hooks(**logs))


def test_a_name_is_logged_in_one_way_by_a_hook() -> None:
    ways = iter((False, True))
    logs = hooks(on_train_batch_end=lambda t, module, *_: module.log("x", 1.0, prog_bar=next(ways), on_epoch=True))
    with pytest.raises(LogError, match="'x'.*other arguments, or in"):
        fit(Mean(), numbered(2), None, logs)


BATCHES = sized(16, 8, 3)
FOLDED = {"mean": np.mean, "sum": np.sum, "min": np.min, "max": np.max}


def log_all(module: Any, batch: Any, i: Any) -> None:
    x = batch["x"]
    for name, value in {"mean": x.mean(), "sum": x.sum(), "min": x.min(), "max": x.max()}.items():
        module.log(name, value, **BOTH, reduce_fx=name)
    masked = batch["y"][:, 0] > 0
    module.log("masked", (x[:, 0] * masked).sum() / masked.sum(), on_epoch=True, batch_size=masked.sum())


def masked_mean(batches: Any) -> float:
    x, y = (np.concatenate([batch[key] for batch in batches]) for key in ("x", "y"))
    return float(x[y[:, 0] > 0, 0].mean())


REDUCED = [("single", 1), ("fsdp", 2), ("shard_map", 2), ("single", 2), ("pmap", 1)]
REDUCED += [("ddp", 1), ("zero1", 2), ("replicas:8", 1)]


@pytest.mark.parametrize(("strategy", "accumulate"), thinned(REDUCED, REDUCED[0], full=REDUCED[1:4]))
def test_each_reduction_is_that_of_all_rows(strategy: str, accumulate: int) -> None:
    rows, batches = Rows(), [dict(batch) for batch in BATCHES]
    batches[0]["x"] = 3 * batches[0]["x"]  # the extremes of its window are not those of the last batch
    # Replicas without any weight, and a batch.
    batches[0]["y"] = np.where(np.arange(16)[:, None] < 8, -1.0, 1.0).astype(np.float32)
    batches.append(batches[1] | {"y": np.full((8, 1), -1, np.float32)})
    model = logging(log_all, log_all)
    arguments = {"accumulate_grad_batches": accumulate, "log_every_n_steps": 1, "max_epochs": 2}
    trainer = fit(model, batches, batches, rows, strategy=strategy, **arguments)
    windows = [batches[i : i + accumulate] for i in range(0, 4, accumulate)] * 2
    for name in ("mean", "sum", "min", "max"):
        steps = [FOLDED[name](np.concatenate([batch["x"] for batch in window])) for window in windows]
        np.testing.assert_allclose(rows.of(f"{name}_step"), steps, rtol=1e-5, atol=1e-6, err_msg=name)
        total = float(FOLDED[name](np.concatenate([batch["x"] for batch in batches])))
        # Validation's comes last under the bare name.
        assert rows.of(f"{name}_epoch") == pytest.approx([total] * 4, rel=1e-5), name
    assert trainer.callback_metrics["masked_epoch"] == pytest.approx(masked_mean(batches), rel=1e-5)
    expected = [masked_mean(window) if window[0] is not batches[3] else np.nan for window in windows]
    # A row of nothing has no mean, and the epoch's is not lost with it.
    np.testing.assert_allclose(rows.of("masked_step"), expected, rtol=1e-5)


@pytest.mark.parametrize("value", [0.1, 1e-3, 3.0])
def test_the_mean_of_a_million_batches_is_exact(value: float) -> None:
    table = Table([Metric("x"), Metric("total", reduce_fx="sum"), Metric("most", reduce_fx="max")])
    entry = table.entry([jnp.float32(value)] * 3, [jnp.float32(7)] * 3)
    sums = jax.jit(lambda s: jax.lax.fori_loop(0, 10**6, lambda _, s: table.add(s, entry), s))(table.empty_sums())
    x = float(np.float32(value))
    # A batch's own entry is rounded to float32; what a million of them add up to is not rounded any further.
    assert table.read(np.asarray(sums)) == pytest.approx([x, x * 10**6, x], rel=1e-7)


INTEGERS = [("single", 1), ("fsdp", 1), ("shard_map", 2), ("single", 2), ("pmap", 1), ("replicas:8", 2), ("ddp", 2)]


@pytest.mark.parametrize(("strategy", "accumulate"), thinned(INTEGERS, ("single", 2), full=INTEGERS[1:3]))
def test_integers_above_2_to_the_24_keep_all_digits(strategy: str, accumulate: int) -> None:
    numbers = [16_777_217, 2**31 - 1, -(2**30) - 1, 1]
    batches = [{"x": np.zeros((8, 1), np.float32), "n": np.full(8, n, np.int32)} for n in numbers]

    def log(self: Any, batch: Any, batch_idx: Any) -> None:
        self.log("same", jnp.int32(2**24 + 1), on_step=True, on_epoch=True)
        self.log("total", jnp.uint32(2**32 - 1), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("n", batch["n"].max(), on_step=True, on_epoch=True)

    rows = Rows()
    arguments: dict[str, Any] = {"strategy": strategy, "accumulate_grad_batches": accumulate, "log_every_n_steps": 1}
    trainer = fit(logging(log, log), batches, batches, rows, **arguments)
    windows = [numbers[i : i + accumulate] for i in range(0, 4, accumulate)]
    assert rows.of("same_step") == [2**24 + 1] * len(windows)
    assert rows.of("total_step") == [(2**32 - 1) * accumulate] * len(windows)
    assert rows.of("n_step") == [sum(window) / len(window) for window in windows]
    # Validation's comes last.
    assert rows.of("same_epoch") == [2**24 + 1] * 2
    assert rows.of("total_epoch") == [4 * (2**32 - 1)] * 2
    assert rows.of("n_epoch") == [sum(numbers) / 4] * 2
    with (trainer.run_dir / "metrics.csv").open() as file:
        read = list(csv.DictReader(file))
    assert {row["same_step"] for row in read} == {"16777217", ""}  # the row of the validation has none
    assert {row["total_epoch"] for row in read} == {str(4 * (2**32 - 1)), ""}


def test_the_rows_of_a_batch_take_no_digit_of_an_integer() -> None:
    table = Table([Metric("loss"), Metric("n", is_integer=True), Metric("total", reduce_fx="sum", is_integer=True)])
    for n, rows in itertools.product(
        (16_777_217, -16_777_219, 2**31 - 1, -(2**31), 0), (1, 7, 8191, 10_007, 57_599, 65_536)
    ):
        entry = table.entry([jnp.float32(0.5), jnp.int32(n), jnp.int32(n)], [jnp.float32(rows)] * 3)
        assert table.read(np.asarray(entry)) == [0.5, n, n]
        sums = jnp.asarray(table.empty_sums())
        for _ in range(3):
            sums = table.add(sums, entry)
        assert table.read(np.asarray(sums)) == [0.5, n, 3 * n]
        assert float(table.value(entry, 2)) == np.float32(n)


def test_an_infinity_among_the_values_spoils_no_other_metric() -> None:
    table = Table([Metric("x"), Metric("most", reduce_fx="max"), Metric("y")])
    sums = jnp.asarray(table.empty_sums())
    for x in (1.0, np.inf, 2.0):
        sums = table.add(sums, table.entry([jnp.float32(x), jnp.float32(x), jnp.float32(3)], [jnp.float32(2)] * 3))
    assert table.read(np.asarray(sums)) == [np.inf, np.inf, 3.0]


@pytest.mark.parametrize("replicas", [None, 1, 4])
def test_tables_are_refit_for_another_number_of_replicas(replicas: int | None) -> None:
    table = Table([Metric("x"), Metric("least", reduce_fx="min"), Metric("total", reduce_fx="sum")])
    parts = [np.asarray(table.entry([jnp.float32(v)] * 3, [jnp.float32(w)] * 3)) for v, w in ((1, 1), (4, 3))]
    result = table.refit(np.stack(parts), replicas)
    assert result.shape == (*([] if replicas is None else [replicas]), 2, 3)
    assert table.read(result) == [13 / 4, 1.0, 5.0]


def test_steps_that_log_nothing_have_no_metrics() -> None:
    trainer = fit(logging(), BATCHES, BATCHES, strategy="shard_map", log_every_n_steps=1)
    assert trainer.validate(logging(), BATCHES) == [{}]
    assert Table([]).read(np.zeros((4, 0))) == []


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("rates", [[], [0.25, 0.5]])
def test_a_step_is_read_as_it_was_encoded(rates: list[float], guarded: bool):
    metrics = [Metric("loss", on_step=True, logger=False), Metric("n", on_step=True, reduce_fx="sum")]
    layout = StepTable(Table(metrics), ("lr", None), guarded)
    table = layout.metrics.entry([jnp.float32(3), jnp.float32(5)], [jnp.float32(4), jnp.float32(1)])
    arrays = [layout.encode(table * k, jnp.array(rates), jnp.int32(7)) for k in (1, 2)]
    one, two = [layout.decode(np.asarray(array)) for array in arrays]
    assert layout.decode(np.asarray(arrays[0])) == one
    assert one.values == [3.0, 5.0]
    assert two.values == [3.0, 10.0]
    assert one.row == {"n": 5.0}
    assert one.rates == ({"lr": 0.25} if rates else {})
    assert one.bad_step == (7 if guarded else -1)
    # A checkpoint's array is read by a training that has a guard, or none.
    assert StepTable(layout.metrics, layout.rates, not guarded).decode(np.asarray(arrays[0])) == one
