"""Several steps in one dispatch: the numbers, rows, hooks and checkpoints of single steps, in fewer dispatches."""

import itertools
import signal
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit import by_hand
from kit.batches import number_of, numbered, random
from kit.checkpoints import names
from kit.compiles import compiles
from kit.costs import calls_per_step
from kit.inside import engine_of, leaves_of
from kit.journal import Rows, at_batch, hooks
from kit.modules import Linear, Mean, Net, Wide, logging, module
from kit.refusals import fit_refuses
from kit.stages import Layered
from kit.trainers import BARE, FOUR, STRATEGIES, THREE, fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint, ThroughputMonitor, Timer, WeightAveraging
from jaxlit.errors import ArgumentError, CheckpointError, NonFiniteError


def array_loader(batches: list[Any], **arguments: Any) -> jl.ArrayLoader:
    rows = len(jax.tree.leaves(batches[0])[0])
    return jl.ArrayLoader(jax.tree.map(lambda *x: np.concatenate(x), *batches), rows, **arguments)


class Sizes(jl.Callback):
    """Keeps how many batches each dispatch had, by what the program was given."""

    def __init__(self) -> None:
        self.sizes = list[int]()

    def note(self, batches: Any) -> None:
        self.sizes.append((batches if hasattr(batches, "count") else batches.batch).count)

    def on_train_start(self, trainer: jl.Trainer, module: Any) -> None:
        engine = engine_of(trainer)
        fused = engine.fused_steps
        engine.fused_steps = lambda window, x: (self.note(x), fused(window, x))[1]  # type: ignore[method-assign]


def both(make: Any, data: Any, *callbacks: Any, k: int = 4, **arguments: Any) -> tuple[list[Any], list[int]]:
    """Train step by step, and with dispatches of `k` batches; returns (trainer, rows) of each, and the dispatches."""
    runs, sizes = [], Sizes()
    for size in (1, k):
        rows, made = Rows(rates=True), [make() for make in callbacks]
        given = BARE | {"max_epochs": 2, "log_every_n_steps": 1, "steps_per_execution": size} | arguments
        runs.append((fit(make(), data(), random(2), rows, sizes, *made, **given), rows.rows, made))
    return runs, sizes.sizes


def assert_same(runs: list[Any], rtol: float = 0.0) -> None:
    (one, rows, _), (many, others, _) = runs
    assert [(step, [*row]) for step, row in others] == [(step, [*row]) for step, row in rows]
    values = [np.concatenate([[], *([*row.values()] for _, row in x)]) for x in (rows, others)]
    np.testing.assert_allclose(values[1], values[0], rtol=rtol)
    for a, b in zip(leaves_of(one), leaves_of(many), strict=True):
        np.testing.assert_allclose(b, a, rtol=rtol, atol=10 * rtol)


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "single"))
def test_dispatches_train_as_single_steps_do(strategy: str) -> None:
    make = lambda: Wide(rngs=nnx.Rngs(0))  # noqa: E731
    runs, sizes = both(make, lambda: array_loader(random(11), shuffle=True), strategy=strategy)
    assert sizes == [4, 4] * 2
    assert_same(runs, 1e-5 if strategy == "zero1" else 0.0)  # whose programs add up in another order


def test_what_makes_a_batch_is_not_fused_into_its_step() -> None:
    # Fused with the indexing of the stacked batches, 13 of the state's arrays are rounded otherwise under jax 0.12.
    runs, _ = both(lambda: Net(8, rngs=nnx.Rngs(0)), lambda: random(8, rows=16), max_epochs=1)
    assert_same(runs)


def test_accumulation_takes_entire_windows() -> None:
    runs, sizes = both(Linear, lambda: random(11), accumulate_grad_batches=2)
    assert sizes == [4, 4] * 2
    # XLA of jax 0.12 compiles the sums of a window in a loop to other kernels, whose last bit differs.
    assert_same(runs, 0.0 if jax.__version_info__ < (0, 11) else 1e-6)
    fit_refuses(ArgumentError, "multiple of 3", steps_per_execution=4, accumulate_grad_batches=3)


# What comes between steps, and the dispatches of four that are left of twelve batches.
BETWEEN: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [4, 4, 4]),
    ({"val_check_interval": 6}, [4, 4]),
    ({"val_check_interval": 4}, [4, 4, 4]),
    ({"max_steps": 10}, [4, 4]),
    ({"limit_train_batches": 7}, [4]),
    ({"log_every_n_steps": 3}, [4, 4, 4]),
    ({"debug": True}, []),
]


@pytest.mark.parametrize(("arguments", "expected"), thinned(BETWEEN, *BETWEEN[::2]))
def test_a_dispatch_ends_where_something_is_due(arguments: Any, expected: list[int]) -> None:
    runs, sizes = both(Linear, lambda: random(12), max_epochs=1, **arguments)
    assert sizes == expected
    assert_same(runs)


class Norms(jl.Callback):
    trace_every_n_steps = 5

    def __init__(self) -> None:
        self.norms = list[Any]()

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        return {"norm": optax.tree.norm(grads)}

    def on_trace(self, trainer: Any, values: dict[str, np.ndarray], step: int) -> None:
        self.norms.append((step, float(values["norm"])))


def test_traced_steps_are_single_and_averages_exact() -> None:
    runs, sizes = both(Linear, lambda: random(12), Norms, WeightAveraging)
    assert sizes == [4] * 4  # between the steps 5, 10, 15 and 20, which are traced
    assert_same(runs)
    assert runs[0][2][0].norms == runs[1][2][0].norms
    assert len(runs[0][2][0].norms) == 4


def test_checkpoints_by_steps_are_where_single_steps_have_them() -> None:
    def train(size: int) -> list[str]:
        saver = ModelCheckpoint(f"every{size}", every_n_train_steps=6, save_top_k=-1)
        fit(Linear(), random(12), None, saver, default_root_dir=f"run{size}", steps_per_execution=size)
        return sorted(path.name for path in Path(f"every{size}").iterdir() if path.is_dir())

    assert train(4) == train(1) == ["step_00000006", "step_00000012"]


@pytest.mark.parametrize(
    ("strategy", "policy"),
    thinned(itertools.product(THREE, ("raise", "skip")), ("single", "raise"), ("shard_map", "skip"), full=()),
)
def test_a_bad_step_in_the_middle_is_as_with_single_steps(strategy: str, policy: str) -> None:
    batches = random(12)
    batches[6]["x"][1] = np.nan

    def train(size: int) -> tuple[str, jl.Trainer, Any]:
        rows, message = Rows(), ""
        trainer = make_trainer(rows, strategy=strategy, nan_policy=policy, steps_per_execution=size, **BARE)
        try:
            trainer.fit(Linear(), array_loader(batches))
        except NonFiniteError as error:
            message = str(error)
        return message, trainer, [(step, sorted(values)) for step, values in rows.rows]

    (message, one, rows), (other, many, others) = train(1), train(4)
    assert (other, others) == (message, rows)
    assert ("at optimizer step 6 " in message and "Batch 6, run again" in message) is (policy == "raise")
    assert many.global_step == one.global_step == (6 if policy == "raise" else 12)
    assert vars(many._session.position) == vars(one._session.position)
    jax.tree.map(np.testing.assert_array_equal, leaves_of(many), leaves_of(one))


@pytest.mark.full
def test_a_bad_window_restores_its_statistics() -> None:
    batches = random(12)
    batches[7]["x"][1] = np.nan

    def train(size: int) -> Net:
        net = Net(rngs=nnx.Rngs(0))
        with pytest.raises(NonFiniteError, match="optimizer step 3 "):
            fit(net, batches, None, accumulate_grad_batches=2, steps_per_execution=size, **BARE)
        return net

    one, many = train(1), train(4)
    assert int(many.count[...]) == int(one.count[...]) == 6
    np.testing.assert_allclose(many.norm.var[...], one.norm.var[...], rtol=1e-6)
    np.testing.assert_array_equal(many.inner.kernel[...], one.inner.kernel[...])


class Ends(jl.Callback):
    """Writes down the calls of the hook that ends batches, with what `trainer`, `outputs` and the batch say."""

    def __init__(self) -> None:
        self.starts, self.ends, self.order = list[Any](), list[Any](), list[str]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append((batch_idx, trainer.global_step, trainer.batches_done, number_of(batch)))
        self.ends.append((float(outputs["loss"]), np.asarray(outputs["x"]).tolist(), float(outputs["sum"])))
        self.order.append(f"end {batch_idx}")


class Journal(Ends):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.starts.append((batch_idx, trainer.global_step, trainer.batches_done, number_of(batch)))
        self.order.append(f"start {batch_idx}")


def with_outputs(self: Any, batch: Any) -> dict[str, Any]:
    loss = jnp.mean(self.error(batch) ** 2)
    return {"loss": loss, "x": batch["x"][:, 0], "sum": jnp.sum(self.w[...])}


@pytest.mark.parametrize(
    ("accumulate", "strategy"), thinned(itertools.product((1, 2), FOUR), (1, "single"), (2, "shard_map"), full=())
)
def test_hooks_see_their_own_batch_and_step(accumulate: int, strategy: str) -> None:
    given = {"strategy": strategy, "accumulate_grad_batches": accumulate}
    runs, sizes = both(lambda: module(with_outputs), lambda: numbered(9), Ends, **given)
    one, many = (made[0] for *_, made in runs)
    assert sizes == [4, 4] * 2
    assert many.ends == one.ends and many.order == one.order


def test_a_hook_before_each_step_has_each_step_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "jaxlit"):
        runs, sizes = both(lambda: module(with_outputs), lambda: numbered(9), Journal)
    one, many = (made[0] for *_, made in runs)
    assert sizes == [] and many.starts == one.starts and many.order == one.order and many.ends == one.ends
    assert caplog.text.count("Journal.on_train_batch_start runs before each step, so each is a dispatch") == 1


def test_what_hooks_log_is_in_the_row_of_its_step() -> None:
    def log(name: str) -> Any:
        return lambda self, trainer, module, *args: self.log(name, float(args[-1]), on_epoch=True)

    for places, expected in ((("end",), [4, 4] * 2), (("start", "end"), [])):
        made = type("Logs", (jl.Callback,), {f"on_train_batch_{x}": log(x) for x in places})
        runs, sizes = both(Mean, lambda: numbered(9), made, log_every_n_steps=2)
        assert sizes == expected
        assert_same(runs)


@pytest.mark.parametrize("size", thinned([1, 3, 4], 3))
@pytest.mark.parametrize("at", [1, 5])
def test_a_checkpoint_of_a_hook_is_of_the_end_of_its_dispatch(at: int, size: int) -> None:
    whole, rest = Rows(), Rows()
    saves = at_batch(at, lambda trainer, module: trainer.save_checkpoint("saved"))
    given = BARE | {"max_epochs": 2, "log_every_n_steps": 1}
    one = fit(Linear(), random(11), None, whole, **given)
    fit(Linear(), random(11), None, saves, steps_per_execution=4, **given | {"max_epochs": 1})
    many = fit(Linear(), random(11), None, rest, ckpt_path="saved", steps_per_execution=size, **given)
    end = 4 if at == 1 else 8
    assert rest.rows[0][0] == end  # a checkpoint logs the rows of its dispatch first
    assert rest.rows == whole.rows[-len(rest.rows) :]
    jax.tree.map(np.testing.assert_array_equal, leaves_of(many), leaves_of(one))


def test_begin_is_refused_between_the_steps_of_a_dispatch() -> None:
    saves = at_batch(1, lambda trainer, module: trainer.saver.begin("saved"))
    with pytest.raises(CheckpointError, match="on_safe_point"):
        fit(Mean(), numbered(8), None, saves, steps_per_execution=4, **BARE)


def kinds() -> dict[str, Any]:
    records = [{"x": np.full(1, 1 + i // 8, np.float32)} for i in range(72)]
    return {
        "list": numbered(9),
        "arrays": array_loader(numbered(9)),
        "generator": (batch for batch in numbered(9)),
        "grain": grain.MapDataset.source(records).batch(8),  # type: ignore[arg-type]
        "int64": [{"x": batch["x"].astype(np.int64)} for batch in numbered(9)],
        "tuple": [(batch["x"],) for batch in numbered(9)],
        "number": [{**batch, "scale": np.float32(1)} for batch in numbered(9)],
    }


@pytest.mark.parametrize("prefetch", thinned([0, 2], 2, full=()))
@pytest.mark.parametrize("kind", kinds())
def test_every_loader_can_be_stacked(kind: str, prefetch: int) -> None:
    def error(self: Any, batch: Any) -> jax.Array:
        x = batch[0] if kind == "tuple" else batch["x"] * (batch["scale"] if kind == "number" else 1)
        return x - self.w[...]

    sizes, seen = Sizes(), list[Any]()
    given = {"steps_per_execution": 4, "prefetch": prefetch, "strategy": "ddp", **BARE}
    keep = hooks(on_train_batch_end=lambda t, m, outputs, batch, i: seen.append(jax.tree.leaves(batch)[-1].ravel()[0]))
    model = module(error=error)
    fit(model, kinds()[kind], None, sizes, keep, **given)
    assert sizes.sizes == [4, 4]
    assert seen == [*range(1, 10)]
    assert float(model.w[0]) == pytest.approx(by_hand.mean([[k] for k in range(1, 10)]))


def test_batches_of_two_shapes_are_not_stacked() -> None:
    batches, sizes = [*numbered(4), *numbered(4, rows=16), *numbered(2), *numbered(2, rows=16)], Sizes()
    fit(Mean(), batches, None, sizes, steps_per_execution=4, **BARE)
    assert sizes.sizes == [4, 4]
    sizes.sizes.clear()  # a dispatch begins with the first batch of another shape
    fit(Mean(), [*numbered(2), *numbered(4, rows=16)], None, sizes, steps_per_execution=4, **BARE)
    assert sizes.sizes == [4]


def test_host_keys_and_transfer_hooks_hold() -> None:
    batches = [{**batch, "name": str(k)} for k, batch in enumerate(numbered(8))]
    seen, sizes = list[str](), Sizes()
    keep = hooks(on_train_batch_end=lambda trainer, module, outputs, batch, i: seen.append(batch["name"]))
    model = module(on_before_batch_transfer=lambda self, batch, idx: batch | {"x": batch["x"] * 2})
    fit(model, batches, None, keep, sizes, host_keys=("name",), steps_per_execution=4, **BARE)
    assert seen == [str(k) for k in range(8)]
    assert sizes.sizes == [4, 4]
    assert float(model.w[0]) == by_hand.mean([[2 * k] for k in range(1, 9)])


def test_signals_and_times_are_seen_between_dispatches() -> None:
    sends = at_batch(1, lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit):
        fit(Mean(), numbered(12), None, sends, steps_per_execution=4, default_root_dir="run")
    assert names() == ["step_00000004"]
    stops = at_batch(5, lambda trainer, module: trainer.stop("enough"))
    assert fit(Mean(), numbered(12), None, stops, steps_per_execution=4, **BARE).global_step == 8
    endless = itertools.cycle(numbered(2))
    given = BARE | {"max_epochs": None}
    assert fit(Mean(), endless, None, Timer({"seconds": 1}), steps_per_execution=4, **given).global_step % 4 == 0


def test_a_stop_that_has_to_wait_cuts_no_dispatch() -> None:
    sizes, stops = Sizes(), at_batch(1, lambda trainer, module: trainer.stop("enough"))
    arguments = BARE | {"max_epochs": 5, "min_steps": 10, "steps_per_execution": 4}
    trainer = fit(Mean(), numbered(4), None, stops, sizes, **arguments)
    assert trainer.global_step == 10
    assert sizes.sizes == [4, 4]


def test_a_written_checkpoint_cuts_no_dispatch() -> None:
    saver, sizes = ModelCheckpoint(every_n_train_steps=8), Sizes()
    waits = hooks(on_train_batch_end=lambda *_: saver._saving is None or saver._saving.join())
    fit(Mean(), numbered(20), None, sizes, waits, saver, steps_per_execution=4, default_root_dir="run")
    assert sizes.sizes == [4] * 5


def test_a_resume_dispatches_as_the_uninterrupted_run() -> None:
    sizes, arguments = Sizes(), {"steps_per_execution": 4, "max_epochs": 1, "enable_progress_bar": True}
    fit(Mean(), numbered(20), None, **arguments, max_steps=8, default_root_dir="run")
    fit(Mean(), numbered(20), None, sizes, **arguments, ckpt_path="last", default_root_dir="run")
    assert sizes.sizes == [4] * 3


def test_a_resume_takes_the_size_that_auto_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxlit.loop.dispatch._LONGEST_S", 1e9)
    sizes, arguments = Sizes(), {"steps_per_execution": "auto", "default_root_dir": "run"}
    fit(Mean(), numbered(40), None, **arguments, max_epochs=1)
    fit(Mean(), numbered(40), None, sizes, **arguments, max_epochs=2, ckpt_path="last")
    assert sizes.sizes == [32]


def test_auto_decides_once_and_trains_alike() -> None:
    sizes, one, many = Sizes(), Rows(), Rows()
    fit(Linear(), random(64), None, one, log_every_n_steps=1, **BARE)
    fit(Linear(), random(64), None, many, sizes, log_every_n_steps=1, steps_per_execution="auto", **BARE)
    assert many.rows == one.rows
    assert len(set(sizes.sizes)) <= 1 and max(sizes.sizes, default=1) <= 32


def test_a_pipeline_refuses_several_steps_a_dispatch() -> None:
    strategy = jl.strategies.Pipeline(layers="layers")
    with pytest.raises(ArgumentError, match=r"steps_per_execution=4.*Pipeline"):
        fit(Layered(8, rngs=nnx.Rngs(0)), random(8), None, strategy=strategy, steps_per_execution=4, **BARE)


def test_two_programs_are_compiled_whatever_the_cuts() -> None:
    with compiles() as counts:
        given = {"steps_per_execution": 4, "val_check_interval": 5, "max_epochs": 2, **BARE}
        fit(Linear(), random(11), random(1), **given)
    assert sorted(name for name in counts if "train_step" in name) == ["jit(train_step)", "jit(train_steps)"]


def test_a_dispatch_reduces_as_often_as_its_steps() -> None:
    trainer = fit(Linear(), random(9), None, strategy="ddp", steps_per_execution=4, **BARE)
    costs = {program.name: program.cost.collectives for program in engine_of(trainer).programs}
    (one, many) = (sum(x.calls for x in costs[name] or ()) for name in ("train_step", "train_steps"))
    assert many == 4 * one > 0


def test_a_batch_of_a_dispatch_costs_few_calls() -> None:
    # Of a loader whose batches come one by one; from arrays it is a third of that.
    assert calls_per_step(make_trainer(steps_per_execution=10, log_every_n_steps=0, **BARE), Mean()) <= 15


def test_throughput_counts_the_steps_of_a_dispatch() -> None:
    rows, monitor = Rows(), ThroughputMonitor(available_flops=1e12)
    trainer = fit(Linear(), random(16), None, rows, monitor, steps_per_execution=4, log_every_n_steps=4, **BARE)
    assert rows.of("train/samples") == [32, 64, 96, 128]
    assert len(rows.of("train/flops_per_sec")) >= 2
    assert trainer.step_flops["train_step"].count == 2 * 2 * 8 * 3  # forward, and for the gradient of the kernel


def test_nested_logs_of_the_module_are_equal() -> None:
    def log(self: Any, batch: Any, batch_idx: Any) -> None:
        self.log("sum", jnp.sum(batch["x"]), reduce_fx="sum", on_epoch=True)
        self.log("most", jnp.max(batch["x"]), reduce_fx="max", on_epoch=True, on_step=False)

    runs, _ = both(lambda: logging(log), lambda: numbered(9))
    assert_same(runs)


@pytest.mark.parametrize("k", [1, 5, 10, 32])
def test_a_safe_point_comes_after_the_dispatch_that_ends_there(k: int) -> None:
    steps = list[int]()
    callback = hooks(on_safe_point=lambda trainer, *_: steps.append(trainer.global_step))
    callback.due_in = lambda step: 20 - step % 20
    fit(Mean(), array_loader(numbered(50)), None, callback, steps_per_execution=k, **BARE)
    assert steps == [20, 40, 50]
