"""What several processes must have in common about the batches of one loader."""

import numpy as np
import pytest
from kit.batches import sized
from kit.threads import as_processes

import jaxlit as jl
from jaxlit.core.replica import num_rows
from jaxlit.data.batch_validator import Agreement
from jaxlit.errors import DataError, ProcessError
from jaxlit.strategies.base import ReplicatedBatch

ROWS = sized(48)[0]


def cut(*sizes, first=0, step=1):
    """Return every process's rows in batches of these sizes."""
    ends = np.cumsum(sizes)
    mine = {key: x[first::step] for key, x in ROWS.items()}
    return [{key: x[end - n : end] for key, x in mine.items()} for n, end in zip(sizes, ends, strict=True)]


def agreed(monkeypatch, make, divisor=8):
    """Return what the agreements of two processes make of their loaders, or their errors."""

    def work(index):
        loader = make(index)
        agreement, batches = (
            Agreement(loader, "the loader", False, lambda batch: num_rows(batch) % divisor == 0),
            [*loader],
        )
        result = []
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


CASES = {
    "same rows": (lambda index: cut(8, 8), ("every process reads the same rows", "shard_options")),
    "dtypes": (
        lambda i: [b | {"x": b["x"].astype(f"float{32 - 16 * i}")} for b in cut(8, first=i, step=2)],
        ("batch['x']", "float16[3]"),
    ),
    "structure": (
        lambda i: [b | ({"more": b["y"]} if i else {}) for b in cut(8, first=i, step=2)],
        ("batch['more']", "nothing"),
    ),
    "row shapes": (
        lambda i: [b | {"x": b["x"][:, : 3 - i]} for b in cut(8, first=i, step=2)],
        ("batch['x']", "float32[3]", "float32[2]"),
    ),
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
