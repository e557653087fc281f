"""An update that is not finite, of a finite loss and gradient, is in no checkpoint, and the error says since when."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import numbered
from kit.checkpoints import names
from kit.journal import at_batch, hooks
from kit.modules import Mean, module
from kit.trainers import BARE, fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint, WeightAveraging
from jaxlit.engine.state import State
from jaxlit.errors import NonFiniteError

LAST = 6  # the update of this step is NaN: the schedule takes the root of a negative number
ENDING = optax.sgd(lambda step: 0.25 * jnp.sqrt(1 - step / (LAST - 0.5)))
POLICIES = ("raise", "skip", "rollback", "ignore")


def by_hand(steps: int) -> float:
    w = 0.0
    for k in range(steps):
        w -= 0.25 * np.sqrt(1 - k / (LAST - 0.5)) * 2 * (w - (k + 1))
    return w


def saved(name: str) -> float:
    return float(Mean.load_from_checkpoint(f"run/checkpoints/{name}").w[0])


def train(model: Any, *callbacks: Any, batches: int = 16, **arguments: Any) -> jl.Trainer:
    return fit(model, numbered(batches), None, *callbacks, default_root_dir="run", **arguments)


@pytest.mark.parametrize(
    ("policy", "size", "every"),
    thinned(
        [(policy, size, every) for policy in POLICIES for size in (1, 4) for every in (2, 4)],
        *[("raise", 1, 2), ("skip", 4, 4), ("rollback", 1, 4), ("ignore", 1, 2)],
    ),
)
def test_no_checkpoint_of_a_bad_update_replaces_a_finite_one(policy: str, size: int, every: int) -> None:
    saver = ModelCheckpoint(every_n_train_steps=every)
    arguments = {"nan_policy": policy, "steps_per_execution": size, "log_every_n_steps": 1}
    finite = f"step_{LAST // every * every:08d}"
    if policy == "ignore":
        assert train(module(tx=ENDING), saver, **arguments).global_step == 16
        assert names() == [finite, "step_00000016"]
    else:
        with pytest.raises(NonFiniteError, match=r"NaN or infinity since .*: w\..* lr=nan"):
            train(module(tx=ENDING), saver, batches=40, **arguments)
        assert names() == [finite]
    assert saved(finite) == pytest.approx(by_hand(int(finite[-1])))


@pytest.mark.parametrize("policy", POLICIES[:-1])
def test_a_bad_last_update_ends_a_run_without_checkpoints_in_an_error(policy: str) -> None:
    with pytest.raises(NonFiniteError, match="NaN or infinity since optimizer step 0 or a later one before 7: w"):
        fit(module(tx=ENDING), numbered(7), None, nan_policy=policy, **BARE)
    fit(module(tx=ENDING), numbered(7), None, nan_policy="ignore", **BARE)


def unit(self: Any) -> None:
    self.w, self.dead = nnx.Param(jnp.zeros(1)), nnx.Param(jnp.ones(3))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_parameter_without_a_gradient_that_becomes_nan_is_named(accumulate: int) -> None:
    model = module(init=unit, tx=optax.inject_hyperparams(optax.adam)(0.1, eps=0.0))
    saver = ModelCheckpoint(every_n_train_steps=1)
    with pytest.raises(NonFiniteError, match=r"since optimizer step 0: dead\..*eps=0,.*learning_rate=0\.1"):
        train(model, saver, accumulate_grad_batches=accumulate)
    assert names() == []


def test_the_error_names_the_one_step_that_it_can_be() -> None:
    with pytest.raises(NonFiniteError) as caught:
        train(module(tx=ENDING), ModelCheckpoint(every_n_train_steps=1))
    assert f"since optimizer step {LAST}: w." in str(caught.value)
    assert "still those before" not in str(caught.value)
    assert names() == [f"step_{LAST:08d}"]
    assert saved(names()[0]) == pytest.approx(by_hand(LAST))


class Masked(Mean):
    """Holds a mask among its parameters, which is infinite on purpose."""

    def __init__(self) -> None:
        self.w, self.mask = nnx.Param(jnp.zeros(1)), nnx.Param(jnp.array([0.0, -jnp.inf]))

    def training_step(self, batch: Any) -> jax.Array:
        return jnp.mean((self.w - batch["x"]) ** 2) + jax.nn.softmax(self.mask[...])[1]

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.25)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_parameter_that_is_infinite_from_the_beginning_may_stay_so(policy: str) -> None:
    model = Masked()
    train(model, ModelCheckpoint(every_n_train_steps=1), batches=3, nan_policy=policy)
    assert float(model.w[0]) == pytest.approx(1 / 2**3 + 2 / 2**2 + 3 / 2)
    assert np.asarray(model.mask[...])[1] == -np.inf
    assert names() == ["step_00000003"]


@pytest.mark.parametrize("case", ["in on_fit_start", "without a step", "of a finished run"])
def test_what_is_infinite_is_saved_where_nothing_was_trained(case: str) -> None:
    if case == "in on_fit_start":
        train(Masked(), hooks(on_fit_start=lambda trainer, _: trainer.save_checkpoint("saved")), batches=1, **BARE)
    elif case == "without a step":
        train(Masked(), batches=1, max_steps=0, **BARE).save_checkpoint("saved")
    else:
        train(Masked(), batches=1, **BARE).save_checkpoint("finished")
        train(Masked(), batches=1, ckpt_path="finished", **BARE).save_checkpoint("saved")
    np.testing.assert_array_equal(Masked.load_from_checkpoint("saved").mask[...], [0, -np.inf])


def test_infinities_are_counted_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    count = State.infinities
    monkeypatch.setattr(State, "infinities", lambda self: counts.append(1) or count(self))
    train(Masked(), batches=1, nan_policy="ignore", **BARE)
    assert counts == []
    train(Masked(), ModelCheckpoint(), batches=1, nan_policy="ignore")
    assert names() == ["step_00000001"]
    assert counts == [1, 1]


def breaks_at(number: float) -> optax.GradientTransformation:
    """Return plain SGD whose update is infinite for one batch, whose loss and gradient are finite."""
    spoil = optax.stateless(lambda grads, _: jax.tree.map(lambda g: jnp.where(g < -number, jnp.inf, g), grads))
    return optax.chain(spoil, optax.sgd(0.25))


@pytest.mark.parametrize("every", [1, 2])
def test_a_rollback_leaves_the_batch_of_a_bad_update_out(every: int) -> None:
    values = [1.0, 2.0, 3.0, 4.0, 1000.0, 5.0, 6.0, 7.0]
    batches = [{"x": np.full((8, 1), x, np.float32)} for x in values]
    model = module(tx=breaks_at(1000))
    fit(model, batches, None, ModelCheckpoint(every_n_train_steps=every), nan_policy="rollback", default_root_dir="run")
    w = 0.0
    for x in values[:4] + values[(5 if every == 1 else 6) :]:
        w -= 0.5 * (w - x)
    assert float(model.w[0]) == pytest.approx(w)


def test_of_two_savers_none_keeps_a_bad_update() -> None:
    def bound(self: Any, batch: Any) -> None:
        self.log("best", jnp.nan_to_num(self.w[...].sum(), nan=1e3))  # as an accuracy may be: the best is NaN

    best = ModelCheckpoint("best", monitor="best", mode="max", save_top_k=1, save_last=False)
    newest = ModelCheckpoint("newest", every_n_train_steps=2)
    model = module(tx=ENDING, validation=bound)
    fit(model, numbered(4), numbered(1), best, newest, nan_policy="ignore", max_epochs=3, default_root_dir="run")
    assert "step_00000004" in names("best")
    assert best.best_model_path.endswith("step_00000004")
    assert "step_00000006" in names("newest")


def test_a_save_by_hand_refuses_and_leaves_what_it_would_replace() -> None:
    trainer = make_trainer(**BARE)
    trainer.fit(model := Mean(), numbered(2))
    trainer.save_checkpoint("mine")
    model.w[...] = jnp.full(1, jnp.nan)
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        trainer.save_checkpoint("mine")
    assert float(Mean.load_from_checkpoint("mine").w[0]) == 1.25


def test_an_error_writes_no_checkpoint_of_a_bad_update(caplog: pytest.LogCaptureFixture) -> None:
    fails = at_batch(LAST + 1, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(module(tx=ENDING), ModelCheckpoint(every_n_train_steps=5), fails, log_every_n_steps=100)
    assert names() == ["step_00000005"]
    assert re.search("No checkpoint was written at the error: .*NaN", caplog.text)


def test_what_nobody_waited_for_is_raised_at_the_next_save() -> None:
    saves = hooks(on_safe_point=lambda trainer, *_: trainer.saver.begin(f"at_{trainer.global_step}").join())
    trainer = make_trainer(saves, max_epochs=1, **BARE)
    with pytest.raises(NonFiniteError, match="since optimizer step 0: dead"):
        trainer.fit(module(init=unit, tx=optax.inject_hyperparams(optax.adam)(0.1, eps=0.0)), numbered(9))
    assert trainer.global_step == 2
    assert not Path("at_1").exists()


def test_a_refused_save_is_raised_once() -> None:
    def save(trainer: Any, module: Any, *_: Any) -> None:
        step = trainer.global_step
        module.dead[...] = jnp.full(3, jnp.inf if step == 3 else 1.0)
        try:
            trainer.saver.begin(f"at_{step}").wait()
        except NonFiniteError as error:
            refused.append((step, "dead" in str(error)))

    refused: list[Any] = []
    train(module(init=unit, tx=optax.sgd(0.1)), hooks(on_safe_point=save), batches=5, **BARE)
    assert refused == [(3, True)]
    assert [Path(f"at_{k}").exists() for k in range(1, 6)] == [True, True, False, True, True]


def test_weights_only_look_at_the_parameters_of_averages() -> None:
    saver = ModelCheckpoint(every_n_train_steps=4, save_weights_only=True)
    average = WeightAveraging(update_every_n_steps=8)  # which is finite at step 7
    with pytest.raises(NonFiniteError, match="NaN or infinity since .*: w"):
        train(module(tx=ENDING), saver, average, batches=LAST + 1)
    assert names() == ["step_00000004"]


def test_an_average_may_be_infinite_where_its_parameter_was() -> None:
    def by_name(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: "rest" if "mask" in str(path) else "trained", params)

    parts = {"trained": optax.contrib.schedule_free_sgd(0.01), "rest": optax.set_to_zero()}
    model = module(base=Masked, init=Masked.__init__, tx=optax.multi_transform(parts, by_name))
    train(model, ModelCheckpoint(every_n_train_steps=2), batches=4)
    assert names() == ["step_00000004"]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_numbers_of_few_bits_are_looked_at(dtype: str) -> None:
    def small(self: Any) -> None:
        self.w, self.table = nnx.Param(jnp.zeros(1)), nnx.Param(jnp.ones(3, dtype))

    model = module(lambda self, batch: jnp.mean((self.w[...] - batch["x"]) ** 2), init=small)
    with jax.numpy_dtype_promotion("strict"):
        trainer = train(model, ModelCheckpoint(), batches=2)
    assert names() == ["step_00000002"]
    model.table[...] = model.table[...].at[1].set(jnp.nan)
    with pytest.raises(NonFiniteError, match=": table"):
        trainer.save_checkpoint("again")
