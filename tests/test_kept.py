"""What a Trainer keeps between its calls: programs and placed arrays, and never a stale one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.compiles import compiles

import jaxlit as jl

STRATEGIES = ("single", "ddp", "fsdp", "shard_map", "pmap", "simulate:8")


class Line(jl.TrainModule):
    """Linear regression with dropout, a random key and a plain attribute."""

    def __init__(self, scale: float = 1.0, *, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(rngs.params.normal((8, 4)))
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.scale, self.notes = scale, [1.0]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(x) @ self.kernel * self.scale * self.notes[0]

    def training_step(self, batch: Any) -> jax.Array:
        return jnp.mean((self(batch["x"]) - batch["y"]) ** 2)

    def validation_step(self, batch: Any) -> None:
        self.log("val/sum", self(batch["x"]).sum(1).mean())
        if "z" in batch:
            self.log("val/z", batch["z"].mean())

    def predict_step(self, batch: Any) -> jax.Array:
        return self(batch["x"])

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.1)


def make_line() -> Line:
    return Line(rngs=nnx.Rngs(0))


def make_batches(*names: str, count: int = 2) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    widths = {"x": 8, "y": 4, "z": 1}
    draw = lambda name: rng.normal(size=(8, widths[name])).astype(np.float32)  # noqa: E731
    return [{name: draw(name) for name in names or ("x", "y")} for _ in range(count)]


def make_trainer(strategy: str = "single", **arguments: Any) -> jl.Trainer:
    chosen: Any = jl.strategies.FSDP(min_size=0) if strategy == "fsdp" else strategy
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    return jl.Trainer(strategy=chosen, **(quiet | arguments))


def steps(names: list[str]) -> list[str]:
    return [name for name in names if "_step" in name]


class Buffers(jl.Callback):
    """Notes which buffers the parameters lie in whenever an evaluation begins."""

    def __init__(self) -> None:
        self.found: list[list[int]] = []

    def look(self, trainer: jl.Trainer, module: Any) -> None:
        state = trainer._session.active.state  # type: ignore[union-attr]
        kernel = state.leaves[jax.tree.leaves(state.at.params)[0]]
        self.found.append([shard.data.unsafe_buffer_pointer() for shard in kernel.addressable_shards])

    on_validation_start = on_predict_start = look


def expected(module: Line, batches: Any) -> float:
    kernel = np.asarray(module.kernel[...])
    return float(np.mean([(b["x"] @ kernel).sum(1).mean() for b in batches])) * module.scale * module.notes[0]


def value(found: Any) -> float:
    return found[0]["val/sum"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_fit_nothing_is_compiled_twice_and_no_weight_is_copied(strategy: str) -> None:
    buffers, module, data = Buffers(), make_line(), make_batches()
    trainer = make_trainer(strategy, callbacks=[buffers], num_sanity_val_steps=0)
    with compiles() as in_fit:
        trainer.fit(module, data, data)
    assert steps(in_fit) == ["jit(train_step)", "jit(eval_step)"]
    end = [x.data.unsafe_buffer_pointer() for x in trainer.state.params["kernel"].addressable_shards]
    del buffers.found[:]
    with compiles() as validating:
        first = trainer.validate(module, data)
        second = trainer.validate(dataloaders=data)
    assert validating == []
    with compiles() as predicting:
        out = trainer.predict(module, data)
    assert steps(predicting) == ["jit(predict_step)"]
    with compiles() as again:
        trainer.predict(module, data)
        trainer.validate(module, data)
    assert again == []
    assert buffers.found == [end] * 5
    assert value(first) == value(second) == pytest.approx(expected(module, data), rel=1e-5)
    np.testing.assert_allclose(np.concatenate(out or []).sum(1).mean(), expected(module, data), rtol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_fit_the_second_call_compiles_and_copies_nothing(strategy: str) -> None:
    buffers, module, data = Buffers(), make_line(), make_batches()
    trainer = make_trainer(strategy, callbacks=[buffers])
    held = [module.kernel.get_value(), module.drop.rngs.key.get_value()]  # type: ignore[union-attr]
    with compiles() as first:
        trainer.validate(module, data)
    with compiles() as second:
        trainer.validate(module, data)
    assert (steps(first), second) == (["jit(eval_step)"], [])
    assert buffers.found[0] == buffers.found[1]
    now = [module.kernel.get_value(), module.drop.rngs.key.get_value()]  # type: ignore[union-attr]
    assert all(a is b for a, b in zip(held, now, strict=True)), "the module keeps its own arrays"


@pytest.mark.parametrize("strategy", ["single", "fsdp", "shard_map"])
@pytest.mark.parametrize("fits", [True, False])
def test_what_is_written_between_two_calls_is_used(strategy: str, fits: bool) -> None:
    module, data = make_line(), make_batches()
    trainer = make_trainer(strategy)
    if fits:
        trainer.fit(module, data, data)
        kernel = np.asarray(trainer.state.params["kernel"])
    else:
        trainer.validate(module, data)
    with compiles() as found:
        for factor in (2.0, 3.0):
            module.kernel[...] = jnp.full((8, 4), factor)
            assert value(trainer.validate(module, data)) == pytest.approx(expected(module, data), rel=1e-5)
        in_place = np.ones((8, 4), np.float32)
        module.kernel.set_value(in_place)
        trainer.validate(module, data)
        in_place += 4
        assert value(trainer.validate(module, data)) == pytest.approx(expected(module, data), rel=1e-5)
    assert steps(found) == []
    if fits:
        np.testing.assert_array_equal(np.asarray(trainer.state.params["kernel"]), kernel)


def _eval(module: Line) -> None:
    module.eval()


def _scale(module: Line) -> None:
    module.scale = 2.0


def _note(module: Line) -> None:
    module.notes[0] = 3.0


def _narrow(module: Line) -> None:
    module.kernel.set_value(jnp.ones((8, 2)))


def _low(module: Line) -> None:
    module.kernel.set_value(module.kernel[...].astype(jnp.bfloat16).astype(jnp.float16))


def _more(module: Line) -> None:
    module.other = nnx.Param(jnp.ones(3))


@pytest.mark.parametrize("change", [_eval, _scale, _note, _narrow, _low, _more])
@pytest.mark.parametrize("fits", [True, False])
def test_a_module_that_is_another_now_is_compiled_anew(change: Callable[[Line], None], fits: bool) -> None:
    module, data, trainer = make_line(), make_batches(), make_trainer()
    if fits:
        trainer.fit(module, data, data)
    trainer.validate(module, data)
    change(module)
    with compiles() as found:
        assert value(trainer.validate(module, data)) == pytest.approx(expected(module, data), rel=1e-2)
    assert steps(found) == ["jit(eval_step)"]


def test_a_class_whose_step_was_replaced_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    module, data, trainer = make_line(), make_batches(), make_trainer()
    trainer.validate(module, data)
    monkeypatch.setattr(Line, "validation_step", lambda self, batch: self.log("val/sum", 7.0))
    assert value(trainer.validate(module, data)) == 7.0


class Base(nnx.Module):
    """What a part of a module inherits."""

    def gain(self) -> float:
        return 1.0

    @property
    def offset(self) -> float:
        return 0.0


class Part(Base):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((8, 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x @ self.w) * self.gain() + self.offset


class Whole(jl.TrainModule):
    def __init__(self) -> None:
        self.parts = nnx.List([Part()])

    def validation_step(self, batch: Any) -> None:
        self.log("val/sum", self.parts[0](batch["x"]).mean())


@pytest.mark.parametrize(
    ("owner", "name", "new", "change"),
    [
        (Part, "__call__", lambda self, x: 10 * (x @ self.w), lambda plain: 10 * plain),
        (Base, "gain", lambda self: 3.0, lambda plain: 3 * plain),
        (Base, "offset", property(lambda self: 5.0), lambda plain: plain + 5),
    ],
)
def test_a_method_of_a_part_that_was_replaced_is_used(
    owner: type, name: str, new: Any, change: Callable[[float], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, data, trainer = Whole(), make_batches(), make_trainer()
    plain = value(trainer.validate(module, data))
    assert plain == pytest.approx(float(np.mean([b["x"].sum(1).mean() for b in data])), rel=1e-5)
    monkeypatch.setattr(owner, name, new)
    assert value(trainer.validate(module, data)) == pytest.approx(change(plain), rel=1e-5)


@pytest.mark.parametrize("name", ["gain", "offset"])
def test_code_that_a_notebook_put_into_a_method_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As IPython's autoreload does it: the function stays the same object."""
    module, data, trainer = Whole(), make_batches(), make_trainer()
    plain = value(trainer.validate(module, data))
    method: Any = Base.gain if name == "gain" else Base.offset.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(method, "__code__", (lambda self: 3.0).__code__)
    wanted = 3 * plain if name == "gain" else plain + 3
    assert value(trainer.validate(module, data)) == pytest.approx(wanted, rel=1e-5)
    with compiles() as found:
        trainer.validate(module, data)
    assert steps(found) == []


def test_another_kind_of_batch_may_log_and_return_other_things() -> None:
    module, trainer = make_line(), make_trainer()
    data, more = make_batches(), make_batches("x", "y", "z")
    assert trainer.validate(module, data)[0].keys() == {"val/sum"}
    assert trainer.validate(module, more)[0].keys() == {"val/sum", "val/z"}
    assert trainer.validate(module, data)[0].keys() == {"val/sum"}


def test_a_step_that_failed_is_traced_again() -> None:
    module, data, trainer = make_line(), make_batches(), make_trainer()
    with pytest.raises(KeyError):
        trainer.validate(module, make_batches("y"))
    assert value(trainer.validate(module, data)) == pytest.approx(expected(module, data), rel=1e-5)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_the_weights_of_a_checkpoint_are_used_for_one_call(strategy: str, tmp_path: Path) -> None:
    module, data = make_line(), make_batches()
    trainer = make_trainer(strategy, max_epochs=2)
    trainer.fit(module, data, data)
    trainer.save_checkpoint(tmp_path / "kept")
    saved = value(trainer.validate(module, data))
    other = Line(rngs=nnx.Rngs(1))
    later = make_trainer(strategy)
    later.fit(other, data, data)
    fitted, state = value(later.validate(other, data)), jax.tree.map(np.asarray, later.state.params)
    with compiles() as found:
        assert value(later.validate(other, data, ckpt_path=tmp_path / "kept")) == saved
        assert value(later.validate(other, data)) == fitted == pytest.approx(expected(other, data), rel=1e-5)
    assert steps(found) == []
    np.testing.assert_array_equal(np.asarray(later.state.params["kernel"]), state["kernel"])
    assert (later.global_step, int(later.state.step), later.current_epoch) == (2, 2, 1)
    later.save_checkpoint(tmp_path / "after")
    longer = make_trainer(strategy, max_epochs=2)
    longer.fit(Line(rngs=nnx.Rngs(2)), data, data, ckpt_path=tmp_path / "after")
    assert longer.global_step == 4


def test_the_counters_of_a_fit_stay_where_they_are() -> None:
    module, data, trainer = make_line(), make_batches(count=3), make_trainer(accumulate_grad_batches=2)
    trainer.fit(module, data)
    before = jax.tree.map(np.asarray, jax.tree.leaves(trainer.state.counters))
    trainer.validate(module, data)
    np.testing.assert_array_equal(before, jax.tree.map(np.asarray, jax.tree.leaves(trainer.state.counters)))


def test_a_hook_of_an_evaluation_writes_to_the_module_and_not_to_the_fit() -> None:
    class Write(jl.Callback):
        def on_predict_start(self, trainer: jl.Trainer, module: Any) -> None:
            module.kernel[...] = jnp.full((8, 4), 5.0)

    module, data = make_line(), make_batches()
    trainer = make_trainer(callbacks=[Write()])
    trainer.fit(module, data, data)
    fitted = np.asarray(trainer.state.params["kernel"])
    trainer.predict(module, data)
    assert value(trainer.validate(module, data)) == pytest.approx(expected(module, data), rel=1e-5)
    assert float(module.kernel[0, 0]) == 5.0
    np.testing.assert_array_equal(np.asarray(trainer.state.params["kernel"]), fitted)


def test_another_module_in_between_and_a_fit_after_an_evaluation() -> None:
    one, other, data, trainer = make_line(), Line(2.0, rngs=nnx.Rngs(1)), make_batches(), make_trainer()
    trainer.validate(one, data)
    trainer.fit(one, data, data)
    trainer.validate(other, data)
    with compiles() as found:
        assert value(trainer.validate(one, data)) == pytest.approx(expected(one, data), rel=1e-5)
    assert steps(found) == [], "the fit's programs are there"
    assert value(trainer.validate(other, data)) == pytest.approx(expected(other, data), rel=1e-5)
    trainer.fit(other, data, data)
    assert value(trainer.validate(other, data)) == pytest.approx(expected(other, data), rel=1e-5)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_lazy_module_is_built_once_and_kept(strategy: str) -> None:
    buffers, model, data = Buffers(), jl.lazy(Line), make_batches()
    trainer = make_trainer(strategy, callbacks=[buffers])
    first = value(trainer.validate(model, data))
    built: Any = trainer.module
    trainer.validate(make_line(), data)
    with compiles():
        assert value(trainer.validate(model, data)) == first
    assert trainer.module is built
    with compiles() as again:
        assert value(trainer.validate(model, data)) == first == pytest.approx(expected(built, data), rel=1e-5)
    assert again == []


def make_small(rows: int) -> list[dict[str, np.ndarray]]:
    return [{name: array[:rows] for name, array in batch.items()} for batch in make_batches()]


@pytest.mark.parametrize("strategy", ["single", "shard_map"])
def test_programs_of_several_kinds_of_batches_are_kept_beside_each_other(strategy: str) -> None:
    module, trainer, large, small = make_line(), make_trainer(strategy), make_batches(), make_small(4)
    for data in (large, small, [large[0], small[1]], [small[0], large[1]]):
        trainer.validate(module, data)
    with compiles() as found:
        for data in (small, large, [small[0], large[1]], [large[0], small[1]], make_batches()):
            rows = {"x": np.concatenate([batch["x"] for batch in data])}
            assert value(trainer.validate(module, data)) == pytest.approx(expected(module, [rows]), rel=1e-4)
    assert found == []


def test_so_are_those_of_several_loaders_in_either_order() -> None:
    module, trainer, large, small = make_line(), make_trainer(), make_batches(), make_small(4)
    trainer.fit(module, large, [large, small])
    trainer.validate(module, [small, large])
    with compiles() as found:
        for order in ([large, small], [small, large], [large, small]):
            metrics = trainer.validate(module, order)
            for data, named, i in zip(order, metrics, (0, 1), strict=True):
                assert named[f"val/sum/dataloader_idx_{i}"] == pytest.approx(expected(module, data), rel=1e-4)
    assert found == []


def test_a_program_that_was_not_used_for_long_is_let_go() -> None:
    module, trainer = make_line(), make_trainer()
    lengths = range(1, 9)
    kinds = [[{name: np.repeat(array, rows, 0) for name, array in make_batches()[0].items()}] for rows in lengths]
    for data in (*kinds, kinds[0]):
        trainer.validate(module, data)
    trainer.validate(module, make_small(3))
    with compiles() as found:
        trainer.validate(module, kinds[0])  # used again behind the others
        assert steps(found) == []
        trainer.validate(module, kinds[1])
    assert steps(found) == ["jit(eval_step)"]


def test_setting_an_argument_that_no_step_reads_compiles_nothing() -> None:
    module, data, trainer = make_line(), make_batches(), make_trainer()

    class Sets(jl.Callback):
        def on_train_epoch_start(self, trainer: jl.Trainer, module: Any) -> None:
            trainer.log_every_n_steps = 1

    trainer.callbacks = [Sets()]
    trainer.fit(module, data, data)
    with compiles() as found:
        trainer.log_every_n_steps, trainer.max_epochs = 10, 7
        trainer.validate(module, data)
        trainer.log_every_n_steps, trainer.max_epochs = 10, 7
        trainer.validate(module, data)
    assert found == []


def test_debug_is_not_that_of_the_programs_before() -> None:
    module, data, trainer = make_line(), make_batches(), make_trainer()
    trainer.validate(module, data)
    trainer.debug = True
    with compiles() as found:
        trainer.validate(module, data)
    assert steps(found) == ["jit(eval_step)"]


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_lazy_module_survives_a_checkpoint_that_does_not_fit(strategy: str, tmp_path: Path) -> None:
    wide, data = make_line(), make_batches()
    wide.other = nnx.Param(jnp.ones(3))
    first = make_trainer()
    first.fit(wide, data)
    first.save_checkpoint(tmp_path / "wide")
    model, trainer = jl.lazy(Line), make_trainer(strategy)
    with pytest.raises(jl.errors.CheckpointError, match="does not fit"):
        trainer.validate(model, data, ckpt_path=tmp_path / "wide")
    alone = make_trainer(strategy).validate(model, data)
    assert value(trainer.validate(model, data)) == value(alone)


def test_a_lazy_module_has_its_own_weights_behind_those_of_a_checkpoint(tmp_path: Path) -> None:
    data, first = make_batches(), make_trainer(max_epochs=2)
    first.fit(Line(rngs=nnx.Rngs(5)), data)
    first.save_checkpoint(tmp_path / "kept")
    model, trainer = jl.lazy(Line), make_trainer()
    own = value(make_trainer().validate(model, data))
    saved = value(first.validate(dataloaders=data))
    found = [value(trainer.validate(model, data, ckpt_path=path)) for path in (tmp_path / "kept", None) * 2]
    assert found == pytest.approx([saved, own] * 2, rel=1e-5) and own != pytest.approx(saved, rel=1e-2)


def test_a_lazy_module_is_built_of_the_seed_that_holds() -> None:
    model, data, trainer = jl.lazy(Line), make_batches(), make_trainer()
    first = value(trainer.validate(model, data))
    trainer.seed = 7
    assert value(trainer.validate(model, data)) == value(make_trainer(seed=7).validate(model, data)) != first
    trainer.fit(model, data)
    trainer.seed = 0
    assert value(trainer.validate(model, data)) == pytest.approx(expected(trainer.module, data), rel=1e-5)  # type: ignore[arg-type]
    assert value(trainer.validate(model, data)) == value(trainer.validate(dataloaders=data)), "the one that fit trained"


def test_a_fit_that_lost_its_arrays_is_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    module, data, trainer = make_line(), make_batches(), make_trainer()

    class Lose(jl.Callback):
        def on_train_epoch_end(self, trainer: jl.Trainer, module: Any) -> None:
            for x in trainer._session.engine.state.leaves:  # type: ignore[union-attr]
                x.delete()
            raise RuntimeError("as a step that failed leaves it")

    trainer.callbacks.append(Lose())
    with pytest.raises(RuntimeError, match="as a step"):
        trainer.fit(module, data)
    trainer.callbacks.pop()
    module.kernel.set_value(jnp.ones((8, 4)))
    for key in (module.drop.rngs.key, module.drop.rngs.count):  # type: ignore[union-attr]
        key.set_value(jax.random.key(0) if key is module.drop.rngs.key else jnp.zeros((), jnp.uint32))  # type: ignore[union-attr]
    assert value(trainer.validate(module, data)) == pytest.approx(expected(module, data), rel=1e-5)


def test_weights_held_in_low_precision_are_placed_once() -> None:
    buffers, module, data = Buffers(), make_line(), make_batches()
    trainer = make_trainer(precision="bf16-true", callbacks=[buffers])
    trainer.validate(module, data)
    with compiles() as found:
        trainer.validate(module, data)
    assert found == [] and buffers.found[0] == buffers.found[1]
    module.kernel[...] = jnp.full((8, 4), 2.0)
    assert value(trainer.validate(module, data)) == pytest.approx(expected(module, data), rel=2e-2)
    assert module.kernel[...].dtype == jnp.float32


class Asks(Line):
    """Its steps read what the Trainer tells of the run that goes on."""

    def validation_step(self, batch: Any) -> None:
        if not self.trainer.sanity_checking:
            self.log("val/sum", self(batch["x"]).sum(1).mean() * (100.0 if self.trainer.should_stop else 1.0))
        self.log("val/batches", jnp.float32(self.trainer.num_val_batches[0]))


def make_asking() -> Asks:
    return Asks(rngs=nnx.Rngs(0))


@pytest.mark.parametrize("strategy", ["single", "fsdp", "shard_map"])
def test_a_step_that_asks_for_the_sanity_check_is_another_program_behind_it(strategy: str) -> None:
    rows: list[dict[str, float]] = []

    class Rows(jl.Callback):
        def on_log(self, trainer: jl.Trainer, values: dict[str, float], step: int) -> None:
            rows.append(values)

    module, data = make_asking(), make_batches(count=3)
    trainer = make_trainer(strategy, callbacks=[Rows()], max_epochs=3)
    with compiles() as in_fit:
        trainer.fit(module, data, data)
    assert steps(in_fit).count("jit(eval_step)") == 2, "the check's, and one for all validations"
    assert [row["val/batches"] for row in rows if "val/sum" in row] == [3.0] * 3
    assert rows[-1]["val/sum"] == pytest.approx(expected(module, data), rel=1e-4)
    with compiles() as found:
        assert value(trainer.validate(module, data)) == pytest.approx(expected(module, data), rel=1e-4)
    assert steps(found) == []


def test_a_step_that_asks_for_a_stop_is_told_of_the_one_that_came() -> None:
    module, data, trainer = make_asking(), make_batches(), make_trainer(num_sanity_val_steps=0)
    trainer.fit(module, data, data)
    assert value(trainer.validate(module, data)) == pytest.approx(expected(module, data), rel=1e-5)
    trainer.should_stop = True
    assert value(trainer.validate(module, data)) == pytest.approx(100 * expected(module, data), rel=1e-5)
    trainer.should_stop = False
    with compiles() as found:
        assert value(trainer.validate(module, data)) == pytest.approx(expected(module, data), rel=1e-5)
    assert steps(found) == [], "the first program is kept"


def test_a_function_of_apply_is_told_of_the_trainer_as_it_is() -> None:
    module, data, trainer = make_line(), make_batches(), make_trainer()
    trainer.validate(module, data)
    asks = lambda _: jnp.float32(trainer.max_epochs) + 10 * trainer.should_stop  # noqa: E731
    assert float(trainer.apply(asks)) == 1.0
    trainer.should_stop = True
    assert float(trainer.apply(asks)) == 11.0
    trainer.max_epochs = 5
    assert float(trainer.apply(asks)) == 15.0
