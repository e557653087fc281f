"""Loaders that hang, in processes of their own, and worker processes of grain's in a plain script."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit.processes import CHEAP, ROOT
from kit.trainers import thinned

SCRIPT = """
import os, signal, sys, threading
import grain, numpy as np
import jaxlit as jl
from kit.modules import Mean

def waits_for_a_disk():
    print("hangs", flush=True)
    while not threading.Event().wait(0.05):  # so that a signal is seen
        pass

class Loader:
    def __init__(self, hangs_at=None, seconds=0.0):
        self.hangs_at, self.seconds = hangs_at, seconds
    def __iter__(self):
        for k in range(4):
            if k == self.hangs_at:
                waits_for_a_disk()
            threading.Event().wait(self.seconds)
            yield {"x": np.full((2, 1), k, np.float32)}

def make_trainer(**arguments):
    return jl.Trainer(strategy="single", max_epochs=1, num_sanity_val_steps=0, **arguments)
"""


def start(script):
    """Run a script as a user would, on one device."""
    Path("script.py").write_text(SCRIPT + script)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | CHEAP | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "script.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # a Ctrl-C at the tests is not the child's
    )


def finish(child):
    try:
        out, errors = child.communicate(timeout=240)
    finally:
        child.kill()
    return child.returncode, out, errors


HANGS = [
    ("make_trainer(data_timeout=1).fit(Mean(), Loader(0))", "train_dataloaders", 0),
    ("make_trainer(data_timeout=1, prefetch=2).fit(Mean(), Loader(3))", "train_dataloaders", 3),
    ("make_trainer(data_timeout=1).fit(Mean(), Loader(), Loader(1))", "val_dataloaders", 1),
]


@pytest.mark.parametrize(("script", "argument", "batch"), thinned(HANGS, HANGS[1]))
def test_a_loader_that_hangs_ends_the_process_with_76_and_its_stack(script, argument, batch):
    code, _, errors = finish(start(script))
    assert code == 76, errors
    first = errors.index(f"{argument}=...) gave no batch {batch} of epoch 0 within Trainer(data_timeout=1) seconds")
    assert "in waits_for_a_disk" in errors[first:]


@pytest.mark.full
def test_a_slow_loader_that_gives_each_batch_in_time_is_let_be():
    # Each batch takes less than the timeout, all together more; so does a hook, which is no wait for data.
    script = """
class Slow(jl.Callback):
    def on_train_epoch_end(self, trainer, module):
        threading.Event().wait(3)
make_trainer(data_timeout=2, callbacks=[Slow()]).fit(Mean(), Loader(seconds=0.7))
print("done")
"""
    code, out, errors = finish(start(script))
    assert code == 0 and out.endswith("done\n"), errors


def test_ctrl_c_while_a_threaded_loader_hangs_ends_fit():
    script = """
signal.signal(signal.SIGINT, signal.default_int_handler)
trainer = make_trainer(prefetch=2, enable_model_summary=False, enable_progress_bar=False)
trainer.fit(Mean(), Loader(3))
print("interrupted", trainer.interrupted, trainer.global_step)
"""
    child = start(script)
    assert child.stdout.readline() == "hangs\n"  # so the handler is there
    child.send_signal(signal.SIGINT)
    code, out, errors = finish(child)
    assert code == 0 and "interrupted True" in out, errors


WORKERS = """
def records():
    return [{"x": np.full(1, i, np.float32)} for i in range(40)]

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
    def __init__(self, kill_at=None):
        self.rows, self.pids, self.kill_at = [], set(), kill_at
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.rows += batch["x"][:, 0].tolist()
        self.pids |= {*batch["pid"].tolist()}
        if batch_idx == self.kill_at:
            os.kill(int(batch["pid"][0]), signal.SIGKILL)

def is_alive(pid):
    return os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().split()[2] != "Z"

if __name__ == "__main__":
    for make in (dataset, loader):
        seen = Seen()
        make_trainer(callbacks=[seen]).fit(Mean(), make())
        own, alive = os.getpid() in seen.pids, [is_alive(pid) for pid in seen.pids]
        print("", sorted(seen.rows) == [*range(40)], len(seen.pids), own, *alive)
    seen = Seen(kill_at=3)
    try:
        make_trainer(callbacks=[seen]).fit(Mean(), dataset())
    except RuntimeError as error:
        (place,) = [note for note in error.__notes__ if "epoch 0, batch " in note]
        told = ("exit code -9" in str(error), "want of memory" in " ".join(error.__notes__))
        print("", *told, int(place.rstrip(".").split("batch ")[1]) == len(seen.rows) // 2)
"""


@pytest.mark.full
def test_worker_processes_of_grain_feed_a_plain_script_and_a_killed_one_raises_with_a_hint_and_the_place():
    code, out, errors = finish(start(WORKERS))
    told = [line.split() for line in out.splitlines() if line.startswith(" True")]
    assert code == 0 and told == [["True", "1", "False", "False"]] * 2 + [["True"] * 3], errors + out
