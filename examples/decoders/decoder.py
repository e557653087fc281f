"""A decoder of the families of Llama, Qwen3 and Gemma, by a config of transformers.

Shapes: B batch, T time, D width, N query heads, K heads of keys and values, G = N / K, H the size of a head.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl

Config = dict[str, Any]  # transformers.AutoConfig.from_pretrained(name).to_dict()
KINDS = ("llama", "qwen3", "gemma2", "gemma3_text")
ROPES = ("default", "linear", "llama3")  # scalings of rotary embeddings
ACTIVATIONS = {"silu": jax.nn.silu, "relu": jax.nn.relu, "gelu_pytorch_tanh": jax.nn.gelu}
ACTIVATIONS["gelu"] = partial(jax.nn.gelu, approximate=False)


def checked(config: Config) -> Config:
    """Return a config; refuse one that this decoder does not compute."""
    kind, is_bidirectional = config.get("model_type"), bool(config.get("use_bidirectional_attention"))
    rules = [("model_type", kind, KINDS), ("hidden_act", activation_of(config), ACTIVATIONS)]
    for name, given, known in [*rules, ("use_bidirectional_attention", is_bidirectional, [False])]:
        if given not in known:
            raise ValueError(f"This decoder takes {name} {', '.join(map(str, known))}, and the config has {given}.")
    needed = {"head_dim", "rope_parameters", "tie_word_embeddings", *(["layer_types"] if kind != "llama" else [])}
    if lacking := ", ".join(sorted(needed - config.keys())):
        raise ValueError(f"The config lacks {lacking}: pass transformers.AutoConfig.from_pretrained(name).to_dict().")
    return config


def activation_of(config: Config) -> str | None:
    return config.get("hidden_activation") or config.get("hidden_act")  # the first is Gemma's


class Norm(nnx.Module):
    """Division by the root of the mean square (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, config: Config) -> None:
        self.base = float(config["model_type"].startswith("gemma"))  # Gemma stores the scale minus one
        self.epsilon = config["rms_norm_eps"]
        self.scale = nnx.Param(jnp.full(size, 1 - self.base))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.epsilon) * (self.base + self.scale[...])


def rates_of(rope: Config, size: int) -> np.ndarray:
    """Return how far each pair of the numbers of a head turns in one time step, as `rope_parameters` scale it.

    Llama 3.1 slows down pairs that turn less than `high_freq_factor` times in the length of the first training
    (Grattafiori et al., 2024, https://arxiv.org/abs/2407.21783), and Gemma 3 all pairs of its global layers.
    """
    rates = rope["rope_theta"] ** (-2 * np.arange(size // 2) / size)
    if rope["rope_type"] == "default":
        return rates
    if rope["rope_type"] == "linear":
        return rates / rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rates * rope["original_max_position_embeddings"] / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return rates * (kept + (1 - kept) / rope["factor"])


def rotate(x_BTNH: jax.Array, rates: np.ndarray) -> jax.Array:
    """Turn pairs of numbers by angles that grow with the time (Su et al., 2021, https://arxiv.org/abs/2104.09864)."""
    low, high = jnp.split(x_BTNH, 2, -1)
    angles = jnp.arange(x_BTNH.shape[1])[:, None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    return x if cap is None else cap * jnp.tanh(x / cap)


class Attention(nnx.Module):
    """Causal attention of groups of queries, in Gemma's layers of one kind to the last tokens only."""

    def __init__(self, config: Config, layer: int, *, rngs: nnx.Rngs) -> None:
        kind = config["layer_types"][layer] if "layer_types" in config else "full_attention"
        self.window = {"full_attention": jnp.inf, "sliding_attention": config.get("sliding_window")}[kind]
        rope = config["rope_parameters"].get(kind, config["rope_parameters"])
        if rope["rope_type"] not in ROPES or rope.get("partial_rotary_factor", 1) != 1:
            raise ValueError(
                f"This decoder takes rope_type {', '.join(ROPES)} of all numbers, and the config has {rope}."
            )
        self.size, self.kv_heads = config["head_dim"], config["num_key_value_heads"]
        self.rotate = partial(rotate, rates=rates_of(rope, self.size))
        self.scale = config.get("query_pre_attn_scalar", self.size) ** -0.5
        self.cap = config.get("attn_logit_softcapping")
        D, N, linear = (
            config["hidden_size"],
            config["num_attention_heads"],
            partial(nnx.Linear, use_bias=False, rngs=rngs),
        )
        self.q, self.o = linear(D, N * self.size), linear(N * self.size, D)
        self.k, self.v = linear(D, self.kv_heads * self.size), linear(D, self.kv_heads * self.size)
        has_norms = config["model_type"] in ("qwen3", "gemma3_text")
        self.q_norm, self.k_norm = (Norm(self.size, config) if has_norms else None for _ in range(2))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        B, T, _ = x_BTD.shape
        q, k, v = (layer(x_BTD).reshape(B, T, -1, self.size) for layer in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BTKGH = (self.scale * self.rotate(q)).reshape(B, T, self.kv_heads, -1, self.size)
        scores_BKGTS = capped(jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, self.rotate(k)), self.cap)
        ago_TS = jnp.arange(T)[:, None] - jnp.arange(T)
        is_seen = (ago_TS >= 0) & (ago_TS < self.window)
        weights_BKGTS = jax.nn.softmax(jnp.where(is_seen, scores_BKGTS, -jnp.inf))
        return self.o(jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v).reshape(B, T, -1))


class Layer(nnx.Module):
    """Attention and a gated perceptron (Shazeer, 2020, https://arxiv.org/abs/2002.05202), with norms before them.

    Gemma has norms after them too.
    """

    def __init__(self, config: Config, layer: int, *, rngs: nnx.Rngs) -> None:
        D, F, linear = (
            config["hidden_size"],
            config["intermediate_size"],
            partial(nnx.Linear, use_bias=False, rngs=rngs),
        )
        self.attention = Attention(config, layer, rngs=rngs)
        self.gate, self.up, self.down = linear(D, F), linear(D, F), linear(F, D)
        is_gemma = config["model_type"].startswith("gemma")
        self.activation = ACTIVATIONS[activation_of(config)]
        self.before_attention, self.before_mlp = Norm(D, config), Norm(D, config)
        self.after_attention, self.after_mlp = (Norm(D, config) if is_gemma else lambda x: x for _ in range(2))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.after_attention(self.attention(self.before_attention(x_BTD)))
        y_BTD = self.before_mlp(x_BTD)
        return x_BTD + self.after_mlp(self.down(self.activation(self.gate(y_BTD)) * self.up(y_BTD)))


class Decoder(jl.TrainModule):
    """From tokens (B, T) int32 to logits (B, T, vocabulary)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        D, V = checked(config)["hidden_size"], config["vocab_size"]
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.scale = D**0.5 if config["model_type"].startswith("gemma") else 1.0
        self.layers = nnx.List([Layer(config, i, rngs=rngs) for i in range(config["num_hidden_layers"])])
        self.norm, self.cap = Norm(D, config), config.get("final_logit_softcapping")
        self.head = None if config["tie_word_embeddings"] else nnx.Linear(D, V, use_bias=False, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.scale * self.embed(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        x_BTD = self.norm(x_BTD)
        return capped(self.embed.attend(x_BTD) if self.head is None else self.head(x_BTD), self.cap)

    def training_step(self, tokens_BT: jax.Array) -> jax.Array:
        logits = self(tokens_BT[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BT[:, 1:]).mean()

    def predict_step(self, tokens_BT: jax.Array) -> jax.Array:
        return self(tokens_BT)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)
