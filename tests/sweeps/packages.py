"""Models of public packages of NNX, trained by the Trainer and by a plain loop: python tests/sweeps/packages.py.

It makes a virtual environment beside this checkout for each package, since their pins contradict each other, trains
the package's model there for 20 steps under each strategy, kills a training and resumes it, and prints a table.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl

ROOT, STEPS = Path(__file__).parents[2], 20
STRATEGIES = ("single", "ddp", "fsdp", "shard_map")


class Package(NamedTuple):
    """A model of a package."""

    requirement: str  # as pip takes it
    module: str  # that is imported
    make: Callable[[Any], Any]  # of the imported module: returns the model
    loss: Callable[[Any, Any], jax.Array]  # of the model and a batch
    batch: Callable[[np.random.Generator], Any]


def rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def fit_line(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def pair(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rows(rng, 16, 8), "y": rows(rng, 16, 4)}


def layers(**extra: Any) -> nnx.Module:
    """Return two layers, and what else the module shall hold."""

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = (nnx.Linear(*shape, rngs=nnx.Rngs(0)) for shape in ((8, 16), (16, 4)))
            for name, value in extra.items():
                setattr(self, name, value)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.b(nnx.relu(self.a(x)))

    return Net()


def quantized(qwix: Any) -> Any:
    rule = qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
    return qwix.quantize_model(layers(), qwix.QtProvider([rule]), np.ones((2, 8), np.float32))


def language_model(mamba: Any) -> Any:
    config = mamba.Mamba2Config(
        vocab_size=32, hidden_size=16, state_size=8, head_dim=8, chunk_size=8, num_hidden_layers=2
    )
    return mamba.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))


def flow(bijx: Any) -> Any:
    parts = [bijx.Scaling(jnp.full(4, 1.5)), bijx.Shift(jnp.full(4, 0.1)), bijx.SoftPlus()]
    return bijx.Transformed(bijx.IndependentNormal((4,), rngs=nnx.Rngs(0)), bijx.Chain(*parts))


def autoencoder(configs: Any) -> Any:
    vae = importlib.import_module("artifex.generative_models.models.vae.base")
    networks = importlib.import_module("artifex.generative_models.core.configuration.network_configs")
    same = {"name": "n", "hidden_dims": (16,), "activation": "relu", "latent_dim": 4}
    encoder, decoder = (
        networks.EncoderConfig(input_shape=(8,), **same),
        networks.DecoderConfig(output_shape=(8,), **same),
    )
    config = configs.VAEConfig(encoder=encoder, decoder=decoder, encoder_type="dense", name="v")
    return vae.VAE(config, rngs=nnx.Rngs(params=0, sample=1, dropout=2))


PACKAGES = {
    "metrax": Package("google-metrax==0.2.4", "metrax.nnx", lambda m: layers(seen=m.Precision()), fit_line, pair),
    "qwix": Package("qwix==0.1.8", "qwix", quantized, fit_line, pair),
    "e3nn": Package(
        "e3nn-jax==0.21.0",
        "e3nn_jax",
        lambda m: layers(kinds=nnx.data(m.IrrepsArray("4x0e", jnp.ones(4)))),
        lambda model, batch: jnp.mean((model(batch["x"]) * model.kinds.array - batch["y"]) ** 2),
        pair,
    ),
    "jraphx": Package(
        "jraphx==0.1.0",
        "jraphx.nn.conv",
        lambda m: m.GCNConv(5, 3, rngs=nnx.Rngs(0)),
        lambda model, batch: jnp.mean((jax.vmap(model)(batch["x"], batch["edges"]) - batch["y"]) ** 2),
        lambda rng: {"x": rows(rng, 8, 6, 5), "edges": rng.integers(0, 6, (8, 2, 12)), "y": rows(rng, 8, 6, 3)},
    ),
    "mamba2": Package(
        "mamba2-jax==1.1.2",
        "mamba2_jax",
        language_model,
        lambda model, batch: model(batch["ids"], labels=batch["ids"])["loss"],
        lambda rng: {"ids": rng.integers(0, 32, (8, 16)).astype(np.int32)},
    ),
    "bijx": Package(
        "bijx==1.3.2",
        "bijx",
        flow,
        lambda model, batch: -model.log_density(batch["x"]).mean(),
        lambda rng: {"x": np.abs(rows(rng, 16, 4)) + 0.5},
    ),
    "artifex": Package(
        "avitai-artifex==0.1.3",
        "artifex.generative_models.core.configuration.vae_config",
        autoencoder,
        lambda model, batch: model.loss_fn(batch["x"], model(batch["x"]))["total_loss"],
        lambda rng: {"x": rng.uniform(size=(16, 8)).astype(np.float32)},
    ),
}
QUICK = ("metrax", "qwix", "e3nn", "jraphx", "bijx")  # in the extra `interop`


class Lit(jl.TrainModule):
    """The model of a package, as a user wraps it."""

    def __init__(self, package: Package) -> None:
        self.model, self.package = package.make(importlib.import_module(package.module)), package

    def training_step(self, batch: Any) -> jax.Array:
        loss = self.package.loss(self.model, batch)
        self.log("l", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


def by_hand(package: Package, batches: list[Any]) -> list[float]:
    """Return the losses of a plain loop of nnx and optax."""
    model = package.make(importlib.import_module(package.module))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    tx = optax.adam(1e-2)
    opt_state = tx.init(params)

    @jax.jit
    def step(params: Any, rest: Any, opt_state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            merged = nnx.merge(graphdef, params, rest, copy=True)
            loss = package.loss(merged, batch)
            return loss, nnx.split(merged, nnx.Param, ...)[2]

        (loss, left), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), left, opt_state, loss

    losses = []
    for batch in batches:
        params, rest, opt_state, loss = step(params, rest, opt_state, batch)
        losses.append(float(loss))
    return losses


def batches_of(package: Package, steps: int = STEPS) -> list[Any]:
    rng = np.random.default_rng(0)
    return [package.batch(rng) for _ in range(steps)]


def trained(package: Package, batches: list[Any], **arguments: Any) -> list[float]:
    """Return the losses of a Trainer, and end the process at once where the environment says so."""
    die_at = int(os.environ.get("DIE_AT", "-1"))

    class Dies(jl.Callback):
        def on_safe_point(self, trainer: Any, module: Any, epoch_over: bool, training_over: bool) -> None:
            if trainer.global_step == die_at:
                trainer.save_checkpoint("run/checkpoints/step_00000010")
                os.kill(os.getpid(), signal.SIGKILL)

    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing"), False)
    trainer = jl.Trainer(max_epochs=1, log_every_n_steps=1, callbacks=Dies(), **quiet, **arguments)
    trainer.fit(Lit(package), batches)
    return trainer.history["l"][1].tolist()


def measure(name: str) -> dict[str, Any]:
    """Return the largest relative difference of the losses by strategy, or an error's text."""
    package = PACKAGES[name]
    batches = batches_of(package)
    expected, found = np.array(by_hand(package, batches)), {}
    for strategy in STRATEGIES:
        try:
            losses = np.array(trained(package, batches, strategy=strategy))
            found[strategy] = float(np.max(np.abs(losses - expected) / np.abs(expected)))
        except Exception as error:
            found[strategy] = f"{type(error).__name__}: {error}"
    return found


def killed_and_resumed(name: str, python: str, environment: dict[str, str]) -> bool:
    """Return whether a training that was killed at step 10 ends with the loss of one that was not."""

    def run(*arguments: str, **more: str) -> str:
        command = [python, __file__, "--train", name, *arguments]
        done = subprocess.run(command, env=environment | more, capture_output=True, text=True)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr[-2000:]
        return done.stdout.strip().rpartition("\n")[2]

    with tempfile.TemporaryDirectory() as folder:
        whole = run(f"{folder}/whole")
        run(f"{folder}/run", DIE_AT="10")
        return run(f"{folder}/run") == whole


def main() -> None:
    """Print a table with a row for each package; the same file measures one inside of its environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(PACKAGES))
    parser.add_argument("--measure", metavar="NAME")
    parser.add_argument("--train", nargs=2, metavar=("NAME", "FOLDER"))
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    if arguments.train:
        name, folder = arguments.train
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
        package = PACKAGES[name]
        print(trained(package, batches_of(package), strategy="single", default_root_dir="run", resume="auto")[-1])
        return
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    print("package", *STRATEGIES, "resumed", sep="\t")
    for name in arguments.names:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            python = f"{folder}/bin/python"
            wanted = [str(ROOT), PACKAGES[name].requirement]
            subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
            done = subprocess.run(
                [python, __file__, "--measure", name], env=environment, capture_output=True, text=True
            )
            found = json.loads(done.stdout.strip().rpartition("\n")[2]) if done.returncode == 0 else {}
            cells = [found.get(strategy, done.stderr[-200:]) for strategy in STRATEGIES]
            same = killed_and_resumed(name, python, environment)
            print(name, *(f"{x:.1e}" if isinstance(x, float) else x for x in cells), same, sep="\t", flush=True)


if __name__ == "__main__":
    main()
