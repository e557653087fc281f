"""A module from a checkpoint alone: its constructor's arguments, and every kind of Variable."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import CheckpointError
from jaxlit.leaf_names import is_key

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


class Table(nnx.Variable):
    """A kind of Variable of a user's own."""


class Net(jl.TrainModule):
    """Layers in a list, tied weights, statistics, keys and a user's own Variable."""

    def __init__(self, width: int = 4, rates: list[float] | None = None, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.tied = self.layers[0].kernel
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.table = Table(jnp.zeros((), jnp.int32))
        self.half = nnx.Param(jnp.ones(3, jnp.bfloat16))
        self.key = nnx.Variable(jax.random.key(7, impl="rbg"))

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.norm(x @ self.tied[...])) + self.half[...].sum().astype(x.dtype)

    def training_step(self, batch: Any) -> Any:
        self.table[...] = self.table[...] + 1
        return jnp.mean(self(batch["x"]) ** 2)

    def test_step(self, batch: Any) -> None:
        self.log("mean", jnp.mean(self(batch["x"])))

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


def loader(width: int = 4) -> jl.ArrayLoader:
    return jl.ArrayLoader({"x": np.resize(X, (8, width))}, 4)


def train(module: Any, root: str = "run", epochs: int = 2, **arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"strategy": "single", "enable_checkpointing": True, **quiet, **arguments}
    trainer = jl.Trainer(default_root_dir=root, max_epochs=epochs, **given)
    width = module.hparams.get("width", 4) if isinstance(module, jl.TrainModule) else 4
    trainer.fit(module, loader(width))
    return trainer


def numbers(module: Any) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(module))
    values = {"/".join(map(str, path)): variable.get_value() for path, variable in state}
    return {k: np.asarray(jax.random.key_data(v) if is_key(v) else v) for k, v in values.items()}


def assert_same(module: Any, other: Any) -> None:
    found, expected = numbers(module), numbers(other)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype, name
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_every_variable_comes_back_with_the_arguments_of_the_constructor() -> None:
    module = Net(6, [0.1, 0.2], rngs=nnx.Rngs(3))
    untrained = numbers(module)
    train(module)
    loaded = Net.load_from_checkpoint("run")
    assert_same(loaded, module)
    assert loaded.hparams == module.hparams and loaded.hparams["width"] == 6 and loaded.hparams["rates"] == [0.1, 0.2]
    assert loaded.tied is loaded.layers[0].kernel
    assert int(loaded.table[...]) == 4
    assert jax.random.key_impl(loaded.key.get_value()) == jax.random.key_impl(module.key.get_value())
    assert np.any(untrained["layers/0/kernel"] != numbers(loaded)["layers/0/kernel"])
    # It is a module like any other: it draws the same keys and takes the same steps.
    train(module, "on", 1)
    train(loaded, "there", 1)
    assert_same(loaded, module)


@pytest.mark.parametrize("make", [str, Path, lambda run: str(Path(run, "checkpoints")), lambda run: checkpoint(run)])
def test_a_run_its_folder_and_a_checkpoint_can_be_named(make: Any) -> None:
    module = Net(rngs=nnx.Rngs(0))
    train(module)
    assert_same(Net.load_from_checkpoint(make("run")), module)


def checkpoint(run: str) -> Path:
    (path,) = Path(run, "checkpoints").glob("step_*")
    return path


def test_what_is_no_checkpoint_is_refused() -> None:
    with pytest.raises(CheckpointError, match="Net.load_from_checkpoint: 'none' is no checkpoint"):
        Net.load_from_checkpoint("none")
    Path("empty").mkdir()
    with pytest.raises(CheckpointError, match="'empty' is no checkpoint and no folder that holds one"):
        Net.load_from_checkpoint("empty")


def test_an_override_wins_and_the_weights_must_still_fit() -> None:
    train(Net(rates=[0.5], rngs=nnx.Rngs(0)))
    assert Net.load_from_checkpoint("run", rates=[0.7]).hparams["rates"] == [0.7]
    with pytest.raises(
        CheckpointError, match=r"does not fit Net:(?s:.*)module\.layers\[0\]\.kernel +float32\[4, 4\] +float32\[5, 5\]"
    ):
        Net.load_from_checkpoint("run", width=5)
    found = Net.load_from_checkpoint("run", width=5, strict=False)
    np.testing.assert_array_equal(np.asarray(found.half[...]), np.asarray(Net.load_from_checkpoint("run").half[...]))
    assert found.layers[0].kernel.shape == (5, 5)


def test_the_callers_own_rngs_are_used() -> None:
    train(Net(rngs=nnx.Rngs(0)))
    found = Net.load_from_checkpoint("run", width=5, strict=False, rngs=nnx.Rngs(9))
    np.testing.assert_array_equal(
        np.asarray(found.layers[0].kernel[...]), np.asarray(Net(5, rngs=nnx.Rngs(9)).layers[0].kernel[...])
    )


def test_a_hyperparameter_that_the_class_does_not_have_is_refused_by_name() -> None:
    class Other(Net):
        def __init__(self, widht: int = 4, *, rngs: nnx.Rngs) -> None:
            super().__init__(widht, rngs=rngs)

    train(Net(rngs=nnx.Rngs(0)))
    with pytest.raises(
        CheckpointError, match="hyperparameter 'width', which Other does not have. Did you mean 'widht'"
    ):
        Other.load_from_checkpoint("run")


class Keyed(Net):
    """A module that is given a secret, and words that only look like one."""

    def __init__(self, api_key: str | None = None, tokenizer: str = "bpe", *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs)


def test_a_secret_is_not_kept_and_asked_for() -> None:
    train(Keyed("hunter2-very-secret", rngs=nnx.Rngs(0)), logger=True)
    for path in Path("run").rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path
    with pytest.raises(CheckpointError, match=r"does not keep 'api_key'.*load_from_checkpoint\(path, api_key=\.\.\.\)"):
        Keyed.load_from_checkpoint("run", tokenizer="bpe")
    assert Keyed.load_from_checkpoint("run", api_key="new", tokenizer="bpe").hparams["api_key"] == "new"


def test_a_secret_that_was_not_given_is_not_asked_for() -> None:
    train(Keyed(rngs=nnx.Rngs(0)))
    assert Keyed.load_from_checkpoint("run", tokenizer="bpe").hparams["api_key"] is None


def test_a_tokenizer_is_no_secret() -> None:
    train(Keyed("hunter2", "bpe", rngs=nnx.Rngs(0)))
    assert Keyed.load_from_checkpoint("run", api_key="new").hparams["tokenizer"] == "bpe"


class Wrapped(Net):
    """A module with an argument that is no JSON value."""

    def __init__(self, activation: Any, *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs)
        self.activation = activation


def test_an_argument_that_is_no_json_value_is_asked_for() -> None:
    module = Wrapped(nnx.relu, rngs=nnx.Rngs(0))
    train(module)
    with pytest.raises(
        CheckpointError, match="Wrapped cannot be built from .*activation.*only arguments that are JSON"
    ):
        Wrapped.load_from_checkpoint("run")
    assert_same(Wrapped.load_from_checkpoint("run", activation=nnx.relu), module)


def test_an_unknown_override_is_refused() -> None:
    train(Net(rngs=nnx.Rngs(0)))
    with pytest.raises((CheckpointError, TypeError), match="widht"):
        Net.load_from_checkpoint("run", widht=3)


@pytest.mark.parametrize("strategy", ["fsdp", "pmap"])
def test_what_several_devices_wrote_can_be_loaded_on_one(strategy: str) -> None:
    module = Net(rngs=nnx.Rngs(0))
    trainer = jl.Trainer(
        strategy=strategy,
        default_root_dir="run",
        max_epochs=1,
        logger=False,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, jl.ArrayLoader({"x": np.resize(X, (16, 4))}, 8))
    loaded = Net.load_from_checkpoint("run")
    assert_same(loaded, module)
    assert all(len(x.devices()) == 1 for x in jax.tree.leaves(nnx.state(loaded)))


def test_a_lazy_module_takes_the_weights_of_a_checkpoint() -> None:
    trainer = train(jl.lazy(Net, 4))
    expected = trainer.test(Net.load_from_checkpoint("run"), loader())
    other = jl.Trainer(
        strategy="single", logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir="test"
    )
    assert other.test(jl.lazy(Net, 4), loader(), ckpt_path="run") == expected
    # The weights of the Trainer's own are not those of the checkpoint, which is older.
    trainer.save_checkpoint("early")
    trainer.max_epochs = 4
    trainer.fit(jl.lazy(Net, 4), loader(), ckpt_path="last")
    assert trainer.test(ckpt_path="early", dataloaders=loader()) == expected
    assert trainer.test(dataloaders=loader()) != expected
