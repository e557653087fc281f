"""The caller's module: what training does to it, what hooks and steps may do with it, and `jl.lazy`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, ModuleError, StateError

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate:8")
SGD = optax.sgd(0.1, momentum=0.9)


class Linear(jl.TrainModule):
    """Linear regression: small enough to train by hand."""

    def __init__(self, features: int = 3) -> None:
        self.kernel = nnx.Param(jnp.linspace(-1.0, 1.0, features)[:, None])
        self.bias = nnx.Param(jnp.zeros(1))

    def training_step(self, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ self.kernel + self.bias - batch["y"]) ** 2)

    def validation_step(self, batch: Any) -> Any:
        self.log("val", jnp.mean(batch["x"]))

    def configure_optimizers(self) -> Any:
        return SGD


class Net(jl.TrainModule):
    """Two layers, to have sub-modules, with sizes that shard over eight devices."""

    def __init__(self, width: int = 64, depth: int = 1, *, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(3, width, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])
        self.outer = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.inner(x))
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.outer(x)

    def training_step(self, batch: Any) -> Any:
        return jnp.mean((self(batch["x"]) - batch["y"]) ** 2)

    def configure_optimizers(self) -> Any:
        return SGD


def make_batches(count: int = 3, rows: int = 8) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return [{"x": draw(rows, 3), "y": draw(rows, 1)} for _ in range(count)]


def make_trainer(*callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"strategy": "single", "max_epochs": 1, "num_sanity_val_steps": 0, "callbacks": list(callbacks)}
    return jl.Trainer(**(defaults | quiet | arguments))


def make_callback(**hooks: Callable[..., Any]) -> jl.Callback:
    """Return a callback named Writes with these functions of (trainer, module, ...) as its hooks."""
    return type("Writes", (jl.Callback,), {k: staticmethod(v) for k, v in hooks.items()})()


def params_of(module: nnx.Module) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.as_pure(nnx.state(module, nnx.Param)))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def assert_same_params(module: nnx.Module, expected: nnx.Module) -> None:
    actual, wanted = params_of(module), params_of(expected)
    assert actual.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_allclose(actual[name], x, rtol=1e-5, atol=1e-6, err_msg=name)


class HandLoop:
    """Trains a module by plain nnx and optax, one batch at a time."""

    def __init__(self, module: Any, tx: optax.GradientTransformation = SGD, wrt: Any = nnx.Param) -> None:
        self.module, self.optimizer, self.wrt = module, nnx.Optimizer(module, tx, wrt=wrt), wrt

    def __call__(self, *batches: Any) -> "HandLoop":
        for batch in batches:
            loss_of = lambda module, batch=batch: module.training_step(batch)  # noqa: E731
            self.optimizer.update(self.module, nnx.grad(loss_of, argnums=nnx.DiffState(0, self.wrt))(self.module))
        return self


@functools.cache
def net_by_hand() -> Net:
    """Return a `Net` of `nnx.Rngs(0)`, trained on the batches by hand; not to be changed."""
    return HandLoop(Net(rngs=nnx.Rngs(0)))(*make_batches()).module


# After fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_fit_the_module_holds_the_trained_weights(strategy: str) -> None:
    module, batches = Net(rngs=nnx.Rngs(0)), make_batches()
    make_trainer(strategy=strategy).fit(module, batches)
    assert_same_params(module, net_by_hand())


def test_the_module_after_fit_is_the_object_that_was_given() -> None:
    module = Linear()
    kernel, trainer = module.kernel, make_trainer()
    trainer.fit(module, make_batches())
    assert trainer.module is module and module.kernel is kernel


def test_after_fsdp_the_weights_lie_sharded() -> None:
    module = Net(rngs=nnx.Rngs(0))
    make_trainer(strategy="fsdp").fit(module, make_batches())
    kernel = module.blocks[0].kernel[...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(8, 64)}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "shard_map", "pmap"])
def test_after_fit_the_weights_lie_whole_on_every_device(strategy: str) -> None:
    module = Net(rngs=nnx.Rngs(0))
    make_trainer(strategy=strategy).fit(module, make_batches())
    kernel = module.blocks[0].kernel[...]
    assert [shard.data.shape for shard in kernel.addressable_shards] == [(64, 64)] * 8


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_arrays_held_before_fit_stay_readable_and_unchanged(strategy: str) -> None:
    module = Net(rngs=nnx.Rngs(0))
    held = jax.tree.leaves(nnx.as_pure(nnx.state(module)))
    copies = [np.array(x) for x in held]
    make_trainer(strategy=strategy).fit(module, make_batches())
    for x, copy in zip(held, copies, strict=True):
        np.testing.assert_array_equal(np.asarray(x), copy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_arrays_held_between_two_fits_stay_readable(strategy: str) -> None:
    module, trainer = Net(rngs=nnx.Rngs(0)), make_trainer(strategy=strategy)
    trainer.fit(module, make_batches())
    held = module.outer.kernel[...]
    copy = np.array(held)
    trainer.fit(module, make_batches())
    np.testing.assert_array_equal(np.asarray(held), copy)


def test_a_module_trained_under_one_strategy_trains_on_under_another() -> None:
    module, batches = Net(rngs=nnx.Rngs(0)), make_batches()
    make_trainer(strategy="fsdp").fit(module, batches)
    make_trainer(strategy="single").fit(module, batches)
    expected = HandLoop(Net(rngs=nnx.Rngs(0)))(*batches).module
    assert_same_params(module, HandLoop(expected)(*batches).module)


def test_the_module_may_be_called_after_fit() -> None:
    module, batches = Net(rngs=nnx.Rngs(0)), make_batches()
    make_trainer(strategy="fsdp").fit(module, batches)
    expected = net_by_hand()
    np.testing.assert_allclose(module(batches[0]["x"]), expected(batches[0]["x"]), rtol=1e-5, atol=1e-6)


# Reading in hooks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_hook_sees_the_weights_after_its_step(strategy: str) -> None:
    batches, hand, seen, expected = make_batches(4), HandLoop(Linear()), [], []
    read = make_callback(on_train_batch_end=lambda t, module, *_: seen.append(np.array(module.kernel[...])))
    make_trainer(read, strategy=strategy).fit(Linear(), batches)
    for batch in batches:
        expected.append(np.array(hand(batch).module.kernel[...]))
    np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-6)


def test_the_module_and_the_state_of_the_trainer_agree_in_a_hook() -> None:
    pairs = []

    def read(trainer: jl.Trainer, module: Linear, *_: Any) -> None:
        pairs.append((np.array(module.kernel[...]), np.array(trainer.state.params["kernel"])))

    make_trainer(make_callback(on_train_batch_end=read), strategy="fsdp").fit(Linear(), make_batches())
    assert len(pairs) == 3
    for mine, theirs in pairs:
        np.testing.assert_array_equal(mine, theirs)


def test_a_hook_reads_sub_modules() -> None:
    batches, seen = make_batches(), []
    read = make_callback(on_train_batch_end=lambda t, module, *_: seen.append(np.array(module.blocks[0].bias[...])))
    make_trainer(read).fit(Net(rngs=nnx.Rngs(0)), batches)
    hand = HandLoop(Net(rngs=nnx.Rngs(0)))
    expected = [np.array(hand(batch).module.blocks[0].bias[...]) for batch in batches]
    np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-6)


def test_a_hook_may_call_the_module() -> None:
    batches, seen = make_batches(), []
    call = make_callback(on_train_epoch_end=lambda t, module: seen.append(np.array(module(batches[0]["x"]))))
    make_trainer(call, strategy="ddp").fit(Net(rngs=nnx.Rngs(0)), batches)
    expected = net_by_hand()(batches[0]["x"])
    np.testing.assert_allclose(seen[0], expected, rtol=1e-5, atol=1e-6)


def test_nnx_state_in_a_hook_is_current() -> None:
    batches, seen = make_batches(), []
    read = make_callback(on_train_epoch_end=lambda t, module: seen.append(params_of(module)))
    make_trainer(read).fit(Net(rngs=nnx.Rngs(0)), batches)
    expected = params_of(net_by_hand())
    for name, x in expected.items():
        np.testing.assert_allclose(seen[0][name], x, rtol=1e-5, atol=1e-6)


def test_the_modules_own_hook_sees_current_weights() -> None:
    class Reads(Linear):
        seen: list[np.ndarray] = []  # noqa: RUF012

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            type(self).seen.append(np.array(self.bias[...]))

    batches, hand = make_batches(), HandLoop(Linear())
    make_trainer().fit(Reads(), batches)
    expected = [np.array(hand(batch).module.bias[...]) for batch in batches]
    np.testing.assert_allclose(Reads.seen, expected, rtol=1e-5, atol=1e-6)


# Writing in hooks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_a_write_before_the_first_batch_is_trained_from(hook: str, strategy: str) -> None:
    def write(trainer: jl.Trainer, module: Linear) -> None:
        if trainer.global_step == 0:
            module.kernel[...] = jnp.full((3, 1), 2.0)

    module, expected, batches = Linear(), Linear(), make_batches()
    make_trainer(make_callback(**{hook: write}), strategy=strategy).fit(module, batches)
    expected.kernel[...] = jnp.full((3, 1), 2.0)
    assert_same_params(module, HandLoop(expected)(*batches).module)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end"])
def test_a_write_between_epochs_is_trained_from(hook: str, strategy: str) -> None:
    def halve(trainer: jl.Trainer, module: Linear) -> None:
        module.kernel[...] = module.kernel[...] / 2

    module, batches = Linear(), make_batches()
    make_trainer(make_callback(**{hook: halve}), strategy=strategy, max_epochs=2).fit(module, batches, batches[:1])
    hand = HandLoop(Linear())
    for _ in range(2):
        hand(*batches)
        hand.module.kernel[...] = hand.module.kernel[...] / 2
    assert_same_params(module, hand.module)


def test_a_hook_that_read_before_writes_to_the_current_weights() -> None:
    def add(trainer: jl.Trainer, module: Linear) -> None:
        module.bias[...] = module.bias[...] + 1.0

    read = make_callback(on_train_start=lambda trainer, module: module.bias, on_train_epoch_end=add)
    module, batches, hand = Linear(), make_batches(), HandLoop(Linear())
    make_trainer(read).fit(module, batches)
    hand(*batches).module.bias[...] += 1.0
    assert_same_params(module, hand.module)


def test_an_array_that_a_hook_wrote_stays_the_callers() -> None:
    mine = jnp.full((3, 1), 2.0)

    def write(trainer: jl.Trainer, module: Linear) -> None:
        module.kernel[...] = mine

    make_trainer(make_callback(on_fit_start=write)).fit(Linear(), make_batches())
    np.testing.assert_array_equal(np.asarray(mine), np.full((3, 1), 2.0))


def test_a_numpy_array_may_be_written() -> None:
    def write(trainer: jl.Trainer, module: Linear) -> None:
        module.kernel.set_value(np.full((3, 1), 2.0, np.float32))

    module, expected, batches = Linear(), Linear(), make_batches()
    make_trainer(make_callback(on_fit_start=write), strategy="ddp").fit(module, batches)
    expected.kernel[...] = jnp.full((3, 1), 2.0)
    assert_same_params(module, HandLoop(expected)(*batches).module)


@pytest.mark.parametrize(
    "array",
    [jnp.ones((4, 1)), jnp.ones((3, 1), jnp.bfloat16), np.ones((3, 1)), 1.0],
    ids=["shape", "bf16", "f64", "float"],
)
def test_a_write_of_another_shape_or_dtype_is_refused_naming_callback_and_variable(array: Any) -> None:
    def write(trainer: jl.Trainer, module: Linear) -> None:
        module.kernel.set_value(array)

    trainer = make_trainer(make_callback(on_train_epoch_end=write))
    with pytest.raises(StateError, match=r"Writes\.on_train_epoch_end wrote .* to kernel, which is float32\(3, 1\)"):
        trainer.fit(Linear(), make_batches())


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_validation_batch_end", "on_log"])
def test_a_write_in_a_batch_hook_is_refused_naming_callback_and_variable(hook: str) -> None:
    class Logs(Linear):
        def training_step(self, batch: Any) -> Any:
            self.log("x", 1.0)
            return super().training_step(batch)

    def write(trainer: jl.Trainer, *args: Any) -> None:
        module = trainer.module
        module.kernel[...] = module.kernel[...] * 2

    trainer = make_trainer(make_callback(**{hook: write}), log_every_n_steps=1)
    with pytest.raises(StateError, match=rf"Writes\.{hook} wrote to kernel"):
        trainer.fit(Logs(), make_batches(), make_batches(1))


def test_a_write_to_a_sub_module_is_refused_by_its_path() -> None:
    def write(trainer: jl.Trainer, module: Net, *_: Any) -> None:
        module.blocks[0].bias[...] = jnp.zeros(64)

    trainer = make_trainer(make_callback(on_train_batch_end=write))
    with pytest.raises(StateError, match=r"wrote to blocks\[0\]\.bias"):
        trainer.fit(Net(rngs=nnx.Rngs(0)), make_batches())


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "extra", nnx.Param(jnp.zeros(1))),
        lambda module: setattr(module, "rate", 0.5),
        lambda module: setattr(module, "inner", nnx.Linear(3, 8, rngs=nnx.Rngs(0))),
        lambda module: delattr(module, "outer"),
    ],
    ids=["variable", "attribute", "sub-module", "deleted"],
)
def test_a_change_of_structure_in_a_hook_is_refused(change: Callable[[Any], None]) -> None:
    trainer = make_trainer(make_callback(on_train_epoch_end=lambda trainer, module: change(module)))
    with pytest.raises(StateError, match=r"Writes\.on_train_epoch_end changed the structure of Net"):
        trainer.fit(Net(rngs=nnx.Rngs(0)), make_batches())


# Counters and hyperparameters ------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_counters_inside_a_step_are_traced_and_right_at_every_step(strategy: str) -> None:
    traced, rows = [], []

    class Counts(Linear):
        def training_step(self, batch: Any) -> Any:
            traced.append(
                isinstance(self.global_step, jax.core.Tracer) and isinstance(self.current_epoch, jax.core.Tracer)
            )
            self.log_dict({"at_step": self.global_step, "at_epoch": self.current_epoch})
            return super().training_step(batch)

    keep = make_callback(
        on_log=lambda trainer, values, step: rows.append((step, values["at_step"], values["at_epoch"]))
    )
    make_trainer(keep, strategy=strategy, max_epochs=2, log_every_n_steps=1).fit(Counts(), make_batches(2))
    assert all(traced)
    assert rows == [(0, 0, 0), (1, 1, 0), (2, 2, 1), (3, 3, 1)]


def test_counters_inside_a_validation_step_are_those_of_training() -> None:
    rows = []

    class Counts(Linear):
        def validation_step(self, batch: Any) -> Any:
            self.log_dict({"at_step": self.global_step, "at_epoch": self.current_epoch})

    keep = make_callback(on_log=lambda trainer, values, step: rows.append((values["at_step"], values["at_epoch"])))
    make_trainer(keep, max_epochs=2).fit(Counts(), make_batches(2), make_batches(2))
    assert rows == [(2, 0), (4, 1)]


def test_global_step_counts_windows_under_accumulation() -> None:
    seen = []

    class Counts(Linear):
        def training_step(self, batch: Any) -> Any:
            return {"loss": super().training_step(batch), "step": self.global_step}

    keep = make_callback(on_train_batch_end=lambda t, m, outputs, *_: seen.append(int(outputs["step"])))
    make_trainer(keep, accumulate_grad_batches=2).fit(Counts(), make_batches(5))
    assert seen == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_idx_inside_a_step_counts_within_the_epoch(strategy: str) -> None:
    seen = []

    class Counts(Linear):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return {"loss": super().training_step(batch), "i": batch_idx}

    keep = make_callback(on_train_batch_end=lambda t, m, outputs, *_: seen.append(int(outputs["i"])))
    make_trainer(keep, strategy=strategy, max_epochs=2).fit(Counts(), make_batches(3))
    assert seen == [0, 1, 2, 0, 1, 2]


def test_counters_in_a_hook_are_ints() -> None:
    seen = []
    keep = make_callback(on_train_batch_end=lambda t, m, *_: seen.append((m.global_step, m.current_epoch)))
    make_trainer(keep, max_epochs=2).fit(Linear(), make_batches(2))
    assert seen == [(1, 0), (2, 0), (3, 1), (4, 1)] and {type(x) for pair in seen for x in pair} == {int}


def test_the_module_knows_its_trainer() -> None:
    module, trainer = Linear(), make_trainer()
    trainer.fit(module, make_batches())
    assert module.trainer is trainer


def test_a_module_without_a_trainer_says_so() -> None:
    with pytest.raises(AttributeError, match="not attached to a Trainer"):
        Linear().trainer  # noqa: B018


class Configured(Linear):
    """A constructor with all kinds of arguments."""

    def __init__(
        self, width: int, rate: float = 0.5, *, names: Any = ("a", "b"), fn: Any = jnp.tanh, **more: Any
    ) -> None:
        super().__init__()


def test_hyperparameters_are_the_constructors_json_values_with_defaults() -> None:
    module = Configured(8, names=["c"], rngs=nnx.Rngs(0), table=np.ones(2), extra=None)
    assert module.hparams == {"width": 8, "rate": 0.5, "names": ["c"], "extra": None}


def test_hyperparameters_are_not_in_the_graph() -> None:
    assert nnx.graphdef(Configured(8)) == nnx.graphdef(Configured(16, rate=0.1))


def test_the_trainer_is_not_in_the_graph() -> None:
    module = Linear()
    before = nnx.graphdef(module)
    make_trainer().fit(module, make_batches())
    assert nnx.graphdef(module) == before


def test_hyperparameters_cannot_be_changed_from_outside() -> None:
    module = Configured(8)
    module.hparams["width"] = 9
    assert module.hparams["width"] == 8


# Modes and other state -------------------------------------------------------------------------------


class Dropping(Linear):
    """Returns what dropout makes of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def training_step(self, batch: Any) -> Any:
        return {"loss": super().training_step(batch), "ones": self.dropout(jnp.ones_like(batch["x"]))}

    def validation_step(self, batch: Any) -> Any:
        self.log("mean", jnp.mean(self.dropout(jnp.ones_like(batch["x"]))))

    test_step = validation_step

    def predict_step(self, batch: Any) -> Any:
        return self.dropout(jnp.ones_like(batch["x"]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_drops_in_training_and_draws_anew_each_step(strategy: str) -> None:
    seen = []
    keep = make_callback(on_train_batch_end=lambda t, m, outputs, *_: seen.append(np.array(outputs["ones"])))
    make_trainer(keep, strategy=strategy).fit(Dropping(), make_batches(2, rows=64))
    assert [sorted(set(ones.ravel())) for ones in seen] == [[0.0, 2.0]] * 2
    assert (seen[0] != seen[1]).any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_is_off_in_validation_test_and_predict(strategy: str) -> None:
    module, batches, trainer = Dropping(), make_batches(1), make_trainer(strategy=strategy)
    trainer.fit(module, batches, batches)
    assert trainer.callback_metrics["mean"] == 1.0
    assert trainer.validate(module, batches) == trainer.test(module, batches) == [{"mean": 1.0}]
    np.testing.assert_array_equal(trainer.predict(module, batches)[0], np.ones((8, 3)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_sanity_check_does_not_change_training(strategy: str) -> None:
    class Noisy(Dropping):
        def training_step(self, batch: Any) -> Any:
            return jnp.mean(self.dropout(batch["x"] @ self.kernel))

    checked, unchecked, batches = Noisy(), Noisy(), make_batches()
    make_trainer(strategy=strategy, num_sanity_val_steps=2).fit(checked, batches, batches)
    make_trainer(strategy=strategy).fit(unchecked, batches)
    np.testing.assert_array_equal(np.asarray(checked.kernel[...]), np.asarray(unchecked.kernel[...]))


class Normed(jl.TrainModule):
    """BatchNorm and a linear layer."""

    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))
        self.kernel = nnx.Param(jnp.linspace(-1.0, 1.0, 3)[:, None])

    def training_step(self, batch: Any) -> Any:
        return jnp.mean((self.norm(batch["x"]) @ self.kernel - batch["y"]) ** 2)

    def predict_step(self, batch: Any) -> Any:
        return self.norm(batch["x"])

    def configure_optimizers(self) -> Any:
        return jl.Optimizer(SGD, wrt=nnx.All(nnx.Param, nnx.PathContains("kernel")))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_norm_keeps_running_statistics_and_predicts_with_them(strategy: str) -> None:
    module, batches, trainer = Normed(), make_batches(3, rows=16), make_trainer(strategy=strategy)
    trainer.fit(module, batches)
    mean, var = np.zeros(3), np.ones(3)
    for batch in batches:
        mean, var = 0.9 * mean + 0.1 * batch["x"].mean(0), 0.9 * var + 0.1 * batch["x"].var(0)
    np.testing.assert_allclose(np.asarray(module.norm.mean[...]), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(module.norm.var[...]), var, rtol=1e-5, atol=1e-6)
    expected = (batches[0]["x"] - mean) / np.sqrt(var + 1e-5)
    np.testing.assert_allclose(trainer.predict(module, batches[:1])[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("evaluating", [False, True])
def test_the_modules_own_mode_is_as_it_was_after_fit(evaluating: bool) -> None:
    module, batches = Dropping(), make_batches(1)
    if evaluating:
        module.eval()
    trainer = make_trainer()
    trainer.fit(module, batches, batches)
    trainer.predict(module, batches)
    assert module.dropout.deterministic is evaluating


def test_a_module_in_eval_mode_trains_in_it_and_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    module, seen = Dropping(), []
    module.eval()
    keep = make_callback(on_train_batch_end=lambda t, m, outputs, *_: seen.append(np.array(outputs["ones"])))
    make_trainer(keep).fit(module, make_batches(2, rows=64))
    assert all((ones == 1).all() for ones in seen)
    assert module.dropout.deterministic
    (told,) = [r.getMessage() for r in caplog.records if "evaluation mode" in r.getMessage()]
    assert told.startswith("Dropping is wholly in evaluation mode") and "Call module.train() before fit" in told


class Probing(jl.TrainModule):
    """A backbone with statistics and dropout, and a head."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.backbone = nnx.Sequential(nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
        self.head = nnx.Linear(3, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=None, rngs=rngs)

    def training_step(self, batch: Any) -> Any:
        ones = jnp.ones_like(batch["x"])
        features = self.backbone(batch["x"])
        return {
            "loss": jnp.mean((self.head(features) - batch["y"]) ** 2),
            "frozen": self.backbone.layers[1](ones),
            "trained": self.dropout(ones),
        }

    def validation_step(self, batch: Any) -> Any:
        self.log("dropped", jnp.mean(self.dropout(jnp.ones_like(batch["x"])) == 0))

    def configure_optimizers(self) -> Any:
        return SGD


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_part_in_eval_mode_stays_in_it_and_the_rest_trains(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    module, seen = Probing(), []
    module.backbone.eval()
    keep = make_callback(
        on_train_batch_end=lambda t, m, outputs, *_: seen.append({k: np.array(x) for k, x in outputs.items()})
    )
    trainer = make_trainer(keep, strategy=strategy)
    trainer.fit(module, make_batches(2, rows=64), make_batches(1, rows=64))
    assert all((outputs["frozen"] == 1).all() and (outputs["trained"] == 0).any() for outputs in seen)
    assert trainer.callback_metrics["dropped"] == 0  # validation is in evaluation mode wholly
    assert np.asarray(module.backbone.layers[0].mean[...]).tolist() == [0, 0, 0]
    modes = module.backbone.layers[0].use_running_average, module.backbone.layers[1].deterministic
    assert (*modes, module.dropout.deterministic) == (True, True, None)
    assert "evaluation mode" not in caplog.text


def test_a_train_method_of_the_modules_own_says_which_parts_train() -> None:
    class Frozen(Probing):
        def train(self, **attributes: Any) -> None:
            super().train(**attributes)
            self.backbone.eval()

    module = Frozen()
    make_trainer().fit(module, make_batches(2, rows=64))
    assert np.asarray(module.backbone.layers[0].mean[...]).tolist() == [0, 0, 0]


class Tied(jl.TrainModule):
    """One matrix that encodes and decodes, through two layers that share it."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.encode = nnx.Linear(3, 3, rngs=rngs)
        self.decode = nnx.Linear(3, 3, rngs=rngs)
        self.decode.kernel = self.encode.kernel

    def training_step(self, batch: Any) -> Any:
        return jnp.mean((self.decode(jnp.tanh(self.encode(batch["x"]))) - batch["y"]) ** 2)

    def configure_optimizers(self) -> Any:
        return SGD


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_weights_are_one_leaf_and_train_as_one(strategy: str) -> None:
    module, batches, trainer = Tied(rngs=nnx.Rngs(0)), make_batches(), make_trainer(strategy=strategy)
    trainer.fit(module, batches)
    assert len(jax.tree.leaves(trainer.state.params)) == 3
    assert module.encode.kernel is module.decode.kernel
    assert_same_params(module, HandLoop(Tied(rngs=nnx.Rngs(0)))(*batches).module)


class Counter(nnx.Variable):
    """A custom kind of state."""


class Counting(Linear):
    """Counts its steps and remembers a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter(jnp.zeros((), jnp.int32))
        self.mean = Counter(jnp.zeros(()))

    def training_step(self, batch: Any) -> Any:
        self.count[...] += 1
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * jnp.mean(batch["x"])
        return super().training_step(batch)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_custom_variables_advance_with_each_batch(strategy: str) -> None:
    module, batches = Counting(), make_batches()
    make_trainer(strategy=strategy, max_epochs=2).fit(module, batches)
    mean = 0.0
    for batch in batches * 2:
        mean = 0.5 * mean + 0.5 * batch["x"].mean()
    assert int(module.count[...]) == 6
    assert float(module.mean[...]) == pytest.approx(float(mean), rel=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_custom_variables_advance_with_each_batch_of_a_window(strategy: str) -> None:
    module = Counting()
    make_trainer(strategy=strategy, accumulate_grad_batches=2).fit(module, make_batches(5))
    assert int(module.count[...]) == 5


@pytest.mark.parametrize("strategy", ["single", "fsdp", "shard_map"])
def test_a_validation_step_that_writes_state_is_refused_before_training(strategy: str) -> None:
    class Writing(Counting):
        def validation_step(self, batch: Any) -> Any:
            self.count[...] += 100

    module = Writing()
    with pytest.raises(StateError, match=r"Writing\.validation_step wrote to count\. Only training changes the state"):
        make_trainer(strategy=strategy, num_sanity_val_steps=1).fit(module, make_batches(), make_batches(2))
    assert int(module.count[...]) == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_outside_of_wrt_stay_as_they_were(strategy: str) -> None:
    class Frozen(Net):
        def configure_optimizers(self) -> Any:
            return jl.Optimizer(SGD, wrt=nnx.All(nnx.Param, nnx.PathContains("outer")))

    module, start, batches = Frozen(rngs=nnx.Rngs(0)), params_of(Net(rngs=nnx.Rngs(0))), make_batches()
    make_trainer(strategy=strategy).fit(module, batches)
    for name, x in params_of(module).items():
        assert (x == start[name]).all() == ("outer" not in name), name
    wrt = nnx.All(nnx.Param, nnx.PathContains("outer"))
    assert_same_params(module, HandLoop(Net(rngs=nnx.Rngs(0)), wrt=wrt)(*batches).module)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_that_compute_in_bfloat16_train_float32_parameters(strategy: str) -> None:
    class Half(Linear):
        def __init__(self) -> None:
            self.layer = nnx.Linear(3, 1, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

        def training_step(self, batch: Any) -> Any:
            out = self.layer(batch["x"])
            assert out.dtype == jnp.bfloat16
            return jnp.mean((out - batch["y"]) ** 2)

    module, batches = Half(), make_batches()
    before = np.array(module.layer.kernel[...])
    make_trainer(strategy=strategy).fit(module, batches)
    after = np.asarray(module.layer.kernel[...])
    assert after.dtype == np.float32 and (after != before).all()
    assert (after != after.astype(jnp.bfloat16)).any()  # the updates were not rounded


def test_a_step_is_traced_once() -> None:
    traced = []

    class Notes(Linear):
        def training_step(self, batch: Any) -> Any:
            traced.append(1)
            return super().training_step(batch)

    make_trainer(max_epochs=2).fit(Notes(), make_batches())
    assert len(traced) == 1


# What a step may not do ------------------------------------------------------------------------------


def training(step: Callable[[Any, Any], Any], base: type[jl.TrainModule] = Linear) -> jl.TrainModule:
    """Return a module with this function as its training_step."""
    return type("Mine", (base,), {"training_step": step})()


def test_a_write_to_a_frozen_parameter_in_a_step_is_kept() -> None:
    class Target(Linear):
        def training_step(self, batch: Any) -> Any:
            self.bias[...] = self.bias[...] + 1.0
            return super().training_step(batch)

        def configure_optimizers(self) -> Any:
            return jl.Optimizer(SGD, wrt=nnx.All(nnx.Param, nnx.PathContains("kernel")))

    module = Target()
    make_trainer().fit(module, make_batches())
    assert module.bias[...].tolist() == [3.0]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_variable_that_a_step_rounds_is_kept_rounded(precision: str) -> None:
    class Rounding(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.third = nnx.Variable(jnp.float32(1 / 3))

        def training_step(self, batch: Any) -> Any:
            self.third[...] = self.third[...].astype(jnp.bfloat16).astype(jnp.float32)
            return super().training_step(batch)

    module = Rounding()
    make_trainer(precision=precision).fit(module, make_batches(1))
    assert float(module.third[...]) == 0.333984375


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_scanned_layers_write_nothing_whatever_axis_they_are_stacked_on(axis: int, precision: str) -> None:
    axes = nnx.StateAxes({nnx.Param: axis, ...: 0})

    class Scanned(jl.TrainModule):
        def __init__(self) -> None:
            keys = jax.random.split(jax.random.key(0), 3)
            self.layers = nnx.vmap(lambda key: nnx.Linear(3, 3, rngs=nnx.Rngs(key)), out_axes=axes)(keys)

        def loss(self, batch: Any) -> Any:
            run = nnx.scan(lambda layer, x: jnp.tanh(layer(x)), in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)
            return jnp.mean(run(self.layers, batch["x"]) ** 2)

        def training_step(self, batch: Any) -> Any:
            return self.loss(batch)

        def validation_step(self, batch: Any) -> None:
            self.log("val", self.loss(batch))

        def configure_optimizers(self) -> Any:
            return SGD

    trainer = make_trainer(precision=precision)
    trainer.fit(Scanned(), make_batches(1), make_batches(1))
    assert trainer.callback_metrics["val"] > 0


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sowing_in_a_step_is_refused_by_name() -> None:
    def step(self: Any, batch: Any) -> Any:
        self.sow(nnx.Intermediate, "features", batch["x"])
        return Linear.training_step(self, batch)

    with pytest.raises(
        StateError, match=r"training_step changed features.* from nothing.*nnx\.pop\(self, nnx\.Intermediate\)"
    ):
        make_trainer().fit(training(step), make_batches())


def test_a_new_variable_in_a_step_is_refused_by_name() -> None:
    def step(self: Any, batch: Any) -> Any:
        self.cache = nnx.Variable(jnp.zeros(2))
        return Linear.training_step(self, batch)

    with pytest.raises(StateError, match=r"training_step changed cache from nothing"):
        make_trainer().fit(training(step), make_batches())


def test_a_new_parameter_in_a_step_is_refused_by_name() -> None:
    def step(self: Any, batch: Any) -> Any:
        self.extra = nnx.Param(jnp.zeros(2))
        return Linear.training_step(self, batch)

    with pytest.raises(StateError, match="extra"):
        make_trainer().fit(training(step), make_batches())


@pytest.mark.parametrize("value", [jnp.zeros(2), jnp.zeros((), jnp.float32)], ids=["shape", "dtype"])
def test_state_of_another_shape_or_dtype_is_refused_by_name(value: Any) -> None:
    def step(self: Any, batch: Any) -> Any:
        self.count.set_value(value)
        return Linear.training_step(self, batch)

    with pytest.raises(StateError, match=r"training_step changed count from int32\[\] to float32"):
        make_trainer().fit(training(step, Counting), make_batches())


# jl.lazy ---------------------------------------------------------------------------------------------

LAZY = [(name, n) for name in ("ddp", "fsdp", "shard_map", "pmap") for n in (1, 2, 8)]
LAZY += [("simulate:1", "auto"), ("simulate:2", "auto"), ("simulate:8", "auto"), ("single", 1), ("zero1", 8)]


def initial_params(model: Any, **arguments: Any) -> dict[str, np.ndarray]:
    """Return the weights with which a fit starts."""
    found: list[dict[str, np.ndarray]] = []
    keep = make_callback(on_fit_start=lambda trainer, module: found.append(params_of(module)))
    make_trainer(keep, **arguments).fit(model, make_batches(1))
    return found[0]


def assert_bit_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize(("strategy", "devices"), LAZY)
def test_lazy_weights_are_those_of_the_class_under_every_strategy_and_device_count(strategy: str, devices: Any) -> None:
    lazily = initial_params(jl.lazy(Net, width=64, rngs=nnx.Rngs(7)), strategy=strategy, devices=devices)
    assert_bit_equal(lazily, params_of(Net(width=64, rngs=nnx.Rngs(7))))


def test_lazy_without_rngs_takes_the_seed_of_the_trainer() -> None:
    assert_bit_equal(initial_params(jl.lazy(Net), seed=5), params_of(Net(rngs=nnx.Rngs(5))))


def test_lazy_takes_an_int_as_rngs() -> None:
    assert_bit_equal(initial_params(jl.lazy(Net, rngs=3), seed=5), params_of(Net(rngs=nnx.Rngs(3))))


def test_lazy_does_not_advance_the_rngs_it_is_given() -> None:
    rngs, other = nnx.Rngs(3), nnx.Rngs(3)
    make_trainer().fit(jl.lazy(Net, rngs=rngs), make_batches(1))
    assert (jax.random.key_data(rngs()) == jax.random.key_data(other())).all()


def test_lazy_starts_from_where_its_rngs_stand() -> None:
    rngs, other = nnx.Rngs(3), nnx.Rngs(3)
    rngs(), other()
    assert_bit_equal(initial_params(jl.lazy(Net, rngs=rngs)), params_of(Net(rngs=other)))


def test_lazy_builds_a_class_without_rngs() -> None:
    assert_bit_equal(initial_params(jl.lazy(Linear, features=3)), params_of(Linear()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lazy_trains_as_the_module_itself_and_is_the_trainers_module(strategy: str) -> None:
    batches, trainer = make_batches(), make_trainer(strategy=strategy)
    trainer.fit(jl.lazy(Net, rngs=0), batches)
    assert type(trainer.module) is Net
    assert_same_params(trainer.module, net_by_hand())


def test_lazy_keeps_the_hyperparameters() -> None:
    trainer = make_trainer()
    trainer.fit(jl.lazy(Net, 32, rngs=0), make_batches(1))
    assert {"width": 32, "depth": 1}.items() <= trainer.module.hparams.items()


def test_lazy_weights_are_born_sharded_under_fsdp() -> None:
    shapes = []

    def look(trainer: jl.Trainer, module: Net, stage: str) -> None:
        shapes.append({shard.data.shape for shard in module.blocks[0].kernel[...].addressable_shards})

    make_trainer(make_callback(setup=look), strategy="fsdp").fit(jl.lazy(Net, rngs=0), make_batches(1))
    assert shapes == [{(8, 64)}]


def test_lazy_never_runs_the_constructor_outside_of_a_trace() -> None:
    concrete = []

    class Notes(Net):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            super().__init__(rngs=rngs)
            concrete.append(not isinstance(self.inner.kernel[...], jax.core.Tracer))

    make_trainer(strategy="fsdp").fit(jl.lazy(Notes), make_batches(1))
    assert concrete and not any(concrete)


def test_lazy_keeps_tied_weights_tied() -> None:
    batches, trainer = make_batches(), make_trainer(strategy="fsdp")
    trainer.fit(jl.lazy(Tied, rngs=0), batches)
    assert trainer.module.encode.kernel is trainer.module.decode.kernel
    assert_same_params(trainer.module, HandLoop(Tied(rngs=nnx.Rngs(0)))(*batches).module)


def test_one_lazy_module_may_be_built_twice() -> None:
    model = jl.lazy(Net, rngs=0)
    assert_bit_equal(initial_params(model), initial_params(model))


@pytest.mark.parametrize(
    "cls", [nnx.Linear, Linear(), "Net", lambda: Linear()], ids=["nnx", "object", "str", "function"]
)
def test_lazy_refuses_what_is_no_train_module_class(cls: Any) -> None:
    with pytest.raises(ArgumentError, match=r"jl\.lazy\(cls, \.\.\.\) takes a subclass of jl\.TrainModule"):
        jl.lazy(cls)


# Modules that cannot be trained ----------------------------------------------------------------------


def refused(error: type[Exception], message: str, model: Any, **arguments: Any) -> None:
    with pytest.raises(error, match=message):
        make_trainer(**arguments).fit(model, make_batches())


def test_a_class_in_place_of_a_module_is_refused() -> None:
    refused(ArgumentTypeError, r"got the class Linear\. Pass an instance, or jl\.lazy", Linear)


@pytest.mark.parametrize("model", [nnx.Linear(1, 1, rngs=nnx.Rngs(0)), None, {}], ids=["nnx", "None", "dict"])
def test_what_is_no_train_module_is_refused(model: Any) -> None:
    refused(ArgumentTypeError, f"takes a jaxlit.TrainModule as model, got {type(model).__name__}", model)


def test_a_missing_training_step_is_named() -> None:
    class Empty(jl.TrainModule):
        pass

    refused(ModuleError, r"Empty has no training_step\. Define training_step\(self, batch\)", Empty())


def test_a_missing_training_step_of_a_lazy_class_is_named() -> None:
    class Empty(jl.TrainModule):
        pass

    refused(ModuleError, "Empty has no training_step", jl.lazy(Empty))


def test_missing_configure_optimizers_is_named() -> None:
    class Stepping(jl.TrainModule):
        def training_step(self, batch: Any) -> Any:
            return jnp.zeros(())

    refused(ModuleError, r"fit needs Stepping\.configure_optimizers", Stepping())


def test_a_missing_validation_step_is_named_when_there_is_validation_data() -> None:
    class Training(Net):
        pass

    with pytest.raises(ModuleError, match="Training has no validation_step"):
        make_trainer().fit(Training(rngs=nnx.Rngs(0)), make_batches(), make_batches())


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_a_missing_step_of_evaluation_is_named(method: str) -> None:
    step = {"validate": "validation_step"}.get(method, f"{method}_step")
    with pytest.raises(ModuleError, match=f"Net has no {step}"):
        getattr(make_trainer(), method)(Net(rngs=nnx.Rngs(0)), make_batches())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("adam", r"must return an optax\.GradientTransformation or a jaxlit\.Optimizer, got 'adam'"),
        (None, r"must return an optax\.GradientTransformation or a jaxlit\.Optimizer, got None"),
        ([SGD, SGD], r"returned 2 optimizers; return one, joined by optax\.multi_transform"),
        ((SGD, SGD), r"returned 2 optimizers; return one, joined by optax\.multi_transform"),
        (optax.adam, r"must return an optax\.GradientTransformation"),
        (jl.Optimizer("adam"), r"must return an optax\.GradientTransformation"),
    ],
    ids=["str", "None", "list", "tuple", "function", "Optimizer of a str"],
)
def test_what_configure_optimizers_may_not_return(made: Any, message: str) -> None:
    class Wrong(Linear):
        def configure_optimizers(self) -> Any:
            return made

    refused(ModuleError, rf"Wrong\.configure_optimizers.*{message}", Wrong())


@pytest.mark.parametrize("strategy", ["single", "shard_map"])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: None, "got NoneType"),
        (lambda loss: "0.5", "got str"),
        (lambda loss: 0.5, "got float"),
        (lambda loss: loss.astype(jnp.int32), "got an array of int32"),
        (lambda loss: jnp.stack([loss, loss]), r"scalar loss, got shape \(2,\)\. Return loss\.mean\(\)"),
        (lambda loss: {"value": loss}, r"a dict without 'loss', with \['value'\]"),
        (lambda loss: {"loss": None}, "got NoneType"),
        (lambda loss: {"loss": loss, "name": "a"}, "returned a str at name"),
        (lambda loss: (loss, {}), "got tuple"),
    ],
    ids=["None", "str", "float", "int array", "vector", "dict", "None in a dict", "str in a dict", "tuple"],
)
def test_what_a_training_step_may_not_return(returned: Any, message: str, strategy: str) -> None:
    step = lambda self, batch: returned(Linear.training_step(self, batch))  # noqa: E731
    refused(ModuleError, rf"Mine\.training_step.*{message}", training(step), strategy=strategy)


@pytest.mark.parametrize(
    "step",
    [lambda self: 0.0, lambda self, batch, i, more: 0.0, lambda self, *, batch: 0.0],
    ids=["none", "three", "keyword"],
)
def test_a_step_with_a_wrong_signature_is_refused(step: Any) -> None:
    refused(
        ModuleError, r"Mine\.training_step\(.*must take \(self, batch\) or \(self, batch, batch_idx\)", training(step)
    )


def test_a_module_without_parameters_is_refused() -> None:
    class Bare(jl.TrainModule):
        def training_step(self, batch: Any) -> Any:
            return jnp.mean(batch["x"])

        def configure_optimizers(self) -> Any:
            return SGD

    refused(ModuleError, "Bare has no variable to train", Bare())


def test_an_integer_parameter_is_refused_by_name() -> None:
    class Whole(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.ids = nnx.Param(jnp.arange(3))

    refused(ModuleError, "Whole: ids is int32", Whole())


def test_a_refused_module_is_left_as_it_was() -> None:
    module = training(lambda self, batch: None)
    before = params_of(module)
    refused(ModuleError, "got NoneType", module)
    assert_bit_equal(params_of(module), before)


class Scanned(jl.TrainModule):
    """Layers made by vmap, run by scan and remat: every parameter comes back as a new value."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(4, 4, rngs=rngs)

        self.layers = make(rngs)

    def training_step(self, batch: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: nnx.Linear, x: jax.Array) -> jax.Array:
            return nnx.remat(lambda layer, x: nnx.tanh(layer(x)))(layer, x)

        return jnp.mean(run(self.layers, batch) ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.5)


@pytest.mark.parametrize("strategy", ["single", "fsdp", "shard_map", "pmap", "simulate:8"])
def test_scanned_and_rematerialised_layers_train_like_a_loop_over_them(strategy: str) -> None:
    batch = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    module = Scanned(rngs=nnx.Rngs(0))

    def loss(kernel: jax.Array, bias: jax.Array) -> jax.Array:
        x = batch
        for i in range(3):
            x = jnp.tanh(x @ kernel[i] + bias[i])
        return jnp.mean(x**2)

    kernel, bias = module.layers.kernel[...], module.layers.bias[...]
    for _ in range(2):
        steps = jax.grad(loss, (0, 1))(kernel, bias)
        kernel, bias = kernel - 0.5 * steps[0], bias - 0.5 * steps[1]
    make_trainer(strategy=strategy).fit(module, [batch, batch])
    np.testing.assert_allclose(module.layers.kernel[...], kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module.layers.bias[...], bias, rtol=1e-5, atol=1e-6)


def test_optax_multi_steps_is_taken_as_the_transform_that_it_wraps() -> None:
    class Every2(Scanned):
        def configure_optimizers(self) -> Any:
            return optax.MultiSteps(optax.sgd(0.5), 2)

    module = Every2(rngs=nnx.Rngs(0))
    before = np.array(module.layers.kernel[...])
    make_trainer(strategy="single").fit(module, [np.ones((8, 4), np.float32)])
    np.testing.assert_array_equal(module.layers.kernel[...], before)
