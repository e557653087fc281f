"""Training in a pipeline: its numbers are those of microbatches one by one on a single device."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding
from kit.batches import sized
from kit.inside import pipelined
from kit.journal import Losses, Rows, hooks
from kit.stages import WIDTH, Language, Layered, by_microbatches, numbers, sentences
from kit.trainers import BARE, fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.pipeline import simulate
from jaxlit.strategies import Pipeline

SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zbv")
BATCHES = sized(8, 8, 8, 6)  # the last one in parts of two sizes


class Told(Layered):
    """Returns a mean over rows beside the loss."""

    def training_step(self, batch: Any) -> Any:
        return {"loss": super().training_step(batch), "mean": batch["x"].mean()}


def layered(**arguments: Any) -> Layered:
    return Layered(**arguments, rngs=nnx.Rngs(0))


def assert_close(mine: Any, theirs: Any) -> None:
    for path, x in numbers(theirs).items():
        np.testing.assert_allclose(numbers(mine)[path], x, rtol=0, atol=1e-5, err_msg=path)


MESHES = ((4, 4), (4, 8), (2, 8))  # stages and devices
EVERY = [(schedule, *mesh, remat) for mesh in MESHES for schedule in SCHEDULES for remat in (False, True)]


def layers_of(schedule: str, stages: int) -> int:
    """Return how many layers are cut: two schedules make two stages for each rank."""
    return 2 * stages if schedule in ("interleaved_1f1b", "zbv") else 4


@pytest.mark.parametrize(
    ("schedule", "stages", "devices", "remat"),
    thinned(
        EVERY,
        full=[("1f1b", 4, 4, False), ("zbv", 2, 8, False), ("interleaved_1f1b", 2, 8, True), ("zb_h1", 4, 4, True)],
    ),
)
def test_training_is_that_of_microbatches_on_one_device(schedule: str, stages: int, devices: int, remat: bool) -> None:
    expected, module = (layered(layers=layers_of(schedule, stages)) for _ in range(2))
    losses = by_microbatches(expected, BATCHES, 4)
    strategy = Pipeline(stages, schedule, 4, layers="layers", remat=remat)
    module.__class__ = Told
    rows, means = Rows(), []
    told = hooks(on_train_batch_end=lambda t, m, outputs, b, i: means.append(float(outputs["mean"])))
    fit(module, BATCHES, None, rows, told, strategy=strategy, devices=devices, log_every_n_steps=1)
    assert_close(module, expected)
    np.testing.assert_allclose(rows.of("loss"), losses, atol=1e-5)
    np.testing.assert_allclose(means, [batch["x"].mean() for batch in BATCHES], atol=1e-6)


@pytest.mark.parametrize(("schedule", "stages", "devices", "remat"), thinned(EVERY, full=[("1f1b", 4, 4, False)]))
def test_a_language_model_that_is_hard_to_cut(schedule: str, stages: int, devices: int, remat: bool) -> None:
    batches, blocks = sentences(8, 2), layers_of(schedule, stages)
    rate = 0.1 if blocks == 4 else 0.003  # rounding grows with each step, and with the gradients of eight blocks faster
    expected, module = (Language(blocks, rate, rngs=nnx.Rngs(0)) for _ in range(2))
    by_microbatches(expected, batches, 4)
    trainer = fit(module, batches, strategy=Pipeline(stages, schedule, 4, remat=remat), devices=devices)
    for path, x in numbers(expected).items():  # the sum of entropies is above 100
        np.testing.assert_allclose(numbers(module)[path], x, rtol=1e-5, atol=1e-5, err_msg=path)
    drawn = [path for path in numbers(module) if "rngs" in path or "count" in path]
    assert drawn and all((numbers(module)[path] == numbers(expected)[path]).all() for path in drawn)
    # No device holds more than its rank's, with the moments of none.
    held = [x for x in jax.tree.leaves(trainer.state.params) if x.size > 1]
    places = {frozenset(x.sharding.device_set) for x in held}
    assert len(places) == stages and {len(place) for place in places} == {devices // stages}


@pytest.mark.full
def test_a_window_of_microbatches_is_one_step() -> None:
    """Its tail too: the last window has two batches, and the second of them too few rows for as many microbatches."""
    batches = sized(8, 8, 8, 8, 3)
    expected, module = layered(), layered()
    windows = [jax.tree.map(lambda *x: np.concatenate(x), *batches[i : i + 3]) for i in (0, 3)]
    losses = by_microbatches(expected, windows, [[2] * 12, [2] * 4 + [1] * 3])
    strategy = Pipeline(4, "1f1b", 4, layers="layers")
    rows, seen = Rows(), Losses()
    fit(module, batches, None, rows, seen, strategy=strategy, devices=4, accumulate_grad_batches=3, log_every_n_steps=1)
    assert_close(module, expected)
    np.testing.assert_allclose(rows.of("loss"), losses, atol=1e-5)
    # The loss of a batch is its own.
    means = [np.mean(seen.losses[:3]), np.average(seen.losses[3:], weights=[8, 3])]
    np.testing.assert_allclose(means, losses, atol=1e-5)
    assert len({*seen.losses}) == 5


@pytest.mark.parametrize("schedule", thinned(SCHEDULES, "1f1b", full=["zbv"]))
def test_what_is_held_is_what_the_simulator_says(schedule: str) -> None:
    strategy = Pipeline(4, schedule, 8, layers="layers")
    trainer, layers = make_trainer(strategy=strategy, devices=4, **BARE), layers_of(schedule, 4)
    peaks, transfers = pipelined(trainer, layered(layers=layers), sized(8), shape=(1, WIDTH))
    assert peaks == list(simulate(strategy.schedule, 8).peak_live)
    if schedule == "1f1b":
        assert peaks == [4, 3, 2, 1]
    # Each activation once forward and each gradient once back, but for two stages of one rank in the middle of a V.
    assert transfers == 2 * (layers - 1 - (schedule == "zbv")) * 8


ARGUMENTS: dict[str, dict[str, Any]] = {
    "clip": {"gradient_clip_val": 0.1},
    "accumulate": {"accumulate_grad_batches": 3},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "skip": {"nan_policy": "skip"},
    "ignore": {"nan_policy": "ignore"},
    "rollback": {"nan_policy": "rollback"},
    "16-mixed": {"precision": "16-mixed"},
}


@pytest.mark.parametrize("name", thinned(ARGUMENTS, full=["clip", "16-mixed"]))
def test_the_trainers_arguments_do_what_they_do_under_fsdp(name: str) -> None:
    """Whole batches, so that dropout draws alike. What `fsdp` does is compared with loops by hand elsewhere."""
    batches = sized(*[8] * 20)
    if name in ("skip", "ignore", "rollback"):
        batches[7]["x"][3] = np.nan
    result = {}
    for strategy, devices in (("fsdp", 4), (Pipeline(4, microbatches=1, layers="layers"), 4)):
        module, rows, norm = layered(), Rows(), jl.callbacks.GradientNorm()
        saves = jl.callbacks.ModelCheckpoint(every_n_train_steps=5)
        arguments = {"strategy": strategy, "devices": devices, "log_every_n_steps": 1} | ARGUMENTS[name]
        trainer = fit(module, batches, batches[:2], rows, norm, saves, **arguments)
        predicted = trainer.predict(module, batches[:2])
        result[strategy] = module, rows.rows, [*predicted, trainer.apply(lambda module, x: module(x), batches[0]["x"])]
    (theirs, expected, outputs), (mine, rows, made) = result.values()
    # Of 16 bits, of which bfloat16 has 8 for the digits of what is predicted, only the parameters are held in 32.
    tolerance, made, outputs = (2e-2, [], []) if name in ("bf16-mixed", "16-mixed") else (1e-5, made, outputs)
    for one, other in zip([*numbers(mine).values(), *made], [*numbers(theirs).values(), *outputs], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)
    assert len(rows) == len(expected) and any("grad_norm" in values for _, values in rows)
    for (_, values), (_, other) in zip(rows, expected, strict=True):
        assert values.keys() == other.keys()
        np.testing.assert_allclose([*values.values()], [*other.values()], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("accumulate", thinned([1, 3], full=[3]))
def test_a_bad_step_is_undone_and_told_as_under_single(accumulate: int) -> None:
    batches = sized(*[8] * 12)
    batches[7]["x"][5] = np.nan
    result = {}
    for strategy, devices in (("single", 1), (Pipeline(4, microbatches=1, layers="layers"), 4)):
        module = layered()
        trainer = make_trainer(strategy=strategy, devices=devices, accumulate_grad_batches=accumulate)
        with pytest.raises(jl.errors.NonFiniteError) as caught:
            trainer.fit(module, batches)
        result[strategy] = trainer.global_step, str(caught.value), module
    (step, words, theirs), (mine_step, mine_words, mine) = result.values()
    assert (mine_step, mine_words) == (step, words) and "row 5 of 8" in words
    assert_close(mine, theirs)


INNER = {
    "ddp": lambda: "ddp",
    "copies": lambda: jl.strategies.FSDP(replicas=2, min_size=0),
    "mesh": lambda: jl.strategies.FSDP(mesh={"data": 2, "fsdp": -1}, min_size=0),
    "tensor": lambda: jl.strategies.TensorParallel({r"linear\.kernel$": P(None, "tp")}, tp=2, data=2),
}


@pytest.mark.parametrize("inner", thinned(INNER, full=["tensor"]))
def test_a_strategy_within_a_rank_has_the_mesh_that_it_asks_for(inner: str) -> None:
    expected, module = layered(), layered()
    by_microbatches(expected, BATCHES, 2)
    seen: list[int] = []

    class Watched(Layered):
        def loss(self, batch: Any) -> jax.Array:
            jax.debug.callback(lambda x: seen.append(len(x)), batch["x"][:, 0] + self.inward.bias[0])
            return super().loss(batch)

    module.__class__ = Watched
    trainer = fit(module, BATCHES, strategy=Pipeline(2, microbatches=2, layers="layers", inner=INNER[inner]()))
    assert_close(module, expected)
    sizes = {"ddp": {"data": 4}, "tensor": {"data": 2, "fsdp": 1, "tp": 2}}.get(inner, {"data": 2, "fsdp": 2})
    assert dict(trainer.strategy.mesh.shape) == {"stage": 2} | sizes
    jax.effects_barrier()
    assert sum(seen) == 30  # what a step calls, each microbatch does once


@pytest.mark.full
def test_checkpoints_go_from_a_pipeline_to_any_other_strategy(tmp_path: Path) -> None:
    def train(folder: str, strategy: Any, devices: int, **arguments: Any) -> jl.Trainer:
        return fit(
            Layered(rngs=nnx.Rngs(1)), BATCHES[:3], strategy=strategy, devices=devices,
            default_root_dir=tmp_path / folder, **arguments,
        )  # fmt: skip

    def held(trainer: jl.Trainer) -> list[np.ndarray]:
        state = trainer.state
        return [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state, state.counters))]

    trainer = train("0", Pipeline(4, layers="layers"), 4)
    for i, (strategy, devices) in enumerate(((Pipeline(2, layers="layers"), 4), ("fsdp", 8), ("single", 1))):
        assert trainer.checkpoint_callback is not None
        path = trainer.checkpoint_callback.last_model_path
        following = train(str(i + 1), strategy, devices, ckpt_path=path, max_epochs=1)
        for mine, theirs in zip(held(following), held(trainer), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        following.save_checkpoint(tmp_path / f"of-{i}")
        assert train(f"{i}-on", strategy, devices, ckpt_path=tmp_path / f"of-{i}", max_epochs=2).global_step == 6


@pytest.mark.full
def test_a_loss_that_is_a_sum_is_that_of_all_rows() -> None:
    class Summed(Layered):
        def loss(self, batch: Any) -> jax.Array:
            return super().loss(batch) * batch["x"].shape[0]

    tx, result = optax.sgd(1e-3), []
    for strategy, devices in (("single", 1), (Pipeline(4, layers="layers", loss_reduction="sum"), 4)):
        module = Summed(tx=tx, rngs=nnx.Rngs(0))
        module.layers = nnx.List([layer.linear for layer in module.layers])  # dropout would draw otherwise
        fit(module, BATCHES, None, losses := Losses(), strategy=strategy, devices=devices)
        result.append((module, losses.losses))
    (theirs, expected), (mine, losses) = result
    assert_close(mine, theirs)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.full
def test_stages_are_printed_and_the_module_is_gathered(capsys: pytest.CaptureFixture[str]) -> None:
    module = layered()
    trainer = fit(module, BATCHES, strategy=Pipeline(2, layers="layers"), devices=2)
    assert {x.sharding for x in jax.tree.leaves(nnx.state(module))} == {SingleDeviceSharding(jax.devices()[0])}
    assert {frozenset(x.sharding.device_set) for x in jax.tree.leaves(trainer.state.params)} == {
        frozenset({device}) for device in jax.devices()[:2]
    }
    screen = capsys.readouterr().out
    assert "gathered from 2 ranks to cpu:0" in screen
    assert "stage 1, on cpu:1" in screen
    title, _, first, *_ = trainer.strategy.describe().split("\n")
    assert title == "Pipeline on mesh stage=2 x data=1, Std1F1B(2) with 2 microbatches"
    assert "inward, layers[0], layers[1] 176" in " ".join(first.split())  # 3 * 8 + 8 and twice 8 * 8 + 8


class Mixed(Layered):
    """Layers with functions between them, one of the layers twice."""

    def __init__(self, tx: Any = None, *, rngs: nnx.Rngs) -> None:
        super().__init__(1, tx, rngs=rngs)
        first, second = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.layers = nnx.List([first, jax.nn.relu, second, jnp.tanh, first, second])


@pytest.mark.full
def test_functions_and_repeated_calls_among_layers_work() -> None:
    relu, expected, module = type(jax.nn.relu), Mixed(rngs=nnx.Rngs(0)), Mixed(rngs=nnx.Rngs(0))
    by_microbatches(expected, BATCHES, 4)
    fit(module, BATCHES, strategy=Pipeline(4, layers="layers"), devices=4)
    assert_close(module, expected)
    assert type(jax.nn.relu) is relu


@pytest.mark.parametrize("schedule", thinned(["zb_h1", "zbv"], "zb_h1", full=()))
def test_a_scaled_loss_is_scaled_back_in_both_parts_of_a_pass(schedule: str) -> None:
    trained = []
    for name in ("1f1b", schedule):
        module = layered(tx=optax.sgd(0.05))
        module.layers = nnx.List([layer.linear for layer in module.layers])  # one order of statistics for all
        strategy = Pipeline(2, name, 4, layers="layers")
        fit(module, sized(*[8] * 8), strategy=strategy, devices=2, precision="16-mixed")  # the first ones overflow
        trained.append(module)
    for path, x in numbers(trained[0]).items():
        np.testing.assert_allclose(numbers(trained[1])[path], x, rtol=0, atol=2e-3, err_msg=path)
