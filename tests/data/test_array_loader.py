"""`jl.ArrayLoader`: the order of its rows, its memory, and where it stands."""

import itertools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit.batches import rows_of
from kit.refusals import refuses
from kit.scale import Scale
from kit.trainers import BARE, make_trainer, thinned

import jaxlit as jl
from jaxlit.errors import DataError, JaxlitError


def array_loader(rows=10, batch_size=4, **arguments):
    return jl.ArrayLoader({"x": np.arange(rows, dtype=np.float32)}, batch_size, **arguments)


def epoch_of(loader, epoch):
    loader.set_epoch(epoch)
    return rows_of(loader)


@pytest.mark.parametrize(
    ("rows", "drop", "sizes"), [(10, False, [4, 4, 2]), (10, True, [4, 4]), (8, False, [4, 4]), (3, True, [])]
)
def test_it_keeps_the_order_without_shuffle_and_knows_its_length(rows, drop, sizes):
    loader = array_loader(rows, drop_remainder=drop)
    assert len(loader) == len(sizes) and [len(batch["x"]) for batch in loader] == sizes
    assert rows_of(loader) == [*range(sum(sizes))]
    assert [len(batch["x"]) for batch in array_loader(rows, drop_remainder=drop, shuffle=True)] == sizes


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_batch_k_of_epoch_e_is_numpys_permutation_of_seed_and_e(epoch):
    loader = jl.ArrayLoader(np.arange(50), 8, shuffle=True, seed=3)
    order = np.random.default_rng((3, epoch)).permutation(50)
    expected = [order[i : i + 8].tolist() for i in range(0, 50, 8)]
    for _ in range(2):  # begun again, it is the first batch that comes
        loader.set_epoch(epoch)
        next(iter(loader))
        assert [batch.tolist() for batch in loader] == expected


@pytest.mark.parametrize(
    "arrays",
    [
        np.arange(6),
        {"a": {"b": np.arange(6)}, "c": (np.arange(12).reshape(6, 2), np.arange(6) > 2)},
        (jnp.arange(6), {"x": jnp.arange(12.0).reshape(6, 2)}),
    ],
)
def test_batches_keep_the_structure_and_rows_together(arrays):
    batches = list(jl.ArrayLoader(arrays, 4, shuffle=True, seed=1))
    assert all(jax.tree.structure(batch) == jax.tree.structure(arrays) for batch in batches)
    assert {type(x) for x in jax.tree.leaves(batches)} == {np.ndarray}
    order = np.concatenate([jax.tree.leaves(batch)[0] for batch in batches])
    for whole, *parts in zip(jax.tree.leaves(arrays), *map(jax.tree.leaves, batches), strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), np.asarray(whole)[order])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_batches_are_memory_of_their_own(make, shuffle):
    arrays = make(np.arange(12.0, dtype=np.float32))
    batches = list(jl.ArrayLoader(arrays, 4, shuffle=shuffle))
    for one, other in itertools.combinations([np.asarray(arrays), *batches], 2):
        assert not np.shares_memory(one, other)
    for batch in batches:
        batch[:] = -1.0
    assert np.asarray(arrays).tolist() == list(range(12))


class Column:
    def __init__(self, values, labels):
        self.values, self.labels = values, labels
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, index):
        return self.values[[int(np.flatnonzero(self.labels == i)[0]) for i in np.atleast_1d(index)]]

    def __array__(self, dtype=None, copy=None):
        return self.values

    def to_numpy(self):
        return self.values


def test_a_pandas_column_keeps_its_row_order():
    x = np.arange(8)
    for batch in jl.ArrayLoader({"x": x, "y": Column(10 * x, labels=x[::-1])}, 3, shuffle=True):
        np.testing.assert_array_equal(batch["y"], 10 * batch["x"])


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_large_memory_map_is_read_batch_by_batch(shuffle):
    path, count = Path("large.npy"), 1 << 18
    large = np.lib.format.open_memmap(path, "w+", np.float32, (count, 1 << 15))  # 32 GiB of holes
    assert path.stat().st_size > 32 << 30 > 100 * 512 * path.stat().st_blocks
    loader = jl.ArrayLoader({"x": large}, 8, shuffle=shuffle, seed=1)
    order = np.random.default_rng((1, 0)).permutation(count) if shuffle else np.arange(count)
    large[order[:24], 5] = np.arange(24)
    before = resident_bytes()
    batches = [batch["x"] for batch in itertools.islice(loader, 3)]
    loader.state_dict()  # whose fingerprint looks at rows
    assert resident_bytes() - before < 1 << 30 and {type(x) for x in batches} == {np.ndarray}
    assert [x[:, 5].tolist() for x in batches] == [[*range(0, 8)], [*range(8, 16)], [*range(16, 24)]]


@pytest.mark.parametrize(("taken", "shuffle"), [(0, True), (1, False), (2, True), (3, True)])
def test_it_continues_exactly_where_its_state_was_taken(taken, shuffle):
    loader, other = array_loader(shuffle=shuffle), array_loader(shuffle=shuffle)
    loader.set_epoch(2)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = rows_of(batches)
    other.load_state_dict(state)
    other.set_epoch(2)  # what the Trainer does
    assert rows_of(other) == expected
    assert rows_of(other) == epoch_of(array_loader(shuffle=shuffle), 2), "iterated again, it is whole"
    assert epoch_of(other, 3) == epoch_of(array_loader(shuffle=shuffle), 3)


def test_it_refuses_the_state_of_another():
    others = [array_loader(11), array_loader(shuffle=True), jl.ArrayLoader({"x": np.arange(10)}, 4)]
    others += [jl.ArrayLoader({"other": np.arange(10, dtype=np.float32)}, 4)]
    for other in others:
        refuses(DataError, lambda other=other: other.load_state_dict(array_loader().state_dict()), "other data")
    changed = jl.ArrayLoader({"x": 1 + np.arange(10, dtype=np.float32)}, 4)
    refuses(DataError, lambda: changed.load_state_dict(array_loader().state_dict()), "other data: the data differ[.]")


@pytest.mark.parametrize(
    ("arrays", "batch_size", "message"),
    [
        ({}, 4, "a pytree of arrays"),
        ({"a": 1.0}, 4, r"same number of rows, got {'a': 1\.0}"),
        ({"a": np.float32(1)}, 4, "first dim is the row"),
        ({"a": {"b": "text"}}, 4, "got {'a': {'b': 'text'}}"),
        ({"a": np.ones(3), "b": np.ones(4)}, 4, r"'a': float64\[3\], 'b': float64\[4\]"),
        *[(np.ones(3), x, f"batch_size=.*an int of at least 1, got {x}") for x in (0, -1, 2.0, True, None)],
    ],
)
def test_it_refuses(arrays, batch_size, message):
    refuses(JaxlitError, lambda: jl.ArrayLoader(arrays, batch_size), message)


LAYOUTS = [("single", 1), *itertools.product(("ddp", "fsdp", "zero1", "shard_map", "pmap", "replicas"), (1, 3, 8))]
SIZES = [*itertools.product((1, 7, 63, 65, 1797), (8, 64))]  # rows, and those of a batch


@pytest.mark.parametrize(
    ("layout", "size"),
    thinned(itertools.product(LAYOUTS, SIZES), full=zip(LAYOUTS[::2], SIZES, strict=True)),
)
def test_any_number_of_rows_trains_and_predicts_like_numpy(layout, size):
    (strategy, devices), (rows, batch_size), lr = layout, size, 0.5
    x = np.random.default_rng(rows).normal(size=(rows, 3)).astype(np.float32)
    x[-1] = 1000.0  # outweighs the others: left out, doubled or padded, it shows
    loader, model = jl.ArrayLoader({"x": x, "row": np.arange(rows, dtype=np.int32)}, batch_size), Scale(lr=lr)
    trainer = make_trainer(strategy=strategy, devices=devices, **BARE)
    trainer.fit(model, loader)
    trained, (validated,) = dict(trainer.callback_metrics), trainer.validate(Scale(), loader)
    predicted = trainer.predict(Scale(), loader)
    assert [len(batch["row"]) for batch in predicted] == [min(batch_size, rows - k) for k in range(0, rows, batch_size)]
    assert [i for batch in predicted for i in batch["row"]] == [*range(rows)]
    x, w = x.astype(np.float64), np.arange(1.0, 4.0, dtype=np.float32)
    for start in range(0, rows, batch_size):  # an epoch of gradient descent on the mean of w * x
        w = (w - np.float32(lr) * x[start : start + batch_size].mean(0) / 3).astype(np.float32)
    exact = {"mean": x.mean(), "sum": x.sum(), "min": x.min(), "max": x.max()}
    pairs = [(model.w[...], w), (np.concatenate([batch["y"] for batch in predicted]), np.arange(1.0, 4.0) * x)]
    assert trained.keys() == validated.keys() == exact.keys()
    pairs += [(result[name], value) for result in (trained, validated) for name, value in exact.items()]
    for result, expected in pairs:
        assert (np.abs(result - expected) / np.maximum(np.abs(expected), 1)).max() <= 1e-6
