"""Sources: where an iteration is, the order of each epoch of grain's loaders, and memory that is filled again."""

import copy
import itertools
import json
import mmap
import signal
from types import SimpleNamespace

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit import by_hand, trainers
from kit.batches import Stream, numbered, rows_of
from kit.grain_rows import BATCH, ROWS, add_noise, data_loader, double, everything, is_no_fifth, records, shuffled
from kit.inside import prefetcher_of
from kit.journal import Batches, hooks
from kit.modules import Mean, module
from kit.refusals import refuses
from kit.trainers import BARE, STRATEGIES, fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.data.loaders import source_of
from jaxlit.errors import DataError
from jaxlit.loop.snapshot import load_loader


def fit_seen(loader, val=None, *callbacks, **arguments):
    seen, given = Batches(), {"max_epochs": 3, "num_sanity_val_steps": 0} | arguments
    return trainers.fit(Mean(), loader, val, seen, *callbacks, **given), seen


def batches(order=range(ROWS)):
    rows = np.asarray(order, np.float32)[:, None]
    return [{"x": rows[i : i + BATCH]} for i in range(0, ROWS, BATCH)]


class Stateful:
    """Keeps its own epochs and position, as torchdata's StatefulDataLoader does; a living state changes later."""

    def __init__(self, lives=False):
        self._lives, self._state, self._start = lives, {"epoch": -1, "next": 0}, None

    def __len__(self):
        return ROWS // BATCH

    def __iter__(self):
        if (start := self._start) is None:
            start = 0
            self._state["epoch"] += 1
        self._start = None
        order = np.random.default_rng(self._state["epoch"]).permutation(ROWS)
        for k in range(start, len(self)):
            self._state["next"] = k + 1
            yield batches(order)[k]

    def state_dict(self):
        return self._state if self._lives else dict(self._state)

    def load_state_dict(self, state):
        self._state, self._start = dict(state), state["next"]


def arrays(count=18, batch_size=BATCH, first=0, seed=3, drop=False):
    rows = np.arange(first, first + count, dtype=np.float32)[:, None]
    return jl.ArrayLoader({"x": rows}, batch_size, shuffle=True, seed=seed, drop_remainder=drop)


LOADERS = {
    "ArrayLoader": arrays,
    "MapDataset": lambda: shuffled().map(double).random_map(add_noise).batch(BATCH),
    "MapDataset with holes": lambda: shuffled().batch(BATCH).filter(lambda batch: 7 not in batch["x"]),
    "IterDataset": lambda: shuffled().to_iter_dataset().map(double).filter(is_no_fifth).batch(3),
    "DataLoader": data_loader,
    "list": batches,
    "iterable": lambda: Stream(batches()),
    "state_dict": Stateful,
    "living state_dict": lambda: Stateful(lives=True),
}
ENDLESS = {
    "batch().repeat()": lambda: shuffled().batch(BATCH).repeat(),
    "repeat().to_iter_dataset()": lambda: shuffled().repeat().to_iter_dataset().map(double).batch(3),
    "DataLoader without end": lambda: data_loader(num_epochs=None),
    "cycle": lambda: itertools.cycle(batches()),
}


def make_source(kind):
    return source_of((LOADERS | ENDLESS)[kind](), "loader", may_continue=True)  # as the Trainer does


def take(source, epoch, count=None, *, limit=None, prefetch=0):
    """Use batches of an epoch and break off; returns them, and where the iteration stood."""
    fed, used, at = prefetcher_of(prefetch), [], None
    draws = fed.batches(source, epoch, limit)
    for _ in itertools.count() if count is None else range(count):
        if (drawn := next(draws, None)) is None:
            break
        used.append(everything(drawn.host))
        at = drawn.position
    state = json.loads(json.dumps(source.state_dict(epoch, at)))  # as a checkpoint keeps it, and when
    fed.close()
    return used, state


def test_only_cheap_loaders_are_drawn_again() -> None:
    for keep in (None, 4):
        drawn = list((source := source_of(batches(), "train", keep=keep)).epoch(0))
        assert rows_of(source.redraw(0, drawn[1][1], 2)) == rows_of(batch for batch, _ in drawn[2:4])
    assert source_of(iter(batches()), "train").redraw(0, None, 1) == []
    assert source_of(Stream(batches()), "train").redraw(0, 1000, 1) == []
    stateful = source_of(Stateful(), "train")  # how its state was before the first batch is not known
    (_, after), (second, _) = next(pairs := stateful.epoch(0)), next(pairs)
    assert stateful.redraw(0, None, 1) == [] and rows_of(stateful.redraw(0, after, 1)) == rows_of([second])


@pytest.mark.parametrize("kind", thinned(LOADERS, *[*LOADERS][::2]))
def test_an_equal_loader_continues_after_the_last_used_batch(kind):
    whole = make_source(kind)
    expected = [take(whole, epoch)[0] for epoch in range(3)]
    for count, epoch, prefetch in ((0, 0, 0), (1, 0, 3), (1, 1, 0), (len(expected[1]), 1, 3)):
        stopped, fresh = make_source(kind), make_source(kind)
        for e in range(epoch):
            take(stopped, e, prefetch=prefetch)
        before, state = take(stopped, epoch, count, prefetch=prefetch)
        fresh.load_state_dict(state)
        after = [take(fresh, e, prefetch=prefetch)[0] for e in (epoch, epoch + 1)]
        assert [before, *after] == [expected[epoch][:count], expected[epoch][count:], expected[epoch + 1]]
    positions = [(at, copy.deepcopy(at)) for _, at in make_source(kind).epoch(0)]
    assert [at for at, _ in positions] == [kept for _, kept in positions], "what is drawn later changes none"


STOPS = {
    "a checkpoint": hooks(on_train_epoch_end=lambda t, m: t.current_epoch == 0 and t.save_checkpoint("run")),
    "a stop": hooks(on_train_batch_end=lambda t, m, out, batch, i: i == 2 and signal.raise_signal(signal.SIGINT)),
}


@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize("kind", thinned(ENDLESS, *[*ENDLESS][:1]))
def test_an_endless_loader_continues_after_the_end_of_an_epoch(kind, how):
    given = {"limit_train_batches": 3}
    whole = fit_seen(ENDLESS[kind](), numbered(1), **given)[1]
    fit_seen(ENDLESS[kind](), numbered(1), STOPS[how], default_root_dir="stopped", **given)
    path = "run" if how == "a checkpoint" else "stopped/checkpoints/step_00000003"
    resumed = fit_seen(ENDLESS[kind](), numbered(1), ckpt_path=path, **given)[1]
    assert [*map(rows_of, resumed.train)] == [*map(rows_of, whole.train[1:])]


@pytest.mark.parametrize(("used", "prefetch"), thinned([(1, 3), (4, 0)], (1, 3)))
@pytest.mark.parametrize("kind", thinned(ENDLESS, *[*ENDLESS][1:2]))
def test_an_endless_loader_goes_on_across_its_epochs(kind, used, prefetch):
    stream = [everything(batch) for batch in itertools.islice(ENDLESS[kind](), 14)]
    stopped, fresh = make_source(kind), make_source(kind)
    assert take(stopped, 0, limit=4, prefetch=prefetch)[0] == stream[:4]
    before, state = take(stopped, 1, used, limit=4, prefetch=prefetch)
    assert before == stream[4 : 4 + used]
    fresh.load_state_dict(state)
    assert take(fresh, 1, limit=4 - used, prefetch=prefetch)[0] == stream[4 + used : 8]
    assert take(fresh, 2, limit=4, prefetch=prefetch)[0] == stream[8:12]


def mapped(drop=False, batch_size=BATCH, **rows):
    return shuffled(**({"seed": 0} | rows)).batch(batch_size, drop_remainder=drop)


def streamed(drop=False, batch_size=BATCH, **rows):
    return shuffled(**({"seed": 0} | rows)).to_iter_dataset().map(double).batch(batch_size, drop_remainder=drop)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": 19}, r"rows|length|num_records|19"),
        ({"batch_size": 5}, "batch_size.*4.*5"),
        ({"seed": 7}, "seed.*0.*7"),
        ({"first": 100}, ": the data differ[.]"),
        ({"drop": True}, r"drop_remainder|_length.*5.*4"),
    ],
)
@pytest.mark.parametrize("make", [arrays, mapped, streamed, data_loader])
def test_the_state_of_other_data_is_refused_by_what_differs(make, change, words):
    rows = {"count": 18, "seed": 0}
    _, state = take(source_of(make(**rows), "loader"), 0, 2)
    other = source_of(make(**(rows | change)), "loader")
    refuses(DataError, lambda: (other.load_state_dict(state), take(other, 0)), words)


def test_the_state_of_another_loader_is_refused():
    _, state = take(make_source("MapDataset"), 0, 2)
    for kind in ("ArrayLoader", "list", "state_dict"):
        with pytest.raises(DataError, match="(?s)MapDataset.*" + type(LOADERS[kind]()).__name__):
            make_source(kind).load_state_dict(state)
    _, state = take(make_source("list"), 0, 2)
    refuses(DataError, lambda: source_of(batches()[:4], "loader").load_state_dict(state), "5.*4")


def test_kept_batches_continue_and_are_given_as_they_were():
    make = lambda: source_of(arrays(), "loader", keep=3)  # noqa: E731
    expected, (_, state), fresh = take(make(), 0)[0], take(make(), 0, 1), make()
    fresh.load_state_dict(state)
    assert [take(fresh, epoch)[0] for epoch in (0, 1)] == [expected[1:], expected]
    source = source_of(batches(), "loader", keep=2)
    for epoch in range(3):
        drawn = [batch for batch, _ in source.epoch(epoch)]
        assert [everything(batch) for batch in drawn] == [everything(batch) for batch in batches()[:2]]
        for batch in drawn:
            batch["x"] += 100  # as a hook may


def test_shares_that_two_processes_saved_continue_in_one():
    rows = grain.MapDataset.source(records())
    states = [take(source_of(rows[i::2].batch(BATCH // 2), "loader"), 0, 2)[1] for i in range(2)]
    fresh = source_of(rows.batch(BATCH), "loader")
    saved = {"processes": 2, "loaders": {"training": {"idx": 0, "states": states}}}
    load_loader(fresh, saved)
    assert take(fresh, 0)[0] == take(source_of(rows.batch(BATCH), "loader"), 0)[0][2:]


def test_another_array_loader_warns_between_epochs(caplog):
    _, state = take(source_of(arrays(), "loader"), 0, 0)
    other = source_of(arrays(seed=7), "loader")
    other.load_state_dict(state)
    assert "loader is another loader than before the resume: seed was" in caplog.text
    assert take(other, 0)[0] == take(source_of(arrays(seed=7), "fresh"), 0)[0]


class Indexed:
    """The protocol of Keras' Sequence: it raises what it likes beyond its length."""

    def __len__(self):
        return 3

    def __getitem__(self, k):
        if k >= 3:
            raise FileNotFoundError(k)
        return batches()[k]


class Promised:
    """Ends nowhere, and tells how many batches make an epoch."""

    def __init__(self):
        self.stream = itertools.cycle(batches())

    def __len__(self):
        return 3

    def __iter__(self):
        return self.stream


class OwnIterator:
    """Is its own iterator, which begins again, with another batch, when it is iterated again."""

    opened = 0

    def __iter__(self):
        self.opened, self.k = self.opened + 1, -1
        return self

    def __next__(self):
        self.k += 1
        if self.k == 5:
            raise StopIteration
        return batches()[(self.k + self.opened - 1) % 5]


class Goes(OwnIterator):
    """Is its own iterator, and continues where it is."""

    k, opened = -1, 1

    def __iter__(self):
        return self


def numbers(epochs):
    return [[int(batch["x"][0, 0]) // BATCH for batch in epoch] for epoch in epochs]


@pytest.mark.parametrize("prefetch", thinned([0, 2], 2))
def test_each_batch_is_given_once_whatever_the_loaders_habits(prefetch):
    train = lambda loader, **given: numbers(fit_seen(loader, prefetch=prefetch, **({"max_epochs": 2} | given))[1].train)  # noqa: E731
    assert train(Indexed()) == [[0, 1, 2]] * 2
    assert train(Promised()) == [[0, 1, 2], [3, 4, 0]]
    assert train(Goes(), max_epochs=1) == [[0, 1, 2, 3, 4]]
    assert train(Goes(), limit_train_batches=2) == [[0, 1], [2, 3]]
    assert train(OwnIterator()) == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]]
    assert train(itertools.cycle(batches()), limit_train_batches=3) == [[0, 1, 2], [3, 4, 0]]


@pytest.mark.parametrize("sanity", [0, 2])
def test_one_iterator_may_train_and_validate(sanity):
    loader = OwnIterator()
    _, seen = fit_seen(loader, loader, max_epochs=2, num_sanity_val_steps=sanity)
    assert [sorted(x) for x in numbers([*seen.train, seen.val[-1]])] == [[0, 1, 2, 3, 4]] * 3
    _, seen = fit_seen(batches(), (batch for batch in batches()), max_epochs=1, num_sanity_val_steps=sanity)
    assert rows_of(seen.val[-1]) == [*range(ROWS)]


@pytest.mark.full
def test_a_dataset_with_workers_reshuffles_and_continues():
    def make():
        rows = shuffled().to_iter_dataset().batch(BATCH)
        return source_of(rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)), "loader")

    expected = [*map(everything, shuffled().batch(BATCH).repeat(2))][ROWS // BATCH :]  # no worker, no source of ours
    stopped, fresh = make(), make()
    before, state = take(stopped, 1, 2)
    fresh.load_state_dict(state)
    assert [before, take(fresh, 1)[0]] == [expected[:2], expected[2:]]


def ahead(rows):
    return grain.experimental.ThreadPrefetchIterDataset(rows, prefetch_buffer_size=2)


def window_shuffled():
    rows = grain.MapDataset.source(records()).to_iter_dataset()
    return grain.experimental.WindowShuffleIterDataset(rows, window_size=10, seed=1).batch(BATCH)


def parts():
    return [shuffled(seed).to_iter_dataset() for seed in (1, 2)]


SHUFFLES = {
    "MapDataset": lambda: shuffled().map(double).batch(BATCH).map(dict),
    "MapDataset shuffled in batches": lambda: grain.MapDataset.source(records()).batch(BATCH).seed(1).shuffle(),
    "IterDataset": lambda: shuffled().batch(BATCH).to_iter_dataset().map(double),
    "IterDataset with filter": lambda: shuffled().to_iter_dataset().filter(lambda x: x["x"] >= 0).batch(BATCH),
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
)
def test_random_maps_draw_anew_in_each_epoch(make):
    noise = [[batch["noise"] for batch in epoch] for epoch in epochs_of(make(shuffled()))]
    draws = [{float(x) for batch in epoch for x in np.ravel(batch)} for epoch in noise]
    assert not draws[0] & draws[1] | draws[1] & draws[2] | draws[2] & draws[0], "no record draws as another one did"


class Noise(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return add_noise(element, rng)


SAMPLERS = {
    "IndexSampler": lambda epochs: grain.samplers.IndexSampler(ROWS, shuffle=False, num_epochs=epochs, seed=3),
    "SequentialSampler": lambda _: grain.samplers.SequentialSampler(ROWS, grain.sharding.NoSharding(), seed=3),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_data_loader_draws_anew_in_each_epoch_whether_it_shuffles_or_not(kind):
    def make(epochs=1):
        operations = [Noise(), grain.transforms.Batch(BATCH)]
        return grain.DataLoader(data_source=records(), sampler=SAMPLERS[kind](epochs), operations=operations)

    epochs = epochs_of(make())
    assert epochs[0] == [everything(batch) for batch in make()], "the first is grain's"
    assert [rows_of(epoch) for epoch in epochs] == [[*range(ROWS)]] * 3
    if kind == "IndexSampler":
        assert rows_of(itertools.chain(*epochs)) == rows_of(everything(batch) for batch in make(3))
    assert len({x for epoch in epochs for batch in epoch for x in batch["noise"]}) == 3 * ROWS
    before, state = take(source_of(make(), "loader"), 1, 2)
    state["at"] = state["at"].replace("seed=1000006", "seed=3")  # as it was saved when each epoch had the first seed
    (resumed := source_of(make(), "loader")).load_state_dict(state)
    assert [*before, *take(resumed, 1)[0]] == epochs[1]


@pytest.mark.parametrize(("count", "window"), [(10, 4), (12, 4)])
def test_a_window_shuffle_that_loses_records_is_named(count, window, caplog):
    rows = grain.MapDataset.source(records(count))
    rows = grain.experimental.WindowShuffleMapDataset(rows, window_size=window, seed=0)
    loses = rows_of([everything(batch) for batch in rows.batch(count)]) != [*range(count)]
    (epoch,) = epochs_of(rows.batch(2), 1)
    is_whole = sorted(rows_of(epoch)) == [*range(count)]
    assert loses and is_whole == (count == 12)
    text = "loader: WindowShuffleMapDataset(window_size=4) of 10 records repeats some in an epoch and leaves others out"
    assert caplog.text.count(text) == (not is_whole)


@pytest.mark.parametrize(("count", "drop"), [(10, False), (10, True), (9, False)])
def test_records_that_are_in_no_shard_are_counted(count, drop, caplog):
    def make(index):
        shards = grain.sharding.ShardOptions(index, 3, drop)
        sampler = grain.samplers.IndexSampler(count, shards, shuffle=False, num_epochs=1)
        return grain.DataLoader(data_source=records(count), sampler=sampler, operations=[grain.transforms.Batch(1)])

    read = [row for index in range(3) for row in rows_of(epochs_of(make(index), 1)[0])]
    assert len(read) == 9
    text = (
        "loader: grain.DataLoader gives each of 3 shards 3 of 10 records, also with drop_remainder=False: 1 are in none"
    )
    assert caplog.text.count(text) == 3 * (count == 10 and not drop)
    dataset = grain.MapDataset.source(records(count))
    assert sorted(int(x["x"][0]) for i in range(3) for x in dataset[i::3]) == [*range(count)]


def test_an_endless_dataset_with_workers_is_known():
    rows = shuffled().repeat().to_iter_dataset().batch(BATCH)
    assert source_of(rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)), "loader").is_endless


COPIED_ROWS, COLUMNS = 16, 4


def aligned(rows=COPIED_ROWS):
    """Return memory at an address that a CPU device takes as its own."""
    raw = np.empty(rows * COLUMNS * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + rows * COLUMNS * 4].view(np.float32).reshape(rows, COLUMNS)


def ring(count):
    memory = aligned(count * COPIED_ROWS).reshape(count, COPIED_ROWS, COLUMNS)
    return lambda k: memory[k % count]


def shared_memory():
    memory = mmap.mmap(-1, 4 * COPIED_ROWS * COLUMNS)  # each array is another object, and none owns the memory
    return lambda k: np.ndarray((COPIED_ROWS, COLUMNS), np.float32, buffer=memory)


MEMORY = {"one array": lambda: ring(1), "a ring": lambda: ring(3), "shared memory": shared_memory}


def content(k):
    return np.arange(COPIED_ROWS * COLUMNS, dtype=np.float32).reshape(COPIED_ROWS, COLUMNS) / 8 + k % 31


def contents(count=20):
    """Return the batches; the last is of fewer rows."""
    return [content(k)[: COPIED_ROWS if k < count - 1 else COPIED_ROWS - 3] for k in range(count)]


class Refilling:
    def __init__(self, memory):
        self.memory, self.drawn = memory, 0

    def __iter__(self):
        for x in contents():
            memory = self.memory(self.drawn)
            self.drawn += 1
            memory[: len(x)] = x
            yield {"x": memory[: len(x)]}


def slow_step(self, batch):
    """Take so long that steps are in flight when the next batch is prepared."""
    x = batch["x"]
    slow = jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ (x.T @ x)), x)
    return {"loss": jnp.mean(self.error(batch) ** 2), "seen": x + 0 * slow.sum()}


def assert_same(result, expected):
    assert len(result) == len(expected)
    assert [k for k, (a, b) in enumerate(zip(result, expected, strict=True)) if not np.array_equal(a, b)] == []


def assert_trained(made, batches):
    np.testing.assert_allclose(made.w[...], by_hand.mean([[x.mean(dtype=np.float64)] for x in batches]), rtol=1e-6)


CASES = [("single", "one array", 0), ("single", "shared memory", "auto"), ("single", "a ring", 2)]
CASES += [("fsdp", "shared memory", 0), *[(strategy, "one array", 2) for strategy in STRATEGIES[1:]]]


@pytest.mark.parametrize(
    ("strategy", "memory", "prefetch"), thinned(CASES, *CASES[1:3], ("shard_map", "one array", 2), full=CASES[::2])
)
def test_memory_that_a_loader_refills_is_copied(strategy, memory, prefetch, monkeypatch):
    # Every draw takes seconds, for which "auto" starts a thread.
    monkeypatch.setattr("jaxlit.data.prefetcher.time", SimpleNamespace(perf_counter=itertools.count().__next__))
    steps, starts, kept = [], [], []
    made = module(lambda self, batch: {"loss": jnp.mean(self.error(batch) ** 2), "seen": batch["x"] + 0})
    watch = hooks(
        on_train_batch_start=lambda t, m, batch, idx: (starts.append(np.array(batch["x"])), kept.append(batch["x"])),
        on_train_batch_end=lambda t, m, outputs, batch, idx: steps.append(outputs["seen"]),  # read when all is over
    )
    fit(made, Refilling(MEMORY[memory]()), None, watch, strategy=strategy, prefetch=prefetch, max_epochs=2, **BARE)
    for result in (steps, starts, kept):
        assert_same(result, contents() * 2)
    assert_trained(made, contents() * 2)


@pytest.mark.parametrize(("memory", "prefetch"), [("one array", 0), ("shared memory", 2)])
def test_memory_that_a_loader_fills_again_is_evaluated_as_it_was(memory, prefetch):
    made = module(predict=lambda self, batch: batch["x"])  # what is predicted may alias what came
    trainer = make_trainer(prefetch=prefetch)
    assert_same(trainer.predict(made, Refilling(MEMORY[memory]())), contents())
    (metrics,) = trainer.validate(made, Refilling(MEMORY[memory]()))
    np.testing.assert_allclose(metrics["val"], np.concatenate(contents()).mean(dtype=np.float64), rtol=1e-6)


CASES = [("single", 0), ("single", 2), ("ddp", 2), ("pmap", 0)]


@pytest.mark.parametrize(("strategy", "prefetch"), thinned(CASES, ("single", 0), ("ddp", 2)))
def test_memory_that_a_transfer_hook_refills_is_copied(strategy, prefetch):
    memory, steps, batches = aligned(64 * COPIED_ROWS), [], contents(12)[:11]

    def prepare(self, batch, dataloader_idx):
        memory[...] = np.tile(batch["x"], (64, 1))
        return {"x": memory}

    made = module(slow_step, on_before_batch_transfer=prepare)
    watch = hooks(on_train_batch_end=lambda t, m, outputs, batch, idx: steps.append(outputs["seen"]))
    fit(made, [{"x": x} for x in batches], None, watch, strategy=strategy, prefetch=prefetch)
    assert_same([np.asarray(x)[:COPIED_ROWS] for x in steps], batches)
    assert_trained(made, batches)


@pytest.mark.parametrize("strategy", thinned(["single", "shard_map"], "single"))
def test_a_callers_arrays_are_never_changed(strategy):
    batches, whole = [{"x": ring(1)(0)} for _ in range(6)], aligned(6 * COPIED_ROWS)
    for k, batch in enumerate(batches):
        batch["x"][...] = content(k)
    whole[...] = np.concatenate([content(k) for k in range(6)])
    trainer = make_trainer(strategy=strategy, max_epochs=2)
    trainer.fit(Mean(), batches, jl.ArrayLoader({"x": whole}, COPIED_ROWS))
    trainer.fit(Mean(), jl.ArrayLoader({"x": whole}, COPIED_ROWS), batches)
    assert_same([b["x"] for b in batches], [content(k) for k in range(6)])
    assert_same([whole], [np.concatenate([content(k) for k in range(6)])])


class Tensor:
    """Another library's: numpy sees its memory, which is filled again for each batch."""

    def __init__(self, memory):
        self.memory = memory

    def __array__(self, dtype=None, copy=None):
        return self.memory


@pytest.mark.parametrize("prefetch", [0, 2])
def test_memory_of_other_libraries_is_copied(prefetch):
    def tensors():
        memory = np.zeros((4, 1), np.float32)
        for k in range(6):
            memory[:] = k
            yield {"x": Tensor(memory)}

    seen, made = [], Mean()
    watch = hooks(on_train_batch_end=lambda t, m, outputs, batch, idx: seen.append(float(batch["x"][0, 0])))
    fit(made, tensors(), None, watch, prefetch=prefetch)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert float(made.w[0]) == pytest.approx(by_hand.mean([[k] for k in range(6)]), rel=1e-6)
