"""The guard of the optimizer step: what a bad step leaves alone, leaf by leaf, and what it costs in the program."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import random
from kit.by_hand import state_of
from kit.checkpoints import state_of as saved_state
from kit.inside import engine_of, lowered
from kit.modules import Linear, module
from kit.trainers import BARE, STRATEGIES, fit, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.errors import NonFiniteError

# The optimizer, and the arrays of its state that take a step in which only the gradient of the bias is bad.
SCHEDULE, MIXED = optax.linear_schedule(0.1, 0.01, 9), {"adam": optax.adam(0.01), "sgd": optax.sgd(0.1, momentum=0.9)}
OPTIMIZERS: dict[str, tuple[Any, list[str]]] = {
    "adamw": (optax.adamw(0.01), ["[0].mu.kernel", "[0].nu.kernel"]),
    "clipped": (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)), []),
    "scheduled": (optax.inject_hyperparams(optax.sgd)(SCHEDULE, momentum=0.9), [".inner_state[0].trace.kernel"]),
    "two": (
        optax.multi_transform(MIXED, lambda params: jax.tree.map(lambda x: ("sgd", "adam")[x.ndim > 1], params)),
        [f".inner_states.adam.inner_state[0].{x}.kernel" for x in ("mu", "nu")],
    ),
    "every second": (optax.MultiSteps(optax.adam(0.01), 2), [".acc_grads.kernel"]),
    "schedule-free": (optax.contrib.schedule_free_sgd(0.1), []),
    "averaged": (optax.chain(optax.trace(0.9), optax.ema(0.9)), ["[0].trace.kernel", "[1].ema.kernel"]),
    "momentum": (optax.sgd(0.1, momentum=0.9), ["[0].trace.kernel"]),
}


def finite(tree: Any) -> bool:
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating))


def spoilt(self: Any, batch: Any) -> jax.Array:
    """The root of a square that is 0 if the batch says so: the loss is finite, and the gradient of the bias is not."""
    return self.loss(batch) + jnp.sqrt((self.bias[...] * jnp.max(batch["spoil"])) ** 2).sum()


def batches_of(bad: int | None = None) -> list[dict[str, np.ndarray]]:
    batches = [batch | {"spoil": np.ones((8, 1), np.float32)} for batch in random(6)]
    if bad is not None:
        batches[bad]["spoil"][:] = 0
    return batches


MANY = [(name, "single") for name in OPTIMIZERS] + [("adamw", strategy) for strategy in STRATEGIES[1:]]
FEW = [("adamw", "single"), ("schedule-free", "single"), ("clipped", "fsdp")]


@pytest.mark.parametrize(("name", "strategy"), thinned(dict.fromkeys([*MANY, *FEW]), *FEW, full=MANY[::2]))
def test_a_bad_step_changes_no_array_that_it_reaches(name, strategy) -> None:
    tx, expected = OPTIMIZERS[name]
    made, before = (module(spoilt, base=Linear, tx=tx) for _ in range(2))
    trainer = make_trainer(strategy=splitting(strategy), default_root_dir="run")
    made.bias[...] = before.bias[...] = jnp.ones(1)
    with pytest.raises(NonFiniteError):
        trainer.fit(made, batches_of(4))
    reference = fit(before, batches_of()[:4], strategy=splitting(strategy), **BARE)
    held, known = (engine_of(t).state for t in (trainer, reference))
    changed = [
        spec[0]
        for spec, a, b in zip(held.spec.entries, held.leaves, known.leaves, strict=True)
        if np.asarray(a).tobytes() != np.asarray(b).tobytes() and spec[0] != "counters"
    ]
    assert finite(trainer.state.opt_state) and finite(trainer.state.params)
    recorded = saved_state("run/checkpoints/step_00000004")["not_finite"]["optimizer"]
    # The update in the cond of MultiSteps may run in any step, and did not in this one.
    assert changed == [name for name in recorded if "inner_opt_state" not in name]
    assert changed == [f"opt_state{x}" for x in expected]


def program(trainer: jl.Trainer, batch: Any) -> tuple[str, int]:
    """Return the text of the compiled step, and the bytes of its temporaries."""
    compiled = lowered(trainer, "train_step", batch).compile()
    return compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes


def copied(text: str) -> int:
    """Return how many numbers of arrays a program copies."""
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", text)
    return sum(int(np.prod([int(dim) for dim in shape.split(",")])) for shape in shapes)


class Deep(jl.TrainModule):
    def __init__(self, width: int, depth: int, tx: Any, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])
        self.make = lambda: tx

    def training_step(self, batch: Any) -> jax.Array:
        x = batch["x"]
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return jnp.mean((x - 1) ** 2)

    def configure_optimizers(self) -> Any:
        return self.make()


def programs(width: int, tx: Any) -> list[tuple[str, int]]:
    """Return of the steps of a deep model without and with the guard what `program` does."""
    batch = {"x": np.ones((16, width), np.float32)}
    policies = ("ignore", "raise")
    trainers = [fit(Deep(width, 10, tx, rngs=nnx.Rngs(0)), [batch], nan_policy=x, **BARE) for x in policies]
    return [program(trainer, batch) for trainer in trainers]


@pytest.mark.parametrize("width", thinned([128, 1024], 128, full=()))
def test_the_guard_needs_no_memory_for_all_gradients(width) -> None:
    (without, least), (text, most) = programs(width, optax.adamw(1e-3))
    gradients = 10 * (width * width + width) * 4
    assert " conditional(" not in text
    assert copied(text) <= copied(without)
    assert most - least <= gradients / 6


def test_the_guard_adds_few_kernels_and_instructions() -> None:
    """A kernel that selects reads one flag: with the flags of all gradients in each, instructions grow as a square."""
    (without, _), (text, _) = programs(32, optax.adamw(1e-3))
    assert text.count(" fusion(") <= 1.3 * without.count(" fusion(")
    assert text.count(" = ") <= 1.7 * without.count(" = ")


def test_the_guard_traces_the_optimizer_no_more_often() -> None:
    (init, update), traces = optax.sgd(0.1), []
    for policy in ("ignore", "raise"):
        calls: list[Any] = []
        tx = optax.GradientTransformation(init, lambda *args, calls=calls: [calls.append(1), update(*args)][1])
        fit(Deep(4, 1, tx, rngs=nnx.Rngs(0)), [{"x": np.ones((16, 4), np.float32)}], nan_policy=policy, **BARE)
        traces.append(len(calls))
    assert traces[1] == traces[0]


@pytest.mark.parametrize(("name", "accumulate"), thinned([("adamw", 1), ("momentum", 2)], ("adamw", 1)))
@pytest.mark.parametrize("policy", thinned(["ignore", "skip"], "ignore"))
def test_the_guard_changes_no_bit_of_a_finite_step(policy, name, accumulate) -> None:
    batches = [{"x": batch["x"]} for batch in random(6, rows=64, features=64)]
    result = [Deep(64, 3, OPTIMIZERS[name][0], rngs=nnx.Rngs(0)) for _ in range(2)]
    for made, how in zip(result, (policy, "raise"), strict=True):
        fit(made, batches, nan_policy=how, accumulate_grad_batches=accumulate, **BARE)
    expected = state_of(result[0])
    for key, x in state_of(result[1]).items():
        np.testing.assert_array_equal(x, expected[key], err_msg=key)
