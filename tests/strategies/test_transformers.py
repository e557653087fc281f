"""What a device holds and sends for a transformer: read off the compiled programs, against counts of its parameters.
Its losses are those that a plain data-parallel JAX notebook printed.
"""

from typing import Any

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
from jaxlit.programs.costs import count_collectives
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


def by_hand(module: Any, shardings: Any, mesh: Any, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compile a step of plain JAX, whose parameters and moments have these shardings."""
    monkeypatch.setattr(type(module), "log", lambda *_: None)
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    tx = module.configure_optimizers()

    def step(params: Any, state: Any, tokens: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: nnx.merge(graphdef, p, rest).training_step(tokens))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    of_params = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(shardings))
    state = jax.eval_shape(tx.init, params)
    of_all = NamedSharding(mesh, P())
    of_state = optax.tree_map_params(tx, lambda _, x: x, state, of_params, transform_non_params=lambda _: of_all)
    places = (of_params, of_state, NamedSharding(mesh, P("data")))
    return jax.jit(step, donate_argnums=(0, 1), in_shardings=places, out_shardings=(*places[:2], None)).lower(
        params, state, tokens
    )


@pytest.mark.full
def test_unscanned_layers_need_the_memory_and_gathers_of_a_plain_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    module, tokens = LM(rngs=nnx.Rngs(0)), np.random.default_rng(0).integers(0, 512, (16, 64)).astype(np.int32)
    cost, sent, trainer = cost_of("fsdp", module, tokens)
    shardings = jax.tree.map(lambda x: x.sharding, trainer.state.params)
    assert sum(not x.is_fully_replicated for x in jax.tree.leaves(shardings)) == 27
    assert sent["all-gather"].calls <= 27 and sent["all-gather"].bytes <= 1.1 * parameter_bytes(trainer)
    plain = by_hand(LM(rngs=nnx.Rngs(0)), shardings, trainer.strategy.mesh, tokens, monkeypatch).compile()
    assert cost.memory.temporaries <= 1.03 * plain.memory_analysis().temp_size_in_bytes
    gathers = {x.kind: x for x in count_collectives(plain.as_text())}["all-gather"]
    assert (sent["all-gather"].calls, sent["all-gather"].bytes) == (gathers.calls, gathers.bytes)


@pytest.mark.full
def test_an_embedding_split_along_its_features_splits_no_activation() -> None:
    make = lambda: Transformer(vocab=VOCAB - 1, width=64, tied=True, rngs=nnx.Rngs(0))  # noqa: E731
    fsdp, sent, trainer = cost_of("fsdp", make(), TOKENS % (VOCAB - 1))
    assert trainer.state.params["embed"]["embedding"].sharding.spec == P(None, "data")
    # The all-to-all turns the rows of a batch, which are split, into features of the embedding's gradient.
    assert set(sent) <= {"all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
    assert sent["all-gather"].bytes <= 1.1 * parameter_bytes(trainer)
    ddp, _, _ = cost_of("ddp", make(), TOKENS % (VOCAB - 1))
    assert fsdp.memory.temporaries <= ddp.memory.temporaries + parameter_bytes(trainer)  # its gathered arrays


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "shard_map", "pmap"])
def test_the_losses_equal_those_of_the_notebook(strategy: str) -> None:
    assert losses(strategy, 50) == pytest.approx(PRINTED, abs=2e-4)
