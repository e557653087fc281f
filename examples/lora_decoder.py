"""LoRA by qwix on a decoder with the weights of transformers; the trained adapters are merged, saved and loaded again.

    pip install transformers torch qwix==0.1.8; python examples/lora_decoder.py [--strategy fsdp] [--base nf4]

`--base nf4` or `int8` keeps the frozen weights in 4 or 8 bits while it trains (QLoRA), and merges the adapters into the
original weights. Without an accelerator it simulates eight devices.
"""

import argparse

import jax
import numpy as np
import optax
import qwix
import transformers
from decoders.decoder import Decoder
from decoders.rules import rules_for
from flax import nnx
from hub_weights import MODELS, make

import jaxlit as jl

RANK, ALPHA = 4, 8.0  # a rank that is no width of a layer: see docs/adapters.md


class Tuned(Decoder):
    def training_step(self, tokens_BT: jax.Array) -> jax.Array:
        loss = super().training_step(tokens_BT)
        self.log("loss", loss, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> jl.Optimizer:
        return jl.Optimizer(optax.adam(1e-2), wrt=nnx.LoRAParam)


def merged(weights: dict[str, jax.Array], adapters: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return weights with the products of the adapters added, kernel + alpha / rank * a @ b."""
    names = {name.removesuffix("_lora_a") for name in adapters if name.endswith("_lora_a")}
    added = {name: adapters[f"{name}_lora_a"] @ adapters[f"{name}_lora_b"] for name in names}
    return weights | {name: weights[name] + ALPHA / RANK * x for name, x in added.items()}


def arrays(model: nnx.Module, kind: type) -> dict[str, jax.Array]:
    return {".".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(nnx.state(model, kind))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--base", choices=["nf4", "int8"])
    options = parser.parse_args()
    tokens = (np.arange(512)[:, None] + np.arange(24)) % 96  # each is the one before and one more
    make("qwen3", MODELS["qwen3"], tokens[:8])
    config = transformers.AutoConfig.from_pretrained("qwen3").to_dict()
    model = Tuned(config, rngs=nnx.Rngs(0))
    jl.load_weights(model, "qwen3", rules_for(config))
    base = jax.tree.map(np.asarray, arrays(model, nnx.Param))

    rule = qwix.LoraRule(module_path=r".*/(q|k|v|o|gate|up|down)", rank=RANK, alpha=ALPHA, weight_qtype=options.base)
    adapted = qwix.apply_lora_to_model(model, qwix.LoraProvider([rule]), tokens[:1], rngs=nnx.Rngs(1))
    saves = jl.callbacks.ModelCheckpoint(trained_only=True)
    trainer = jl.Trainer(strategy=options.strategy, max_epochs=5, callbacks=saves, default_root_dir="lora")
    trainer.fit(adapted, jl.ArrayLoader(tokens, 32, shuffle=True))

    adapters = jax.tree.map(np.asarray, arrays(trainer.module, nnx.LoRAParam))
    trained, frozen = (sum(x.size for x in given.values()) for given in (adapters, base))
    print(f"trained {trained:,} of {trained + frozen:,} numbers, loss {float(trainer.callback_metrics['loss']):.3f}")
    alone, again = Decoder(config, rngs=nnx.Rngs(2)), Decoder(config, rngs=nnx.Rngs(3))
    jl.load_weights(alone, merged(base, adapters))
    jl.save_weights(alone, "merged.safetensors")
    jl.load_weights(again, "merged.safetensors")
    before, after = (np.asarray(x(tokens[:8])) for x in (trainer.module, again))
    print(f"merged: logits up to {np.abs(before).max():.1f}, differ by {np.abs(after - before).max():.1e}")
