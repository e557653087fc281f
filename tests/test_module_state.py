"""The module around a run: it holds the newest arrays, takes what hooks write, and survives errors."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import ArgumentError, StateError

START = np.array([1.0, -1.0])
WRITTEN = np.array([0.5, 3.0])


class Line(jl.TrainModule):
    """y = x w: small enough to train by hand."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.asarray(START, jnp.float32))

    def loss(self, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ self.w - batch["y"]) ** 2)

    def training_step(self, batch: Any) -> jax.Array:
        return self.loss(batch)

    def validation_step(self, batch: Any) -> None:
        self.log("loss", self.loss(batch))

    def test_step(self, batch: Any) -> None:
        self.log("loss", self.loss(batch))

    def predict_step(self, batch: Any) -> jax.Array:
        return batch["x"] @ self.w

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


class Drawn(Line):
    """A line that begins at random weights, so that another seed or another draw shows."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jax.random.normal(rngs.params(), (2,)))


class Positional(Line):
    """The same with a generator that may be given by position, behind another argument."""

    def __init__(self, size: float, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(size * jax.random.normal(rngs.params(), (2,)))


def make_batches(count: int = 3, rows: int = 8) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return [{"x": draw(rows, 2), "y": draw(rows)} for _ in range(count)]


def by_hand(w: Any, batches: list[dict[str, np.ndarray]], rate: float = 0.1) -> np.ndarray:
    """Train `Line` by its formula, in float64."""
    w = np.asarray(w, np.float64)
    for batch in batches:
        x, y = (batch[key].astype(np.float64) for key in ("x", "y"))
        w = w - rate * 2 * x.T @ (x @ w - y) / len(y)
    return w


def loss_by_hand(w: Any, batches: list[dict[str, np.ndarray]]) -> float:
    """Return the mean loss of batches of equal size."""
    return float(
        np.mean([np.mean((b["x"].astype(np.float64) @ np.asarray(w, np.float64) - b["y"]) ** 2) for b in batches])
    )


def make_trainer(*callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return jl.Trainer(**({"strategy": "single", "max_epochs": 1} | quiet | arguments), callbacks=list(callbacks))


def on(**hooks: Callable[[jl.Trainer, Any], Any]) -> jl.Callback:
    """Return a callback that calls a function of (trainer, module) in each hook that is named."""
    made = {
        name: lambda self, trainer, module, *args, function=function: function(trainer, module)
        for name, function in hooks.items()
    }
    return type("On", (jl.Callback,), made)()


def read(trainer: jl.Trainer, module: Any) -> None:
    np.asarray(module.w[...])


def write(trainer: jl.Trainer, module: Any) -> None:
    module.w[...] = jnp.asarray(WRITTEN, jnp.float32)


def assert_weights(module: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(module.w[...]), expected, rtol=1e-6, atol=1e-6)


# Hooks that write -------------------------------------------------------------------------------------

BEFORE = ("on_fit_start", "on_train_start", "on_train_epoch_start")
AFTER = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)


@pytest.mark.parametrize("hook", BEFORE + AFTER)
def test_a_hook_may_write_after_another_callback_has_read(hook: str) -> None:
    batches = make_batches()
    reader = on(**dict.fromkeys((*BEFORE, *AFTER, "on_train_batch_end", "on_validation_batch_end"), read))
    module, trainer = Line(), make_trainer(reader, on(**{hook: write}))
    trainer.fit(module, batches, batches)
    expected = by_hand(WRITTEN, batches if hook in BEFORE else [])
    assert_weights(module, expected)
    np.testing.assert_allclose(np.asarray(trainer.state.params["w"]), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pmap"])
def test_a_write_after_a_read_reaches_the_next_epoch(strategy: str) -> None:
    batches = make_batches()
    half = lambda trainer, module: module.w.set_value(module.w[...] * 0.5)  # noqa: E731
    module = Line()
    make_trainer(on(on_train_batch_end=read, on_train_epoch_end=half), strategy=strategy, max_epochs=2).fit(
        module, batches
    )
    expected = START
    for _ in range(2):
        expected = by_hand(expected, batches) * 0.5
    assert_weights(module, expected)


def test_a_hook_of_the_module_may_write_after_the_model_summary_has_read() -> None:
    class Writes(Line):
        def on_train_start(self) -> None:
            write(self.trainer, self)

    batches, module = make_batches(), Writes()
    make_trainer(enable_model_summary=True).fit(module, batches)
    assert_weights(module, by_hand(WRITTEN, batches))


def test_the_second_of_two_writers_sees_what_the_first_has_written() -> None:
    double = lambda trainer, module: module.w.set_value(module.w[...] * 2)  # noqa: E731
    batches, module = make_batches(), Line()
    make_trainer(on(on_train_start=write), on(on_train_start=read), on(on_train_start=double)).fit(module, batches)
    assert_weights(module, by_hand(2 * WRITTEN, batches))


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_validation_batch_end"])
def test_a_write_in_a_batch_hook_is_refused_also_after_a_reader(hook: str) -> None:
    batches = make_batches()
    trainer = make_trainer(on(on_fit_start=read, **{hook: read}), on(**{hook: write}))
    with pytest.raises(StateError, match=f"{hook} wrote to w"):
        trainer.fit(Line(), batches, batches)


VERBS = {"validate": "validation", "test": "test", "predict": "predict"}


def assert_evaluated(verb: str, found: Any, weights: Any, batches: list[dict[str, np.ndarray]]) -> None:
    """Compare what validate, test or predict returned with the formula at these weights."""
    if verb == "predict":
        expected = np.concatenate([b["x"] @ np.asarray(weights, np.float64) for b in batches])
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-6, atol=1e-6)
    else:
        assert found[0]["loss"] == pytest.approx(loss_by_hand(weights, batches), rel=1e-6)


@pytest.mark.parametrize(
    ("hook", "strategy"), [("on_{}_start", "single"), ("on_{}_epoch_start", "single"), ("on_{}_start", "pmap")]
)
@pytest.mark.parametrize("verb", VERBS)
def test_what_a_hook_writes_before_an_evaluation_is_evaluated(verb: str, hook: str, strategy: str) -> None:
    batches, module = make_batches(), Line()
    trainer = make_trainer(on(**{hook.format(VERBS[verb]): write}), strategy=strategy)
    assert_evaluated(verb, getattr(trainer, verb)(module, batches), WRITTEN, batches)
    assert_weights(module, WRITTEN)


@pytest.mark.parametrize("verb", VERBS)
def test_weights_can_be_swapped_in_for_an_evaluation_and_out_again(verb: str) -> None:
    class Swap(jl.Callback):
        def swap(self, trainer: jl.Trainer, module: Any) -> None:
            self.kept = np.array(module.w[...])
            write(trainer, module)

        def back(self, trainer: jl.Trainer, module: Any) -> None:
            module.w[...] = jnp.asarray(self.kept)

    for when in ("start", "end"):
        for stage in VERBS.values():
            setattr(Swap, f"on_{stage}_{when}", Swap.swap if when == "start" else Swap.back)
    batches, module = make_batches(), Line()
    assert_evaluated(verb, getattr(make_trainer(Swap()), verb)(module, batches), WRITTEN, batches)
    assert_weights(module, START)


# Lazy modules -----------------------------------------------------------------------------------------


def drawn() -> np.ndarray:
    """Return the weights that jax itself draws from a generator of 0."""
    return np.asarray(Drawn(rngs=nnx.Rngs(0)).w[...])


@pytest.mark.parametrize(
    ("verb", "strategy"),
    [*((verb, "single") for verb in VERBS), *(("predict", x) for x in ("fsdp", "pmap", "simulate:8"))],
)
def test_a_lazy_module_can_be_read_in_the_hooks_of_an_evaluation_and_after_it(verb: str, strategy: str) -> None:
    seen: list[np.ndarray] = []
    look = lambda trainer, module: seen.append(np.array(module.w[...]))  # noqa: E731
    stage, batches = VERBS[verb], make_batches()
    hooks = {f"on_{stage}_{when}": look for when in ("start", "batch_end", "end")}
    trainer = make_trainer(on(**hooks), strategy=strategy)
    assert_evaluated(verb, getattr(trainer, verb)(jl.lazy(Drawn), batches), drawn(), batches)
    assert_weights(trainer.module, drawn())
    np.testing.assert_allclose(seen, [drawn()] * (len(batches) + 2), rtol=1e-6)
    # And it can be evaluated once more.
    assert_evaluated(verb, getattr(trainer, verb)(None, batches), drawn(), batches)


@pytest.mark.parametrize(("verb", "strategy"), [*((verb, "single") for verb in VERBS), ("test", "fsdp")])
def test_an_evaluation_of_the_lazy_module_that_was_trained_takes_the_trained_weights(verb: str, strategy: str) -> None:
    batches, model = make_batches(), jl.lazy(Drawn)
    trainer = make_trainer(strategy=strategy, max_epochs=2)
    trainer.fit(model, batches)
    trained = by_hand(drawn(), batches * 2)
    assert_evaluated(verb, getattr(trainer, verb)(model, batches), trained, batches)
    assert_weights(trainer.module, trained)


def test_another_lazy_module_than_the_trained_one_is_built_anew() -> None:
    batches, trainer = make_batches(), make_trainer()
    trainer.fit(jl.lazy(Drawn), batches)
    assert_evaluated("test", trainer.test(jl.lazy(Drawn), batches), drawn(), batches)


@pytest.mark.parametrize("rngs", [7, nnx.Rngs(7)])
def test_a_lazy_module_takes_its_generator_by_position(rngs: Any) -> None:
    batches, trainer = make_batches(), make_trainer()
    trainer.fit(jl.lazy(Positional, 2.0, rngs), batches)
    assert_weights(trainer.module, by_hand(Positional(2.0, nnx.Rngs(7)).w[...], batches))
    assert trainer.module.hparams["size"] == 2.0


# Hyperparameters and the Trainer inside steps ---------------------------------------------------------


class Scaled(Line):
    """Reads its hyperparameters and its Trainer where a step is traced."""

    def __init__(self, scale: float = 3.0) -> None:
        super().__init__()

    def training_step(self, batch: Any) -> jax.Array:
        return self.loss(batch) * self.hparams["scale"] / self.trainer.max_epochs

    def validation_step(self, batch: Any) -> None:
        self.log("read", self.hparams["scale"] * self.trainer.max_epochs + 0 * self.loss(batch))

    def predict_step(self, batch: Any) -> jax.Array:
        return batch["x"] @ self.w * self.hparams["scale"]


@pytest.mark.parametrize(
    ("strategy", "lazy"), [("single", False), ("fsdp", True), ("shard_map", False), ("pmap", True)]
)
def test_a_step_reads_its_hyperparameters_and_its_trainer(strategy: str, lazy: bool) -> None:
    batches, trainer = make_batches(), make_trainer(strategy=strategy, max_epochs=2)
    trainer.fit(jl.lazy(Scaled, scale=1.5) if lazy else Scaled(scale=1.5), batches)
    weights = by_hand(START, batches * 2, rate=0.1 * 1.5 / 2)
    assert_weights(trainer.module, weights)
    assert trainer.validate(None, batches)[0]["read"] == 3.0
    assert_evaluated("predict", trainer.predict(None, batches), 1.5 * weights, batches)


def test_a_dataclass_module_without_a_hash_is_trained() -> None:
    @dataclasses.dataclass
    class Data(Line):
        w: nnx.Param
        scale: float = 3.0

        def training_step(self, batch: Any) -> jax.Array:
            return self.loss(batch) * self.hparams["scale"]

    assert Data.__hash__ is None  # what a table by hash could not hold
    batches, modules = make_batches(), [Data(nnx.Param(jnp.ones(2)), 0.5), Data(nnx.Param(jnp.ones(2)))]
    for module in modules:
        make_trainer().fit(module, batches)
    for module, scale in zip(modules, (0.5, 3.0), strict=True):
        assert_weights(module, by_hand(np.ones(2), batches, rate=0.1 * scale))
        assert module.hparams == {"scale": scale}


# A second Trainer -------------------------------------------------------------------------------------

PAIRS = [("single", "single"), ("ddp", "single"), ("single", "fsdp"), ("shard_map", "ddp")]  # (outer, inner)


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_a_second_trainer_may_validate_in_a_hook(outer: str, inner: str) -> None:
    batches, losses, trainers = make_batches(), [], []

    def validate(trainer: jl.Trainer, module: Any) -> None:
        losses.append(make_trainer(strategy=inner).validate(module, batches)[0]["loss"])
        trainers.append(module.trainer)

    module, trainer = Line(), make_trainer(on(on_train_epoch_end=validate), strategy=outer, max_epochs=2)
    trainer.fit(module, batches)
    assert_weights(module, by_hand(START, batches * 2))
    expected = [loss_by_hand(by_hand(START, batches * epochs), batches) for epochs in (1, 2)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert all(x is trainer for x in trainers)


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_a_second_trainer_may_fit_in_a_hook_and_the_first_goes_on_from_there(outer: str, inner: str) -> None:
    batches, extra, seen = make_batches(), make_batches(5)[3:], []

    def fit(trainer: jl.Trainer, module: Any) -> None:
        make_trainer(strategy=inner).fit(module, extra)
        seen.append((module.trainer is trainer, module.global_step, module.current_epoch))

    module, trainer = Line(), make_trainer(on(on_train_epoch_end=fit), strategy=outer, max_epochs=2)
    trainer.fit(module, batches)
    assert_weights(module, by_hand(START, [*batches, *extra] * 2))
    assert seen == [(True, 3, 0), (True, 6, 1)]


def test_a_second_trainer_that_fails_in_a_hook_leaves_the_module_with_the_first() -> None:
    def fail(trainer: jl.Trainer, module: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            make_trainer(on(on_validation_start=lambda *_: 1 / 0)).validate(module, make_batches())
        assert module.trainer is trainer

    batches, module = make_batches(), Line()
    make_trainer(on(on_train_epoch_end=fail), max_epochs=2).fit(module, batches)
    assert_weights(module, by_hand(START, batches * 2))


def test_the_same_trainer_in_its_own_hook_is_refused_and_keeps_its_counts() -> None:
    batches, counts = make_batches(), []

    def again(trainer: jl.Trainer, module: Any) -> None:
        for verb in ("fit", *VERBS):
            with pytest.raises(ArgumentError, match="second Trainer"):
                getattr(trainer, verb)(module, batches)
        counts.append((trainer.global_step, trainer.current_epoch, module.trainer is trainer))

    trainer, module = make_trainer(on(on_train_epoch_end=again), max_epochs=2), Line()
    trainer.fit(module, batches)
    assert counts == [(3, 0, True), (6, 1, True)]
    assert (trainer.global_step, trainer.current_epoch) == (6, 2)
    assert_weights(module, by_hand(START, batches * 2))


@pytest.mark.parametrize("kind", ["DDP", "FSDP", "ShardMapDDP", "PMap"])
def test_a_strategy_object_of_two_trainers_runs_on_the_devices_of_each(kind: str) -> None:
    strategy, batches = getattr(jl.strategies, kind)(), make_batches()
    trainers = {count: make_trainer(strategy=strategy, devices=count) for count in (8, 2)}
    for count in (8, 2, 8):
        module = Line()
        trainers[count].fit(module, batches)
        assert_weights(module, by_hand(START, batches))
        assert module.w[...].sharding.device_set == set(jax.devices()[:count])


def test_a_trainer_keeps_its_devices_when_another_takes_its_strategy_object() -> None:
    strategy, batches = jl.strategies.DDP(), make_batches()
    first, second = (make_trainer(strategy=strategy, devices=count) for count in (8, 2))
    first.fit(Line(), batches)
    second.fit(Line(), batches)
    found = first.apply(Line.predict_step, batches[0])
    np.testing.assert_allclose(found, batches[0]["x"] @ by_hand(START, batches), rtol=1e-6, atol=1e-6)


def test_a_second_trainer_may_validate_in_a_batch_hook() -> None:
    module, batches, found = Line(), make_batches(), []

    class Validate(jl.Callback):
        def on_train_batch_end(self, trainer: jl.Trainer, module: Any, *_: Any) -> None:
            found.extend(make_trainer().validate(module, batches))

    make_trainer(Validate(), max_epochs=1).fit(module, batches)
    weights = [by_hand(START, batches[: i + 1]) for i in range(len(batches))]
    assert [x["loss"] for x in found] == pytest.approx([loss_by_hand(w, batches) for w in weights], rel=1e-5)


# Shards stay shards -----------------------------------------------------------------------------------

SHAPE = (8, 331)  # of no other array


class Wide(Line):
    """A line with an array that FSDP splits."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nnx.Param(jnp.zeros(SHAPE))


def whole_copies() -> list[Any]:
    """Return the shardings of all living arrays of SHAPE that lie whole on several devices."""
    found = [x.sharding for x in jax.live_arrays() if x.shape == SHAPE]
    return [s for s in found if len(s.device_set) > 1 and s.is_fully_replicated]


@pytest.mark.parametrize(("second", "lazy"), [("fit", False), ("fit", True), ("validate", False), ("predict", True)])
def test_fsdp_places_shards_again_without_a_whole_copy(
    second: str, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, moves, copies = make_batches(), [], []
    look = lambda trainer, module: copies.extend(whole_copies())  # noqa: E731
    stages = [f"on_{stage}_{when}" for stage in ("train", *VERBS.values()) for when in ("start", "end")]
    trainer = make_trainer(on(setup=look, **dict.fromkeys(stages, look)), strategy="fsdp")
    trainer.fit(jl.lazy(Wide) if lazy else Wide(), batches)
    module, put = trainer.module, jax.device_put

    def spy(x: Any, device: Any = None, **arguments: Any) -> Any:
        placed = put(x, device, **arguments)
        moves.extend(y.sharding for y in jax.tree.leaves(placed) if y.shape == SHAPE)
        return placed

    split = module.wide[...].sharding
    assert split.shard_shape(SHAPE) == (1, 331)
    monkeypatch.setattr(jax, "device_put", spy)
    getattr(trainer, second)(module, batches)
    assert module.wide[...].sharding.is_equivalent_to(split, 2)
    assert not [s for s in moves if s.is_fully_replicated]
    assert not copies


@pytest.mark.parametrize(
    ("first", "second"), [("single", "fsdp"), ("shard_map", "fsdp"), ("fsdp", "single"), ("ddp", "pmap")]
)
def test_a_module_goes_from_one_strategy_to_another(first: str, second: str) -> None:
    batches, module = make_batches(), Wide()
    for strategy in (first, second):
        make_trainer(strategy=strategy).fit(module, batches)
    assert_weights(module, by_hand(START, batches * 2))
    if second == "fsdp":
        assert module.wide[...].sharding.shard_shape(SHAPE) == (1, 331)


# Plain arrays -----------------------------------------------------------------------------------------


class Offset(Line):
    """Holds a jax array that is no Variable."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = jnp.array([2.0, 4.0])

    def loss(self, batch: Any) -> jax.Array:
        return jnp.mean(((batch["x"] + self.offset) @ self.w - batch["y"]) ** 2)


@pytest.mark.parametrize("strategy", ["single", "fsdp", "pmap"])
def test_a_plain_array_that_steps_read_stays_the_callers(strategy: str) -> None:
    batches, module, trainer = make_batches(), Offset(), make_trainer(strategy=strategy, max_epochs=2)
    trainer.fit(module, batches)
    moved = [{**b, "x": b["x"] + np.array([2.0, 4.0])} for b in batches]
    np.testing.assert_allclose(np.asarray(module.offset), [2.0, 4.0])
    assert module.w[...].shape == (2,)
    assert trainer.validate(None, batches)[0]["loss"] == pytest.approx(loss_by_hand(module.w[...], moved), rel=1e-5)


@pytest.mark.parametrize("strategy", ["single", "fsdp", "pmap"])
def test_a_plain_array_that_a_step_replaces_is_refused_by_its_name(strategy: str) -> None:
    class Counts(Offset):
        def training_step(self, batch: Any) -> jax.Array:
            self.offset = self.offset + 1
            return self.loss(batch)

    module = Counts()
    with pytest.raises(StateError, match="offset"):
        make_trainer(strategy=strategy).fit(module, make_batches())
    np.testing.assert_array_equal(np.asarray(module.offset), [2.0, 4.0])


# Errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "where", "reads"),
    [
        *itertools.product(
            ["single"], ["a hook", "the loader", "the trace of a step", "a validation step"], [False, True]
        ),
        *itertools.product(["ddp", "pmap"], ["the trace of a step"], [True]),
    ],
)
def test_after_an_error_the_module_holds_the_arrays_of_the_last_step(strategy: str, where: str, reads: bool) -> None:
    class Fails(Line):
        def training_step(self, batch: Any) -> jax.Array:
            if batch["x"].shape[0] == 4:  # of a tail, whose step is traced anew
                raise ZeroDivisionError
            return self.loss(batch)

        def validation_step(self, batch: Any) -> None:
            raise ZeroDivisionError

    batches = make_batches(4)

    class Loader:
        def __iter__(self) -> Any:
            for i, batch in enumerate(batches):
                if where == "the loader" and i == 3:
                    raise ZeroDivisionError
                yield {k: v[:4] for k, v in batch.items()} if where == "the trace of a step" and i == 2 else batch

    def fail(trainer: jl.Trainer, module: Any) -> None:
        if where == "a hook" and trainer.global_step == 2:
            raise ZeroDivisionError

    module = Fails()
    reader = on(on_train_batch_end=read) if reads else jl.Callback()
    trainer = make_trainer(reader, on(on_train_batch_end=fail), strategy=strategy)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, Loader(), batches if where == "a validation step" else None)
    # How far a loader is ahead of the step is its own affair.
    steps = {"a hook": 2, "the loader": trainer.global_step, "the trace of a step": 2}.get(where, 4)
    assert trainer.global_step == steps > 0
    assert_weights(module, by_hand(START, batches[:steps]))


def test_after_an_error_in_the_first_trace_the_module_is_as_it_was() -> None:
    class Fails(Line):
        def training_step(self, batch: Any) -> jax.Array:
            raise ZeroDivisionError

    module = Fails()
    with pytest.raises(ZeroDivisionError):
        make_trainer().fit(module, make_batches())
    assert_weights(module, START)
    with pytest.raises(AttributeError):
        module.unknown  # noqa: B018 - it is touched as any other object
    make_trainer().validate(module, make_batches())


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("hook", ["on_exception", "teardown"])
def test_an_error_at_the_end_of_a_run_keeps_no_other_from_its_teardown(hook: str, error: type[BaseException]) -> None:
    ended: list[str] = []

    def fail(trainer: jl.Trainer, module: Any) -> None:
        raise error("late")

    def note(trainer: jl.Trainer, module: Any) -> None:
        ended.append(hook)

    module = Line()
    trainer = make_trainer(on(on_train_end=lambda *_: 1 / 0), on(**{hook: fail}), on(on_exception=note, teardown=note))
    with pytest.raises(ZeroDivisionError) as caught:  # the first error is the one that is told
        trainer.fit(module, make_batches())
    assert len(ended) == 2
    assert any(error.__name__ in note for note in caught.value.__notes__)
    assert_weights(module, by_hand(START, make_batches()))


@pytest.mark.parametrize("error", [SystemExit, ValueError])
def test_an_error_in_a_teardown_alone_is_raised_after_the_others(error: type[BaseException]) -> None:
    ended: list[str] = []

    def fail(trainer: jl.Trainer, module: Any) -> None:
        raise error("late")

    trainer = make_trainer(on(teardown=fail), on(teardown=lambda *_: ended.append("teardown")))
    with pytest.raises(error, match="late"):
        trainer.fit(Line(), make_batches())
    assert ended == ["teardown"]
