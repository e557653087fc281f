"""Checkpoints without the arrays that no step changes: what they leave out, and which modules they fit."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import random
from kit.by_hand import assert_same
from kit.checkpoints import keep_all
from kit.checkpoints import state_of as state_at
from kit.journal import hooks
from kit.processes import launch, say
from kit.refusals import refuses, warnings_of
from kit.trainers import BARE, fit, splitting, thinned

import jaxlit as jl
from jaxlit.callbacks import EMA, ModelCheckpoint
from jaxlit.checkpoints.files import read
from jaxlit.checkpoints.module_state import hash_of, load_variables
from jaxlit.errors import CheckpointError
from jaxlit.texts import is_key
from jaxlit.variables import arrays_of

PATH = "run/checkpoints/step_00000003"
BASE = {f"module.{name}" for name in ("lora.kernel", "lora.bias", "norm.scale", "norm.bias", "codes", "table")}


class Adapted(jl.TrainModule):
    """LoRA on a base of the seed `base`, quantized in part, with statistics and dropout that steps write."""

    def __init__(self, base: int = 0, *, rngs: nnx.Rngs) -> None:
        self.lora = nnx.LoRALinear(3, 16, lora_rank=2, rngs=rngs)
        self.lora.kernel.set_value(jax.random.normal(jax.random.key(base), (3, 16)))
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.codes = nnx.Variable(jnp.arange(16, dtype=jnp.int8))
        self.slow = nnx.Param(jnp.zeros(2))  # a teacher: frozen, and written by steps
        self.table = nnx.data(jnp.linspace(0.1, 1.0, 16))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.norm(self.lora(x))) @ jax.lax.stop_gradient(self.codes[...] * self.table)[:, None] / 100

    def training_step(self, batch: Any) -> jax.Array:
        self.slow[...] = (self.slow[...] + jax.lax.stop_gradient(self.lora.lora.lora_b[0, :2])) / 2
        return ((self(batch["x"]) - batch["y"]) ** 2).mean()

    def validation_step(self, batch: Any) -> None:
        self.log("val", ((self(batch["x"]) - batch["y"]) ** 2).mean())

    def configure_optimizers(self) -> jl.Optimizer:
        return jl.Optimizer(optax.adam(0.1), wrt=nnx.LoRAParam)


def state_of(module: Any) -> dict[str, np.ndarray]:
    return {x.name: np.asarray(jax.random.key_data(x.value) if is_key(x.value) else x.value) for x in arrays_of(module)}


def adapted(base: int = 0) -> Adapted:
    return Adapted(base, rngs=nnx.Rngs(0))


def train(epochs: int = 1, *callbacks: jl.Callback, module: Any = None, **given: Any) -> jl.Trainer:
    callbacks = callbacks or (ModelCheckpoint(trained_only=True),)
    given = {"default_root_dir": "run", "max_epochs": epochs} | given
    return fit(module or adapted(), random(3), random(1), *callbacks, **given)


def in_two() -> None:
    """Train, resume and meet another base in two processes, each of which has a half of the base."""
    (rows,) = random(1, rows=24)
    given = BARE | {"strategy": splitting("fsdp"), "resume": "auto", "default_root_dir": "run"}
    for epochs, base in ((1, 0), (2, 0), (3, 1)):
        given |= {"max_epochs": epochs, "enable_checkpointing": True}
        fit(adapted(base), jl.ArrayLoader(rows, 8), None, ModelCheckpoint(trained_only=True), **given)
        say("epochs", epochs)


def saved(path: str | Path = PATH, key: str = "arrays") -> set[str]:
    return {name for name, *_ in state_at(path).get(key, ())}


def bytes_at(path: str | Path) -> int:
    return sum(x.stat().st_size for x in Path(path).rglob("*") if x.is_file())


def test_it_leaves_out_what_no_step_changes_and_nothing_else() -> None:
    train()
    train(1, ModelCheckpoint(), default_root_dir="full")
    full = saved(PATH.replace("run", "full"))
    assert saved(key="left_out") == BASE
    assert saved() == full - BASE
    assert {
        "module.slow",
        "module.norm.mean",
        "module.norm.var",
        "module.drop.rngs.count",
        "module.drop.rngs.key",
    } <= saved()
    assert not saved(PATH.replace("run", "full"), "left_out")


def test_a_large_base_costs_no_bytes() -> None:
    class Wide(Adapted):
        def __init__(self) -> None:
            super().__init__(rngs=nnx.Rngs(0))
            self.embed = nnx.Embed(4096, 64, rngs=nnx.Rngs(1))  # a MiB

    for name, trained_only in (("small", True), ("full", False)):
        train(1, ModelCheckpoint(trained_only=trained_only), module=Wide(), default_root_dir=name)
    small, full = (bytes_at(PATH.replace("run", name)) for name in ("small", "full"))
    assert full > 2**20
    assert small < full - 2**20


@pytest.mark.parametrize(
    ("before", "after"),
    thinned(
        [("single", "single"), ("fsdp", "fsdp"), ("fsdp", "single"), ("single", "fsdp"), ("pmap", "single")],
        ("single", "single"),
        ("fsdp", "fsdp"),
    ),
)
def test_a_resume_is_bit_equal_to_the_uninterrupted_run(before: str, after: str) -> None:
    train(1, strategy=splitting(before))
    if before == after:
        expected = state_of(train(2, default_root_dir="at_once", strategy=splitting(before)).module)
    else:  # the order of additions is another: compared with a resume from everything
        train(1, ModelCheckpoint(), default_root_dir="full", strategy=splitting(before))
        whole = train(2, ModelCheckpoint(), default_root_dir="full", resume="auto", strategy=splitting(after))
        expected = state_of(whole.module)
    trainer = train(2, strategy=splitting(after), resume="auto")
    assert trainer.global_step == 6
    assert_same(state_of(trainer.module), expected, rtol=0, atol=0)
    assert saved("run/checkpoints/step_00000006", "left_out") == BASE


LOADS: dict[str, Callable[[], Any]] = {
    "resume": lambda: train(2, module=adapted(1), resume="auto"),
    "init_from": lambda: train(1, module=adapted(1), init_from="run", default_root_dir="new"),
    "module": lambda: Adapted.load_from_checkpoint("run", base=1),
    "evaluation": lambda: jl.Trainer(logger=False).validate(adapted(1), random(1), ckpt_path="run"),
    "sharded": lambda: train(2, module=adapted(1), resume="auto", strategy=splitting("fsdp")),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_another_base_is_refused_by_the_names_of_its_arrays(load: Callable[[], Any]) -> None:
    train()
    error = refuses(CheckpointError, load, r"trained_only=True .*lora\.kernel +sha256 \w{12} +sha256 \w{12}")
    assert "lora.bias" not in str(error) and "codes" not in str(error)


def test_a_refused_checkpoint_changes_nothing() -> None:
    train()
    module = adapted(1)
    refuses(CheckpointError, lambda: train(2, module=module, resume="auto"), "lora.kernel")
    assert_same(state_of(module), state_of(adapted(1)), rtol=0, atol=0)


def test_without_strict_what_was_trained_goes_onto_another_base(caplog: pytest.LogCaptureFixture) -> None:
    trained = state_of(train().module)
    other = state_of(Adapted.load_from_checkpoint("run", base=1, strict=False))
    assert any("lora.kernel" in text for text in warnings_of(caplog))
    np.testing.assert_array_equal(other["lora.lora.lora_a"], trained["lora.lora.lora_a"])
    np.testing.assert_array_equal(other["lora.kernel"], state_of(adapted(1))["lora.kernel"])
    assert train(2, module=adapted(1), resume="auto", strict=False).global_step == 6


def test_modules_evaluations_and_new_trainings_take_it() -> None:
    trainer = train(1, ModelCheckpoint(trained_only=True, save_weights_only=True))
    expected = state_of(trainer.module)
    assert saved(key="left_out") == BASE
    assert {name.split(".")[0] for name in saved()} == {"module"}
    assert_same(state_of(Adapted.load_from_checkpoint("run", rngs=nnx.Rngs(0))), expected, rtol=0, atol=0)
    (now,) = trainer.validate(dataloaders=random(1))
    (then,) = jl.Trainer(logger=False).validate(adapted(), random(1), ckpt_path="run")
    assert then == now
    start: list[Any] = []
    look = hooks(on_fit_start=lambda trainer, module: start.append(state_of(module)))
    train(1, look, module=adapted(), init_from="run", default_root_dir="new")
    np.testing.assert_array_equal(start[0]["lora.lora.lora_b"], expected["lora.lora.lora_b"])


def test_precision_of_a_module_does_not_make_its_base_another() -> None:
    train(precision="bf16-true")
    loaded = state_of(Adapted.load_from_checkpoint("run", rngs=nnx.Rngs(0)))
    np.testing.assert_array_equal(loaded["lora.kernel"], state_of(adapted())["lora.kernel"])
    refuses(CheckpointError, lambda: Adapted.load_from_checkpoint("run", base=1), "lora.kernel")


def test_a_module_of_shapes_is_refused_where_its_base_is_missing() -> None:
    train()
    module = adapted()
    module.lora.kernel = nnx.eval_shape(lambda: nnx.Param(jnp.zeros((3, 16))))
    load = lambda: load_variables(module, read(Path(PATH)), strict=True)  # noqa: E731
    refuses(CheckpointError, load, r"lora\.kernel +sha256 \w{12} +no values")


def test_a_base_that_a_hook_has_written_is_saved_from_then_on() -> None:
    def write(trainer: jl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.norm.scale[...] = jnp.full(16, 2.0)

    make = lambda: [hooks(on_train_epoch_start=write), keep_all(trained_only=True)]  # noqa: E731
    expected = state_of(train(4, *make(), default_root_dir="at_once").module)
    train(2, *make())
    assert saved(key="left_out") == BASE
    assert "module.norm.scale" in saved("run/checkpoints/step_00000006")
    trainer = train(3, *make(), resume="auto")
    trainer = train(4, *make(), resume="auto")
    assert_same(state_of(trainer.module), expected, rtol=0, atol=0)


def test_a_resume_from_everything_leaves_the_same_out_again() -> None:
    train(1, ModelCheckpoint())
    train(2, resume="auto")
    assert saved("run/checkpoints/step_00000006", "left_out") == BASE


def test_a_resume_from_everything_saves_a_base_that_is_not_the_modules() -> None:
    expected = state_of(train(3, ModelCheckpoint(), default_root_dir="at_once").module)
    train(1, ModelCheckpoint())
    train(2, module=adapted(1), resume="auto")
    assert saved("run/checkpoints/step_00000006", "left_out") == BASE - {"module.lora.kernel"}
    trainer = train(3, module=adapted(2), resume="auto")
    assert_same(state_of(trainer.module), expected, rtol=0, atol=0)


def test_a_restarted_job_takes_its_base_from_init_from() -> None:
    train(1, ModelCheckpoint(), module=adapted(7), default_root_dir="base")
    given = {"init_from": "base", "resume": "auto"}
    expected = state_of(train(2, default_root_dir="at_once", **given).module)
    train(1, **given)
    assert saved(key="left_out") == BASE
    trainer = train(2, **given)
    assert_same(state_of(trainer.module), expected, rtol=0, atol=0)
    refuses(CheckpointError, lambda: train(3, resume="auto"), "lora.kernel")


@pytest.mark.parametrize("hook", [True, False])
def test_a_rollback_equals_one_to_a_full_checkpoint(hook: bool) -> None:
    def write(trainer: jl.Trainer, module: Any) -> None:
        if hook:
            module.norm.scale[...] = jnp.full(16, 2.0)

    data = random(6)
    data[3]["x"][:] = np.nan
    final = []
    for trained_only in (True, False):
        every = ModelCheckpoint(trained_only=trained_only, every_n_train_steps=2)
        given = {"nan_policy": "rollback", "default_root_dir": f"run_{trained_only}"}
        trainer = fit(adapted(), data, None, every, hooks(on_train_epoch_start=write), **given)
        final.append(state_of(trainer.module))
    assert trainer.global_step == 4  # 2 were undone
    assert_same(*final, rtol=0, atol=0)


def test_an_average_of_what_was_trained_is_saved_and_loaded() -> None:
    trainer = train(1, EMA(0.5), ModelCheckpoint(trained_only=True, save_weights_only=True, every_n_train_steps=3))
    expected = state_of(trainer.module)
    assert_same(state_of(Adapted.load_from_checkpoint("run", rngs=nnx.Rngs(0))), expected, rtol=0, atol=0)


def test_a_call_saves_what_was_trained_too() -> None:
    made = adapted()
    trainer = train(1, ModelCheckpoint(), module=made)
    trainer.save_checkpoint("one", trained_only=True)
    assert saved("one", "left_out") == BASE
    assert_same(
        state_of(Adapted.load_from_checkpoint("one", rngs=nnx.Rngs(0))), state_of(trainer.module), rtol=0, atol=0
    )
    made.lora.kernel[...] = jnp.ones((3, 16))  # after the fit: another base
    trainer.save_checkpoint("two", trained_only=True)
    assert "module.lora.kernel" in saved("two")


def test_the_base_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Any] = []
    monkeypatch.setattr("jaxlit.engine.state.hash_of", lambda x: hashed.append(x.shape) or hash_of(x))
    train(1, keep_all(trained_only=True, every_n_train_steps=1))
    assert hashed.count((3, 16)) == 1


@pytest.mark.full
def test_two_processes_hash_what_one_process_does(tmp_path: Path) -> None:
    train()
    processes = launch(in_two, tmp_path / "two")
    for process in processes:
        assert process.said == {"epochs": 2}
        assert re.search(r"lora\.kernel +sha256 \w{12} +sha256 \w{12}\n", process.errors)
        assert "lora.bias" not in process.errors
    hashes = [state_at(path)["left_out"] for path in (PATH, tmp_path / "two" / "run/checkpoints/step_00000006")]
    assert hashes[0] == hashes[1]
    assert train(3, resume="auto", default_root_dir=tmp_path / "two/run").global_step == 9
