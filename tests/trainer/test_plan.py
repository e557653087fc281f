"""trainer.plan reports before a run what explain() reports after it: bytes, operations and collectives."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import Stream
from kit.costs import report_memory
from kit.trainers import BARE, SEVERAL, splitting, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError, ModuleError
from jaxlit.programs.costs import resolve_hardware
from jaxlit.strategies import FSDP, Pipeline, SequenceParallel, TensorParallel
from jaxlit.trainer.plan import Plan

ROWS, WIDTH = 16, 32


class Two(jl.TrainModule):
    """Two layers, dropout, batch statistics and a schedule that asks how long training is."""

    def __init__(self, width: int = WIDTH, *, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(width, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def training_step(self, batch: Any) -> jax.Array:
        x = self.dropout(jnp.tanh(self.up(self.norm(batch["x"]))))
        loss = jnp.mean((self.down(x) - batch["x"]) ** 2)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(optax.cosine_decay_schedule(1e-3, self.trainer.estimated_stepping_batches))


class Marked(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])

    def training_step(self, batch: Any) -> jax.Array:
        x = batch["x"]
        for layer in self.layers:
            x = jl.pipeline_yield(jnp.tanh(layer(x)))
        return jnp.mean((x - batch["x"]) ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


def batches(rows: int = ROWS) -> list[dict[str, np.ndarray]]:
    return [{"x": np.random.default_rng(i).normal(size=(rows, WIDTH)).astype(np.float32)} for i in range(3)]


def planner(**arguments: Any) -> jl.Trainer:
    return jl.Trainer(**(BARE | {"max_epochs": 1} | arguments))


def planned(trainer: jl.Trainer, strategy: Any, module: Any = None, **asked: Any) -> Any:
    (row,) = trainer.plan(module or jl.lazy(Two), batches(), strategies=[strategy], **asked).plans
    return row


def cost_of_a_run(trainer: jl.Trainer, module: Any = Two, rows: int = ROWS) -> Any:
    """Train, and return what `explain` says afterwards of the step."""
    trainer.fit(jl.lazy(module), batches(rows))
    (cost,) = (program for program in trainer.explain().programs if program.name == "train_step")
    return cost


def shares(trainer: jl.Trainer) -> dict[str, int]:
    return {part.name: part.bytes_per_device for part in trainer.explain().shardings}


SHARDED = ("hsdp", "zero2")
CASES = thinned(
    [(s, n) for s in ("single", *SEVERAL, *SHARDED) for n in (1, 3)],
    ("single", 1),
    full=[("fsdp", 3), ("shard_map", 1), ("ddp", 3), ("zero1", 1), ("zero2", 3), ("hsdp", 1), ("pmap", 3)],
)


@pytest.mark.parametrize(("name", "accumulate"), CASES)
def test_a_plan_equals_the_run_to_the_byte(name: str, accumulate: int) -> None:
    strategy, arguments = splitting(name), {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0}
    devices = 1 if name == "single" else 8
    cost = planned(planner(**arguments), strategy, devices=devices).cost
    trainer = planner(strategy=splitting(name), **arguments)
    ran, held = cost_of_a_run(trainer), shares(trainer)
    assert cost.memory == ran.memory
    assert cost.flops == ran.flops
    assert cost.collectives == ran.collectives
    assert [x.sent_by_span for x in cost.collectives] == [x.sent_by_span for x in ran.collectives]
    assert cost.optimizer == held["(optimizer)"]
    assert cost.window == held.get("(window)", 0)
    assert cost.parameters + cost.optimizer + cost.window + cost.other == held["(all)"]


def test_a_plan_of_a_built_module_is_that_of_a_lazy_one() -> None:
    assert planned(planner(), "fsdp", Two(rngs=nnx.Rngs(0))).as_dict() == planned(planner(), "fsdp").as_dict()


def test_arrays_of_callbacks_are_planned() -> None:
    row, plain = (planned(planner(callbacks=x), "fsdp") for x in ([jl.callbacks.EMA()], None))
    assert row.bytes["other"] - plain.bytes["other"] >= plain.bytes["parameters"]


@pytest.mark.full
@pytest.mark.parametrize("given", [{"stages": 2}, {"stages": 4, "inner": "ddp"}, {"stages": 2, "schedule": "zbv"}])
def test_a_pipeline_has_the_operations_of_other_strategies(given: dict[str, Any]) -> None:
    strategy = Pipeline(microbatches=4, **given)
    row, whole = planned(planner(), strategy, jl.lazy(Marked)), planned(planner(), "ddp", jl.lazy(Marked))
    assert row.cost.flops == whole.cost.flops
    trainer = planner(strategy=strategy)
    ran = cost_of_a_run(trainer, Marked)
    assert row.cost.parameters + row.cost.optimizer + row.cost.other == shares(trainer)["(all)"]
    assert (row.cost.flops, row.cost.collectives) == (ran.flops, ran.collectives)
    assert row.bound == ">="
    # Forward and back, a microbatch's rows of activations cross each border of ranks.
    (send,) = row.cost.collectives
    assert send.kind == "send"
    assert send.calls % 4 == 0


@pytest.mark.parametrize("kind", ["tensor", pytest.param("sequence", marks=pytest.mark.full)])
def test_other_meshes_are_planned_as_they_run(kind: str) -> None:
    def strategy() -> jl.Strategy:
        if kind == "sequence":
            return SequenceParallel(seq=2, data=4)
        P = jax.sharding.PartitionSpec
        return TensorParallel({"up.kernel": P(None, "tp"), "down.kernel": P("tp")}, tp=4, data=2)

    cost, ran = planned(planner(), strategy()).cost, cost_of_a_run(planner(strategy=strategy()))
    assert (cost.memory, cost.flops, cost.collectives) == (ran.memory, ran.flops, ran.collectives)


@pytest.mark.full
def test_absent_devices_are_planned_in_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planner().plan(jl.lazy(Two), batches(64), devices=64, strategies=["ddp", "fsdp"], hardware="NVIDIA H100")
    err, (ddp, fsdp) = capsys.readouterr().err, plan.plans
    here = planned(planner(), "ddp").cost
    assert ddp.cost.parameters == here.parameters
    assert ddp.cost.optimizer == here.optimizer
    assert (ddp.cost.devices, fsdp.cost.devices) == (64, 64)
    assert fsdp.cost.flops == ddp.cost.flops
    # 32 x 128 and 128 x 32 numbers divide by 64; the rest is small and stays whole.
    kernels = 2 * WIDTH * 4 * WIDTH * 4
    assert ddp.bytes["parameters"] - fsdp.bytes["parameters"] == kernels - kernels // 64
    assert ddp.bytes["batch"] == 64 // 64 * WIDTH * 4
    assert [line for line in err.splitlines() if line.startswith("plan ")] == [
        "plan 1/2: ddp on 64 devices, 64 rows",
        "plan 2/2: fsdp on 64 devices, 64 rows",
    ]


@pytest.mark.full
def test_settings_of_jax_and_the_trainer_reach_the_other_process() -> None:
    pipeline = Pipeline(stages=2, microbatches=4)
    asked = {"devices": [8, 16], "strategies": ["ddp", pipeline]}
    given = {"nan_policy": "rollback", "enable_checkpointing": True, "accumulate_grad_batches": 2}
    trainer = planner(**given, precision="bf16-true")
    with jax.default_matmul_precision("highest"):
        plan = trainer.plan(jl.lazy(Marked), batches(), **asked)
    here, _, there, _ = plan.plans
    assert [row.error for row in plan.plans] == [""] * 4
    assert {*there.cost.flops.by_dtype} == {*here.cost.flops.by_dtype} == {"bfloat16"}
    assert there.cost.window == here.cost.window > 0
    assert "mesh" not in vars(pipeline)
    for precision, dtype in ((None, "float32 fast"), ("highest", "float32")):
        with jax.default_matmul_precision(precision):
            assert {*planned(planner(), "ddp", jl.lazy(Marked), devices=16).cost.flops.by_dtype} == {dtype}


class Reads(jl.TrainModule):
    def __init__(self, path: str) -> None:
        self.weight = nnx.Param(jnp.asarray(np.load(path)))

    def training_step(self, batch: Any) -> jax.Array:
        return jnp.mean(batch["x"] * self.weight)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


class Holds(Reads):
    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(()))
        self.lock = threading.Lock()


class Decoder(jl.TrainModule):
    """Twelve layers of a decoder with the embedding of GPT-2's vocabulary, which does not divide among devices."""

    width, vocab, layers = 256, 50257, 12

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        w, layers = self.width, range(self.layers)
        self.embed = nnx.Embed(self.vocab, w, rngs=rngs)
        self.attention = nnx.List([nnx.MultiHeadAttention(4, w, decode=False, rngs=rngs) for _ in layers])
        self.up = nnx.List([nnx.Linear(w, 4 * w, rngs=rngs) for _ in layers])
        self.down = nnx.List([nnx.Linear(4 * w, w, rngs=rngs) for _ in layers])

    def training_step(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens[:, :-1])
        for attention, up, down in zip(self.attention, self.up, self.down, strict=True):
            x = x + attention(x)
            x = x + down(nnx.gelu(up(x)))
        return optax.softmax_cross_entropy_with_integer_labels(self.embed.attend(x), tokens[:, 1:]).mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


@pytest.mark.full
def test_twelve_layers_on_256_devices_are_split_and_gathered_once() -> None:
    tokens = [np.zeros((256, 65), np.int32)]
    (row,) = planner().plan(jl.lazy(Decoder), tokens, devices=256, strategies=["fsdp"]).plans
    w = Decoder.width
    kernels = 4 * (Decoder.vocab * w + Decoder.layers * (4 * w * w + 8 * w * w))
    biases = 4 * Decoder.layers * (4 * w + 4 * w + w)
    # The largest biases, of 4 w numbers, have 1024 of them, up to which an array stays whole.
    assert row.bytes["parameters"] == kernels // 256 + biases
    assert row.bytes["optimizer"] == 2 * row.bytes["parameters"] + 4
    sent = {x.kind: x.bytes for x in row.cost.collectives}
    assert kernels <= sent["all-gather"] <= 1.1 * kernels
    assert sent["all-reduce"] <= 1.1 * (kernels + biases)


class Asks(Two):
    """What it needs is made in a hook, and its step reads a value."""

    def setup(self, stage: str) -> None:
        self.scale = 2.0

    def training_step(self, batch: Any) -> jax.Array:
        return super().training_step(batch) * (self.scale if self.up.kernel[0, 0] > 0 else 1.0)


@pytest.mark.parametrize("devices", thinned([8, 16], 8, full=()))
@pytest.mark.parametrize(
    ("module", "words"),
    [
        (jl.lazy(Reads, "absent.npy"), ("FileNotFoundError", "absent.npy", "in __init__")),
        (jl.lazy(Asks), ("TracerBoolConversionError", "in training_step", "without the hooks of a fit such as setup")),
    ],
    ids=["reads a file", "reads a value"],
)
def test_a_module_that_cannot_be_planned_says_why(module: Any, words: tuple[str, ...], devices: int) -> None:
    with pytest.raises(ModuleError) as error:
        planner().plan(module, batches(), devices=devices, strategies=["ddp"])
    assert [word for word in words if word not in str(error.value)] == []
    assert len(str(error.value).splitlines()) == 1


def test_what_cannot_be_sent_to_the_other_process_is_named() -> None:
    with pytest.raises(ArgumentError, match="cannot be pickled.*locks"):
        planner().plan(Holds(), batches(), devices=16, strategies=["ddp"])


@pytest.mark.parametrize("strategy", thinned(["fsdp", "ddp", "shard_map"], full=["fsdp", "shard_map"]))
def test_the_mesh_of_the_trainer_is_planned(strategy: str) -> None:
    arguments = {"strategy": strategy, "mesh": {"data": 4} if strategy == "shard_map" else {"data": 4, "fsdp": 2}}
    arguments |= {"devices": 4} if strategy == "shard_map" else {}
    (row,) = planner(**arguments).plan(jl.lazy(Two), batches()).plans
    trainer = planner(**arguments)
    ran = cost_of_a_run(trainer)
    assert (row.cost.memory, row.cost.collectives) == (ran.memory, ran.collectives)
    assert row.devices == trainer.strategy.mesh.size


@pytest.mark.full
def test_devices_are_those_of_the_trainer_unless_asked() -> None:
    asked = {"single": {}, "ddp": {"devices": 2}, "replicas:4": {}}
    plans = [planner(strategy=name, **given).plan(jl.lazy(Two), batches()) for name, given in asked.items()]
    assert [plan.plans[0].devices for plan in plans] == [1, 2, 4]
    with pytest.raises(ArgumentError, match="number of devices is fixed"):
        planner(strategy="ddp", mesh={"data": 8}).plan(jl.lazy(Two), batches(), devices=4)


def test_a_compile_has_a_time_limit() -> None:
    with pytest.raises(ArgumentError, match=r"took longer than 0.01 s"):
        planner().plan(jl.lazy(Two), batches(), devices=16, strategies=["ddp"], timeout=0.01)


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, optax, jaxlit as jl
from flax import nnx
class Long(jl.TrainModule):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones((8, 8)))
    def training_step(self, batch):
        if jax.device_count() > 1:
            print("there", flush=True)
            open({path!r}, "w").write(str(__import__("os").getpid()))
            while True:
                pass
        return jnp.mean(batch @ self.weight)
    def configure_optimizers(self):
        return optax.sgd(0.1)
if __name__ == "__main__":
    jl.Trainer(max_steps=1, logger=False).plan(jl.lazy(Long), [np.ones((16, 8), np.float32)], devices=16)
"""


@pytest.mark.full
def test_ctrl_c_ends_the_other_process(tmp_path: Path) -> None:
    path, script = tmp_path / "pid", tmp_path / "long.py"
    script.write_text(SCRIPT.format(path=str(path)))
    env = os.environ | {"XLA_FLAGS": ""}
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    end = time.monotonic() + 120
    while not (path.exists() and path.read_text()):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"devices": 0}, "devices"),
        ({"batch_size": 8, "rows_per_device": 2}, "Leave one out"),
        ({"hardware": "NVIDIA B100"}, "Did you mean"),
        ({"hardware": 5}, "jl.Hardware"),
        ({"timeout": -1}, "timeout"),
        ({"devices": []}, "at least one"),
        ({"strategies": []}, "at least one"),
        ({"strategies": "ddp"}, "takes a list"),
        ({"strategies": ["ddp", "fspd"]}, "Did you mean 'fsdp'"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(asked: dict[str, Any], words: str) -> None:
    with pytest.raises((ArgumentError, jl.errors.ArgumentTypeError), match=words):
        planner().plan(jl.lazy(Two), batches(), **asked)


def test_a_strategy_that_refuses_leaves_the_others() -> None:
    plan = planner().plan(jl.lazy(Two), batches(), devices=8, strategies=["ddp", "pipeline", FSDP(replicas=3)])
    assert [row.cost is None for row in plan.plans] == [False, True, True]
    assert "do not divide into 3 copies" in str(plan)
    assert plan.rows()[2]["total"] is None


def test_an_iterator_keeps_its_first_batch() -> None:
    data = iter(batches())
    with pytest.raises(ArgumentError, match="re-iterable"):
        planner().plan(jl.lazy(Two), data)
    assert len([*data]) == 3


def test_rows_are_counted_for_each_device_or_all() -> None:
    first = planned(planner(), "ddp")
    each = planned(planner(), "ddp", rows_per_device=4)
    whole = planned(planner(), "ddp", batch_size=32)
    assert (first.batch_size, each.batch_size, whole.batch_size) == (ROWS, 32, 32)
    assert each.bytes == whole.bytes
    assert whole.bytes["batch"] == 2 * first.bytes["batch"]


@pytest.mark.parametrize("name", thinned(["ddp", "shard_map", "pmap"], full=["ddp", "shard_map"]))
def test_rows_that_do_not_divide_are_noted(name: str) -> None:
    work = "holds" if name == "ddp" else "holds and computes"
    even, odd = (planned(planner(), name, devices=8, batch_size=rows) for rows in (16, 12))
    assert even.note == ""
    assert odd.note == (
        f"12 rows do not divide into 8 equal parts. Nothing is padded or dropped: every device {work} all 12."
    )
    assert (even.bytes["batch"], odd.bytes["batch"]) == (2 * WIDTH * 4, 12 * WIDTH * 4)
    each = odd.cost.flops.count / 12 / (even.cost.flops.count / 16)  # operations for a row, on all devices together
    assert each == pytest.approx(8 if "computes" in work else 1)
    ran = cost_of_a_run(planner(strategy=name), rows=12)
    assert (odd.cost.memory, odd.cost.flops) == (ran.memory, ran.flops)
    plan = Plan((even, odd))
    assert f"{name} on 8 devices: {odd.note}" in str(plan)
    assert [row["note"] for row in plan.rows()] == [None, odd.note]


@pytest.mark.parametrize(
    ("strategy", "module", "devices"),
    [("replicas:8", Two, 1), pytest.param(Pipeline(stages=2, microbatches=4), Marked, 8, marks=pytest.mark.full)],
    ids=["replicas", "pipeline"],
)
def test_nothing_is_noted_where_devices_share_no_batch(strategy: Any, module: Any, devices: int) -> None:
    row = planned(planner(), strategy, jl.lazy(module), devices=devices, batch_size=13)
    assert row.note == ""
    assert row.batch_size == 13


def test_plans_read_one_batch_and_make_no_array() -> None:
    class Counts(Stream):
        drawn = 0

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                self.drawn += 1
                yield batch

    gc.collect()
    before = {id(x) for x in jax.live_arrays()}
    planner().plan(jl.lazy(Two), data := Counts(batches()), strategies=["fsdp"])
    assert data.drawn == 1
    assert [x.shape for x in jax.live_arrays() if id(x) not in before and x.size > 4] == []


def test_a_roofline_takes_the_slowest_of_three() -> None:
    slow = jl.Hardware(half=2e6, fast=1e6, full=1e6, memory=1e6, bandwidth=1e9, link=1e9, node=8, network=1.0)
    row = planned(planner(), "ddp", hardware=slow)
    (reduce,) = row.cost.collectives
    memory = row.cost.memory
    assert row.seconds == {
        "compute": row.cost.flops.count / 8 / 1e6,
        "memory": (memory.arguments + memory.outputs + 2 * memory.temporaries) / 1e9,
        "network": reduce.sent / 1e9,
    }
    assert row.step_seconds == (row.seconds["compute"], row.seconds["compute"])
    # Each of eight devices sends seven eighths of what it reduces, twice; nodes of four are left for others.
    assert reduce.sent == np.ceil(2 * 7 / 8 * reduce.bytes)
    apart = jl.Hardware(half=2e6, fast=1e6, full=1e6, memory=1e6, bandwidth=1e9, link=1e9, node=4, network=1e3)
    assert planned(planner(), "ddp", hardware=apart).seconds["network"] == reduce.sent / 1e3
    assert row.left == 1e6 - row.total
    assert row.fits


def test_a_plan_says_what_jax_takes_of_a_gpu_by_itself() -> None:
    row = planned(planner(), "ddp", hardware="NVIDIA A100-SXM4-80GB")
    for used, wanted in ((0, False), (59 * 10**9, False), (61 * 10**9, True), (81 * 10**9, False)):
        more = replace(row, cost=replace(row.cost, optimizer=used))
        assert ("jax takes 75% of a GPU's memory" in str(Plan((more,)))) == wanted
        on_tpu = replace(more, hardware=resolve_hardware("TPU v5"))
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in str(Plan((on_tpu,)))


def test_a_plan_of_present_devices_takes_the_memory_that_they_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of a module that is there already are counted once."""
    module, own = Marked(rngs=nnx.Rngs(0)), 4 * 4 * (WIDTH * WIDTH + WIDTH)  # layers of float32
    report_memory(monkeypatch, 10**6, lambda: own + 50)
    monkeypatch.setattr("jaxlit.trainer.plan.hardware_of", lambda kind: resolve_hardware("NVIDIA A100"))
    assert planned(planner(), "ddp", module).hardware.memory == 950_000 - 50
    assert planned(planner(), "ddp", jl.lazy(Marked)).hardware.memory == 950_000 - 50 - own
    assert planned(planner(), "ddp", module, hardware="NVIDIA A100").hardware.memory == 40e9


def test_a_plan_is_drawn_and_listed() -> None:
    plan = planner().plan(jl.lazy(Two), batches(), strategies=["ddp", "fsdp"], hardware="NVIDIA A100")
    json.dumps(plan.rows())
    (axes,) = plan.plot().axes
    heights = np.array([[bar.get_height() for bar in bars] for bars in axes.containers])
    kinds = ("parameters", "optimizer", "gradients", "temporaries", "batch", "other")
    np.testing.assert_allclose(heights * 2**30, [[row[kind] for row in plan.rows()] for kind in kinds])
    for row in plan.rows():
        assert sum(row[kind] for kind in kinds) == row["total"]
    assert plan.best is plan.plans[0]
    assert [line.split()[0] for line in str(plan).splitlines()[1:3]] == ["ddp", "fsdp"]
