"""A module from a checkpoint alone: its constructor's arguments, and every kind of Variable."""

import argparse
import collections
import dataclasses
import enum
import inspect
import json
import shutil
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from kit import by_hand
from kit.batches import random
from kit.by_hand import state_of as arrays_of
from kit.checkpoints import edit, put
from kit.modules import Linear, Mean
from kit.trainers import fit, splitting

import jaxlit as jl
from jaxlit.callbacks import CSVLogger
from jaxlit.checkpoints.module_state import match
from jaxlit.errors import CheckpointError
from jaxlit.values import NotKeptError, decode, encode


class Table(nnx.Variable):
    """A kind of Variable of a user's own."""


class Rich(Linear):
    def __init__(self, width=4, rates=None, *, rngs):
        self.layers = nnx.List([nnx.Linear(3, width, rngs=rngs), nnx.Linear(width, 3, rngs=rngs)])
        self.tied = self.layers[0].kernel
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.table = Table(jnp.zeros((), jnp.int32))
        self.half = nnx.Param(jnp.ones(3, jnp.bfloat16))
        self.key = nnx.Variable(jax.random.key(7, impl="rbg"))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.norm(x @ self.tied[...]))[:, :1] + self.half[...].sum().astype(x.dtype)

    def training_step(self, batch):
        self.table[...] = self.table[...] + 1
        return self.loss(batch)


def train(trained, root="run", epochs=2, **arguments):
    return fit(trained, random(2), default_root_dir=root, max_epochs=epochs, **arguments)


def assert_same(result, expected):
    result, expected = arrays_of(result), arrays_of(expected)
    assert result.keys() == expected.keys()
    for name, x in expected.items():
        assert result[name].dtype == x.dtype, name
        np.testing.assert_array_equal(result[name], x, err_msg=name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trained module, its run's folder, and its arrays before."""
    folder, made = tmp_path_factory.mktemp("trained"), Rich(6, [0.1, 0.2], rngs=nnx.Rngs(3))
    before = arrays_of(made)
    train(made, folder / "run")
    return made, folder / "run", before


def test_every_variable_and_argument_is_restored(trained):
    made, run, before = trained
    for inside in ("", "checkpoints", "checkpoints/step_00000004"):
        loaded = Rich.load_from_checkpoint(run / inside)
        assert_same(loaded, made)
        assert_same(Rich.load_from_checkpoint(str(run / inside)), made)
    assert loaded.hparams == made.hparams and loaded.hparams["width"] == 6 and loaded.hparams["rates"] == [0.1, 0.2]
    assert loaded.tied is loaded.layers[0].kernel and int(loaded.table[...]) == 4
    assert jax.random.key_impl(loaded.key.get_value()) == jax.random.key_impl(made.key.get_value())
    (name,) = [key for key in before if "0" in key and "layers" in key and "kernel" in key]
    assert np.any(before[name] != arrays_of(loaded)[name])


def test_added_hyperparameters_are_restored(tmp_path):
    class Added(Linear):
        def __init__(self, width=1):
            super().__init__()
            self.save_hyperparameters({"source": "here"})

    made = Added(2)
    made.hparams.note = "n"
    fit(made, random(1), default_root_dir=tmp_path / "run")
    expected = {"width": 2, "source": "here", "note": "n"}
    assert Added.load_from_checkpoint(checkpoint_path=tmp_path / "run").hparams == made.hparams == expected


def test_an_override_wins_and_the_weights_must_still_fit(trained):
    run = trained[1]
    assert Rich.load_from_checkpoint(run, rates=[0.7]).hparams["rates"] == [0.7]
    words = r"does not fit Rich:(?s:.*)module\.layers\[0\]\.kernel +float32\[3, 6\] +float32\[3, 5\]"
    with pytest.raises(CheckpointError, match=words):
        Rich.load_from_checkpoint(run, width=5)
    # What does not fit is drawn from the caller's own keys.
    result = Rich.load_from_checkpoint(run, width=5, strict=False, rngs=nnx.Rngs(9))
    expected = Rich(5, rngs=nnx.Rngs(9)).layers[0].kernel
    np.testing.assert_array_equal(np.asarray(result.layers[0].kernel[...]), np.asarray(expected[...]))


class Plain(Mean):
    def __init__(self):
        super().__init__()
        self.class_weights, self.example_input_array = jnp.ones(3), np.ones((2, 1), np.float32)
        self.parts = nnx.List([nnx.Dict(key=jax.random.key(0), scale=np.ones(2, np.float32))])


def test_plain_arrays_are_restored():
    made = Plain()
    made.class_weights, made.parts[0].scale = jnp.arange(3.0), np.float32([4, 5])
    made.example_input_array, made.parts[0].key = np.float32([[6], [7]]), jax.random.key(8)
    before, results = arrays_of(made), [Plain(), Plain()]
    train(made, epochs=1)
    train(results[0], "resumed", ckpt_path="run")
    train(results[1], "new", epochs=1, init_from="run")
    for result in (made, Plain.load_from_checkpoint("run"), *results):
        arrays = arrays_of(result)
        for name, x in before.items():
            if "'w'" not in name:
                np.testing.assert_array_equal(arrays[name], x, err_msg=name)
    assert_same(Plain.load_from_checkpoint("run"), made)


def test_what_cannot_be_built_is_refused(trained):
    with pytest.raises(CheckpointError, match=r"Rich\.load_from_checkpoint: 'none' is not a checkpoint"):
        Rich.load_from_checkpoint("none")
    with pytest.raises(CheckpointError, match=r"Rich cannot be built from \[.*'widht'.*\]: .*unexpected keyword"):
        Rich.load_from_checkpoint(trained[1], widht=3)


def doubled(x):
    return 2 * x


@dataclasses.dataclass
class Config:
    width: int = 1
    activation: Callable = nnx.relu


@dataclasses.dataclass
class Given:
    """A dataclass whose constructor takes more than its fields."""

    x: int
    y: dataclasses.InitVar[int] = 0

    def __post_init__(self, y):
        self.z = self.x + y


class Kind(enum.Enum):
    A = "a"
    B = "b"


class Pair(typing.NamedTuple):
    first: int
    api_key: str


class Built(Mean):
    def __init__(self, activation=nnx.relu, schedule=None, *, rngs=None):
        super().__init__()
        Built.activation = activation


NAMED = [nnx.tanh, jnp.add, np.tanh, doubled, nnx.Linear, Built, jnp.bfloat16, np.float32, np.dtype("int8"), Kind.B]
NAMED += [float, Config(3, nnx.silu), (1, (2.0, [nnx.gelu])), {0: "a"}, float("-inf"), {"jaxlit": "name", "value": "x"}]
NAMED += [np.float32(0.1), np.float64("inf"), np.int8(3), np.bool_(True), P("data", None, ("fsdp", "tp"))]


@pytest.mark.parametrize("value", NAMED, ids=lambda value: getattr(value, "__name__", type(value).__name__))
def test_what_can_be_named_comes_back(value):
    restored = decode(json.loads(json.dumps(encode(value))), Built)
    assert restored == value
    assert type(restored) is type(value)


def test_named_arguments_come_back_from_a_checkpoint():
    fit(Built(nnx.tanh, NAMED), random(1), default_root_dir="run")
    del Built.activation
    assert Built.load_from_checkpoint("run").hparams["schedule"] == NAMED
    assert Built.activation is nnx.tanh


LOCAL = [
    (lambda: lambda x: x, r"<function [\w.<>]*<lambda>>"),
    (lambda: optax.cosine_decay_schedule(1.0, 9), "<function cosine_decay_schedule.<locals>.schedule>"),
    (lambda: nnx.Linear(1, 1, rngs=nnx.Rngs(0)), r"Linear\(\.\.\.\)"),
    (lambda: jax.P("a", unreduced={"b"}), r"P(artitionSpec)?\(\.\.\.\)"),
    (lambda: np.zeros((2, 3)), r"float64\[2, 3\]"),
    (lambda: {"f": jnp.zeros(2), "g": doubled}, r"float32\[2\]"),
    (lambda: Pair(1, "hunter2"), r"Pair\(\.\.\.\)"),  # nor what would come back as its base class
    (lambda: [collections.OrderedDict(api_key="hunter2")], r"OrderedDict\(\.\.\.\)"),
    (lambda: Config(type("Fraction", (float,), {})(2.0)), r"Fraction\(\.\.\.\)"),  # a type of its own
    (lambda: Given(1, 5), r"Given\(\.\.\.\)"),  # its constructor takes more than its fields
    (lambda: dataclasses.make_dataclass("Local", ["api_key"])("hunter2"), r"Local\(\.\.\.\)"),
    (lambda: dataclasses.make_dataclass("Local", ["width"]), r"<class '[\w.]+Local'>"),
]


@pytest.mark.parametrize(("make", "words"), LOCAL)
def test_what_has_no_name_is_not_saved(make, words):
    with pytest.raises(NotKeptError, match=f"^{words}$"):
        encode(make())


def test_an_argument_that_was_left_out_is_asked_for():
    class Left(Mean):
        def __init__(self, width=1, depth=1, note="n"):
            super().__init__()
            self.save_hyperparameters(ignore=["width", "note"])

    class Replaced(Mean):
        def __init__(self, width=1):
            super().__init__()
            self.hparams = {"lr": 0.1}

    fit(Left(2, 3), random(1), default_root_dir="run")
    with pytest.raises(CheckpointError, match=r"Left was built with width=\.\.\.: pass width=\.\.\. to"):
        Left.load_from_checkpoint("run")
    assert Left.load_from_checkpoint("run", width=2).hparams == {"depth": 3}
    fit(Replaced(2), random(1), default_root_dir="replaced")
    with pytest.raises(CheckpointError, match=r"Replaced was built with width=\.\.\.: pass"):
        Replaced.load_from_checkpoint("replaced")


class Keyed(Mean):
    """A module with an argument that is a secret by its name, and one that only looks like it."""

    def __init__(self, api_key=None, tokenizer="bpe"):
        super().__init__()


@dataclasses.dataclass
class Account:
    api_key: str = ""


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("api_key", "hunter2-very-secret", "<redacted>"),
        ("tokenizer", Account("hunter2-very-secret"), "<redacted>"),
        ("tokenizer", argparse.Namespace(api_key="hunter2"), r"Namespace\(\.\.\.\)"),
        ("tokenizer", lambda x: x, "<function .*<lambda>>"),
        ("tokenizer", b"hunter2", ".*"),
        ("tokenizer", {"hunter2"}, ".*"),
    ],
)
def test_a_secret_is_not_saved_and_asked_for(name, value, shown):
    fit(Keyed(**{name: value}), random(1), default_root_dir="run", logger=CSVLogger())
    files = [path for path in Path("run").rglob("*") if path.is_file()]
    assert len(files) > 3
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []
    with pytest.raises(CheckpointError, match=f"built with {name}={shown}: pass {name}=... to load_from"):
        Keyed.load_from_checkpoint("run")
    assert Keyed.load_from_checkpoint("run", **{name: "new"}).hparams[name] == "new"


def test_a_function_of_a_script_is_that_of_the_script(monkeypatch):
    def module_of(name, file):
        module = types.ModuleType(name)
        module.__file__ = file
        exec("def act(x):\n    return x\nclass Net:\n    pass", vars(module))
        return module

    trains, evaluates, imported = (
        module_of(*x) for x in (("__main__", "a/train.py"), ("__main__", "b/eval.py"), ("train", "a/train.py"))
    )
    models = module_of("models", "a/models.py")
    monkeypatch.setitem(sys.modules, "models", models)
    monkeypatch.setitem(sys.modules, "__main__", trains)
    kept = encode(trains.act)
    assert decode(kept, models.Net) is trains.act
    monkeypatch.setitem(sys.modules, "__main__", evaluates)
    with pytest.raises(NotKeptError, match=r"__main__\.act"):
        decode(kept, models.Net)
    monkeypatch.setitem(sys.modules, "train", imported)
    assert decode(kept, models.Net) is imported.act


class Several(Mean):
    """A constructor with any number of arguments after one whose default cannot be saved."""

    def __init__(self, init=lambda x: x, width=8, *layers, last=0):
        super().__init__()
        self.built = (init is default_of(Several, "init"), width, layers, last)


def default_of(cls, name):
    return inspect.signature(cls.__init__).parameters[name].default


@pytest.mark.parametrize("layers", [(), (1, 2)])
def test_arguments_before_any_number_of_others_keep_their_places(layers):
    given = (default_of(Several, "init"), 9, *layers) if layers else ()
    fit(Several(*given, last=4), random(1), default_root_dir="run")
    assert Several.load_from_checkpoint("run").built == (True, 9 if layers else 8, layers, 4)


def test_keys_with_dots_are_not_those_of_a_dict_inside_a_dict():
    class Dicts(Mean):
        def __init__(self, outer, inner):
            super().__init__()
            below = nnx.Dict({"b": nnx.Param(jnp.full(2, inner))})
            self.d = nnx.Dict({"a.b": nnx.Param(jnp.full(2, outer)), "a": below})

    fit(Dicts(1.0, 0.0), random(1), default_root_dir="run")
    loaded, resumed = Dicts.load_from_checkpoint("run", outer=5.0, inner=7.0), Dicts(5.0, 7.0)
    fit(resumed, random(1), default_root_dir="run", max_epochs=2, resume="auto")
    for result in (loaded, resumed):
        assert np.array_equal(result.d["a.b"][...], [1, 1]) and np.array_equal(result.d["a"]["b"][...], [0, 0])


@pytest.mark.parametrize("strategy", ["fsdp", "pmap"])
def test_what_several_devices_wrote_can_be_loaded_on_one(strategy):
    train(Linear(), strategy=splitting(strategy))
    loaded = Linear.load_from_checkpoint("run")
    by_hand.assert_same(loaded, train(Linear(), "single").module)
    arrays = jax.tree.leaves(nnx.state(loaded))
    assert all(len(x.devices()) == 1 for x in arrays)
    assert not any(x.committed for x in arrays)  # so that a mesh of several processes takes them


def test_a_training_in_bfloat16_can_be_loaded_and_validated():
    batches = random(2)
    made = fit(Linear(), batches, default_root_dir="run", precision="bf16-true").module
    loaded = Linear.load_from_checkpoint("run")
    assert loaded.kernel.dtype == jnp.float32
    assert np.array_equal(np.asarray(loaded.kernel[...]), np.asarray(made.kernel[...]).astype(np.float32))
    expected = np.mean([float(loaded.loss(batch)) for batch in batches])
    for precision, rel in (("32-true", 1e-5), ("bf16-true", 2**-6)):  # of 8 bits
        trainer = jl.Trainer(strategy="single", default_root_dir="other", precision=precision)
        (result,) = trainer.validate(Linear(), batches, ckpt_path="run")
        assert result["val"] == pytest.approx(expected, rel=rel)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    root = tmp_path_factory.mktemp("keyed") / "run"
    fit(Keyed(), random(1), default_root_dir=root)
    return root / "checkpoints" / "step_00000001"


HOSTILE_NAMES = ["hostile_code:run", "os:system", "builtins:eval", "shutil:rmtree", "subprocess:Popen", "pickle:loads"]
HOSTILE_NAMES += ["jaxlit.checkpoints.files:remove", "jaxlit.checkpoints.files:shutil.rmtree", "pytest:main", 3, None]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
@pytest.mark.parametrize("kind", ["name", "dataclass", "no such kind"])
def test_a_forged_name_is_not_imported_or_called(kind, name, keyed, tmp_path, monkeypatch):
    (tmp_path / "hostile_code.py").write_text("def run(*a, **k):\n    raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = Path(shutil.copytree(keyed, "step_00000001"))
    node = {"jaxlit": kind, "name": name, "value": name if kind == "name" else {}}
    edit(folder, put("module", value={"class": "Keyed", "hparams": {"tokenizer": node}}))
    with pytest.raises(CheckpointError, match="Keyed was built with tokenizer=.*: pass tokenizer=..."):
        Keyed.load_from_checkpoint(folder)
    assert "hostile_code" not in sys.modules


def test_arrays_are_matched_by_name_shape_and_dtype():
    saved = [("a", (2,), "float32"), ("b", (3,), "float32"), ("c", (), "int32"), ("d", (1,), "float32"), ("x", (), "x")]
    wanted = [("d", (1,), "bfloat16"), ("a", (2,), "float32"), ("b", (2,), "float32"), ("e", (), "int32")]
    wanted.append(("x", (), ""))
    skip = lambda name: name == "x"  # noqa: E731
    pairs, rows = match(saved, wanted, skip=skip, cast=False)
    assert pairs == {0: 1}
    others = [("b", "float32[3]", "float32[2]"), ("e", "nothing", "int32[]"), ("c", "int32[]", "nothing")]
    assert rows == [("d", "float32[1]", "bfloat16[1]"), *others]
    assert match(saved, wanted, skip=skip, cast=True) == ({3: 0, 0: 1}, others)
    assert match([("a", (), "int32")], [("a", (), "float32")], skip=skip, cast=True)[0] == {}
    assert match([("a", (), "float8_e5m2")], [("a", (), "float32")], skip=skip, cast=True)[0] == {}
