"""One training at a time writes into a folder, whatever becomes of the one before."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.batches import numbered
from kit.checkpoints import names
from kit.faults import faults
from kit.journal import hooks, raising
from kit.modules import Mean
from kit.refusals import refuses, warnings_of
from kit.trainers import fit

import jaxlit as jl
from jaxlit.checkpoints.files import FolderLock
from jaxlit.errors import CheckpointError

HOLDER = """
import os, signal, sys
from pathlib import Path
from jaxlit.checkpoints.files import FolderLock
lock = FolderLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    os.read(0, 1)  # until the test closes it
    os._exit(0)
print(child, flush=True)
signal.pause()
"""


def test_a_folder_of_a_living_process_is_refused_by_name():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", HOLDER, "held"], env=environment, text=True, **pipes) as holder:
        try:
            child = int(holder.stdout.readline())
            words = f"held is in use by process {holder.pid} on .*end that one"
            refuses(CheckpointError, lambda: FolderLock(Path("held")), words)
            holder.kill()
            holder.wait(30)
            os.kill(child, 0)  # it lives
            FolderLock(Path("held")).close()
        finally:
            holder.kill()
            holder.stdin.close()


def test_a_folder_is_held_once_in_a_process_by_any_path():
    lock = FolderLock(Path("a/held"))
    Path("link").symlink_to(Path("a/held").absolute())
    for path in ("a/held", "a/../a/held", "link"):
        words = r"Two ModelCheckpoints of this program would write to .*another folder"
        refuses(CheckpointError, lambda path=path: FolderLock(Path(path)), words)
    FolderLock(Path("other")).close()
    lock.close()
    FolderLock(Path("link")).close()
    assert [p.name for p in Path("a/held").iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_written_is_refused_and_not_held():
    take = lambda: FolderLock(Path("held"))  # noqa: E731
    Path("held").write_text("in the way")
    refuses(CheckpointError, take, r"No checkpoint can be written in held: .*default_root_dir")
    Path("held").unlink()
    for kind in ("full", "denied"):
        for at in (1, 2, 3):  # the folder, the probe, the lock's file
            with faults("held", at=at, kind=kind):
                refuses(CheckpointError, take, "can be written in")
    take().close()


def test_where_a_file_system_has_no_locks_one_line_says_so(monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "lockf", raising(OSError, errno.ENOLCK, "No locks available"))
    assert fit(Mean(), numbered(1), default_root_dir="run").global_step == 1
    (told,) = warnings_of(caplog)
    assert "run is on a file system without locks ([Errno 37] No locks available)" in told and "no other" in told


@pytest.mark.parametrize("own", [False, True])
def test_one_training_at_a_time_logs_into_a_folder(own):
    def train(*callbacks):
        given = {"logger": type("Mine", (jl.callbacks.Logger,), {})()} if own else {}
        return fit(Mean(), numbered(1), None, *callbacks, default_root_dir="run", enable_checkpointing=False, **given)

    inside = hooks(on_train_start=lambda *_: refuses(CheckpointError, train, "Two fits of this program.*Wait for"))
    assert train(inside).global_step == 1
    FolderLock(Path("run"), of_run=True).close()


def test_checkpoints_may_go_through_a_link():
    Path("one/checkpoints").mkdir(parents=True)
    for run in ("two", "three"):
        Path(run).mkdir()
        Path(run, "checkpoints").symlink_to(Path(f"scratch of {run}").absolute())
    Path("scratch of two").mkdir()  # that of the third is not there yet
    for run in ("one", "two", "three"):
        fit(Mean(), numbered(2), default_root_dir=run)
        assert names(f"{run}/checkpoints") == ["step_00000002"]
        refuses(ValueError, lambda run=run: fit(Mean(), numbered(1), default_root_dir=run), "holds .* of another run")
    assert names("scratch of three") == ["step_00000002"]


def test_checkpoints_may_lie_in_the_runs_folder_itself(tmp_path) -> None:
    trainer = fit(Mean(), numbered(1), None, jl.callbacks.ModelCheckpoint(dirpath=tmp_path), default_root_dir=tmp_path)
    assert trainer.global_step == 1 and "step_00000001" in names(tmp_path)
