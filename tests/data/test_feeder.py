"""How batches come from a loader to the step: threads, the order of placing, hangs, worker processes, array files."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.processes import CHEAP, ROOT
from kit.trainers import BARE

import jaxlit as jl
from jaxlit.data.feeder import Feeder
from jaxlit.data.kinds import source_of
from jaxlit.data.watchdog import Watchdog
from jaxlit.strategies.single import SingleDevice

QUIET = BARE | {"num_sanity_val_steps": 0}  # thousands of batches, and who draws them
PREFETCH = "jaxlit-prefetch"


class Mean(jl.TrainModule):
    """Has one weight."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(()))

    def training_step(self, batch: Any) -> jax.Array:
        return self.w[...] * jnp.mean(batch["id"])

    def validation_step(self, batch: Any) -> None:
        self.log("mean", jnp.mean(batch["id"]))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.0)


class Loader:
    """Gives batches 0, 1, ..., and notes who draws.

    Args:
        count: How many batches.
        seconds: How long each draw takes.
    """

    def __init__(self, count: int, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds
        self.drawn, self.closed, self.threads = 0, 0, list[threading.Thread]()

    def __iter__(self) -> Iterator[Any]:
        try:
            for k in range(self.count):
                self.threads.append(threading.current_thread())
                self.drawn += 1
                time.sleep(self.seconds)
                yield {"id": np.full(2, k, np.int32)}
        finally:
            self.closed += 1


def fit(loader: Any, *callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    trainer = jl.Trainer(**({"strategy": "single", "max_epochs": 1, "callbacks": [*callbacks]} | QUIET | arguments))
    trainer.fit(Mean(), loader)
    return trainer


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == PREFETCH]


# Who draws, and how far ahead ------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_a_thread_comes_to_draw_its_number_ahead_and_never_more(prefetch: int) -> None:
    # Batch k is used, k + 1 is in hand since it is known by then whether k is the last, and the thread holds
    # `prefetch` beyond it. The loader itself lets the test wait for a draw, and the next one would be noted.
    came, drawn = [threading.Event() for _ in range(40)], list[int]()

    def batches() -> Iterator[Any]:
        for k in range(40):
            drawn.append(k)
            came[k].set()
            yield {"id": np.full(2, k, np.int32)}

    class Ahead(jl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            newest = min(batch_idx + 1 + prefetch, 39)
            assert came[newest].wait(60)
            assert len(drawn) <= newest + 1

    fit(batches(), Ahead(), prefetch=prefetch)
    assert drawn == list(range(40))


@pytest.mark.parametrize("prefetch", [0, "auto"])
def test_without_a_thread_one_batch_is_drawn_ahead(prefetch: Any) -> None:
    loader = Loader(7)  # fewer than "auto" looks at

    class Ahead(jl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            assert loader.drawn == min(batch_idx + 2, 7)

    fit(loader, Ahead(), prefetch=prefetch)


@pytest.mark.parametrize("seconds", [0.0, 0.002])
def test_prefetch_0_draws_in_the_main_thread_alone(seconds: float) -> None:
    loader = Loader(20, seconds)
    fit(loader, prefetch=0, max_epochs=2)
    assert {*loader.threads} == {threading.main_thread()}
    assert len(loader.threads) == 40


def test_a_number_draws_in_a_thread_after_the_first_batch() -> None:
    loader = Loader(20)
    fit(loader, prefetch=2, max_epochs=2)
    first, *others = [thread.name for thread in loader.threads]
    assert first == threading.main_thread().name  # looked at before anything is compiled
    assert others == [PREFETCH] * 39


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws take as long as their loader sleeps, whatever else the machine does."""
    slept = [0.0]
    monkeypatch.setattr("jaxlit.data.feeder.time", SimpleNamespace(perf_counter=lambda: slept[0]))
    monkeypatch.setitem(globals(), "time", SimpleNamespace(sleep=lambda s: slept.__setitem__(0, slept[0] + s)))


@pytest.mark.usefixtures("clock")
def test_auto_starts_a_thread_after_8_slow_draws_and_at_once_in_later_epochs() -> None:
    loader = Loader(12, 0.002)
    fit(loader, prefetch="auto", max_epochs=2)
    names = [thread.name == PREFETCH for thread in loader.threads]
    started = names.index(True)
    assert started == 8
    assert names == [False] * started + [True] * (24 - started)


@pytest.mark.usefixtures("clock")
def test_auto_starts_no_thread_for_fast_draws() -> None:
    loader = Loader(40)
    fit(loader, prefetch="auto", max_epochs=2)
    assert {*loader.threads} == {threading.main_thread()}


@pytest.mark.usefixtures("clock")
def test_one_slow_draw_is_not_enough_for_a_thread() -> None:
    class OnceSlow(Loader):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                if batch["id"][0] == 3:
                    time.sleep(0.05)
                yield batch

    loader = OnceSlow(40)
    fit(loader, prefetch="auto")
    assert {*loader.threads} == {threading.main_thread()}


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("count", "prefetch"),
    [(1, 0), (1, 3), (1, "auto"), (2, 1), (2, "auto"), (8, 3), (8, "auto"), (9, "auto"), (11, 1), (20, "auto")],
)
def test_every_batch_is_used_once_and_in_order(count: int, prefetch: Any) -> None:
    used: list[int] = []

    class Seen(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            used.append(int(batch["id"][0]))

    fit(Loader(count, 0.001), Seen(), prefetch=prefetch, max_epochs=2)
    assert used == [*range(count)] * 2


# Endings ---------------------------------------------------------------------------------------------


def fails_in(hook: str) -> type[jl.Callback]:
    def fail(self: Any, trainer: Any, module: Any, *arguments: Any) -> None:
        if trainer.global_step >= 3:
            raise LookupError("mine")

    return type("Fails", (jl.Callback,), {hook: fail})


class Bad(Loader):
    """Raises in place of batch 3, or gives one that no step could take."""

    def __init__(self, given: Any) -> None:
        super().__init__(9)
        self._given = given

    def __iter__(self) -> Iterator[Any]:
        for k, batch in enumerate(super().__iter__()):
            if k == 3 and isinstance(self._given, Exception):
                raise self._given
            yield self._given if k == 3 else batch


ENDS: dict[str, Callable[[Any], Any]] = {
    "max_steps": lambda prefetch: (loader := Loader(30), fit(loader, max_steps=3, max_epochs=-1, prefetch=prefetch)),
    "limit": lambda prefetch: (loader := Loader(30), fit(loader, limit_train_batches=3, prefetch=prefetch)),
    "the end": lambda prefetch: (loader := Loader(30), fit(loader, prefetch=prefetch)),
}
HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_ends_leaves_no_thread_and_closes_the_loader(end: str, prefetch: int) -> None:
    loader, _ = ENDS[end](prefetch)
    assert (loader.closed, prefetch_threads()) == (1, [])


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_in_a_hook_leaves_no_thread_and_closes_the_loader(hook: str, prefetch: int) -> None:
    loader = Loader(30)
    with pytest.raises(LookupError, match="mine") as caught:
        fit(loader, fails_in(hook)(), prefetch=prefetch)
    assert (loader.closed, prefetch_threads()) == (1, [])
    assert not getattr(caught.value, "__notes__", [])  # the loader has no part in it


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("given", [OSError("disk"), {"other": np.ones(2)}, {"id": np.ones(0)}])
def test_an_error_of_the_loader_names_its_batch_and_leaves_no_thread(given: Any, prefetch: int) -> None:
    loader = Bad(given)
    with pytest.raises(Exception, match=r"disk|structure|0 rows") as caught:
        fit(loader, prefetch=prefetch)
    assert any("epoch 0, batch 3" in note for note in caught.value.__notes__)
    assert (loader.closed, prefetch_threads()) == (1, [])


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_in_a_step_leaves_no_thread_and_closes_the_loader(prefetch: int) -> None:
    class Fails(Mean):
        def training_step(self, batch: Any) -> jax.Array:
            if batch["id"].shape[0] == 3:
                raise LookupError("mine")
            return super().training_step(batch)

    class Wider(Loader):
        def __iter__(self) -> Iterator[Any]:
            for k, batch in enumerate(super().__iter__()):
                yield {"id": np.ones(3, np.int32)} if k == 3 else batch

    loader = Wider(30)
    with pytest.raises(LookupError, match="mine"):
        jl.Trainer(strategy="single", max_epochs=1, prefetch=prefetch, **QUIET).fit(Fails(), loader)
    assert (loader.closed, prefetch_threads()) == (1, [])


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_in_validation_closes_both_loaders(prefetch: int) -> None:
    class Fails(jl.Callback):
        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            raise LookupError("mine")

    train, val = Loader(30), Loader(30)
    trainer = jl.Trainer(
        strategy="single", max_epochs=1, prefetch=prefetch, callbacks=[Fails()], val_check_interval=2, **QUIET
    )
    with pytest.raises(LookupError, match="mine"):
        trainer.fit(Mean(), train, val)
    assert (train.closed, val.closed, prefetch_threads()) == (1, 1, [])


@pytest.mark.parametrize("prefetch", [0, 3])
def test_grains_threads_end_with_a_run_that_stops_early(prefetch: int) -> None:
    import grain

    before = {*threading.enumerate()}
    rows = grain.MapDataset.source([{"id": np.int32(i)} for i in range(400)]).batch(2)
    fit(rows, max_steps=3, max_epochs=-1, prefetch=prefetch)
    for thread in {*threading.enumerate()} - before:
        thread.join(60)  # a pool's threads are told to end, and nobody waits for them
        assert not thread.is_alive(), thread.name


# Placing ---------------------------------------------------------------------------------------------

EVENTS: list[tuple[str, int]] = []


@jl.register_strategy("noted_placing")
class NotedPlacing(SingleDevice):
    """Notes in which order batches are placed and steps dispatched."""

    def shard_batch(self, batch: Any) -> Any:
        if "id" in batch:
            EVENTS.append(("place", int(np.asarray(batch["id"])[0])))
        return super().shard_batch(batch)

    def compile(self, program: Any) -> Callable[..., Any]:
        run = super().compile(program)

        def call(*arguments: Any) -> Any:
            if program.name == "train_step":
                EVENTS.append(("step", int(np.asarray(arguments[-1]["id"])[0])))
            return run(*arguments)

        return call


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_batch_is_placed_after_the_step_before_it_was_dispatched(prefetch: int) -> None:
    EVENTS.clear()
    fit(Loader(6), strategy="noted_placing", prefetch=prefetch)
    placed = [k for what, k in EVENTS if what == "place"]
    assert placed == [*range(6)]  # each once
    assert [*itertools.chain(*([("place", k), ("step", k)] for k in range(6)))] == EVENTS


# Hangs and signals, in processes of their own --------------------------------------------------------

CHILD = """
import signal, sys, threading, time
import jax.numpy as jnp, numpy as np, optax
from flax import nnx
import jaxlit as jl

class Mean(jl.TrainModule):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))
    def training_step(self, batch):
        return self.w[...] * jnp.mean(batch["id"])
    def validation_step(self, batch):
        self.log("mean", jnp.mean(batch["id"]))
    def configure_optimizers(self):
        return optax.sgd(0.0)

def waits_for_a_disk(stop):
    print("hangs", flush=True)
    while True:
        time.sleep(0.05)

class Loader:
    def __init__(self, hangs_at=None, seconds=0.0):
        self.hangs_at, self.seconds = hangs_at, seconds
    def __iter__(self):
        for k in range(4):
            if k == self.hangs_at:
                waits_for_a_disk(k)
            time.sleep(self.seconds)
            yield {"id": np.full(2, k, np.float32)}

def make_trainer(**arguments):
    return jl.Trainer(strategy="single", max_epochs=1, logger=False, enable_progress_bar=False,
                      enable_model_summary=False, num_sanity_val_steps=0, **arguments)
"""


def start(script: str, tmp_path: Path) -> subprocess.Popen[str]:
    """Run a script as a user would, on one device."""
    path = tmp_path / "script.py"
    path.write_text(CHILD + script)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environment |= CHEAP
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # a Ctrl-C at the tests is not the child's
    )


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, errors = child.communicate(timeout=120)
    finally:
        child.kill()
    return child.returncode, out, errors


HANGS = {
    "the first batch": ("make_trainer(data_timeout=1).fit(Mean(), Loader(0))", "train_dataloaders", 0),
    "the third batch": ("make_trainer(data_timeout=1, prefetch=0).fit(Mean(), Loader(2))", "train_dataloaders", 2),
    "in a thread": ("make_trainer(data_timeout=1, prefetch=2).fit(Mean(), Loader(3))", "train_dataloaders", 3),
    "in validation": ("make_trainer(data_timeout=1).fit(Mean(), Loader(), Loader(1))", "val_dataloaders", 1),
    "in validate": ("make_trainer(data_timeout=1).validate(Mean(), Loader(0))", "dataloaders", 0),
}


MOST = [pytest.param(where, marks=[pytest.mark.full] * (where != "in a thread")) for where in HANGS]


@pytest.mark.parametrize("where", MOST)
def test_a_loader_that_hangs_ends_the_process_with_76_and_its_stack(where: str, tmp_path: Path) -> None:
    script, argument, batch = HANGS[where]
    code, _, errors = finish(start(script, tmp_path))
    assert code == 76, errors
    first = errors.index(f"{argument}=...) gave no batch {batch} of epoch 0 within Trainer(data_timeout=1) seconds")
    assert "in waits_for_a_disk" in errors[first:]


@pytest.mark.full
def test_a_slow_loader_that_gives_each_batch_in_time_is_let_be(tmp_path: Path) -> None:
    # Each batch takes less than the timeout, all together more; so does a hook, which is no wait for data.
    script = """
class Slow(jl.Callback):
    def on_train_epoch_end(self, trainer, module):
        time.sleep(3)
make_trainer(data_timeout=2, callbacks=[Slow()]).fit(Mean(), Loader(seconds=0.7))
print("done")
"""
    code, out, errors = finish(start(script, tmp_path))
    assert (code, out) == (0, "done\n"), errors


def test_ctrl_c_while_a_threaded_loader_hangs_ends_fit(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGINT, signal.default_int_handler)
trainer = make_trainer(prefetch=2)
trainer.fit(Mean(), Loader(3))
print("interrupted", trainer.interrupted, trainer.global_step)
"""
    child = start(script, tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline() == "hangs\n"  # so the handler is there
    child.send_signal(signal.SIGINT)
    code, out, errors = finish(child)
    assert (code, out.split()[:2]) == (0, ["interrupted", "True"]), errors


# Worker processes of grain's, in a plain script ------------------------------------------------------

WORKERS = """
import os, grain

def records():
    return [{"id": np.float32(i)} for i in range(40)]

def with_pid(record):
    return {**record, "pid": np.int32(os.getpid())}

class WithPid(grain.transforms.Map):
    def map(self, record):
        return with_pid(record)

def dataset():
    rows = grain.MapDataset.source(records()).seed(0).shuffle().to_iter_dataset().map(with_pid).batch(2)
    return rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=1))

def loader():
    return grain.DataLoader(
        data_source=records(), sampler=grain.samplers.IndexSampler(40, shuffle=True, seed=0, num_epochs=1),
        operations=[WithPid(), grain.transforms.Batch(2)], worker_count=1, worker_buffer_size=1)

class Seen(jl.Callback):
    ids, pids = [], set()
    kill_at = None
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.ids += batch["id"].tolist()
        self.pids |= {*batch["pid"].tolist()}
        if batch_idx == self.kill_at:
            os.kill(int(batch["pid"][0]), signal.SIGKILL)

if __name__ == "__main__":
"""


@pytest.mark.full
@pytest.mark.parametrize("make", ["dataset", "loader"])
def test_worker_processes_of_grain_feed_a_plain_script(make: str, tmp_path: Path) -> None:
    script = f"""
    seen = Seen()
    make_trainer(callbacks=[seen]).fit(Mean(), {make}())
    print(sorted(seen.ids) == [*range(40)], len(seen.pids), os.getpid() in seen.pids)
    for pid in seen.pids:
        print(os.path.exists(f"/proc/{{pid}}") and open(f"/proc/{{pid}}/stat").read().split()[2] != "Z")
"""
    code, out, errors = finish(start(WORKERS + script, tmp_path))
    assert (code, out) == (0, "True 1 False\nFalse\n"), errors


@pytest.mark.full
def test_a_killed_worker_raises_out_of_fit_with_a_hint_and_the_place(tmp_path: Path) -> None:
    script = """
    seen = Seen()
    seen.kill_at = 3
    try:
        make_trainer(callbacks=[seen]).fit(Mean(), dataset())
    except RuntimeError as error:
        print("exit code -9" in str(error))
        print("want of memory" in " ".join(error.__notes__))
        (place,) = [note for note in error.__notes__ if "epoch 0, batch " in note]
        print(int(place.rstrip(".").split("batch ")[1]) == len(seen.ids) // 2)
"""
    code, out, errors = finish(start(WORKERS + script, tmp_path))
    assert (code, out) == (0, "True\nTrue\nTrue\n"), errors


def test_a_feeder_gives_what_comes_before_an_error_first() -> None:
    place: Callable[[Any], Any] = lambda batch: batch  # noqa: E731
    feeder = Feeder(
        place, num_replicas=1, num_processes=1, prefetch=3, watchdog=Watchdog(None), interrupted=lambda: False
    )
    used = []
    with pytest.raises(OSError, match="disk"):
        for _, host, is_last, _ in feeder.batches(source_of(Bad(OSError("disk")), "loader"), 0, None):
            used.append((int(host["id"][0]), is_last))
    assert used == [(0, False), (1, False), (2, False)]
