"""A resumed run draws the rows of the run that was not interrupted, from every kind of loader, or warns."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
import pytest
from kit import trainers
from kit.batches import rows_of
from kit.grain_rows import BATCH, ROWS, add_noise, data_loader, double, shuffled
from kit.modules import Mean
from kit.trainers import thinned

import jaxlit as jl

EACH = ROWS // BATCH  # batches of an epoch


def batch(rows: Any) -> dict[str, np.ndarray]:
    return {"x": np.asarray(rows, np.float32)[:, None]}


def permuted(*seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(ROWS).reshape(EACH, BATCH)


class Fixed:
    """Gives the same batches in every epoch."""

    def __iter__(self) -> Iterator[Any]:
        return map(batch, permuted(0))


class OfTheEpoch:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return map(batch, permuted(self.epoch))


class Endless:
    """Its own iterator, which goes on over epochs."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        self.next += 1
        return batch(range(self.next, self.next + BATCH))


class EndlessWithState(Endless):
    def get_state(self) -> Any:
        return {"next": np.int64(self.next)}

    def set_state(self, state: Any) -> None:
        self.next = state["next"]


class OldStyle(Endless):
    """Its own iterator, which begins again when it is iterated, in a new order."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Any:
        self.order = iter(self.rng.permutation(ROWS).reshape(EACH, BATCH))
        return self

    def __next__(self) -> Any:
        return batch(next(self.order))


class Stateful:
    """Continues where its state says; by default it forgets that it was at its end."""

    rolls = rests = False

    def __init__(self) -> None:
        self.at = self.start = self.epoch = 0

    def __len__(self) -> int:
        return EACH

    def __iter__(self) -> Iterator[Any]:
        first, self.start = self.start, 0
        for k in range(first, EACH):
            self.at = k + 1
            yield batch(permuted(self.epoch)[k])
        if self.rolls:
            self.epoch += 1
        if self.rolls or self.rests:
            self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = self.at = state["at"]
        self.epoch = state["epoch"]


class StatefulThatRests(Stateful):
    rests = True


class StatefulThatCounts(Stateful):
    rolls = True


class StatefulWithoutLength(StatefulThatCounts):
    __len__ = None  # type: ignore[assignment]


class StatefulByItsGenerator:
    """Draws from a generator of its own for each epoch and each batch; its state has arrays, sets and int keys."""

    def __init__(self) -> None:
        self.rng, self.order, self.at, self.resumes = np.random.default_rng(0), np.arange(0), EACH, False

    def __len__(self) -> int:
        return EACH

    def __iter__(self) -> Iterator[Any]:
        if not self.resumes:
            self.order, self.at = self.rng.permutation(ROWS).reshape(EACH, BATCH), 0
        self.resumes = False
        while self.at < EACH:
            self.at += 1
            yield batch(self.order[self.at - 1] + 100 * self.rng.integers(100))

    def state_dict(self) -> dict[str, Any]:
        return {"at": {0: np.int32(self.at)}, "order": self.order, "rng": self.rng.bit_generator.state, "seen": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"] == {1, 2}
        self.at, self.order, self.rng.bit_generator.state = int(state["at"][0]), state["order"], state["rng"]
        self.resumes = True


class EndlessWithLength:
    """A generator without end, of which an epoch takes as many batches as the length says."""

    def __init__(self) -> None:
        self.next = 0

    def __len__(self) -> int:
        return EACH

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.next += 1
            yield batch(range(self.next, self.next + BATCH))


class StatefulEndlessWithLength(EndlessWithLength):
    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Wrapping(OldStyle):
    """Its own iterator, which begins again after it has come to its end, as DALI's with `auto_reset`."""

    def __init__(self) -> None:
        self.epoch, self.at = 0, 0

    def __len__(self) -> int:
        return EACH

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.at == EACH:
            self.epoch, self.at = self.epoch + 1, 0
            raise StopIteration
        self.at += 1
        return batch(permuted(self.epoch)[self.at - 1])


class StateInBytes(Stateful):
    def state_dict(self) -> Any:
        return json.dumps(super().state_dict()).encode()

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(json.loads(state))


class CountsEpochs:
    """Has a new order in each epoch, by a count that its iteration moves when it ends; nobody may set it."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        yield from map(batch, permuted(self.epoch))
        self.epoch += 1


class OfItsGenerator:
    """Shuffles by a generator of its own, of which nobody knows the state."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        return map(batch, self.rng.permutation(ROWS).reshape(EACH, BATCH))


def torch_loader(kind: str) -> Any:
    data = pytest.importorskip("torch.utils.data")
    import torch

    rows = [batch([i])["x"][0] for i in range(ROWS)]
    stack: Any = {"batch_size": BATCH, "collate_fn": lambda rows: {"x": np.stack(rows)}}
    seeded = torch.Generator().manual_seed(3)
    distributed = data.DistributedSampler(rows, 1, 0, seed=1)

    class Batches:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            return iter(permuted(self.epoch).tolist())

    class Stream(data.IterableDataset):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            return iter(permuted(self.epoch).ravel()[:, None].astype(np.float32))

    by_batch: Any = {"collate_fn": stack["collate_fn"]}
    if kind == "StatefulDataLoader":
        pytest.importorskip("torchdata")
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(rows, shuffle=True, generator=seeded, **stack)
    makers: dict[str, Callable[[], Any]] = {
        "in order": lambda: data.DataLoader(rows, **stack),
        "shuffle": lambda: data.DataLoader(rows, shuffle=True, **stack),
        "generator": lambda: data.DataLoader(rows, shuffle=True, generator=seeded, **stack),
        "weighted": lambda: data.DataLoader(rows, sampler=data.WeightedRandomSampler([1.0] * ROWS, ROWS), **stack),
        "batch_sampler": lambda: data.DataLoader(
            rows, batch_sampler=data.BatchSampler(data.RandomSampler(rows), BATCH, False), **by_batch
        ),
        "distributed": lambda: data.DataLoader(rows, sampler=distributed, **stack),
        "batches of distributed": lambda: data.DataLoader(
            rows, batch_sampler=data.BatchSampler(distributed, BATCH, False), **by_batch
        ),
        "own batches": lambda: data.DataLoader(rows, batch_sampler=Batches(), **by_batch),
        "dataset with set_epoch": lambda: data.DataLoader(Stream(), **stack),
    }
    return makers[kind]()


def streaming() -> Any:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[float(i)] for i in range(ROWS)]}).to_iterable_dataset()
    return rows.with_format("numpy").batch(BATCH)


EXACT: dict[str, Callable[[], Any]] = {
    "ArrayLoader": lambda: jl.ArrayLoader(batch(range(ROWS)), BATCH, shuffle=True, seed=3),
    "list": lambda: [*Fixed()],
    "iterable": Fixed,
    "set_epoch": OfTheEpoch,
    "generator": lambda: (batch(range(k, k + BATCH)) for k in itertools.count()),
    "cycle": lambda: itertools.cycle([*Fixed()]),
    "own iterator": Endless,
    "own iterator with a state": EndlessWithState,
    "own iterator that begins again": OldStyle,
    "own iterator with a length": Wrapping,
    "state_dict, cut at its length": StatefulEndlessWithLength,
    "state_dict of bytes": StateInBytes,
    "state_dict": Stateful,
    "state_dict that rests": StatefulThatRests,
    "state_dict that counts": StatefulThatCounts,
    "state_dict without a length": StatefulWithoutLength,
    "state_dict of a generator": StatefulByItsGenerator,
    "MapDataset": lambda: shuffled().map(double).random_map(add_noise).batch(BATCH),
    "IterDataset": lambda: shuffled().to_iter_dataset().map(double).batch(BATCH),
    "DataLoader": data_loader,
    "repeat().batch()": lambda: shuffled().repeat().batch(8),
    "batch().repeat()": lambda: shuffled().batch(BATCH).repeat(),
    "repeat().to_iter_dataset()": lambda: grain.experimental.WindowShuffleIterDataset(
        shuffled().repeat().to_iter_dataset(), window_size=7, seed=3
    ).batch(BATCH),
    "mix of endless": lambda: grain.MapDataset.mix([shuffled().repeat(), shuffled(first=50).repeat()]).batch(9),
    "part of endless": lambda: shuffled().repeat()[:ROWS].batch(BATCH),
    "DataLoader without end": lambda: data_loader(num_epochs=None),
    "iter(MapDataset)": lambda: iter(shuffled().repeat().batch(BATCH)),
    "iter(IterDataset)": lambda: iter(shuffled().repeat().to_iter_dataset().batch(BATCH)),
    "iter(DataLoader)": lambda: iter(data_loader(num_epochs=None)),
    "streaming": streaming,
    **{
        f"torch {kind}": lambda kind=kind: torch_loader(kind)
        for kind in (
            *("in order", "shuffle", "generator", "weighted", "batch_sampler", "distributed"),
            *("batches of distributed", "own batches", "dataset with set_epoch", "StatefulDataLoader"),
        )
    },
}
WARNED: dict[str, Callable[[], Any]] = {"own generator": OfItsGenerator, "counts epochs": CountsEpochs}
UNLIMITED = {"generator", "cycle", "own iterator", "own iterator with a state"} | {
    kind for kind in EXACT if "repeat()" in kind or "endless" in kind or "iter(" in kind or "without end" in kind
}


class Stop(Exception):
    pass


class Seen(jl.Callback):
    """Keeps the rows of each step, and stops with an error before one."""

    def __init__(self, crash: int | None) -> None:
        self.rows, self._crash = dict[int, list[int]](), crash

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._crash:
            raise Stop
        self.rows[trainer.global_step] = rows_of([batch])


def run(make: Callable[[], Any], crash: int | None = None, **arguments: Any) -> dict[int, list[int]]:
    """Return the rows of each step of a run of three epochs that begins, or continues, in the folder `run`."""
    seen = Seen(crash)
    saves = [] if crash is None else [jl.callbacks.ModelCheckpoint(every_n_train_steps=1)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"max_epochs": 3, "num_sanity_val_steps": 0} | quiet | arguments
    with contextlib.suppress(Stop):
        trainers.fit(Mean(), make(), None, seen, *saves, **given)
    return seen.rows


def interrupted(make: Callable[[], Any], crash: int, name: str, **arguments: Any) -> dict[int, list[int]]:
    """Return the rows of a run with an error before a step, and of its resume; those of the resume count."""
    folder = {"default_root_dir": name, "resume": "auto"}
    return run(make, crash, **folder, **arguments) | run(make, **folder, **arguments)


def limits(kind: str) -> tuple[int | float, ...]:
    if kind == "own iterator with a length":  # after a limit it goes on with the rest of its rows, as in a loop by hand
        return (1.0,)
    return (4,) if kind in UNLIMITED else (1.0, 4)


CASES = [(kind, limit) for kind in EXACT for limit in limits(kind)]
OFTEN = [
    *[("iterable", 4), ("generator", 4), ("own iterator", 4), ("own iterator that begins again", 1.0)],
    *[("state_dict", 1.0), ("state_dict that counts", 4), ("state_dict of a generator", 4)],
    *[("own iterator with a length", 1.0), ("state_dict, cut at its length", 1.0), ("state_dict of bytes", 4)],
    *[("repeat().batch()", 4), ("repeat().to_iter_dataset()", 4), ("part of endless", 4), ("iter(DataLoader)", 4)],
    *[("torch generator", 4), ("torch own batches", 1.0), ("torch StatefulDataLoader", 1.0)],
]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize(("kind", "limit"), thinned(CASES, *OFTEN))
def test_a_resume_draws_the_rows_of_the_whole_run(kind: str, limit: int | float, caplog: Any) -> None:
    each = 4 if limit == 4 else EACH
    whole = run(EXACT[kind], limit_train_batches=limit)
    assert sorted(whole) == list(range(3 * each))
    # In the first epoch, at its end, and in a later one.
    for crash in (2, each, 2 * each + 3):
        assert interrupted(EXACT[kind], crash, f"run {crash}", limit_train_batches=limit) == whole
    assert "drawn again" not in caplog.text


@pytest.mark.parametrize("kind", WARNED)
def test_a_loader_that_draws_other_batches_is_named(kind: str, caplog: Any) -> None:
    words = {
        2: "",
        EACH + 2: "batch 1, drawn again for the resume, is not that of",
        2 * EACH: "the next batch may not be",
    }
    for crash, expected in words.items():  # the first epoch's order is that of a new object
        caplog.clear()
        is_right = interrupted(WARNED[kind], crash, f"run {crash}") == run(WARNED[kind])
        assert is_right is not bool(expected)
        assert expected in caplog.text
        assert bool(expected) is bool(caplog.records)


def test_values_that_are_drawn_at_random_are_named(caplog: Any) -> None:
    rng = np.random.default_rng(0)
    noisy = lambda: [{"x": rows["x"] + rng.normal(size=(BATCH, 1)).astype("f")} for rows in Fixed()]  # noqa: E731
    interrupted(noisy, 3, "run")
    assert "batch 1, drawn again for the resume, is not that of" in caplog.text


@pytest.mark.parametrize("kind", ["shuffle", "generator", "weighted", "batch_sampler"])
def test_the_order_of_torch_follows_from_seed_and_epoch(kind: str) -> None:
    torch = pytest.importorskip("torch")
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        orders.append(run(lambda: torch_loader(kind)))
    assert orders[0] == orders[1]
    assert len({str([orders[0][EACH * epoch + i] for i in range(EACH)]) for epoch in range(3)}) == 3
    if kind == "generator":  # the first epoch is that of a loop by hand
        by_hand = [rows_of([rows]) for rows in torch_loader(kind)]
        assert [orders[0][i] for i in range(EACH)] == by_hand


def test_generators_of_samplers_are_given_back() -> None:
    loader = torch_loader("generator")
    generator = loader.generator
    run(lambda: loader)
    assert loader.generator is generator
    assert loader.sampler.generator is generator
    assert generator.initial_seed() == 3


OVERFIT = ["generator", "own iterator", "own iterator with a state", "state_dict", "repeat().batch()", "torch shuffle"]


@pytest.mark.parametrize("kind", thinned(OVERFIT, *OVERFIT[1:4]))
def test_the_batches_of_overfitting_are_resumed(kind: str) -> None:
    given = {"overfit_batches": 3}
    whole = run(EXACT[kind], **given)
    assert [whole[i] for i in range(6)] == 2 * [whole[i] for i in range(3)]
    for crash in (2, 3, 7):
        assert interrupted(EXACT[kind], crash, f"run {crash}", **given) == whole


def test_no_batch_is_drawn_beyond_a_length() -> None:
    seen = run(EndlessWithLength)
    assert [rows[0] for rows in seen.values()] == list(range(1, 3 * EACH + 1))


def test_validation_leaves_the_epoch_of_a_shared_dataset() -> None:
    data = pytest.importorskip("torch.utils.data")

    class Rows(data.Dataset):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, i: int) -> Any:
            return {"x": np.full(1, 1000 * self.epoch + i, np.float32)}

    rows = Rows()
    halves = [data.Subset(rows, range(start, start + ROWS // 2)) for start in (0, ROWS // 2)]
    make = lambda half: data.DataLoader(half, batch_size=2, collate_fn=lambda x: {"x": np.stack([y["x"] for y in x])})  # noqa: E731
    trainers.fit(Mean(), make(halves[0]), make(halves[1]), seen := Seen(None), max_epochs=3, val_check_interval=2)
    assert [rows[0] // 1000 for rows in seen.rows.values()] == [0] * EACH + [1] * EACH + [2] * EACH


def test_only_generators_of_torch_are_seeded() -> None:
    data = pytest.importorskip("torch.utils.data")

    class Own(data.Sampler):
        def __init__(self) -> None:
            self.generator = np.random.default_rng(0)

        def __iter__(self) -> Iterator[int]:
            return iter(self.generator.permutation(ROWS).tolist())

        def __len__(self) -> int:
            return ROWS

    stack = lambda rows: {"x": np.stack(rows)}  # noqa: E731
    rows = [np.full(1, i, np.float32) for i in range(ROWS)]
    seen = run(lambda: data.DataLoader(rows, batch_size=BATCH, sampler=Own(), collate_fn=stack), max_epochs=1)
    assert [row for step in seen.values() for row in step] == np.random.default_rng(0).permutation(ROWS).tolist()


def test_a_loader_may_have_other_methods_of_that_name() -> None:
    class Named(Fixed):
        def get_state(self, name: str) -> str:
            return name

        def set_state(self, name: str, value: str) -> None:
            pass

    assert run(Named) == run(Fixed)


class Unkept(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"why": lambda: None}


def test_a_loaders_state_that_cannot_be_kept_is_refused_before_training() -> None:
    seen = Seen(None)
    saves = jl.callbacks.ModelCheckpoint(every_n_epochs=1)
    with pytest.raises(jl.errors.CheckpointError, match="the loader's state.*why.*is of type function"):
        trainers.fit(Mean(), Unkept(), None, seen, saves, default_root_dir="run", max_epochs=2)
    assert not any(step > 0 for step in seen.rows)
    assert trainers.fit(Mean(), Unkept()).global_step == EACH  # nothing is saved


@pytest.mark.parametrize("every", thinned([0, 1, 2, 3], 0, 2))
def test_loaders_are_reloaded_as_in_the_whole_run(every: int, caplog: Any) -> None:
    class Data(jl.DataModule):
        def train_dataloader(self) -> Any:
            first = 10 * self.trainer.current_epoch
            return jl.ArrayLoader(batch(range(first, first + 8)), BATCH, shuffle=True)

    given = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": every}
    whole = run(Data, **given)
    for crash in range(1, 8):
        assert interrupted(Data, crash, f"run {crash}", **given) == whole
    assert "another loader" not in caplog.text
