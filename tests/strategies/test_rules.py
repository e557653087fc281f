"""Which rule says how an array is split, and the strategies that are made of rules."""

from collections import UserList
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from kit.inside import laid_out
from kit.refusals import refuses
from kit.trainers import fit, make_trainer, thinned
from kit.transformer import Transformer

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.strategies import FSDP, Rules, SequenceParallel, TensorParallel

COLUMNS, WHOLE_ROWS = P(None, "tp"), P("tp", None)


PATHS = {r"(qkv|up)\.kernel$": COLUMNS, r"(out|down)\.kernel$": WHOLE_ROWS}


def spec_of(strategy: Any, shape: tuple[int, ...], names: Any = None, path: str = "kernel") -> P:
    class One(jl.TrainModule):
        def __init__(self) -> None:
            with nnx.use_eager_sharding(False):
                setattr(self, path, nnx.Param(jnp.zeros(shape), **({"out_sharding": names} if names else {})))

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(1.0)

    _, shardings = laid_out(strategy, One())
    return jax.tree.leaves(shardings.params)[0].spec


MESH = {"data": 2, "fsdp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("rules", "names", "spec"),
    [
        ({"^kernel$": P("tp", "fsdp")}, ("fsdp", "tp"), P("tp", "fsdp")),  # a path goes before names
        ({"kern": P(), "^kernel$": P("tp")}, None, P()),  # the first that is found, and whole if it says so
        ({"embed": "fsdp", "mlp": "tp"}, ("embed", "mlp"), P("fsdp", "tp")),
        ({"embed": None, "mlp": ("fsdp", "tp")}, ("embed", "mlp"), P(None, ("fsdp", "tp"))),
        ({"embed": "tp", "mlp": "tp"}, ("embed", "mlp"), P("tp", None)),  # an axis is taken once
        ({"embed": None}, ("embed", None), P(None, None)),
        ({"kernel": [None, ["fsdp", "tp"]]}, None, P(None, ("fsdp", "tp"))),  # of a YAML file
        ({"kernel": [["fsdp"]]}, None, P(("fsdp",))),
        ({"kernel": UserList([None, UserList(["fsdp", "tp"])])}, None, P(None, ("fsdp", "tp"))),  # as of OmegaConf
        ({"embed": None, "mlp": ["fsdp", "tp"]}, ("embed", "mlp"), P(None, ("fsdp", "tp"))),
        ({}, ("fsdp", "tp"), P("fsdp", "tp")),  # names of the mesh need no rule
        ({}, ("embed", "tp"), P(None, "tp")),
        ({}, ("heads", "kv"), P(None, "fsdp")),  # names that nobody knows: by size
        ({}, None, P(None, "fsdp")),
    ],
)
def test_a_path_goes_before_names_and_names_before_the_size(rules: Any, names: Any, spec: P) -> None:
    assert spec_of(FSDP(mesh=MESH, rules=rules), (32, 64), names) == spec


@pytest.mark.parametrize(
    ("kind", "rules", "words"),
    [
        (ArgumentTypeError, ["tp"], r"takes a dict"),
        (ArgumentTypeError, {3: "tp"}, r"no str: 3"),
        (ArgumentTypeError, {"kernel": 1}, r"'kernel': 1.*PartitionSpec.*mesh axis"),
        (ArgumentError, {"(": P("tp")}, r"'\(' is no regular expression"),
        (ArgumentError, {"kernel": P("model")}, r"the rule of 'kernel' names 'model'.*'tp': 2"),
        (ArgumentError, {"mlp": "model"}, r"the rule of 'mlp' names 'model'"),
        (ArgumentError, {"kernal": P("tp")}, r"no parameter's path has 'kernal'.*'kernel'"),
        (ArgumentError, {"kernel": P(None, None, "tp")}, r"kernel has shape \(32, 63\)"),
        (ArgumentError, {"kernel": P(None, "tp")}, r"dim 1 of kernel has 63 elements.*'tp' into 2"),
        (ArgumentError, {"kernel": P(("fsdp", "tp"), None), "other": P()}, r"no parameter's path has 'other'"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(kind: Any, rules: Any, words: str) -> None:
    refuses(kind, lambda: spec_of(FSDP(mesh=MESH, rules=rules), (32, 63)), rf"FSDP.*{words}")


def test_rules_are_there_for_a_strategy_of_ones_own() -> None:
    mesh, rules = jl.sharding.mesh({"data": 4, "tp": 2}), Rules({"up": COLUMNS})
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    result = rules.sharding("blocks[0].up.kernel", x, P(), mesh)
    assert result is not None and result.spec == COLUMNS and rules.sharding("down.kernel", x, P(), mesh) is None


def nested(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (jax.lax.scan(lambda x, w: (x * w.mean(), None), x, w)[0], None), x, scale)[0]


@pytest.mark.parametrize(
    ("shape", "layers", "step"),
    [
        # There are 64 layers; by size alone they would be split.
        ((64, 16), 0, lambda x, scale: jax.lax.scan(lambda x, w: (x * w, None), x, scale)[0]),
        ((64, 64), 0, lambda x, scale: jax.lax.scan(lambda x, w: (x * w, None), x, scale)[0]),
        ((2, 64, 4), 1, nested),
        ((4, 64, 2), 1, nnx.scan(lambda x, w: x * w.mean(), in_axes=(nnx.Carry, 1), out_axes=nnx.Carry)),
    ],
    ids=["wide", "square", "inner", "second"],
)
def test_the_layers_of_a_scan_are_not_divided_among_devices(shape: tuple[int, ...], layers: int, step: Any) -> None:
    class Deep(jl.TrainModule):
        def __init__(self) -> None:
            self.scale = nnx.Param(jnp.ones(shape))

        def training_step(self, x: jax.Array) -> jax.Array:
            return step(x, self.scale[...]).mean()

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.1)

    for model in (Deep(), *[jl.lazy(Deep)] * (layers == 0)):
        trainer = fit(model, [np.ones((8, shape[-1]), np.float32)], strategy=FSDP(min_size=0))
        assert trainer.state.params["scale"].sharding.shard_shape(shape)[layers] == 64
        assert layers or trainer.state.params["scale"].sharding.spec == P(None, "data")
    if layers == 0:
        assert laid_out(FSDP(min_size=0), Deep())[1].params["scale"].spec == P("data")  # what it is without the step


SPLIT = {
    "rules": (lambda: TensorParallel(PATHS, tp=2, fsdp=2, data=2), {}),
    "names of the mesh": (lambda: TensorParallel(tp=2, fsdp=2, data=-1), {"up": (None, "tp"), "down": ("tp", None)}),
    "names of dims": (
        lambda: TensorParallel({"embed": "fsdp", "mlp": "tp"}, tp=-1, fsdp=2, data=2),
        {"up": ("embed", "mlp"), "down": ("mlp", "embed")},
    ),
    "scanned": (
        lambda: TensorParallel({"mlp": "tp", "embed": "fsdp"}, tp=2, fsdp=2, data=2),
        {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "scanned": True},
    ),
    "copies of shards": (lambda: FSDP(replicas=2, min_size=0), {}),
    "four copies": (lambda: FSDP(replicas=4, min_size=0), {}),
    "gathered by layer": (lambda: FSDP(min_size=0), {"scanned": True}),
    "computed again": (lambda: FSDP(min_size=0, remat=True), {"scanned": True}),
    "dots kept": (lambda: FSDP(min_size=0, remat="dots_saveable"), {"scanned": True}),
    "sequences": (lambda: SequenceParallel(seq=4, data=2), {}),
}
ODD = {"plain": {}, "window": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}}


def tokens() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, (rows, 8)).astype(np.int32) for rows in (16, 16, 16, 6)]


SELDOM = [("dots kept", "window"), ("sequences", "plain")]


@pytest.mark.parametrize(("kind", "how"), thinned([(k, how) for k in SPLIT for how in ODD], full=SELDOM))
def test_a_transformer_trains_like_on_a_single_device(kind: str, how: str) -> None:
    strategy, names = SPLIT[kind]
    with nnx.use_eager_sharding(False):
        jl.testing.assert_same_training(
            lambda: Transformer(**names, rngs=nnx.Rngs(0)),
            tokens(),
            strategies=[strategy()],
            devices=(8,),
            steps=4 // ODD[how].get("accumulate_grad_batches", 1) + 1,
            **ODD[how],
        )


@pytest.mark.full
def test_a_module_with_named_dims_trains_anywhere() -> None:
    model = jl.lazy(Transformer, ("embed", "mlp"), ("mlp", "embed"))
    batches = tokens()[:2]
    wanted = fit(model, batches, enable_checkpointing=False).state.params
    for strategy in (TensorParallel({"embed": None, "mlp": "tp"}, tp=2, data=4), "ddp", "shard_map"):
        result = fit(model, batches, strategy=strategy, enable_checkpointing=False).state.params
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), wanted, result)
    state = fit(model, batches, strategy=TensorParallel({"mlp": "tp"}, tp=2, data=4), max_steps=1).state
    assert state.params["blocks"][0]["up"]["kernel"].sharding.spec == COLUMNS
    assert state.opt_state[0].mu["blocks"][1]["down"]["kernel"].sharding.spec == WHOLE_ROWS


def test_tensor_parallel_without_a_rule_that_is_met_is_refused() -> None:
    trainer = make_trainer(strategy=TensorParallel({r"up\.kernel$": P("fsdp")}, tp=4, data=2))
    refuses(
        ArgumentError, lambda: trainer.fit(Transformer(rngs=nnx.Rngs(0)), tokens()), "splits nothing of Transformer"
    )
    for make, words in (
        (
            lambda: make_trainer(strategy=TensorParallel(tp=0)).strategy,
            "mesh of TensorParallel takes the size.*'tp': 0",
        ),
        (
            lambda: make_trainer(strategy=SequenceParallel(seq="all")).strategy,
            "mesh of SequenceParallel takes.*'seq': 'all'",
        ),
        (lambda: FSDP(remat="save_only_these_names"), r"FSDP\(remat=\.\.\.\) takes True, False or one of"),
        (lambda: FSDP(stage=True), r"FSDP\(stage=\.\.\.\)"),
        (lambda: FSDP(remat="often"), r"FSDP\(remat=\.\.\.\) takes True, False or one of"),
        (lambda: make_trainer(strategy=TensorParallel({}, tp=3)).strategy, "do not multiply to 8"),
    ):
        refuses(ArgumentError, make, words)


def test_what_would_do_nothing_is_refused_at_the_first_batch() -> None:
    batches = [np.zeros((8, 9), np.int32)]
    for strategy, words in (
        (FSDP(remat=True), r"FSDP\(remat=True\).*Transformer\.training_step scans over none"),
        (SequenceParallel(seq=8), r"over 8 devices, and none divides: \[\(8, 9\)\]"),
        (FSDP(rules={"embde": "data"}), r"no dim is named 'embde'.*\['embed', 'mlp'\]"),
    ):
        with nnx.use_eager_sharding(False):
            model = Transformer(("embed", "mlp"), ("mlp", "embed"), rngs=nnx.Rngs(0))
        trainer = make_trainer(strategy=strategy)
        refuses(ArgumentError, lambda trainer=trainer, model=model: trainer.fit(model, batches), words)


def test_a_sequence_lies_in_parts_on_the_devices() -> None:
    strategy = SequenceParallel(seq=4, data=2)
    strategy.setup(None)
    placed = strategy.shard_batch({"x": np.ones((4, 8, 3)), "odd": np.ones((4, 9)), "y": np.ones(4), "n": np.ones(())})
    parts = {name: x.addressable_shards[0].data.shape for name, x in placed.items()}
    assert parts == {"x": (2, 2, 3), "odd": (2, 9), "y": (2,), "n": ()}


@pytest.mark.parametrize(
    ("strategy", "mesh", "described"),
    [
        ("fsdp", {"data": 2, "fsdp": -1}, "FSDP on mesh data=2 x fsdp=4"),
        ("ddp", {"rows": 8}, "DDP on mesh rows=8"),
        ("shard_map", {"data": -1}, "ShardMapDDP on mesh data=8"),
        ("auto", {"data": 2, "fsdp": 4}, "FSDP on mesh data=2 x fsdp=4 (auto: axes data, fsdp)"),
        ("auto", {"data": 4, "model": 2}, "DDP on mesh data=4 x model=2 (auto: axes data, model)"),
        (FSDP(min_size=0), jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("fsdp",)), "FSDP on mesh fsdp=2"),
    ],
)
def test_a_mesh_is_taken_by_its_axes_or_as_it_is(strategy: Any, mesh: Any, described: str) -> None:
    assert make_trainer(strategy=strategy, mesh=mesh).strategy.describe() == described
    assert not isinstance(strategy, FSDP) or strategy._user_mesh is None  # the user's own object stays as it was


@pytest.mark.parametrize(
    ("kind", "strategy", "mesh", "words"),
    [
        (ArgumentError, "single", {"data": 1}, "SingleDevice builds its own mesh.*'ddp', 'fsdp' or 'shard_map'"),
        (ArgumentError, "pmap", {"data": 8}, "PMap builds its own mesh"),
        (ArgumentError, "replicas:4", {"data": 8}, "Replicas builds its own mesh"),
        (ArgumentError, TensorParallel(tp=2, data=4), {"tp": 8}, "TensorParallel has a mesh of its own already"),
        (ArgumentError, "fsdp", {"rows": 4, "model": 2}, r"FSDP\(mesh=\.\.\.\).*'batch' or 'fsdp'.*'rows', 'model'"),
        (ArgumentTypeError, "ddp", 8, r"DDP\(mesh=\.\.\.\) takes a jax\.sharding\.Mesh or the sizes"),
    ],
)
def test_an_unusable_mesh_is_refused_before_anything_runs(kind: Any, strategy: Any, mesh: Any, words: str) -> None:
    refuses(kind, lambda: make_trainer(strategy=strategy, mesh=mesh).strategy, words)
