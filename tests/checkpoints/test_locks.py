"""One training at a time writes to a folder: by a lock on a disk, by a claim in a bucket."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.batches import numbered
from kit.buckets import URL, Bucket, go, in_bucket, make_machine, replace, saves
from kit.checkpoints import bytes_of, names, train
from kit.faults import faults
from kit.journal import hooks, raising
from kit.modules import Mean
from kit.refusals import refuses, warnings_of
from kit.trainers import fit

import jaxlit as jl
from jaxlit.checkpoints import files, places
from jaxlit.checkpoints.places import FolderLock, RemotePath, read_claim
from jaxlit.errors import CheckpointError

HOLDER = """
import os, signal, sys
from pathlib import Path
from jaxlit.checkpoints.places import FolderLock
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


def test_a_folder_stays_held_while_its_checkpoints_are_listed():
    """To close a file that a process has locked releases the lock, whoever opened it."""
    lock = FolderLock(Path("held"))
    assert files.candidates(Path("held")) == [] and files.last_order(Path("held")) == 0
    code = "from pathlib import Path; from jaxlit.checkpoints.places import FolderLock; FolderLock(Path('held'))"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and f"held is in use by process {os.getpid()}" in ended.stderr
    lock.close()


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
        for at in (1, 2):  # the folder, the lock's file
            with faults("held", at=at, kind=kind):
                refuses(CheckpointError, take, "can be written in")
    take().close()


def test_where_a_file_system_has_no_locks_one_line_says_so(monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "lockf", raising(OSError, errno.ENOLCK, "No locks available"))
    assert fit(Mean(), numbered(1), default_root_dir="run").global_step == 1
    (told,) = warnings_of(caplog)
    assert "run is on a file system without locks ([Errno 37] No locks available)" in told and "no other" in told


def test_without_locks_the_training_that_began_last_goes_on(monkeypatch):
    """The other one ends at its next checkpoint, and has overwritten nothing."""
    monkeypatch.setattr(fcntl, "lockf", raising(OSError, errno.ENOLCK, "No locks available"))
    left = []

    def take_over(trainer, module):
        if trainer.current_epoch == 1:
            trainer.checkpoint_callback.finish(trainer)
            with pytest.MonkeyPatch.context() as other:  # another process
                other.setattr(places, "_held", {})
                train("run", 3, saves(), resume="auto")
            left.extend(names("run/checkpoints"))

    begun = hooks(on_train_epoch_start=take_over)
    refuses(CheckpointError, lambda: train("run", 9, begun, saves()), "run was taken by process .*which began later")
    assert names("run/checkpoints") == left == ["step_00000009"]


@pytest.mark.parametrize("own", [False, True])
def test_one_training_at_a_time_logs_into_a_folder(own):
    def train(*callbacks):
        given = {"logger": type("Mine", (jl.callbacks.Logger,), {})()} if own else {}
        return fit(Mean(), numbered(1), None, *callbacks, default_root_dir="run", enable_checkpointing=False, **given)

    inside = hooks(on_train_start=lambda *_: refuses(CheckpointError, train, "Two fits of this program.*Wait for"))
    assert train(inside).global_step == 1
    FolderLock(Path("run"), of_run=True).close()


def test_checkpoints_may_go_through_a_link_or_lie_in_the_runs_folder():
    Path("one/checkpoints").mkdir(parents=True)
    for run in ("two", "three"):
        Path(run).mkdir()
        Path(run, "checkpoints").symlink_to(Path(f"scratch of {run}").absolute())
    Path("scratch of two").mkdir()  # that of the third is not there yet
    in_the_run = jl.callbacks.ModelCheckpoint(dirpath=Path("itself").absolute())
    fit(Mean(), numbered(1), None, in_the_run, default_root_dir="itself")
    assert "step_00000001" in names("itself")
    for run in ("one", "two", "three"):
        fit(Mean(), numbered(2), default_root_dir=run)
        assert names(f"{run}/checkpoints") == ["step_00000002"]
        refuses(ValueError, lambda run=run: fit(Mean(), numbered(1), default_root_dir=run), "holds .* of another run")
    assert names("scratch of three") == ["step_00000002"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_machine(tmp_path, monkeypatch)


@pytest.mark.parametrize("meanwhile", [1, 2])
def test_of_two_trainings_in_a_bucket_the_later_one_continues(meanwhile: int, machine: Path, caplog: Any) -> None:
    """The one before ends at its next checkpoint, and has overwritten nothing."""
    left: list[Any] = []

    def take_over(trainer: jl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.checkpoint_callback.finish(trainer)  # its writer knows this process's locks
            with pytest.MonkeyPatch.context() as other:  # another process on another machine
                other.setattr(places, "_held", {})
                other.setenv("XDG_CACHE_HOME", str(machine.parent / "other"))
                left.append(go(1 + meanwhile))
            left.append(in_bucket())

    begun = hooks(on_train_epoch_start=take_over)
    words = (f"{URL} was taken by process {os.getpid()} on .*which began later", "end one of them")
    refuses(CheckpointError, lambda: go(9, begun, saves()), *words)
    assert in_bucket() == left[1]
    assert any("rows of the run could not be copied" in text for text in warnings_of(caplog))
    replace(machine)
    whole = train("whole", 4, saves())
    assert bytes_of(go(4)) == bytes_of(whole)
    assert in_bucket()["metrics.csv"] == (whole.run_dir / "metrics.csv").read_bytes()


def test_two_fits_of_a_program_in_one_bucket_are_refused(machine: Path) -> None:
    inside = hooks(on_train_start=lambda *_: refuses(CheckpointError, lambda: go(1), "Two fits of this program.*Wait"))
    assert go(1, inside, saves()).global_step == 3


CLAIMS = [b"", b"x", b"[]", b"7", b"null", b'{"newest": 7}', b'{"newest": "../../x"}', b'{"newest": "step_00000099"}']


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_that_cannot_be_read_is_none(claim: bytes, machine: Path) -> None:
    go(1)
    for name in (".run-lock", "checkpoints/.lock"):
        Bucket().pipe_file(f"{URL}/{name}", claim)
    assert [x.name for x in files.candidates(RemotePath(f"{URL}/checkpoints"))] == ["step_00000003"]
    assert go(2).global_step == 6
    assert read_claim(RemotePath(f"{URL}/checkpoints"))["newest"] == ["step_00000006"]
    assert json.loads(Bucket().cat_file(f"{URL}/.run-lock"))["holder"].startswith(f"process {os.getpid()} on ")


def test_a_claim_that_is_gone_does_not_end_a_training(machine: Path) -> None:
    delete = hooks(on_train_start=lambda *_: Bucket().rm_file(f"{URL}/checkpoints/.lock"))
    assert go(2, delete, saves()).global_step == 6
    assert [x.name for x in files.candidates(RemotePath(f"{URL}/checkpoints"))] == ["step_00000006"]
