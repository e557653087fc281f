"""Rules for `jl.load_weights`: from the names and layout of the hub to those of `Decoder`, by the type of the model."""

import jaxlit as jl
from decoders.decoder import checked

LAYER = r"model\.layers\.(\d+)\."
LLAMA = {
    r"model\.embed_tokens\.weight": "embed.embedding",
    LAYER + r"input_layernorm\.weight": r"layers.\1.before_attention.scale",
    LAYER + r"self_attn\.([qkvo])_proj\.weight": jl.WeightRule(r"layers.\1.attention.\2.kernel", transpose=True),
    LAYER + r"post_attention_layernorm\.weight": r"layers.\1.before_mlp.scale",
    LAYER + r"mlp\.(gate|up|down)_proj\.weight": jl.WeightRule(r"layers.\1.\2.kernel", transpose=True),
    r"model\.norm\.weight": "norm.scale",
}
QWEN3 = LLAMA | {LAYER + r"self_attn\.([qk])_norm\.weight": r"layers.\1.attention.\2_norm.scale"}
GEMMA2 = LLAMA | {
    LAYER + r"post_attention_layernorm\.weight": r"layers.\1.after_attention.scale",
    LAYER + r"pre_feedforward_layernorm\.weight": r"layers.\1.before_mlp.scale",
    LAYER + r"post_feedforward_layernorm\.weight": r"layers.\1.after_mlp.scale",
}
GEMMA3 = QWEN3 | GEMMA2
RULES = {"llama": LLAMA, "qwen3": QWEN3, "gemma2": GEMMA2, "gemma3_text": GEMMA3}


def rules_for(config: dict) -> dict[str, str | jl.WeightRule | None]:
    """Return the rules for the weights of a config; a file may have the embedding as the head again."""
    config = checked(config)
    head = None if config["tie_word_embeddings"] else jl.WeightRule("head.kernel", transpose=True)
    return RULES[config["model_type"]] | {r"lm_head\.weight": head}
