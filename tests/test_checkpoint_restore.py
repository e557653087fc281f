"""A checkpoint on other devices, under other strategies, and what does not fit it."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import CheckpointError, JaxlitError
from jaxlit.leaf_names import is_key, leaf_name

X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


class Model(jl.TrainModule):
    """A small network, with statistics and keys beside its parameters."""

    def __init__(self, tx: Any = None, width: int = 16, dtype: Any = None, more: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.last = nnx.Linear(width, 1, rngs=rngs)
        if more:
            self.more = nnx.Linear(1, 1, rngs=rngs)
        self.noise = nnx.Rngs(noise=1)
        self._tx = tx or (lambda: optax.adam(1e-2, eps=1e-3))

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.norm(self.first(x))))

    def training_step(self, batch: Any) -> Any:
        loss = jnp.mean((self(batch["x"]) - 1.0) ** 2)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return self._tx()


def loader() -> jl.ArrayLoader:
    return jl.ArrayLoader({"x": X}, 8, shuffle=True)


def trainer_of(
    strategy: Any = "single", *, root: str | None = None, callbacks: Any = (), **arguments: Any
) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"enable_checkpointing": False, "max_epochs": 1, **quiet, **arguments}
    return jl.Trainer(strategy=strategy, default_root_dir=root, callbacks=list(callbacks), **given)


def saved(path: str, strategy: Any = "single", steps: int = 3, module: Any = None, **arguments: Any) -> jl.Trainer:
    """Train a few optimizer steps and save."""
    trainer = trainer_of(strategy, max_steps=steps, **{"max_epochs": 2, **arguments})
    trainer.fit(module or Model(), loader())
    trainer.save_checkpoint(path)
    return trainer


def numbers(trainer: jl.Trainer, parts: tuple[str, ...] = ("params", "frozen", "model_state", "opt_state")) -> Any:
    state = trainer.state
    plain = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x)  # noqa: E731
    return {
        f"{part}.{leaf_name(path)}": plain(x)
        for part in parts
        for path, x in jax.tree_util.tree_leaves_with_path(getattr(state, part))
    }


class Look(jl.Callback):
    """Keep the state as it is right after a restore, and how it lies on the devices."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.numbers, self.step = numbers(trainer), trainer.global_step
        leaves = jax.tree.leaves((trainer.state.params, trainer.state.opt_state))
        self.shardings = [x.sharding for x in leaves]


def look(path: str, strategy: Any = "single", module: Any = None, fit: Any = None, **arguments: Any) -> Look:
    """Restore, and train no more."""
    seen = Look()
    trainer = trainer_of(strategy, callbacks=[seen], **{"max_epochs": 2, "max_steps": 3, **arguments})
    trainer.fit(module or Model(), loader(), ckpt_path=path, **(fit or {}))
    return seen


# Other devices and strategies ------------------------------------------------------------------------

EIGHT = [(name, 8) for name in ("ddp", "fsdp", "pmap", "shard_map")]
PAIRS = [
    *[(was, now) for was in EIGHT for now in EIGHT if was != now],
    *[(("fsdp", 8), ("fsdp", 4)), (("fsdp", 4), ("single", 1)), (("single", 1), ("fsdp", 8))],
    *[
        (("ddp", 8), ("ddp", 4)),
        (("pmap", 8), ("pmap", 4)),
        (("pmap", 4), ("single", 1)),
        (("shard_map", 2), ("pmap", 8)),
    ],
    *[(("pmap", 8), ("simulate:8", 8)), (("simulate:8", 8), ("fsdp", 8)), (("zero1", 8), ("simulate:8", 8))],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


def devices(strategy: str, count: int) -> dict[str, Any]:
    return {} if strategy.startswith("simulate") else {"devices": count}


@pytest.mark.parametrize(("was", "now"), PAIRS, ids=lambda x: f"{x[0]}-{x[1]}")
def test_every_number_is_the_same_under_another_strategy(was: Any, now: Any, folder: Path) -> None:
    path = folder / f"{was[0].replace(':', '_')}-{was[1]}"
    if not path.exists():
        trainer = saved(str(path), was[0], **devices(*was))
        np.savez(f"{path}.npz", **numbers(trainer))
    expected = dict(np.load(f"{path}.npz"))
    assert len(expected) > 12 and any(np.any(x) for k, x in expected.items() if k.startswith("opt_state"))
    seen = look(str(path), now[0], **devices(*now))
    assert seen.step == 3 and seen.numbers.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(seen.numbers[name], x, err_msg=name)
    # As a training lies that has begun under the new strategy.
    fresh = Look()
    trainer_of(now[0], callbacks=[fresh], max_steps=0, **devices(*now)).fit(Model(), loader())
    assert seen.shardings == fresh.shardings


@pytest.mark.parametrize(
    ("was", "now"),
    [("pmap", "fsdp"), ("fsdp", "pmap"), ("shard_map", "single"), ("single", "shard_map"), ("simulate:8", "pmap")],
)
def test_a_half_full_window_goes_on_under_another_strategy(was: str, now: str) -> None:
    """Its next optimizer step is the one that the strategy that was left would have taken."""

    class Plain(Model):
        def __call__(self, x: Any) -> Any:  # no statistics of each replica's rows
            return self.last(nnx.relu(self.first(x)))

    class Cut(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:  # the second batch of three of the second window
                trainer.save_checkpoint("cut")

    arguments = {"accumulate_grad_batches": 3, "max_steps": 2}
    left = trainer_of(was, callbacks=[Cut()], **arguments)
    left.fit(Plain(), loader())
    taken = trainer_of(now, **arguments)
    taken.fit(Plain(), loader(), ckpt_path="cut")
    assert left.global_step == taken.global_step == 2
    found = numbers(taken, ("params", "opt_state"))
    for name, x in numbers(left, ("params", "opt_state")).items():
        np.testing.assert_allclose(found[name], x, rtol=1e-6, atol=1e-6, err_msg=name)


def test_a_half_full_window_is_refused_without_accumulation() -> None:
    class Cut(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint(f"after_{batch_idx + 1}")

    trainer_of(callbacks=[Cut()], accumulate_grad_batches=3, max_steps=1).fit(Model(), loader())
    with pytest.raises(
        CheckpointError, match="2 of 3 batches in its accumulation window.*accumulate_grad_batches=1.*Resume with 3"
    ):
        look("after_2")
    assert look("after_3").step == 1


# What does not fit -----------------------------------------------------------------------------------


def table(error: Any) -> list[list[str]]:
    """The cells of the table in a message, without its head."""
    lines = [line for line in str(error.value).splitlines() if line.startswith("  ")]
    return [[cell for cell in line.strip().split("  ") if cell] for line in lines[1:]]


@pytest.fixture
def adam(folder: Path) -> str:
    path = folder / "adam"
    if not path.exists():
        saved(str(path))
    return str(path)


def make(tx: Any, **arguments: Any) -> Any:
    return partial(Model, lambda: tx, **arguments)


def test_another_width_is_refused_with_the_leaves_that_differ(adam: str) -> None:
    with pytest.raises(CheckpointError, match="does not fit Model") as refused:
        look(adam, module=Model(width=32))
    found = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in table(refused)}
    assert found["module.first.kernel"] == ["float32[8, 16]", "float32[8, 32]"]
    assert found["module.last.kernel"] == ["float32[16, 1]", "float32[32, 1]"]
    assert "module.last.bias" not in found


def test_a_layer_more_or_less_is_refused_by_name(adam: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        look(adam, module=Model(more=True))
    found = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in table(refused)}
    assert found["module.more.bias"] == ["nothing", "float32[1]"]
    saved("more", module=Model(more=True))
    with pytest.raises(CheckpointError) as refused:
        look("more")
    found = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in table(refused)}
    assert found["module.more.kernel"] == ["float32[1, 1]", "nothing"]


@pytest.mark.parametrize(
    ("tx", "was", "now"),
    [
        (lambda: optax.adabelief(1e-2), "ScaleByAdamState", "ScaleByBeliefState"),
        (lambda: optax.sgd(1e-2), "ScaleByAdamState", "EmptyState"),
        (lambda: optax.sgd(1e-2, momentum=0.9), "ScaleByAdamState", "TraceState"),
        (lambda: optax.adamw(optax.constant_schedule(1e-2)), "ScaleByAdamState", "ScaleByScheduleState"),
    ],
)
def test_another_optimizer_is_refused_also_where_its_arrays_would_fit(tx: Any, was: str, now: str, adam: str) -> None:
    with pytest.raises(CheckpointError, match=r"reset_optimizer=True") as refused:
        look(adam, module=Model(tx))
    (row,) = [row for row in table(refused) if row[0] == "the optimizer"]
    assert was in row[1] and now in row[2]


def test_another_precision_is_refused_by_dtype(adam: str) -> None:
    with pytest.raises(CheckpointError, match="does not fit Model") as refused:
        look(adam, precision="bf16-true")
    found = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in table(refused)}
    assert found["module.first.kernel"] == ["float32[8, 16]", "bfloat16[8, 16]"]


def test_a_reset_optimizer_keeps_the_weights_and_begins_anew(adam: str) -> None:
    expected = look(adam).numbers
    seen = look(adam, module=Model(lambda: optax.sgd(1e-2, momentum=0.9)), fit={"reset_optimizer": True}).numbers
    for name, x in expected.items():
        if not name.startswith("opt_state"):
            np.testing.assert_array_equal(seen[name], x, err_msg=name)
    assert all(not np.any(x) for name, x in seen.items() if name.startswith("opt_state"))
    same = look(adam, fit={"reset_optimizer": True}).numbers
    assert all(not np.any(x) for name, x in same.items() if name.startswith("opt_state"))


def test_without_strict_what_fits_is_taken_and_the_rest_is_told(adam: str, caplog: pytest.LogCaptureFixture) -> None:
    expected, fresh = look(adam).numbers, Model(more=True)
    caplog.clear()
    seen = look(adam, module=Model(more=True), fit={"strict": False, "reset_optimizer": True}).numbers
    for name, x in expected.items():
        if not name.startswith("opt_state"):
            np.testing.assert_array_equal(seen[name], x, err_msg=name)
    np.testing.assert_array_equal(seen["params.more.kernel"], np.asarray(fresh.more.kernel[...]))
    (record,) = [r.getMessage() for r in caplog.records if "strict=False" in r.getMessage()]
    told = [line.split()[0] for line in record.splitlines() if line.startswith("  module")]
    assert told == ["module.more.bias", "module.more.kernel"]


def test_what_does_not_fit_leaves_the_caller_with_its_module(adam: str) -> None:
    module = Model(width=32)
    before = np.asarray(module.first.kernel[...])
    with pytest.raises(JaxlitError):
        look(adam, module=module)
    np.testing.assert_array_equal(np.asarray(module.first.kernel[...]), before)
    trainer_of(max_steps=1).fit(module, loader())  # and it can be trained
