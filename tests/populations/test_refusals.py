"""What a population cannot train is refused before the first step, with what to do."""

import argparse
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import numbered, random
from kit.modules import Linear, Mean, Net
from kit.refusals import refuses
from kit.swept import Swept

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError, LoggerError, ModuleError, StateError

TWO = [{"seed": 0}, {"seed": 1}]


def many(make: Any = Swept, variations: Any = TWO, train: Any = None, val: Any = None, **arguments: Any) -> Any:
    train = random(2) if train is None else train
    return jl.fit_many(make, variations, train, val, **({"max_epochs": 1} | arguments))


class Either(Net):
    def __init__(
        self,
        *,
        power: Any = 2,
        momentum: Any = None,
        decay: Any = None,
        wide: Any = False,
        name: Any = "loss",
        rngs: Any,
        **of_net: Any,
    ) -> None:
        super().__init__(**{"width": 8, "rate": 0.1} | of_net, rngs=rngs)
        self.power, self.momentum, self.decay, self.name = power, momentum, decay, name
        if wide:
            self.count = nnx.Variable(jnp.zeros((), jnp.float32))

    def training_step(self, batch: Any) -> jax.Array:
        loss = jnp.mean(jnp.abs(self(batch["x"]) - batch["y"]) ** self.power)
        self.log(self.name, loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        if self.decay is not None:
            return optax.adamw(0.1, weight_decay=self.decay)
        return optax.sgd(0.1, momentum=self.momentum)


@pytest.mark.parametrize(
    ("argument", "values", "patterns"),
    [
        ("width", (8, 16), [r"blocks\[0\].bias is float32\[8\] in member 0 \(width=8\)", r"\[16\] in member 1 \("]),
        ("depth", (1, 2), [r"blocks\[1\].bias is nothing in member 0", "member 1"]),
        ("momentum", (None, 0.9), ["opt_state", "nothing in member 0", "member 1 .momentum=0.9"]),
        ("wide", (False, True), [r"count is int32\[\] in member 0", r"float32\[\] in member 1"]),
        ("rate", (0.1, 0.0), ["member 1 .rate=0.0. differs from that of member 0", "computes"]),
        (
            "decay",
            (0.0, 0.1),
            ["computes|takes", "Where decay is 0.0 of an optimizer, .*inject_hyperparams.optax.adamw"],
        ),
        ("power", (2, 3), ["member 1 .power=3. differs", "integer_pow"]),
        ("name", ("loss", "error"), ["training_step logs Metric.name='loss'", "name='error'.* in member 1"]),
    ],
)
def test_a_member_of_another_kind_is_refused(argument: str, values: Any, patterns: list[str]) -> None:
    refuses(ArgumentError, lambda: many(Either, [{argument: x} for x in values]), *patterns)


def test_another_operation_on_the_same_numbers_is_refused() -> None:
    class Wave(Mean):
        def __init__(self, seed: int, name: str) -> None:
            super().__init__()
            self.w[...] += seed
            self.name = name

        def error(self, batch: Any) -> jax.Array:
            return getattr(jnp, self.name)(super().error(batch))

    sweep = [{"seed": 0, "name": "sin"}, {"seed": 1, "name": "cos"}]
    refuses(ArgumentError, lambda: many(Wave, sweep, numbered(1)), "computes cos, and not sin")


def test_a_number_that_no_input_can_replace_is_refused() -> None:
    class Loops(Mean):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def configure_optimizers(self) -> optax.GradientTransformation:
            def shrink(grads: Any, _: Any) -> Any:
                shrunk = lambda g: jax.lax.while_loop(lambda x: x[0] > 1, lambda x: x * self.factor, g)  # noqa: E731
                return jax.tree.map(shrunk, grads)

            return optax.chain(optax.stateless(shrink), optax.sgd(0.1))

    refuses(ArgumentError, lambda: many(Loops, [{"factor": 0.5}, {"factor": 0.9}], numbered(2)), "inside of while")


class Prints(Mean):
    """Calls a function on the host, with a number that the function or the program holds."""

    def __init__(self, seed: int = 0, held: float = 0.0, given: float = 0.0) -> None:
        super().__init__()
        self.w[...] += seed
        self.held, self.given = held, given

    def training_step(self, batch: Any) -> jax.Array:
        held = self.held
        jax.debug.callback(lambda x: SEEN.append(held + float(x)), self.given * jnp.ones(()))
        return super().training_step(batch)


SEEN: list[float] = []


def test_a_number_in_a_function_on_the_host_is_refused() -> None:
    sweep = [{"held": 0.1}, {"held": 0.2}]
    refuses(ArgumentError, lambda: many(Prints, sweep, numbered(2)), "debug_callback has another callback")
    many(Prints, [{"seed": 0}, {"seed": 1}], numbered(1))
    jax.effects_barrier()
    SEEN.clear()
    many(Prints, [{"given": 0.25}, {"given": 0.5}], numbered(1))
    jax.effects_barrier()
    assert sorted(SEEN) == [0.25, 0.5]


class Asks(Mean):
    """Takes a factor from a function on the host, which holds the number or the module."""

    def __init__(self, factor: float, seed: int = 0, holds_module: bool = False) -> None:
        super().__init__()
        self.w[...] += seed
        self.factor, self.holds_module = factor, holds_module

    def training_step(self, batch: Any) -> jax.Array:
        factor, scalar = self.factor, jax.ShapeDtypeStruct((), np.float32)
        on_host = (lambda: np.float32(self.factor)) if self.holds_module else lambda: np.float32(factor)
        return super().training_step(batch) * jax.pure_callback(on_host, scalar, vmap_method="sequential")


def test_a_function_on_the_host_is_compared_by_what_it_holds() -> None:
    population = many(Asks, [{"seed": i, "factor": 0.5} for i in (0, 1)], numbered(1))
    np.testing.assert_allclose(population.module(0).w[...], [0.25])  # a quarter of the way to 1
    sweep = [{"factor": 0.5}, {"factor": 0.25}]
    refuses(ArgumentError, lambda: many(Asks, sweep, numbered(1)), "pure_callback has another callback")
    held = [{"factor": 0.5, "holds_module": True}]
    refuses(ArgumentError, lambda: many(Asks, held, numbered(1)), "the module in a function on the host")


@pytest.mark.parametrize("name", ["check", "on_validation_end"])
def test_an_early_stopping_that_asks_a_trainer_is_refused(name: str) -> None:
    stop = type("Asks", (jl.callbacks.EarlyStopping,), {name: lambda self, *_: None})("loss")
    refuses(ArgumentError, lambda: many(early_stopping=stop), f"Asks has its own {name}", "judge")


def test_a_module_that_asks_for_its_trainer_hears_that_there_is_none() -> None:
    class Asking(Mean):
        def training_step(self, batch: Any) -> jax.Array:
            return super().training_step(batch) * self.trainer.max_epochs

    with pytest.raises(AttributeError, match="jl.fit_many attaches none"):
        many(Asking, [{}], numbered(1))


class Scaled(Mean):
    """Reads a number from an object in each step, for its gradient and its validation."""

    settings: Any = argparse.Namespace(train=1.0, val=1.0)

    def __init__(self, settings: Any = None) -> None:
        super().__init__()
        if settings is not None:
            self.settings = settings

    def training_step(self, batch: Any) -> jax.Array:
        return super().training_step(batch) * self.settings.train

    def validation_step(self, batch: Any) -> None:
        self.log("val", jnp.mean(self.error(batch)) * self.settings.val)


@pytest.mark.parametrize("stage", ["train", "val"])
@pytest.mark.parametrize("shares", ["an object", "the class"])
def test_what_members_share_and_make_module_changes_is_refused(stage: str, shares: str) -> None:
    """All members would read the numbers of the last one, whatever their seeds."""
    shared = argparse.Namespace(train=1.0, val=1.0)

    def make(seed: int, scale: float) -> Mean:
        setattr(shared if shares == "an object" else Scaled.settings, stage, scale)
        made = Scaled(shared) if shares == "an object" else Scaled()
        made.w[...] += seed
        return made

    sweep = [{"seed": 0, "scale": 1.0}, {"seed": 1, "scale": 2.0}, {"seed": 2, "scale": 1.0}]
    pattern = "steps of member 1 .seed=1, scale=2.0. are not the same.* something that make_module changed"
    refuses(ArgumentError, lambda: many(make, sweep, numbered(2), numbered(2)), pattern)


@pytest.mark.parametrize("where", ["training_step", "configure_optimizers"])
@pytest.mark.parametrize("dims", [0, 1])
def test_an_array_of_numpy_that_is_filled_again_is_refused(where: str, dims: int) -> None:
    """The programs of all members hold the same array."""
    buffer = np.ones((1,) * dims, np.float32)

    class Filled(Mean):
        def __init__(self, scale: float) -> None:
            super().__init__()
            buffer[...] = scale

        def training_step(self, batch: Any) -> jax.Array:
            loss = super().training_step(batch)
            return jnp.sum(loss * buffer) if where == "training_step" else loss

        def configure_optimizers(self) -> optax.GradientTransformation:
            if where == "training_step":
                return optax.sgd(0.25)
            return optax.stateless(lambda grads, _: jax.tree.map(lambda g: -buffer * g, grads))

    sweep = [{"scale": 0.5}, {"scale": 0.25}]
    refuses(ArgumentError, lambda: many(Filled, sweep, numbered(2)), "something that make_module changed")


def test_objects_that_members_do_not_share_are_their_own() -> None:
    make = lambda scale: Scaled(argparse.Namespace(train=scale, val=scale))  # noqa: E731
    population = many(make, [{"scale": 1.0}, {"scale": 0.5}], numbered(2), numbered(1))
    np.testing.assert_allclose(population.module(0).w[...], [1.25])  # half way to 1, then half way to 2
    np.testing.assert_allclose(population.module(1).w[...], [0.6875])  # a quarter of the way
    assert [x["val"] for x in population.metrics] == [1 - 1.25, 0.5 * (1 - 0.6875)]


def test_an_argument_without_effect_is_refused() -> None:
    class Deaf(Mean):
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.lr = lr

    refuses(ArgumentError, lambda: many(Deaf, [{"lr": 0.1}, {"lr": 0.2}], numbered(2)), "member 0 .lr=0.1", "reaches")
    assert len(many(Deaf, [{"lr": 0.1}] * 2, numbered(2))) == 2


class Hooked(Mean):
    def on_train_epoch_end(self) -> None: ...


class NoStep(jl.TrainModule):
    __init__ = Mean.__init__


@pytest.mark.parametrize(
    ("kind", "patterns", "arguments"),
    [
        (ArgumentTypeError, ["takes a subclass of jl.TrainModule"], {"make": Mean()}),
        (ArgumentTypeError, ["takes a list of dicts", "'seed': i"], {"variations": {"seed": 0}}),
        (ArgumentTypeError, ["takes a list of dicts"], {"variations": [0, 1]}),
        (ArgumentError, ["at least one dict"], {"variations": []}),
        (ArgumentError, ["member 1 .rat=0.2. has 'rat'", "Did you mean 'rate'"], {"variations": [{}, {"rat": 0.2}]}),
        (ArgumentError, ["'seed', which Mean does not take"], {"make": Mean}),
        (ArgumentError, ["'seed', which Swept does not take"], {"make": partial(Swept, rngs=nnx.Rngs(0))}),
        (ArgumentTypeError, ["member 0 .seed=0.5. takes an int as seed"], {"variations": [{"seed": 0.5}]}),
        (ModuleError, ["must return a jl.TrainModule"], {"make": lambda seed: nnx.Rngs(seed)}),
        (ModuleError, ["calls no hooks", "on_train_epoch_end", "log="], {"make": Hooked, "variations": [{}]}),
        (ModuleError, ["no training_step"], {"make": NoStep, "variations": [{}]}),
        (ArgumentError, ["max_epochs=", "at least 1"], {"max_epochs": 0}),
        (ArgumentError, ["log_every_n_steps"], {"log_every_n_steps": 0}),
        (ArgumentError, ["devices"], {"devices": 0}),
        (ArgumentError, ["precision=", "32-true"], {"precision": "16-mixed"}),
        (ArgumentTypeError, ["early_stopping=", "EarlyStopping"], {"early_stopping": "val"}),
        (ArgumentTypeError, ["log=", "member, step, metrics"], {"log": 3}),
        (ArgumentTypeError, ["'callbacks'", "one run", "early_stopping="], {"callbacks": []}),
        (ArgumentTypeError, ["'accumulate_grad_batches'", "optax.MultiSteps"], {"accumulate_grad_batches": 2}),
        (ArgumentError, ["takes one loader, got 2"], {"val": [random(1), random(1)]}),
        (ArgumentError, ["loader without end", "limit_train_batches"], {"train": itertools.cycle([1])}),
        (ArgumentError, ["val_dataloaders=", "loader without end", "one that ends"], {"val": itertools.cycle([1])}),
        (DataError, ["gave no batch"], {"train": []}),
        (DataError, ["holds"], {"train": [{"x": np.array(["a"])}]}),
    ],
)
def test_arguments_are_refused(kind: Any, patterns: list[str], arguments: Any) -> None:
    refuses(kind, lambda: many(**arguments), *patterns)


def test_an_iterator_that_cannot_be_looked_at_is_refused() -> None:
    once = type("Once", (), {"__iter__": lambda self: self, "__next__": lambda self: random(1)[0]})()
    refuses(ArgumentTypeError, lambda: many(train=once), "iterated again", "Once")


def test_a_validation_that_writes_is_refused_before_training() -> None:
    class Writes(Linear):
        def validation_step(self, batch: Any) -> None:
            self.bias[...] += 1

    refuses(StateError, lambda: many(Writes, [{}], val=random(1)), "validation_step wrote to bias")
    without = type("Without", (Linear,), {"validation_step": jl.TrainModule.validation_step})
    refuses(ModuleError, lambda: many(without, [{}], val=random(1)), "no validation_step")


@pytest.mark.full
def test_a_metric_that_was_not_logged_is_refused() -> None:
    stop = jl.callbacks.EarlyStopping("vall")
    refuses(LoggerError, lambda: many(val=random(1), early_stopping=stop), "Did you mean 'val'")
    population = many(val=random(1))
    refuses(LoggerError, lambda: population.best("vall"), "Did you mean 'val'")
    refuses(ArgumentError, lambda: population.module(2), "an int below 2")
