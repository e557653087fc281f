"""What takes too long ends the process, with the stacks of all threads and a checkpoint where there can be one."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.checkpoints import names
from kit.inside import Clock
from kit.journal import hooks
from kit.modules import Mean
from kit.processes import CHEAP, ROOT
from kit.trainers import BARE, fit, make_trainer

import jaxlit as jl
from jaxlit.checkpoints import files
from jaxlit.data import watchdog
from jaxlit.distributed.team import Team
from jaxlit.errors import CheckpointError


class Ticking(Clock):
    """Time that stands still until a loader hangs; then each look at it takes a second."""

    hangs = False

    def __init__(self):
        self.codes, self.bitten, self.looked = [], threading.Event(), threading.Semaphore(0)

    def __call__(self):
        self.now += self.hangs
        self.looked.release()
        return self.now

    def passes(self, seconds):
        """Let time pass, and wait until the watchdog must have noticed."""
        self.now += seconds
        while self.looked.acquire(blocking=False):
            pass
        for _ in range(4):
            assert self.looked.acquire(timeout=60)


@pytest.fixture
def clock(monkeypatch):
    """The watchdog's, which tells the code with which it would have ended the process."""
    stopped = Ticking()
    ends = lambda code: (stopped.codes.append(code), stopped.bitten.set())  # noqa: E731
    monkeypatch.setattr(watchdog, "os", SimpleNamespace(_exit=ends))
    monkeypatch.setattr(Team, "leave", lambda processes, code: ends(code))
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=stopped))
    return stopped


class Hangs:
    def __init__(self, at, clock):
        self.at, self.clock = at, clock

    def __iter__(self):
        for k, batch in enumerate(numbered(4, rows=2)):
            if k == self.at:
                self.waits_for_a_disk()
            yield batch

    def waits_for_a_disk(self):
        self.clock.hangs = True
        assert self.clock.bitten.wait(60)


@pytest.mark.parametrize(
    ("run", "argument", "batch"),
    [
        (lambda trainer, hangs: trainer.fit(Mean(), hangs(0)), "train_dataloaders", 0),
        (lambda trainer, hangs: trainer.fit(Mean(), hangs(3)), "train_dataloaders", 3),
        (lambda trainer, hangs: trainer.fit(Mean(), numbered(2, rows=2), hangs(1)), "val_dataloaders", 1),
        (lambda trainer, hangs: trainer.validate(Mean(), hangs(0)), "dataloaders", 0),
    ],
)
def test_a_hanging_loader_ends_the_process_with_76(run, argument, batch, clock, capfd):
    run(make_trainer(data_timeout=1, prefetch=2), lambda at: Hangs(at, clock))
    assert {*clock.codes} == {76}
    told = capfd.readouterr().err
    first = told.index(f"{argument}=...) gave no batch {batch} of epoch 0 within Trainer(data_timeout=1) seconds")
    assert "in waits_for_a_disk" in told[first:]


def test_arrays_that_hang_as_a_dispatch_is_gathered_end_the_process(clock, capfd):
    class OnADisk:
        shape, dtype = (16, 1), np.dtype(np.float32)

        def __getitem__(self, rows):
            if len(x := np.ones(self.shape, self.dtype)[rows]) == 8:  # the rows of four batches
                clock.hangs = True
                assert clock.bitten.wait(60)
            return x

    loader = jl.ArrayLoader({"x": OnADisk()}, 2)
    make_trainer(data_timeout=1, steps_per_execution=4, log_every_n_steps=0, **BARE).fit(Mean(), loader)
    assert {*clock.codes} == {76}
    assert "gave no batch 0 of epoch 0 within Trainer(data_timeout=1) seconds" in capfd.readouterr().err


def test_batches_in_time_and_slow_hooks_are_left_alone(clock):
    class Slow:
        def __iter__(self):
            for batch in numbered(4, rows=2):
                clock.now += 0.9
                yield batch

    def wait(trainer, module):
        clock.now += 100
        assert not clock.bitten.wait(0.6)  # the watchdog looks four times a second

    trainer = make_trainer(hooks(on_train_epoch_end=wait), data_timeout=1)
    trainer.fit(Mean(), Slow())
    assert trainer.global_step == 4 and clock.codes == []


@pytest.mark.parametrize("where", ["hook", "save"])
def test_a_hang_ends_the_process_with_a_checkpoint_if_possible(where, clock, capfd, monkeypatch):
    def waits_for_a_lock(*arguments):
        if clock.bitten.is_set():
            return seal(*arguments) if where == "save" else None
        clock.hangs = True
        assert clock.bitten.wait(60)
        raise RuntimeError("it would have ended")

    train = lambda *more: fit(made, numbered(4), None, *more, default_root_dir="run", resume="auto", hang_timeout=1)  # noqa: E731
    made, seal = Mean(), files.seal
    hook = hooks(on_train_batch_end=lambda t, *_: waits_for_a_lock() if t.global_step == 2 else None)
    if where == "save":
        monkeypatch.setattr(files, "seal", waits_for_a_lock)
    with pytest.raises((RuntimeError, CheckpointError), match="it would have ended"):
        train(*[hook] * (where == "hook"))
    assert {*clock.codes} == {76}
    told = capfd.readouterr().err
    first = told.index("Nothing has moved for Trainer(hang_timeout=1) seconds, in ")
    assert "in waits_for_a_lock" in told[first:]
    if where == "save":
        assert "Nothing could be saved" in told[first:] and names() == []
    else:
        assert "on_train_batch_end, after step 2 of epoch 0." in told[first:]
        saved = told.index("The newest checkpoint is ", first)
        assert "step_00000002." in told[saved:] and names() == ["step_00000002"]
    clock.hangs, made = False, Mean()
    assert train().global_step == 4 and float(made.w[...][0]) == mean([[1], [2], [3], [4]])


@pytest.mark.full
def test_what_moves_is_let_be_however_long_all_of_it_takes(clock):
    slow = hooks(**dict.fromkeys(("on_train_batch_start", "on_validation_batch_end"), lambda *_: clock.passes(0.9)))
    assert fit(Mean(), numbered(3), numbered(3), slow, hang_timeout=1).global_step == 3 and clock.codes == []


SCRIPT = """
import os, signal, sys, threading
import grain, numpy as np
import jaxlit as jl
from kit.modules import Mean

def records():
    return [{"x": np.full(1, i, np.float32)} for i in range(40)]

def with_pid(record):
    return {**record, "pid": np.int32(os.getpid())}

def dataset():
    rows = grain.MapDataset.source(records()).seed(0).shuffle().to_iter_dataset().map(with_pid).batch(2)
    return rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=1))

class Seen(jl.Callback):
    def __init__(self, kill_at=None):
        self.rows, self.pids, self.kill_at = [], set(), kill_at
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.rows += batch["x"][:, 0].tolist()
        self.pids |= {*batch["pid"].tolist()}
        if batch_idx == self.kill_at:
            os.kill(int(batch["pid"][0]), signal.SIGKILL)

class Hangs:
    def __iter__(self):
        threading.Event().wait()

def is_alive(pid):
    return os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().split()[2] != "Z"

def train(loader, **arguments):
    jl.Trainer(strategy="single", max_epochs=1, **arguments).fit(Mean(), loader)

if __name__ == "__main__":
    seen = Seen()
    train(dataset(), callbacks=[seen])
    own, alive = os.getpid() in seen.pids, [is_alive(pid) for pid in seen.pids]
    print("", sorted(seen.rows) == [*range(40)], len(seen.pids), own, *alive)
    seen = Seen(kill_at=3)
    try:
        train(dataset(), callbacks=[seen])
    except RuntimeError as error:
        (place,) = [note for note in error.__notes__ if "epoch 0, batch " in note]
        told = ("exit code -9" in str(error), "memory ran out" in " ".join(error.__notes__))
        print("", *told, int(place.split("batch ")[1].split()[0]) == len(seen.rows) // 2)
    train(Hangs(), data_timeout=1)
"""


@pytest.mark.full
def test_grains_worker_processes_feed_a_plain_script():
    Path("script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | CHEAP | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    arguments = {"capture_output": True, "text": True, "timeout": 600, "env": environment}
    ended = subprocess.run([sys.executable, "script.py"], check=False, **arguments)
    told = [line.split() for line in ended.stdout.splitlines() if line.startswith(" True")]
    assert told == [["True", "1", "False", "False"], ["True"] * 3], ended.stderr + ended.stdout
    assert ended.returncode == 76 and "gave no batch 0 of epoch 0 within Trainer(data_timeout=1)" in ended.stderr
