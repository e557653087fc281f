"""Batches on their way from a loader to the step: what is refused, what stays on the host, what compiles again."""

import logging
from collections.abc import Callable
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit.batches import Stream
from kit.compiles import compiles
from kit.journal import hooks
from kit.modules import Mean
from kit.trainers import BARE, STRATEGIES, make_trainer

import jaxlit as jl
from jaxlit.errors import ArgumentTypeError, DataError


class Follow(Mean):
    """Moves half of the way to the mean of each batch, so that the order of the batches shows."""

    def target(self, batch: Any) -> jax.Array:
        if not isinstance(batch, dict):
            return batch[0]
        return batch["x"].astype(jnp.float32) + batch.get("scale", 0)

    def error(self, batch: Any) -> jax.Array:
        return self.target(batch) - self.w[0]

    def validation_step(self, batch: Any) -> None:
        self.log("mean", jnp.mean(self.target(batch)))

    test_step = validation_step

    def predict_step(self, batch: Any) -> Any:
        return {"y": self.target(batch)}


def followed(targets: Any) -> float:
    """Return what `Follow` comes to, by numpy."""
    w = 0.0
    for target in targets:
        w += 0.5 * (np.mean(np.asarray(target, np.float64)) - w)
    return w


class Record(jl.Callback):
    """Keeps the names of the hooks that were called, and the batches of those that get one."""

    def __init__(self) -> None:
        self.hooks, self.batches = list[str](), dict[str, list[Any]]()


def _recorder(name: str) -> Callable[..., None]:
    def hook(self: Record, trainer: Any, module: Any, *args: Any) -> None:
        self.hooks.append(name)
        if "_batch_" in name:
            self.batches.setdefault(name, []).append(args[name.endswith("_end")])

    return hook


for _name in [n for n in dir(jl.Callback) if n.startswith("on_") and n != "on_log"]:
    setattr(Record, _name, _recorder(_name))


def trainer_of(*callbacks: Any, **arguments: Any) -> jl.Trainer:
    """Return a Trainer without files: their writers would compile, and look at arrays, as well."""
    return make_trainer(*callbacks, **({"num_sanity_val_steps": 0} | BARE | arguments))


# By name: the argument that messages name, and how a loader gets there.
VERBS: dict[str, tuple[str, Callable[[jl.Trainer, Any, Any], Any]]] = {
    "fit": ("Trainer.fit(train_dataloaders=...)", lambda t, m, x: t.fit(m, x)),
    "fit with val": ("Trainer.fit(val_dataloaders=...)", lambda t, m, x: t.fit(m, [good(0)], x)),
    "validate": ("Trainer.validate(dataloaders=...)", lambda t, m, x: t.validate(m, x)),
    "test": ("Trainer.test(dataloaders=...)", lambda t, m, x: t.test(m, x)),
    "predict": ("Trainer.predict(dataloaders=...)", lambda t, m, x: t.predict(m, x)),
}


def good(k: int, rows: int = 4) -> dict[str, Any]:
    return {"x": np.arange(rows, dtype=np.float32) + 10 * k, "id": np.zeros(rows, np.int64)}


def replaced(**leaves: Any) -> dict[str, Any]:
    return {**good(0), **leaves}


def refused(words: Any, note: str, call: Callable[[], Any]) -> None:
    """Check that a batch is refused with all the words, and where it is told."""
    with pytest.raises(DataError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), word
    assert [x for x in caught.value.__notes__ if note in x], caught.value.__notes__


# Preflight --------------------------------------------------------------------------------------------

X, ID = "batch['x']", "batch['id']"
BAD: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ragged": (replaced(id=np.zeros(3, np.int64)), ("leading sizes differ", X, "4", ID, "3")),
    "int64": (replaced(id=np.array([0, 1, 2, 2**31])), (ID, "int64", str(2**31), "int32", "would wrap")),
    "int64 down": (replaced(id=np.array([0, 1, 2, -(2**31) - 1])), (ID, "int64", "int32", str(-(2**31) - 1))),
    "uint64": (replaced(id=np.array([0, 1, 2, 2**32], np.uint64)), (ID, "uint64", str(2**32), "uint32")),
    "python int": (replaced(id=2**31), (ID, str(2**31), "int32")),
    "float64": (replaced(x=np.array([np.inf, 1, 2, -1e300])), (X, "float64", "1e+300", "float32", "become infinite")),
    "float64 and nan": (replaced(x=np.array([np.nan, 1, 2, 1e300])), (X, "float64", "1e+300", "float32")),
    "byte order": (replaced(x=np.zeros(4, ">f4")), (X, ">f4")),
    "long double": (replaced(x=np.zeros(4, np.longdouble)), (X, np.dtype(np.longdouble).name)),
    "empty": ({"x": np.zeros(0, np.float32), "id": np.zeros(0, np.int64)}, ("0 rows", X, ID)),
    "strings": (replaced(id=np.array(list("abcd"))), (ID, "str", "host_keys")),
    "bytes": (replaced(id=np.array([b"a"] * 4)), (ID, "host_keys")),
    "a str": (replaced(split="train"), ("batch['split'] holds str", "host_keys")),
    "list of strings": (replaced(id=list("abcd")), ("batch['id'][0]", "str", "host_keys")),
    "list of numbers": (replaced(id=[1, 2, 3, 4]), (f"{ID} is a list of Python numbers", "np.asarray")),
    "objects": (replaced(id=np.array([object()] * 4)), (ID, "host_keys")),
    "dates": (replaced(id=np.array(["2020-01-01"] * 4, "datetime64[D]")), (ID, "datetime64", "host_keys")),
}
NOTHING = {"nothing": ({}, ("no array",)), "none": (None, ("no array",)), "a class": (Record, ("which is no pytree",))}
NOTHING |= {"scalars": ({"x": 1.0, "scale": np.float32(2)}, ("no array with rows",))}


@pytest.mark.parametrize("name", [*BAD, *NOTHING])
def test_a_bad_first_batch_is_refused_before_any_compile_and_any_hook(name: str) -> None:
    batch, words = (BAD | NOTHING)[name]
    for k, (argument, call) in enumerate(VERBS.values()):
        if k and name not in ("ragged", "strings", "int64"):  # the same eyes look at each loader
            break
        record, module = Record(), Follow()
        with compiles() as compiled:
            refused((argument, *words), "epoch 0, batch 0", lambda: call(trainer_of(record), module, [batch, good(1)]))  # noqa: B023
        assert (compiled, record.hooks) == ([], ["on_exception"])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_in_a_later_epoch_is_refused_after_those_before_it(name: str) -> None:
    (batch, words), module, record = BAD[name], Follow(), Record()
    first = [good(k) for k in range(3)]
    trainer = trainer_of(record, max_epochs=3)
    loader = Stream(first, [*first[:2], batch])
    refused(("Trainer.fit(train_dataloaders=...)", *words), "epoch 1, batch 2", lambda: trainer.fit(module, loader))
    assert (trainer.global_step, record.hooks.count("on_train_batch_end")) == (5, 5)
    np.testing.assert_allclose(module.w[0], followed([b["x"] for b in (*first, *first[:2])]), rtol=1e-6)


@pytest.mark.parametrize(("name", "verb"), [*zip(["ragged", "int64", "float64", "empty"], [*VERBS][1:], strict=True)])
def test_a_bad_later_batch_of_an_evaluation_is_refused(name: str, verb: str) -> None:
    (batch, words), (argument, call) = BAD[name], VERBS[verb]
    loader = [good(0), good(1), batch]
    refused((argument, *words), "batch 2", lambda: call(trainer_of(), Follow(), loader))


@pytest.mark.parametrize(("strategy", "dtype"), [("single", np.int64), ("fsdp", np.float64), ("pmap", np.int64)])
def test_64_bit_numbers_that_fit_are_trained_on_right(strategy: str, dtype: Any) -> None:
    batches = [{"x": np.arange(rows).astype(dtype) + k} for k, rows in enumerate((8, 16, 3))]
    module, record = Follow(), Record()
    trainer_of(record, strategy=strategy).fit(module, batches)
    np.testing.assert_allclose(module.w[0], followed([b["x"] for b in batches]), rtol=1e-6)
    assert [b["x"].dtype for b in record.batches["on_train_batch_end"]] == [dtype] * 3


def test_numbers_of_all_dtypes_reach_a_step_unwrapped() -> None:
    raw = type("Raw", (Follow,), {"predict_step": lambda self, batch: batch["x"] + 0})
    limits = np.iinfo(np.int32)
    (found,) = trainer_of().predict(raw(), [{"x": np.array([limits.min, limits.max, -1, 0])}])
    assert found.dtype == np.int32 and found.tolist() == [limits.min, limits.max, -1, 0]
    for dtype in (np.bool_, np.uint8, np.int16, np.float16, jnp.bfloat16):
        (found,) = trainer_of().predict(raw(), [{"x": jnp.ones(2, dtype) if dtype is np.uint8 else np.ones(2, dtype)}])
        assert found.tolist() == [1, 1]


def nan_at(*where: int, dtype: Any = np.float32) -> dict[str, Any]:
    x = np.zeros((4, 3), dtype)
    x[where] = np.nan
    return {"x": x}


@pytest.mark.parametrize("verb", VERBS)
def test_nan_is_refused_under_debug_also_in_a_later_batch_whose_shape_was_seen(verb: str) -> None:
    (argument, call), record = VERBS[verb], Record()
    with compiles() as compiled:
        refused(
            (argument, "batch['x'][2, 1] is NaN"),
            "batch 0",
            lambda: call(trainer_of(record, debug=True), Follow(), [nan_at(2, 1)]),
        )
    assert (compiled, record.hooks) == ([], ["on_exception"])
    fine = {"x": np.zeros((4, 3), np.float32)}
    refused(
        (argument, "batch['x'][3, 0] is NaN"),
        "batch 1",
        lambda: call(trainer_of(debug=True), Follow(), [fine, nan_at(3, 0)]),
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float64, jnp.bfloat16])
def test_nan_of_any_floating_dtype_is_seen_under_debug_and_taken_without(dtype: Any) -> None:
    with pytest.raises(DataError, match=r"batch\['x'\]\[3, 0\] is NaN"):
        trainer_of(debug=True).predict(Follow(), [nan_at(3, 0, dtype=dtype)])
    (found,) = trainer_of().predict(Follow(), [nan_at(2, 1, dtype=dtype)])
    assert np.argwhere(np.isnan(found["y"])).tolist() == [[2, 1]]


# A hook that repairs ----------------------------------------------------------------------------------


def repair(self: Any, batch: Any, dataloader_idx: int) -> Any:
    rows = min(len(batch["x"]), len(batch["id"]))
    return {"x": np.clip(batch["x"][:rows], -100, 100).astype(np.float32), "rows": np.ones(rows, np.int32)}


@pytest.mark.parametrize(("name", "owner"), [("ragged", "data"), ("int64", "module"), ("strings", "data")])
def test_what_on_before_batch_transfer_repairs_is_not_refused(name: str, owner: str) -> None:
    batches, record = [BAD[name][0], good(1), BAD[name][0]], Record()
    members = {"on_before_batch_transfer": repair}
    module = type("Made", (Follow,), members if owner == "module" else {})()
    loaders = {"train_dataloader": lambda self: batches, "val_dataloader": lambda self: batches}
    data = type("Data", (jl.DataModule,), loaders | (members if owner == "data" else {}))()
    trainer_of(record).fit(module, data)
    expected = [repair(None, batch, 0)["x"] for batch in batches]
    np.testing.assert_allclose(module.w[0], followed(expected), rtol=1e-6)
    for hook_name in ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_end"):
        for batch, x in zip(record.batches[hook_name], expected, strict=True):
            np.testing.assert_array_equal(batch["x"], x)


def test_what_on_before_batch_transfer_breaks_is_refused() -> None:
    breaks = type("Breaks", (Follow,), {"on_before_batch_transfer": lambda self, batch, idx: replaced(id=np.ones(3))})
    refused(("batch['x']", "4", "batch['id']", "3"), "batch 0", lambda: trainer_of().fit(breaks(), [good(0)]))


# host_keys --------------------------------------------------------------------------------------------


def labelled(*sizes: int) -> list[dict[str, Any]]:
    """Batches with strings, objects, ids beyond int32 and a plain Python object for each."""
    ends = np.cumsum(sizes)
    return [
        {
            "x": np.arange(end - size, end, dtype=np.float32),
            "name": np.array([f"row {i}" for i in range(end - size, end)]),
            "object": np.array([{"row": i} for i in range(end - size, end)], object),
            "big": np.arange(end - size, end) + 2**40,
            "notes": ["a", None, {"k": k}],
        }
        for k, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


HOST_KEYS = ("name", "object", "big", "notes")


def assert_labels(found: list[dict[str, Any]], given: list[dict[str, Any]]) -> None:
    for batch, expected in zip(found, given, strict=True):
        for key in ("name", "object", "big"):
            assert (key, batch[key].dtype) == (key, expected[key].dtype)
            np.testing.assert_array_equal(batch[key], expected[key])
        assert batch["notes"] == expected["notes"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_host_keys_reach_every_hook_in_order_and_unchanged(strategy: str) -> None:
    """And predictions that are dicts carry those of their rows."""
    batches, record, module = labelled(8, 5), Record(), Follow()
    trainer = trainer_of(record, strategy=strategy, host_keys=HOST_KEYS)
    trainer.fit(module, batches, batches)
    predicted: Any = trainer.predict(module, batches)
    stages = ("train", "validation", "predict")
    assert set(record.batches) == {f"on_{stage}_batch_{when}" for stage in stages for when in ("start", "end")}
    for found in record.batches.values():
        assert_labels(found, batches)
        assert [b["x"].tolist() for b in found] == [b["x"].tolist() for b in batches]
    assert_labels(predicted, batches)
    w = float(module.w[0])
    assert [p["y"].tolist() for p in predicted] == [b["x"].tolist() for b in batches]
    assert all(set(p) == {"y", *HOST_KEYS} for p in predicted)
    np.testing.assert_allclose(w, followed([b["x"] for b in batches]), rtol=1e-6)


def test_predictions_that_are_no_dicts_are_left_alone_and_a_key_of_their_own_wins() -> None:
    plain = type("Plain", (Follow,), {"predict_step": lambda self, batch: (batch["x"] * 2, batch["x"] + 1)})
    for found, batch in zip(
        trainer_of(host_keys=HOST_KEYS).predict(plain(), labelled(8, 5)), labelled(8, 5), strict=True
    ):
        assert type(found) is tuple
        np.testing.assert_array_equal(found[0], batch["x"] * 2)
        np.testing.assert_array_equal(found[1], batch["x"] + 1)
    named = type("Named", (Follow,), {"predict_step": lambda self, batch: {"name": batch["x"] + 0}})
    (found,) = trainer_of(host_keys=HOST_KEYS).predict(named(), labelled(4))
    assert found["name"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_step_does_not_see_the_host_keys_and_their_shapes_compile_nothing() -> None:
    seen: list[set[str]] = []

    class Watched(Follow):
        def training_step(self, batch: Any) -> jax.Array:
            seen.append(set(batch))
            return super().training_step(batch)

    batches = [{"x": good(k)["x"], "name": np.array(["n" * (k + 1)] * (k + 1))} for k in range(4)]
    trainer_of(host_keys=["name"], max_recompiles=0).fit(Watched(), batches)
    assert seen and all(keys == {"x"} for keys in seen)


def test_a_host_key_may_hold_any_object() -> None:
    for value in ({2: "two", "a": 1}, {"b", "a"}, iter("ab"), lambda: None):
        record = Record()
        trainer_of(record, host_keys=("any",)).fit(Follow(), Stream([good(0) | {"any": value}]))
        assert record.batches["on_train_batch_end"][0]["any"] is value or value == {2: "two", "a": 1}


@pytest.mark.parametrize(("verb", "k"), [("fit", 0), ("fit", 2), ("validate", 2), ("predict", 0)])
def test_a_missing_host_key_is_named_with_the_nearest_one(verb: str, k: int) -> None:
    argument, call = VERBS[verb]
    batches = [good(0) | {"names": np.array(list("abcd"))} for _ in range(3)]
    batches[k] = good(0) | {"nmaes": np.array(list("abcd"))}
    words = (argument, "'names'", "host_keys", "Did you mean 'nmaes'?")
    refused(words, f"batch {k}", lambda: call(trainer_of(host_keys=("names",)), Follow(), batches))


@pytest.mark.parametrize(
    "batch", [(np.ones(4, np.float32),), [np.ones(4, np.float32)], np.ones(4, np.float32)], ids=type
)
def test_host_keys_want_batches_that_are_dicts(batch: Any) -> None:
    with compiles() as compiled:
        words = ("train_dataloaders", "host_keys", "dict", type(batch).__name__)
        refused(words, "batch 0", lambda: trainer_of(host_keys=("name",)).fit(Follow(), Stream([batch])))
    assert compiled == []


@pytest.mark.parametrize("value", ["name", b"name", 3, None, ("name", 3), [None], {"name": 1}, True])
def test_host_keys_must_be_a_sequence_of_strings(value: Any) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        trainer_of(host_keys=value)
    assert "Trainer(host_keys=...)" in str(caught.value) and repr(value) in str(caught.value)


# What compiles again ----------------------------------------------------------------------------------


def of_length(*lengths: int) -> list[dict[str, Any]]:
    return [{"x": np.full((4, n), k, np.float32)} for k, n in enumerate(lengths)]


def of_dtype(*dtypes: Any) -> list[dict[str, Any]]:
    return [{"x": np.full(4, k, dtype)} for k, dtype in enumerate(dtypes)]


@pytest.mark.parametrize(
    ("batches", "words", "allowed"),
    [
        (of_length(5, 6), ["float32[4, 5]", "float32[4, 6]"], 0),
        (of_length(5, 6, 7, 8), [f"float32[4, {n}]" for n in (5, 6, 7, 8)], 2),
        (of_dtype(np.float32, np.float16, np.int32), ["float32[4]", "float16[4]", "int32[4]"], 1),
    ],
)
def test_one_recompile_more_than_allowed_is_refused_with_what_changed(
    batches: list[Any], words: list[str], allowed: int
) -> None:
    module, record = Follow(), Record()
    seen = batches[: allowed + 1] * 3  # each of these again costs nothing
    trainer = trainer_of(record, max_recompiles=allowed)
    told = ("train_dataloaders", "batch['x']", words[allowed], words[allowed + 1], f"max_recompiles={allowed}")
    refused(told, f"epoch 0, batch {len(seen)}", lambda: trainer.fit(module, [*seen, batches[allowed + 1]]))
    assert record.hooks.count("on_train_batch_end") == len(seen)
    np.testing.assert_allclose(module.w[0], followed([b["x"] for b in seen]), rtol=1e-6)


@pytest.mark.parametrize("strategy", ["single", "shard_map"])
def test_as_many_recompiles_as_allowed_pass_and_are_all_there_are(strategy: str) -> None:
    batches = [{"x": np.ones((8, n), np.float32)} for n in (2, 3, 4, 3, 2, 4)]
    with compiles() as compiled:
        trainer_of(strategy=strategy, max_recompiles=2, max_epochs=3).fit(Follow(), batches)
    assert sum("train_step" in name for name in compiled) == 3


@pytest.mark.parametrize("wide", [np.int64, np.float64])
def test_dtypes_that_a_step_takes_as_one_are_no_recompile(wide: Any) -> None:
    narrow, module = np.dtype(wide.__name__.replace("64", "32")), Follow()
    batches = of_dtype(wide, narrow, wide, narrow)
    with compiles() as compiled:
        trainer_of(max_recompiles=0).fit(module, batches)
    assert sum("train_step" in name for name in compiled) == 1
    np.testing.assert_allclose(module.w[0], followed([b["x"] for b in batches]), rtol=1e-6)


def test_a_tail_counts_once_in_all_epochs_and_training_and_validation_are_counted_apart() -> None:
    trainer = trainer_of(max_recompiles=1, max_epochs=4)
    trainer.fit(Follow(), jl.ArrayLoader({"x": np.arange(10, dtype=np.float32)}, 4))
    assert trainer.global_step == 12
    trainer = trainer_of(max_recompiles=0, max_epochs=2)
    trainer.fit(Follow(), of_length(3, 3), [of_length(4, 4), of_length(5)])
    assert trainer.global_step == 4


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "fit"])
def test_max_recompiles_holds_for_evaluations(verb: str) -> None:
    argument, call = VERBS[verb]
    words = (argument, "float32[4, 5]", "float32[4, 6]")
    refused(words, "batch 1", lambda: call(trainer_of(max_recompiles=0), Follow(), of_length(5, 6)))


@pytest.mark.parametrize(("shapes", "warnings"), [(3, 0), (4, 1)])
def test_the_third_recompile_is_warned_of_once(shapes: int, warnings: int, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "jaxlit"):
        trainer_of(max_epochs=3).fit(Follow(), of_length(*range(5, 5 + shapes)) * 2)
    found = [r.getMessage() for r in caplog.records if "compile" in r.getMessage()]
    assert len(found) == warnings
    assert all(w in text for text in found for w in ("batch['x']", "float32[4, 7]", "float32[4, 8]", "max_recompiles"))


# The structure ----------------------------------------------------------------------------------------

XY = {"x": np.ones(4, np.float32), "y": np.ones(4, np.float32)}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x": XY["x"]}, ["missing batch['y']"]),
        ({"x": XY["x"][:3]}, ["missing batch['y']"]),
        ({**XY, "z": XY["x"]}, ["new batch['z']"]),
        ({"x": XY["x"], "Y": XY["y"]}, ["missing batch['y']", "new batch['Y']"]),
        ({"x": XY["x"], "y": None}, ["missing batch['y']"]),
        ({"x": XY["x"], "y": {"y": XY["y"]}}, ["missing batch['y']", "new batch['y']['y']"]),
        ((XY["x"], XY["y"]), ["batch['x']", "batch['y']", "batch[0]", "batch[1]"]),
        (XY["x"], ["batch['x']", "batch['y']"]),
    ],
)
def test_another_structure_is_refused_by_its_keys_after_the_batches_before_it(changed: Any, words: list[str]) -> None:
    module, record = Follow(), Record()
    loader, trainer = Stream([XY] * 3, [XY, XY, changed]), trainer_of(record, max_epochs=3)
    refused(("train_dataloaders", "structure", *words), "epoch 1, batch 2", lambda: trainer.fit(module, loader))
    assert record.hooks.count("on_train_batch_end") == 5
    np.testing.assert_allclose(module.w[0], followed([XY["x"]] * 5), rtol=1e-6)


def test_a_list_in_place_of_a_tuple_is_another_structure_and_the_order_of_keys_is_none() -> None:
    x = XY["x"]
    with pytest.raises(DataError, match="structure of the batch changed"):
        trainer_of().fit(Follow(), Stream([(x, x), [x, x]]))
    trainer = trainer_of(max_recompiles=0)
    trainer.fit(Follow(), [XY, dict(reversed(XY.items()))])
    assert trainer.global_step == 2


# Scalars ----------------------------------------------------------------------------------------------

SCALARS: dict[str, Callable[[int], Any]] = {
    "float32": np.float32,
    "float64": np.float64,
    "int64": np.int64,
    "bool": lambda v: np.bool_(v % 2),
    "0-d array": lambda v: np.array(v, np.int16),
    "float": float,
    "int": int,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_row_meets_the_batchs_own_scalars_and_nothing_compiles_again(strategy: str) -> None:
    sizes = (8, 8, 3, 8, 3)  # a size that divides, and one that does not
    batches = [
        {
            "x": np.arange(n, dtype=np.float32),
            "scale": {kind: make(3 * k + i) for i, (kind, make) in enumerate(SCALARS.items())},
        }
        for k, n in enumerate(sizes)
    ]
    expected = [b["x"] + sum((i + 1) * float(b["scale"][kind]) for i, kind in enumerate(SCALARS)) for b in batches]

    def target(self: Any, batch: Any) -> jax.Array:
        assert all(value.shape == () for value in batch["scale"].values())
        return batch["x"] + sum((i + 1) * batch["scale"][kind] for i, kind in enumerate(SCALARS))

    module: Any = type("Scaled", (Follow,), {"target": target})()
    trainer = trainer_of(strategy=strategy, max_recompiles=1)
    with compiles() as compiled:
        trainer.fit(module, batches, batches)
    assert sum("train_step" in name for name in compiled) == 2
    np.testing.assert_allclose(module.w[0], followed(expected), rtol=1e-6)
    np.testing.assert_allclose(trainer.callback_metrics["mean"], np.concatenate(expected).mean(), rtol=1e-6)
    found: Any = trainer.predict(module, batches)
    assert [p["y"].tolist() for p in found] == [e.tolist() for e in expected]


def test_a_python_number_beyond_int32_is_refused_in_a_later_batch_too() -> None:
    batches = [good(0) | {"scale": 1}, good(1) | {"scale": 2**31}]
    refused(("batch['scale']", str(2**31)), "batch 1", lambda: trainer_of().fit(Follow(), batches))


# Memory of other libraries ----------------------------------------------------------------------------


class Refills:
    """A library's tensor: numpy sees its memory, which is filled again for each batch."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.memory


class RefillingDataset(grain.IterDataset):
    def __iter__(self) -> Any:
        return RefillingIterator()


class RefillingIterator(grain.DatasetIterator):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.memory = 0, np.zeros(4, np.float32)

    def __next__(self) -> Any:
        if self.k == 6:
            raise StopIteration
        self.memory[:] = self.k
        self.k += 1
        return {"x": self.memory}

    def get_state(self) -> dict[str, Any]:
        return {"k": self.k}

    def set_state(self, state: dict[str, Any]) -> None:
        self.k = state["k"]


class RefillingTensors:
    def __iter__(self) -> Any:
        memory = np.zeros(4, np.float32)
        for k in range(6):
            memory[:] = k
            yield {"x": Refills(memory)}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("make", [RefillingTensors, RefillingDataset])
def test_memory_of_other_libraries_that_is_filled_again_is_trained_on_as_it_was(make: Any, prefetch: int) -> None:
    seen, module = list[float](), Follow()
    watch = hooks(on_train_batch_end=lambda t, m, outputs, batch, idx: seen.append(float(batch["x"][0])))
    trainer_of(watch, prefetch=prefetch).fit(module, make())
    assert seen == [0, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(module.w[0], followed(range(6)), rtol=1e-6)
