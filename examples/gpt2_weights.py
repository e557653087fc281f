"""Weights in the names and the layout of Hugging Face's GPT-2 are loaded into an NNX module, and fine-tuned in shards.

Without an accelerator it simulates eight devices. The weights are random and made here; the hub's are alike.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file

import jaxlit as jl

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH = 64, 2, 4, 256, 32  # of GPT-2: 768, 12, 12, 50257, 1024
QKV = [rf"\1.{part}" for part in ("query", "key", "value")]
RENAME = {  # what is not here has the same name in the module, such as all biases of layer norms
    r"(w[tp]e)\.weight": r"\1.embedding",
    r"(.*ln_\w)\.weight": r"\1.scale",
    r"(.*mlp\.\w+)\.weight": r"\1.kernel",  # (in, out), as in flax: GPT-2 alone does not transpose
    r"(.*attn)\.c_attn\.weight": jl.WeightRule([f"{x}.kernel" for x in QKV], axis=1, reshape=True),
    r"(.*attn)\.c_attn\.bias": jl.WeightRule([f"{x}.bias" for x in QKV], reshape=True),
    r"(.*attn)\.c_proj\.weight": jl.WeightRule(r"\1.out.kernel", reshape=True),  # to (heads, size, width)
    r"(.*attn)\.c_proj\.bias": r"\1.out.bias",
    r".*attn\.(masked_)?bias": None,  # the causal mask
}


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.ln_1, self.ln_2 = (nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs) for _ in range(2))
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        up, down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.mlp = nnx.Dict(c_fc=up, c_proj=down)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.ln_1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.mlp.c_proj(nnx.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT2(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.wte, self.wpe = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.h = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.ln_f = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:  # (rows, time) int32 to logits (rows, time, vocabulary)
        x = self.wte(ids) + self.wpe(jnp.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))

    def training_step(self, ids: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(self(ids[:, :-1]), ids[:, 1:]).mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)


def make_weights(path: str) -> None:
    kernels = {"attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH)}
    kernels |= {"mlp.c_fc": (WIDTH, 4 * WIDTH), "mlp.c_proj": (4 * WIDTH, WIDTH)}
    shapes = {"wte.weight": (VOCABULARY, WIDTH), "wpe.weight": (LENGTH, WIDTH)}
    for i in range(LAYERS):
        shapes |= {f"h.{i}.{name}.weight": shape for name, shape in kernels.items()}
        shapes |= {f"h.{i}.{name}.bias": shape[1:] for name, shape in kernels.items()}
    norms = ["ln_f", *(f"h.{i}.ln_{k}" for i in range(LAYERS) for k in (1, 2))]
    shapes |= {f"{name}.{x}": (WIDTH,) for name in norms for x in ("weight", "bias")}
    normal = np.random.default_rng(0).normal
    save_file({name: normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}, path)


if __name__ == "__main__":
    make_weights("model.safetensors")
    trainer = jl.Trainer(strategy="fsdp", max_epochs=4)
    data = jl.ArrayLoader((np.arange(512)[:, None] + np.arange(LENGTH + 1)) % VOCABULARY, 64, shuffle=True)
    trainer.fit(jl.lazy(GPT2), data, init_from=lambda module: jl.load_weights(module, "model.safetensors", RENAME))
