"""What a Trainer keeps between its calls: programs and placed arrays, and never a stale one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import random, sized
from kit.compiles import compiles
from kit.inside import engine_of, evaluated
from kit.journal import Rows, hooks
from kit.modules import Linear
from kit.trainers import STRATEGIES, THREE, fit, make_trainer, splitting, thinned

import jaxlit as jl

DATA = random(2, features=8)


class Line(Linear):
    def __init__(self, scale: float = 1.0, *, rngs: nnx.Rngs) -> None:
        self.kernel, self.bias = nnx.Param(rngs.params.normal((8, 1))), nnx.Param(jnp.zeros(1))
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.scale, self.notes = scale, [1.0]

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(self.drop(x)) * self.scale * self.notes[0]

    def loss(self, batch: Any) -> jax.Array:
        if "z" in batch:
            self.log("z", batch["z"].mean())
        return super().loss(batch)


class Asks(Line):
    def validation_step(self, batch: Any) -> None:
        if not self.trainer.sanity_checking:
            self.log("val", self.loss(batch) * (100.0 if self.trainer.should_stop else 1.0))
        self.log("batches", jnp.float32(self.trainer.num_val_batches[0]))


def make_line(seed: int = 0, scale: float = 1.0, base: Any = Line) -> Any:
    return base(scale, rngs=nnx.Rngs(seed))


def steps(names: list[str]) -> list[str]:
    return [name for name in names if "_step" in name]


class Buffers(jl.Callback):
    def __init__(self) -> None:
        self.found: list[list[int]] = []

    def on_validation_start(self, trainer: jl.Trainer, module: Any) -> None:
        state = evaluated(trainer)
        self.found.append(pointers(state.leaves[state.spec.index.params["kernel"]]))

    on_predict_start = on_validation_start


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def by_formula(module: Any, batches: Any = DATA) -> Any:
    kernel, bias = np.asarray(module.kernel[...], np.float32), np.asarray(module.bias[...])
    result = [(b["x"] @ kernel + bias) * module.scale * module.notes[0] - b["y"] for b in batches]
    return pytest.approx(np.average([np.mean(x**2) for x in result], weights=[len(x) for x in result]), rel=1e-4)


def value(trainer: jl.Trainer, module: Any, batches: Any = DATA, **arguments: Any) -> float:
    return trainer.validate(module, batches, **arguments)[0]["val"]


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "fsdp", full=["shard_map"]))
def test_nothing_is_compiled_or_copied_twice(strategy) -> None:
    buffers, module = Buffers(), make_line()
    trainer = make_trainer(buffers, strategy=splitting(strategy), num_sanity_val_steps=0)
    held = [module.kernel.get_value(), module.drop.rngs.key.get_value()]
    with compiles() as first:
        before = value(trainer, module)
    with compiles() as second:
        assert value(trainer, module) == before == by_formula(module)
    assert (steps(first), second) == (["jit(eval_step)"], [])
    assert buffers.found[0] == buffers.found[1]
    now = [module.kernel.get_value(), module.drop.rngs.key.get_value()]
    assert all(a is b for a, b in zip(held, now, strict=True)), "the module keeps its own arrays"
    with compiles() as in_fit:
        trainer.fit(module, DATA, DATA)
    assert steps(in_fit) == ["jit(train_step)", "jit(eval_step)"]
    end = pointers(trainer.state.params["kernel"])
    del buffers.found[:]
    with compiles() as validating:
        first_value = value(trainer, module)
        assert trainer.validate(dataloaders=DATA)[0]["val"] == first_value == by_formula(module)
    assert validating == []
    with compiles() as predicting:
        out = np.concatenate(trainer.predict(module, DATA))
    assert steps(predicting) == ["jit(predict_step)"]
    with compiles() as again:
        trainer.predict(module, DATA)
        trainer.validate(module, DATA)
    assert again == []
    assert buffers.found == [end] * 5
    assert np.mean((out - np.concatenate([b["y"] for b in DATA])) ** 2) == by_formula(module)


def test_what_is_written_to_the_module_is_placed_once() -> None:
    buffers, module = Buffers(), make_line()
    trainer = make_trainer(buffers, strategy=splitting("fsdp"))
    value(trainer, module)
    module.kernel[...] = jnp.full((8, 1), 2.0)
    assert value(trainer, module) == value(trainer, module) == by_formula(module)
    before, first, second = buffers.found
    assert before != first == second


def test_a_module_without_a_fit_is_evaluated_as_it_is_after_a_checkpoint() -> None:
    other, trainer = make_line(1), make_trainer()
    fit(make_line(), DATA, DATA).save_checkpoint("kept")
    expected = value(trainer, other)
    assert value(trainer, other, ckpt_path="kept") != expected
    assert value(trainer, other) == expected == by_formula(other)


@pytest.mark.parametrize("strategy", thinned(THREE, "fsdp"))
def test_what_is_written_between_two_calls_is_used(strategy) -> None:
    module, trainer = make_line(), make_trainer(strategy=splitting(strategy), accumulate_grad_batches=2)
    for fits in (False, True):
        if fits:
            trainer.fit(module, random(3, features=8), DATA)
            fitted = [np.asarray(x) for x in (trainer.state.params["kernel"], *jax.tree.leaves(trainer.state.counters))]
        else:
            trainer.validate(module, DATA)
        with compiles() as result:
            for factor in (2.0, 3.0):
                module.kernel[...] = jnp.full((8, 1), factor)
                assert value(trainer, module) == by_formula(module)
            in_place = np.ones((8, 1), np.float32)
            module.kernel.set_value(in_place)
            trainer.validate(module, DATA)
            in_place += 4
            assert value(trainer, module) == by_formula(module)
        assert steps(result) == []
    trainer.callbacks = [hooks(on_predict_start=lambda t, m: m.kernel.set_value(jnp.full((8, 1), 5.0)))]
    trainer.predict(module, DATA)
    assert float(module.kernel[0, 0]) == 5.0 and value(trainer, module) == by_formula(module)
    now = [trainer.state.params["kernel"], *jax.tree.leaves(trainer.state.counters)]
    assert all(np.array_equal(a, b) for a, b in zip(fitted, now, strict=True)), "the fit's counts and weights"


@pytest.mark.full
def test_a_module_that_is_another_now_is_compiled_anew() -> None:
    """Its mode, an attribute, what is in a list, shapes, dtypes, parameters."""
    module = make_line()
    trainer = fit(module, DATA, DATA)
    trainer.validate(module, DATA)
    for change in (
        lambda: module.eval(),
        lambda: setattr(module, "scale", 2.0),
        lambda: module.notes.__setitem__(0, 3.0),
        lambda: module.kernel.set_value(jnp.ones((8, 2))),
        lambda: module.kernel.set_value(jnp.ones((8, 2), jnp.float16)),
        lambda: setattr(module, "other", nnx.Param(jnp.ones(3))),
    ):
        change()
        with compiles() as result:
            assert value(trainer, module) == by_formula(module)
        assert steps(result) == ["jit(eval_step)"]
    trainer.debug = True
    with compiles() as result:
        trainer.validate(module, DATA)
    assert steps(result) == ["jit(eval_step)"], "with debug"


class Base(nnx.Module):
    def gain(self) -> float:
        return 1.0

    @property
    def offset(self) -> float:
        return 0.0


class Part(Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x.mean() * self.gain() + self.offset


class Whole(jl.TrainModule):
    def __init__(self) -> None:
        self.parts = nnx.List([Part()])

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.parts[0](batch["x"]))


@pytest.mark.parametrize(
    ("owner", "name", "new", "factor", "more"),
    [
        (Whole, "validation_step", lambda self, batch: self.log("val", 7.0), 0, 7),
        (Part, "__call__", lambda self, x: 10 * x.mean(), 10, 0),
        (Base, "gain", lambda self: 3.0, 3, 0),
        (Base, "offset", property(lambda self: 5.0), 1, 5),
        # As IPython's autoreload does it: the function stays the same object.
        (Base.gain, "__code__", (lambda self: 3.0).__code__, 3, 0),
        (Base.offset.fget, "__code__", (lambda self: 3.0).__code__, 1, 3),
    ],
)
def test_a_method_that_was_replaced_is_used(owner, name, new, factor, more, monkeypatch) -> None:
    module, trainer = Whole(), make_trainer()
    plain = value(trainer, module)
    assert plain == pytest.approx(np.mean([b["x"].mean() for b in DATA]), rel=1e-4)
    monkeypatch.setattr(owner, name, new)
    with compiles() as result:
        assert [value(trainer, module) for _ in range(2)] == pytest.approx([factor * plain + more] * 2, rel=1e-5)
    assert steps(result) == ["jit(eval_step)"]


def test_another_kind_of_batch_may_log_other_things() -> None:
    module, trainer = make_line(), make_trainer()
    more = [batch | {"z": batch["y"]} for batch in DATA]
    with pytest.raises(KeyError):
        trainer.validate(module, [{"y": DATA[0]["y"]}])
    for data, names in ((DATA, {"val"}), (more, {"val", "z"}), (DATA, {"val"})):
        assert trainer.validate(module, data)[0].keys() == names
    assert value(trainer, module) == by_formula(module)


@pytest.mark.parametrize("strategy", thinned(["single", "fsdp"], "fsdp"))
def test_the_weights_of_a_checkpoint_are_used_for_one_call(strategy) -> None:
    module, other = make_line(), make_line(1)
    trainer = fit(module, DATA, DATA, strategy=splitting(strategy), max_epochs=2)
    trainer.save_checkpoint("kept")
    saved = value(trainer, module)
    later = fit(other, DATA, DATA, strategy=splitting(strategy))
    kernel = np.asarray(later.state.params["kernel"])
    with compiles() as result:
        assert value(later, other, ckpt_path="kept") == saved
        assert value(later, other) == by_formula(other)
    assert steps(result) == []
    np.testing.assert_array_equal(np.asarray(later.state.params["kernel"]), kernel)
    assert (later.global_step, int(later.state.step), later.current_epoch) == (2, 2, 1)
    later.save_checkpoint("after")
    assert fit(make_line(2), DATA, max_epochs=2, ckpt_path="after").global_step == 4


def test_another_module_in_between_and_a_fit_after_an_evaluation() -> None:
    one, other, trainer = make_line(), make_line(1, scale=2.0), make_trainer()
    trainer.validate(one, DATA)
    trainer.fit(one, DATA, DATA)
    trainer.validate(other, DATA)
    with compiles() as result:
        assert value(trainer, one) == by_formula(one)
    assert steps(result) == [], "the fit's programs are there"
    trainer.fit(other, DATA, DATA)
    assert value(trainer, other) == by_formula(other)


@pytest.mark.parametrize("strategy", thinned(["single", "fsdp"], "fsdp"))
def test_a_lazy_module_is_built_once(strategy) -> None:
    buffers, model = Buffers(), jl.lazy(Line)
    trainer = make_trainer(buffers, strategy=splitting(strategy))
    first = value(trainer, model)
    built: Any = trainer.module
    assert first == by_formula(built)
    trainer.validate(make_line(), DATA)
    assert value(trainer, model) == first and trainer.module is built
    with compiles() as again:
        assert value(trainer, model) == first
    assert again == []
    wide = make_line(5)
    fit(wide, DATA).save_checkpoint("kept")
    assert [value(trainer, model, ckpt_path=path) for path in ("kept", None) * 2] == pytest.approx(
        [by_formula(wide).expected, first] * 2, rel=1e-5
    )
    wide.other = nnx.Param(jnp.ones(3))
    fit(wide, DATA).save_checkpoint("wide")
    with pytest.raises(jl.errors.CheckpointError, match="does not fit"):
        trainer.validate(model, DATA, ckpt_path="wide")
    assert value(trainer, model) == first


def test_a_lazy_module_is_built_of_the_seed_that_holds() -> None:
    model, trainer = jl.lazy(Line), make_trainer()
    first = value(trainer, model)
    trainer.seed = 7
    assert value(trainer, model) == value(make_trainer(seed=7), model) != first
    trainer.fit(model, DATA)
    trainer.seed = 0
    assert value(trainer, model) == by_formula(trainer.module), "the one that fit trained"


@pytest.mark.parametrize("strategy", thinned(["single", "shard_map"], "single"))
def test_programs_of_several_kinds_of_batches_are_kept(strategy) -> None:
    module, trainer = make_line(), make_trainer(strategy=strategy)
    large, small = DATA, sized(4, 4, features=8, seed=1)
    kinds = (large, small, [large[0], small[1]], [small[0], large[1]])
    for data in kinds:
        trainer.validate(module, data)
    with compiles() as result:
        for data in (*reversed(kinds), random(2, features=8, seed=3)):
            assert value(trainer, module, data) == by_formula(module, data)
        for order in ([large, small], [small, large]):
            for i, (data, metrics) in enumerate(zip(order, trainer.validate(module, order), strict=True)):
                assert metrics[f"val/dataloader_idx_{i}"] == by_formula(module, data)
        trainer.log_every_n_steps, trainer.max_epochs = 10, 7  # which no step reads
        trainer.validate(module, large)
    assert result == []


def test_a_fit_that_lost_its_arrays_is_not_evaluated() -> None:
    def lose(trainer: jl.Trainer, module: Any) -> None:
        for x in engine_of(trainer).state.leaves:
            x.delete()
        raise RuntimeError("as a step that failed leaves it")

    module, trainer = make_line(), make_trainer(hooks(on_train_epoch_end=lose))
    with pytest.raises(RuntimeError, match="as a step"):
        trainer.fit(module, DATA)
    trainer.callbacks.pop()
    nnx.update(module, nnx.state(make_line(3)))
    assert value(trainer, module) == by_formula(module)


@pytest.mark.parametrize("strategy", thinned(THREE, "single"))
def test_a_step_that_reads_the_trainer_is_another_program(strategy) -> None:
    rows, module, data = Rows(), make_line(base=Asks), random(3, features=8)
    trainer = make_trainer(rows, strategy=splitting(strategy), max_epochs=3)
    with compiles() as in_fit:
        trainer.fit(module, data, data)
    assert steps(in_fit).count("jit(eval_step)") == 2, "the check's, and one for all validations"
    assert [row["batches"] for _, row in rows.rows if "val" in row] == [3.0] * 3
    assert rows.of("val")[-1] == by_formula(module, data)
    with compiles() as result:
        assert value(trainer, module, data) == by_formula(module, data)
    assert steps(result) == []
    asks = lambda _: jnp.float32(trainer.max_epochs) + 10 * trainer.should_stop  # noqa: E731
    assert float(trainer.apply(asks)) == 3.0
    trainer.should_stop = True
    assert float(trainer.apply(asks)) == 13.0, "a function of apply is told as well"
    assert value(trainer, module, data) == pytest.approx(100 * by_formula(module, data).expected, rel=1e-4)
    trainer.should_stop = False
    with compiles() as result:
        assert value(trainer, module, data) == by_formula(module, data)
    assert steps(result) == [], "the first program is kept"
