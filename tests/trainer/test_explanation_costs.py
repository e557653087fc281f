"""trainer.explain() tells where the state lies and what each program costs: by formulas, and by what devices hold."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit import trainers
from kit.compiles import compiles
from kit.inside import leaves_of
from kit.trainers import BARE, FOUR, SEVERAL, STRATEGIES, splitting, thinned

import jaxlit as jl
from jaxlit.programs.costs import ProgramCost

ROWS, INSIDE, OUT = 32, 16, 8
KERNEL = 4 * INSIDE * OUT  # bytes
PRODUCT = 2 * ROWS * INSIDE * OUT  # operations


class One(jl.TrainModule):
    """One matrix; a step counts how often it is traced."""

    traces = 0

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((INSIDE, OUT)))

    def loss(self, batch: Any) -> jax.Array:
        One.traces += 1
        return jnp.mean((batch["x"] @ self.kernel[...]) ** 2)

    def training_step(self, batch: Any) -> jax.Array:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: Any = None, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch))

    def predict_step(self, batch: Any) -> jax.Array:
        return batch["x"] @ self.kernel[...]

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1, momentum=0.9)


def batches(count: int = 2, rows: int = ROWS) -> list[dict[str, np.ndarray]]:
    return [{"x": np.ones((rows, INSIDE), np.float32)} for _ in range(count)]


def fit(*callbacks: Any, train: Any = None, val: Any = None, strategy: Any = "single", **arguments: Any) -> jl.Trainer:
    given = BARE | {"num_sanity_val_steps": 0, "strategy": splitting(strategy)} | arguments
    return trainers.fit(One(), train or batches(), val or batches(), *callbacks, **given)


def costs(trainer: jl.Trainer) -> dict[str, ProgramCost]:
    return {program.name: program for program in trainer.explain().programs}


def sent(cost: ProgramCost, kind: str) -> int:
    assert cost.collectives is not None
    return sum(x.bytes for x in cost.collectives if x.kind == kind)


def on_fullest(arrays: Any) -> int:
    """Return the bytes of arrays on the device that holds the most of them, by the shards that are there."""
    held = Counter[Any]()
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())


CASES, OFTEN = [(s, n) for s in STRATEGIES for n in (1, 2)], [("fsdp", 2), ("shard_map", 2), ("pmap", 1)]


@pytest.mark.parametrize("strategy, accumulate", thinned(CASES, *OFTEN, full=[(s, 2) for s in FOUR]))
def test_programs_have_flops_memory_and_collectives(strategy, accumulate) -> None:
    trainer = fit(strategy=strategy, accumulate_grad_batches=accumulate, limit_val_batches=1)
    before, seconds = One.traces, trainer.compile_seconds
    with compiles() as result:
        programs = costs(trainer)
    assert (result, One.traces, trainer.compile_seconds) == ([], before, seconds), "nothing is made for it"
    train, micro = programs["train_step"], programs.get("micro_step")
    assert [*programs] == ["train_step", *["micro_step"] * (accumulate > 1), "eval_step"]
    # The product and the kernel's gradient; the batch has none.
    assert all(x.flops is not None and x.flops.exact for x in programs.values())
    assert [x.flops.count for x in programs.values() if x.flops] == [2 * PRODUCT] * accumulate + [PRODUCT]
    state, devices = on_fullest(leaves_of(trainer)), trainer.strategy.mesh.size
    assert train.memory is not None
    assert train.memory.arguments == state + 4 * ROWS * INSIDE // devices
    assert train.memory.aliased == state
    for cost in (train, *([micro] if micro else [])):
        each = strategy in SEVERAL and strategy not in ("shard_map", "pmap", "replicas:8")
        # The gradients, and a few numbers: the loss, whether all is finite, how many rows.
        reduces = each or (cost is train and strategy in ("shard_map", "pmap"))
        assert sent(cost, "all-reduce") - KERNEL * reduces in range(16)
    # Under fsdp the kernel before the product; under zero1 the new kernel, whose parts the devices have updated.
    gathers = {"fsdp": {"train_step", "micro_step", "eval_step"}, "zero1": {"train_step"}}.get(strategy, set())
    assert {name: sent(cost, "all-gather") for name, cost in programs.items() if sent(cost, "all-gather")} == {
        name: KERNEL for name in gathers if name in programs
    }


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "fsdp", "shard_map"))
def test_shardings_list_parameters_and_the_fullest_device(strategy) -> None:
    trainer = fit(strategy=strategy, accumulate_grad_batches=2)
    parts = {part.name: part for part in trainer.explain().shardings}
    state = trainer.state
    kinds = {"kernel": state.params, "(optimizer)": state.opt_state, "(window)": state.window}
    kinds |= {"(other)": (state.counters, state.sums), "(all)": state}
    assert [*parts] == [*kinds]
    for name, tree in kinds.items():
        arrays = jax.tree.leaves(tree)
        whole, most = sum(x.nbytes for x in arrays), on_fullest(arrays)
        assert (parts[name].bytes, parts[name].bytes_per_device) == (whole, most)
    alone = trainer.strategy.mesh.size == 1
    assert parts["kernel"].partition == {"fsdp": "P('data')"}.get(strategy, "on cpu:0" if alone else "replicated")
    assert parts["(all)"].partition == ("on cpu:0" if alone else "replicated" if strategy == "ddp" else "mixed")
