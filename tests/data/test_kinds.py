"""Loaders that give rows: refused with what makes batches of them, or told of where they may be batches."""

from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from kit.batches import Stream
from kit.modules import module
from kit.refusals import fit_refuses, warnings_of
from kit.trainers import fit

from jaxlit.data.array_loader import ArrayLoader
from jaxlit.errors import DataError

TORCH, ARROW = "torch.utils.data.dataset.Dataset", "datasets.arrow_dataset.Dataset"


class Sequence:
    """A dataset as torch and Hugging Face have them: elements by index, and their number."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def of_library(name: str, rows: list[Any]) -> Any:
    """Return a dataset whose class is derived from one that is called as a library's."""
    module, _, kind = name.rpartition(".")
    members = {"__module__": module} | ({"shape": (len(rows), 2)} if name == ARROW else {})
    return type("Mine", (type(kind, (Sequence,), members),), {})(rows)


NUMBERS = [{"x": 1.0, "y": 2}] * 8
VECTORS = [{"x": np.ones(3, np.float32), "y": np.ones(3, np.float32)}] * 8
LABELLED = [{"x": np.ones((4, 4), np.float32), "y": 3}] * 8
STACK = r"by jl\.ArrayLoader\(jax\.tree\.map\(lambda \*x: np\.stack\(x\), \*rows\), batch_size=32\)"
ROWS = {
    "a list": (NUMBERS, "list", STACK),
    "lists of numbers beside a text": ([{"x": [1, 2, 3], "text": "a b c"}] * 8, "list", STACK),
    "numpy's numbers": ([{"x": np.float32(1)}] * 8, "list", STACK),
    "a sequence": (Sequence(NUMBERS), "Sequence", STACK),
    "grain": (grain.MapDataset.source(NUMBERS), "MapDataset", r"by \.batch\(32\)\."),
    "torch": (of_library(TORCH, VECTORS), "Mine", r"by torch\.utils\.data\.DataLoader\(dataset, batch_size=32\)"),
    "Hugging Face": (of_library(ARROW, LABELLED), "Mine", r"""by dataset\.with_format\("numpy"\)\.batch\(32\)\."""),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_refused_with_what_makes_batches_of_them(name: str) -> None:
    loader, kind, how = ROWS[name]
    where = (
        rf"Trainer\.fit\(train_dataloaders=\.\.\.\) is a \w*{kind} whose first element is .*These are rows: batch them"
    )
    fit_refuses(DataError, where, how, train=loader)


def batches_of(x: Any) -> list[dict[str, Any]]:
    return [{"x": np.full((4, 1), 2.0, np.float32), "scale": x}] * 2


BATCHES = {
    "Hugging Face's batches": of_library(ARROW, [{"x": np.ones((4, 1), np.float32)}] * 2),
    "torch's iterable batches": type(
        "Mine",
        (type("IterableDataset", (), {"__module__": TORCH.rpartition(".")[0]}),),
        {"__iter__": lambda self: iter(batches_of(np.float32(1)))},
    )(),
    "a number beside an array": batches_of(0.5),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_the_same_libraries_are_taken(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert fit(module(lambda self, batch: jnp.mean(self.error(batch) ** 2)), BATCHES[name]).global_step == 2
    assert [x for x in warnings_of(caplog) if "rows" in x] == []


TOLD = [(3, list, 1), (np.float32(0.5), list, 1), (np.int32(1), Stream, 1), (3, Stream, 1), (0.5, Stream, 0)]


@pytest.mark.parametrize(("label", "kind", "told"), TOLD)
def test_a_number_of_its_own_next_to_an_array_is_told_of(
    label: Any, kind: Any, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = module(lambda self, batch: jnp.mean(self.error(batch) ** 2))
    fit(made, kind(batches_of(label)))
    warnings = [x for x in warnings_of(caplog) if "rows" in x]
    assert [x.split(",")[0] for x in warnings] == [
        "Trainer.fit(train_dataloaders=...) gives a number next to an array"
    ] * told
    assert all(("batched(rows, 32) of docs/data.md" if kind is Stream else "np.stack") in x for x in warnings)
    caplog.clear()
    fit(made, ArrayLoader({"x": np.ones((4, 1), np.float32)}, 4))
    assert [x for x in warnings_of(caplog) if "rows" in x] == []
