"""A causal language model as in flax's lm1b example, small: padding, label smoothing, warm-up, a masked mean.

Its loss divides by the number of tokens that are no padding, so that shards with other lengths weigh as much as each
other under strategies whose step sees one replica's rows.

Shape letters: B rows, T positions, C channels, V words.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sweeps.models.by_hand import by_shards
from sweeps.models.case import TWENTY, Batch, Case, Logs, Shared, rows

T, C, V, HEADS, LAYERS = 8, 16, 32, 2, 2
SMOOTHING = 0.1


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each after a LayerNorm and beside an identity."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(C, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, C, use_bias=False, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(C, 2 * C, rngs=rngs), nnx.Linear(2 * C, C, rngs=rngs)

    def __call__(self, x_BTC: jax.Array, mask: jax.Array) -> jax.Array:
        x_BTC = x_BTC + self.attention(self.norms[0](x_BTC), mask=mask)
        return x_BTC + self.down(nnx.relu(self.up(self.norms[1](x_BTC))))


class Language(Shared):
    """Predicts each word from those before it; word 0 is padding."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(V, C, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(C, rngs=rngs)
        self.out = nnx.Linear(C, V, rngs=rngs)

    def tx(self) -> optax.GradientTransformation:
        warm_up = optax.linear_schedule(0.0, 0.02, 5)
        return optax.adamw(lambda step: warm_up(step) * (1 + step) ** -0.5, eps=1e-3, weight_decay=0.1)

    def __call__(self, words_BT: jax.Array) -> jax.Array:
        before_BT = jnp.pad(words_BT, ((0, 0), (1, 0)))[:, :-1]
        x_BTC = self.embed(before_BT) + positions()
        real = words_BT > 0
        mask = nnx.combine_masks(nnx.make_attention_mask(real, real), nnx.make_causal_mask(words_BT))
        for block in self.blocks:
            x_BTC = block(x_BTC, mask)
        return self.out(self.norm(x_BTC))

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        words_BT = batch["words"]
        logits_BTV = self(words_BT)
        weights_BT = (words_BT > 0).astype(jnp.float32)
        soft = optax.smooth_labels(jax.nn.one_hot(words_BT, V), SMOOTHING)
        losses_BT = optax.softmax_cross_entropy(logits_BTV, soft)
        count = weights_BT.sum()
        right = ((logits_BTV.argmax(-1) == words_BT) * weights_BT).sum() / count
        return (losses_BT * weights_BT).sum() / count, {"accuracy": (right, count)}


def positions() -> np.ndarray:
    """Return sines and cosines of each position, (T, C)."""
    angles = np.arange(T)[:, None] / 100 ** (np.arange(C // 2) / (C // 2 - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)


def sentences(rng: np.random.Generator, size: int) -> Batch:
    """Return words that count up by one from a random one, in sentences of 2 to T words."""
    words = 1 + (rng.integers(V - 1, size=(size, 1)) + np.arange(T)) % (V - 1)
    return {"words": np.where(np.arange(T) < rng.integers(2, T + 1, size=(size, 1)), words, 0).astype(np.int32)}


def whole_sentences(rng: np.random.Generator, size: int) -> Batch:
    """Return the same without padding, so that every token weighs the same in all shards."""
    return {"words": (1 + (rng.integers(V - 1, size=(size, 1)) + np.arange(T)) % (V - 1)).astype(np.int32)}


CASES = [
    Case("lm1b transformer", Language, rows(TWENTY, sentences), by_hand=by_shards),
    Case("lm1b transformer without padding", Language, rows(TWENTY, whole_sentences)),
]
