"""`FSDP(offload="optimizer")`, the optimizer's state in the host's memory, and policies of `remat`."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from kit.journal import at_batch
from kit.refusals import refuses
from kit.trainers import fit, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError
from jaxlit.strategies import FSDP, Pipeline

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(96, 64)).astype(np.float32), "y": RNG.normal(size=96).astype(np.float32)}
SIZE = 4 * (64 * 64 + 64 + 64 + 1)  # bytes of the parameters


class Net(jl.TrainModule):
    def __init__(self, optimizer: Any = optax.adam, *, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 1, rngs=rngs)
        self.optimizer = optimizer

    def training_step(self, batch: Any) -> jax.Array:
        return ((self.last(nnx.relu(self.first(batch["x"])))[:, 0] - batch["y"]) ** 2).mean()

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.training_step(batch))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return self.optimizer(1e-2)


def trained(strategy: Any, optimizer: Any = optax.adam, *callbacks: Any, **arguments: Any) -> tuple[jl.Trainer, Any]:
    """Return the Trainer, and all numbers of its state."""
    loaders = jl.ArrayLoader(DATA, 32, shuffle=True), jl.ArrayLoader(DATA, 32)
    arguments = {"strategy": strategy, "devices": 2, "max_epochs": 2} | arguments
    trainer = fit(jl.lazy(Net, optimizer), *loaders, *callbacks, **arguments)
    return trainer, [np.asarray(x) for x in jax.tree.leaves(trainer.state)]


def assert_same(numbers: Any, others: Any) -> None:
    for x, y in zip(numbers, others, strict=True):
        np.testing.assert_array_equal(x, y)


def kinds(trainer: jl.Trainer) -> set[tuple[bool, str]]:
    """Return whether the arrays of the optimizer are counts, and where they are."""
    assert trainer.state is not None
    return {(not x.ndim, x.sharding.memory_kind) for x in jax.tree.leaves(trainer.state.opt_state)}


CASES = [
    (optax.adam, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    (optax.adam, {"steps_per_execution": 3}),
    (optax.adam, {"precision": "16-mixed", "nan_policy": "skip"}),
    (optax.contrib.schedule_free_adamw, {"nan_policy": "rollback"}),  # whose state holds weights, which evaluations see
]


@pytest.mark.parametrize(("optimizer", "arguments"), thinned(CASES, CASES[0], full=CASES[1:]))
def test_the_numbers_are_those_of_a_run_without_it(optimizer: Any, arguments: Any) -> None:
    trainer, numbers = trained(FSDP(offload="optimizer"), optimizer, **arguments)
    assert (False, "pinned_host") in kinds(trainer)
    assert (False, "device") not in kinds(trainer)
    assert_same(numbers, trained(FSDP(), optimizer, **arguments)[1])


@pytest.mark.parametrize("offload", thinned(["optimizer", None], "optimizer"))
def test_a_run_is_resumed_with_and_without_it(offload: Any, tmp_path: Path) -> None:
    cut = at_batch(1, lambda t, m: t.save_checkpoint(tmp_path / "cut"))
    first, then = FSDP(offload=offload), FSDP(offload=None if offload else "optimizer")
    _, through = trained(first, optax.adam, cut, max_epochs=1)
    trainer, resumed = trained(then, max_epochs=1, ckpt_path=tmp_path / "cut")
    assert kinds(trainer) == {(True, "device"), (False, "device" if offload else "pinned_host")}
    assert_same(resumed, through)


class Watched(FSDP):
    """Notes how often each program places an array on the devices or the hosts, where it is lowered for GPUs."""

    placed: dict[str, int]

    def compile(self, program: Any) -> Any:
        compiled = super().compile(program)

        def call(*args: Any) -> Any:
            text = compiled.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
            self.placed[program.name] = text.count("@annotate_device_placement(")
            return compiled(*args)

        return call


def test_only_an_update_moves_the_state() -> None:
    strategy = Watched(offload="optimizer")
    strategy.placed = {}
    trained(strategy, accumulate_grad_batches=2, max_epochs=1)
    moments = 8
    assert strategy.placed["train_step"] == strategy.placed["micro_step"] + moments  # both place what they return
    assert strategy.placed["eval_step"] == 0


def test_plan_and_explain_say_what_is_on_the_host() -> None:
    trainer, _ = trained(FSDP(offload="optimizer"))
    parts = {part.name: part for part in trainer.explain().shardings}
    assert parts["(optimizer)"].bytes == 2 * SIZE + 4
    assert parts["(optimizer)"].bytes_per_device == 4  # the count of its steps
    plan = trainer.plan(jl.lazy(Net), jl.ArrayLoader(DATA, 32))
    assert plan.plans[0].bytes["optimizer"] == 4
    cost = plan.plans[0].cost
    assert cost is not None
    assert cost.on_host == 2 * SIZE
    assert "of the state are in the memory of the hosts" in str(plan)
    assert "hosts" not in str(trainer.plan(jl.lazy(Net), jl.ArrayLoader(DATA, 32), strategies=["fsdp"]))


class Layer(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(checkpoint_name(self.linear(x), "inside"))


class Deep(Net):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs)
        self.first = jl.Stacked(lambda rngs: Layer(rngs=rngs), 3, rngs=rngs)


def test_remat_takes_a_policy() -> None:
    asked = list[tuple[str, str]]()
    names: dict[str, Any] = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["inside"]}
    offloading = jax.checkpoint_policies.save_and_offload_only_these_names(
        **names, offload_src="device", offload_dst="pinned_host"
    )

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        asked.append((primitive.name, type(offloading(primitive, *args, **params)).__name__))
        return offloading(primitive, *args, **params)

    weights = []
    for remat in (False, policy):
        trainer = fit(jl.lazy(Deep), jl.ArrayLoader(DATA, 32), strategy=FSDP(remat=remat), devices=2)
        weights.append(np.asarray(nnx.state(trainer.module)["first"]["layers"]["linear"]["kernel"][...]))
    assert ("name", "Offloadable") in asked
    np.testing.assert_allclose(weights[1], weights[0], rtol=1e-5, atol=1e-7)


def test_what_cannot_be_is_refused() -> None:
    refuses(ArgumentError, lambda: FSDP(offload="params"), "takes None or 'optimizer'")  # type: ignore[arg-type]
    inner = FSDP(offload="optimizer")
    refuses(ArgumentError, lambda: Pipeline(stages=2, microbatches=2, inner=inner), "without .* and offload")
    refuses(ArgumentError, lambda: FSDP(remat="some"), "or a policy of jax.checkpoint_policies")
