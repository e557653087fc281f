"""A range test tells what a loop by hand finds, and leaves a training as if there had been none."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import random
from kit.by_hand import params_of, state_of
from kit.checkpoints import bytes_of
from kit.journal import hooks
from kit.modules import Linear, Net
from kit.refusals import refuses
from kit.trainers import BARE, STRATEGIES, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.callbacks import BackboneFreeze
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.trainer.lr_find import LRFinder

BATCHES = random(4)


class Rated(Linear):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return optax.inject_hyperparams(optax.sgd)(learning_rate=self.lr, momentum=0.9)


class Deep(Net):
    """Has batch statistics and a dropout stream, which a range test must leave alone."""

    def __init__(self, lr: float = 0.1, *, rngs: nnx.Rngs) -> None:
        super().__init__(rate=0.3, rngs=rngs)
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return optax.inject_hyperparams(optax.adam)(learning_rate=self.lr)


def by_hand(rates: list[float], window: int, threshold: float | None) -> list[float]:
    """Return the mean loss of each step by numpy in float64, as far as the threshold lets it come."""
    w, b, speed, found, mean = np.linspace(-1.0, 1.0, 3)[:, None], np.zeros(1), [0.0, 0.0], [], 0.0
    draw = itertools.cycle(BATCHES)
    for k, rate in enumerate(rates):
        batches = [next(draw) for _ in range(window)]
        losses, grads = [], [0.0, 0.0]
        for batch in batches:
            x, y = (np.asarray(batch[name], np.float64) for name in "xy")
            error = x @ w + b - y
            losses.append(np.mean(error**2))
            grads = [grads[0] + 2 * x.T @ error / len(x) / window, grads[1] + 2 * error.mean(0) / window]
        mean = 0.98 * mean + 0.02 * np.mean(losses)
        found.append(mean / (1 - 0.98 ** (k + 1)))
        if threshold is not None and len(found) > 1 and not found[-1] <= threshold * min(found[:-1]):
            break
        speed = [0.9 * v + g for v, g in zip(speed, grads, strict=True)]
        w, b = w - rate * speed[0], b - rate * speed[1]
    return found


RUNS: list[Any] = [
    ({"num_training_steps": 30}, 1),
    ({"num_training_steps": 30, "min_lr": 1e-3, "max_lr": 3.0, "early_stop_threshold": 1.5}, 1),
    ({"num_training_steps": 12, "min_lr": 0.01, "max_lr": 0.4, "mode": "linear"}, 1),
    ({"num_training_steps": 12, "min_lr": 0.01, "max_lr": 0.4, "early_stop_threshold": None}, 2),
]


@pytest.mark.parametrize("strategy", thinned(["single", "fsdp", "shard_map"], "single"))
@pytest.mark.parametrize(("arguments", "window"), RUNS)
def test_rates_and_losses_are_those_of_a_loop_by_hand(arguments: dict[str, Any], window: int, strategy: str) -> None:
    trainer = make_trainer(strategy=splitting(strategy), accumulate_grad_batches=window, **BARE)
    found = jl.lr_find(trainer, Rated(), BATCHES, **arguments)
    given = {"min_lr": 1e-8, "max_lr": 1.0, "early_stop_threshold": 4.0, "mode": "exponential"} | arguments
    low, high, count = given["min_lr"], given["max_lr"], given["num_training_steps"]
    if given["mode"] == "linear":
        rates = [low + k * (high - low) / (count - 1) for k in range(count)]
    else:
        rates = [low * (high / low) ** (k / (count - 1)) for k in range(count)]
    losses = by_hand(rates, window, given["early_stop_threshold"])
    np.testing.assert_allclose(found.results["loss"], losses, rtol=1e-4)
    np.testing.assert_allclose(found.results["lr"], rates[: len(losses)], rtol=1e-9)
    assert (len(losses) < count) == (given["early_stop_threshold"] == 1.5)


def test_a_loss_that_is_not_finite_ends_it_unless_nothing_may() -> None:
    trainer = make_trainer(**BARE)
    given: dict[str, Any] = {"min_lr": 0.1, "max_lr": 1e30, "num_training_steps": 40}
    found = jl.lr_find(trainer, Rated(), BATCHES, early_stop_threshold=1e300, **given)
    assert len(found.results["lr"]) < 40 and not math.isfinite(found.results["loss"][-1])
    found = jl.lr_find(trainer, Rated(), BATCHES, early_stop_threshold=None, **given)
    assert len(found.results["lr"]) == 40


def test_the_suggestion_is_where_the_loss_falls_most_steeply() -> None:
    rates = [10 ** (-4 + 0.2 * k) for k in range(20)]
    losses = [5 - math.tanh(8 * (x - 0.05)) + x for x in rates]
    found = LRFinder("exponential")
    found.results = {"lr": rates, "loss": [*losses[:12], math.nan, *losses[13:]]}

    def slope(kept: list[int]) -> int:
        """Return the index of the steepest fall among some: differences to both sides, the nearer one counting more."""
        values = {}
        for a, b, c in zip(kept, kept[1:], kept[2:], strict=False):
            left, right = rates[b] - rates[a], rates[c] - rates[b]
            rise = [(losses[b] - losses[a]) / left, (losses[c] - losses[b]) / right]
            values[b] = (right * rise[0] + left * rise[1]) / (left + right)
        for first, second, at in ((kept[0], kept[1], kept[0]), (kept[-2], kept[-1], kept[-1])):
            values[at] = (losses[second] - losses[first]) / (rates[second] - rates[first])
        return min(values, key=lambda i: values[i])

    for begin, end in ((10, 1), (0, 0), (3, 8)):
        kept = [k for k in range(begin, 20 - end) if k != 12]
        assert found.suggestion(begin, end) == rates[slope(kept)]
    assert found.suggestion(18) is None and found.suggestion(0, 30) is None
    refuses(ArgumentError, lambda: found.suggestion(-1), "skip_begin")


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "fsdp"))
def test_a_training_behind_it_is_bit_by_bit_one_that_begins_with_that_rate(strategy: str) -> None:
    def train(model: Any, look: bool) -> tuple[list[bytes], dict[str, np.ndarray], float]:
        trainer = make_trainer(strategy=splitting(strategy), max_epochs=2, **BARE)
        loader = jl.ArrayLoader({k: np.concatenate([b[k] for b in BATCHES]) for k in "xy"}, 8, shuffle=True)
        if look:
            before = state_of(model)
            jl.lr_find(trainer, model, loader, num_training_steps=20, min_lr=1e-4, update_attr=True)
            for name, x in state_of(model).items():
                np.testing.assert_array_equal(x, before[name])
            assert trainer.global_step == 0 and trainer.model is None and trainer.stop_reason is None
        trainer.fit(model, loader)
        return bytes_of(trainer), params_of(model), model.lr

    found = train(Deep(rngs=nnx.Rngs(0)), True)
    plain = train(Deep(found[2], rngs=nnx.Rngs(0)), False)
    assert found[2] != 0.1 and found[0] == plain[0]
    assert all(np.array_equal(x, plain[1][name]) for name, x in found[1].items())


def test_it_takes_lazy_modules_and_datamodules_and_leaves_callbacks_and_files_out() -> None:
    called: list[str] = []

    class Adds(Deep):
        def configure_callbacks(self) -> Any:
            called.append("configure_callbacks")
            return []

    class Data(jl.DataModule):
        def train_dataloader(self) -> Any:
            return BATCHES

    watch = hooks(on_train_start=lambda *_: called.append("on_train_start"))
    trainer = make_trainer(watch, default_root_dir="run")
    given: dict[str, Any] = {"num_training_steps": 5, "datamodule": Data()}
    one = jl.lr_find(trainer, jl.lazy(Adds, rngs=nnx.Rngs(0)), **given)
    two = jl.lr_find(trainer, Adds(rngs=nnx.Rngs(0)), **given)
    assert called == [] and one.results["lr"] == two.results["lr"] and len(one.results["lr"]) == 5
    np.testing.assert_allclose(one.results["loss"], two.results["loss"], rtol=1e-5)
    assert dict(trainer.callback_metrics) == {} and not Path("run").exists()


def test_a_part_that_is_frozen_stays_so() -> None:
    trainers = [
        make_trainer(*callbacks, **BARE) for callbacks in ([], [BackboneFreeze("kernel", unfreeze_at_epoch=99)])
    ]
    found = [jl.lr_find(x, Rated(), BATCHES, num_training_steps=9, min_lr=0.01) for x in trainers]
    assert found[0].results["loss"][:1] == found[1].results["loss"][:1]
    assert found[0].results["loss"][8] != found[1].results["loss"][8]


def test_the_rate_goes_to_the_attribute_that_holds_it() -> None:
    class Other(Rated):
        def __init__(self, rate: float = 0.1) -> None:
            super().__init__()
            del self.lr

        def configure_optimizers(self) -> Any:
            return optax.inject_hyperparams(optax.sgd)(learning_rate=self.hparams.rate)

    given: dict[str, Any] = {"num_training_steps": 20, "min_lr": 1e-3, "update_attr": True}
    model, other = Rated(), Other()
    found = jl.lr_find(make_trainer(**BARE), model, BATCHES, **given)
    assert model.lr == found.suggestion() != 0.1
    found = jl.lr_find(make_trainer(**BARE), other, BATCHES, attr_name="rate", **given)
    assert other.hparams.rate == found.suggestion() != 0.1
    words = "Other has no attribute 'lr' or 'learning_rate', nor have its hparams"
    refuses(ArgumentError, lambda: jl.lr_find(make_trainer(**BARE), other, BATCHES, **given), words)
    lazy = jl.lazy(Rated)
    refuses(ArgumentError, lambda: jl.lr_find(make_trainer(**BARE), lazy, BATCHES, **given), r"jl\.lazy\(\.\.\.\)")


def test_a_picture_shows_the_losses_and_the_suggestion() -> None:
    found = jl.lr_find(make_trainer(**BARE), Rated(), BATCHES, num_training_steps=20, min_lr=1e-3)
    (axes,) = found.plot(suggest=True).axes
    line, mark = axes.get_lines()
    assert line.get_xdata().tolist() == found.results["lr"] and axes.get_xscale() == "log"
    assert line.get_ydata().tolist() == found.results["loss"] and mark.get_xdata().tolist() == [found.suggestion()]
    assert len(found.plot().axes[0].get_lines()) == 1


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (ArgumentError, {"min_lr": 0.0}, "min_lr"),
        (ArgumentError, {"min_lr": 2.0}, "max_lr.*above min_lr=2.0"),
        (ArgumentTypeError, {"max_lr": "1"}, "max_lr"),
        (ArgumentError, {"num_training_steps": 1}, "num_training_steps"),
        (ArgumentError, {"mode": "log"}, "mode.*'exponential', 'linear'"),
        (ArgumentError, {"early_stop_threshold": 0.0}, "early_stop_threshold"),
        (ArgumentTypeError, {"hyperparam": ""}, "hyperparam"),
        (ArgumentError, {"hyperparam": "learning"}, "learning'.*It keeps: learning_rate"),
        (ArgumentTypeError, {"trainer": 3}, "takes a jl.Trainer first"),
        (ArgumentTypeError, {"model": Rated}, "takes a jl.TrainModule second"),
        (ArgumentError, {"train_dataloaders": iter(BATCHES)}, "got an iterator"),
        (ArgumentError, {"model": Linear()}, "It keeps: none.*inject_hyperparams"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(kind: Any, arguments: dict[str, Any], words: str) -> None:
    given = {"trainer": make_trainer(**BARE), "model": Rated(), "train_dataloaders": BATCHES} | arguments
    refuses(kind, lambda: jl.lr_find(**given), words)
