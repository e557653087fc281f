"""Batches on their way to the step: what is refused, stays on the host or compiles again, and what processes share."""

import logging
from dataclasses import make_dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from kit.batches import Stream, sized
from kit.by_hand import mean
from kit.compiles import compiles
from kit.journal import HOOKS
from kit.modules import module
from kit.refusals import refuses, warnings_of
from kit.threads import as_processes
from kit.trainers import BARE, FOUR, STRATEGIES, make_trainer, thinned

import jaxlit as jl
from jaxlit.core.replica import num_rows
from jaxlit.data.batch_validator import Agreement
from jaxlit.errors import ArgumentTypeError, DataError, ProcessError
from jaxlit.strategies.base import ReplicatedBatch


def target(self, batch):
    return batch["x"].astype(jnp.float32) + batch.get("scale", 0) if isinstance(batch, dict) else batch[0]


def follow(**methods):
    """Return a `Mean` of the targets of its batches, which logs and predicts them as they are."""
    given = {
        "error": lambda self, batch: self.target(batch) - self.w[0],
        "validation": lambda self, batch: self.log("mean", jnp.mean(self.target(batch))),
        "test": lambda self, batch: self.log("mean", jnp.mean(self.target(batch))),
        "predict": lambda self, batch: {"y": self.target(batch)},
    }
    return module(**({"target": target} | given | methods))


def assert_followed(made, targets):
    np.testing.assert_allclose(made.w[0], mean([[np.mean(np.asarray(x, np.float64))] for x in targets]), rtol=1e-6)


class Record(jl.Callback):
    def __init__(self):
        self.hooks, self.batches = [], {}

    def put(self, name, args):
        self.hooks.append(name)
        if "_batch_" in name:
            self.batches.setdefault(name, []).append(args[name.endswith("_end")])


for _name in [name for name in HOOKS if name.startswith("on_") and name != "on_log"]:
    setattr(Record, _name, lambda self, trainer, module, *args, name=_name: self.put(name, args))


def trainer_of(*callbacks, **arguments):
    """Return a Trainer without files: their writers would compile, and look at arrays, as well."""
    return make_trainer(*callbacks, **({"num_sanity_val_steps": 0} | BARE | arguments))


# By name: the argument that messages name, and how a loader gets there.
VERBS = {
    "fit": ("Trainer.fit(train_dataloaders=...)", lambda t, m, x: t.fit(m, x)),
    "fit with val": ("Trainer.fit(val_dataloaders=...)", lambda t, m, x: t.fit(m, [good(0)], x)),
    "validate": ("Trainer.validate(dataloaders=...)", lambda t, m, x: t.validate(m, x)),
    "test": ("Trainer.test(dataloaders=...)", lambda t, m, x: t.test(m, x)),
    "predict": ("Trainer.predict(dataloaders=...)", lambda t, m, x: t.predict(m, x)),
}


def good(k, rows=4):
    return {"x": np.arange(rows, dtype=np.float32) + 10 * k, "id": np.zeros(rows, np.int64)}


def replaced(**leaves):
    return {**good(0), **leaves}


def refused(words, note, call):
    """Check that a batch is refused with all the words, and where it is told."""
    error = refuses(DataError, call)
    assert [word for word in words if word not in str(error)] == [], str(error)
    assert any(note in x for x in error.__notes__), error.__notes__


X, ID = "batch['x']", "batch['id']"
BAD = {
    "ragged": (replaced(id=np.zeros(3, np.int64)), ("leading sizes differ", X, "4", ID, "3")),
    "int64": (replaced(id=np.array([0, 1, 2, 2**31])), (ID, "int64", str(2**31), "int32", "wrap around")),
    "int64 down": (replaced(id=np.array([0, 1, 2, -(2**31) - 1])), (ID, "int64", "int32", str(-(2**31) - 1))),
    "uint64": (replaced(id=np.array([0, 1, 2, 2**32], np.uint64)), (ID, "uint64", str(2**32), "uint32")),
    "python int": (replaced(id=2**31), (ID, str(2**31), "int32")),
    "float64": (replaced(x=np.array([np.inf, 2, -1e300, 0])), (X, "float64", "1e+300", "float32", "become infinite")),
    "byte order": (replaced(x=np.zeros(4, ">f4")), (X, ">f4")),
    "long double": (replaced(x=np.zeros(4, np.longdouble)), (X, np.dtype(np.longdouble).name)),
    "empty": ({"x": np.zeros(0, np.float32), "id": np.zeros(0, np.int64)}, ("0 rows", X, ID)),
    "strings": (replaced(id=np.array(list("abcd"))), (ID, "<U1[4]", "host_keys")),
    "bytes": (replaced(id=np.array([b"a"] * 4)), (ID, "host_keys")),
    "a str": (replaced(split="train"), ("batch['split'] holds 'train'", "host_keys")),
    "list of strings": (replaced(id=list("abcd")), ("batch['id'][0]", "'a'", "host_keys")),
    "list of numbers": (replaced(id=[1, 2, 3, 4]), (f"{ID} is a list of Python numbers", "np.asarray")),
    "objects": (replaced(id=np.array([object()] * 4)), (ID, "host_keys")),
    "dates": (replaced(id=np.array(["2020-01-01"] * 4, "datetime64[D]")), (ID, "datetime64", "host_keys")),
}
NOTHING = {"nothing": ({}, ("no array",)), "none": (None, ("no array",)), "a class": (Record, ("no device takes",))}
NOTHING |= {"a dataclass": (make_dataclass("Rows", ["x"])(np.zeros(4)), ("Decorate Rows", "register_dataclass"))}
NOTHING |= {"scalars": ({"x": 1.0, "scale": np.float32(2)}, ("These are rows: batch them",))}


@pytest.mark.parametrize("name", [*BAD, *NOTHING])
def test_a_bad_first_batch_is_refused_before_compile_and_hooks(name):
    batch, words = (BAD | NOTHING)[name]
    for k, (argument, call) in enumerate(VERBS.values()):
        if k and name not in ("ragged", "int64"):  # the same eyes look at each loader
            break
        record, made = Record(), follow()
        with compiles() as compiled:
            refused((argument, *words), "epoch 0, batch 0", lambda: call(trainer_of(record), made, [batch, good(1)]))  # noqa: B023
        assert (compiled, record.hooks) == ([], ["on_exception"])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_later_batch_is_refused_after_those_before_it(name):
    (batch, words), made, record, first = BAD[name], follow(), Record(), [good(k) for k in range(3)]
    trainer, loader = trainer_of(record, max_epochs=3), Stream(first, [*first[:2], batch])
    refused(("Trainer.fit(train_dataloaders=...)", *words), "epoch 1, batch 2", lambda: trainer.fit(made, loader))
    assert (trainer.global_step, record.hooks.count("on_train_batch_end")) == (5, 5)
    assert_followed(made, [b["x"] for b in (*first, *first[:2])])


@pytest.mark.parametrize("verb", [*VERBS][1:])
def test_a_bad_later_batch_of_an_evaluation_is_refused(verb):
    argument, call = VERBS[verb]
    batch, words = BAD["int64"]
    refused((argument, *words), "batch 2", lambda: call(trainer_of(), follow(), [good(0), good(1), batch]))
    words = (argument, "float32[4, 5]", "float32[4, 6]")
    refused(words, "batch 1", lambda: call(trainer_of(max_recompiles=0), follow(), of_length(5, 6)))


def test_64_bit_numbers_that_fit_reach_steps_unchanged():
    for strategy, dtype in (("single", np.int64), ("shard_map", np.float64)):
        batches, made, record = [{"x": np.arange(n).astype(dtype) + n} for n in (8, 16, 3)], follow(), Record()
        trainer_of(record, strategy=strategy).fit(made, batches)
        assert_followed(made, [b["x"] for b in batches])
        assert [b["x"].dtype for b in record.batches["on_train_batch_end"]] == [dtype] * 3
    raw, limits = follow(predict=lambda self, batch: batch["x"] + 0), np.iinfo(np.int32)
    (result,) = trainer_of().predict(raw, [{"x": np.array([limits.min, limits.max, -1, 0])}])
    assert result.dtype == np.int32 and result.tolist() == [limits.min, limits.max, -1, 0]
    for dtype in (np.bool_, np.uint8, jnp.bfloat16):
        (result,) = trainer_of().predict(raw, [{"x": np.ones(4, dtype)}])
        assert result.tolist() == [1] * 4


def nan_at(*where, dtype):
    x = np.zeros((4, 3), dtype)
    x[where] = np.nan
    return {"x": x}


@pytest.mark.parametrize("verb", VERBS)
def test_debug_refuses_nan_in_later_batches(verb):
    dtype = dict(zip(VERBS, (np.float32, np.float64, np.float16, jnp.bfloat16, np.float32), strict=True))[verb]
    (argument, call), record, fine = VERBS[verb], Record(), {"x": np.zeros((4, 3), dtype)}
    made = follow()  # Outside the block: what makes its weights is compiled too, once a process.
    run = lambda loader, *callbacks: call(trainer_of(*callbacks, debug=True), made, loader)  # noqa: E731
    with compiles() as compiled:
        refused((argument, "batch['x'][2, 1] is NaN"), "batch 0", lambda: run([nan_at(2, 1, dtype=dtype)], record))
    assert (compiled, record.hooks) == ([], ["on_exception"])
    refused((argument, "batch['x'][3, 0] is NaN"), "batch 1", lambda: run([fine, nan_at(3, 0, dtype=dtype)]))


def repair(self, batch, dataloader_idx):
    rows = min(len(batch["x"]), len(batch["id"]))
    return {"x": np.clip(batch["x"][:rows], -100, 100).astype(np.float32), "rows": np.ones(rows, np.int32)}


@pytest.mark.parametrize(("name", "owner"), [("ragged", "data"), ("int64", "module"), ("strings", "data")])
def test_what_on_before_batch_transfer_repairs_is_not_refused(name, owner):
    batches, record = [BAD[name][0], good(1), BAD[name][0]], Record()
    members = {"on_before_batch_transfer": repair}
    made = follow(**(members if owner == "module" else {}))
    loaders = {"train_dataloader": lambda self: batches, "val_dataloader": lambda self: batches}
    data = type("Data", (jl.DataModule,), loaders | (members if owner == "data" else {}))()
    trainer_of(record).fit(made, data)
    expected = [repair(None, batch, 0)["x"] for batch in batches]
    assert_followed(made, expected)
    for hook_name in ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_end"):
        for batch, x in zip(record.batches[hook_name], expected, strict=True):
            np.testing.assert_array_equal(batch["x"], x)


HOST_KEYS = ("name", "object", "big", "notes")


def labelled(*sizes):
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


def assert_labels(result, given):
    for batch, expected in zip(result, given, strict=True):
        for key in ("name", "object", "big"):
            assert (key, batch[key].dtype) == (key, expected[key].dtype)
            np.testing.assert_array_equal(batch[key], expected[key])
        assert batch["notes"] == expected["notes"]


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "single", "shard_map", full=FOUR))
def test_host_keys_reach_hooks_and_predictions_unchanged(strategy):
    batches, record, made = labelled(8, 5), Record(), follow()
    trainer = trainer_of(record, strategy=strategy, host_keys=HOST_KEYS)
    trainer.fit(made, batches, batches)
    predicted = trainer.predict(made, batches)
    stages = ("train", "validation", "predict")
    assert set(record.batches) == {f"on_{stage}_batch_{when}" for stage in stages for when in ("start", "end")}
    for result in record.batches.values():
        assert_labels(result, batches)
        assert [b["x"].tolist() for b in result] == [b["x"].tolist() for b in batches]
    assert_labels(predicted, batches)
    assert [p["y"].tolist() for p in predicted] == [b["x"].tolist() for b in batches]
    assert all(set(p) == {"y", *HOST_KEYS} for p in predicted)
    assert_followed(made, [b["x"] for b in batches])


def test_host_keys_join_only_dict_predictions():
    plain = follow(predict=lambda self, batch: (batch["x"] * 2, batch["x"] + 1))
    batches = labelled(8, 5)
    for result, batch in zip(trainer_of(host_keys=HOST_KEYS).predict(plain, batches), batches, strict=True):
        assert type(result) is tuple
        np.testing.assert_array_equal(result, (batch["x"] * 2, batch["x"] + 1))
    named = follow(predict=lambda self, batch: {"name": batch["x"] + 0})
    (result,) = trainer_of(host_keys=HOST_KEYS).predict(named, labelled(8))
    assert result["name"].tolist() == [*range(8)]


def test_a_step_does_not_see_host_keys():
    keys, record = [], Record()
    made = follow(target=lambda self, batch: keys.append({*batch}) or batch["x"])
    values = [{2: "two", "a": 1}, {"b", "a"}, iter("ab"), lambda: None, np.array(["n"]), np.array(["nn"] * 2)]
    batches = [{"x": good(k)["x"], "any": value} for k, value in enumerate(values)]
    trainer_of(record, host_keys=["any"], max_recompiles=0).fit(made, Stream(batches))
    assert keys and all(seen == {"x"} for seen in keys)
    assert [str(b["any"]) for b in record.batches["on_train_batch_end"]] == [str(value) for value in values]


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "single", "shard_map", full=FOUR))
def test_an_index_in_host_keys_is_none_in_the_step(kind, strategy):
    def step(self, batch):
        x, names, y = batch
        seen.append((type(batch), names))
        return ((x - y - self.w[...]) ** 2).mean()

    seen, record = [], Record()
    batches = [kind((b["x"], b["name"], b["x"] * 0)) for b in labelled(8, 5)]
    made = module(training=step, predict=lambda self, batch: {"x": batch[0] + 0})
    trainer = trainer_of(record, strategy=strategy, host_keys=(1,))
    trainer.fit(made, batches)
    assert set(seen) == {(kind, None)}
    for result in (record.batches["on_train_batch_start"], record.batches["on_train_batch_end"]):
        assert [b[1].tolist() for b in result] == [b[1].tolist() for b in batches]
    assert [p["1"].tolist() for p in trainer.predict(made, batches)] == [b[1].tolist() for b in batches]


def test_a_text_in_a_tuple_is_refused_with_its_place():
    batch = (good(0)["x"], (good(0)["x"], np.array(list("abcd"))))
    words = ("batch[1][1] holds <U1[4]", "Pass Trainer(host_keys=(1,)) to keep batch[1] on the host,")
    refused(words, "batch 0", lambda: trainer_of().fit(follow(), Stream([batch])))


def test_host_keys_that_a_batch_lacks_are_refused():
    for verb, k in (("fit", 0), ("fit", 2), ("validate", 2), ("predict", 0)):
        argument, call = VERBS[verb]
        batches = [good(0) | {"names": np.array(list("abcd"))} for _ in range(3)]
        batches[k] = good(0) | {"nmaes": np.array(list("abcd"))}
        words = (argument, "'names'", "host_keys", "Did you mean 'nmaes'?")
        refused(words, f"batch {k}", lambda: call(trainer_of(host_keys=("names",)), follow(), batches))  # noqa: B023
    for batch in ((np.ones(4, np.float32),), np.ones(4, np.float32)):
        words = ("train_dataloaders", "host_keys", type(batch).__name__)
        refused(words, "batch 0", lambda: trainer_of(host_keys=("name",)).fit(follow(), Stream([batch])))  # noqa: B023
    for value in ("name", b"name", 3, None, [True], [None], {"name": 1}, True):
        error = refuses(ArgumentTypeError, lambda: trainer_of(host_keys=value), r"Trainer\(host_keys=...\)")  # noqa: B023
        assert repr(value) in str(error)


def of_length(*lengths):
    return [{"x": np.full((4, n), k, np.float32)} for k, n in enumerate(lengths)]


def of_dtype(*dtypes):
    return [{"x": np.full(4, k, dtype)} for k, dtype in enumerate(dtypes)]


@pytest.mark.parametrize(
    ("batches", "words", "allowed"),
    [
        (of_length(5, 6), ["float32[4, 5]", "float32[4, 6]"], 0),
        (of_length(5, 6, 7, 8), [f"float32[4, {n}]" for n in (5, 6, 7, 8)], 2),
        (of_dtype(np.float32, np.float16, np.int32), ["float32[4]", "float16[4]", "int32[4]"], 1),
    ],
)
def test_a_recompile_too_many_is_refused_with_what_changed(batches, words, allowed):
    made, record = follow(), Record()
    seen = batches[: allowed + 1] * 3  # each of these again costs nothing
    trainer = trainer_of(record, max_recompiles=allowed)
    told = ("train_dataloaders", X, words[allowed], words[allowed + 1], f"max_recompiles={allowed}")
    with compiles() as compiled:
        refused(told, f"epoch 0, batch {len(seen)}", lambda: trainer.fit(made, [*seen, batches[allowed + 1]]))
    assert record.hooks.count("on_train_batch_end") == len(seen)
    assert sum("train_step" in name for name in compiled) == allowed + 1, "as many as allowed pass"
    assert_followed(made, [b["x"] for b in seen])


def test_the_log_and_the_trainer_name_what_compiles_again(caplog):
    trainer = trainer_of()
    with caplog.at_level(logging.INFO, "jaxlit"):
        trainer.fit(follow(), of_length(5, 6))
    change = f"{X} was float32[4, 5], is float32[4, 6]"
    argument = "Trainer.fit(train_dataloaders=...)"
    assert trainer.batch_changes == {argument: change}
    assert caplog.messages.count(f"{argument}: the step is compiled again: {change}.") == 1


def test_equal_step_dtypes_and_key_order_do_not_recompile():
    for wide, narrow in ((np.int64, np.int32), (np.float64, np.float32)):
        batches, made = of_dtype(wide, narrow, wide, narrow), follow()
        with compiles() as compiled:
            trainer_of(max_recompiles=0).fit(made, batches)
        assert sum("train_step" in name for name in compiled) == 1
        assert_followed(made, [b["x"] for b in batches])
    trainer = trainer_of(max_recompiles=0)
    trainer.fit(follow(), [XY, dict(reversed(XY.items()))])
    assert trainer.global_step == 2


def test_recompiles_count_a_tail_once_for_each_loader():
    trainer = trainer_of(max_recompiles=1, max_epochs=4)
    trainer.fit(follow(), jl.ArrayLoader({"x": np.arange(10, dtype=np.float32)}, 4))
    assert trainer.global_step == 12
    trainer = trainer_of(max_recompiles=0, max_epochs=2)
    trainer.fit(follow(), of_length(3, 3), [of_length(4, 4), of_length(5)])
    assert trainer.global_step == 4


def test_the_third_recompile_is_warned_of_once(caplog):
    trainer_of(max_epochs=3).fit(follow(), of_length(5, 6, 7, 8) * 2)
    (told,) = warnings_of(caplog)
    assert all(word in told for word in (X, "float32[4, 7]", "float32[4, 8]", "max_recompiles"))


XY = {"x": np.ones(4, np.float32), "y": np.ones(4, np.float32)}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x": XY["x"]}, ["batch['y'] was float32[4], is nothing"]),
        ({"x": XY["x"], "Y": XY["y"]}, ["batch['y'] was float32[4], is nothing", "batch['Y'] was nothing"]),
        ({"x": XY["x"], "y": None}, ["batch['y'] was float32[4], is nothing"]),
        ({"x": XY["x"], "y": {"y": XY["y"]}}, ["batch['y'] was float32[4]", "batch['y']['y'] was nothing"]),
        ((XY["x"], XY["y"]), ["batch['x']", "batch['y']", "batch[0]", "batch[1]"]),
        (XY["x"], ["batch['x']", "batch['y']"]),
    ],
)
def test_another_structure_is_refused_by_its_keys(changed, words):
    made, record = follow(), Record()
    loader, trainer = Stream([XY] * 3, [XY, XY, changed]), trainer_of(record, max_epochs=3)
    refused(("train_dataloaders", "structure", *words), "epoch 1, batch 2", lambda: trainer.fit(made, loader))
    assert record.hooks.count("on_train_batch_end") == 5
    assert_followed(made, [XY["x"]] * 5)


SCALARS = {"float32": np.float32, "float64": np.float64, "int64": np.int64, "float": float, "int": int}
SCALARS |= {"bool": lambda v: np.bool_(v % 2), "0-d array": lambda v: np.array(v, np.int16)}


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "single", "shard_map", full=FOUR))
def test_scalars_of_a_batch_apply_to_every_row(strategy, caplog):
    sizes = (8, 8, 3, 8, 3)  # a size that divides, and one that does not
    scales = [{kind: make(3 * k + i) for i, (kind, make) in enumerate(SCALARS.items())} for k in range(len(sizes))]
    batches = [{"x": np.arange(n, dtype=np.float32), "scale": scale} for n, scale in zip(sizes, scales, strict=True)]
    expected = [b["x"] + sum((i + 1) * float(b["scale"][kind]) for i, kind in enumerate(SCALARS)) for b in batches]

    def scaled(self, batch):
        assert all(value.shape == () for value in batch["scale"].values())
        return batch["x"] + sum((i + 1) * batch["scale"][kind] for i, kind in enumerate(SCALARS))

    made, trainer = follow(target=scaled), trainer_of(strategy=strategy, max_recompiles=1)
    with compiles() as compiled:
        trainer.fit(made, batches, batches)
    assert sum("train_step" in name for name in compiled) == 2
    assert_followed(made, expected)
    np.testing.assert_allclose(trainer.callback_metrics["mean"], np.concatenate(expected).mean(), rtol=1e-6)
    assert [p["y"].tolist() for p in trainer.predict(made, batches)] == [e.tolist() for e in expected]
    assert "is cast to" not in caplog.text


ROWS = sized(48)[0]


def cut(*sizes, first=0, step=1):
    """Return every process's rows in batches of these sizes."""
    ends = np.cumsum(sizes)
    mine = {key: x[first::step] for key, x in ROWS.items()}
    return [{key: x[end - n : end] for key, x in mine.items()} for n, end in zip(sizes, ends, strict=True)]


def agreed(monkeypatch, make):
    """Return what the agreements of two processes make of their loaders, or their errors."""

    def work(index):
        loader = make(index)
        agreement = Agreement(loader, "the loader", False, lambda batch: num_rows(batch) % 8 == 0)
        batches, result = [*loader], []
        for k, batch in enumerate(batches):
            part = {key: x[len(x) // 2 * index :][: len(x) - len(x) // 2] for key, x in batch.items()}
            mine = part if type(loader) is jl.ArrayLoader else batch  # of which the source takes this process's rows
            result.append(agreement(mine, k + 1, last=k == len(batches) - 1))
        return result

    return as_processes(monkeypatch, work)


def test_batches_that_do_not_divide_are_joined_in_process_order(monkeypatch):
    for result in agreed(monkeypatch, lambda index: cut(8, 8, 5 + index, first=index, step=2)):
        shapes, parts = zip(*result, strict=True)
        assert [x["x"].shape for x in shapes] == [(16, 3), (16, 3), (11, 3)]
        assert [type(part) for part in parts] == [dict, dict, ReplicatedBatch]
        whole = np.concatenate([ROWS["x"][0::2][16:21], ROWS["x"][1::2][16:22]])
        np.testing.assert_array_equal(parts[2].batch["x"], whole)


def test_rows_that_are_all_alike_are_taken(monkeypatch):
    for result in agreed(monkeypatch, lambda index: [{"x": np.ones((8, 3))}] * 2):
        assert [shapes["x"].shape for shapes, _ in result] == [(16, 3)] * 2


def half(index, **changes):
    """Return a process's half of the rows in one batch, with some arrays changed."""
    (batch,) = cut(8, first=index, step=2)
    return [batch | {key: change(batch.get(key)) for key, change in changes.items()}]


CASES = {
    "same rows": (lambda index: cut(8, 8), ("every process reads the same rows", "shard_options")),
    "dtypes": (lambda i: half(i, x=lambda x: x.astype(f"float{32 - 16 * i}")), ("batch['x']", "float16[3]")),
    "structure": (lambda i: half(i, **({"more": lambda _: np.ones(8)} if i else {})), ("batch['more']", "nothing")),
    "row shapes": (lambda i: half(i, x=lambda x: x[:, : 3 - i]), ("batch['x']", "float32[3]", "float32[2]")),
    "rows of a batch": (lambda i: cut(8 - 4 * i, 8, first=i, step=2), ("rows of the first one", "rows [8, 4]")),
    "number of batches": (lambda i: cut(*[8] * (3 - i), first=i, step=2), ("number of batches", "batches [3, 2]")),
    "arrays": (lambda i: jl.ArrayLoader({k: x[i::2] for k, x in ROWS.items()}, 8), ("the loader differs", "the data")),
    "seeds": (lambda i: jl.ArrayLoader(ROWS, 8, shuffle=True, seed=i), ("the loader differs", "seed")),
}


@pytest.mark.parametrize("case", CASES)
def test_loaders_that_do_not_match_are_refused_everywhere(case, monkeypatch):
    make, words = CASES[case]
    for error in agreed(monkeypatch, make):
        assert type(error) is DataError and str(error).startswith("the loader: ")
        assert [word for word in words if word not in str(error)] == [], str(error)


def test_other_rows_or_lengths_in_mid_epoch_are_refused(monkeypatch):
    _, error = agreed(monkeypatch, lambda i: cut(8, 8 - 4 * i, 8, first=i, step=2))
    assert type(error) is DataError and "4 rows in process 1, those before had 8" in str(error)

    class Unknown(list):
        __len__ = None

    for error in agreed(monkeypatch, lambda i: Unknown(cut(*[8] * (3 - i), first=i, step=2))):
        assert type(error) is ProcessError and "number of batches" in str(error)
