"""A checkpoint on other devices, under other strategies, and what does not fit it."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import random
from kit.by_hand import params_of
from kit.inside import is_key, leaf_name, leaves_of
from kit.journal import at_batch, hooks
from kit.modules import Linear, Net
from kit.trainers import fit, thinned

import jaxlit as jl
from jaxlit.errors import CheckpointError


def net(cls: type[Net] = Net, tx: Any = None, **arguments: Any) -> Net:
    """Return layers with batch statistics and dropout's keys, trained by adam or another optimizer."""
    made = type("Net", (cls,), {"configure_optimizers": lambda self: tx or optax.adam(1e-2, eps=1e-3)})
    return made(rate=0.1, rngs=nnx.Rngs(0), **arguments)


class More(Net):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.more = nnx.Linear(1, 1, rngs=arguments["rngs"])


def numbers(trainer: jl.Trainer) -> dict[str, np.ndarray]:
    plain = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x)  # noqa: E731
    return {
        f"{part}.{leaf_name(path)}": plain(x)
        for part in ("params", "frozen", "model_state", "opt_state")
        for path, x in jax.tree_util.tree_leaves_with_path(getattr(trainer.state, part))
    }


class Look(jl.Callback):
    """Keep the state as it is right after a restore, and how it lies on the devices."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.numbers, self.step, self.steps = numbers(trainer), trainer.global_step, list[int]()
        self.shardings = [x.sharding for x in jax.tree.leaves((trainer.state.params, trainer.state.opt_state))]
        self.bookkeeping = len(leaves_of(trainer))


def look(path: Any, module: Any = None, **arguments: Any) -> Look:
    """Restore, and train no more."""
    seen = Look()
    trainer = fit(module or net(), random(3), None, seen, **({"max_steps": 2, "ckpt_path": path} | arguments))
    assert arguments.get("max_steps") == 0 or trainer.global_step == 2
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


def saved(folder: Path, strategy: str = "single", devices: int | None = None) -> tuple[Path, dict[str, np.ndarray]]:
    """Train two optimizer steps and save, once for each strategy; returns the path and the numbers."""
    path = folder / f"{strategy.replace(':', '_')}-{devices}"
    if not path.exists():
        given = {"strategy": strategy, "default_root_dir": folder / f"{path}-run"}
        trainer = fit(net(), random(3), max_steps=2, **given | ({} if devices is None else {"devices": devices}))
        trainer.save_checkpoint(path)
        np.savez(f"{path}.npz", **numbers(trainer))
    return path, dict(np.load(f"{path}.npz"))


PAIRS = [
    (("ddp", 8), ("fsdp", 8)),
    (("fsdp", 8), ("pmap", 8)),
    (("shard_map", 8), ("single", 1)),
    (("fsdp", 8), ("fsdp", 4)),
]
MORE = [
    (("pmap", 8), ("pmap", 4)),
    (("single", 1), ("fsdp", 8)),
    (("pmap", 8), ("replicas:8", None)),
    (("replicas:8", None), ("fsdp", 8)),
    *[(("ddp", 8), now) for now in (("ddp", 4), ("replicas:8", None))],
    *[(("pmap", 8), ("shard_map", 8)), (("fsdp", 8), ("ddp", 8)), (("shard_map", 8), ("fsdp", 8))],
    *[(("zero1", 8), ("replicas:8", None)), (("shard_map", 2), ("pmap", 8)), (("hsdp", 8), ("zero2", 8))],
]


@pytest.mark.parametrize(
    ("was", "now"),
    thinned(PAIRS + MORE, PAIRS[1], full=[PAIRS[0], *PAIRS[2:], *MORE[:2]]),
    ids=lambda x: f"{x[0]}-{x[1]}",
)
def test_every_number_is_the_same_under_another_strategy(was: Any, now: Any, folder: Path) -> None:
    path, expected = saved(folder, *was)
    assert len(expected) > 12 and any(np.any(x) for k, x in expected.items() if k.startswith("opt_state"))
    given = {"strategy": now[0]} | ({} if now[1] is None else {"devices": now[1]})
    seen = look(path, **given)
    assert seen.step == 2 and seen.numbers.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(seen.numbers[name], x, err_msg=name)
    # As a training lies that has begun under the new strategy.
    assert seen.shardings == look(None, max_steps=0, **given).shardings


WINDOWS = [("pmap", "fsdp"), ("single", "shard_map"), ("fsdp", "pmap"), ("replicas:8", "pmap")]


@pytest.mark.parametrize(("was", "now"), thinned(WINDOWS, WINDOWS[0], full=WINDOWS[1:3]))
def test_a_half_full_window_goes_on_under_another_strategy(was: str, now: str) -> None:
    """Its next optimizer step is the one that the strategy that was left would have taken."""
    cut = at_batch(4, lambda t, m: t.save_checkpoint("cut"))  # the second batch of three of the second window
    given: Any = {"accumulate_grad_batches": 3}
    left = fit(Linear(), random(6), None, cut, strategy=was, **given)
    taken = fit(Linear(), random(6), strategy=now, ckpt_path="cut", **given)
    assert left.global_step == taken.global_step == 2
    for name, x in params_of(left.module).items():
        np.testing.assert_allclose(params_of(taken.module)[name], x, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("tx", "now"),
    [
        (optax.adabelief(1e-2), "ScaleByBeliefState"),
        (optax.sgd(1e-2), "EmptyState"),
        (optax.adamw(optax.constant_schedule(1e-2)), "ScaleByScheduleState"),
    ],
)
def test_another_optimizer_is_refused_even_if_its_arrays_fit(tx: Any, now: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="reset_optimizer=True") as error:
        look(saved(folder)[0], net(tx=tx))
    assert re.search(rf"\n  the optimizer  .*ScaleByAdamState.*  .*{now}", str(error.value))


def test_a_reset_optimizer_keeps_the_weights_and_begins_anew(folder: Path) -> None:
    path, expected = saved(folder)
    for tx in (None, optax.sgd(1e-2, momentum=0.9)):
        seen = look(path, net(tx=tx), reset_optimizer=True).numbers
        for name, x in expected.items():
            if not name.startswith("opt_state"):
                np.testing.assert_array_equal(seen[name], x, err_msg=name)
        begun = [x for name, x in seen.items() if name.startswith("opt_state")]
        assert begun and not any(np.any(x) for x in begun)


class Injected(Linear):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return optax.inject_hyperparams(optax.sgd)(learning_rate=self.lr, momentum=0.9)


def rate_of_resume(lr: float, *callbacks: jl.Callback, root: str = "run", **arguments: Any) -> float:
    """Resume a training that began with a rate of 0.25, with a module of another rate; return the logged rate."""
    fit(Injected(0.25), random(3), None, *callbacks, max_epochs=1, default_root_dir=root)
    given = {"default_root_dir": root, "ckpt_path": "last", "max_epochs": 2, "log_every_n_steps": 1}
    return fit(Injected(lr), random(3), None, *callbacks, **given | arguments).history["lr"][1][-1]


def test_a_rate_that_a_resume_does_not_use_is_told_with_both(caplog: pytest.LogCaptureFixture) -> None:
    assert rate_of_resume(0.125) == 0.25
    (message,) = [r.getMessage() for r in caplog.records if "learning_rate" in r.getMessage()]
    assert re.search("learning_rate=0.125.* learning_rate=0.25.*reset_optimizer=True", message)
    assert "momentum" not in message
    caplog.clear()
    fit(Injected(0.125), random(3), max_epochs=3, default_root_dir="run", ckpt_path="last")
    assert "learning_rate=0.25" in caplog.text  # each resume: the training still has the first


def test_a_new_rate_that_is_used_after_a_resume_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    set_rate = lambda trainer, module: trainer.hyperparams.update(learning_rate=module.lr)  # noqa: E731
    assert rate_of_resume(0.125, root="reset", reset_optimizer=True) == 0.125
    assert rate_of_resume(0.125, hooks(on_fit_start=set_rate)) == 0.125
    fit(Injected(0.125), random(3), max_epochs=3, default_root_dir="run", ckpt_path="last")
    assert "learning_rate" not in caplog.text


def test_a_rate_that_a_callback_has_lowered_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    lower = at_batch(1, lambda trainer, module: trainer.hyperparams.update(learning_rate=0.0625))
    assert rate_of_resume(0.25, lower) == 0.0625
    assert "learning_rate" not in caplog.text


def test_without_strict_what_fits_is_taken_and_the_rest_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (path, expected), fresh = saved(folder), net(More)
    seen = look(path, net(More), strict=False, reset_optimizer=True).numbers
    for name, x in expected.items():
        if not name.startswith("opt_state"):
            np.testing.assert_array_equal(seen[name], x, err_msg=name)
    np.testing.assert_array_equal(seen["params.more.kernel"], np.asarray(fresh.more.kernel[...]))
    (record,) = [r.getMessage() for r in caplog.records if "in part" in r.getMessage()]
    told = [line.split()[0] for line in record.splitlines() if line.startswith("  module")]
    assert told == ["module.more.bias", "module.more.kernel"]
