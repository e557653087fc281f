"""Where an iteration stands: it goes on behind the last batch that was used, and each epoch has an order of its own."""

import copy
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from kit.inside import position_of
from kit.journal import hooks
from kit.modules import module
from kit.trainers import fit as kit_fit

import jaxlit as jl
from jaxlit.data.feeder import Feeder
from jaxlit.data.kinds import source_of
from jaxlit.data.source import Source
from jaxlit.data.watchdog import Watchdog
from jaxlit.errors import DataError

ROWS, BATCH = 20, 4
Ids = list[list[int]]
# Has one weight, which tells what was trained on.
Follow = type(
    module(
        lambda self, batch: -self.w[0] * jnp.mean(batch["id"]),
        validation=lambda self, batch: self.log("rows", jnp.float32(batch["id"].shape[0]), reduce_fx="sum"),
    )
)


class Seen(jl.Callback):
    """Keeps the ids of every batch, by epoch of training and by validation."""

    def __init__(self) -> None:
        self.train, self.val = list[Ids](), list[Ids]()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.train.append([])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.train[-1].append(ids(batch))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.val.append([])

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.val[-1].append(ids(batch))


def fit(loader: Any, val: Any = None, *callbacks: Any, **arguments: Any) -> tuple[jl.Trainer, Seen]:
    seen = Seen()
    given = {"max_epochs": 3, "num_sanity_val_steps": 0} | arguments
    return kit_fit(Follow(), loader, val, seen, *callbacks, **given), seen


@functools.cache
def uninterrupted(kind: str) -> list[Ids]:
    """Return three epochs that nothing stops."""
    source = make_source(kind)
    return [[ids(batch) for batch, _ in source.epoch(epoch)] for epoch in range(3)]


def ids(batch: Any) -> list[int]:
    return np.asarray(batch["id"]).tolist()


# Loaders ---------------------------------------------------------------------------------------------


def records(count: int = ROWS) -> list[dict[str, np.int32]]:
    return [{"id": np.int32(i)} for i in range(count)]


def shuffled(seed: int = 1, count: int = ROWS) -> grain.MapDataset:
    return grain.MapDataset.source(records(count)).seed(seed).shuffle()


def add_noise(record: Any, rng: np.random.Generator) -> Any:
    return {**record, "noise": np.int32(rng.integers(10**6))}


def double(record: Any) -> Any:
    return {**record, "twice": 2 * record["id"]}


def is_no_fifth(record: Any) -> bool:
    return bool(record["id"] % 5)


def data_loader(
    count: int = ROWS, batch_size: int = BATCH, seed: int = 3, drop: bool = False, first: int = 0
) -> grain.DataLoader:
    return grain.DataLoader(
        data_source=[{"id": np.int32(first + i)} for i in range(count)],
        sampler=grain.samplers.IndexSampler(num_records=count, shuffle=True, num_epochs=1, seed=seed),
        operations=[grain.transforms.Batch(batch_size=batch_size, drop_remainder=drop)],
        worker_count=0,
    )


def batches(order: Any = range(ROWS)) -> list[dict[str, np.ndarray]]:
    return [{"id": np.asarray(order[i : i + BATCH], np.int32)} for i in range(0, ROWS, BATCH)]


class Again:
    """Can be iterated again, and that is all."""

    def __iter__(self) -> Iterator[Any]:
        return iter(batches())


class Stateful:
    """Keeps its own epochs and position, as torchdata's StatefulDataLoader does.

    Args:
        lives: Whether `state_dict` returns the one dict that the iteration goes on to change.
    """

    def __init__(self, lives: bool = False) -> None:
        self._lives, self._state, self._start = lives, {"epoch": -1, "next": 0}, None

    def __len__(self) -> int:
        return ROWS // BATCH

    def __iter__(self) -> Iterator[Any]:
        if (start := self._start) is None:
            start = 0
            self._state["epoch"] += 1
        self._start = None
        order = np.random.default_rng(self._state["epoch"]).permutation(ROWS)
        for k in range(start, len(self)):
            self._state["next"] = k + 1
            yield batches(order)[k]

    def state_dict(self) -> dict[str, int]:
        return self._state if self._lives else dict(self._state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._state, self._start = dict(state), state["next"]


LOADERS: dict[str, Callable[[], Any]] = {
    "ArrayLoader": lambda: jl.ArrayLoader({"id": np.arange(18)}, BATCH, shuffle=True, seed=3),
    "MapDataset": lambda: shuffled().map(double).random_map(add_noise).batch(BATCH),
    "MapDataset with holes": lambda: shuffled().batch(BATCH).filter(lambda batch: 7 not in batch["id"]),
    "IterDataset": lambda: shuffled().to_iter_dataset().map(double).filter(is_no_fifth).batch(3),
    "DataLoader": data_loader,
    "list": batches,
    "iterable": Again,
    "state_dict": Stateful,
    "living state_dict": lambda: Stateful(lives=True),
}
ENDLESS: dict[str, Callable[[], Any]] = {
    "batch().repeat()": lambda: shuffled().batch(BATCH).repeat(),
    "repeat().batch()": lambda: shuffled().repeat().batch(3),
    "repeat().to_iter_dataset()": lambda: shuffled().repeat().to_iter_dataset().map(double).batch(3),
    "cycle": lambda: itertools.cycle(batches()),
}


def feeder(prefetch: int) -> Feeder:
    return Feeder(
        lambda batch: batch,
        num_replicas=1,
        num_processes=1,
        prefetch=prefetch,
        watchdog=Watchdog(None),
        interrupted=lambda: False,
    )


def take(source: Source, epoch: int, count: int | None = None, *, limit: int | None = None, prefetch: int = 0) -> Any:
    """Use batches of an epoch and break off; returns them, and where the iteration stood."""
    fed, used, at = feeder(prefetch), [], None
    draws = fed.batches(source, epoch, limit)
    for _ in itertools.count() if count is None else range(count):
        if (drawn := next(draws, None)) is None:
            break
        used.append(everything(drawn[1]))
        at = drawn[3]
    state = json.loads(json.dumps(source.state_dict(epoch, at)))  # as a checkpoint keeps it, and when
    fed.close()
    return used, state


def everything(batch: Any) -> Any:
    return {key: np.asarray(x).tolist() for key, x in batch.items()}


def make_source(kind: str) -> Source:
    return source_of({**LOADERS, **ENDLESS}[kind](), "loader", may_go_on=True)  # as the Trainer does


# Going on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "epoch", "prefetch"), [("none", 0, 0), ("one", 0, 3), ("one", 1, 0), ("all", 0, 0), ("all", 1, 3)]
)
@pytest.mark.parametrize("kind", LOADERS)
def test_an_equal_loader_goes_on_behind_the_last_batch_that_was_used(
    kind: str, used: str, epoch: int, prefetch: int
) -> None:
    whole = make_source(kind)
    expected = [take(whole, e)[0] for e in range(epoch + 2)]
    count = {"none": 0, "one": 1, "all": len(expected[epoch])}[used]
    stopped = make_source(kind)
    for e in range(epoch):
        take(stopped, e, prefetch=prefetch)
    before, state = take(stopped, epoch, count, prefetch=prefetch)
    assert before == expected[epoch][:count]
    fresh = make_source(kind)
    fresh.load_state_dict(state)
    after = [take(fresh, e, prefetch=prefetch)[0] for e in range(epoch, epoch + 2)]
    assert after == [expected[epoch][count:], *expected[epoch + 1 :]]


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("used", [1, 2, 4])  # with none used, no batch of the epoch could tell
@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_loader_goes_on_across_its_epochs(kind: str, used: int, prefetch: int) -> None:
    stream = [everything(batch) for batch in itertools.islice(ENDLESS[kind](), 14)]
    stopped, fresh = make_source(kind), make_source(kind)
    assert take(stopped, 0, limit=4, prefetch=prefetch)[0] == stream[:4]
    before, state = take(stopped, 1, used, limit=4, prefetch=prefetch)
    assert before == stream[4 : 4 + used]
    fresh.load_state_dict(state)
    assert take(fresh, 1, limit=4 - used, prefetch=prefetch)[0] == stream[4 + used : 8]
    assert take(fresh, 2, limit=4, prefetch=prefetch)[0] == stream[8:12]


@pytest.mark.parametrize(
    ("kind", "steps", "prefetch"),
    [("ArrayLoader", 1, 3), ("MapDataset", 4, 0), ("DataLoader", 9, 3), ("iterable", 9, 0), ("state_dict", 4, 3)],
)
def test_the_trainers_position_is_that_of_the_last_step(kind: str, steps: int, prefetch: Any) -> None:
    whole = uninterrupted(kind)
    trainer, seen = fit(LOADERS[kind](), max_epochs=-1, max_steps=steps, prefetch=prefetch)
    epoch, count = (steps - 1) // 5, (steps - 1) % 5 + 1
    assert [*itertools.chain(*seen.train)] == [*itertools.chain(*whole)][:steps]
    fresh = make_source(kind)
    fresh.load_state_dict(json.loads(json.dumps(fresh.state_dict(epoch, position_of(trainer).data))))
    rest = [[batch["id"] for batch in take(fresh, e)[0]] for e in range(epoch, 3)]
    assert rest == [whole[epoch][count:], *whole[epoch + 1 :]]


@pytest.mark.parametrize("kind", ["ArrayLoader", "MapDataset", "list"])
def test_between_two_epochs_the_trainers_position_is_the_beginning_of_the_next(kind: str) -> None:
    trainer, _ = fit(LOADERS[kind](), max_epochs=1)
    position, fresh = position_of(trainer), make_source(kind)
    assert position.epoch == 1
    fresh.load_state_dict(json.loads(json.dumps(fresh.state_dict(position.epoch, position.data))))
    assert [[batch["id"] for batch in take(fresh, e)[0]] for e in (1, 2)] == uninterrupted(kind)[1:]


def test_an_epoch_that_a_hook_cut_short_is_over() -> None:
    skip = hooks(on_train_batch_start=lambda t, m, batch, idx: -1 if idx == 2 else None)
    trainer, _ = fit(batches(), None, skip, max_epochs=1, prefetch=3)
    assert (position_of(trainer).epoch, position_of(trainer).data) == (1, None)


def test_validation_does_not_move_the_position_of_training() -> None:
    trainer, _ = fit(batches(), batches()[:3], max_epochs=-1, max_steps=2, val_check_interval=1)
    assert position_of(trainer).data == 2


def test_a_dataset_behind_worker_processes_reshuffles_and_goes_on() -> None:
    def make() -> Any:
        options = grain.MultiprocessingOptions(num_workers=1)
        return shuffled().to_iter_dataset().batch(BATCH).mp_prefetch(options)

    expected = [*map(everything, shuffled().batch(BATCH).repeat(2))][ROWS // BATCH :]  # no worker, no source of ours
    stopped, fresh = source_of(make(), "loader"), source_of(make(), "loader")
    before, state = take(stopped, 1, 2)
    fresh.load_state_dict(state)
    assert [before, take(fresh, 1)[0]] == [expected[:2], expected[2:]]


# Other data is refused -------------------------------------------------------------------------------


def arrays(count: int = 18, batch_size: int = BATCH, first: int = 0, **arguments: Any) -> jl.ArrayLoader:
    return jl.ArrayLoader({"id": np.arange(first, first + count)}, batch_size, **({"shuffle": True} | arguments))


def mapped(count: int = 18, batch_size: int = BATCH, first: int = 0, seed: int = 0, drop: bool = False) -> Any:
    rows = [{"id": np.int32(first + i)} for i in range(count)]
    return grain.MapDataset.source(rows).seed(seed).shuffle().batch(batch_size, drop_remainder=drop)


def streamed(count: int = 18, batch_size: int = BATCH, first: int = 0, seed: int = 0, drop: bool = False) -> Any:
    rows = grain.MapDataset.source([{"id": np.int32(first + i)} for i in range(count)])
    return rows.seed(seed).shuffle().to_iter_dataset().map(double).batch(batch_size, drop_remainder=drop)


def loaded(count: int = 18, batch_size: int = BATCH, first: int = 0, seed: int = 0, drop: bool = False) -> Any:
    return data_loader(count, batch_size, seed, drop, first)


KINDS: dict[str, Callable[..., Any]] = {
    "ArrayLoader": arrays,
    "MapDataset": mapped,
    "IterDataset": streamed,
    "DataLoader": loaded,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"count": 19}, r"rows|length|num_records|19"),
        ({"batch_size": 5}, "batch_size.*4.*5"),
        ({"seed": 7}, "seed.*0.*7"),
        ({"first": 100}, "[0-9a-f]{16}.*[0-9a-f]{16}"),  # a hash of the content
        ({"drop": True}, r"drop_remainder|_length.*5.*4"),
    ],
    ids=["length", "batch size", "seed", "content", "drop_remainder"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_other_data_is_refused_by_what_differs(kind: str, change: dict[str, Any], named: str) -> None:
    if kind == "ArrayLoader":
        change = {"drop_remainder" if key == "drop" else key: value for key, value in change.items()}
    _, state = take(source_of(KINDS[kind](), "loader"), 0, 2)
    other = source_of(KINDS[kind](**change), "loader")
    with pytest.raises(DataError, match=rf"(?s){named}"):
        other.load_state_dict(state)
        take(other, 0)


@pytest.mark.parametrize("kind", ["ArrayLoader", "list", "state_dict"])
def test_the_state_of_another_kind_of_loader_is_refused(kind: str) -> None:
    _, state = take(make_source("MapDataset"), 0, 2)
    with pytest.raises(DataError, match="(?s)MapDataset.*" + type(LOADERS[kind]()).__name__):
        make_source(kind).load_state_dict(state)


def test_the_state_of_a_longer_list_is_refused() -> None:
    _, state = take(make_source("list"), 0, 2)
    with pytest.raises(DataError, match="5.*4"):
        source_of(batches()[:4], "loader").load_state_dict(state)


def test_another_array_loader_is_told_of_where_no_batch_of_the_epoch_was_used(caplog: pytest.LogCaptureFixture) -> None:
    _, state = take(source_of(arrays(), "loader"), 0, 0)
    other = source_of(arrays(seed=7), "loader")
    other.load_state_dict(state)
    assert "loader is another loader than before the resume: seed was" in caplog.text
    assert take(other, 0)[0] == take(source_of(arrays(seed=7), "fresh"), 0)[0]


# Every epoch has its own order -----------------------------------------------------------------------

SHUFFLES: dict[str, Callable[[], Any]] = {
    "MapDataset": lambda: shuffled().batch(BATCH),
    "MapDataset with map": lambda: shuffled().map(double).batch(BATCH).map(dict),
    "MapDataset with random_map": lambda: shuffled().random_map(add_noise).batch(BATCH),
    "MapDataset shuffled in batches": lambda: grain.MapDataset.source(records()).batch(BATCH).seed(1).shuffle(),
    "IterDataset": lambda: shuffled().batch(BATCH).to_iter_dataset(),
    "IterDataset with map": lambda: shuffled().batch(BATCH).to_iter_dataset().map(double),
    "IterDataset with batch": lambda: shuffled().to_iter_dataset().batch(BATCH),
    "IterDataset with filter": lambda: shuffled().to_iter_dataset().filter(lambda x: x["id"] >= 0).batch(BATCH),
    "IterDataset with prefetch": lambda: grain.experimental.ThreadPrefetchIterDataset(
        shuffled().to_iter_dataset().batch(BATCH), prefetch_buffer_size=2
    ),
    "IterDataset with a window shuffle": lambda: grain.experimental.WindowShuffleIterDataset(
        grain.MapDataset.source(records()).to_iter_dataset(), window_size=10, seed=1
    ).batch(BATCH),
    "mixed MapDatasets": lambda: grain.MapDataset.mix([shuffled(), shuffled()], [0.5, 0.5])[:ROWS].batch(BATCH),
    "DataLoader": data_loader,
    "ArrayLoader": lambda: jl.ArrayLoader({"id": np.arange(ROWS)}, BATCH, shuffle=True),
}


def orders_of(loader: Any, count: int = 3) -> list[list[int]]:
    source = source_of(loader, "loader")
    return [[i for batch, _ in source.epoch(epoch) for i in ids(batch)] for epoch in range(count)]


@pytest.mark.parametrize("kind", SHUFFLES)
def test_three_epochs_give_each_row_once_in_three_orders_that_a_second_run_repeats(kind: str) -> None:
    loader = SHUFFLES[kind]()
    orders = orders_of(loader)
    if "mixed" not in kind:
        assert [sorted(order) for order in orders] == [[*range(ROWS)]] * 3
        assert len({*map(tuple, orders)}) == 3
    assert orders_of(loader) == orders_of(SHUFFLES[kind]()) == orders  # one loader in two runs, and an equal one


@pytest.mark.parametrize("kind", ["MapDataset", "IterDataset with batch", "DataLoader", "ArrayLoader"])
def test_a_trainer_opens_each_epoch_by_its_number_and_validation_keeps_one_order(kind: str) -> None:
    _, seen = fit(SHUFFLES[kind](), SHUFFLES[kind]())
    assert [[*itertools.chain(*epoch)] for epoch in seen.train] == orders_of(SHUFFLES[kind]())
    assert [[*itertools.chain(*epoch)] for epoch in seen.val] == orders_of(SHUFFLES[kind](), 1) * 3


def epochs_of(loader: Any, count: int) -> list[Any]:
    source = source_of(loader, "loader")
    return [everything(batch) for epoch in range(count) for batch, _ in source.epoch(epoch)]


@pytest.mark.parametrize("kind", [kind for kind in SHUFFLES if kind.startswith(("MapDataset", "mixed"))])
def test_epochs_of_a_map_dataset_are_those_of_its_repetition(kind: str) -> None:
    repeated = SHUFFLES[kind]().repeat(3)
    assert epochs_of(SHUFFLES[kind](), 3) == [everything(batch) for batch in repeated]


def with_noise() -> grain.MapDataset:
    return shuffled().random_map(add_noise)


Stages = tuple[Callable[[], grain.MapDataset], Callable[[grain.IterDataset], grain.IterDataset]]
STREAMS: dict[str, Stages] = {
    "plain": (shuffled, lambda rows: rows.batch(BATCH)),
    "map": (lambda: shuffled().map(double), lambda rows: rows.map(dict).batch(BATCH)),
    "filter": (shuffled, lambda rows: rows.filter(is_no_fifth).batch(BATCH)),  # 16 rows an epoch
    "MapDataset's random_map": (with_noise, lambda rows: rows.batch(BATCH)),
    "batched before": (lambda: shuffled().batch(BATCH), lambda rows: rows.map(double)),
    "prefetch": (
        shuffled,
        lambda rows: grain.experimental.ThreadPrefetchIterDataset(rows.batch(BATCH), prefetch_buffer_size=2),
    ),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_epochs_of_an_iter_dataset_are_those_of_the_repeated_rows(kind: str) -> None:
    rows, stages = STREAMS[kind]
    expected = [everything(batch) for batch in stages(rows().repeat(3).to_iter_dataset())]
    assert epochs_of(stages(rows().to_iter_dataset()), 3) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: rows.random_map(add_noise).batch(BATCH),
        lambda rows: rows.random_map(add_noise).to_iter_dataset().batch(BATCH),
        lambda rows: rows.to_iter_dataset().random_map(add_noise).batch(BATCH),
        lambda rows: rows.to_iter_dataset().batch(BATCH).random_map(add_noise),
        lambda rows: rows.to_iter_dataset().seed(5).random_map(add_noise).batch(BATCH),
    ],
    ids=["MapDataset", "MapDataset, streamed", "IterDataset", "IterDataset of batches", "IterDataset with a seed"],
)
def test_random_maps_draw_anew_in_each_epoch(make: Callable[[grain.MapDataset], Any]) -> None:
    source = source_of(make(shuffled()), "loader")
    noise = [[np.asarray(batch["noise"]).tolist() for batch, _ in source.epoch(epoch)] for epoch in range(3)]
    assert noise[0] != noise[1] != noise[2] != noise[0]


@pytest.mark.parametrize(
    "join",
    [
        lambda one, other: grain.IterDataset.mix([one, other], [0.5, 0.5]),
        lambda one, other: grain.experimental.InterleaveIterDataset([one, other], cycle_length=2),
    ],
    ids=["mixed", "interleaved"],
)
def test_joined_iter_datasets_reshuffle_each_part(join: Callable[..., grain.IterDataset]) -> None:
    parts = [shuffled(seed).to_iter_dataset() for seed in (1, 2)]
    source = source_of(join(*parts).batch(BATCH), "loader")
    orders = [tuple(itertools.chain(*(ids(batch) for batch, _ in source.epoch(epoch)))) for epoch in range(3)]
    assert len({*orders}) == 3


def test_a_dataset_behind_worker_processes_is_known_to_have_no_end() -> None:
    rows = shuffled().repeat().to_iter_dataset().batch(BATCH)
    assert source_of(rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)), "loader").is_endless


def test_opening_an_epoch_leaves_the_users_dataset_as_it_was() -> None:
    dataset, loader = SHUFFLES["IterDataset with filter"](), data_loader()
    before = [[everything(batch) for batch in x] for x in (dataset, loader)]
    for x in (dataset, loader):
        epochs_of(x, 3)
    assert [[everything(batch) for batch in x] for x in (dataset, loader)] == before


def test_a_position_is_not_changed_by_what_is_drawn_after_it() -> None:
    for kind in LOADERS:
        positions = [(at, copy.deepcopy(at)) for _, at in make_source(kind).epoch(0)]
        assert [at for at, _ in positions] == [kept for _, kept in positions], kind


# Loaders as users write them --------------------------------------------------------------------------


class Indexed:
    """The protocol of Keras' Sequence: it raises what it likes beyond its length."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, k: int) -> Any:
        if k >= 3:
            raise FileNotFoundError(k)
        return batches()[k]


class Promised:
    """Ends nowhere, and tells how many batches make an epoch."""

    def __init__(self) -> None:
        self.stream = itertools.cycle(batches())

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return self.stream


class OwnIterator:
    """Is its own iterator, which begins again, with another batch, when it is iterated again."""

    opened = 0

    def __iter__(self) -> "OwnIterator":
        self.opened, self.k = self.opened + 1, -1
        return self

    def __next__(self) -> Any:
        self.k += 1
        if self.k == 5:
            raise StopIteration
        return batches()[(self.k + self.opened - 1) % 5]


class Stream(OwnIterator):
    """Is its own iterator, and goes on where it is."""

    k, opened = -1, 1

    def __iter__(self) -> "Stream":
        return self


def numbers(epochs: list[Ids]) -> list[list[int]]:
    return [[batch[0] // BATCH for batch in epoch] for epoch in epochs]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_batch_is_given_once_whatever_the_loaders_habits(prefetch: int) -> None:
    train = lambda loader, **given: numbers(fit(loader, prefetch=prefetch, **({"max_epochs": 2} | given))[1].train)  # noqa: E731
    assert train(Indexed()) == [[0, 1, 2]] * 2
    assert train(Promised()) == [[0, 1, 2], [3, 4, 0]]
    assert train(Stream(), max_epochs=1) == [[0, 1, 2, 3, 4]]
    assert train(Stream(), limit_train_batches=2) == [[0, 1], [2, 3]]
    assert train(OwnIterator()) == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]]


@pytest.mark.parametrize("sanity", [0, 2])
def test_one_iterator_may_train_and_validate_and_the_sanity_check_takes_nothing_from_a_generator(sanity: int) -> None:
    loader = OwnIterator()
    trainer, seen = fit(loader, loader, max_epochs=2, num_sanity_val_steps=sanity)
    assert [sorted(x) for x in numbers(seen.train)] == [[0, 1, 2, 3, 4]] * 2
    assert trainer.callback_metrics["rows"] == ROWS
    trainer, _ = fit(batches(), (batch for batch in batches()), max_epochs=1, num_sanity_val_steps=sanity)
    assert trainer.callback_metrics["rows"] == ROWS


def test_a_loader_that_validation_shares_knows_where_training_stands() -> None:
    loader = SHUFFLES["ArrayLoader"]()
    trainer, _ = fit(loader, loader, val_check_interval=2, max_epochs=-1, max_steps=5 + 2)
    source = source_of(SHUFFLES["ArrayLoader"](), "loader")
    source.load_state_dict(source.state_dict(1, position_of(trainer).data))
    order = np.random.default_rng((0, 1)).permutation(ROWS)
    assert ids(next(source.epoch(1))[0]) == order[8:12].tolist()


def test_where_a_generator_stands_is_counted_across_epochs() -> None:
    make = lambda: (batch for batch in itertools.cycle(batches()))  # noqa: E731
    trainer, seen = fit(make(), limit_train_batches=3, max_steps=4, max_epochs=-1)
    assert numbers(seen.train) == [[0, 1, 2], [3]]
    source = source_of(make(), "loader", may_go_on=True)
    source.load_state_dict(source.state_dict(1, position_of(trainer).data))
    assert ids(next(source.epoch(1))[0])[0] // BATCH == 4


def test_a_timeout_is_for_one_batch_also_where_a_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, watch = list[int](), Watchdog.watch
    monkeypatch.setattr(Watchdog, "watch", lambda self, *args: (waits.append(1), watch(self, *args))[1])
    begun: list[int] = []  # waits that had begun when a batch was drawn

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            for batch in batches():
                begun.append(len(waits))
                yield batch

        def __len__(self) -> int:
            return 5

    assert numbers(fit(Loader(), overfit_batches=4, data_timeout=60, max_epochs=2)[1].train) == [[0, 1, 2, 3]] * 2
    assert len({*begun}) == len(begun) >= 4
