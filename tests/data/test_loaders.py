"""Loaders: which batches a training sees, how many, and what is no loader."""

from collections.abc import Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.trainers import THREE, make_trainer

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError


class Mean(jl.TrainModule):
    """Looks at every leaf of a batch; `traced` tells whether a step was traced."""

    traced = False

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(()))

    def training_step(self, batch: Any) -> jax.Array:
        type(self).traced = True
        return self.w[...] * sum(jnp.mean(x) for x in jax.tree.leaves(batch))

    def validation_step(self, batch: Any) -> None:
        type(self).traced = True
        self.log("sum", jnp.sum(batch["id"]), reduce_fx="sum")

    test_step = validation_step

    def predict_step(self, batch: Any) -> Any:
        return batch["id"]

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.0)


@pytest.fixture
def module() -> Mean:
    return type("Fresh", (Mean,), {})()


class Seen(jl.Callback):
    """Keeps the host batches of training by epoch, and of validation by validation."""

    def __init__(self) -> None:
        self.train: list[list[Any]] = []
        self.val: list[list[Any]] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.train.append([])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.train[-1].append(batch)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.val.append([])

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.val[-1].append(batch)


def fit(module: Mean, train: Any, val: Any = None, **arguments: Any) -> Seen:
    seen = Seen()
    make_trainer(seen, **({"max_epochs": 2, "num_sanity_val_steps": 0} | arguments)).fit(module, train, val)
    return seen


def ids_of(batches: list[Any]) -> list[int]:
    return [int(i) for batch in batches for i in batch["id"]]


def batches_of(*sizes: int) -> list[dict[str, np.ndarray]]:
    ends = np.cumsum(sizes)
    return [{"id": np.arange(end - size, end, dtype=np.int32)} for size, end in zip(sizes, ends, strict=True)]


def array_loader(rows: int = 10, batch_size: int = 4, **arguments: Any) -> jl.ArrayLoader:
    return jl.ArrayLoader({"id": np.arange(rows, dtype=np.int32)}, batch_size, **arguments)


def epoch_of(loader: jl.ArrayLoader, epoch: int) -> list[int]:
    loader.set_epoch(epoch)
    return ids_of(list(loader))


def test_fit_sets_the_epoch_of_an_array_loader(module: Mean) -> None:
    seen = fit(module, array_loader(shuffle=True, seed=5))
    reference = array_loader(shuffle=True, seed=5)
    assert [ids_of(epoch) for epoch in seen.train] == [epoch_of(reference, 0), epoch_of(reference, 1)]


def test_every_validation_sees_the_whole_array_loader(module: Mean) -> None:
    seen = fit(module, batches_of(2), array_loader(), max_epochs=3)
    assert [ids_of(epoch) for epoch in seen.val] == [list(range(10))] * 3


def test_the_sanity_check_takes_nothing_from_the_validation_after_it(module: Mean) -> None:
    seen = fit(module, batches_of(2), array_loader(), max_epochs=1, num_sanity_val_steps=1)
    assert [ids_of(epoch) for epoch in seen.val] == [[0, 1, 2, 3], list(range(10))]


def test_a_limit_takes_the_same_validation_batches_each_time(module: Mean) -> None:
    seen = fit(module, batches_of(2), array_loader(), limit_val_batches=2)
    assert [ids_of(epoch) for epoch in seen.val] == [list(range(8))] * 2


# grain -----------------------------------------------------------------------------------------------


def grain_rows(count: int = 12) -> grain.MapDataset:
    return grain.MapDataset.source([{"id": np.int32(i)} for i in range(count)])


def test_a_map_dataset_tells_its_length(module: Mean) -> None:
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, grain_rows(10).batch(4))
    assert (trainer.num_training_batches, trainer.global_step) == (3, 3)


def test_an_endless_map_dataset_ends_with_max_steps(module: Mean) -> None:
    seen = fit(module, grain_rows().batch(4).repeat(), max_epochs=-1, max_steps=5)
    assert ids_of(seen.train[0]) == [*range(12), *range(8)]


def test_an_iter_dataset_is_one_epoch(module: Mean) -> None:
    seen = fit(module, grain_rows().batch(4).to_iter_dataset())
    assert [ids_of(epoch) for epoch in seen.train] == [list(range(12))] * 2


def test_a_grain_data_loader_is_one_epoch(module: Mean) -> None:
    loader = grain.DataLoader(
        data_source=[{"id": np.int32(i)} for i in range(12)],
        sampler=grain.samplers.IndexSampler(num_records=12, shuffle=False, num_epochs=1),
        operations=[grain.transforms.Batch(batch_size=4)],
        worker_count=0,
    )
    seen = fit(module, loader)
    assert [ids_of(epoch) for epoch in seen.train] == [list(range(12))] * 2


# Other loaders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", THREE)
def test_a_list_of_batches_is_a_loader(module: Mean, strategy: str) -> None:
    batches = batches_of(8, 16, 3)
    seen = fit(module, batches, strategy=strategy)
    assert [ids_of(epoch) for epoch in seen.train] == [ids_of(batches)] * 2


def test_tuples_of_arrays_are_batches(module: Mean) -> None:
    batches = [(np.full(2, i, np.float32), np.ones(2, np.float32)) for i in range(3)]
    seen = fit(module, batches, max_epochs=1)
    assert [float(x[0]) for x, _ in seen.train[0]] == [0.0, 1.0, 2.0]


def test_a_list_of_two_loaders_is_two_validation_loaders(module: Mean) -> None:
    seen = fit(module, batches_of(2), [array_loader(4), batches_of(3, 1)], max_epochs=1)
    assert [ids_of([batch]) for batch in seen.val[0]] == [[0, 1, 2, 3], [0, 1, 2], [3]]


def test_a_list_of_two_loaders_to_train_on_is_refused(module: Mean) -> None:
    with pytest.raises(ArgumentError, match="train_dataloaders.*one loader, got 2"):
        fit(module, [array_loader(4), array_loader(4)])


def test_an_object_with_iter_alone_is_a_loader(module: Mean) -> None:
    class Loader:
        def __iter__(self) -> Iterator[Any]:
            yield from batches_of(2, 2)

    seen = fit(module, Loader())
    assert [ids_of(epoch) for epoch in seen.train] == [[0, 1, 2, 3]] * 2


def test_jax_arrays_are_taken_as_batches(module: Mean) -> None:
    seen = fit(module, [{"id": jnp.arange(4)}], max_epochs=1)
    assert ids_of(seen.train[0]) == [0, 1, 2, 3]


def test_the_last_batch_is_known_without_a_length(module: Mean) -> None:
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, iter(batches_of(2, 2, 2)))
    assert trainer.global_step == 2


def test_the_loader_is_opened_once_an_epoch(module: Mean) -> None:
    class Counted:
        opened = 0

        def __iter__(self) -> Iterator[Any]:
            self.opened += 1
            return iter(batches_of(2, 2))

        def __len__(self) -> int:
            return 2

    train, val = Counted(), Counted()
    make_trainer(max_epochs=3, num_sanity_val_steps=0).fit(module, train, val)
    assert (train.opened, val.opened) == (3, 3)


def test_a_generator_trains_one_epoch(module: Mean) -> None:
    seen = fit(module, (batch for batch in batches_of(2, 2, 2)), max_epochs=1)
    assert ids_of(seen.train[0]) == list(range(6))


def test_a_generator_that_is_used_up_is_refused_in_the_next_epoch(module: Mean) -> None:
    with pytest.raises(DataError, match=r"no batch when it was opened again.*iterator"):
        fit(module, (batch for batch in batches_of(2, 2, 2)))


@pytest.mark.parametrize(
    "empty",
    [
        lambda: [],
        lambda: array_loader(3, 4, drop_remainder=True),
        lambda: iter(()),
        lambda: grain_rows(0).batch(2),
    ],
)
def test_an_empty_training_loader_is_refused(module: Mean, empty: Any) -> None:
    with pytest.raises(DataError, match=r"train_dataloaders.*no batch"):
        fit(module, empty())


class Klass:
    """A class where an object belongs."""


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ("mnist", "got str 'mnist'.*jl.ArrayLoader"),
        (np.ones((4, 2)), r"(?s)got ndarray.*Wrap arrays as jl.ArrayLoader\(arrays, batch_size\)"),
        (jnp.ones((4, 2)), r"Wrap arrays as jl.ArrayLoader\(arrays, batch_size\)"),
        ({"x": np.ones((4, 2))}, r"(?s)got dict.*jl.ArrayLoader"),
        (Klass, "got the class Klass.*jl.ArrayLoader"),
        (3, "got int 3.*jl.ArrayLoader"),
    ],
)
def test_what_is_no_loader_is_refused_with_a_hint(module: Mean, loader: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        fit(module, loader)


def test_fit_without_a_loader_is_refused_with_a_hint(module: Mean) -> None:
    with pytest.raises(ArgumentError, match="no train_dataloaders.*jl.ArrayLoader.*datamodule"):
        fit(module, None)


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_evaluation_refuses_what_is_no_loader(module: Mean, method: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"Trainer.{method}.*got str"):
        getattr(make_trainer(), method)(module, "mnist")


def test_a_validation_loader_is_refused_before_any_hook(module: Mean) -> None:
    seen = Seen()
    with pytest.raises(ArgumentTypeError, match=r"val_dataloaders.*got int"):
        make_trainer(seen).fit(module, batches_of(2), 3)
    assert seen.train == []


# Limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "count"), [(3, 3), (9, 5), (1, 1), (0.5, 2), (1.0, 5), (0.2, 1), (0.99, 4)])
def test_limit_train_batches_counts_or_takes_a_fraction(module: Mean, limit: float, count: int) -> None:
    seen = fit(module, batches_of(2, 2, 2, 2, 2), limit_train_batches=limit)
    assert [len(epoch) for epoch in seen.train] == [count] * 2


@pytest.mark.parametrize(("limit", "count"), [(3, 3), (9, 5), (0.5, 2), (1.0, 5)])
def test_limit_val_batches_holds_for_each_loader(module: Mean, limit: float, count: int) -> None:
    loaders = [batches_of(2, 2, 2, 2, 2), batches_of(2, 2, 2, 2, 2)]
    seen = fit(module, batches_of(2), loaders, limit_val_batches=limit, max_epochs=1)
    assert [len(epoch) for epoch in seen.val] == [2 * count]


@pytest.mark.parametrize("limit", [0, 0.0])
def test_limit_val_batches_0_turns_validation_off(module: Mean, limit: float) -> None:
    seen = fit(module, batches_of(2), batches_of(2), limit_val_batches=limit, num_sanity_val_steps=2)
    assert seen.val == []


@pytest.mark.parametrize("limit", [0, 0.0])
def test_limit_train_batches_0_trains_nothing(module: Mean, limit: float) -> None:
    trainer = make_trainer(max_epochs=2, limit_train_batches=limit)
    trainer.fit(module, batches_of(2))
    assert (trainer.global_step, module.traced) == (0, False)


@pytest.mark.parametrize(("limit", "count"), [(2, 2), (0.5, 2), (0.25, 1)])
def test_limit_predict_batches_counts_or_takes_a_fraction(module: Mean, limit: float, count: int) -> None:
    trainer = make_trainer(limit_predict_batches=limit)
    assert ids_of([{"id": x} for x in trainer.predict(module, batches_of(2, 2, 2, 2))]) == list(range(2 * count))


@pytest.mark.parametrize(("limit", "count"), [(2, 2), (0.5, 2), (0.25, 1)])
def test_limit_test_batches_counts_or_takes_a_fraction(module: Mean, limit: float, count: int) -> None:
    trainer = make_trainer(limit_test_batches=limit)
    assert trainer.test(module, batches_of(2, 2, 2, 2)) == [{"sum": float(sum(range(2 * count)))}]


@pytest.mark.parametrize("which", ["train", "val"])
def test_a_fraction_of_less_than_one_batch_is_refused(module: Mean, which: str) -> None:
    with pytest.raises(ArgumentError, match=rf"limit_{which}_batches=0\.01\) of 3 batches.*0\.333"):
        fit(module, batches_of(2, 2, 2), batches_of(2, 2, 2), **{f"limit_{which}_batches": 0.01})


@pytest.mark.parametrize("which", ["train", "val"])
def test_a_fraction_of_a_loader_without_length_is_refused(module: Mean, which: str) -> None:
    loaders = {"train": batches_of(2), "val": batches_of(2)} | {which: iter(batches_of(2))}
    with pytest.raises(ArgumentError, match=rf"limit_{which}_batches=0\.5.*{which}_dataloaders.*no length.*int"):
        fit(module, *loaders.values(), **{f"limit_{which}_batches": 0.5})


def test_a_count_limits_a_loader_without_length(module: Mean) -> None:
    seen = fit(module, iter(batches_of(2, 2, 2)), limit_train_batches=2, max_epochs=1)
    assert ids_of(seen.train[0]) == [0, 1, 2, 3]


def test_a_limit_draws_nothing_behind_it(module: Mean) -> None:
    def loader() -> Iterator[Any]:
        yield from batches_of(2, 2)
        raise AssertionError("drew a third batch")

    assert len(fit(module, loader(), limit_train_batches=2, max_epochs=1).train[0]) == 2
