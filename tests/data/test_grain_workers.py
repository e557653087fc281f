"""grain's worker processes stay from epoch to epoch, give what no worker gives, and end with their parent."""

import contextlib
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import pytest
from kit.grain_rows import (
    BATCH,
    ROWS,
    add_noise,
    everything,
    first_of,
    is_no_fifth,
    lengthened,
    nothing,
    only_x,
    shuffled,
    with_pid,
)
from kit.journal import Batches
from kit.modules import Mean
from kit.processes import CHEAP, ROOT
from kit.trainers import fit

from jaxlit.data.loaders import source_of

ONE, TWO = (grain.MultiprocessingOptions(num_workers=n) for n in (1, 2))


def rows(worker: slice = slice(None), epoch: int = 0) -> Any:
    """Return what a worker reads in an epoch: its share of the repetition, in batches of the rows that pass."""
    share = shuffled().random_map(add_noise).repeat(epoch + 1)[epoch * ROWS : (epoch + 1) * ROWS][worker]
    return share.to_iter_dataset().filter(is_no_fifth).batch(3).map(with_pid)


def by_hand(epoch: int) -> list[dict[str, Any]]:
    """Return the batches of two workers in turn, without a process of grain's."""
    shares = (map(everything, rows(slice(i, None, 2), epoch)) for i in range(2))
    turns = itertools.zip_longest(*shares)
    return [{**batch, "pid": 0} for turn in turns for batch in turn if batch is not None]


def drawn(source: Any, epoch: int, count: int | None = None) -> tuple[list[dict[str, Any]], set[int], Any]:
    """Return an epoch's first batches without their process, their processes, and the state after them."""
    draws = source.epoch(epoch)
    batches, at = zip(*itertools.islice(draws, count), strict=True)
    draws.close()
    found = [{"pid": 0, **everything(batch)} for batch in batches]
    state = json.loads(json.dumps(source.state_dict(epoch, at[-1])))
    return [{**batch, "pid": 0} for batch in found], {batch["pid"] for batch in found}, state


@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.full)])
def test_processes_stay_and_draw_each_epoch_in_its_order(after: bool) -> None:
    def make() -> Any:
        dataset = rows().mp_prefetch(TWO)
        return source_of(dataset.map(dict) if after else dataset, "loader")

    source, fresh = make(), make()
    first, pids, _ = drawn(source, 0)
    assert first == by_hand(0) and len(pids) == 2 and os.getpid() not in pids
    left, again, state = drawn(source, 1, 2)  # an epoch that is left
    assert left == by_hand(1)[:2] and again == pids
    whole, again, _ = drawn(source, 2)
    assert whole == by_hand(2) and again == pids
    assert drawn(source, 0)[:2] == (first, pids), "once more, as overfit_batches does"
    fresh.load_state_dict(state)
    resumed, others, _ = drawn(fresh, 1)
    assert resumed == by_hand(1)[2:] and not others & pids
    assert drawn(fresh, 2)[:2] == (whole, others)
    for each in (source, fresh):
        each.close()
    assert not any(map(is_alive, pids | others))


@pytest.mark.full
def test_a_state_of_grains_own_iterator_is_continued() -> None:
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    iterator = iter(rows().mp_prefetch(TWO))
    begun = [everything(next(iterator)) for _ in range(3)]
    source = source_of(rows().mp_prefetch(TWO), "loader")
    source.load_state_dict({**source.state_dict(0, None), "at": iterator.get_state()})
    assert [{**batch, "pid": 0} for batch in begun] + drawn(source, 0)[0] == by_hand(0)
    iterator.close()
    source.close()


@pytest.mark.full
@pytest.mark.parametrize("used", [2, 9])
def test_a_repetition_of_workers_continues_within_its_second_round(used: int) -> None:
    # grain 0.2.18 has all processes marked as ended in a state from the second round on: nothing of it came back.
    make = lambda: source_of(grain.experimental.RepeatIterDataset(rows().mp_prefetch(TWO), num_epochs=3), "loader")  # noqa: E731
    source, fresh = make(), make()
    batches, _, state = drawn(source, 0, used)
    fresh.load_state_dict(state)
    assert batches + drawn(fresh, 0)[0] == by_hand(0) * 3
    source.close()
    fresh.close()


@pytest.mark.full
def test_a_seed_outside_of_the_workers_changes_by_epoch() -> None:
    source = source_of(rows().mp_prefetch(TWO).seed(5).random_map(add_noise), "loader")
    noises = [[batch["noise"] for batch in drawn(source, epoch)[0]] for epoch in (0, 1, 0)]
    assert noises[0] != noises[1] and noises[0] == noises[2]
    source.close()


def interleaved() -> Any:
    each = [shuffled(seed).to_iter_dataset().mp_prefetch(ONE) for seed in range(3)]
    return grain.experimental.InterleaveIterDataset(each, cycle_length=2).batch(BATCH)


ABOVE: dict[str, Callable[[], Any]] = {
    "interleave": interleaved,
    "repeat": lambda: grain.experimental.RepeatIterDataset(rows().mp_prefetch(ONE), num_epochs=2),
    "cache": lambda: grain.experimental.CacheIterDataset(rows().mp_prefetch(ONE)),
    "mix": lambda: grain.IterDataset.mix([rows().mp_prefetch(ONE), rows().mp_prefetch(ONE)], [0.5, 0.5]),
    "concat": lambda: grain.experimental.ConcatThenSplitIterDataset(
        rows().map(lengthened).mp_prefetch(ONE), length_struct={"x": 12}
    ),
    "rebatch": lambda: grain.experimental.RebatchIterDataset(rows().mp_prefetch(ONE).map(only_x), 2),
    "pack": lambda: grain.experimental.FirstFitPackIterDataset(
        rows().map(lengthened).mp_prefetch(ONE), length_struct={"x": 12}, num_packing_bins=4
    ),
    "zip": lambda: grain.experimental.ZipIterDataset([rows().mp_prefetch(ONE), rows().mp_prefetch(ONE)]).map(first_of),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", ABOVE)
def test_a_stage_after_the_workers_sees_each_epoch_as_if_it_were_the_first(kind: str) -> None:
    kept, alone = source_of(ABOVE[kind](), "loader"), list[Any]()
    for epoch in range(3):
        source = source_of(ABOVE[kind](), "loader")
        alone.append(drawn(source, epoch)[0])
        source.close()
    assert [drawn(kept, epoch)[0] for epoch in range(3)] == alone
    assert alone[0] != alone[1]
    kept.close()


@pytest.mark.full
def test_a_worker_that_dies_between_epochs_is_replaced() -> None:
    source = source_of(rows().mp_prefetch(TWO), "loader")
    _, pids, _ = drawn(source, 0)
    ends = os.pidfd_open(min(pids))
    os.kill(min(pids), signal.SIGKILL)
    assert select.select([ends], [], [], 60)[0] == [ends]
    os.close(ends)
    found, others, _ = drawn(source, 1)
    assert found == by_hand(1) and not others & pids and len(others) == 2
    source.close()


@pytest.mark.full
def test_options_that_come_after_the_workers_reach_all_epochs() -> None:
    strict = grain.experimental.DatasetOptions(filter_raise_threshold_ratio=0.99)
    none = shuffled(count=4000).to_iter_dataset().filter(is_no_fifth).filter(nothing).mp_prefetch(TWO)
    source = source_of(grain.experimental.WithOptionsIterDataset(none, strict), "loader")
    for epoch in (0, 1):
        with pytest.raises(ValueError, match="skipped 100.00 %"):
            drawn(source, epoch)
    source.close()


@pytest.mark.full
def test_the_processes_of_training_and_validation_stay() -> None:
    watch = Batches()
    fit(Mean(), rows().mp_prefetch(TWO), rows().mp_prefetch(TWO), watch, max_epochs=3, num_sanity_val_steps=0)
    train, val = ({int(batch["pid"]) for epoch in seen for batch in epoch} for seen in (watch.train, watch.val))
    assert len(watch.train) == len(watch.val) == 3 and len(train) == len(val) == 2
    assert not any(map(is_alive, train | val))


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


SCRIPT = """
import sys
import grain
from kit.grain_rows import records, with_pid
from kit.modules import Mean
import jaxlit as jl

class Pid(grain.transforms.Map):
    def map(self, record):
        return with_pid(record)

class Say(jl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        print("from", *{*batch["pid"].tolist()}, flush=True)

if __name__ == "__main__":
    batch = grain.transforms.Batch(batch_size=2)
    if sys.argv[1] == "DataLoader":
        sampler = grain.samplers.IndexSampler(num_records=40_000, num_epochs=1)
        many = {"data_source": records(40_000), "sampler": sampler}
        loader = grain.DataLoader(**many, operations=[Pid(), batch], worker_count=1)
    else:
        loader = grain.MapDataset.source(records(40_000)).map(with_pid).to_iter_dataset().batch(2)
        loader = loader.mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    bare = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
    jl.Trainer(strategy="single", callbacks=[Say()], **bare).fit(Mean(), loader)
"""


@contextlib.contextmanager
def started(kind: str, folder: Path) -> Iterator[tuple[Any, str]]:
    """Start the script as a group of processes, and yield it and the id of its worker after the first step."""
    (folder / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | CHEAP | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how = {"env": environment, "cwd": folder, "start_new_session": True}
    with subprocess.Popen([sys.executable, "script.py", kind], **pipes, **how) as training:
        assert training.stdout is not None
        (worker,) = next(line.split()[1:] for line in training.stdout if line.startswith("from"))
        yield training, worker


@pytest.mark.full
def test_ctrl_c_in_a_terminal_which_reaches_the_workers_too_ends_quietly(tmp_path: Path) -> None:
    with started("dataset", tmp_path) as (training, _):
        os.killpg(training.pid, signal.SIGINT)
        out, err = training.communicate(timeout=120)
    assert training.returncode == 0 and "interrupted in epoch 1" in out
    assert re.match(r"Ctrl-C: stopping after step \d+\. ", err) and "Traceback" not in err


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dataset", "DataLoader"])
def test_workers_of_a_killed_training_end(kind: str, tmp_path: Path) -> None:
    with started(kind, tmp_path) as (training, worker):
        ends = os.pidfd_open(int(worker))
        training.send_signal(signal.SIGKILL)
    assert select.select([ends], [], [], 60)[0] == [ends]
    os.close(ends)
