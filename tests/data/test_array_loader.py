"""`jl.ArrayLoader`: the order of its rows, its memory, and where it stands."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlit as jl
from jaxlit.errors import ArgumentError, DataError


def array_loader(rows: int = 10, batch_size: int = 4, **arguments: Any) -> jl.ArrayLoader:
    return jl.ArrayLoader({"id": np.arange(rows, dtype=np.int32)}, batch_size, **arguments)


def ids_of(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch["id"]]


def epoch_of(loader: jl.ArrayLoader, epoch: int) -> list[int]:
    loader.set_epoch(epoch)
    return ids_of(loader)


def test_it_keeps_the_order_without_shuffle_and_drops_a_remainder_when_asked() -> None:
    assert [ids_of([batch]) for batch in array_loader()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(batch["id"]) for batch in array_loader(drop_remainder=True, shuffle=True)] == [4, 4]


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_batch_k_of_epoch_e_is_numpys_permutation_of_seed_and_e(epoch: int) -> None:
    loader = jl.ArrayLoader(np.arange(50), 8, shuffle=True, seed=3)
    order = np.random.default_rng((3, epoch)).permutation(50)
    expected = [order[i : i + 8].tolist() for i in range(0, 50, 8)]
    for _ in range(2):  # begun again, it is the first batch that comes
        loader.set_epoch(epoch)
        next(iter(loader))
        assert [batch.tolist() for batch in loader] == expected


def test_orders_differ_between_epochs_and_seeds() -> None:
    orders = [epoch_of(array_loader(100, shuffle=True, seed=seed), e) for seed in range(3) for e in range(3)]
    assert len({*map(tuple, orders)}) == 9 and all(sorted(order) == [*range(100)] for order in orders)


@pytest.mark.parametrize(
    ("rows", "batch_size", "drop", "length"), [(10, 4, False, 3), (10, 4, True, 2), (8, 4, False, 2), (3, 4, True, 0)]
)
def test_its_length_is_the_number_of_batches(rows: int, batch_size: int, drop: bool, length: int) -> None:
    loader = array_loader(rows, batch_size, drop_remainder=drop)
    assert len(loader) == len(list(loader)) == length


@pytest.mark.parametrize(
    "arrays",
    [
        np.arange(6),
        (np.arange(6), np.arange(12).reshape(6, 2)),
        {"a": {"b": np.arange(6)}, "c": (np.arange(12).reshape(6, 2), np.arange(6) > 2)},
        (jnp.arange(6), {"x": jnp.arange(12.0).reshape(6, 2)}),
    ],
)
def test_it_keeps_the_structure_and_the_rows_together_as_numpy_arrays(arrays: Any) -> None:
    batches = list(jl.ArrayLoader(arrays, 4, shuffle=True, seed=1))
    assert all(jax.tree.structure(batch) == jax.tree.structure(arrays) for batch in batches)
    assert {type(x) for x in jax.tree.leaves(batches)} == {np.ndarray}
    order = np.concatenate([jax.tree.leaves(batch)[0] for batch in batches])
    for whole, *parts in zip(jax.tree.leaves(arrays), *map(jax.tree.leaves, batches), strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), whole[order])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_batches_are_memory_of_their_own(make: Callable[[Any], Any], shuffle: bool) -> None:
    arrays = make(np.arange(12.0, dtype=np.float32))
    batches = list(jl.ArrayLoader(arrays, 4, shuffle=shuffle))
    for one, other in itertools.combinations([np.asarray(arrays), *batches], 2):
        assert not np.shares_memory(one, other)
    for batch in batches:
        batch[:] = -1.0
    assert np.asarray(arrays).tolist() == list(range(12))


class Column:
    """A column that is indexed by its labels, like pandas'."""

    def __init__(self, values: np.ndarray, labels: np.ndarray) -> None:
        self.values, self.labels = values, labels
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.values[[int(np.flatnonzero(self.labels == i)[0]) for i in np.atleast_1d(index)]]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values

    def to_numpy(self) -> np.ndarray:
        return self.values


def test_a_column_with_labels_keeps_its_rows_beside_those_of_other_arrays() -> None:
    x = np.arange(8)
    for batch in jl.ArrayLoader({"x": x, "y": Column(10 * x, labels=x[::-1])}, 3, shuffle=True):
        np.testing.assert_array_equal(batch["y"], 10 * batch["x"])


# Files ------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_mapped_file_of_many_gigabytes_is_never_read_whole_and_gives_plain_arrays(shuffle: bool) -> None:
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


# Where it stands --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("taken", "shuffle"), [(0, True), (1, False), (2, True), (3, True)])
def test_it_continues_exactly_where_its_state_was_taken_and_gives_whole_epochs_then(taken: int, shuffle: bool) -> None:
    loader, other = array_loader(shuffle=shuffle), array_loader(shuffle=shuffle)
    loader.set_epoch(2)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = ids_of(batches)
    other.load_state_dict(state)
    other.set_epoch(2)  # what the Trainer does
    assert ids_of(other) == expected
    assert ids_of(other) == epoch_of(array_loader(shuffle=shuffle), 2)  # iterated again, it is whole
    assert epoch_of(other, 3) == epoch_of(array_loader(shuffle=shuffle), 3)


@pytest.mark.parametrize(
    "other",
    [
        lambda: array_loader(11),
        lambda: array_loader(10, 5),
        lambda: array_loader(seed=1),
        lambda: array_loader(shuffle=True),
        lambda: array_loader(drop_remainder=True),
        lambda: jl.ArrayLoader({"other": np.arange(10, dtype=np.int32)}, 4),
        lambda: jl.ArrayLoader({"id": np.arange(10, dtype=np.float32)}, 4),
    ],
)
def test_it_refuses_the_state_of_another(other: Any) -> None:
    with pytest.raises(DataError, match="belongs to other data"):
        other().load_state_dict(array_loader().state_dict())


@pytest.mark.parametrize(
    ("arrays", "batch_size", "message"),
    [
        ({}, 4, "a pytree of arrays"),
        ({"a": 1.0}, 4, "a must be an array with rows"),
        ({"a": np.float32(1)}, 4, "a must be an array with rows"),
        ({"a": {"b": "text"}}, 4, "a.b must be an array with rows"),
        ({"a": np.ones(3), "b": np.ones(4)}, 4, r"leading sizes differ.*'a': 3.*'b': 4"),
        *[(np.ones(3), x, f"batch_size.*positive int, got {x}") for x in (0, -1, 2.0, True, None)],
    ],
)
def test_it_refuses(arrays: Any, batch_size: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        jl.ArrayLoader(arrays, batch_size)
