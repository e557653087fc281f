"""What a step may do with its copy of the module, what it may return, and what it sees: modes, statistics, keys."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.errors import CallCompactUnboundModuleError
from kit.batches import numbered, random, sized
from kit.by_hand import GRAPH, HandLoop, assert_same, state_of
from kit.journal import Rows, hooks
from kit.modules import Linear, Mean, Net, module
from kit.refusals import fit_refuses, refuses, warnings_of
from kit.trainers import THREE, fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.core.pure_module import sync_batchnorm
from jaxlit.errors import ModuleError, StateError

CHANGES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "variable": (lambda m, _: setattr(m, "c", nnx.Variable(jnp.zeros(2))), ("changed c from nothing", "__init__")),
    "parameter": (lambda m, _: setattr(m, "extra", nnx.Param(jnp.zeros(2))), (r"\bextra\b", "__init__")),
    "shape": (lambda m, _: m.count.set_value(jnp.zeros(2, jnp.int32)), (r"count from int32\[\] to int32\[2",)),
    "dtype": (lambda m, _: m.count.set_value(jnp.zeros(())), (r"count from int32\[\] to float32\[\]",)),
}


@pytest.mark.parametrize("strategy", ["single", "shard_map"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_states_structure_is_refused(change: str, strategy: str) -> None:
    do, words = CHANGES[change]
    step = lambda self, batch: (do(self, batch), Net.training_step(self, batch))[1]  # noqa: E731
    model = module(step, base=Net, init=lambda self: Net.__init__(self, rngs=nnx.Rngs(0)))
    fit_refuses(StateError, r"Made\.training_step", *words, model=model, train=random(2), strategy=strategy)


@pytest.mark.parametrize("strategy", thinned(THREE, "single", "shard_map"))
def test_a_validation_step_that_writes_is_refused(strategy: str) -> None:
    write = lambda self, batch: self.count.set_value(self.count + 100)  # noqa: E731
    model = module(base=Net, validation=write, init=lambda self: Net.__init__(self, rngs=nnx.Rngs(0)))
    words = (r"Made\.validation_step wrote to count\. Only training changes the state", "on_validation_end")
    fit_refuses(StateError, *words, model=model, train=random(2), val=random(2), strategy=strategy)
    assert int(model.count[...]) == 0


@pytest.mark.parametrize("strategy", thinned(THREE, "single", "shard_map"))
def test_a_plain_array_that_steps_read_stays_the_callers(strategy: str) -> None:
    model = module(error=lambda self, batch: batch["x"] + self.offset - self.w[...])
    held = model.offset = jnp.array([2.0])  # which is no Variable
    trainer = fit(model, numbered(3), strategy=strategy)
    assert held.tolist() == model.offset.tolist() == [2.0]
    w = float(model.w[...][0])
    assert w == pytest.approx((3 / 8 + 4 / 4 + 5 / 2), rel=1e-6)
    assert trainer.validate(None, numbered(1, 10))[0]["val"] == pytest.approx(12 - w, rel=1e-6)


RETURNED: list[tuple[Callable[[Any], Any], tuple[str, ...]]] = [
    (lambda loss: None, ("got None", "loss")),
    (lambda loss: 0.5, ("got 0.5", "array")),
    (lambda loss: loss.astype(jnp.int32), (r"got int32\[\]", "floating")),
    (lambda loss: jnp.stack([loss, loss]), (r"got float32\[2\]\. Return loss\.mean\(\)",)),
    (lambda loss: {"l": loss, "accuracy": 1.0}, (r"got \{'l': float32\[\], 'accuracy': 1\.0\}", "Return loss")),
    (lambda loss: {"loss": loss, "name": "a"}, ("returned a str at name", "Return arrays")),
    (lambda loss: (loss, {}), (r"got \(", "dict")),
]


@pytest.mark.parametrize("strategy", ["single", "shard_map"])
@pytest.mark.parametrize(("returned", "words"), RETURNED, ids=[words[0] for _, words in RETURNED])
def test_what_a_training_step_may_not_return(returned: Any, words: tuple[str, ...], strategy: str) -> None:
    model = module(lambda self, batch: returned(Mean.training_step(self, batch)))
    before = np.array(model.w[...])
    fit_refuses(ModuleError, r"Made\.training_step", *words, model=model, strategy=strategy)
    np.testing.assert_array_equal(np.asarray(model.w[...]), before)


def test_a_predict_step_that_returns_nothing_is_refused() -> None:
    model = module(predict=lambda self, batch: None)
    refuses(ModuleError, lambda: make_trainer().predict(model, numbered(1)), r"Made\.predict_step returned None")


@pytest.mark.parametrize("stage", ["training", "validation"])
@pytest.mark.parametrize(
    ("step", "signature"),
    [
        (lambda self: jnp.float32(0), r"\(\)"),
        (lambda self, batch, batch_idx, dataloader_idx, more: jnp.float32(0), "more"),
        (lambda self, *, batch: jnp.float32(0), r"\*, batch"),
        (lambda self, batch, *, scale: jnp.float32(0), "scale"),
    ],
)
def test_a_step_with_a_wrong_signature_is_refused(stage: str, step: Any, signature: str) -> None:
    words = rf"Made\.{stage}_step.*{signature}", r"must take \(self, batch\) or \(self, batch, batch_idx"
    fit_refuses(ModuleError, *words, model=module(**{stage: step}), val=numbered(1))


def test_a_batch_of_another_size_must_log_and_return_the_same() -> None:
    def logs(self: Any, batch: Any) -> Any:
        self.log("tail" if len(batch["x"]) == 3 else "full", 1.0)
        return Linear.loss(self, batch)

    def returns(self: Any, batch: Any) -> Any:
        return {"loss": self.loss(batch)} | ({"more": 1.0} if len(batch["x"]) == 3 else {})

    for step, kind, words in (
        (logs, StateError, (r"logs \['tail'\] for a batch of 3 rows but \['full'\]", "same metrics")),
        (returns, ModuleError, ("same structure for every batch",)),
    ):
        refuses(kind, lambda step=step: fit(module(step, base=Linear), sized(8, 3)), r"Made\.training_step", *words)


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (lambda self, batch: self.loss(batch) if self.loss(batch) > 1 else 0 * self.loss(batch), "if"),
        (lambda self, batch: jnp.float32(float(self.loss(batch))), "float"),
        (lambda self, batch: jnp.log(np.log(self.loss(batch))), "numpy"),
        (lambda self, batch: batch["x"][batch["y"][:, 0] > 0].mean(), "mask"),
    ],
)
def test_python_on_traced_values_comes_with_a_note(step: Any, kind: str) -> None:
    with pytest.raises(jax.errors.JAXTypeError if kind != "mask" else jax.errors.JAXIndexError) as caught:
        fit(module(step, base=Linear), random(1))
    notes = "\n".join(caught.value.__notes__)
    assert "Made.training_step" in notes and "float32[8, 3]" in notes and "jnp.where" in notes


@pytest.mark.parametrize("strategy", thinned(THREE, "single", "shard_map"))
def test_counters_inside_a_step_are_right(strategy: str) -> None:
    rows, traced = Rows(), list[int]()

    def step(self: Any, batch: Any) -> Any:
        traced.append(1)
        for owner, name in ((self, "module"), (self.trainer, "trainer")):
            assert isinstance(owner.global_step, jax.core.Tracer) and isinstance(owner.current_epoch, jax.core.Tracer)
            self.log_dict({f"step/{name}": owner.global_step, f"epoch/{name}": owner.current_epoch})
        return Mean.training_step(self, batch)

    model = module(step, validation=lambda self, batch: self.log("val", self.global_step + 10.0 * self.current_epoch))
    fit(model, numbered(2), numbered(2), rows, strategy=strategy, max_epochs=2, log_every_n_steps=1)
    assert rows.of("step/module") == rows.of("step/trainer") == [0, 1, 2, 3]
    assert rows.of("epoch/module") == rows.of("epoch/trainer") == [0, 0, 1, 1]
    assert rows.of("val") == [2, 14]  # those of training
    assert len(traced) == 1 or strategy == "shard_map"  # there also for other sizes, to see what grows with them


def test_a_metric_read_inside_a_step_is_refused() -> None:
    step = lambda self, batch: self.trainer.callback_metrics["flat"] * self.w.sum()  # noqa: E731
    fit_refuses(StateError, "'flat' is read inside a step", model=module(step))


class Scanned(Linear):
    def __init__(self, axis: int = 0) -> None:
        self.axis, axes = axis, nnx.StateAxes({nnx.Param: axis, ...: 0})
        keys = jax.random.split(jax.random.key(0), 3)
        self.layers = nnx.vmap(lambda key: nnx.Linear(3, 3, rngs=nnx.Rngs(key)), out_axes=axes, **GRAPH)(keys)

    def loss(self, batch: Any) -> jax.Array:
        layer = lambda layer, x: nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(layer, x)  # noqa: E731
        run = nnx.scan(
            layer, in_axes=(nnx.StateAxes({nnx.Param: self.axis, ...: 0}), nnx.Carry), out_axes=nnx.Carry, **GRAPH
        )
        return jnp.mean(run(self.layers, batch["x"]) ** 2)


@pytest.mark.parametrize("axis", thinned([0, 1], 1))
def test_scanned_layers_write_nothing_on_any_axis(axis: int) -> None:
    trainer = fit(Scanned(axis), random(1), random(1), precision="bf16-mixed")  # a write would be refused
    assert trainer.callback_metrics["val"] > 0


class Tied(Linear):
    """One matrix that encodes and decodes, through two layers that share it."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.encode, self.decode = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)
        self.decode.kernel = self.encode.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decode(jnp.tanh(self.encode(x)))


@pytest.mark.parametrize(("strategy", "graph_mode"), [("fsdp", True), ("single", False), ("shard_map", False)])
def test_tied_weights_are_one_leaf_and_train_as_one(strategy: str, graph_mode: bool) -> None:
    """Where nnx's own default is its tree mode, in which `nnx.split` takes no shared Variable, as well."""
    with nnx.set_graph_mode(graph_mode):
        trainer = fit(
            jl.lazy(Tied, rngs=0) if strategy == "fsdp" else Tied(rngs=nnx.Rngs(0)), random(), strategy=strategy
        )
        trainer.validate(trainer.module, random())
    assert len(jax.tree.leaves(trainer.state.params)) == 3
    assert trainer.module.encode.kernel is trainer.module.decode.kernel
    assert_same(trainer.module, HandLoop(Tied(rngs=nnx.Rngs(0)))(*random()).module)


def test_a_linen_module_comes_with_a_note() -> None:
    made = module(lambda self, batch: jnp.mean(self.net(batch["x"]) - self.w))
    made.net = linen.Dense(1)
    with pytest.raises(CallCompactUnboundModuleError) as caught:
        fit(made, numbered(1))
    assert any("self.net = nnx.bridge.ToNNX(Net(), rngs=rngs).lazy_init(x)" in x for x in caught.value.__notes__)


@pytest.mark.parametrize(
    ("call", "kind", "note"),
    [
        (lambda x: x.detach(), AttributeError, r"no detach\(\). In its place: jax.lax.stop_gradient\(x\)"),
        (lambda x: x.view(x.size(0), -1), TypeError, r"If this was x.size\(\): .* In its place: x.shape"),
        (lambda x: x.view(1, -1), NotImplementedError, r"In its place: x.reshape\(shape\)"),
        (lambda x: x.mean(dim=0), TypeError, r"axis= and keepdims= in place of dim="),
    ],
)
def test_a_method_of_a_tensor_is_told_with_what_arrays_have(call: Any, kind: type[Exception], note: str) -> None:
    with pytest.raises(kind) as caught:
        fit(module(lambda self, batch: call(batch["x"]).sum()), random(1))
    assert any(re.search(note, text) for text in caught.value.__notes__), caught.value.__notes__


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda net, x: net(x), r"It was raised in self\.net\.layers\[1\] \(nnx\.Linear\)\."),
        (nnx.remat(lambda net, x: net(x)), r"in nnx\.Linear\."),
    ],
)
def test_an_error_of_a_layer_names_its_path(call: Callable[..., Any], words: str) -> None:
    layers = [nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Linear(5, 1, rngs=nnx.Rngs(0))]  # the second fits nothing
    made = module(lambda self, batch: call(self.net, batch["x"]).mean())
    made.net = nnx.Sequential(*layers)
    with pytest.raises(TypeError, match="dot_general") as raised:
        fit(made, random(1))
    (note,) = [note for note in raised.value.__notes__ if re.match("It was raised in", note)]
    assert re.search(words, note)


class Dropping(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(self.dropout(x))

    def training_step(self, batch: Any) -> Any:
        return {"loss": self.loss(batch), "ones": self.dropout(jnp.ones_like(batch["x"]))}

    def validation_step(self, batch: Any) -> Any:
        self.log("mean", jnp.mean(self.dropout(jnp.ones_like(batch["x"]))))

    test_step = validation_step

    def predict_step(self, batch: Any) -> Any:
        return self.dropout(jnp.ones_like(batch["x"]))


def outputs_of(name: str, seen: list[Any]) -> Any:
    return hooks(on_train_batch_end=lambda t, m, outputs, *_: seen.append(np.array(outputs[name])))


@pytest.mark.parametrize("strategy", thinned(THREE, "shard_map"))
def test_dropout_drops_in_training_steps_only(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batches, seen = Dropping(), random(2, rows=64), []
    trainer = fit(model, batches, batches[:1], outputs_of("ones", seen), strategy=strategy)
    assert [sorted(set(ones.ravel())) for ones in seen] == [[0.0, 2.0]] * 2
    assert (seen[0] != seen[1]).any()
    assert trainer.callback_metrics["mean"] == 1.0
    assert trainer.validate(model, batches) == trainer.test(model, batches) == [{"mean": 1.0}]
    np.testing.assert_array_equal(trainer.predict(model, batches)[0], np.ones((64, 3)))
    assert model.dropout.deterministic is False
    assert "evaluation mode" not in caplog.text


@pytest.mark.parametrize("strategy", thinned(["single", "fsdp"], "fsdp"))
def test_statistics_and_keys_are_those_of_a_loop_by_hand(strategy: str) -> None:
    def loss(net: Any, batch: Any) -> jax.Array:
        net.count[...] += 1
        return net.loss(batch)

    model, net = (Net(rate=0.5, rngs=nnx.Rngs(0)) for _ in range(2))
    fit(model, random(), strategy=strategy)
    net.train()
    assert_same(state_of(model), state_of(HandLoop(net, loss=loss)(*random()).module))


def test_a_module_in_eval_mode_trains_in_it_and_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model, seen = Dropping(), []
    model.eval()
    fit(model, random(2, rows=64), random(1), outputs_of("ones", seen)).predict(model, random(1))
    assert model.dropout.deterministic is True
    assert [(ones == 1).all() for ones in seen] == [True] * 2
    (told,) = [message for message in warnings_of(caplog) if "evaluation mode" in message]
    assert re.match("Dropping is entirely in eval.*Call module.train.. before fit", told)


class Probing(Linear):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.backbone = nnx.Sequential(nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
        self.head = nnx.Linear(3, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=None, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any) -> Any:
        ones = jnp.ones_like(batch["x"])
        return {"loss": self.loss(batch), "frozen": self.backbone.layers[1](ones), "trained": self.dropout(ones)}

    def validation_step(self, batch: Any) -> Any:
        self.log("dropped", jnp.mean(self.dropout(jnp.ones_like(batch["x"])) == 0))


@pytest.mark.parametrize("strategy", thinned(THREE, "single", "shard_map"))
def test_a_part_in_eval_mode_stays_in_it_and_the_rest_trains(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    model, frozen, trained = Probing(), [], []
    model.backbone.eval()
    watches = outputs_of("frozen", frozen), outputs_of("trained", trained)
    trainer = fit(model, random(2, rows=64), random(1, rows=64), *watches, strategy=strategy)
    assert all((ones == 1).all() for ones in frozen) and all((ones == 0).any() for ones in trained)
    assert trainer.callback_metrics["dropped"] == 0  # validation is entirely in evaluation mode
    assert np.asarray(model.backbone.layers[0].mean[...]).tolist() == [0, 0, 0]
    modes = model.backbone.layers[0].use_running_average, model.backbone.layers[1].deterministic
    assert (*modes, model.dropout.deterministic) == (True, True, None)
    assert "evaluation mode" not in caplog.text


def test_a_frozen_part_that_alone_has_modes_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def init(self: Any) -> None:
        Linear.__init__(self)
        self.backbone = nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))

    model = module(base=Linear, init=init, __call__=lambda self, x: Linear.__call__(self, self.backbone(x)))
    model.backbone.eval()
    fit(model, random(1))
    assert "evaluation mode" not in caplog.text


def test_the_modules_train_method_chooses_the_parts() -> None:
    model = module(base=Probing, train=lambda self, **more: (nnx.Module.train(self, **more), self.backbone.eval()))
    fit(model, random(2, rows=64))
    assert np.asarray(model.backbone.layers[0].mean[...]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("strategy", thinned(THREE, "single", "shard_map"))
def test_evaluations_draw_per_batch_and_alike_in_each_run(strategy: str) -> None:
    draw = lambda self, batch: jax.random.normal(self.drop.rngs(), (len(batch["x"]),))  # noqa: E731
    model = module(base=Net, init=lambda self: Net.__init__(self, rngs=nnx.Rngs(3)), predict=draw)
    trainer, batches = make_trainer(strategy=strategy), random(3)
    before = state_of(model)
    first, second = (np.stack(trainer.predict(model, batches)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(np.unique(first)) == first.size  # of no two batches, and of no two replicas, the same
    for name, x in state_of(model).items():
        np.testing.assert_array_equal(x, before[name], err_msg=name)


class Normed(Linear):
    """Normalizes over a mapped axis, as code for `jax.pmap` does."""

    def __init__(self, axis: str | None, mapped: str | None = None) -> None:
        super().__init__()
        self.norm, self.mapped = nnx.BatchNorm(3, axis_name=axis, rngs=nnx.Rngs(0)), mapped

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.mapped is None:
            return super().__call__(self.norm(x))
        axes = nnx.StateAxes({...: None})
        parts = nnx.vmap(lambda norm, x: norm(x), in_axes=(axes, 0), axis_name=self.mapped, **GRAPH)(
            self.norm, x.reshape(2, -1, 3)
        )
        return super().__call__(parts.reshape(x.shape))


NORMS = [(axis, strategy) for axis in ("data", "batch") for strategy in THREE]


@pytest.mark.parametrize(("axis", "strategy"), thinned(NORMS, NORMS[0], NORMS[5], full=NORMS[1:4]))
def test_a_norm_over_an_axis_that_nothing_maps_is_over_all_rows(axis: str, strategy: str) -> None:
    model, batches, plain = Normed(axis), random(2, rows=16), Normed(None)
    fit(model, batches, batches[:1], strategy=strategy)
    assert_same(model, HandLoop(plain)(*batches).module)
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], rtol=1e-4, atol=1e-7)
    assert model.norm.axis_name == axis


def test_a_norm_over_an_axis_that_the_step_maps_stays() -> None:
    model, batches = Normed("part", mapped="part"), random(2, rows=16)
    fit(model, batches)
    assert_same(model, HandLoop(Normed("part", mapped="part"))(*batches).module)


def test_a_step_that_is_traced_again_runs_once(capfd: pytest.CaptureFixture[str]) -> None:
    model = module(base=Normed, init=lambda self: Normed.__init__(self, "data"))
    type(model).__call__ = lambda self, x: (jax.debug.print("one step"), Normed.__call__(self, x))[1]
    fit(model, random(2))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("one step") == 2


def test_masked_statistics_over_replicas_keep_their_digits() -> None:
    rng = np.random.default_rng(0)
    x, mask = rng.normal(1000, 1, (32, 4)).astype(np.float32), rng.random((32, 1)) < 0.6
    ours, whole = (nnx.BatchNorm(4, momentum=0.0, use_fast_variance=False, rngs=nnx.Rngs(0)) for _ in range(2))
    sync_batchnorm(ours, "data")
    graph, state = nnx.split(ours)

    def of_replica(state: Any, x: jax.Array, mask: jax.Array) -> Any:
        norm = nnx.merge(graph, state)
        return norm(x, mask=mask), norm.mean[...], norm.var[...]

    run = jax.vmap(of_replica, (None, 0, 0), axis_name="data")
    outputs, mean, var = run(state, x.reshape(4, 8, 4), mask.reshape(4, 8, 1))
    np.testing.assert_allclose(outputs.reshape(32, 4), whole(x, mask=mask), atol=1e-3)
    np.testing.assert_allclose(mean, np.broadcast_to(whole.mean[...], (4, 4)), rtol=1e-6)
    np.testing.assert_allclose(var, np.broadcast_to(x[mask[:, 0]].astype(np.float64).var(0), (4, 4)), rtol=1e-4)
    np.testing.assert_allclose(var, np.broadcast_to(whole.var[...], (4, 4)), rtol=1e-4)
