"""What a device holds and sends for a transformer: read off the compiled programs, against counts of its parameters.
Its losses are those that a plain data-parallel JAX notebook printed.
"""

from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kit.notebook import LM, PRINTED, losses
from kit.trainers import BARE, fit
from kit.transformer import Transformer

import jaxlit as jl
from jaxlit.strategies import FSDP

VOCAB = 128


def cost_of(strategy: Any, module: Any, tokens: np.ndarray, **arguments: Any) -> Any:
    trainer = fit(module, [tokens], strategy=strategy, **BARE, **arguments)
    (cost,) = [program for program in trainer.explain().programs if program.name == "train_step"]
    return cost, {x.kind: x for x in cost.collectives}, trainer


def parameter_bytes(trainer: jl.Trainer) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(trainer.state.params) if not x.sharding.is_fully_replicated)


TOKENS = np.random.default_rng(0).integers(0, VOCAB, (16, 33)).astype(np.int32)


@pytest.mark.full
def test_scanned_layers_are_gathered_twice_and_reduced_once() -> None:
    temporaries = []
    for remat in (False, True):
        module = Transformer(vocab=VOCAB, width=64, layers=12, scanned=True, rngs=nnx.Rngs(0))
        cost, sent, trainer = cost_of(FSDP(remat=remat), module, TOKENS)
        assert set(sent) == {"all-gather", "all-reduce"}  # no activation is moved
        assert all(x.exact for x in sent.values())
        # Once forward and once backward: of one layer at a time.
        assert 2 * 0.9 * parameter_bytes(trainer) < sent["all-gather"].bytes < 2 * 1.1 * parameter_bytes(trainer)
        assert sent["all-reduce"].bytes < 1.1 * parameter_bytes(trainer)
        temporaries.append(cost.memory.temporaries)
    assert temporaries[1] <= 0.45 * temporaries[0]


@pytest.mark.full
def test_each_array_of_a_transformer_is_gathered_once() -> None:
    module = LM(rngs=nnx.Rngs(0))
    _, sent, trainer = cost_of("fsdp", module, np.random.default_rng(0).integers(0, 512, (16, 64)).astype(np.int32))
    assert sum(not x.sharding.is_fully_replicated for x in jax.tree.leaves(trainer.state.params)) == 27
    assert sent["all-gather"].calls <= 27 and sent["all-gather"].bytes <= 1.1 * parameter_bytes(trainer)


def plain_step(model: LM, state: Any, mesh: Any, tokens: np.ndarray) -> Any:
    """Return the program that `jax.jit` makes of a step without a guard, with the shardings of a training's state."""
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)
    tx, trained = model.configure_optimizers(), (state.params, state.opt_state)

    def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        loss_of = lambda params: nnx.merge(graphdef, params, rest).training_step(tokens)  # noqa: E731
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    shardings = jax.tree.map(lambda x: x.sharding, trained)
    results, rows = (*shardings, NamedSharding(mesh, P())), (*shardings, NamedSharding(mesh, P("data")))
    jitted = jax.jit(step, in_shardings=rows, out_shardings=results, donate_argnums=(0, 1))
    return jitted.lower(*trained, tokens).compile()


@pytest.mark.full
def test_fsdp_holds_and_gathers_what_a_plain_jit_does() -> None:
    tokens = np.random.default_rng(0).integers(0, 512, (16, 64)).astype(np.int32)
    cost, sent, trainer = cost_of("fsdp", LM(rngs=nnx.Rngs(0)), tokens)
    with mock.patch.object(LM, "log", lambda *_: None):
        plain = plain_step(LM(rngs=nnx.Rngs(0)), trainer.state, trainer.mesh, tokens)
    assert cost.memory.temporaries <= 1.05 * plain.memory_analysis().temp_size_in_bytes
    assert sent["all-gather"].calls <= plain.as_text().count(" all-gather(")


@pytest.mark.full
def test_an_embedding_split_along_its_features_splits_no_activation() -> None:
    make = lambda: Transformer(vocab=VOCAB - 1, width=64, tied=True, rngs=nnx.Rngs(0))  # noqa: E731
    fsdp, sent, trainer = cost_of("fsdp", make(), TOKENS % (VOCAB - 1))
    assert trainer.state.params["embed"]["embedding"].sharding.spec == P(None, "data")
    # The all-to-all turns the rows of a batch, which are split, into features of the embedding's gradient.
    assert set(sent) <= {"all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
    assert sent["all-gather"].bytes <= 1.1 * parameter_bytes(trainer)
    ddp, _, _ = cost_of("ddp", make(), TOKENS % (VOCAB - 1))
    assert fsdp.memory.temporaries <= ddp.memory.temporaries + 2 * parameter_bytes(trainer)  # and its gathered arrays


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "shard_map", "pmap"])
def test_the_losses_equal_those_of_the_notebook(strategy: str) -> None:
    assert losses(strategy, 50) == pytest.approx(PRINTED, abs=2e-4)
