"""What `configure_optimizers` may return: groups of parameters, weight decay, and what is no optimizer."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import random
from kit.by_hand import GRAPH, HandLoop, assert_same
from kit.checkpoints import keep_all
from kit.inside import laid_out
from kit.modules import Linear, Net, module
from kit.refusals import refuses
from kit.trainers import BARE, STRATEGIES, THREE, fit, splitting, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, ModuleError

ADAM, SGD, SLOW = optax.adam(0.02), optax.sgd(0.05, momentum=0.9), optax.sgd(0.001)


def net(optimizer: Any = None, **arguments: Any) -> Any:
    return module(base=Net, tx=optimizer, init=lambda self: Net.__init__(self, rngs=nnx.Rngs(0), **arguments))


def labels(**of: list[str]) -> Any:
    """Return optax's labels of a net: of each path, by its text, the first label one of whose texts is in it."""

    def label(path: Any, _: Any) -> str:
        return next(name for name, texts in of.items() if any(x in jax.tree_util.keystr(path) for x in texts))

    return lambda params: jax.tree.map_with_path(label, params)


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "single", full=["single", "fsdp", "shard_map"]))
@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_fit_traces_the_update_once_and_the_first_state_twice(strategy: str, is_lazy: bool) -> None:
    calls: Counter[str] = Counter()

    def counting(name: str, fn: Any) -> Any:
        return lambda *args: (calls.update([name]), fn(*args))[1]

    tx = optax.GradientTransformation(*(counting(name, fn) for name, fn in ADAM._asdict().items()))
    make = lambda: net(tx)  # noqa: E731
    fit(jl.lazy(make) if is_lazy else make(), random(2), strategy=splitting(strategy), **BARE)
    assert calls == {"update": 1, "init": 2}  # of the shapes, and in the program that makes the state


# A way to say groups, and the same in optax's labels.
GROUPS: dict[str, tuple[Any, Any]] = {
    "attributes": ({"inner": ADAM, "outer": SGD, ...: SLOW}, labels(a=["['inner']"], b=["['outer']"], c=[""])),
    "patterns": ({"*/kernel": ADAM, "*/bias": SGD, "norm/*": SLOW}, labels(a=["kernel"], b=["bias"], c=["norm"])),
    "filters": (
        {nnx.PathContains("blocks"): ADAM, nnx.PathContains("kernel"): SGD, nnx.Param: SLOW},
        labels(a=["blocks"], b=["kernel"], c=[""]),
    ),
    "as they are printed": (
        {"blocks[0]": ADAM, "blocks/1/bias": SGD, ...: SLOW},
        labels(a=["['blocks'][0]"], b=["['blocks'][1]['bias']"], c=[""]),
    ),
    "the first": ({"inner/kernel": ADAM, "inner": SGD, "*": SLOW}, labels(a=["['inner']['k"], b=["['inner']"], c=[""])),
}
CASES = [("single", name) for name in GROUPS] + [(name, "patterns") for name in STRATEGIES[1:]]


@pytest.mark.parametrize(
    ("strategy", "name"), thinned(CASES, ("fsdp", "patterns"), full=[*CASES[:5:2], ("shard_map", "patterns")])
)
def test_each_group_is_trained_as_optax_trains_its_labels(strategy: str, name: str) -> None:
    by, of = GROUPS[name]
    model, batches = net(jl.Optimizer(by=by), depth=2), random()
    fit(model, batches, strategy=splitting(strategy), **BARE)
    tx = optax.partition(dict(zip("abc", by.values(), strict=True)), of)
    assert_same(model, HandLoop(net(depth=2), tx)(*batches).module)


def three() -> Any:
    def init(self: Any) -> None:
        Linear.__init__(self)
        self.frozen = nnx.Param(jnp.full(1, 0.5))

    tx = jl.Optimizer(by={"kernel": ADAM, "bias": SGD}, wrt=WRT)
    return module(base=Linear, init=init, tx=tx, __call__=lambda self, x: Linear.__call__(self, x) * self.frozen)


WRT = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("frozen")))


def test_groups_resume_under_another_strategy() -> None:
    batches = random(4)
    given = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "default_root_dir": "run", "resume": "auto"}
    for epochs, strategy in ((1, "fsdp"), (2, "shard_map")):
        model = three()
        fit(model, batches, None, keep_all(), max_epochs=epochs, strategy=splitting(strategy), **given)
    tx = optax.partition({"a": ADAM, "b": SGD}, labels(a=["kernel"], b=["bias"]))
    by_hand = HandLoop(three(), optax.chain(optax.clip_by_global_norm(0.1), tx), wrt=WRT)
    for window in (batches[:2], batches[2:]) * 2:
        by_hand.window(*window)
    assert_same(model, by_hand.module)


def test_the_state_of_groups_is_split_as_their_parameters_are() -> None:
    strategy: Any = splitting("fsdp")
    _, lies = laid_out(strategy, net(jl.Optimizer(by={"*/kernel": ADAM, ...: SGD})))
    lying = lambda tree: jax.tree_util.tree_leaves_with_path(tree)  # noqa: E731
    split = {jax.tree_util.keystr(path[-2:]): x.spec for path, x in lying(lies.params)}
    moments = [(path, x) for path, x in lying(lies.opt_state) if "count" not in str(path[-1])]
    result = {jax.tree_util.keystr(path[-2:]): x.spec for path, x in moments}
    assert result == split and len(moments) == len(split) + 3  # two for each of three kernels, one for each other
    assert any(spec != jax.sharding.PartitionSpec() for spec in result.values())


REFUSED: list[tuple[Any, str, str]] = [
    ({"kernel": SGD}, "no group for bias", r"`\.\.\.: optax\.adam"),
    ({"kernel": SGD, "bais": SGD}, "'bais' fits no trained parameter", "Did you mean 'bias'"),
    ({...: SGD, "bias": SGD}, "'bias' has nothing left", "put it before"),
    ({"kernel": SGD, "bias": SGD, nnx.LoRAParam: SGD}, "LoRAParam.* fits no trained", "There are bias, kernel"),
]


@pytest.mark.parametrize(("by", "given", "way"), REFUSED)
def test_parameters_and_groups_without_a_match_are_named(by: Any, given: str, way: str) -> None:
    model = module(base=Linear, configure_optimizers=lambda self: jl.Optimizer(by=by))
    refuses(ArgumentError, lambda: fit(model, random(), **BARE), given, way)


@pytest.mark.parametrize(
    ("kind", "make", "words"),
    [
        (ArgumentError, lambda: jl.Optimizer(SGD, by={"a": SGD}), ["tx or by=, got both"]),
        (ArgumentError, lambda: jl.Optimizer(by={"a": SGD}, lr_schedule=lambda k: k), ["lr_schedule", "Leave it out"]),
        (ArgumentError, lambda: jl.Optimizer(by={"a": SGD, nnx.PathContains("a"): SGD}), ["called 'a'"]),
        (ArgumentTypeError, lambda: jl.Optimizer(by={}), ["a dict of groups", r"got \{\}"]),
        (ArgumentTypeError, lambda: jl.Optimizer(by={"a": 0.1}), [r"by=\{'a': \.\.\.\}", "got 0.1"]),  # type: ignore
        (ArgumentTypeError, lambda: jl.Optimizer(), ["got None"]),
        (ArgumentError, lambda: jl.Optimizer(SGD, wrt=3), [r"jl\.Optimizer\(wrt=\.\.\.\) takes an nnx filter, got 3"]),
        (ArgumentError, lambda: jl.Optimizer(by={3: SGD}), [r"jl\.Optimizer\(by=\.\.\.\) takes an nnx filter, got 3"]),
        (ArgumentTypeError, lambda: jl.Optimizer(SGD, groups={}), ["no argument 'groups'", "by="]),  # type: ignore
    ],
)
def test_what_no_optimizer_takes_is_refused_in_its_constructor(kind: Any, make: Any, words: list[str]) -> None:
    refuses(kind, make, *words)


class Zoo(nnx.Module):
    """Every kind of layer whose parameters decay or do not."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.Conv(4, 4, (3,), rngs=rngs)])
        self.einsum = nnx.Einsum("ab,bc->ac", (4, 4), (4,), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, rngs=rngs, decode=False)  # its biases are matrices
        self.norms = nnx.List([kind(4, rngs=rngs) for kind in (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm)])
        self.token = nnx.Embed(4, 4, rngs=rngs)
        self.pos_emb = nnx.Param(jnp.ones((4, 4)))
        self.own = nnx.Param(jnp.ones((4, 4)))
        self.vector = nnx.Param(jnp.ones(4))
        self.experts = nnx.vmap(lambda rngs: nnx.LayerNorm(4, rngs=rngs))(nnx.Rngs(0).split(3))  # as matrices


DECAY = {"layers/0/kernel", "layers/1/kernel", "einsum/kernel", "own"}
DECAY |= {f"attention/{name}/kernel" for name in ("query", "key", "value", "out")}


@pytest.mark.parametrize("as_pure", thinned([True, False], True, full=()), ids=["arrays", "variables"])
@pytest.mark.parametrize("kind", ["adamw", pytest.param("lion", marks=pytest.mark.full)])
def test_only_weights_of_layers_decay(kind: str, as_pure: bool) -> None:
    state = nnx.state(Zoo(), nnx.Param)
    params = nnx.as_pure(state) if as_pure else state
    tx = getattr(optax, kind)(0.1, weight_decay=0.5, mask=jl.decay_mask)
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(ones), ones)
    flat = nnx.to_flat_state(nnx.as_pure(updates))
    assert {"/".join(map(str, path)) for path, x in flat if np.any(np.asarray(x) != 0)} == DECAY


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.gain, self.shift = nnx.Param(jnp.full(8, 2.0)), nnx.Param(jax.random.normal(rngs.params(), (8,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.linear(x) * self.gain + self.shift)


class Layers(Linear):
    """Four layers in a list, or stacked by nnx.vmap for a scan, with the same weights."""

    def __init__(self, stacked: bool, seed: int = 0) -> None:
        layers, self.stacked = nnx.vmap(Layer)(nnx.Rngs(seed).split(4)), stacked
        graph, state = nnx.split(layers)
        each = [nnx.merge(graph, jax.tree.map(lambda x, i=i: x[i], state)) for i in range(4)]
        self.layers = layers if stacked else nnx.List(each)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tile(x, (1, 3))[:, :8]
        if self.stacked:
            return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", thinned(["all", "groups"], "all"))
@pytest.mark.parametrize("strategy", thinned([*THREE, "fit_many"], "single", "fit_many", full=["fsdp"]))
def test_a_loop_that_is_rewritten_as_a_scan_decays_the_same(strategy: str, kind: str, monkeypatch: Any) -> None:
    tx = optax.adamw(0.01, weight_decay=3.0, mask=jl.decay_mask)
    layers = HandLoop(Layers(stacked=False), tx)(*random(4)).module.layers
    monkeypatch.setattr(
        Layers,
        "configure_optimizers",
        lambda _: jl.Optimizer(by={"layers/linear": tx, ...: tx}) if kind == "groups" else tx,
    )
    made = Layers(stacked=True)
    if strategy == "fit_many":
        made = jl.fit_many(Layers, [{"stacked": True, "seed": k} for k in range(2)], random(4), max_epochs=1).module(0)
    else:
        fit(made, random(4), strategy=splitting(strategy))
    expected = jax.tree.map(lambda *x: jnp.stack(x), *[nnx.as_pure(nnx.state(layer)) for layer in layers])
    assert_same(
        made, {f"['layers']{jax.tree_util.keystr(k)}": x for k, x in jax.tree_util.tree_leaves_with_path(expected)}
    )


def test_an_nnx_optimizer_in_the_step_is_refused() -> None:
    def step(self: Any, batch: Any, optimizer: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: m.loss(batch), argnums=nnx.DiffState(0, nnx.Param), **GRAPH)(self)
        optimizer.update(self, grads)
        return loss

    def init(self: Any) -> None:
        Net.__init__(self, rngs=nnx.Rngs(0))
        self.own = nnx.Optimizer(self, optax.sgd(0.1), wrt=nnx.Param)

    held = module(lambda self, batch: step(self, batch, self.own), base=Net, init=init)
    words = r"Made\.training_step.*self\.own", "return the loss alone"
    refuses(ModuleError, lambda: fit(held, random(), **BARE), *words)
    outside, count = nnx.Optimizer(net(), optax.adam(0.1), wrt=nnx.Param), nnx.Variable(jnp.zeros(()))
    for training, told in (
        (lambda self, batch: step(self, batch, outside), True),
        (lambda self, batch: (count.set_value(count + 1), self.loss(batch))[1], False),
    ):
        with pytest.raises(Exception, match="Cannot mutate") as caught:
            fit(module(training, base=Net, init=init), random(), **BARE)
        notes = getattr(caught.value, "__notes__", [])
        assert any("An optimizer of nnx was updated in the step" in note for note in notes) == told


SAM = optax.contrib.sam(SGD, optax.chain(optax.contrib.normalize(), optax.sgd(0.05)))
SAMS = {"alone": SAM, "in a chain": optax.chain(optax.scale(0.5), SAM)}


@pytest.mark.parametrize("name", thinned(SAMS, "in a chain", full=()))
@pytest.mark.parametrize("strategy", thinned(THREE, "fsdp", full=()))
def test_sam_which_takes_no_loss_trains_as_in_a_loop_by_hand(strategy: str, name: str) -> None:
    made, batches = net(SAMS[name]), random(4)
    expected = HandLoop(net(SAMS[name]))(*batches).module
    fit(made, batches, strategy=splitting(strategy))
    assert_same(made, expected)


def test_an_online_classifier_leaves_the_encoder_as_it_was() -> None:
    def init(self: Any) -> None:
        Linear.__init__(self)
        self.classifier = nnx.Linear(1, 2, rngs=nnx.Rngs(1))

    def online_loss(self: Any, batch: Any) -> jax.Array:
        logits = self.classifier(jax.lax.stop_gradient(self(batch["x"])))
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(batch["y"])) % 2).mean()

    step = lambda self, batch: self.loss(batch) + online_loss(self, batch)  # noqa: E731
    model = module(step, base=Linear, tx=jl.Optimizer(by={"classifier": ADAM, ...: SGD}), init=init)
    batches, before = random(4), np.array(model.classifier.kernel[...])
    fit(model, batches)
    by_hand = HandLoop(Linear(), SGD)(*batches).module
    assert_same({"kernel": model.kernel[...]}, {"kernel": by_hand.kernel[...]})
    assert np.all(model.classifier.kernel[...] != before)
