"""Models of public packages of NNX, trained by the Trainer and by a plain loop: python tests/sweeps/packages.py.

It makes a virtual environment beside this checkout for each package, since their pins contradict each other, trains
the package's model there for 20 steps under each strategy, kills a training and resumes it, and prints a table.
"""

import argparse
import functools
import importlib
import json
import logging.handlers
import os
import signal
import subprocess
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
BOUNDS = {"single": 1e-6, "ddp": 1e-5, "fsdp": 1e-5, "shard_map": 1e-5}  # relative, of the losses of all steps
ARTIFEX = "avitai-artifex==0.1.3 calibrax==0.1.1"
LIGHT = "beartype blackjax dacite distrax jaxtyping psutil scipy tomli-w"  # what artifex and its kin import
MAMBA = {"vocab_size": 32, "hidden_size": 16, "state_size": 8, "chunk_size": 8, "num_hidden_layers": 2, "head_dim": 8}
LLAMA = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "dtype": "float32"}
LLAMA |= {"attention_head": 2, "kv_head": 1, "head_dim": 8, "max_position_embedding": 32}
OWN_DRAWS: dict[str, Any] = {"differs": ("shard_map",), "reason": "each replica draws its own random numbers"}


class Package(NamedTuple):
    """A model of a package."""

    requirement: str  # as pip takes it, with packages that are only needed by it after it
    module: str  # that is imported
    make: Callable[[Any], Any]  # of the imported module: returns the model
    loss: Callable[[Any, Any], jax.Array]  # of the model and a batch
    batch: Callable[[np.random.Generator], Any]
    optimizer: Callable[[Any, Any], optax.GradientTransformation] = lambda module, model: optax.adam(1e-2)
    python: str = "3.11"
    imports: str = ""  # is installed in place of all its dependencies, which are large or contradict those of jaxlit
    differs: tuple[str, ...] = ()  # under these strategies the model itself gives other numbers
    reason: str = ""  # why


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


def flow(bijx: Any) -> Any:
    parts = [bijx.Scaling(jnp.full(4, 1.5)), bijx.Shift(jnp.full(4, 0.1)), bijx.SoftPlus()]
    return bijx.Transformed(bijx.IndependentNormal((4,), rngs=nnx.Rngs(0)), bijx.Chain(*parts))


def autoencoder(configs: Any, quantized: bool = False) -> Any:
    networks = importlib.import_module("artifex.generative_models.core.configuration.network_configs")
    same = {"name": "n", "hidden_dims": (16,), "activation": "relu", "latent_dim": 4}
    encoder = networks.EncoderConfig(input_shape=(8,), **same)
    decoder = networks.DecoderConfig(output_shape=(8,), **same)
    parts = {"encoder": encoder, "decoder": decoder, "encoder_type": "dense", "name": "v"}
    rngs = nnx.Rngs(params=0, sample=1, dropout=2)
    if quantized:
        models = importlib.import_module("artifex.generative_models.models.vae.vq_vae")
        return models.VQVAE(configs.VQVAEConfig(num_embeddings=16, embedding_dim=4, **parts), rngs=rngs)
    models = importlib.import_module("artifex.generative_models.models.vae.base")
    return models.VAE(configs.VAEConfig(**parts), rngs=rngs)


def coupling_flow(models: Any) -> Any:
    configs = importlib.import_module("artifex.generative_models.core.configuration.flow_config")
    network = configs.CouplingNetworkConfig(name="c", hidden_dims=(16,), activation="relu")
    config = configs.RealNVPConfig(name="f", coupling_network=network, input_dim=8, num_coupling_layers=2)
    return models.RealNVP(config, rngs=nnx.Rngs(params=0, sample=1, dropout=2))


def uniform(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rng.uniform(size=(16, 8)).astype(np.float32)}


def tokens(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"ids": rng.integers(0, 32, (8, 16)).astype(np.int32)}


def labelled(model: Any, batch: Any) -> jax.Array:
    return model(batch["ids"], labels=batch["ids"])["loss"]


def next_token(logits: jax.Array, ids: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()


def hypernetwork(synecdoche: Any) -> Any:
    net = layers()
    hyper = synecdoche.LowRank(nnx.state(net, nnx.Param), rank=2, rngs=nnx.Rngs(1))
    hyper.apply = synecdoche.functional(net)
    return hyper


def augmented(model: Any, batch: Any) -> jax.Array:
    elements = importlib.import_module("datarax.core.element_batch")
    changed = model.augment(elements.Batch.from_parts({"x": batch["x"]}, {}))
    return jnp.mean((model(changed["x"]) - batch["y"]) ** 2)


def measured(model: Any, batch: Any) -> jax.Array:
    predictions = model(batch["x"])
    model.seen.update(predictions, batch["y"])
    return jnp.mean((predictions - batch["y"]) ** 2)


def elbo(model: Any, batch: Any) -> jax.Array:
    """Return the negative bound of a variational autoencoder with an encoder `a` and a decoder `b`, by row."""
    numpyro, contrib = (importlib.import_module(name) for name in ("numpyro", "numpyro.contrib.module"))
    normal = numpyro.distributions.Normal
    num_rows = len(batch["x"])

    def guide() -> None:
        with numpyro.plate("rows", num_rows):
            numpyro.sample("z", normal(contrib.nnx_module("a", model.a)(batch["x"]), 1).to_event(1))

    def generative() -> None:
        with numpyro.plate("rows", num_rows):
            z = numpyro.sample("z", normal(jnp.zeros(16), 1).to_event(1))
            numpyro.sample("y", normal(contrib.nnx_module("b", model.b)(z), 1).to_event(1), obs=batch["y"])

    return numpyro.infer.Trace_ELBO().loss(model.rngs(), {}, generative, guide) / num_rows


def actor_critic(model: Any, batch: Any) -> jax.Array:
    output = model(model.initialize_state(len(batch["x"])), batch["x"]).output
    advantages = batch["y"][:, 0]
    return jnp.mean((output.value_estimates - advantages) ** 2) - jnp.mean(output.loglikelihoods * advantages)


def hyperbolic(hyperbolix: Any) -> Any:
    manifolds, curvature, linear = (
        importlib.import_module(f"hyperbolix.{name}") for name in ("manifolds", "utils.curvature", "nn_layers")
    )
    ball = manifolds.Poincare()
    return layers(head=linear.HypLinearPoincare(ball, 4, 4, rngs=nnx.Rngs(1)), c=curvature.LearnableCurvature())


def on_a_ball(model: Any, batch: Any) -> jax.Array:
    c, ball = model.c(), model.head.manifold
    points = jax.vmap(ball.expmap_0, (0, None))(0.1 * model(batch["x"]), c)
    targets = jax.vmap(ball.expmap_0, (0, None))(0.1 * batch["y"], c)
    return jnp.mean(jax.vmap(ball.dist, (0, 0, None))(model.head(points, c), targets, c) ** 2)


def vision_with_state(canvit: Any) -> Any:
    backbone = importlib.import_module("canvit_core.backbone")

    class Small(canvit.CanViTConfig):
        backbone_spec = backbone.ViTSpec(embed_dim=16, num_heads=2, num_blocks=2)

    config = Small(canvas_num_heads=2, canvas_head_dim=8, num_canvas_registers=2, num_backbone_registers=1)
    return canvit.CanViTForImageClassification(canvit_config=config, n_classes=4, rngs=nnx.Rngs(0))


def glimpsed(model: Any, batch: Any) -> jax.Array:
    """Return the loss after two glimpses of an image."""
    canvit = importlib.import_module("canvit_nnx")
    num_rows = len(batch["x"])
    state = model.init_state(batch_size=num_rows, canvas_grid_size=4)
    viewpoint = canvit.Viewpoint.full_scene(batch_size=num_rows)
    for _ in range(2):
        logits, state = model(glimpse=batch["x"], state=state, viewpoint=viewpoint)
    return jnp.mean((logits - batch["y"]) ** 2)


PACKAGES = {
    "metrax": Package("google-metrax==0.2.4", "metrax.nnx", lambda m: layers(seen=m.Precision()), fit_line, pair),
    "qwix": Package(
        "qwix==0.1.8",
        "qwix",
        quantized,
        fit_line,
        pair,
        differs=("ddp", "fsdp", "shard_map"),
        reason="int8 is scaled by the largest entry, and what is rounded differs with the order of a sum",
    ),
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
        lambda m: m.Mamba2ForCausalLM(m.Mamba2Config(**MAMBA), rngs=nnx.Rngs(0)),
        labelled,
        tokens,
    ),
    "mamba3": Package(
        "mamba3-jax==1.0.1",
        "mamba3_jax",
        lambda m: m.Mamba3ForCausalLM(m.Mamba3Config(**MAMBA), rngs=nnx.Rngs(0)),
        labelled,
        tokens,
    ),
    "bijx": Package(
        "bijx==1.3.2",
        "bijx",
        flow,
        lambda model, batch: -model.log_density(batch["x"]).mean(),
        lambda rng: {"x": np.abs(rows(rng, 16, 4)) + 0.5},
    ),
    "artifex": Package(
        ARTIFEX,
        "artifex.generative_models.core.configuration.vae_config",
        autoencoder,
        lambda model, batch: model.loss_fn(batch["x"], model(batch["x"]))["total_loss"],
        uniform,
        imports=LIGHT,
        **OWN_DRAWS,
    ),
    "artifex RealNVP": Package(
        ARTIFEX,
        "artifex.generative_models.models.flow.real_nvp",
        coupling_flow,
        lambda model, batch: -model.log_prob(batch["x"]).mean(),
        uniform,
        imports=LIGHT,
    ),
    "opifex": Package(
        f"opifex==0.2.0 {ARTIFEX}",
        "opifex.neural.operators.fno.base",
        lambda m: m.FourierNeuralOperator(1, 1, hidden_channels=8, modes=4, num_layers=2, rngs=nnx.Rngs(0)),
        fit_line,
        lambda rng: {"x": rows(rng, 8, 1, 16, 16), "y": rows(rng, 8, 1, 16, 16)},
        imports=LIGHT,
    ),
    "canvit": Package(
        "canvit-nnx==0.2.0",
        "canvit_nnx",
        vision_with_state,
        glimpsed,
        lambda rng: {"x": rows(rng, 8, 32, 32, 3), "y": rows(rng, 8, 4)},
        python="3.13",
    ),
    "heal-swin": Package(
        "heal-swin-nnx==0.2.0",
        "heal_swin_nnx",
        lambda m: m.HealSwin(
            m.HealSwinParams(8, 1, 1, embed_dim=8, depths=(1, 1), num_heads=(1, 2), dtype="float32"), rngs=nnx.Rngs(0)
        ),
        fit_line,
        lambda rng: {"x": rows(rng, 8, 768, 1), "y": rows(rng, 8, 768, 1)},
        python="3.13",
        **OWN_DRAWS,
    ),
    "faustax": Package(
        "faustax==0.0.1",
        "faustax.modules",
        lambda m: m.Freeverb(sample_rate=44100, rngs=nnx.Rngs(0)),
        lambda model, batch: jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2),
        lambda rng: {"x": rows(rng, 8, 1, 64), "y": rows(rng, 8, 1, 64)},
    ),
    "synecdoche": Package(
        "synecdoche==0.2.0",
        "synecdoche",
        hypernetwork,
        lambda model, batch: jnp.mean((model.apply(model, batch["x"]) - batch["y"]) ** 2),
        pair,
    ),
    "datarax": Package(
        "datarax==0.1.4",
        "datarax.operators.modality.image.brightness_operator",
        lambda m: layers(
            augment=m.BrightnessOperator(
                m.BrightnessOperatorConfig(field_key="x", clip_range=None, stochastic=True, stream_name="augment"),
                rngs=nnx.Rngs(0, augment=1),
            )
        ),
        augmented,
        pair,
        imports=LIGHT,
        **OWN_DRAWS,
    ),
    "diffbio": Package(
        f"diffbio==0.1.0 opifex==0.2.0 datarax==0.1.4 {ARTIFEX}",
        "diffbio.operators.quality_filter",
        lambda m: m.DifferentiableQualityFilter(m.QualityFilterConfig(20.0), rngs=nnx.Rngs(0)),
        lambda model, batch: jnp.mean((jax.vmap(lambda x: model.apply(x, {}, None)[0]["sequence"])(batch) - 1) ** 2),
        lambda rng: {"sequence": rows(rng, 16, 6, 4), "quality_scores": 20 + 3 * rows(rng, 16, 6)},
        imports=f"{LIGHT} jax-md rdkit e3nn-jax",
    ),
    "substrax": Package(
        "substrax==0.1.22",
        "substrax.optim",
        lambda m: layers(),
        fit_line,
        pair,
        optimizer=lambda m, model: m.create_transformation(
            model,
            m.OptimizerConfig(
                optimizer_type="adamw",
                learning_rate=1e-2,
                weight_decay=0.1,
                weight_decay_filter=m.EXCLUDE_BIAS_AND_NORM_SCALE,
            ),
        ),
        python="3.13",
    ),
    "flax-metrics": Package(
        "flax-metrics==0.4.0", "flax_metrics", lambda m: layers(seen=m.MeanSquaredError()), measured, pair
    ),
    "dantinox": Package(
        "dantinox==0.4.14",
        "dantinox.core.model",
        lambda m: m.Transformer(
            m.ModelConfig(dim=16, n_heads=2, num_blocks=2, vocab_size=32, max_context=16), rngs=nnx.Rngs(0)
        ),
        lambda model, batch: next_token(model(batch["ids"]).logits, batch["ids"]),
        tokens,
        imports="tqdm pyyaml",
    ),
    "numpyro": Package("numpyro==0.22.0", "numpyro", lambda m: layers(rngs=nnx.Rngs(1)), elbo, pair, **OWN_DRAWS),
    "gpjax": Package(
        "gpjax==1.0.0",
        "gpjax.kernels",
        lambda m: layers(kernel=nnx.data(m.RBF())),
        lambda model, batch: 1 - jnp.mean(jax.vmap(model.kernel)(model(batch["x"]), batch["y"])),
        pair,
    ),
    "attnax": Package(
        "attnax==0.2.0",
        "attnax",
        lambda m: m.TransformerDecoder(
            nnx.Rngs(0), m.TransformerConfig(vocab_size=32, d_model=16, num_heads=2, num_layers=2, d_ff=32, max_len=16)
        ),
        lambda model, batch: next_token(model.token_embed.embed.attend(model(batch["ids"])), batch["ids"]),
        tokens,
        **OWN_DRAWS,
    ),
    "nnx-ppo": Package(
        "nnx-ppo==0.3.0",
        "nnx_ppo.networks.factories",
        lambda m: m.make_mlp_actor_critic(8, 2, [16], [16], nnx.Rngs(0)),
        actor_critic,
        pair,
        **OWN_DRAWS,
    ),
    "jaxkan": Package(
        "jaxkan==0.3.7",
        "jaxkan.models.KAN",
        lambda m: m.KAN([8, 6, 4], "spline", {"k": 3, "G": 3}, seed=0),
        fit_line,
        pair,
    ),
    "hyperbolix": Package("hyperbolix==1.4.0", "hyperbolix", hyperbolic, on_a_ball, pair, python="3.13"),
    "zlynx": Package(
        "zlynx==0.1.11",
        "zlynx.model",
        lambda m: m.LlamaLanguageModel(m.LlamaConfig(**LLAMA), rngs=nnx.Rngs(0)),
        lambda model, batch: model(batch["ids"], labels=batch["ids"]).loss,
        tokens,
        python="3.13",
    ),
    "lynnx": Package(
        "lynnx==0.0.1.post1",
        "lynnx.utils.nnx_modules",
        lambda m: layers(norm=m.RunningMeanVarNorm(jax.ShapeDtypeStruct((8,), jnp.float32))),
        lambda model, batch: jnp.mean((model(model.norm(batch["x"])) - batch["y"]) ** 2),
        pair,
        python="3.13",
        imports="chex",
    ),
}
_QUANTIZED: dict[str, Any] = {"make": functools.partial(autoencoder, quantized=True), "differs": (), "reason": ""}
PACKAGES["artifex VQVAE"] = PACKAGES["artifex"]._replace(**_QUANTIZED)
QUICK = ("metrax", "qwix", "e3nn", "jraphx", "bijx")  # in the extra `interop`


class Lit(jl.TrainModule):
    """The model of a package, as a user wraps it."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self.model = package.make(importlib.import_module(package.module))

    def training_step(self, batch: Any) -> jax.Array:
        loss = self.package.loss(self.model, batch)
        self.log("l", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return self.package.optimizer(importlib.import_module(self.package.module), self.model)


def by_hand(package: Package, batches: list[Any]) -> list[float]:
    """Return the losses of a plain loop of nnx and optax."""
    module = importlib.import_module(package.module)
    model = package.make(module)
    tx = package.optimizer(module, model)
    graphdef, params, rest = nnx.split(model, nnx.Param, ..., graph=True)
    opt_state = tx.init(params)

    @jax.jit
    def step(params: Any, rest: Any, opt_state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            merged = nnx.merge(graphdef, params, rest, copy=True)
            loss = package.loss(merged, batch)
            left: Any = nnx.split(merged, nnx.Param, ..., graph=True)[2]
            values = dict(nnx.to_flat_state(left))  # among them those that a step leaves where there were none
            return loss, nnx.from_flat_state((path, values[path]) for path, _ in nnx.to_flat_state(rest))

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
    """Return the largest relative difference of the losses by strategy, or an error, and which strategies warned."""
    package, warned = PACKAGES[name], []
    batches = batches_of(package)
    expected, found = np.array(by_hand(package, batches)), {}
    for strategy in STRATEGIES:
        heard = logging.handlers.BufferingHandler(1000)
        logging.getLogger("jaxlit").addHandler(heard)
        try:
            losses = np.array(trained(package, batches, strategy=strategy))
            found[strategy] = float(np.max(np.abs(losses - expected) / np.abs(expected)))
        except Exception as error:
            found[strategy] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        logging.getLogger("jaxlit").removeHandler(heard)
        if any("may differ from one device" in record.getMessage() for record in heard.buffer):
            warned.append(strategy)
    return found | {"warned": " ".join(warned)}


def is_right(package: Package, strategy: str, result: Any) -> bool:
    """Return whether a result is a difference in the strategy's bound, or one that the package is the reason of."""
    return isinstance(result, float) and (strategy in package.differs or result <= BOUNDS[strategy])


def python_of(version: str) -> str:
    """Return a Python of a version; names on the PATH may be shims of pyenv for one that is not switched on."""
    pyenv = sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    return pyenv[-1] if pyenv else f"python{version}"


def install(package: Package, folder: str) -> str:
    """Make a virtual environment for a package, and return its Python."""
    subprocess.run([python_of(package.python), "-m", "venv", folder], check=True)
    python = f"{folder}/bin/python"
    pip, wanted = [python, "-m", "pip", "install", "--quiet", "--no-compile"], package.requirement.split()
    if package.imports:
        subprocess.run([*pip, "--no-deps", *wanted], check=True)
        wanted = package.imports.split()
    subprocess.run([*pip, str(ROOT), *wanted], check=True)
    return python


def killed_and_resumed(name: str, python: str, environment: dict[str, str]) -> bool:
    """Return whether a training that was killed at step 10 ends with the loss of one that was not."""

    def run(*arguments: str, **more: str) -> str:
        command = [python, __file__, "--train", name, *arguments]
        done = subprocess.run(command, env=environment | more, capture_output=True, text=True)
        if done.returncode not in (0, -signal.SIGKILL):
            return f"{command} {done.stderr[-2000:]}"  # equal to no other
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
    print("model", "package", *STRATEGIES, "warned", "resumed", "reason", sep="\t")
    wrong = []
    for name in arguments.names:
        package = PACKAGES[name]
        with tempfile.TemporaryDirectory() as folder:
            python = install(package, folder)
            environment |= {"JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
            command = [python, __file__, "--measure", name]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            found = json.loads(done.stdout.strip().rpartition("\n")[2]) if done.returncode == 0 else {}
            results = {x: found.get(x, done.stderr[-200:]) for x in (*STRATEGIES, "warned")}
            same = killed_and_resumed(name, python, environment)
        cells = [f"{x:.1e}" if isinstance(x, float) else x for x in results.values()]
        print(name, package.requirement.partition(" ")[0], *cells, same, package.reason, sep="\t", flush=True)
        if results["warned"] or not same or not all(is_right(package, x, results[x]) for x in STRATEGIES):
            wrong.append(name)
    if wrong:
        raise SystemExit(f"refused, warned of, not resumed or other numbers without a reason: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
