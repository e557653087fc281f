"""A module's predictions in a file, run in a process that has jax and nothing else."""

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from kit.batches import numbered, random
from kit.modules import Mean, Net, module
from kit.trainers import fit, splitting

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, ModuleError

ALONE = """
import sys
for name in ("jaxlit", "flax", "optax", "orbax"):
    sys.modules[name] = None
import jax, numpy as np
given = np.load("batch.npz")
served = jax.export.deserialize(open("net.jax", "rb").read())
out = served.call({"inputs": [given["x"], (given["shift"],)]})
np.savez("out.npz", prediction=out["prediction"], twice=out["pair"][1], platforms=served.platforms)
"""


class Nested(Net):
    def predict_step(self, batch: Any) -> Any:
        x, (shift,) = batch["inputs"]
        y = self({"x": x}["x"]) + shift
        return {"prediction": y, "pair": (y, 2 * y)}


def by_hand(net: Any, x: np.ndarray) -> np.ndarray:
    value = {str(path): np.asarray(x.get_value()) for path, x in nnx.to_flat_state(nnx.state(net, nnx.Not(nnx.RngKey)))}
    layer = lambda x, *at: x @ value[str((*at, "kernel"))] + value[str((*at, "bias"))]  # noqa: E731
    x = np.tanh(layer(x, "inner"))
    for k in range(len(net.blocks)):
        x = np.tanh(layer(x, "blocks", k))
    norm = {name: value[str(("norm", name))] for name in ("mean", "var", "scale", "bias")}
    x = (x - norm["mean"]) / np.sqrt(norm["var"] + 1e-5) * norm["scale"] + norm["bias"]
    return layer(x, "outer")


@pytest.mark.full
def test_it_runs_with_jax_alone_on_any_number_of_rows() -> None:
    trainer = fit(jl.lazy(Nested, rate=0.5), random(3), strategy=splitting("fsdp"))
    x, shift = random(1, rows=5)[0]["x"], np.arange(5, dtype=np.float32)[:, None]
    example = {"inputs": [np.ones((2, 3), np.float32), (np.ones((2, 1), np.float32),)]}
    data = jl.export(trainer.module, example, platforms=["cpu", "cuda", "tpu"])
    Path("net.jax").write_bytes(data)
    np.savez("batch.npz", x=x, shift=shift)
    subprocess.run([sys.executable, "-c", ALONE], check=True)
    with np.load("out.npz") as file:
        out = dict(file)
    expected = by_hand(trainer.module, x) + shift
    assert out["prediction"].shape == (5, 1)
    np.testing.assert_allclose(out["prediction"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out["twice"], 2 * out["prediction"])
    assert out["platforms"].tolist() == ["cpu", "cuda", "tpu"]


def test_it_is_in_evaluation_mode_and_leaves_the_module_as_it_is() -> None:
    net = Net(rngs=nnx.Rngs(0), rate=0.5)
    batch = random(1)[0]
    served = jax.export.deserialize(jl.export(net, batch))
    first, second = (np.asarray(served.call(batch)) for _ in range(2))
    assert not net.drop.deterministic
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, by_hand(net, batch["x"]), rtol=1e-5, atol=1e-6)


def test_a_step_that_computes_with_the_rows_takes_those_of_the_example() -> None:
    step = lambda self, batch: batch["x"] * (1 if batch["x"].shape[0] > 3 else 2)  # noqa: E731
    by_count = module(predict=step, name="ByCount")
    with pytest.raises(ModuleError, match=r"ByCount\.predict_step computes with .* rows.*dynamic_batch=False"):
        jl.export(by_count, {"x": np.ones((2, 1))})
    served = jax.export.deserialize(jl.export(by_count, {"x": np.ones((2, 1))}, dynamic_batch=False))
    np.testing.assert_array_equal(served.call({"x": np.ones((2, 1), np.float32)}), 2 * np.ones((2, 1)))


def returns(make: Any) -> Any:
    return module(predict=lambda self, batch: make(batch))


X, KEYS = np.ones((2, 1), np.float32), jax.random.split(jax.random.key(0), 2)
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], Any, str]] = {
    "a module": (nnx.Linear(1, 1, rngs=nnx.Rngs(0)), X, {}, ArgumentTypeError, "takes a jl.TrainModule"),
    "no step": (type("NoStep", (jl.TrainModule,), {})(), X, {}, ModuleError, "NoStep has no predict_step"),
    "a platform": (Mean(), X, {"platforms": ["gpu"]}, ArgumentError, "takes one of .*'cuda'.*got 'gpu'"),
    "a flag": (Mean(), X, {"dynamic_batch": 3}, ArgumentTypeError, "dynamic_batch"),
    "a container": (Mean(), {"x": OrderedDict(a=X)}, {}, ArgumentTypeError, r"the example\.x is a OrderedDict"),
    "a number": (Mean(), [X, 3], {}, ArgumentTypeError, r"the example.*1.* is a int"),
    "texts": (Mean(), {"x": np.array(["a"])}, {}, ArgumentTypeError, r"the example\.x is of <U1"),
    "keys": (Mean(), {"x": KEYS}, {}, ArgumentTypeError, r"example\.x is of key<fry>"),
    "an output": (returns(lambda x: {"a": OrderedDict(b=x)}), X, {}, ModuleError, r"the output\.a is a OrderedDict"),
    "key output": (returns(lambda x: KEYS), X, {}, ModuleError, "output is of key<fry>"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_a_file_cannot_hold_is_refused(mistake: str) -> None:
    model, example, given, kind, message = REFUSED[mistake]
    with pytest.raises(kind, match=message):
        jl.export(model, example, **given)


def test_weights_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxlit.core.export._MOST_BYTES", 7)
    with pytest.raises(ModuleError, match="weights of Wide have 8 bytes"):
        jl.export(module(init=lambda self: setattr(self, "w", nnx.Param(jnp.ones(2))), name="Wide"), X)


def test_without_flatbuffers_it_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(ArgumentError, match="export needs flatbuffers.*`pip install flatbuffers`"):
        jl.export(Mean(), {"x": X})


class Raw(jl.TrainModule):
    """Uses its arrays by themselves: numpy would sum in 16 bits, and knows no traced index and no `.at`."""

    def __init__(self) -> None:
        self.half = nnx.Param(jnp.ones(4096, jnp.bfloat16))
        self.table = nnx.Param(jnp.arange(12.0).reshape(4, 3))

    def predict_step(self, batch: Any) -> Any:
        rows = self.table[...].at[0].set(9.0)[batch["index"]]
        return {"sum": self.half[...].sum() * batch["scale"], "rows": rows}


def test_arrays_are_those_of_jax_in_an_export() -> None:
    batch = {"index": np.array([0, 3], np.int32), "scale": np.ones(2, np.float32)}
    out = jax.export.deserialize(bytearray(jl.export(Raw(), batch))).call(batch)
    np.testing.assert_array_equal(out["sum"], [4096.0, 4096.0])
    np.testing.assert_array_equal(out["rows"], [[9, 9, 9], [9, 10, 11]])


def test_a_step_that_needs_the_number_of_rows_gets_advice() -> None:
    halves = module(predict=lambda self, batch: jnp.split(batch["x"], 2))
    with pytest.raises(Exception) as error:
        jl.export(halves, {"x": np.ones((4, 3), np.float32)})
    assert "dynamic_batch=False" in "".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert jl.export(halves, {"x": np.ones((4, 3), np.float32)}, dynamic_batch=False, platforms="cpu")
    with pytest.raises(KeyError) as error:  # whatever the number of rows is
        jl.export(halves, {"y": np.ones((4, 3), np.float32)})
    assert not any("dynamic_batch" in note for note in error.value.__notes__)


@pytest.mark.parametrize(
    "names_axes", [jax.lax.with_sharding_constraint, jax.sharding.reshard], ids=["Auto", "Explicit"]
)
def test_a_step_that_names_mesh_axes_is_exported_for_one_device(names_axes: Any) -> None:
    model = module(predict=lambda self, batch: names_axes(2 * batch["x"], P("data")))
    mesh = jax.make_mesh((8,), ("data",)) if names_axes is jax.sharding.reshard else {"data": 8}
    trainer = fit(model, numbered(1), strategy="ddp", mesh=mesh)
    x = np.arange(3, dtype=np.float32)[:, None]
    result = jax.export.deserialize(bytearray(jl.export(model, {"x": x}))).call({"x": x})
    assert trainer.mesh.size == 8
    np.testing.assert_array_equal(result, 2 * x)
