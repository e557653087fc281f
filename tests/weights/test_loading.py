"""Pretrained weights into a module, under every strategy, and its weights in a file that the library reads."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import nnx
from kit.batches import random
from kit.by_hand import assert_same, params_of
from kit.modules import Net
from kit.trainers import fit, splitting, thinned

import jaxlit as jl
from jaxlit.checkpoints.safetensors import DTYPES
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError
from jaxlit.weights.loading import place

# As a library of another kind would store a Net: its own names, kernels transposed, statistics of BatchNorm.
RENAME = {
    r"(inner|outer)\.weight": jl.WeightRule(r"\1.kernel", transpose=True),
    r"block_(\d+)\.weight": jl.WeightRule(r"blocks.\1.kernel", transpose=True),
    r"block_(\d+)\.bias": r"blocks[\1].bias",
    r"norm\.weight": "norm.scale",
    r"norm\.running_(mean|var)": r"norm.\1",
    r"norm\.num_batches_tracked": None,
    "steps": "count",
}


def foreign() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    weights = {"inner.weight": normal(16, 3), "block_0.weight": normal(16, 16), "outer.weight": normal(1, 16)}
    weights |= {"inner.bias": normal(16), "block_0.bias": normal(16), "outer.bias": normal(1)}
    weights |= {"norm.weight": normal(16), "norm.bias": normal(16), "norm.running_mean": normal(16)}
    weights |= {"norm.running_var": normal(16) ** 2, "steps": np.array(3, np.int32)}
    return weights | {"norm.num_batches_tracked": np.array(7)}


def by_hand(weights: dict[str, np.ndarray]) -> Any:
    module = Net(rngs=nnx.Rngs(0))
    for layer, name in ((module.inner, "inner"), (module.blocks[0], "block_0"), (module.outer, "outer")):
        layer.kernel.set_value(jnp.asarray(weights[f"{name}.weight"].T))
        layer.bias.set_value(jnp.asarray(weights[f"{name}.bias"]))
    norm = module.norm
    for leaf, name in ((norm.scale, "weight"), (norm.bias, "bias"), (norm.mean, "running_mean")):
        leaf.set_value(jnp.asarray(weights[f"norm.{name}"]))
    norm.var.set_value(jnp.asarray(weights["norm.running_var"]))
    module.count.set_value(jnp.asarray(weights["steps"]))
    return module


def values_of(module: nnx.Module) -> dict[str, np.ndarray]:
    state = nnx.state(module, nnx.Not(nnx.RngState))
    return {str(path): np.asarray(x.get_value()) for path, x in nnx.to_flat_state(state)}


@pytest.mark.parametrize("kind", ["mapping", "safetensors", "npz"])
def test_weights_go_where_the_rules_say(kind: str) -> None:
    weights, source = foreign(), Path(f"x.{kind}")
    if kind == "safetensors":
        safetensors.numpy.save_file(weights, source)
    elif kind == "npz":
        np.savez(source, **weights)
    module = Net(rngs=nnx.Rngs(1))
    loaded = jl.load_weights(module, weights if kind == "mapping" else source, RENAME)
    assert values_of(module).keys() == values_of(by_hand(weights)).keys()
    for name, x in values_of(by_hand(weights)).items():
        np.testing.assert_array_equal(values_of(module)[name], x)
    assert loaded.left == []
    assert ("blocks.0.kernel", "block_0.weight: float32[16, 16]", "float32[16, 16]") in loaded.taken


def test_weights_are_cast_to_the_dtype_of_their_leaf() -> None:
    module: Any = nnx.Dict(low=nnx.Param(jnp.zeros(3, jnp.bfloat16)), scalar=nnx.Param(jnp.zeros(())))
    module.stack = nnx.Param(jnp.zeros((2, 4, 2)))
    stack = {f"{i}": np.arange(8.0).reshape(2, 4) + i for i in range(2)}
    source = {"low": np.array([1, 1 + 2**-9, 1.5]), "scalar": np.float16(0.5), **stack}
    loaded = jl.load_weights(module, source, {r"(\d)": jl.WeightRule("stack", transpose=True, stack=1)})
    assert module.low[...].dtype == jnp.bfloat16
    assert module.low[...].tolist() == [1, 1, 1.5]
    assert module.scalar[...].dtype == jnp.float32
    assert float(module.scalar[...]) == 0.5
    np.testing.assert_array_equal(module.stack[...], np.stack([stack["0"].T, stack["1"].T]))
    lines = [line.split() for line in str(loaded).splitlines()]
    assert ["low", "low:", "float64[3]", "bfloat16[3]"] in lines
    stack = "stack 0: float64[2, 4] and 1 more -> [2, 4, 2] float32[2, 4, 2]"
    assert stack in [" ".join(line) for line in lines]


class Watched:
    def __init__(self, x: np.ndarray) -> None:
        self.x, self.reads = x, list[tuple[int, ...]]()

    def __getitem__(self, index: Any) -> np.ndarray:
        self.reads.append(self.x[index].shape)
        return self.x[index]


def test_everything_but_what_may_be_missing_must_be_there() -> None:
    weights = foreign() | {"outer.weight": np.zeros((5, 16), np.float32)}  # a head of other classes
    del weights["outer.bias"]
    module = Net(rngs=nnx.Rngs(1))
    before = values_of(module)
    loaded = jl.load_weights(module, weights, RENAME, missing=r"outer\..*")
    assert [leaf for leaf, _, _ in loaded.left] == ["outer.bias", "outer.kernel"]
    outer, others = ({name for name in before if ("outer" in name) is there} for there in (True, False))
    assert len(outer) == 2 and all((values_of(module)[name] == before[name]).all() for name in outer)
    wanted = values_of(by_hand(foreign()))
    assert all((values_of(module)[name] == wanted[name]).all() for name in others)
    del weights["inner.bias"]
    with pytest.raises(CheckpointError, match=r"do not fit Net:\n.*\n *inner\.bias +nothing") as e:
        jl.load_weights(module, weights, RENAME, missing=[r"outer\..*"])
    assert "outer" not in str(e.value)
    with pytest.raises(ArgumentError, match=r"missing='head.*'\) matches no leaf of Net: blocks.0.bias"):
        jl.load_weights(module, foreign(), RENAME, missing="head.*")


def test_a_rule_of_what_may_be_missing_may_be_idle() -> None:
    weights = {name: x for name, x in foreign().items() if not name.startswith("outer")}
    module, head = Net(rngs=nnx.Rngs(1)), {r"outer\.weight": jl.WeightRule("outer.kernel", transpose=True)}
    jl.load_weights(module, weights, RENAME | head, missing=r"outer\..*")
    with pytest.raises(ArgumentError, match=r"^These rules apply to no name: 'innerweight'"):
        jl.load_weights(module, weights, RENAME | {"innerweight": "inner.kernel"}, missing=r"outer\..*")


@pytest.mark.parametrize("leaf", [r"layers.\1.\2.kernel", r"layers[\1].\g<2>.kernel", [r"layers[\1].\2.kernel"]])
def test_a_rule_with_groups_may_be_idle_if_its_leaves_may_be_missing(leaf: Any) -> None:
    def linear() -> nnx.Linear:
        return nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))

    def load(missing: Any) -> list[float]:
        module = nnx.Dict(layers=nnx.List([nnx.Dict(up=linear(), gate=linear()) for _ in range(2)]))
        jl.load_weights(module, weights, rename, missing=missing)
        return [float(x.kernel[0, 0]) for layer in module.layers for x in (layer["up"], layer["gate"])]

    weights, wanted = {f"h.{i}.up": np.full((2, 2), 5.0) for i in range(2)}, float(linear().kernel[0, 0])
    rename = {r"h\.(\d+)\.up": r"layers.\1.up.kernel", r"h\.(\d+)\.(up|gate)": jl.WeightRule(leaf)}
    for missing in (r"layers\.\d+\.gate\..*", [r".*\.0\.gate\.kernel", r".*\.1\.gate\.kernel"]):
        assert load(missing) == [5.0, wanted] * 2
    for missing in ((), r"layers\.0\.gate\.kernel", r".*up\.kernel"):
        with pytest.raises(CheckpointError, match=r"These rules apply to no name: 'h.*gate"):
            load(missing)


@pytest.mark.parametrize("missing", [5, [3], b"head"])
def test_what_may_be_missing_is_given_by_expressions(missing: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"\(missing=...\) takes regular expressions, got"):
        jl.load_weights(Net(rngs=nnx.Rngs(1)), foreign(), RENAME, missing=missing)


@pytest.mark.parametrize("strict", [True, False])
def test_a_rule_that_matches_nothing_is_refused(strict: bool) -> None:
    module = Net(rngs=nnx.Rngs(1))
    before = values_of(module)
    with pytest.raises(ArgumentError, match=r"^These rules apply to no name: 'inner_weight'\. Correct them"):
        jl.load_weights(module, foreign(), RENAME | {"inner_weight": "inner.kernel"}, strict=strict)
    assert all((values_of(module)[name] == x).all() for name, x in before.items())
    jl.load_weights(module, foreign(), RENAME | {r".*masked_bias": None})


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ">f4", ">f2", ">f8"])
def test_weights_of_8_bits_and_of_the_other_byte_order_are_cast(dtype: Any) -> None:
    values = np.array([0.5, -2.0, 448.0], np.float32)  # which all of them have

    class Holder(nnx.Module):
        def __init__(self) -> None:
            self.w, self.n = nnx.Param(jnp.zeros(3)), nnx.Variable(jnp.zeros((), jnp.int32))

    module = Holder()
    jl.load_weights(module, {"w": values.astype(dtype), "n": np.array(7, ">i4")})
    assert module.w[...].dtype == jnp.float32 and module.w[...].tolist() == values.tolist()
    assert module.n[...].item() == 7


def test_a_shard_is_read_alone_and_once() -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    source = Watched(np.arange(32.0).reshape(8, 4))
    placed = place(source, jax.device_put(jnp.zeros((8, 4)), jax.NamedSharding(mesh, jax.P("b"))))
    assert source.reads == [(2, 4)] * 4  # of eight devices, two have the same part
    np.testing.assert_array_equal(placed, source.x)


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    weights = foreign() | {"inner.weight": np.zeros((16, 4)), "extra": np.zeros(2)}
    del weights["outer.bias"]
    module = Net(rngs=nnx.Rngs(1))
    before = values_of(module)
    with pytest.raises(CheckpointError, match="^The weights of a mapping of 12 names do not fit Net") as e:
        jl.load_weights(module, weights, RENAME | {r"h\..*": "head", r"g\..*": None})
    rows = [line.split() for line in str(e.value).splitlines()[2:5]]
    assert rows[0] == ["inner.kernel", "inner.weight:", "float64[16,", "4]", "->", "[4,", "16]", "float32[3,", "16]"]
    assert rows[1] == ["outer.bias", "nothing", "float32[1]"]
    assert rows[2] == ["extra", "extra:", "float64[2]", "nothing"]
    assert re.search(
        r"These rules apply to no name: 'h\\\\\.\.\*'\. .*strict=False to load only what fits", str(e.value)
    )
    for name, x in before.items():
        np.testing.assert_array_equal(values_of(module)[name], x)


def test_what_fits_is_taken_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    weights = foreign()
    bias = weights.pop("outer.bias")
    module = Net(rngs=nnx.Rngs(1))
    loaded = jl.load_weights(module, weights, RENAME, strict=False)
    assert loaded.left == [("outer.bias", "nothing", "float32[1]")]
    assert len(loaded.taken) == 10
    expected = by_hand(weights | {"outer.bias": bias})
    expected.outer.bias.set_value(jnp.asarray(module.outer.bias[...]))
    assert_same(params_of(module), params_of(expected))
    assert "Net was loaded in part. Not taken:" in caplog.text


def test_nothing_that_fits_and_other_arguments_are_refused() -> None:
    module: Any = Net(rngs=nnx.Rngs(1))
    with pytest.raises(CheckpointError, match=r"do not fit Net(?s:.*)to None to skip them\.$"):
        jl.load_weights(module, {"a": np.zeros(2)}, strict=False)
    for strict in ("no", 0, None):
        with pytest.raises(ArgumentTypeError, match=r"load_weights\(strict=...\) takes True or False, got"):
            jl.load_weights(module, foreign(), RENAME, strict=strict)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="takes a flax.nnx module, got"):
        jl.load_weights(type(module), {})


STRATEGIES = [("fsdp", True), ("single", False), ("shard_map", True), ("ddp", False), ("pmap", False), ("zero1", True)]


@pytest.mark.parametrize(("strategy", "is_lazy"), thinned(STRATEGIES, STRATEGIES[1], full=STRATEGIES[::2]))
def test_a_training_begins_with_given_weights(strategy: str, is_lazy: bool) -> None:
    weights, data = foreign(), random(3)
    safetensors.numpy.save_file(weights, "x.safetensors")
    given: dict[str, Any] = {"max_epochs": 1, "strategy": splitting(strategy)}
    model = jl.lazy(Net) if is_lazy else Net(rngs=nnx.Rngs(1))
    load = lambda module: jl.load_weights(module, "x.safetensors", RENAME)  # noqa: E731
    trainer = fit(model, data, init_from=load, **given)
    expected = by_hand(weights)
    fit(expected, data, **given)
    assert trainer.global_step == 3
    assert_same(params_of(trainer.module), params_of(expected))


class Scaled(nnx.Module):
    def __init__(self, scale: float = 2.0) -> None:
        self.w, self.tables = nnx.Param(jnp.ones((3, 2))), nnx.List([jnp.full(4, scale)])
        self.rate, self.key = nnx.Param(0.5), jax.random.key(0)
        self.rows, self.names = np.linspace(0, scale, 3), np.array(["a", "b"])  # float64, and texts


def test_array_attributes_and_numbers_are_weights_but_no_source_needs_them() -> None:
    jl.save_weights(Scaled(7.0), "x.safetensors")
    assert {name: x.tolist() for name, x in safetensors.numpy.load_file("x.safetensors").items()} == {
        "w": [[1.0, 1.0]] * 3,
        "tables.0": [7.0] * 4,
        "rate": 0.5,
        "rows": [0.0, 3.5, 7.0],
    }
    loaded = jl.load_weights(module := Scaled(), "x.safetensors")
    np.testing.assert_array_equal(module.tables[0], np.full(4, 7.0))
    assert len(loaded.taken) == 4
    jl.save_weights(module, "again.safetensors")
    np.testing.assert_array_equal(module.rows, np.float32([0.0, 3.5, 7.0]))
    assert len(jl.load_weights(Scaled(), "again.safetensors").taken) == 4
    loaded = jl.load_weights(module := Scaled(), {"w": np.zeros((3, 2)), "rate": np.float32(3)})
    assert sorted(name for name, _, _ in loaded.taken) == ["rate", "w"] and not loaded.left
    np.testing.assert_array_equal(module.tables[0], np.full(4, 2.0))


def test_a_module_of_shapes_receives_arrays() -> None:
    weights = foreign()
    module = nnx.eval_shape(lambda: Net(rngs=nnx.Rngs(0)))
    with pytest.raises(CheckpointError, match="outer.bias +nothing"):
        jl.load_weights(module, {name: x for name, x in weights.items() if name != "outer.bias"}, RENAME, strict=False)
    jl.load_weights(module, weights, RENAME)
    assert_same(params_of(module), params_of(by_hand(weights)))
    delattr(scaled := Scaled(), "names")
    shapes = nnx.eval_shape(lambda: scaled)
    with pytest.raises(CheckpointError, match="rows +nothing"):
        jl.load_weights(shapes, {"w": np.zeros((3, 2)), "rate": np.float32(3), "tables.0": np.ones(4)})


def test_a_kernel_of_torch_that_no_rule_transposes_is_named() -> None:
    rename = RENAME | {r"inner\.weight": "inner.kernel"}
    expected = r"inner\.kernel has its dims in reverse.*jl\.WeightRule\('inner\.kernel', transpose=True\)"
    with pytest.raises(CheckpointError, match=expected):
        jl.load_weights(Net(rngs=nnx.Rngs(0)), foreign(), dict([*rename.items()][::-1]))
    conv = nnx.Conv(2, 2, (3, 3), use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(CheckpointError, match=r"Map their names in rename="):  # its dims are not only reversed
        jl.load_weights(conv, {"kernel": np.zeros((2, 2, 3, 3))})
    square = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(CheckpointError, match=r"Map their names in rename="):
        jl.load_weights(square, {"kernel": np.zeros((2, 2), np.int8)})
    with pytest.raises(ArgumentTypeError, match=r"rename= takes a mapping of regular expressions to rules, got \[\("):
        jl.load_weights(Net(rngs=nnx.Rngs(0)), foreign(), [("a", "b")])  # type: ignore[arg-type]


def test_shards_stay_shards() -> None:
    seen = {}

    def load(module: Any) -> None:
        before = {name: x.sharding for name, x in params(module).items()}
        jl.load_weights(module, foreign(), RENAME)
        seen.update({name: (x.sharding, before[name]) for name, x in params(module).items()})

    def params(module: Any) -> dict[str, jax.Array]:
        return {str(path): x.get_value() for path, x in nnx.to_flat_state(nnx.state(module, nnx.Param))}

    fit(jl.lazy(Net), random(1), init_from=load, strategy=splitting("fsdp"))
    assert len(seen) == 8
    assert all(now == before for now, before in seen.values())
    kernel = seen["('blocks', 0, 'kernel')"][0]
    assert kernel.shard_shape((16, 16)) == (2, 16)


@pytest.mark.parametrize("strategy", thinned(["fsdp", "single", "shard_map", "pmap"], "fsdp"))
def test_a_lazy_module_is_evaluated_with_given_weights(strategy: str) -> None:
    load = jl.callbacks.LambdaCallback(setup=lambda trainer, module, stage: jl.load_weights(module, foreign(), RENAME))
    trainer = jl.Trainer(strategy=splitting(strategy), logger=False, enable_progress_bar=False, callbacks=load)
    expected, (batch,) = by_hand(foreign()), random(1)
    expected.eval()
    for _ in range(2):
        (predicted,) = trainer.predict(jl.lazy(Net), [batch])  # type: ignore[misc]
        np.testing.assert_allclose(predicted, expected(batch["x"]), rtol=1e-5, atol=1e-5)
    kernel = trainer.module.inner.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == ((3, 2) if strategy == "fsdp" else (3, 16))


def test_init_from_takes_a_file(caplog: pytest.LogCaptureFixture) -> None:
    jl.save_weights(by_hand(foreign()), "x.safetensors")
    start: list[Any] = []
    look = jl.callbacks.LambdaCallback(on_fit_start=lambda trainer, module: start.append(params_of(module)))
    fit(jl.lazy(Net, depth=2), random(1), None, look, init_from=Path("x.safetensors"))
    expected = params_of(by_hand(foreign()))
    assert_same({name: x for name, x in start[0].items() if "1" not in name}, expected)
    assert "blocks.1.kernel  nothing" in caplog.text


@pytest.mark.parametrize("place", ["run", "run/checkpoints", "run/checkpoints/step_00000001"])
def test_a_run_with_a_file_of_weights_begins_with_its_checkpoint(place: str) -> None:
    trained = params_of(fit(Net(rngs=nnx.Rngs(1)), random(1), default_root_dir="run").module)
    jl.save_weights(Net(rngs=nnx.Rngs(2)), Path(place, "model.safetensors"))
    start: list[Any] = []
    look = jl.callbacks.LambdaCallback(on_fit_start=lambda trainer, module: start.append(params_of(module)))
    fit(jl.lazy(Net), random(1), None, look, init_from=place)
    assert_same(start[0], trained)


def test_a_folder_of_weights_may_have_another_folder_that_is_called_as_those_of_checkpoints() -> None:
    source = Net(rngs=nnx.Rngs(2))
    jl.save_weights(source, Path("hub/model.safetensors"))
    Path("hub/checkpoints/old").mkdir(parents=True)
    start: list[Any] = []
    look = jl.callbacks.LambdaCallback(on_fit_start=lambda trainer, module: start.append(params_of(module)))
    fit(jl.lazy(Net), random(1), None, look, init_from="hub")
    assert_same(start[0], params_of(source))


def test_a_run_that_resumes_does_not_load_again() -> None:
    calls: list[Any] = []
    given: dict[str, Any] = {"init_from": calls.append, "resume": "auto", "default_root_dir": "run"}
    for epochs in (1, 2):
        fit(Net(rngs=nnx.Rngs(1)), random(1), **given, max_epochs=epochs)
    assert len(calls) == 1


def test_a_checkpoint_for_an_evaluation_says_how_to_load_a_file() -> None:
    jl.save_weights(by_hand(foreign()), "x.safetensors")
    trainer = jl.Trainer(strategy="single", logger=False)
    with pytest.raises(CheckpointError, match=r"is a file, .*jl\.load_weights\(module, path\)"):
        trainer.predict(Net(rngs=nnx.Rngs(1)), random(1), ckpt_path="x.safetensors")


class Mixed(nnx.Module):
    """Variables of every dtype that jax has on this machine, and what is no weight."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.leaves = nnx.Dict()
        for name, dtype in DTYPES.items():
            if jax.dtypes.canonicalize_dtype(dtype) == dtype:
                bits = rng.integers(0, 2 if name == "BOOL" else 200, (3, dtype.itemsize), np.uint8)
                self.leaves[name] = nnx.Variable(jnp.asarray(bits.view(dtype)[:, 0]))
        self.tied = self.leaves["F32"]
        self.rngs = nnx.Rngs(seed)
        self.accuracy = nnx.metrics.Accuracy()
        self.sown = nnx.Intermediate(jnp.ones(2))
        self.cache = nnx.Cache(jnp.ones(2))


def bits_of(module: Mixed) -> dict[str, bytes]:
    return {name: np.asarray(x[...]).tobytes() for name, x in module.leaves.items()}


def test_every_dtype_comes_back_bit_by_bit() -> None:
    module, other = Mixed(0), Mixed(1)
    assert len(module.leaves) >= 13
    assert bits_of(module) != bits_of(other)
    jl.save_weights(module, "x.safetensors")
    with safetensors.safe_open("x.safetensors", framework="np") as file:
        assert {*file.keys()} == {f"leaves.{name}" for name in module.leaves}
    assert jl.load_weights(other, "x.safetensors").left == []
    assert bits_of(module) == bits_of(other)


@pytest.mark.parametrize("length", range(1, 9))
def test_each_array_begins_at_a_multiple_of_its_item_size(length: int) -> None:
    kinds = {"a": jnp.int8, "b": jnp.float32, "c": jnp.bfloat16, "d": jnp.uint8, "e" * length: jnp.int32}
    module = nnx.Dict({name: nnx.Variable(jnp.zeros(3, kind)) for name, kind in kinds.items()})
    jl.save_weights(module, "x.safetensors")
    data = Path("x.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    assert start % 8 == 0
    for name, kind in kinds.items():
        assert (start + header[name]["data_offsets"][0]) % jnp.dtype(kind).itemsize == 0


def test_names_are_paths_and_the_library_reads_the_values() -> None:
    module = Net(rngs=nnx.Rngs(0))
    jl.save_weights(module, Path("deep") / "x.safetensors")
    read = safetensors.numpy.load_file("deep/x.safetensors")
    names = {"blocks.0.bias", "blocks.0.kernel", "count", "inner.bias", "inner.kernel"}
    names |= {"norm.bias", "norm.mean", "norm.scale", "norm.var", "outer.bias", "outer.kernel"}
    assert read.keys() == names
    np.testing.assert_array_equal(read["blocks.0.kernel"], module.blocks[0].kernel[...])
    np.testing.assert_array_equal(read["norm.var"], module.norm.var[...])
    with safetensors.safe_open("deep/x.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "np", "module": "Net", "jaxlit": jl.__version__}


def test_no_copy_of_the_weights_stays_in_memory() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(np.arange(16.0, dtype=np.float32), jax.NamedSharding(mesh, jax.P("data")))
    jl.save_weights(One(x), "x.safetensors")
    assert x._npy_value is None  # type: ignore[attr-defined] - where jax keeps it
    np.testing.assert_array_equal(safetensors.numpy.load_file("x.safetensors")["layers.0.w"], np.arange(16.0))
    assert x.tolist() == list(range(16))
    assert x._npy_value is not None  # type: ignore[attr-defined]


class One(nnx.Module):
    def __init__(self, value: Any) -> None:
        self.layers = nnx.List([nnx.Dict(w=nnx.Variable(value))])


TWO = nnx.Dict({"a.b": nnx.Param(jnp.ones(1)), "a": nnx.Dict(b=nnx.Param(jnp.ones(1)))})
REFUSED = {
    "int4": (One(jnp.ones(2, ml_dtypes.int4)), "x.safetensors", CheckpointError, r"layers\.0\.w is int4"),
    "a class": (One, "x.safetensors", ArgumentTypeError, "takes a flax.nnx module"),
    "a name": (One(jnp.ones(2)), "x.npz", ArgumentTypeError, r"path of a file, \*\.safetensors, got 'x\.npz'"),
    "no path": (One(jnp.ones(2)), None, ArgumentTypeError, r"path of a file, \*\.safetensors, got None"),
    "a shape": (One(jax.ShapeDtypeStruct((2,), "float32")), "x.safetensors", CheckpointError, "a shape without an"),
    "two": (TWO, "x.safetensors", CheckpointError, r"Two leaves of Dict are called a\.b"),
    "a folder": (One(jnp.ones(2)), "folder.safetensors", CheckpointError, "could not be written"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_a_file_cannot_hold_is_refused(mistake: str) -> None:
    Path("folder.safetensors").mkdir()
    module, path, kind, message = REFUSED[mistake]
    with pytest.raises(kind, match=message):
        jl.save_weights(module, path)  # type: ignore[arg-type]
    assert [file.name for file in Path().iterdir()] == ["folder.safetensors"]
