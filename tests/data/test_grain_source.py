"""Grain's loaders: every epoch has an order of its own, which is that of a repetition of the data."""

import itertools

import grain
import numpy as np
import pytest
from kit.batches import rows_of
from kit.grain_rows import BATCH, ROWS, add_noise, data_loader, double, everything, is_no_fifth, records, shuffled
from kit.journal import Batches
from kit.modules import Mean
from kit.trainers import fit, thinned

import jaxlit as jl
from jaxlit.data.loaders import source_of


def ahead(rows):
    return grain.experimental.ThreadPrefetchIterDataset(rows, prefetch_buffer_size=2)


def window_shuffled():
    rows = grain.MapDataset.source(records()).to_iter_dataset()
    return grain.experimental.WindowShuffleIterDataset(rows, window_size=10, seed=1).batch(BATCH)


def parts():
    return [shuffled(seed).to_iter_dataset() for seed in (1, 2)]


SHUFFLES = {
    "MapDataset": lambda: shuffled().map(double).batch(BATCH).map(dict),
    "MapDataset with random_map": lambda: shuffled().random_map(add_noise).batch(BATCH),
    "MapDataset shuffled in batches": lambda: grain.MapDataset.source(records()).batch(BATCH).seed(1).shuffle(),
    "IterDataset": lambda: shuffled().batch(BATCH).to_iter_dataset().map(double),
    "IterDataset with filter": lambda: shuffled().to_iter_dataset().filter(lambda x: x["x"] >= 0).batch(BATCH),
    "IterDataset with prefetch": lambda: ahead(shuffled().to_iter_dataset().batch(BATCH)),
    "IterDataset with a window shuffle": window_shuffled,
    "mixed MapDatasets": lambda: grain.MapDataset.mix([shuffled(), shuffled()], [0.5, 0.5])[:ROWS].batch(BATCH),
    "mixed IterDatasets": lambda: grain.IterDataset.mix(parts(), [0.5, 0.5]).batch(BATCH),
    "mixed by interleaving": lambda: grain.experimental.InterleaveIterDataset(parts(), cycle_length=2).batch(BATCH),
    "DataLoader": data_loader,
    "ArrayLoader": lambda: jl.ArrayLoader({"x": np.arange(ROWS, dtype=np.float32)[:, None]}, BATCH, shuffle=True),
}


def epochs_of(loader, count=3):
    source = source_of(loader, "loader")
    return [[everything(batch) for batch, _ in source.epoch(epoch)] for epoch in range(count)]


@pytest.mark.parametrize("kind", thinned(SHUFFLES, *[*SHUFFLES][::3]))
def test_each_epoch_has_its_own_repeatable_order(kind):
    loader = SHUFFLES[kind]()
    before = kind != "ArrayLoader" and [everything(batch) for batch in loader]
    epochs = epochs_of(loader)
    orders = [rows_of(epoch) for epoch in epochs]
    assert len({*map(tuple, orders)}) == 3
    if "mixed" not in kind:
        assert [sorted(order) for order in orders] == [[*range(ROWS)]] * 3
    assert epochs_of(loader) == epochs_of(SHUFFLES[kind]()) == epochs, "one loader in two runs, and an equal one"
    assert not before or before == [everything(batch) for batch in loader], "the user's own is as it was"
    if kind.startswith(("MapDataset", "mixed MapDatasets")):
        assert [*itertools.chain(*epochs)] == [everything(batch) for batch in SHUFFLES[kind]().repeat(3)]


@pytest.mark.parametrize(
    "kind", thinned(["MapDataset", "IterDataset with filter", "DataLoader", "ArrayLoader"], "MapDataset", "DataLoader")
)
def test_validation_keeps_one_order(kind):
    seen, orders = Batches(), [rows_of(epoch) for epoch in epochs_of(SHUFFLES[kind]())]
    fit(Mean(), SHUFFLES[kind](), SHUFFLES[kind](), seen, max_epochs=3, num_sanity_val_steps=0)
    assert [rows_of(epoch) for epoch in seen.train] == orders
    assert [rows_of(epoch) for epoch in seen.val] == [orders[0]] * 3


STREAMS = {
    "map": (lambda: shuffled().map(double), lambda rows: rows.map(dict).batch(BATCH)),
    "filter": (shuffled, lambda rows: rows.filter(is_no_fifth).batch(BATCH)),  # 16 rows an epoch
    "MapDataset's random_map": (lambda: shuffled().random_map(add_noise), lambda rows: rows.batch(BATCH)),
    "batched before": (lambda: shuffled().batch(BATCH), lambda rows: rows.map(double)),
    "prefetch": (shuffled, lambda rows: ahead(rows.batch(BATCH))),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_epochs_of_an_iter_dataset_equal_repeated_rows(kind):
    rows, stages = STREAMS[kind]
    expected = [everything(batch) for batch in stages(rows().repeat(3).to_iter_dataset())]
    assert [*itertools.chain(*epochs_of(stages(rows().to_iter_dataset())))] == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: rows.random_map(add_noise).to_iter_dataset().batch(BATCH),
        lambda rows: rows.to_iter_dataset().random_map(add_noise).batch(BATCH),
        lambda rows: rows.to_iter_dataset().batch(BATCH).random_map(add_noise),
        lambda rows: rows.to_iter_dataset().seed(5).random_map(add_noise).batch(BATCH),
    ],
    ids=["MapDataset, streamed", "IterDataset", "IterDataset of batches", "IterDataset with a seed"],
)
def test_random_maps_draw_anew_in_each_epoch(make):
    noise = [[batch["noise"] for batch in epoch] for epoch in epochs_of(make(shuffled()))]
    draws = [{float(x) for batch in epoch for x in np.ravel(batch)} for epoch in noise]
    assert not draws[0] & draws[1] | draws[1] & draws[2] | draws[2] & draws[0], "no record draws as another one did"


def test_an_endless_dataset_with_workers_is_known():
    rows = shuffled().repeat().to_iter_dataset().batch(BATCH)
    assert source_of(rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)), "loader").is_endless
