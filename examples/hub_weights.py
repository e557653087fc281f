"""One decoder takes the weights of Llama, Qwen3 and Gemma by the names of the hub, and has the logits of transformers.

    pip install transformers torch; python examples/hub_weights.py

Here transformers makes small models with random weights. For the hub's, the config is of "Qwen/Qwen3-0.6B", and the
weights are of "hf://Qwen/Qwen3-0.6B", of which only the bytes that are needed are read. It simulates eight devices.
"""

import os
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import numpy as np
import torch
import transformers
from decoders.decoder import Decoder
from decoders.rules import rules_for
from jax.sharding import PartitionSpec as P

import jaxlit as jl

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1}
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 24}
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "gemma2": transformers.Gemma2Config(**SIZES, **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, **GEMMA, sliding_window_pattern=2),
}
SPLIT = {r"\b(q|k|v|gate|up|head)\.kernel": P(None, "tp"), r"\b(o|down)\.kernel|embedding": P("tp")}
STRATEGIES = {
    "single": "single",
    "fsdp": jl.strategies.FSDP(min_size=0),
    "tensor parallel": jl.strategies.TensorParallel(SPLIT, tp=2, fsdp=2, data=2),
}


def make(folder: str, config: Any, tokens: np.ndarray) -> np.ndarray:
    """Write a model of transformers in files of 50 kB, with an index and config.json; return its logits."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # else all zeros, or ones
                weight += 0.3 * torch.randn_like(weight)
        model.save_pretrained(folder, max_shard_size="50KB")
        return model(torch.from_numpy(tokens)).logits.numpy()


def predict(source: str, config: dict[str, Any], tokens: np.ndarray, strategy: Any) -> np.ndarray:
    """Return the logits of the weights in a folder or repository, loaded straight into the shards of a strategy."""
    rules = rules_for(config)
    load = jl.callbacks.LambdaCallback(setup=lambda trainer, module, stage: jl.load_weights(module, source, rules))
    trainer = jl.Trainer(strategy=strategy, callbacks=load, logger=False, enable_progress_bar=False)
    (logits,) = trainer.predict(jl.lazy(Decoder, config), [tokens])
    return np.asarray(logits)


if __name__ == "__main__":
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (8, 24))
    for name, given in MODELS.items():
        theirs = make(name, given, tokens)
        config = transformers.AutoConfig.from_pretrained(name).to_dict()
        for title, strategy in STRATEGIES.items():
            ours = predict(name, config, tokens, strategy)
            print(
                f"{name}, {title}: logits up to {np.abs(ours).max():.1f}, differ by {np.abs(ours - theirs).max():.1e}"
            )
