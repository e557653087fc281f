"""Loaders as users write them: whatever their habits, each batch is trained on once, and on its own numbers."""

from collections.abc import Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.data.kinds import source_of
from jaxlit.data.watchdog import Watchdog
from jaxlit.errors import DataError

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "strategy": "single"}


class Follow(jl.TrainModule):
    """Adds up the means of its batches: the weight tells what was trained on."""

    def __init__(self, *, rngs: nnx.Rngs | None = None) -> None:
        self.w = nnx.Param(jnp.zeros(()))

    def training_step(self, batch: Any) -> jax.Array:
        return -self.w[...] * jnp.mean(batch["x"])

    def validation_step(self, batch: Any) -> None:
        self.log("rows", jnp.float32(batch["x"].shape[0]), reduce_fx="sum")

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


def make_batches(count: int = 6) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full(4, k, np.float32)} for k in range(count)]


class Seen(jl.Callback):
    def __init__(self) -> None:
        self.ids: list[list[float]] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.ids.append([])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ids[-1].append(float(batch["x"][0]))


def fit(train: Any, val: Any = None, **arguments: Any) -> tuple[jl.Trainer, list[list[float]], float]:
    seen, module = Seen(), Follow()
    trainer = jl.Trainer(**({"callbacks": [seen], "max_epochs": 2} | QUIET | arguments))
    trainer.fit(module, train, val)
    return trainer, seen.ids, float(module.w[...])


class Indexed:
    """The protocol of Keras' Sequence: it raises what it likes beyond its length."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, k: int) -> dict[str, np.ndarray]:
        if k >= 3:
            raise FileNotFoundError(k)
        return make_batches()[k]


class Promised:
    """Ends nowhere, and tells how many batches make an epoch."""

    def __init__(self) -> None:
        self.stream = iter(make_batches(100))

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return self.stream


class OwnIterator:
    """Is its own iterator, which begins again when it is iterated again."""

    def __iter__(self) -> "OwnIterator":
        self.k = -1
        return self

    def __next__(self) -> Any:
        self.k += 1
        if self.k == 6:
            raise StopIteration
        return make_batches()[self.k]


class Stream(OwnIterator):
    """Is its own iterator, and goes on where it is."""

    def __init__(self) -> None:
        self.k = -1

    def __iter__(self) -> "Stream":
        return self


def test_nothing_is_asked_for_beyond_a_length() -> None:
    assert fit(Indexed())[1] == [[0, 1, 2]] * 2
    assert fit(Promised())[1] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("sanity", [0, 2])
def test_an_object_that_is_its_own_iterator_may_train_and_validate(sanity: int) -> None:
    loader = OwnIterator()
    trainer, ids, _ = fit(loader, loader, num_sanity_val_steps=sanity)
    assert ids == [[0, 1, 2, 3, 4, 5]] * 2
    assert trainer.callback_metrics["rows"] == 24


class Reshuffled(OwnIterator):
    """Begins again with another batch."""

    seed = 0

    def __iter__(self) -> "Reshuffled":
        self.seed, self.k = self.seed + 1, -1
        return self

    def __next__(self) -> Any:
        batch = super().__next__()
        return {"x": (batch["x"] + self.seed) % 6}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_objects_that_are_their_own_iterators_give_each_batch_once(prefetch: int) -> None:
    assert fit(Stream(), max_epochs=1, prefetch=prefetch)[1] == [[0, 1, 2, 3, 4, 5]]
    assert fit(Stream(), limit_train_batches=3, prefetch=prefetch)[1] == [[0, 1, 2], [3, 4, 5]]
    assert fit(Reshuffled(), prefetch=prefetch)[1] == [[1, 2, 3, 4, 5, 0], [2, 3, 4, 5, 0, 1]]


def test_the_sanity_check_takes_nothing_from_a_generator() -> None:
    trainer, _, _ = fit(make_batches(2), (batch for batch in make_batches(5)), max_epochs=1, num_sanity_val_steps=2)
    assert trainer.callback_metrics["rows"] == 20


class Refills:
    """A library's tensor: numpy sees its memory, which is filled again for each batch."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.memory


class RefillingTensors:
    def __iter__(self) -> Iterator[Any]:
        memory = np.zeros(4, np.float32)
        for k in range(6):
            memory[:] = k
            yield {"x": Refills(memory)}


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


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("make", [RefillingTensors, RefillingDataset])
def test_memory_of_other_libraries_that_is_filled_again_is_trained_on_as_it_was(make: Any, prefetch: int) -> None:
    _, ids, trained = fit(make(), max_epochs=1, prefetch=prefetch)
    assert ids == [[0, 1, 2, 3, 4, 5]]
    assert trained == sum(range(6))


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
    column = Column(10 * x, labels=x[::-1])
    for batch in jl.ArrayLoader({"x": x, "y": column}, 3, shuffle=True):
        np.testing.assert_array_equal(batch["y"], 10 * batch["x"])


def test_a_loader_that_validation_shares_knows_where_training_stands() -> None:
    rows = {"x": np.arange(24, dtype=np.float32)}
    loader = jl.ArrayLoader(rows, 4, shuffle=True)
    trainer, _, _ = fit(loader, loader, val_check_interval=2, max_epochs=-1, max_steps=8 + 2)
    order = np.random.default_rng((0, 1)).permutation(24)
    source = source_of(jl.ArrayLoader(rows, 4, shuffle=True), "loader")
    source.load_state_dict(source.state_dict(1, trainer._session.position.data))
    batch, _ = next(source.epoch(1))
    np.testing.assert_array_equal(batch["x"], order[16:20])


def test_where_a_generator_stands_is_counted_across_epochs() -> None:
    trainer, ids, _ = fit((batch for batch in make_batches(100)), limit_train_batches=3, max_steps=5, max_epochs=-1)
    assert ids == [[0, 1, 2], [3, 4]]
    source = source_of((batch for batch in make_batches(100)), "loader", may_go_on=True)
    source.load_state_dict(source.state_dict(1, trainer._session.position.data))
    assert next(source.epoch(1))[0]["x"][0] == 5


def test_a_timeout_is_for_one_batch_also_where_a_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    watch = Watchdog.watch

    def counted(self: Watchdog, argument: str, epoch: int, batch: int) -> None:
        waits.append(batch)
        watch(self, argument, epoch, batch)

    monkeypatch.setattr(Watchdog, "watch", counted)
    begun: list[int] = []  # waits that had begun when a batch was drawn

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            for batch in make_batches(4):
                begun.append(len(waits))
                yield batch

        def __len__(self) -> int:
            return 4

    assert fit(Loader(), overfit_batches=4, data_timeout=60)[1] == [[0, 1, 2, 3]] * 2
    assert len({*begun}) == 4


class Reloads(jl.DataModule):
    def __init__(self, *loaders: Any) -> None:
        self.loaders = iter(loaders)

    def train_dataloader(self) -> Any:
        return next(self.loaders)


def test_batches_of_a_reloaded_loader_are_compared_with_those_before() -> None:
    data = Reloads(make_batches(2), [{"x": np.zeros(4, np.float32), "more": np.zeros(4)}])
    with pytest.raises(DataError, match=r"structure of the batch changed: new batch\['more'\]"):
        jl.Trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1, **QUIET).fit(Follow(), datamodule=data)


def test_a_reloaded_loader_that_is_empty_is_told_as_that() -> None:
    with pytest.raises(DataError, match="gave no batch. Check that it is not empty"):
        jl.Trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1, **QUIET).fit(
            Follow(), datamodule=Reloads(make_batches(2), [])
        )


@pytest.mark.parametrize("argument", ["train", "val"])
def test_a_lazy_module_is_not_built_before_its_loaders_were_looked_at(argument: str) -> None:
    built: list[bool] = []

    class Watched(Follow):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            built.append(True)
            super().__init__()

    good, bad = make_batches(2), [{"x": np.zeros((0, 4), np.float32)}]
    loaders = (bad, good) if argument == "train" else (good, bad)
    with pytest.raises(DataError, match=rf"{argument}_dataloaders.*0 rows"):
        jl.Trainer(max_epochs=1, **QUIET).fit(jl.lazy(Watched), *loaders)
    assert built == []


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.ones(4, np.float32), "y": [1, 2, 3, 4]}, r"batch\['y'\] is a list of Python numbers.*np.asarray"),
        ({"x": np.array([-(2**40)])}, "holds -1099511627776, which would wrap"),
        ({"x": np.array([np.inf, 1e300])}, r"holds 1e\+300, which would become infinite"),
        (Refills, "gave a type, which is no pytree"),
    ],
)
def test_a_batch_is_refused_by_what_is_wrong_with_it(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fit([batch])
