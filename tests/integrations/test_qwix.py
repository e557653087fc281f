"""QLoRA by qwix, adapters on quantized weights: trained as in a plain loop, saved alone, resumed to the same bits."""

import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from kit.pages import needing
from kit.refusals import warnings_of
from kit.trainers import fit, splitting, thinned

import jaxlit as jl

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 16)).astype(np.float32)
DATA = {"x": X, "y": X[:, 0]}
pytestmark = [
    pytest.mark.parametrize("package", needing("qwix")),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # qwix calls what flax has deprecated
]
CASES = [(base, strategy) for base in (None, "int8", "nf4") for strategy in ("single", "ddp", "fsdp")]


class Net(jl.TrainModule):
    def __init__(self, out: int, *, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, out, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(x)))

    def training_step(self, batch: Any) -> jax.Array:
        return ((self(batch["x"])[:, 0] - batch["y"]) ** 2).mean()

    def configure_optimizers(self) -> jl.Optimizer:
        return jl.Optimizer(optax.adam(1e-2), wrt=nnx.LoRAParam)


def adapted(package: str, base: str | None, out: int = 8) -> Net:
    qwix: Any = importlib.import_module(package)
    rule = qwix.LoraRule(module_path=".*", rank=4, alpha=8.0, weight_qtype=base)
    return qwix.apply_lora_to_model(Net(out, rngs=nnx.Rngs(0)), qwix.LoraProvider([rule]), X[:2], rngs=nnx.Rngs(1))


def adapters(module: nnx.Module) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(module, nnx.LoRAParam))
    return {".".join(map(str, path)): np.array(x[...]) for path, x in state}


def by_hand(module: Net, steps: int) -> dict[str, np.ndarray]:
    """Return the adapters of a loop of nnx and optax."""
    graph, lora, rest = nnx.split(module, nnx.LoRAParam, ...)
    tx = optax.adam(1e-2)

    @jax.jit
    def step(lora: Any, opt_state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda x: nnx.merge(graph, x, rest).training_step(batch))(lora)
        updates, opt_state = tx.update(grads, opt_state, lora)
        return optax.apply_updates(lora, updates), opt_state

    opt_state = tx.init(lora)
    for i in range(steps):
        rows = slice(i % 4 * 16, i % 4 * 16 + 16)
        lora, opt_state = step(lora, opt_state, {name: x[rows] for name, x in DATA.items()})
    return {".".join(map(str, path)): np.array(x[...]) for path, x in nnx.to_flat_state(lora)}


def train(module: Net, root: str, epochs: int, strategy: str) -> jl.Trainer:
    saves = jl.callbacks.ModelCheckpoint(trained_only=True)
    given = {"max_epochs": epochs, "default_root_dir": root, "strategy": splitting(strategy), "resume": "auto"}
    return fit(module, jl.ArrayLoader(DATA, 16), None, saves, enable_checkpointing=True, **given)


@pytest.mark.parametrize(("base", "strategy"), thinned(CASES, ("nf4", "fsdp")))
def test_adapters_train_as_by_hand_and_resume_to_the_same_bits(package: str, base: str | None, strategy: str) -> None:
    expected = by_hand(adapted(package, base), 16)
    at_once = adapters(train(adapted(package, base), "at_once", 4, strategy).module)
    train(adapted(package, base), "resumed", 2, strategy)
    trainer = train(adapted(package, base), "resumed", 4, strategy)
    resumed = adapters(trainer.module)
    assert trainer.global_step == 16
    for name, x in expected.items():
        np.testing.assert_allclose(at_once[name], x, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(resumed[name], at_once[name])
    (checkpoint,) = Path("resumed/checkpoints").glob("step_*")
    saved = {
        name.partition("@")[0]
        for path in checkpoint.rglob("*.safetensors")
        for name in safetensors.numpy.load_file(path)
    }
    assert {name for name in saved if name.startswith("module.")} == {f"module.{name}" for name in expected}


@pytest.mark.parametrize("base", ["nf4", None])
def test_qwix_takes_no_adapter_whose_rank_is_the_width_of_its_layer(
    package: str, base: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It looks for quantized weights by their shape, which is that of the adapter too; without jaxlit as well."""
    start = adapters(adapted(package, base, out=4))
    alone = by_hand(adapted(package, base, out=4), 4)
    trained = adapters(fit(adapted(package, base, out=4), jl.ArrayLoader(DATA, 16), max_epochs=1).module)
    for name, x in start.items():
        is_lost = base == "nf4" and name.startswith("last")
        assert np.array_equal(alone[name], x) == is_lost
        np.testing.assert_allclose(trained[name], alone[name], rtol=0, atol=1e-6)
    warnings = [text for text in warnings_of(caplog) if "does not depend on 2 of 4 parameters" in text]
    assert len(warnings) == (base == "nf4")
    assert all("last.kernel_lora_a, last.kernel_lora_b" in text for text in warnings)
