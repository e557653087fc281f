"""A module at fault is refused before a batch is trained on, by the name of what is wrong and what to do."""

import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import JaxlitError, LogError, ModuleError, NonFiniteError, StateError

STRATEGIES = ("single", "ddp", "fsdp", "shard_map", "pmap")
ended: list[int] = []  # the training batches that were trained on


class Model(jl.TrainModule):
    """A line: its parameters are `kernel` and `bias`."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((3, 1)))
        self.bias = nnx.Param(jnp.zeros(1))

    def error(self, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ self.kernel + self.bias - batch["y"]) ** 2)

    def training_step(self, batch: Any) -> Any:
        return self.error(batch)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        ended.append(batch_idx)


@pytest.fixture(autouse=True)
def no_batch_ended() -> None:
    ended.clear()


def batches(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return [{"x": draw(8, 3), "y": draw(8, 1)} for _ in range(count)]


def module(**members: Any) -> Model:
    """Return a Model with other members of its class."""
    return type("Made", (Model,), members)()


def make_trainer(**arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "strategy": "single"}
    return jl.Trainer(**(quiet | {"max_epochs": 1} | arguments))


def assert_refused(model: Any, kind: type[JaxlitError], *patterns: str, val: Any = None, **arguments: Any) -> None:
    """Fit a module, and see it refused by a message that matches every pattern before a batch was trained on."""
    with pytest.raises(kind) as caught:
        make_trainer(**arguments).fit(model, batches(2), val)
    message = str(caught.value)
    assert [pattern for pattern in patterns if not re.search(pattern, message)] == [], message
    assert len(message) <= 600
    assert not re.search(r"Traceback|jax\._src|Tracer", message), message
    assert not ended


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "jaxlit" and r.levelno >= logging.WARNING]


# Steps and what they return -----------------------------------------------------------------------------


class NoStep(jl.TrainModule):
    """A module without a step or an optimizer."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((3, 1)))


def test_a_module_without_training_step_is_refused_by_its_name() -> None:
    assert_refused(NoStep(), ModuleError, "NoStep has no training_step", r"Define training_step\(self, batch\)")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_returns_none_is_refused(strategy: str) -> None:
    silent = module(training_step=lambda self, batch: None)
    assert_refused(silent, ModuleError, r"Made\.training_step", "None", "loss", strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_that_is_no_scalar_is_refused_with_its_shape_and_the_mean_as_remedy(strategy: str) -> None:
    vector = module(training_step=lambda self, batch: (batch["x"] @ self.kernel)[:1])
    assert_refused(vector, ModuleError, r"Made\.training_step", r"\(1, 1\)", r"mean\(\)", strategy=strategy)


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (lambda loss: loss.astype(jnp.int32), "int32"),
        (lambda loss: loss > 0, "bool"),
        (lambda loss: "0.5", "str"),
        (lambda loss: 0.5, "float"),
        (lambda loss: 1, r"\bint\b"),
        (lambda loss: loss.astype(jnp.complex64), "complex64"),
    ],
)
def test_a_loss_of_another_type_is_refused_with_that_type(loss: Callable[[Any], Any], given: str) -> None:
    made = module(training_step=lambda self, batch: loss(self.error(batch)))
    assert_refused(made, ModuleError, r"Made\.training_step", given, "floating")


def test_a_dict_without_the_loss_is_refused_with_the_keys_that_it_has() -> None:
    made = module(training_step=lambda self, batch: {"l": self.error(batch), "accuracy": 1.0})
    assert_refused(made, ModuleError, r"Made\.training_step", "'loss'", r"\['accuracy', 'l'\]", "Add")


def test_a_tuple_in_place_of_the_loss_is_refused() -> None:
    made = module(training_step=lambda self, batch: (self.error(batch), 1.0))
    assert_refused(made, ModuleError, r"Made\.training_step", "tuple", "dict")


@pytest.mark.parametrize("name", ["training_step", "validation_step"])
@pytest.mark.parametrize(
    ("step", "signature"),
    [
        (lambda self: jnp.float32(0), r"\(\)"),
        (lambda self, batch, batch_idx, dataloader_idx, more: jnp.float32(0), "more"),
        (lambda self, *, batch: jnp.float32(0), r"\*, batch"),
        (lambda self, batch, *, scale: jnp.float32(0), "scale"),
    ],
)
def test_a_step_with_a_wrong_signature_is_refused_by_that_signature(name: str, step: Any, signature: str) -> None:
    made = module(**{name: step})
    assert_refused(made, ModuleError, rf"Made\.{name}.*{signature}", r"\(self, batch\)", val=batches(1))


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_an_evaluation_without_its_step_is_refused_by_the_name_of_the_step(verb: str) -> None:
    step = {"validate": "validation_step"}.get(verb, f"{verb}_step")
    with pytest.raises(ModuleError, match=rf"Model has no {step}\. Define {step}\(self, batch\)"):
        getattr(make_trainer(), verb)(Model(), batches(1))


# Losses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "loss",
    [lambda loss: jnp.ones(()), jax.lax.stop_gradient, lambda loss: (loss < 1).astype(jnp.float32)],
    ids=["a constant", "a detached loss", "a comparison"],
)
def test_a_loss_that_depends_on_no_parameter_is_told_once_with_the_parameters(
    loss: Callable[[jax.Array], jax.Array], strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = module(training_step=lambda self, batch: loss(self.error(batch)))
    make_trainer(strategy=strategy, max_epochs=2).fit(made, batches(2))
    (message,) = [m for m in warnings_of(caplog) if "depend" in m]
    assert all(word in message for word in ("training_step", "kernel", "bias")), message


def through_scan(loss: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, _: (carry * 0.5, None), loss, None, length=2)[0]


@pytest.mark.parametrize("strategy", ["single", "fsdp", "shard_map"])
@pytest.mark.parametrize(
    "through",
    [
        lambda loss: loss,
        lambda loss: loss + jax.lax.stop_gradient(loss),
        lambda loss: jnp.where(loss < 1, loss, 2 * loss),
        lambda loss: jax.lax.cond(loss < 1, jnp.sin, jnp.cos, loss),
        jax.jit(jax.nn.relu),
        jax.checkpoint(jnp.tanh),
        through_scan,
    ],
    ids=["plain", "partly detached", "where", "cond", "custom_jvp", "checkpoint", "scan"],
)
def test_a_loss_that_depends_on_the_parameters_is_not_warned_about(
    through: Callable[[jax.Array], jax.Array], strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = module(training_step=lambda self, batch: through(self.error(batch)))
    make_trainer(strategy=strategy).fit(made, batches(1))
    assert [m for m in warnings_of(caplog) if "depend" in m] == []


def test_a_loss_that_is_not_finite_is_refused_by_its_step_and_leaves_the_parameters_of_the_step_before() -> None:
    data = batches(3)
    data[1]["x"][0, 0] = np.nan
    good, made = Model(), Model()
    make_trainer().fit(good, data[:1])
    with pytest.raises(NonFiniteError, match=r"optimizer step 1 .*nan_policy='skip'"):
        make_trainer().fit(made, data)
    np.testing.assert_array_equal(made.kernel[...], good.kernel[...])


# Optimizers ---------------------------------------------------------------------------------------------


def test_a_module_without_configure_optimizers_is_refused_by_its_name() -> None:
    made = type("NoOptimizer", (NoStep,), {"training_step": Model.training_step})()
    assert_refused(made, ModuleError, r"NoOptimizer\.configure_optimizers", "optax.adamw")


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        (None, "None"),
        ("adam", "'adam'"),
        (optax.constant_schedule(0.1), "function"),
        (optax.sgd, "function sgd"),
        ([optax.sgd(0.1), optax.sgd(0.2)], "2 optimizers.*optax.multi_transform"),
    ],
    ids=["None", "a name", "a schedule", "a factory", "two"],
)
def test_what_is_no_optax_transform_is_refused(given: Any, pattern: str) -> None:
    made = module(configure_optimizers=lambda self: given)
    assert_refused(made, ModuleError, r"Made\.configure_optimizers", pattern, "optax")


def test_what_is_no_schedule_is_refused() -> None:
    made = module(configure_optimizers=lambda self: jl.Optimizer(optax.sgd(0.1), lr_schedule=0.1))
    assert_refused(made, JaxlitError, r"lr_schedule=.*0\.1", "function of the step")


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused() -> None:
    made = module(configure_optimizers=lambda self: optax.lbfgs())
    assert_refused(made, ModuleError, r"Made\.configure_optimizers", "value_fn", "loop of your own")


@pytest.mark.parametrize(
    ("wrt", "pattern"),
    [(nnx.BatchStat, "no variable to train"), (nnx.PathContains("head"), "no variable to train"), (3, r"wrt.*\b3\b")],
    ids=["another kind", "another path", "no filter"],
)
def test_a_filter_that_trains_no_parameter_is_refused(wrt: Any, pattern: str) -> None:
    made = module(configure_optimizers=lambda self: jl.Optimizer(optax.sgd(0.1), wrt=wrt))
    assert_refused(made, JaxlitError, pattern, "wrt=")


# Parameters and other state -----------------------------------------------------------------------------


class Tied(Model):
    """Two names for one parameter."""

    def __init__(self) -> None:
        self.first = nnx.Param(jnp.eye(3) * 0.5)
        self.second = self.first

    def error(self, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ self.first @ self.second - batch["y"]) ** 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_parameters_are_counted_once_and_trained_as_one(strategy: str) -> None:
    def loss_of(kernel: jax.Array, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ kernel @ kernel - batch["y"]) ** 2)

    expected = jnp.eye(3) * 0.5
    for batch in batches(3):
        expected -= 0.1 * jax.grad(loss_of)(expected, batch)

    model, trainer = Tied(), make_trainer(strategy=strategy)
    trainer.fit(model, batches(3))
    assert [x.shape for x in jax.tree.leaves(trainer.state.params)] == [(3, 3)]
    assert model.first is model.second
    np.testing.assert_allclose(np.asarray(model.first[...]), expected, rtol=1e-5, atol=1e-6)


class Noisy(Model):
    """Batch statistics and random numbers beside the parameters."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def error(self, batch: Any) -> jax.Array:
        return jnp.mean((self.linear(self.dropout(self.norm(batch["x"]))) - batch["y"]) ** 2)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_batch_statistics_and_random_numbers_are_carried_as_in_a_loop_by_hand(strategy: str) -> None:
    data, expected = batches(3), Noisy()
    expected.train()
    for batch in data:
        grads = nnx.grad(lambda model, batch: model.error(batch))(expected, batch)
        params = nnx.state(expected, nnx.Param)
        nnx.update(expected, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))

    model = Noisy()
    make_trainer(strategy=strategy).fit(model, data)
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    got, want = ([np.asarray(raw(x)) for x in jax.tree.leaves(nnx.state(m))] for m in (model, expected))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Counting(Model):
    """Plain attributes that a step may be tempted to write to."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.seen = []
        self.last = {}
        self.latest = None
        self.part = Part()


class Part(nnx.Module):
    """A sub-module with a plain attribute."""

    def __init__(self) -> None:
        self.calls = 0


def count(self: Any, loss: jax.Array) -> None:
    self.n += 1


def append(self: Any, loss: jax.Array) -> None:
    self.seen.append(loss)


def append_shape(self: Any, loss: jax.Array) -> None:
    self.seen.append(loss.shape)


def set_item(self: Any, loss: jax.Array) -> None:
    self.last["loss"] = loss


def set_attribute(self: Any, loss: jax.Array) -> None:
    self.latest = loss


def count_in_part(self: Any, loss: jax.Array) -> None:
    self.part.calls += 1


def set_new_attribute(self: Any, loss: jax.Array) -> None:
    self.fresh = loss


@pytest.mark.parametrize(
    ("write", "attribute"),
    [
        (count, "n"),
        (append, "seen"),
        (append_shape, "seen"),
        (set_item, "last"),
        (set_attribute, "latest"),
        (count_in_part, "part.calls"),
        (set_new_attribute, "fresh"),
    ],
)
def test_a_side_effect_of_a_step_is_refused_by_its_attribute(write: Any, attribute: str) -> None:
    def training_step(self: Any, batch: Any) -> jax.Array:
        loss = self.error(batch)
        write(self, loss)
        return loss

    made = type("Made", (Counting,), {"training_step": training_step})()
    assert_refused(
        made, StateError, r"Made\.training_step", rf"\b{attribute}\b", r"self\.log|nnx\.Variable|on_train_batch_end"
    )


def test_outputs_kept_by_a_validation_step_are_refused_by_their_attribute() -> None:
    def validation_step(self: Any, batch: Any) -> None:
        append(self, self.error(batch))

    made = type("Made", (Counting,), {"validation_step": validation_step})()
    assert_refused(made, StateError, r"Made\.validation_step", r"\bseen\b", r"self\.log|nnx\.Variable", val=batches(1))


def test_plain_attributes_that_a_step_only_reads_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Reading(Model):
        def __init__(self) -> None:
            super().__init__()
            self.names = {1: "one", 2: float("nan")}
            self.kinds, self.scale, self.tx = {"a", 1}, np.float32(2), optax.sgd(0.1)
            self.act, self.sizes = jax.nn.relu, [3, None, (1, (2,)), "x"]

        def training_step(self, batch: Any) -> jax.Array:
            assert self.names[1] == "one" and "a" in self.kinds and self.sizes[0] == 3
            return self.act(self.error(batch)) * self.scale

    make_trainer().fit(Reading(), batches(2))
    assert ended == [0, 1]
    assert warnings_of(caplog) == []


def test_a_refused_side_effect_leaves_no_traced_value_in_the_module() -> None:
    def training_step(self: Any, batch: Any) -> jax.Array:
        loss = self.error(batch)
        append(self, loss)
        return loss

    made = type("Made", (Counting,), {"training_step": training_step})()
    with pytest.raises(StateError):
        make_trainer().fit(made, batches(2))
    assert not any(isinstance(x, jax.core.Tracer) for x in made.seen)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_that_a_step_adds_is_refused_by_its_name(strategy: str) -> None:
    def training_step(self: Any, batch: Any) -> jax.Array:
        self.scale = nnx.Param(jnp.ones(()))
        return self.error(batch) * self.scale

    made = module(training_step=training_step)
    assert_refused(made, StateError, r"Made\.training_step", r"\bscale\b", "__init__", strategy=strategy)


def in_hook(hook: str, write: Callable[[Any], None]) -> jl.Callback:
    return type("Meddler", (jl.Callback,), {hook: lambda self, trainer, module, *args: write(module)})()


def write_other_shape(model: Any) -> None:
    model.kernel[...] = jnp.ones((3, 1))
    model.kernel.set_value(jnp.ones((2, 1)))


def write_other_dtype(model: Any) -> None:
    model.kernel.set_value(jnp.ones((3, 1), jnp.bfloat16))


def replace_parameter(model: Any) -> None:
    model.extra = nnx.Param(jnp.ones(2))


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
@pytest.mark.parametrize(
    ("write", "pattern"),
    [
        (write_other_shape, r"kernel.*float32\(3, 1\)"),
        (write_other_dtype, r"bfloat16.*kernel"),
        (replace_parameter, "structure of Model|extra"),
    ],
    ids=["shape", "dtype", "structure"],
)
def test_a_callback_that_changes_the_kind_of_a_parameter_is_refused_by_both_names(
    hook: str, write: Callable[[Any], None], pattern: str
) -> None:
    assert_refused(Model(), StateError, rf"Meddler\.{hook}", pattern, callbacks=[in_hook(hook, write)])


def test_a_callback_that_writes_in_a_batch_hook_is_refused_by_both_names() -> None:
    def write(model: Any) -> None:
        model.kernel[...] = jnp.zeros((3, 1))

    meddler = in_hook("on_train_batch_start", write)
    assert_refused(
        Model(), StateError, r"Meddler\.on_train_batch_start", "kernel", "on_train_epoch_start", callbacks=[meddler]
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_arrays_held_before_fit_and_the_module_in_every_hook_can_be_read(strategy: str) -> None:
    model = Model()
    held, read = model.kernel[...], []

    def read_kernel(module: Any) -> None:
        read.append(np.asarray(module.kernel[...]))

    hooks = ("on_fit_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_fit_end")
    make_trainer(strategy=strategy, callbacks=[in_hook(hook, read_kernel) for hook in hooks]).fit(model, batches(2))
    np.testing.assert_array_equal(held, np.ones((3, 1)))
    assert len(read) == 7  # 3 hooks outside of the batches, and 2 for each of 2 batches
    np.testing.assert_array_equal(read[-1], model.kernel[...])


# What a step does beside its loss -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "patterns"),
    [
        (lambda self, x: self.log("a", x), (r"self\.log\('a'", r"\(8, 3\)", r"mean\(\)")),
        (lambda self, x: self.log("a", "high"), (r"self\.log\('a'", "str", "scalar number")),
        (lambda self, x: [self.log("a", 1.0), self.log("a", 2.0)], (r"self\.log\('a'", "twice", "once")),
        (lambda self, x: self.log(3, 1.0), (r"self\.log", r"\b3\b", "str")),
        (
            lambda self, x: jax.vmap(lambda row: [self.log("a", row.sum()), row][1])(x),
            (r"self\.log\('a'", "vmap", "training_step itself"),
        ),
    ],
    ids=["an array", "a string", "a name twice", "no name", "inside vmap"],
)
def test_what_cannot_be_logged_is_refused_by_its_name(log: Any, patterns: tuple[str, ...]) -> None:
    def training_step(self: Any, batch: Any) -> jax.Array:
        log(self, batch["x"])
        return self.error(batch)

    assert_refused(module(training_step=training_step), LogError, *patterns)


@pytest.mark.parametrize("shape", [(), (1,)], ids=["a number", "an array"])
def test_random_numbers_of_numpy_in_a_step_are_told_in_debug_mode(
    shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    def training_step(self: Any, batch: Any) -> jax.Array:
        return self.error(batch) + (np.random.normal(size=shape) * self.bias).sum()

    make_trainer(debug=True).fit(module(training_step=training_step), batches(2))
    (message,) = warnings_of(caplog)
    assert "Made.training_step" in message
    assert re.search(r"np\.random|numpy|time\.time|rngs", message), message


@pytest.mark.parametrize("debug", [True, False])
def test_a_step_without_side_effects_is_not_warned_about(debug: bool, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(debug=debug).fit(Noisy(), batches(2))
    assert warnings_of(caplog) == []


def test_a_large_constant_in_a_step_is_told_with_its_size_and_the_step(caplog: pytest.LogCaptureFixture) -> None:
    table = np.ones((65, 2**20), np.uint8)  # 65 MB that a step closes over

    def training_step(self: Any, batch: Any, batch_idx: Any) -> jax.Array:
        return self.error(batch) * jnp.asarray(table)[batch_idx, 0]

    make_trainer().fit(module(training_step=training_step), batches(1))
    (message,) = warnings_of(caplog)
    assert "training_step" in message
    assert re.search(r"\b6[58]\b.*Mi?B", message), message  # 65 MiB are 68 MB
    assert re.search(r"\btable\b|65, ?1048576", message), message


def test_a_small_constant_in_a_step_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    table = np.ones((1, 2**20), np.uint8)

    def training_step(self: Any, batch: Any, batch_idx: Any) -> jax.Array:
        return self.error(batch) * jnp.asarray(table)[batch_idx, 0]

    make_trainer().fit(module(training_step=training_step), batches(1))
    assert warnings_of(caplog) == []
