"""The examples run, and reach what they promise."""

import ast
import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from kit.by_hand import assert_same, params_of
from kit.inside import laid_out, leaf_name
from kit.kernel import executed
from kit.pages import needing
from kit.trainers import thinned
from PIL import Image

import jaxlit as jl

EXAMPLES = Path(__file__).parent.parent / "examples"


ALL = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))


def test_the_index_has_one_line_for_each_example() -> None:
    rows = re.findall(r"^\| \[(\S+)\]\((\S+)\) \| \S.* \|$", (EXAMPLES / "README.md").read_text(), re.M)
    assert all(name == link for name, link in rows) and sorted(name for name, _ in rows) == ALL


def quoted(name: str) -> str:
    """Return the pattern of the line that the index shows of an example: its words, with any numbers."""
    (line,) = re.findall(rf"^\| \[{re.escape(name)}\].*`([^`]+)` \|$", (EXAMPLES / "README.md").read_text(), re.M)
    parts = re.split(r"(\.\.\.|\d[\d.,e+-]*|\s+)", line)
    kinds = {"...": ".*", " ": r"\s+"}
    return "".join(kinds.get(part) or (r"\S+" if part[:1].isdigit() else re.escape(part)) for part in parts)


@pytest.mark.parametrize("name", ALL)
def test_the_index_shows_a_line_that_each_example_prints(name: str) -> None:
    assert len(quoted(name)) > 15


def test_an_example_is_read_on_one_screen() -> None:
    lines = {name: len((EXAMPLES / name).read_text().splitlines()) for name in ALL if name.endswith(".py")}
    assert {name: count for name, count in lines.items() if count > 80} == {}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return a function that executes an example with arguments, and returns what it defines."""

    def load_it(name: str, *arguments: str, as_name: str = "__main__") -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.syspath_prepend(str(EXAMPLES))  # as Python does for a script
        return runpy.run_path(str(EXAMPLES / name), run_name=as_name)

    return load_it


@pytest.fixture
def called(load: Callable[..., Any]) -> Callable[..., tuple[dict[str, Any], Any]]:
    """Return a function that returns what an example defines, and what its `main` returns."""
    return lambda *given: ((example := load(*given, as_name="example")), example["main"]())


@pytest.fixture
def run(load: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs an example, and returns what it printed: among it what the index shows."""

    def run_it(*given: str) -> str:
        load(*given)
        out = capfd.readouterr().out
        assert re.search(quoted(given[0]), out)
        return out

    return run_it


def accuracy(out: str) -> float:
    return float(re.findall(r"^validation accuracy (\S+)$", out, re.M)[0])


ONE, *MORE = ("single", "auto"), ("zero1", "1"), ("auto", "1")
MORE += [(name, "8") for name in ("ddp", "fsdp", "shard_map", "pmap", "replicas")]
RUNS = [pytest.param(*ONE, marks=[pytest.mark.sweep, pytest.mark.smoke]), *thinned([ONE, *MORE], ONE, full=())[1:]]


@pytest.mark.parametrize(("strategy", "devices"), RUNS)
def test_digits_reaches_95_percent(strategy: str, devices: str, run: Any) -> None:
    assert accuracy(run("digits.py", "--strategy", strategy, "--devices", devices)) >= 0.95


@pytest.mark.parametrize("strategy", thinned(["fsdp", "single"], full=["fsdp"]))
def test_records_reaches_95_percent(strategy: str, run: Any) -> None:
    assert accuracy(run("records.py", "--strategy", strategy, "--epochs", "5")) >= 0.95


@pytest.mark.full
def test_replicas_have_the_same_bits_on_any_devices(called: Any) -> None:
    _, hashes = called("same_bits.py")
    assert len({*hashes.pop("ddp")}) == 4
    assert len({x for each in hashes.values() for x in each}) == 1 and len(hashes) == 3


@pytest.mark.full
def test_a_run_is_followed_from_another_process(load: Any, tmp_path: Path) -> None:
    rows = load("follow.py", as_name="example")["main"](tmp_path)
    assert [row["step"] for row in rows] == [22 * k for k in range(1, 9)]
    assert max(row["val/accuracy"] for row in rows) >= 0.9


@pytest.mark.full
def test_the_custom_strategy_trains_like_a_single_device(run: Any) -> None:
    out = run("custom_strategy.py")
    assert "TensorParallel on mesh data=4 x tp=2" in out
    single, split = np.array([line.split()[2:] for line in out.splitlines() if line.startswith("step")], float).T
    assert len(single) == 10 and single[-1] < single[0] - 1
    np.testing.assert_allclose(split, single, rtol=1e-5)


@pytest.mark.full
def test_a_population_finds_a_good_member_and_continues(run: Any, tmp_path: Path) -> None:
    first, whole = (run("population.py", "--epochs", n, "--root", str(tmp_path)) for n in ("2", "4"))
    assert float(re.findall(r"best member.*: (\S+)$", whole, re.M)[0]) >= 0.9
    steps = [[line.split()[4] for line in out.splitlines()[1:17]] for out in (first, whole)]
    assert steps == [["40"] * 16, ["80"] * 16]


@pytest.mark.full
def test_experts_train_like_a_single_device(run: Any) -> None:
    last = lambda strategy: run("experts.py", "--strategy", strategy, "--epochs", "1").splitlines()[-1]  # noqa: E731
    split, single = map(last, ("experts", "single"))
    assert split.endswith("experts P('ep', None, None)") and single.endswith("experts P()")
    np.testing.assert_allclose(*[float(re.findall(r"^loss (\S+),", line)[0]) for line in (split, single)], rtol=1e-5)


@pytest.mark.full
def test_pipelines_train_to_the_losses_of_fsdp(run: Any) -> None:
    out = run("pipeline.py")
    fsdp, *pipelines = np.array([line.split()[2:] for line in out.splitlines() if line.startswith("step")], float).T
    assert len(fsdp) == 6 and len(pipelines) == 2 and fsdp[-1] < fsdp[0]
    for losses in pipelines:
        np.testing.assert_allclose(losses, fsdp, atol=1e-4, rtol=0)
    passes = ["fwd_2__0", "fwd_2__1", "fwd_2__2", "bwd_2__0", "fwd_2__3", "bwd_2__1", "bwd_2__2", "bwd_2__3"]
    assert f"rank 2 of 4, 4 stages: {passes}" in out
    assert "Interleaved1F1B(8, 4) with 4 microbatches" in out and "predicted bubble 27.3%" in out
    assert len(re.findall(r" ms a step$", out, re.M)) == 3


# Into how many parts, by dim.
SPLIT = {"up.kernel": (1, 2), "attention.query.kernel": (1, 2, 1), "attention.out.kernel": (2, 1, 1)}
SPLIT |= {"down.kernel": (2, 1), "up.bias": (2,), "norm.bias": (1,)}


def test_the_custom_strategy_splits_moments_and_gradients() -> None:
    example = runpy.run_path(str(EXAMPLES / "custom_strategy.py"))
    module = nnx.eval_shape(lambda: example["Transformer"](rngs=nnx.Rngs(0)))
    state, shardings = laid_out(example["TensorParallel"](), module, accumulate=True)
    paths = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)]
    for part in (lambda s: s.params, lambda s: s.opt_state[0].mu, lambda s: s.window.grads):
        leaves = zip(paths, jax.tree.leaves(part(state)), jax.tree.leaves(part(shardings)), strict=True)
        parts = {path: tuple(np.divide(x.shape, s.shard_shape(x.shape))) for path, x, s in leaves}
        assert {path: parts[path] for path in SPLIT} == SPLIT
    assert shardings.opt_state[0].count.is_fully_replicated


@pytest.mark.full
def test_a_strategy_of_ones_own_trains_on_windows_and_a_tail() -> None:
    example = runpy.run_path(str(EXAMPLES / "custom_strategy.py"))
    given = {"strategies": [example["TensorParallel"]()], "steps": 2, "devices": [8], "accumulate_grad_batches": 2}
    jl.testing.assert_same_training(
        lambda: example["Transformer"](rngs=nnx.Rngs(0)), example["token_batches"](2), **given
    )


@pytest.mark.parametrize("steps", thinned([2, 20], full=[2]))
def test_the_language_model_learns_more_than_frequencies(steps: int, run: Any) -> None:
    out = run("transformer_lm.py", "--devices", "2", "--steps", str(steps))
    source = b"".join(path.read_bytes() for path in Path(ast.__file__).parent.glob("*.py"))
    often = np.bincount(np.frombuffer(source, np.uint8)) / len(source)
    entropy = -(often[often > 0] * np.log2(often[often > 0])).sum()
    reached = [float(x) for x in re.findall(r"val/bits_per_byte (\S+)", out)]
    assert 4 < entropy < 8 and len(reached) == 4 and reached[-1] < (reached[0] if steps == 2 else entropy - 0.5)
    written = re.findall(r"^  writes (b.*)$", out, re.M)
    assert len(written) == 4 and all(len(ast.literal_eval(line)) == 64 for line in written)


@pytest.mark.full
def test_each_network_of_the_gan_has_its_own_optimizer() -> None:
    example = runpy.run_path(str(EXAMPLES / "gan.py"))
    real = np.random.default_rng(1).normal(size=(16, 2)).astype(np.float32)
    gan, hand = example["GAN"](rngs=nnx.Rngs(0)), example["GAN"](rngs=nnx.Rngs(0))

    def wins(generator: Any, discriminator: Any, noise: jax.Array) -> jax.Array:
        return nnx.softplus(-discriminator(generator(noise))).mean()

    def errs(discriminator: Any, generator: Any, noise: jax.Array) -> jax.Array:
        told = nnx.softplus(-discriminator(real)).mean() + nnx.softplus(discriminator(generator(noise))).mean()
        return told / 2 + 0.02 * jnp.square(jax.vmap(jax.grad(lambda x: discriminator(x)[0]))(real)).sum() / len(real)

    @nnx.jit
    def by_hand(hand: Any) -> None:
        generator, discriminator, noise = hand.generator, hand.discriminator, jax.random.normal(hand.rngs(), (16, 2))
        grads = nnx.grad(wins)(generator, discriminator, noise), nnx.grad(errs)(discriminator, generator, noise)
        for network, grad in zip((generator, discriminator), grads, strict=True):
            nnx.Optimizer(network, optax.adam(1e-3, b1=0.5), wrt=nnx.Param).update(network, grad)

    by_hand(hand)
    state, step = jl.compile_step(gan, batch=real, strategy="single")
    state, _ = step(state, real)
    assert_same(params_of(step.module(state)), params_of(hand))


@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.full), pytest.param(6, marks=pytest.mark.sweep)])
def test_the_gan_draws_from_all_eight_modes(epochs: int, called: Any) -> None:
    example, points = called("gan.py", "--epochs", str(epochs))
    before = example["GAN"](rngs=nnx.Rngs(0)).generator(np.random.default_rng(0).normal(size=(500, 2)))
    assert np.linalg.norm(before, axis=1).mean() < 1 < np.linalg.norm(points, axis=1).mean() < 3
    angle = np.arange(8) * np.pi / 4
    apart = np.linalg.norm(points[:, None] - 2 * np.stack([np.cos(angle), np.sin(angle)], axis=1), axis=-1)
    near = np.bincount(apart.argmin(1)[apart.min(1) < 0.3], minlength=8) / len(points)
    assert epochs == 1 or (near.min() > 0.04 and near.sum() > 0.5)  # drawn anyhow in the square: 0.008 each


@pytest.mark.full
def test_fine_tuning_leaves_the_backbone_unchanged(called: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example, (checkpoint, tuned) = called("finetune.py", "--strategy", "fsdp", "--epochs", "4")
    backbone = params_of(example["Digits"].load_from_checkpoint(checkpoint))
    result = params_of(tuned)
    lora = {name: x for name, x in result.items() if name not in backbone}
    assert len(backbone) == 6 and len(lora) == 6 and all("lora" in name for name in lora)
    for name, x in backbone.items():
        np.testing.assert_array_equal(result[name], x)
    out = capsys.readouterr().out
    sizes = [sum(x.size for x in arrays.values()) for arrays in (lora, result)]
    assert f"trained {sizes[0]:,} of {sizes[1]:,} parameters" in out
    before, after = map(float, re.findall(r"^accuracy (\S+) before, (\S+) after$", out, re.M)[0])
    assert before < 0.6 and after > 0.8


def gpt2_by_hand(weights: dict[str, np.ndarray], ids: np.ndarray, heads: int) -> np.ndarray:
    """Return the logits of GPT-2, in numpy from the weights as they are named and stored on the hub."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def conv1d(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    rows, time = ids.shape
    x = weights["wte.weight"][ids] + weights["wpe.weight"][:time]
    for i in range(sum(name.endswith("ln_1.bias") for name in weights)):
        split = conv1d(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").reshape(rows, time, 3, heads, -1)
        q, k, v = np.moveaxis(split, 2, 0).swapaxes(2, 3)  # (rows, heads, time, size) each
        scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(time, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(x.shape)
        x = x + conv1d(mixed, f"h.{i}.attn.c_proj")
        up = conv1d(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        up = up / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        x = x + conv1d(up, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ weights["wte.weight"].T


@pytest.mark.full
def test_gpt2_computes_the_logits_of_the_weights_that_it_is_given() -> None:
    example = runpy.run_path(str(EXAMPLES / "gpt2_weights.py"))
    example["make_weights"]("model.safetensors")
    model = example["GPT2"](rngs=nnx.Rngs(0))
    loaded = jl.load_weights(model, "model.safetensors", example["RENAME"])
    weights = safetensors.numpy.load_file("model.safetensors")
    ids = np.random.default_rng(0).integers(0, example["VOCABULARY"], (3, 20))
    expected = gpt2_by_hand({name: x.astype(np.float64) for name, x in weights.items()}, ids, example["HEADS"])
    np.testing.assert_allclose(model(jnp.asarray(ids)), expected, rtol=1e-4, atol=1e-4)
    assert np.std(expected) > 0.1
    assert len(loaded.taken) == 36 and loaded.left == []


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch and transformers
@pytest.mark.parametrize("package", needing("transformers"))
def test_a_decoder_has_the_logits_of_transformers(package: str, run: Any) -> None:
    lines = re.findall(r"^(\w+), (.*): logits up to (\S+), differ by (\S+)$", run("hub_weights.py"), re.M)
    families = ("llama", "qwen3", "gemma2", "gemma3")
    assert [line[:2] for line in lines] == [(x, y) for x in families for y in ("single", "fsdp", "tensor parallel")]
    assert min(float(size) for _, _, size, _ in lines) > 1
    assert max(float(difference) for *_, difference in lines) < 1e-5
    for family in ("gemma2", "gemma3"):  # layers of both kinds, whose windows end within the 24 tokens
        config = json.loads(Path(family, "config.json").read_text())
        assert {*config["layer_types"]} == {"sliding_attention", "full_attention"} and config["sliding_window"] < 24
    assert len([*Path("llama").glob("model-*-of-*.safetensors")]) > 1


HUBS = {"head_dim": 16, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "num_hidden_layers": 2}
HUBS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8, "hidden_act": "silu"}
HUBS |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 4}  # as files of transformers 4 have them
REFUSED = [
    ({"model_type": "mistral"}, "takes model_type llama, qwen3, gemma2, gemma3_text, and the config has mistral"),
    ({"hidden_act": "mish"}, "takes hidden_act silu, relu, gelu_pytorch_tanh, gelu, and the config has mish"),
    ({"use_bidirectional_attention": True}, "takes use_bidirectional_attention False, and the config has True"),
    ({"model_type": "gemma2"}, "lacks layer_types: pass transformers.AutoConfig"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "takes rope_type default, linear, llama3 of all"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "of all numbers"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_a_decoder_refuses_what_it_does_not_compute(change: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from decoders.decoder import Decoder

    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = HUBS | rope | {"model_type": "llama", "tie_word_embeddings": True}
    assert Decoder(config, rngs=nnx.Rngs(0))(jnp.zeros((1, 20), int)).shape == (1, 20, 96)
    with pytest.raises(ValueError, match=words):
        Decoder(config | change, rngs=nnx.Rngs(0))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch and transformers
@pytest.mark.parametrize("package", needing("transformers"))
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_decoder_takes_the_config_of_a_hub(package: str, activation: str, kind: str, load: Any) -> None:
    example = load("hub_weights.py", as_name="example")
    transformers, tokens = example["transformers"], np.arange(24)[None] * 5 % 96  # more than max_position_embeddings
    Path("old").mkdir()
    key = "hidden_activation" if kind == "gemma2" else "hidden_act"
    given = HUBS | {"model_type": kind, key: activation, "initializer_range": 0.2}
    Path("old/config.json").write_text(json.dumps(given))
    config = transformers.AutoConfig.from_pretrained("old")
    theirs = example["make"]("new", config, tokens)
    ours = example["predict"]("new", config.to_dict(), tokens, "single")
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch and transformers
@pytest.mark.parametrize("package", needing("transformers"))
@pytest.mark.parametrize(
    ("model", "rope"),
    [  # as the hub's Llama 3.2 and Gemma 3 have them; 48 tokens, so that pairs turn less than once, up to 4 times, more
        ("llama", LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 48}),
        ("gemma3", LINEAR | {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}),
    ],
)
def test_a_decoder_scales_rotary_embeddings_as_transformers_does(
    package: str, model: str, rope: Any, load: Any
) -> None:
    example = load("hub_weights.py", as_name="example")
    config = example["MODELS"][model]
    tokens = np.arange(60)[None] * 5 % 96
    plain = example["make"]("plain", config, tokens)
    config.rope_parameters = rope
    theirs = example["make"]("scaled", config, tokens)
    assert np.abs(theirs - plain).max() > 1e-2
    config = example["transformers"].AutoConfig.from_pretrained("scaled").to_dict()
    np.testing.assert_allclose(example["predict"]("scaled", config, tokens, "fsdp"), theirs, atol=1e-5)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch, transformers and qwix
@pytest.mark.parametrize("package", needing("transformers"))
def test_merged_adapters_have_the_logits_of_the_trained_decoder(package: str, run: Any) -> None:
    out = run("lora_decoder.py")
    losses = [float(x) for x in re.findall(r"loss (\d\S*)$", out, re.M)]
    assert losses[-1] < losses[0] - 1
    ((size, difference),) = re.findall(r"^merged: logits up to (\S+), differ by (\S+)$", out, re.M)
    assert float(size) > 1 and float(difference) < 1e-5
    adapters = {name for name in safetensors.numpy.load_file("merged.safetensors") if "lora" in name}
    assert adapters == set()


@pytest.mark.full
def test_gpt2_is_fine_tuned_in_shards(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = load("gpt2_weights.py")["trainer"]
    kernel = trainer.module.h[0].mlp.c_fc.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == (64, 32)
    out = capsys.readouterr().out
    assert re.search(quoted("gpt2_weights.py"), out)
    losses = [float(x) for x in re.findall(r"loss (\S+)$", out, re.M)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.2


@pytest.mark.full
def test_a_killed_training_continues_to_the_same_bits(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    out = run("resume_anywhere.py")
    code, left = re.findall(r"^exit code (\S+), left is (.*)$", out, re.M)[0]
    assert code == "-9" and "step_000000" in left and "step_00000140" not in left
    line = r"^resumed on (\d): (\d+) losses, the largest difference (\S+); weights (\S+)$"
    same, others = (tuple(map(float, result)) for result in re.findall(line, out, re.M))
    assert same == (8, 140, 0, 0) and others[:2] == (4, 140) and max(others[2:]) < 1e-5


@pytest.mark.full
def test_two_processes_train_to_one_loss(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    # On a busy machine a library may say something before it.
    line = r"^process (\d) ended with exit code 0, and said:\n(?:  .*\n)*?  .*?4 of 8 devices, loss (\S+)$"
    said = re.findall(line, run("multiprocess.py"), re.M)
    assert [process for process, _ in said] == ["0", "1"]
    assert said[0][1] == said[1][1]
    assert float(said[0][1]) < 1e-3


@pytest.mark.full
def test_two_processes_end_when_one_fails(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    out = run("multiprocess.py", "--fail")
    assert re.findall(r"^process (\d) ended with exit code (\d+), ", out, re.M) == [("0", "1"), ("1", "1")]
    reason = r"  jaxlit: process 1 on \S+ failed in Fail\.on_train_batch_end .*: ValueError: bad sample 123"
    assert len(re.findall(reason, out)) >= 2


@pytest.mark.full
def test_the_port_of_a_lightning_program_reaches_90_percent(run: Any) -> None:
    out = run("lightning_port.py", "--max_epochs", "4")
    assert float(re.findall(r"^validated +val/accuracy (\S+)$", out, re.M)[0]) > 0.9


def test_beside_the_port_stands_a_whole_program() -> None:
    ours = (EXAMPLES / "lightning_port.py").read_text().split("# isort: off\n")[1]
    theirs = re.sub(r"^.*? # ?(?=\S| {4}|$)", "", ours, flags=re.M)  # what stands to the right, or the line itself
    both = [ast.parse(text) for text in (ours, theirs)]
    names = [[x.name for x in ast.walk(tree) if isinstance(x, (ast.FunctionDef, ast.ClassDef))] for tree in both]
    assert names[0] == names[1] and len(names[0]) == 7
    used = [{x.id for x in ast.walk(tree) if isinstance(x, ast.Name)} for tree in both]
    assert used[0] - used[1] >= {"jl", "nnx", "optax"} and used[1] - used[0] >= {"L", "nn", "torch"}


@pytest.mark.full
def test_the_notebook_runs_and_shows_its_figures(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    done = executed(notebook, tmp_path)
    *_, trained, curves, wrong = (cell.outputs for cell in done.cells if cell.cell_type == "code")
    screen, told = ("".join(x.get("text", "") for x in outputs) for outputs in (trained, wrong))
    assert re.search(quoted("notebook.ipynb"), told)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", screen)  # no line is drawn twice
    best = max(float(x) for x in re.findall(r"val/accuracy (\S+)", screen))
    count, rows, reached = re.findall(r"^(\d+) of (\d+) are read wrongly: accuracy (\S+)$", told, re.M)[0]
    assert rows == "397" and best >= 0.95 and float(reached) == pytest.approx(best, abs=1e-4)
    assert float(reached) == pytest.approx(1 - int(count) / 397, abs=1e-4)
    for outputs in (curves, wrong):
        assert any("image/png" in x.get("data", {}) for x in outputs)


@pytest.mark.full
def test_the_notebook_of_eight_devices_shows_shares_and_equal_losses(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "eight_devices.ipynb", 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    done = executed(notebook, tmp_path, {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"})
    *_, planned, trained, placed, explained = (cell.outputs for cell in done.cells if cell.cell_type == "code")
    text = ["".join(x.get("text", "") for x in outputs) for outputs in (planned, trained, placed, explained)]
    for strategy, parameters in (("ddp", "300 KiB"), ("zero1", "300 KiB"), ("fsdp", "41.0 KiB")):
        assert re.search(rf"^{strategy} +8 +128 +{parameters} ", text[0], re.M)
    assert re.search(quoted("eight_devices.ipynb"), text[1])
    assert float(text[1].split(": ")[1]) < 1e-5
    assert "ddp: a device holds (64, 1024) of (64, 1024)\n" in text[2]
    assert "fsdp: a device holds (64, 128) of (64, 1024)\n" in text[2]
    assert "all-gather" in text[3]
    for outputs in (planned, trained):
        assert any("image/png" in x.get("data", {}) for x in outputs)


@pytest.mark.full
def test_the_plan_of_a_large_decoder_has_its_bytes(called: Any) -> None:
    _, plan = called("plan_70b.py", "--layers", "1", "--devices", "8")
    width, hidden, pairs = 8192, 28672, 8 * 128
    layer = 2 * width * width + 2 * width * pairs + 3 * width * hidden + 2 * width
    parameters = 4 * (layer + 2 * 128256 * width + width)
    ddp, _, fsdp, remat, copies = plan.plans
    assert ddp.bytes["parameters"] == parameters
    assert ddp.bytes["optimizer"] == 2 * parameters + 4  # and a count
    # All but the norms' scales are split.
    assert fsdp.bytes["parameters"] == pytest.approx(parameters / 8, rel=1e-4)
    assert remat.bytes["temporaries"] < fsdp.bytes["temporaries"]
    assert copies.bytes["parameters"] == parameters


LOADERS = ["numpy", "datasets", *needing("torch")]


@pytest.mark.full
@pytest.mark.parametrize("loader", LOADERS)
def test_loaders_of_others_feed_a_fit(loader: str, run: Any) -> None:
    assert accuracy(run("other_loaders.py", "--loader", loader)) >= 0.95


@pytest.mark.full
@pytest.mark.parametrize("loader", LOADERS)
def test_loaders_of_others_draw_each_row_once_in_an_order_of_the_epoch(loader: str) -> None:
    rows = {"x": np.arange(100, dtype=np.float32), "y": np.arange(100, dtype=np.int32)}
    batches = runpy.run_path(str(EXAMPLES / "other_loaders.py"))["Batches"](rows, loader)

    def drawn(epoch: int) -> np.ndarray:
        batches.set_epoch(epoch)
        y = [np.asarray(batch["y"]) for batch in batches]
        assert [len(part) for part in y] == [64, 36] and len(batches) == 2
        return np.concatenate(y)

    first, second, again = drawn(0), drawn(1), drawn(0)
    np.testing.assert_array_equal(np.sort(first), rows["y"])
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, second)


@pytest.mark.full
def test_a_student_learns_its_teachers_outputs_by_their_divergence() -> None:
    example = runpy.run_path(str(EXAMPLES / "distill.py"))
    teacher = example["Digits"](32, rngs=nnx.Rngs(0))
    student = example["Student"](8, teacher, rngs=nnx.Rngs(1))
    batch = {"x": np.random.default_rng(0).uniform(size=(16, 64)).astype(np.float32)}

    def shares(net: Any) -> np.ndarray:
        outputs = np.exp(np.asarray(net(batch["x"]), np.float64) / example["TEMPERATURE"])
        return outputs / outputs.sum(-1, keepdims=True)

    p, q = shares(teacher.net), shares(student.net)
    expected = example["TEMPERATURE"] ** 2 * (p * np.log(p / q)).sum(-1).mean()
    before = params_of(teacher)
    state, step = jl.compile_step(student, batch=batch, strategy="single")
    state, outputs = step(state, batch)
    assert float(outputs["loss"]) == pytest.approx(expected, rel=1e-4)
    after = params_of(step.module(state))
    for name, x in before.items():
        np.testing.assert_array_equal(after[name.replace("net", "teacher")], x)
    first = next(iter(before))  # the same name in the student
    assert not np.array_equal(after[first], params_of(student)[first])


@pytest.mark.full
def test_a_student_without_labels_comes_near_its_teacher(run: Any) -> None:
    out = run("distill.py", "--strategy", "fsdp", "--devices", "8")
    found = re.findall(r"^(\w+): (\S+) parameters, accuracy (\S+)$", out, re.M)
    assert [(name, size) for name, size, _ in found] == [("teacher", "19,210"), ("student", "910")]
    teacher, student = (float(reached) for *_, reached in found)
    assert teacher > 0.96 and student > 0.92


@pytest.mark.full
def test_strategies_have_equal_losses_and_hold_other_shares(called: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, plan = called("compare_strategies.py", "--steps", "5")
    out = capsys.readouterr().out
    assert re.search(quoted("compare_strategies.py"), out)
    lines = re.findall(r"^(\w+) +loss (\S+) -> (\S+), at most (\S+) from single$", out, re.M)
    assert [name for name, *_ in lines] == ["single", "ddp", "zero1", "fsdp", "hsdp", "shard_map", "pmap"]
    assert float(lines[0][2]) < float(lines[0][1])
    np.testing.assert_allclose([float(last) for *_, last, _ in lines], float(lines[0][2]), rtol=1e-5)
    assert max(float(apart) for *_, apart in lines) < 1e-5
    held = {row.strategy: row.bytes["parameters"] + row.bytes["optimizer"] for row in plan.plans}
    assert held["fsdp"] < held["hsdp"] < held["zero1"] < held["ddp"] == held["pmap"]


@pytest.mark.full
def test_optuna_finds_a_trial_that_can_be_repeated(called: Any) -> None:
    example, study = called("optuna_sweep.py", "--trials", "4")
    states = [trial.state.name for trial in study.trials]
    assert set(states) == {"COMPLETE", "PRUNED"}
    assert study.best_value > 0.95
    assert example["train"](**study.best_params) == study.best_value
    for trial in study.trials:
        assert len(trial.intermediate_values) == 5 or trial.state.name == "PRUNED"


@pytest.mark.full
def test_a_callback_shows_the_digits_that_are_misread(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("custom_callback.py", "--epochs", "2")
    trainer, mistakes = example["trainer"], example["mistakes"]
    wrong = np.flatnonzero(np.asarray(trainer.module.net(mistakes.x)).argmax(-1) != mistakes.y)
    out = capsys.readouterr().out
    assert re.search(quoted("custom_callback.py"), out)
    counts = [int(x) for x in re.findall(r"^(\d+) of 384 misread", out, re.M)]
    assert len(counts) == 2 and counts[1] == len(wrong) and mistakes.fewest == min(counts)
    pixels = np.asarray(Image.open(trainer.run_dir / "media" / "val" / "mistakes" / "43.png"), np.float64)
    assert pixels.shape == (64, 8 * 64)
    shown = pixels[::8, ::8].reshape(8, 8, 8).swapaxes(0, 1).reshape(8, 64) / 255  # image, rows and columns
    np.testing.assert_allclose(shown, mistakes.x[wrong[:8]], atol=1 / 255)
    kept = json.loads(json.dumps(mistakes.state_dict()))
    (again := example["Mistakes"](mistakes.x, mistakes.y)).load_state_dict(kept)
    assert again.fewest == mistakes.fewest
