"""The transformer language model of a plain data-parallel JAX notebook, and the losses that the notebook printed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import jaxlit as jl
from kit.journal import Rows
from kit.trainers import BARE, fit

VOCAB, SEQ, WIDTH, HEADS, LAYERS, HIDDEN = 512, 64, 256, 8, 4, 1024
PRINTED = {0: 6.7112, 10: 6.3130, 20: 6.2615, 30: 6.2571, 40: 6.2508, 49: 6.2567}


def sinusoids() -> jax.Array:
    position = jnp.arange(SEQ)[:, None]
    angle = jnp.exp(-(jnp.log(10000.0) / WIDTH) * jnp.arange(0, WIDTH, 2)[None, :]) * position
    return jnp.zeros((SEQ, WIDTH)).at[:, 0::2].set(jnp.sin(angle)).at[:, 1::2].set(jnp.cos(angle))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = linen.LayerNorm()(x)
        # The name is that of the notebook's layer, since Linen seeds parameters by their names.
        x = x + linen.MultiHeadDotProductAttention(HEADS, use_bias=False, name="SelfAttention_0")(y, deterministic=True)
        y = linen.LayerNorm()(x)
        y = linen.gelu(linen.Dense(HIDDEN)(y))
        return x + linen.Dense(WIDTH)(y)


class LinenLM(linen.Module):
    """Only here to draw the notebook's initial parameters: Linen names them and so seeds them."""

    def setup(self) -> None:
        self.tok_emb = linen.Embed(VOCAB, WIDTH)
        self.pos_emb = self.param("pos_emb", lambda key: sinusoids())
        self.blocks = [LinenBlock() for _ in range(LAYERS)]
        self.ln_f = linen.LayerNorm()
        self.head = linen.Dense(VOCAB, use_bias=False)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tok_emb(tokens) + self.pos_emb[None, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class LM(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.tok_emb = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.pos_emb = nnx.Param(sinusoids())
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.ln_f = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def training_step(self, tokens: jax.Array) -> jax.Array:
        x = self.tok_emb(tokens) + self.pos_emb[None]
        for block in self.blocks:
            x = block(x)
        loss = optax.softmax_cross_entropy_with_integer_labels(self.head(self.ln_f(x))[:, :-1], tokens[:, 1:]).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(3e-4)


@functools.cache
def linen_params() -> dict[str, Any]:
    return LinenLM().init(jax.random.PRNGKey(42), jnp.zeros((8, SEQ), jnp.int32))["params"]


def initial() -> LM:
    """Return the model with the notebook's initial parameters."""
    model, params = LM(rngs=nnx.Rngs(0)), linen_params()
    model.tok_emb.embedding[...] = params["tok_emb"]["embedding"]
    model.pos_emb[...] = params["pos_emb"]
    model.head.kernel[...] = params["head"]["kernel"]
    pairs: list[tuple[Any, dict[str, Any]]] = [(model.ln_f, params["ln_f"])]
    for i, block in enumerate(model.blocks):
        own = params[f"blocks_{i}"]
        pairs += [(block.norm_1, own["LayerNorm_0"]), (block.norm_2, own["LayerNorm_1"])]
        pairs += [(block.up, own["Dense_0"]), (block.down, own["Dense_1"])]
        pairs += [(getattr(block.attention, name), own["SelfAttention_0"][name]) for name in ("query", "key", "value")]
        pairs += [(block.attention.out, own["SelfAttention_0"]["out"])]
    for layer, values in pairs:
        for name, value in values.items():
            assert getattr(layer, name)[...].shape == value.shape
            getattr(layer, name)[...] = value
    return model


def losses(strategy: str, steps: int) -> dict[int, float]:
    """Train on the notebook's data; returns the losses of those steps whose losses it printed."""
    data = np.random.RandomState(1234).randint(0, VOCAB, size=(8192, SEQ), dtype=np.int32)
    rows = Rows()
    arguments = {"max_epochs": None, "max_steps": steps, "log_every_n_steps": 1}
    fit(initial(), jl.ArrayLoader(data, 32), None, rows, strategy=strategy, **(BARE | arguments))
    result = rows.of("loss")
    assert len(result) == steps
    return {step: result[step] for step in PRINTED if step < steps}
