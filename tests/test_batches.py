"""Batches on their way from a loader to the step: what is refused, what stays on the host, what compiles again."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.compiles import compiles

import jaxlit as jl
from jaxlit.errors import ArgumentTypeError, DataError

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate:8")
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Follow(jl.TrainModule):
    """Moves half of the way to the mean of each batch, so that the order of the batches shows."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(()))

    def target(self, batch: Any) -> jax.Array:
        if not isinstance(batch, dict):
            return batch[0]
        return batch["x"].astype(jnp.float32) + batch.get("scale", 0)

    def training_step(self, batch: Any) -> jax.Array:
        return 0.5 * jnp.mean((self.w[...] - self.target(batch)) ** 2)

    def validation_step(self, batch: Any) -> None:
        self.log("mean", jnp.mean(self.target(batch)))

    test_step = validation_step

    def predict_step(self, batch: Any) -> Any:
        return {"y": self.target(batch)}

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.5)


def followed(targets: Any) -> float:
    """Return what `Follow` comes to, by numpy."""
    w = 0.0
    for target in targets:
        w += 0.5 * (np.mean(np.asarray(target, np.float64)) - w)
    return w


class Record(jl.Callback):
    """Keeps the name of every hook that was called, and the batches of those that get one."""

    def __init__(self) -> None:
        self.hooks: list[str] = []
        self.batches: dict[str, list[Any]] = {}


def _recorder(name: str) -> Callable[..., None]:
    def hook(self: Record, trainer: Any, module: Any, *args: Any) -> None:
        self.hooks.append(name)
        if "_batch_" in name:
            outputs = 1 if name.endswith("_end") else 0
            self.batches.setdefault(name, []).append(args[outputs])

    return hook


for _name in [n for n in dir(jl.Callback) if n.startswith("on_") and n != "on_log"]:
    setattr(Record, _name, _recorder(_name))


class Stream:
    """A loader without a length; `epochs` gives the batches of each epoch, the last ones again and again."""

    def __init__(self, *epochs: list[Any]) -> None:
        self.epochs, self.opened = epochs, 0

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        return iter(self.epochs[min(self.opened, len(self.epochs)) - 1])


def make_trainer(**arguments: Any) -> jl.Trainer:
    defaults = {"strategy": "single", "max_epochs": 1, "num_sanity_val_steps": 0}
    return jl.Trainer(**(QUIET | defaults | arguments))


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


# Preflight -------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ragged": (replaced(id=np.zeros(3, np.int64)), ("batch['x']", "4", "batch['id']", "3")),
    "int64": (replaced(id=np.array([0, 1, 2, 2**31])), ("batch['id']", "int64", str(2**31), "int32")),
    "int64 down": (replaced(id=np.array([0, 1, 2, -(2**31) - 1])), ("batch['id']", "int64", "int32")),
    "uint64": (replaced(id=np.array([0, 1, 2, 2**32], np.uint64)), ("batch['id']", "uint64", str(2**32), "uint32")),
    "python int": (replaced(id=2**31), ("batch['id']", str(2**31), "int32")),
    "float64": (replaced(x=np.array([0, 1, 2, -1e300])), ("batch['x']", "float64", "1e+300", "float32")),
    "float64 and nan": (replaced(x=np.array([np.nan, 1, 2, 1e300])), ("batch['x']", "float64", "1e+300", "float32")),
    "byte order": (replaced(x=np.zeros(4, ">f4")), ("batch['x']", ">f4")),
    "long double": (replaced(x=np.zeros(4, np.longdouble)), ("batch['x']", np.dtype(np.longdouble).name)),
    "empty": (
        {"x": np.zeros(0, np.float32), "id": np.zeros(0, np.int64)},
        ("0 rows", "batch['x']", "batch['id']"),
    ),
    "strings": (replaced(id=np.array(list("abcd"))), ("batch['id']", "str", "host_keys")),
    "bytes": (replaced(id=np.array([b"a"] * 4)), ("batch['id']", "host_keys")),
    "list of strings": (replaced(id=list("abcd")), ("batch['id'][0]", "str", "host_keys")),
    "objects": (replaced(id=np.array([object()] * 4)), ("batch['id']", "host_keys")),
    "dates": (replaced(id=np.array(["2020-01-01"] * 4, "datetime64[D]")), ("batch['id']", "datetime64", "host_keys")),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_first_batch_is_refused_before_any_compile_and_any_hook(name: str, verb: str) -> None:
    (batch, words), (argument, call), module, record = BAD[name], VERBS[verb], Follow(), Record()
    trainer = make_trainer(callbacks=[record])
    with compiles() as compiled, pytest.raises(DataError) as caught:
        call(trainer, module, [batch, good(1)])
    assert compiled == []
    assert record.hooks == ["on_exception"]
    for word in (argument, *words):
        assert word in str(caught.value)
    assert [note for note in caught.value.__notes__ if argument in note and "epoch 0, batch 0" in note]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_in_a_later_epoch_is_refused_after_those_before_it(name: str) -> None:
    (batch, words), module, record = BAD[name], Follow(), Record()
    first = [good(k) for k in range(3)]
    trainer = make_trainer(callbacks=[record], max_epochs=3)
    with pytest.raises(DataError) as caught:
        trainer.fit(module, Stream(first, [*first[:2], batch]))
    for word in ("Trainer.fit(train_dataloaders=...)", *words):
        assert word in str(caught.value)
    assert [note for note in caught.value.__notes__ if "epoch 1, batch 2" in note]
    assert (trainer.global_step, record.hooks.count("on_train_batch_end")) == (5, 5)
    # A batch of another shape is what it is, not a structure that changed.
    expected = followed([b["x"] for b in (*first, *first[:2])])
    np.testing.assert_allclose(module.w[...], expected, rtol=1e-6)


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "fit"])
@pytest.mark.parametrize("name", ["ragged", "int64", "float64", "empty", "strings"])
def test_a_bad_later_batch_of_an_evaluation_is_refused(name: str, verb: str) -> None:
    (batch, words), (argument, call), record = BAD[name], VERBS[verb], Record()
    with pytest.raises(DataError) as caught:
        call(make_trainer(callbacks=[record]), Follow(), [good(0), good(1), batch])
    for word in (argument, *words):
        assert word in str(caught.value)
    assert [note for note in caught.value.__notes__ if argument in note and "batch 2" in note]


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_64_bit_numbers_that_fit_are_trained_on_right(strategy: str, dtype: Any) -> None:
    batches = [{"x": np.arange(rows).astype(dtype) + k} for k, rows in enumerate((8, 16, 3))]
    module, record = Follow(), Record()
    make_trainer(strategy=strategy, callbacks=[record]).fit(module, batches)
    np.testing.assert_allclose(module.w[...], followed([b["x"] for b in batches]), rtol=1e-6)
    assert [b["x"].dtype for b in record.batches["on_train_batch_end"]] == [dtype] * 3


def test_the_limits_of_int32_reach_a_step_unwrapped() -> None:
    limits = np.iinfo(np.int32)
    batch = {"x": np.array([limits.min, limits.max, -1, 0])}
    (found,) = make_trainer().predict(type("Raw", (Follow,), {"predict_step": lambda self, b: b["x"] + 0})(), [batch])
    assert found.dtype == np.int32
    assert found.tolist() == [limits.min, limits.max, -1, 0]


def nan_at(*where: int, dtype: Any = np.float32) -> dict[str, Any]:
    x = np.zeros((4, 3), dtype)
    x[where] = np.nan
    return {"x": x, "id": np.zeros(4, np.int64)}


@pytest.mark.parametrize("verb", VERBS)
def test_nan_in_the_first_batch_is_refused_under_debug_before_any_compile(verb: str) -> None:
    (argument, call), module, record = VERBS[verb], Follow(), Record()
    trainer = make_trainer(debug=True, callbacks=[record])
    with compiles() as compiled, pytest.raises(DataError) as caught:
        call(trainer, module, [nan_at(2, 1)])
    assert (compiled, record.hooks) == ([], ["on_exception"])
    assert argument in str(caught.value)
    assert "batch['x'][2, 1] is NaN" in str(caught.value)


@pytest.mark.parametrize(
    ("verb", "dtype"),
    [*((verb, np.float32) for verb in VERBS), ("fit", np.float16), ("fit", np.float64), ("fit", jnp.bfloat16)],
)
def test_nan_in_a_later_batch_is_refused_under_debug_though_its_shape_was_seen(verb: str, dtype: Any) -> None:
    argument, call = VERBS[verb]
    fine = {"x": np.zeros((4, 3), dtype), "id": np.zeros(4, np.int64)}
    batches = [fine, fine, nan_at(3, 0, dtype=dtype)] if verb != "fit with val" else [fine, nan_at(3, 0, dtype=dtype)]
    with pytest.raises(DataError) as caught:
        call(make_trainer(debug=True), Follow(), batches)
    assert "batch['x'][3, 0] is NaN" in str(caught.value)
    assert [note for note in caught.value.__notes__ if argument in note and f"batch {len(batches) - 1}" in note]


def test_nan_is_taken_without_debug() -> None:
    trainer = make_trainer()
    (found,) = trainer.predict(Follow(), [nan_at(2, 1)])
    assert np.argwhere(np.isnan(found["y"])).tolist() == [[2, 1]]
    assert np.isnan(trainer.validate(Follow(), [nan_at(2, 1)])[0]["mean"])


# A hook that repairs ---------------------------------------------------------------------------------


def repair(self: Any, batch: Any, dataloader_idx: int) -> Any:
    rows = min(len(batch["x"]), len(batch["id"]))
    return {"x": np.clip(batch["x"][:rows], -100, 100).astype(np.float32), "rows": np.ones(rows, np.int32)}


Repaired = type("Repaired", (jl.DataModule,), {"on_before_batch_transfer": repair})


@pytest.mark.parametrize("owner", ["datamodule", "module"])
@pytest.mark.parametrize("name", ["ragged", "int64", "float64", "strings", "objects"])
def test_what_on_before_batch_transfer_repairs_is_not_refused(name: str, owner: str) -> None:
    batches, record = [BAD[name][0], good(1), BAD[name][0]], Record()
    trainer = make_trainer(callbacks=[record])
    if owner == "module":
        module = type("Repairing", (Follow,), {"on_before_batch_transfer": repair})()
        trainer.fit(module, batches, batches)
    else:
        module, hook = Follow(), lambda self: batches
        trainer.fit(module, datamodule=type("Data", (Repaired,), {"train_dataloader": hook, "val_dataloader": hook})())
    expected = [repair(None, batch, 0)["x"] for batch in batches]
    np.testing.assert_allclose(module.w[...], followed(expected), rtol=1e-6)
    for hook_name in ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_end"):
        for batch, x in zip(record.batches[hook_name], expected, strict=True):
            np.testing.assert_array_equal(batch["x"], x)


def test_what_on_before_batch_transfer_breaks_is_refused() -> None:
    breaks = type("Breaks", (Follow,), {"on_before_batch_transfer": lambda self, batch, idx: replaced(id=np.ones(3))})
    with pytest.raises(DataError, match=r"batch\['x'\].*4.*batch\['id'\].*3|batch\['id'\].*3.*batch\['x'\].*4"):
        make_trainer().fit(breaks(), [good(0)])


# host_keys -------------------------------------------------------------------------------------------


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
    batches, record, module = labelled(8, 5), Record(), Follow()
    trainer = make_trainer(strategy=strategy, host_keys=HOST_KEYS, callbacks=[record])
    trainer.fit(module, batches, batches)
    trainer.predict(module, batches)
    assert set(record.batches) == {
        f"on_{stage}_batch_{when}" for stage in ("train", "validation", "predict") for when in ("start", "end")
    }
    for found in record.batches.values():
        assert_labels(found, batches)
        assert [b["x"].tolist() for b in found] == [b["x"].tolist() for b in batches]
    np.testing.assert_allclose(module.w[...], followed([b["x"] for b in batches]), rtol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_predictions_that_are_dicts_carry_the_host_keys_of_their_rows(strategy: str) -> None:
    batches = labelled(8, 5, 8, 1)
    found: Any = make_trainer(strategy=strategy, host_keys=HOST_KEYS).predict(Follow(), batches)
    assert_labels(found, batches)
    assert [p["y"].tolist() for p in found] == [b["x"].tolist() for b in batches]
    assert all(set(p) == {"y", *HOST_KEYS} for p in found)


@pytest.mark.parametrize("strategy", ["single", "shard_map"])
def test_predictions_that_are_no_dicts_are_left_alone(strategy: str) -> None:
    plain = type("Plain", (Follow,), {"predict_step": lambda self, batch: (batch["x"] * 2, batch["x"] + 1)})
    batches = labelled(8, 5)
    found: Any = make_trainer(strategy=strategy, host_keys=HOST_KEYS).predict(plain(), batches)
    assert all(type(p) is tuple for p in found)
    for (double, more), batch in zip(found, batches, strict=True):
        np.testing.assert_array_equal(double, batch["x"] * 2)
        np.testing.assert_array_equal(more, batch["x"] + 1)


def test_what_a_step_predicts_wins_over_a_host_key_of_the_same_name() -> None:
    named = type("Named", (Follow,), {"predict_step": lambda self, batch: {"name": batch["x"] + 0}})
    (found,) = make_trainer(host_keys=HOST_KEYS).predict(named(), labelled(4))
    assert found["name"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_step_does_not_see_the_host_keys() -> None:
    seen: list[set[str]] = []

    def step(self: Any, batch: Any) -> jax.Array:
        seen.append(set(batch))
        return Follow.training_step(self, batch)

    make_trainer(host_keys=["name", "object", "big", "notes"]).fit(
        type("Watched", (Follow,), {"training_step": step})(), labelled(4)
    )
    assert seen
    assert all(keys == {"x"} for keys in seen)


def test_host_keys_that_change_shape_compile_nothing_again() -> None:
    batches = [good(k) | {"name": np.array(["n" * (k + 1)] * (k + 1))} for k in range(6)]
    make_trainer(host_keys=("name",), max_recompiles=0).fit(Follow(), batches)


@pytest.mark.parametrize("value", [{2: "two", "a": 1}, {"b", "a"}, iter("ab"), lambda: None], ids=type)
def test_a_host_key_may_hold_any_object(value: Any) -> None:
    record = Record()
    make_trainer(host_keys=("any",), callbacks=[record]).fit(Follow(), Stream([good(0) | {"any": value}]))
    assert record.batches["on_train_batch_end"][0]["any"] == value


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("verb", VERBS)
def test_a_missing_host_key_is_named_with_the_nearest_one(verb: str, k: int) -> None:
    argument, call = VERBS[verb]
    batches = [good(0) | {"names": np.array(list("abcd"))} for _ in range(3)]
    batches[k] = good(0) | {"nmaes": np.array(list("abcd"))}
    trainer, fine = make_trainer(host_keys=("names",)), [batches[1]]
    with pytest.raises(DataError) as caught:
        if verb == "fit with val":
            trainer.fit(Follow(), fine, batches)
        else:
            call(trainer, Follow(), batches)
    for word in (argument, "'names'", "host_keys", "Did you mean 'nmaes'?"):
        assert word in str(caught.value)
    assert [note for note in caught.value.__notes__ if f"batch {k}" in note]


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "fit with val"])
@pytest.mark.parametrize(
    "batch", [(np.ones(4, np.float32),), [np.ones(4, np.float32)], np.ones(4, np.float32)], ids=type
)
def test_host_keys_want_batches_that_are_dicts(batch: Any, verb: str) -> None:
    argument, call = VERBS[verb]
    with compiles() as compiled, pytest.raises(DataError) as caught:
        call(make_trainer(host_keys=("name",)), Follow(), Stream([batch]))
    assert compiled == []
    for word in (argument, "host_keys", "dict", type(batch).__name__):
        assert word in str(caught.value)


@pytest.mark.parametrize("value", ["name", b"name", 3, None, ("name", 3), [None], {"name": 1}, True])
def test_host_keys_must_be_a_sequence_of_strings(value: Any) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        make_trainer(host_keys=value)
    assert "Trainer(host_keys=...)" in str(caught.value)
    assert repr(value) in str(caught.value)


# What compiles again ---------------------------------------------------------------------------------


def of_length(*lengths: int) -> list[dict[str, Any]]:
    return [{"x": np.full((4, n), k, np.float32)} for k, n in enumerate(lengths)]


def of_dtype(*dtypes: Any) -> list[dict[str, Any]]:
    return [{"x": np.full(4, k, dtype)} for k, dtype in enumerate(dtypes)]


@pytest.mark.parametrize("allowed", [0, 1, 2])
@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (of_length(5, 6, 7, 8), [f"float32[4, {n}]" for n in (5, 6, 7, 8)]),
        (of_dtype(np.float32, np.float16, np.int32, np.uint8), ["float32[4]", "float16[4]", "int32[4]", "uint8[4]"]),
    ],
    ids=["shapes", "dtypes"],
)
def test_one_recompile_more_than_allowed_is_refused_with_what_changed(
    batches: list[Any], words: list[str], allowed: int
) -> None:
    module, record = Follow(), Record()
    seen = batches[: allowed + 1] * 3  # each of these again costs nothing
    with pytest.raises(DataError) as caught:
        make_trainer(max_recompiles=allowed, callbacks=[record]).fit(module, [*seen, batches[allowed + 1]])
    for word in ("train_dataloaders", "batch['x']", words[allowed], words[allowed + 1], f"max_recompiles={allowed}"):
        assert word in str(caught.value)
    assert [note for note in caught.value.__notes__ if f"epoch 0, batch {len(seen)}" in note]
    assert record.hooks.count("on_train_batch_end") == len(seen)
    np.testing.assert_allclose(module.w[...], followed([b["x"] for b in seen]), rtol=1e-6)


@pytest.mark.parametrize("strategy", ["single", "ddp", "shard_map"])
def test_as_many_recompiles_as_allowed_pass_and_are_all_there_are(strategy: str) -> None:
    batches = [{"x": np.ones((8, n), np.float32)} for n in (2, 3, 4, 3, 2, 4)]
    with compiles() as compiled:
        make_trainer(strategy=strategy, max_recompiles=2, max_epochs=3).fit(Follow(), batches)
    assert sum("train_step" in name for name in compiled) == 3


@pytest.mark.parametrize("wide", [np.int64, np.float64])
def test_dtypes_that_a_step_takes_as_one_are_no_recompile(wide: Any) -> None:
    narrow, module = np.dtype(wide.__name__.replace("64", "32")), Follow()
    batches = of_dtype(wide, narrow, wide, narrow)
    with compiles() as compiled:
        make_trainer(max_recompiles=0).fit(module, batches)
    assert sum("train_step" in name for name in compiled) == 1
    np.testing.assert_allclose(module.w[...], followed([b["x"] for b in batches]), rtol=1e-6)


def test_a_tail_of_fewer_rows_counts_once_in_all_epochs() -> None:
    loader = jl.ArrayLoader({"x": np.arange(10, dtype=np.float32)}, 4)
    trainer = make_trainer(max_recompiles=1, max_epochs=4)
    trainer.fit(Follow(), loader)
    assert trainer.global_step == 12


def test_training_and_validation_are_counted_apart() -> None:
    trainer = make_trainer(max_recompiles=0, max_epochs=2)
    trainer.fit(Follow(), of_length(3, 3), [of_length(4, 4), of_length(5)])
    assert trainer.global_step == 4


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "fit"])
def test_max_recompiles_holds_for_evaluations(verb: str) -> None:
    argument, call = VERBS[verb]
    with pytest.raises(DataError) as caught:
        call(make_trainer(max_recompiles=0), Follow(), of_length(5, 6))
    for word in (argument, "float32[4, 5]", "float32[4, 6]"):
        assert word in str(caught.value)


@pytest.mark.parametrize(("shapes", "warnings"), [(1, 0), (3, 0), (4, 1)])
def test_the_third_recompile_is_warned_of_once(shapes: int, warnings: int, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "jaxlit"):
        make_trainer(max_epochs=3).fit(Follow(), of_length(*range(5, 5 + shapes)) * 2)
    found = [r.getMessage() for r in caplog.records if "compile" in r.getMessage()]
    assert len(found) == warnings
    assert all(w in text for text in found for w in ("batch['x']", "float32[4, 7]", "float32[4, 8]", "max_recompiles"))


# The structure ---------------------------------------------------------------------------------------

XY = {"x": np.ones(4, np.float32), "y": np.ones(4, np.float32)}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x": XY["x"]}, ["missing batch['y']"]),
        ({**XY, "z": XY["x"]}, ["new batch['z']"]),
        ({"x": XY["x"], "Y": XY["y"]}, ["missing batch['y']", "new batch['Y']"]),
        ({"x": XY["x"], "y": None}, ["missing batch['y']"]),
        ({"x": XY["x"], "y": {"y": XY["y"]}}, ["missing batch['y']", "new batch['y']['y']"]),
        ((XY["x"], XY["y"]), ["batch['x']", "batch['y']", "batch[0]", "batch[1]"]),
        (XY["x"], ["batch['x']", "batch['y']"]),
    ],
)
@pytest.mark.parametrize("rows", [4, 3])
def test_another_structure_is_refused_by_its_keys_after_the_batches_before_it(
    changed: Any, words: list[str], rows: int
) -> None:
    changed = jax.tree.map(lambda x: x[:rows], changed)
    module, record = Follow(), Record()
    with pytest.raises(DataError) as caught:
        make_trainer(callbacks=[record], max_epochs=3).fit(module, Stream([XY] * 3, [XY, XY, changed]))
    for word in ("train_dataloaders", "structure", *words):
        assert word in str(caught.value)
    assert [note for note in caught.value.__notes__ if "epoch 1, batch 2" in note]
    assert record.hooks.count("on_train_batch_end") == 5
    np.testing.assert_allclose(module.w[...], followed([XY["x"]] * 5), rtol=1e-6)


def test_a_list_in_place_of_a_tuple_is_another_structure() -> None:
    x = np.ones(4, np.float32)
    with pytest.raises(DataError, match="structure of the batch changed"):
        make_trainer().fit(Follow(), Stream([(x, x), [x, x]]))


def test_the_order_of_keys_is_no_structure() -> None:
    trainer = make_trainer(max_recompiles=0)
    trainer.fit(Follow(), [XY, dict(reversed(XY.items()))])
    assert trainer.global_step == 2


# Scalars ---------------------------------------------------------------------------------------------

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
    trainer = make_trainer(strategy=strategy, max_recompiles=1)
    with compiles() as compiled:
        trainer.fit(module, batches, batches)
    assert sum("train_step" in name for name in compiled) == 2
    np.testing.assert_allclose(module.w[...], followed(expected), rtol=1e-6)
    np.testing.assert_allclose(trainer.callback_metrics["mean"], np.concatenate(expected).mean(), rtol=1e-6)
    found: Any = trainer.predict(module, batches)
    assert [p["y"].tolist() for p in found] == [e.tolist() for e in expected]


def test_a_python_number_beyond_int32_is_refused_in_a_later_batch_too() -> None:
    with pytest.raises(DataError, match=rf"batch\['scale'\].*{2**31}"):
        make_trainer().fit(Follow(), [good(0) | {"scale": 1}, good(1) | {"scale": 2**31}])


def test_a_batch_of_scalars_alone_is_refused() -> None:
    with compiles() as compiled, pytest.raises(DataError, match="no array with rows"):
        make_trainer().fit(Follow(), [{"x": 1.0, "scale": np.float32(2)}])
    assert compiled == []
