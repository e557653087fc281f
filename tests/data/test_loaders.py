"""Loaders: which batches a training sees, how many, and what is no loader."""

import itertools

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from kit.batches import Stream, counted, rows_of
from kit.compiles import compiles
from kit.journal import Batches
from kit.modules import Mean, module
from kit.refusals import fit_refuses, refuses, warnings_of
from kit.trainers import fit, make_trainer

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError


def array_loader(rows=10, batch_size=4, **arguments):
    return jl.ArrayLoader({"x": np.arange(rows, dtype=np.float32)[:, None]}, batch_size, **arguments)


def records(count=12):
    return [{"x": np.full(1, i, np.float32)} for i in range(count)]


def data_loader(num_epochs):
    return grain.DataLoader(
        data_source=records(),
        sampler=grain.samplers.IndexSampler(12, shuffle=False, num_epochs=num_epochs),
        operations=[grain.transforms.Batch(4)],
        worker_count=0,
    )


def seen_in(train, val=None, **arguments):
    seen = Batches()
    fit(Mean(), train, val, seen, **({"max_epochs": 2, "num_sanity_val_steps": 0} | arguments))
    return seen


LOADERS = {
    "list": lambda: counted(4, 4, 4),
    "jax arrays": lambda: [{"x": jnp.asarray(batch["x"])} for batch in counted(4, 4, 4)],
    "iterable": lambda: Stream(counted(4, 4, 4)),
    "MapDataset": lambda: grain.MapDataset.source(records()).batch(4),
    "IterDataset": lambda: grain.MapDataset.source(records()).batch(4).to_iter_dataset(),
    "DataLoader": lambda: data_loader(1),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_is_opened_once_an_epoch(kind):
    loader, seen = LOADERS[kind](), Batches()
    trainer = fit(Mean(), loader, None, seen, max_epochs=2, accumulate_grad_batches=2)
    assert [rows_of(epoch) for epoch in seen.train] == [[*range(12)]] * 2
    assert trainer.global_step == 4, "the second window of an epoch is of one batch"
    assert kind != "iterable" or loader.opened == 2
    assert kind != "MapDataset" or trainer.num_training_batches == 3


def test_a_generator_is_one_epoch_and_refused_in_the_next():
    seen, batches = Batches(), ((np.full((2, 1), k, np.float32), np.ones(2, np.float32)) for k in range(3))
    of_tuples = module(lambda self, batch: jnp.mean((batch[0] - self.w) ** 2))
    words = r"no batch when it was opened again.*iterator.*used up"
    refuses(DataError, lambda: fit(of_tuples, batches, None, seen, max_epochs=2), "train_dataloaders", words)
    assert [float(x[0, 0]) for x, _ in seen.train[0]] == [0.0, 1.0, 2.0]
    refuses(DataError, lambda: seen_in(counted(4), iter(counted(4, 4))), "val_dataloaders", words)
    assert make_trainer().validate(Mean(), iter(counted(4, 4))) == [{"val": 3.5}], "opened once, it is validated whole"


def test_validation_sees_every_batch_after_the_sanity_check():
    own = Stream(counted(3, 1))
    seen = seen_in(array_loader(shuffle=True, seed=5), [array_loader(), own], num_sanity_val_steps=1)
    orders = [np.random.default_rng((5, epoch)).permutation(10).tolist() for epoch in range(2)]
    assert [rows_of(epoch) for epoch in seen.train] == orders
    assert [rows_of(epoch) for epoch in seen.val] == [[0, 1, 2, 3, 0, 1, 2], *[[*range(10), 0, 1, 2, 3]] * 2]


ENDLESS = {
    "cycle": lambda: itertools.cycle(counted(4, 4)),
    "repeat": lambda: itertools.repeat(counted(4)[0]),
    "MapDataset": lambda: grain.MapDataset.source(records()).batch(4).repeat(),
    "IterDataset": lambda: grain.MapDataset.source(records()).batch(4).repeat().to_iter_dataset(),
    "DataLoader": lambda: data_loader(None),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_loader_needs_a_limit(kind):
    make, given = ENDLESS[kind], Mean()
    with compiles() as compiled:
        words = ("train_dataloaders.*without end", "max_steps", "limit_train_batches")
        refuses(ArgumentError, lambda: fit(given, make(), max_epochs=2), *words)
        words = "val_dataloaders.*without end.*limit_val_batches"
        refuses(ArgumentError, lambda: fit(given, counted(4), make()), words)
        words = "dataloaders.*without end.*limit_predict_batches"
        refuses(ArgumentError, lambda: make_trainer().predict(given, make()), words)
    assert compiled == []


def test_an_endless_loader_ends_with_max_steps():
    assert rows_of(seen_in(ENDLESS["MapDataset"](), max_epochs=-1, max_steps=5).train[0]) == [*range(12), *range(8)]
    assert len(seen_in(itertools.repeat(counted(4)[0], 3), max_epochs=1).train[0]) == 3


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ("mnist", "got 'mnist'.*jl.ArrayLoader"),
        (np.ones((4, 2)), r"got float64\[4, 2\].*wrap arrays as jl.ArrayLoader\(arrays, batch_size\)"),
        (jnp.ones((4, 2)), r"wrap arrays as jl.ArrayLoader\(arrays, batch_size\)"),
        ((np.ones((4, 2)), np.ones(4)), r"got .*float64\[4, 2\].*several as \(x, y\)"),
        ([np.ones(4, np.float32), np.ones(4, np.int32)], r"got .*float32\[4\], int32\[4\]"),
        ({"x": np.ones((4, 2))}, "got {.*jl.ArrayLoader"),
        (Mean, "got <class .*Mean.*jl.ArrayLoader"),
        (3, "got 3.*jl.ArrayLoader"),
    ],
)
def test_what_is_no_loader_is_refused_with_a_hint(loader, words):
    fit_refuses(ArgumentTypeError, rf"train_dataloaders.*{words}", train=loader)
    fit_refuses(ArgumentTypeError, rf"val_dataloaders.*{words}", val=loader)
    for verb in ("validate", "test", "predict"):
        run = getattr(make_trainer(), verb)
        refuses(ArgumentTypeError, lambda run=run: run(Mean(), loader), rf"Trainer\.{verb}.*{words}")


def test_fit_without_a_loader_or_with_two_is_refused_with_a_hint():
    fit_refuses(ArgumentError, "no train_dataloaders.*jl.ArrayLoader.*datamodule", loaders={"train_dataloaders": None})
    fit_refuses(ArgumentError, "train_dataloaders.*one loader, got 2", train=[array_loader(4), array_loader(4)])


@pytest.mark.parametrize("limit", [0, 0.0])
def test_a_limit_of_0_trains_or_validates_nothing(limit):
    traced = []
    made = module(lambda self, batch: traced.append("training") or jnp.mean(self.error(batch) ** 2))
    assert (fit(made, counted(2), limit_train_batches=limit, max_epochs=2).global_step, traced) == (0, [])
    assert seen_in(counted(2), counted(2), limit_val_batches=limit, num_sanity_val_steps=2).val == []


@pytest.mark.parametrize("which", ["train", "val"])
def test_a_fraction_without_a_batch_is_refused(which):
    few, endless = (
        rf"limit_{which}_batches=0\.01\) is a fraction, and .* has 3 batches.*int",
        rf"limit_{which}_batches=0\.5.*no length.*int",
    )
    fit_refuses(ArgumentError, few, train=counted(2, 2, 2), val=counted(2, 2, 2), **{f"limit_{which}_batches": 0.01})
    loaders = {"train": counted(2), "val": counted(2)} | {which: iter(counted(2))}
    fit_refuses(ArgumentError, rf"{which}_dataloaders", endless, **loaders, **{f"limit_{which}_batches": 0.5})


def test_a_limit_draws_no_batch_too_many():
    def loader():
        yield from counted(2, 2)
        raise AssertionError("drew a third batch")

    assert rows_of(seen_in(loader(), limit_train_batches=2, max_epochs=1).train[0]) == [0, 1, 2, 3]


def test_a_limit_beyond_the_loader_warns_once(caplog):
    limits = {f"limit_{which}_batches": 100 for which in ("train", "val", "test", "predict")}
    trainer = make_trainer(max_epochs=3, **limits)
    trainer.fit(Mean(), counted(2, 2, 2), counted(2, 2, 2))
    trainer.test(Mean(), counted(2, 2, 2))
    trainer.predict(Mean(), counted(2, 2, 2))
    trainer.fit(Mean(), Stream(counted(2, 2, 2)))  # which is known after its first epoch
    told = warnings_of(caplog)
    arguments = [*limits, "limit_train_batches"]
    assert all(name in text and "100" in text for name, text in zip(arguments, told, strict=True))
    assert all("dataloaders=...)" in text and " 3 " in text for text in told)
