"""The user's module around a run: it holds the newest arrays, takes what hooks write, and survives errors."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import numbered, random
from kit.by_hand import HandLoop, assert_same, mean
from kit.journal import hooks, raising
from kit.modules import Linear, Mean, Net, module
from kit.refusals import fit_refuses
from kit.trainers import BARE, FOUR, SEVERAL, STRATEGIES, THREE, fit, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.errors import StateError

VERBS = {"validate": "validation", "test": "test", "predict": "predict"}
WRITTEN = 40.0


def weight(model: Any) -> float:
    return float(np.asarray(model.w[...])[0])


def on(**functions: Callable[[jl.Trainer, Any], Any]) -> jl.Callback:
    return hooks(**{name: lambda t, m, *_, function=function: function(t, m) for name, function in functions.items()})


def read(trainer: jl.Trainer, model: Any) -> None:
    np.asarray(model.w[...])


def write(trainer: jl.Trainer, model: Any) -> None:
    model.w[...] = jnp.full(1, WRITTEN)


def halve(trainer: jl.Trainer, model: Any) -> None:
    model.w.set_value(model.w[...] * 0.5)


@pytest.mark.parametrize("strategy", thinned(SEVERAL, "shard_map", full=FOUR[1:]))
def test_a_module_goes_from_one_strategy_to_another_and_back(strategy) -> None:
    model, batches, arrays, before = Linear(), random(), [], []
    kernel = model.kernel
    for name in ("single", strategy, "single"):
        arrays += jax.tree.leaves(nnx.as_pure(nnx.state(model)))
        before += [np.array(x) for x in arrays[-2:]]
        assert fit(model, batches, strategy=splitting(name)).module is model and model.kernel is kernel
    by_hand = Linear()
    for _ in range(3):
        by_hand = HandLoop(by_hand)(*batches).module
    assert_same(model, by_hand)
    # Arrays that were held before stay readable and unchanged.
    for x, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(np.asarray(x), copy)
    result = model(batches[0]["x"])  # and the module may be called
    np.testing.assert_allclose(result, by_hand(batches[0]["x"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "single", "shard_map", full=FOUR))
def test_a_batch_hook_sees_the_weights_after_its_step(strategy) -> None:
    seen, own = list[Any](), list[float]()  # by a callback, and by the module's own hook
    look = on(on_train_batch_end=lambda t, m: seen.append((weight(m), float(t.state.params["w"][0]))))
    model = module(on_train_batch_end=lambda self, outputs, batch, i: own.append(weight(self)))
    fit(model, numbered(4), None, look, strategy=strategy)
    expected = [mean([[k + 1] for k in range(i + 1)]) for i in range(4)]
    assert own == [w for w, _ in seen] == [w for _, w in seen] == pytest.approx(expected, rel=1e-6)


class Rated(Mean):
    rate = 0.125

    def __init__(self) -> None:
        super().__init__()
        self.own = 2.0

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(lambda step: self.rate * self.own + 0.0 * step / self.trainer.estimated_stepping_batches)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_schedule_may_read_the_module_while_a_step_is_traced(strategy) -> None:
    model, looks = Rated(), on(on_train_batch_end=read)
    fit(model, numbered(2), None, looks, strategy=strategy)
    assert weight(model) == pytest.approx(mean([[1], [2]]))


def test_arrays_of_the_module_are_not_read_inside_a_trace() -> None:
    def trace(trainer: jl.Trainer, model: Any) -> None:
        jax.jit(lambda: model.w[...] * 2)()

    with pytest.raises(StateError, match=r"Mean\.w was read while jax traced a function"):
        fit(Mean(), numbered(2), None, on(on_train_batch_end=trace))
    fit(Mean(), numbered(2), None, on(on_train_batch_end=read), on(on_train_batch_end=trace))  # which is up to date
    several = module(init=lambda self: (Mean.__init__(self), setattr(self, "held", nnx.data([self.w])))[0])
    with pytest.raises(StateError, match=r"Made\.held was read while jax traced a function"):
        fit(several, numbered(2), None, on(on_train_batch_end=lambda t, m: jax.jit(lambda: m.held[0] * 2)()))


def test_a_hook_computes_with_the_network_before_each_step() -> None:
    seen: list[float] = []
    error = lambda model, batch: model.error(batch)  # noqa: E731
    plays = hooks(on_train_batch_start=lambda t, m, *_: seen.append(float(t.apply(error, {"x": np.zeros(1)})[0])))
    fit(Mean(), numbered(4), None, plays)
    assert seen == pytest.approx([-mean([[k + 1] for k in range(i)]) for i in range(4)], rel=1e-6)


BEFORE = ("on_fit_start", "on_train_start", "on_train_epoch_start")
AFTER = tuple(f"on_validation_{when}" for when in ("start", "epoch_start", "epoch_end", "end"))
AFTER += ("on_train_epoch_end", "on_train_end", "on_fit_end")
READS = on(**dict.fromkeys((*BEFORE, *AFTER, "on_train_batch_end", "on_validation_batch_end"), read))


@pytest.mark.parametrize("hook", thinned(BEFORE + AFTER, "on_fit_start", "on_validation_epoch_end", "on_train_end"))
def test_a_hook_may_write_after_another_callback_has_read(hook) -> None:
    model = Mean()
    trainer = fit(model, numbered(3), numbered(2), READS, on(**{hook: write}), num_sanity_val_steps=0)
    expected = mean([[1], [2], [3]], WRITTEN) if hook in BEFORE else WRITTEN
    assert weight(model) == float(trainer.state.params["w"][0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("hook", "strategy"),
    thinned(
        itertools.product(["on_train_epoch_end", "on_validation_end"], STRATEGIES),
        *(("on_train_epoch_end", "fsdp"), ("on_validation_end", "shard_map")),
        full=[("on_train_epoch_end", "pmap"), ("on_validation_end", "single")],
    ),
)
def test_a_write_between_epochs_is_trained_from(hook, strategy) -> None:
    model = Mean()
    arguments = {"strategy": strategy, "max_epochs": 2, "num_sanity_val_steps": 0}
    fit(model, numbered(2), numbered(1), on(on_train_batch_end=read, **{hook: halve}), **arguments)
    once = mean([[1], [2]]) / 2
    assert weight(model) == pytest.approx(mean([[1], [2]], once) / 2, rel=1e-6)


def test_the_second_of_two_writers_sees_the_first() -> None:
    mine, model = jnp.full(1, WRITTEN), module(on_train_start=lambda self: halve(None, self))  # type: ignore[arg-type]
    first = on(on_train_start=lambda t, m: m.w.set_value(mine))
    fit(model, numbered(1), None, first, on(on_train_start=read), on(on_train_start=halve))
    assert weight(model) == mean([[1]], WRITTEN / 4)
    fit(Mean(), numbered(1), None, first)  # whose step overwrites what stands in the state
    assert np.asarray(mine).tolist() == [WRITTEN]
    numpys, model = on(on_fit_start=lambda t, m: m.w.set_value(np.full(1, WRITTEN))), Mean()  # of 64 bits
    fit(model, numbered(1), None, numpys, strategy="ddp")
    assert weight(model) == mean([[1]], WRITTEN), "a numpy array"


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "single", "shard_map", full=FOUR))
def test_an_array_attribute_is_written_like_a_variable(strategy) -> None:
    def error(self: Any, batch: Any) -> jax.Array:
        return batch["x"] - self.w[...] + self.shift

    def shift_by(trainer: jl.Trainer, model: Any) -> None:
        model.shift = np.full(1, 5)  # of 64 bits, as the first one is

    init = lambda self: (Mean.__init__(self), setattr(self, "shift", np.zeros(1, int)))[0]  # noqa: E731
    made = lambda: module(init=init, error=error)  # noqa: E731
    arguments, model, read_back = {"max_epochs": 2, "strategy": strategy}, made(), []
    look = on(on_train_epoch_end=shift_by, on_fit_end=lambda t, m: read_back.append(np.asarray(m.shift).tolist()))
    fit(model, numbered(2), None, look, **arguments)
    assert weight(model) == pytest.approx(mean([[6], [7]], mean([[1], [2]])), rel=1e-6)
    assert read_back == [[5]] and model.shift.dtype == np.int32
    with pytest.raises(StateError, match=r"\.shift was set in .*on_train_batch_end"):
        fit(made(), numbered(2), None, on(on_train_batch_end=shift_by))


class Shifted(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.held, self.listed = nnx.Variable(jnp.zeros(1)), nnx.List([jnp.zeros(1)])
        self.part, self.boxed = nnx.Dict(shift=jnp.zeros(1)), nnx.data([nnx.Dict(shift=jnp.zeros(1))])

    def error(self, batch: Any) -> jax.Array:
        return super().error(batch) + self.held[...] + self.listed[0] + self.part.shift + self.boxed[0].shift


HOLDERS: dict[str, tuple[Callable[[Any], Any], list[list[int]], float | None]] = {
    "Param": (lambda m: setattr(m, "w", nnx.Param(jnp.full(1, WRITTEN))), [[1], [2]], WRITTEN),
    "Variable": (lambda m: setattr(m, "held", nnx.Variable(jnp.full(1, 5.0))), [[6], [7]], None),
    "list": (lambda m: setattr(m, "listed", nnx.List([jnp.full(1, 5.0)])), [[6], [7]], None),
    "part": (lambda m: setattr(m, "part", nnx.Dict(shift=jnp.full(1, 5.0))), [[6], [7]], None),
    "part in a list": (lambda m: setattr(m.boxed[0], "shift", jnp.full(1, 5.0)), [[6], [7]], None),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_an_array_in_a_new_holder_is_trained_with(holder) -> None:
    replace, batches, begin = HOLDERS[holder]
    model = Shifted()
    second = on(on_train_epoch_start=lambda t, m: replace(m) if t.current_epoch == 1 else None)
    trainer = fit(model, numbered(2), None, second, max_epochs=2)
    expected = mean(batches, mean([[1], [2]]) if begin is None else begin)
    assert weight(model) == float(trainer.state.params["w"][0]) == pytest.approx(expected, rel=1e-6)


def test_a_new_holder_is_kept_after_an_evaluation() -> None:
    replace, model, trainer = HOLDERS["Param"][0], Shifted(), make_trainer(**BARE)
    model.listed[0] = mine = jnp.ones(1)
    trainer.callbacks.append(on(on_validation_start=lambda t, m: replace(m)))
    assert evaluated("validate", trainer.validate(model, numbered(2, 11))) == pytest.approx(WRITTEN - 1)
    assert weight(model) == WRITTEN
    assert model.listed[0] is mine


WRONG: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "shape": (lambda m: m.inner.kernel.set_value(jnp.ones((4, 1))), (r"wrote float32\[4, 1\] to inner\.kernel",)),
    "bf16": (lambda m: m.inner.bias.set_value(jnp.ones(16, jnp.bfloat16)), (r"bfloat16\[16\] to inner\.bias, which",)),
    "float": (lambda m: m.inner.bias.set_value(1.0), (r"structure of Net: set inner\.bias",)),
    "variable": (lambda m: setattr(m, "extra", nnx.Param(jnp.zeros(1))), ("structure of Net: added extra.",)),
    "attribute": (lambda m: setattr(m, "rate", 0.5), (r"structure of Net: added rate\..*before fit, or in setup",)),
    "deleted": (lambda m: delattr(m, "outer"), (r"changed the structure of Net: removed outer\.",)),
    "part": (
        lambda m: (m.blocks.append(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), setattr(m.drop, "deterministic", True)),
        (r"changed the structure of Net: added blocks\[1\], set drop\.deterministic\.",),
    ),
    "many": (lambda m: [setattr(m, name, 1) for name in "abcd"], ("of Net: added a, added b, added c, added d\\.",)),
}


@pytest.mark.parametrize(
    ("change", "hook"),
    thinned(
        [("shape", "on_fit_start"), ("part", "on_fit_start"), *((x, "on_train_start") for x in WRONG)],
        *(("shape", "on_fit_start"), ("part", "on_fit_start")),
        *((x, "on_train_start") for x in ("bf16", "float", "attribute", "variable", "many")),
    ),
)
def test_a_hook_that_changes_the_structure_is_refused(change, hook) -> None:
    do, words = WRONG[change]
    callbacks, model = [hooks("Meddler", **{hook: lambda t, m: do(m)})], Net(rngs=nnx.Rngs(0))
    fit_refuses(StateError, rf"Meddler\.{hook}", *words, model=model, train=random(2), callbacks=callbacks)


def test_a_change_of_the_structure_names_nothing_else() -> None:
    model = Shifted()
    model.several, model.names = nnx.data([nnx.Variable(jnp.zeros(1)), nnx.Dict(x=jnp.ones(1))]), ["a", {"b": 1}]
    meddler = on(on_train_start=lambda t, m: setattr(m, "rate", 0.5))
    fit_refuses(StateError, r"changed the structure of Shifted: added rate\. The", model=model, callbacks=[meddler])


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_validation_batch_end", "on_log"])
def test_a_write_in_a_batch_hook_is_refused(hook) -> None:
    callback = hooks("Meddler", **{hook: lambda trainer, *_: write(trainer, trainer.module)})
    with pytest.raises(StateError, match=rf"Meddler\.{hook} wrote to w\..*on_train_epoch_start"):
        fit(Mean(), numbered(2), numbered(1), READS, callback, log_every_n_steps=1, num_sanity_val_steps=0)
    if hook == "on_log":
        return
    model = module(**{hook: lambda self, *_: setattr(self, "weight", 2.0)})
    with pytest.raises(StateError, match=rf"Made\.weight was set in {hook}.* Counters and other state .* callback\."):
        fit(model, numbered(1), numbered(1), num_sanity_val_steps=0)
    if hook == "on_train_batch_end":
        nested = hooks(**{hook: lambda t, m, *_: m.blocks[0].bias.set_value(jnp.zeros(16))})
        with pytest.raises(StateError, match=r"wrote to blocks\[0\]\.bias"):
            fit(Net(rngs=nnx.Rngs(0)), random(1), None, nested)


def test_a_variable_that_a_batch_hook_replaced_has_the_trained_array(caplog: pytest.LogCaptureFixture) -> None:
    def replace(trainer: Any, model: Any, *_: Any) -> None:
        model.blocks[0].bias = nnx.Param(jnp.full(16, WRITTEN))

    fit(model := Net(rngs=nnx.Rngs(0)), random(2), None, hooks(on_train_batch_end=replace))
    fit(expected := Net(rngs=nnx.Rngs(0)), random(2))
    assert_same(model, expected)
    assert "blocks[0].bias was replaced in a batch hook" in caplog.text


@pytest.mark.parametrize("strategy", thinned(FOUR, FOUR[0], full=FOUR[1:]))
def test_a_checkpoint_after_fit_has_what_was_written_to_the_module_since(strategy) -> None:
    trainer = fit(model := Linear(), random(2), strategy=splitting(strategy))
    model.kernel[...] = model.kernel[...] * 0.5
    expected = np.array(model.kernel[...])
    model.eval()
    for _ in range(2):
        trainer.save_checkpoint("saved")
        np.testing.assert_array_equal(Linear.load_from_checkpoint("saved").kernel[...], expected)
    model.kernel = nnx.Param(2 * expected)
    trainer.save_checkpoint("replaced")
    np.testing.assert_array_equal(Linear.load_from_checkpoint("replaced").kernel[...], 2 * expected)
    model.kernel.set_value(jnp.ones(7))
    with pytest.raises(StateError, match=r"The program, after fit, wrote float32\[7\] to kernel"):
        trainer.save_checkpoint("other")


def test_a_checkpoint_after_fit_draws_what_a_longer_training_draws() -> None:
    trainer = fit(model := Net(rate=0.5, rngs=nnx.Rngs(0)), random(2))
    drawn = int(model.drop.rngs.count[...])
    model(random(1)[0]["x"])
    assert int(model.drop.rngs.count[...]) == drawn + 1
    trainer.save_checkpoint("saved")
    resumed = fit(Net(rate=0.5, rngs=nnx.Rngs(1)), random(2), ckpt_path="saved", max_epochs=1)
    assert int(resumed.module.drop.rngs.count[...]) == drawn
    np.testing.assert_array_equal(resumed.module.norm.mean[...], model.norm.mean[...])


def test_a_call_in_training_mode_is_refused_with_what_to_call_instead() -> None:
    calls = hooks("Online", on_validation_batch_end=lambda t, m, outputs, batch, *_: m(batch["x"]))
    words = (r"Online\.on_validation_batch_end wrote to norm\.mean\.", "training mode", r"trainer\.apply\(fn, x\)")
    fit_refuses(StateError, *words, model=Net(rngs=nnx.Rngs(0)), train=random(1), val=random(1), callbacks=[calls])


@pytest.mark.parametrize("is_lazy", [False, True])
def test_setup_may_add_a_part(is_lazy) -> None:
    add = on(setup=lambda t, model: setattr(model, "head", nnx.Linear(2, 2, rngs=nnx.Rngs(0))))
    trainer = fit(jl.lazy(Mean) if is_lazy else Mean(), numbered(1), None, add)
    assert "head" in trainer.state.params


def evaluated(verb: str, result: Any) -> float:
    """Return the weight at which `numbered(2, 11)` were validated, tested or predicted."""
    return 11.5 - (np.mean([x.mean() for x in result]) if verb == "predict" else next(iter(result[0].values())))


@pytest.mark.parametrize(
    ("verb", "when", "strategy"),
    thinned(
        itertools.product(VERBS, ("start", "epoch_start"), ("single", "pmap")),
        *(("validate", "start", "single"), ("test", "epoch_start", "single"), ("predict", "start", "pmap")),
    ),
)
def test_what_a_hook_writes_is_evaluated(verb, when, strategy) -> None:
    kept: list[Any] = []

    def swap(trainer: jl.Trainer, model: Any) -> None:
        kept.append(np.array(model.w[...]))
        write(trainer, model)

    model, stage = Mean(), VERBS[verb]
    trainer = make_trainer(on(**{f"on_{stage}_{when}": swap}), strategy=strategy)
    for expected in (WRITTEN, 0.0):
        assert evaluated(verb, getattr(trainer, verb)(model, numbered(2, 11))) == pytest.approx(WRITTEN)
        assert weight(model) == expected
        trainer.callbacks.append(on(**{f"on_{stage}_end": lambda t, model: model.w.set_value(jnp.asarray(kept[0]))}))


PAIRS = [("single", "single"), ("single", "fsdp"), ("shard_map", "ddp")]  # (outer, inner)


@pytest.mark.parametrize(("outer", "inner"), thinned(PAIRS, ("single", "single")))
def test_a_second_trainer_may_validate_and_fit_in_a_hook(outer, inner) -> None:
    result, seen = list[float](), list[Any]()

    def use(trainer: jl.Trainer, model: Any) -> None:
        second = make_trainer(strategy=inner, **BARE)
        result.append(evaluated("validate", second.validate(model, numbered(2, 11))))
        second.fit(model, numbered(1, 9))
        seen.append((model.trainer is trainer, model.global_step, model.current_epoch))

    model = Mean()
    fit(model, numbered(2), None, on(on_train_epoch_end=use), strategy=outer, max_epochs=2)
    first = mean([[1], [2], [9], [1], [2]])
    assert result == pytest.approx([mean([[1], [2]]), first], rel=1e-5)
    assert weight(model) == pytest.approx(mean([[9]], first), rel=1e-6)
    assert seen == [(True, 2, 0), (True, 4, 1)]  # the first Trainer continues from there


SHAPE = (8, 331)  # of no other array


def wide(self: Any) -> None:
    Mean.__init__(self)
    self.wide = nnx.Param(jnp.zeros(SHAPE))


AGAIN = [("fit", False), ("fit", True), ("validate", False), ("predict", True)]


@pytest.mark.parametrize(("second", "lazy"), thinned(AGAIN, *AGAIN[1:3]))
def test_fsdp_places_shards_again_without_a_whole_copy(second, lazy, monkeypatch) -> None:
    moves, copies = [], []
    look = lambda *_: copies.extend(x.sharding for x in jax.live_arrays() if x.shape == SHAPE)  # noqa: E731
    stages = [f"on_{stage}_{when}" for stage in ("train", *VERBS.values()) for when in ("start", "end")]
    trainer = make_trainer(on(setup=look, **dict.fromkeys(stages, look)), strategy="fsdp", **BARE)
    made = module(init=wide)
    trainer.fit(jl.lazy(type(made)) if lazy else made, numbered(2))
    model, put = trainer.module, jax.device_put

    def spy(x: Any, device: Any = None, **arguments: Any) -> Any:
        placed = put(x, device, **arguments)
        moves.extend(y.sharding for y in jax.tree.leaves(placed) if y.shape == SHAPE)
        return placed

    split = model.wide[...].sharding
    assert split.shard_shape(SHAPE) == (1, 331)
    monkeypatch.setattr(jax, "device_put", spy)
    getattr(trainer, second)(model, numbered(2))
    assert model.wide[...].sharding.is_equivalent_to(split, 2)
    assert not [s for s in moves if s.is_fully_replicated]
    assert copies and not [s for s in copies if len(s.device_set) > 1 and s.is_fully_replicated]


PLACES = [("single", where) for where in ("a hook", "the loader", "a validation step")]
TRACES = [(strategy, "the trace of a step") for strategy in THREE]


@pytest.mark.parametrize(("strategy", "where"), [*PLACES, *thinned(TRACES, TRACES[0])])
def test_after_an_error_the_module_holds_the_last_step(strategy, where) -> None:
    def step(self: Any, batch: Any) -> jax.Array:
        if batch["x"].shape[0] == 4:  # of a tail, whose step is traced again
            raise ZeroDivisionError
        return jnp.mean(self.error(batch) ** 2)

    class Loader:
        def __iter__(self) -> Any:
            for i, batch in enumerate(numbered(4)):
                if where == "the loader" and i == 3:
                    raise ZeroDivisionError
                yield {"x": batch["x"][:4]} if where == "the trace of a step" and i == 2 else batch

    def fail(trainer: jl.Trainer, model: Any) -> None:
        if where == "a hook" and trainer.global_step == 2:
            raise ZeroDivisionError

    model = module(step, validation=raising(ZeroDivisionError))
    reader = on(on_train_batch_end=read) if where == "the trace of a step" else jl.Callback()
    trainer = make_trainer(reader, on(on_train_batch_end=fail), strategy=strategy, num_sanity_val_steps=0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, Loader(), numbered(1) if where == "a validation step" else None)
    # How far a loader is ahead of the step is its own affair.
    steps = {"a hook": 2, "the loader": trainer.global_step, "the trace of a step": 2}.get(where, 4)
    assert trainer.global_step == steps > 0
    assert weight(model) == pytest.approx(mean([[k + 1] for k in range(steps)]), rel=1e-6)
