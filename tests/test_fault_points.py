"""A filesystem that fails: nothing that was verified before is lost, whatever the operation at which it fails."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.checkpoints import files as checkpoint
from jaxlit.errors import ArgumentError, CheckpointError
from jaxlit.testing import Crash, faults

# What orbax leaves of a save that a fault has ended, behind the error that it raised.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
BOUND = 120  # seconds; only a child that hangs takes as long


class Mean(jl.TrainModule):
    """Learns the mean of its data."""

    def __init__(self, size: int = 8) -> None:
        self.w = nnx.Param(jnp.zeros(size))

    def training_step(self, batch: Any) -> jax.Array:
        loss = jnp.mean((self.w[...] - batch["x"]) ** 2)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.25)


def make_data(steps: int = 2) -> jl.ArrayLoader:
    rows = np.random.default_rng(0).normal(size=(8 * steps, 8)).astype(np.float32)
    return jl.ArrayLoader({"x": rows}, 8, shuffle=True)


def make_trainer(root: Path, *callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    given = [*callbacks] if any(isinstance(c, jl.callbacks.ModelCheckpoint) for c in callbacks) else None
    callbacks = tuple(given or [*callbacks, jl.callbacks.ModelCheckpoint()])
    quiet = {"strategy": "single", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return jl.Trainer(**(quiet | {"default_root_dir": root, "callbacks": callbacks, "max_epochs": 3} | arguments))


def fit(root: Path, *callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    trainer = make_trainer(root, *callbacks, **arguments)
    trainer.fit(Mean(), make_data())
    return trainer


def state_of(trainer: jl.Trainer) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(trainer.state)]


def names_in(folder: Path) -> list[str]:
    # The probe of a start that crashed has a test of its own.
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock" and ".probe-" not in path.name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The state at the end of a training that nothing has interrupted."""
    return state_of(fit(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the checkpoint of its first epoch; tests work on copies of it."""
    root = tmp_path_factory.mktemp("half") / "run"
    fit(root, max_epochs=1)
    return root


# Counting ---------------------------------------------------------------------------------------------


def do_everything(folder: Path) -> list[str]:
    """Do each operation that the docstring names once, and return what faults should hear."""
    folder.mkdir()
    (folder / "a").write_bytes(b"1")
    with (folder / "a").open("ab") as file:
        file.write(b"2")
    os.close(os.open(folder / "b", os.O_CREAT | os.O_WRONLY))
    (folder / "a").rename(folder / "c")
    os.replace(folder / "c", folder / "d")
    (folder / "d").unlink()
    (folder / "inner").mkdir()
    (folder / "inner").rmdir()
    checkpoint.manifest.write(folder / "e", b"3")
    # Reading is no change.
    (folder / "e").read_bytes()
    os.close(os.open(folder / "e", os.O_RDONLY))
    assert len(list(folder.iterdir())) == 2 and (folder / "e").stat().st_size == 1
    return ["mkdir", "open", "open", "open", "rename", "rename", "remove", "mkdir", "rmdir", "open", "fsync"]


def test_every_change_counts_once_in_order_and_reading_does_not(tmp_path: Path) -> None:
    with faults(tmp_path / "folder") as seen:
        expected = do_everything(tmp_path / "folder")
    assert [operation.split(".")[-1] for operation, _ in seen.operations] == expected
    assert {Path(path).parts[: len(tmp_path.parts) + 1] for _, path in seen.operations} == {(*tmp_path.parts, "folder")}


def test_other_folders_do_not_count_not_even_with_a_longer_name(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with faults(tmp_path / "folder") as seen:
        do_everything(tmp_path / "folder2")
        (tmp_path / "file").write_text("1")
    assert seen.operations == []


def test_relative_paths_below_count_and_nothing_does_once_it_is_over(tmp_path: Path) -> None:
    with faults("folder") as seen:
        os.makedirs("folder/a/b")
        Path("folder/a/../a/b/c").write_text("1")
    Path("folder/d").write_text("1")
    made = {path for _, path in seen.operations}
    assert made == {str(tmp_path / x) for x in ("folder", "folder/a", "folder/a/b", "folder/a/b/c")}


def test_other_threads_count(tmp_path: Path) -> None:
    with faults(tmp_path / "folder") as seen:
        thread = threading.Thread(target=do_everything, args=(tmp_path / "folder",))
        thread.start()
        thread.join(BOUND)
    assert len(seen.operations) == 11


def test_each_file_that_rmtree_deletes_counts(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for name in ("a", "b", "inner/c"):
        (tmp_path / "folder" / name).write_text("1")
    with faults(tmp_path / "folder") as seen:
        shutil.rmtree(tmp_path / "folder")
    assert sum(operation == "os.remove" for operation, _ in seen.operations) == 3
    assert sum(operation == "os.rmdir" for operation, _ in seen.operations) == 2


def test_what_rmtree_deletes_elsewhere_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").write_text("1")
    monkeypatch.chdir(tmp_path / "folder")
    with faults(tmp_path / "folder") as seen:
        shutil.rmtree(tmp_path / "other")
    assert seen.operations == []


@pytest.mark.parametrize("how", [os.rename, os.replace, os.link, os.symlink])
def test_what_comes_into_the_folder_from_outside_counts(how: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("1")
    with faults(tmp_path / "folder") as seen:
        how(tmp_path / "file", tmp_path / "folder" / "file")
    assert len(seen.operations) == 1


def test_two_folders_are_watched_at_once(tmp_path: Path) -> None:
    with faults(tmp_path / "a") as first, faults(tmp_path) as both:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
    assert (len(first.operations), len(both.operations)) == (1, 2)


# Failing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, 12))
def test_a_crash_stops_at_its_operation_and_leaves_the_folder_alone_ever_after(at: int, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with faults(folder, at=at, kind="crash") as seen:
        with pytest.raises(Crash):
            do_everything(folder)
        before = {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")}
        for change in (lambda: (folder / "z").write_text("1"), folder.mkdir, lambda: os.rename(folder, tmp_path / "y")):
            with pytest.raises(Crash):
                change()
        shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy")  # reading goes on
    assert {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")} == before
    assert len(seen.operations) == at + 3


def test_a_crash_is_caught_by_no_except_exception() -> None:
    assert issubclass(Crash, BaseException) and not issubclass(Crash, Exception)


@pytest.mark.parametrize(("kind", "error"), [("full", OSError), ("denied", PermissionError)])
def test_a_full_or_denied_folder_gives_the_systems_own_error_from_there_on(
    kind: str, error: type[OSError], tmp_path: Path
) -> None:
    with faults(tmp_path, at=2, kind=kind):
        (tmp_path / "a").write_text("1")
        for _ in range(2):
            with pytest.raises(error) as raised:
                (tmp_path / "b").write_text("1")
            assert raised.value.errno == {"full": 28, "denied": 13}[kind]
        assert (tmp_path / "a").read_text() == "1"
    (tmp_path / "b").write_text("1")


def test_a_full_disk_lets_files_be_deleted_and_a_denied_folder_does_not(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("1")
    with faults(tmp_path, at=1, kind="full"):
        (tmp_path / "a").unlink()
    with faults(tmp_path, at=1, kind="denied"), pytest.raises(PermissionError):
        (tmp_path / "b").unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize(
    "arguments", [{"kind": "explode"}, {"kind": None}, {"at": 0}, {"at": -1}, {"at": 1.0}, {"at": True}, {"at": "1"}]
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any], tmp_path: Path) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(ArgumentError, match=rf"{name}=.*{value!r}"):
        faults(tmp_path, **arguments)


# Crashes: the whole of a second save, and what it replaces --------------------------------------------


def crash(root: Path, at: int | None, kind: str = "crash", **arguments: Any) -> faults:
    """Go on to the second epoch, whose save replaces that of the first, on a filesystem that fails."""
    with faults(root, at=at, kind=kind) as seen:
        if at is None:
            fit(root, resume="auto", max_epochs=2, **arguments)
        else:
            with pytest.raises((Crash, CheckpointError)):
                fit(root, resume="auto", max_epochs=2, **arguments)
    return seen


@pytest.fixture(scope="module")
def operations(half: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """What the second fit and its save do to the folder."""
    root = Path(shutil.copytree(half, tmp_path_factory.mktemp("counted") / "run"))
    return [(operation, os.path.relpath(path, root)) for operation, path in crash(root, None).operations]


def test_the_operations_of_a_save_are_those_that_are_crashed_below(operations: list[tuple[str, str]]) -> None:
    text = [f"{operation} {path}" for operation, path in operations]
    assert 30 < len(text) < 80
    # Written aside, put onto the disk, sealed, named; and only then is the old one renamed and deleted.
    stages = [r"os.mkdir checkpoints/.tmp-step_00000004-\w+", r"jaxlit.fsync checkpoints/.tmp-.*/state.json"]
    stages += [r"open checkpoints/.tmp-.*/MANIFEST.json", r"jaxlit.fsync checkpoints/.tmp-.*/MANIFEST.json"]
    stages += [r"jaxlit.fsync checkpoints/.tmp-step_00000004-\w+", r"os.rename checkpoints/.tmp-step_00000004-\w+"]
    stages += [r"jaxlit.fsync checkpoints", r"os.rename checkpoints/step_00000002"]
    stages += [r"shutil.rmtree checkpoints/.trash-step_00000002-\w+"]
    found = [next(i for i, line in enumerate(text) if re.fullmatch(stage, line)) for stage in stages]
    assert found == sorted(found)
    # Every file is on the disk before the manifest that vouches for it is written.
    sealed = next(i for i, line in enumerate(text) if "open" in line and "MANIFEST.json" in line)
    opened = {line.split("/")[-1] for line in text[:sealed] if line.startswith("open checkpoints/.tmp-")}
    synced = {line.split("/")[-1] for line in text[:sealed] if line.startswith("jaxlit.fsync")}
    assert opened <= synced


def test_a_crash_at_every_operation_of_a_save_loses_nothing_that_was_verified(
    half: Path, operations: list[tuple[str, str]], whole: list[bytes], tmp_path: Path
) -> None:
    found = []
    for at in range(1, len(operations) + 1):
        root = Path(shutil.copytree(half, tmp_path / str(at)))
        seen = crash(root, at)
        assert len(seen.operations) >= at, f"the crash at {at} did not happen"
        folder = root / "checkpoints"
        newest, skipped = checkpoint.newest(folder)
        assert newest is not None and skipped == [], operations[at - 1]
        found.append(newest.state["global_step"])
        trainer = fit(root, resume="auto")
        assert state_of(trainer) == whole, operations[at - 1]
        # And no rubbish; what was to be deleted has a test of its own.
        assert set(names_in(folder)) - {"step_00000002"} == {"step_00000006"}, operations[at - 1]
    # The first until the second has its name, the second from there on.
    assert set(found) == {2, 4} and found == sorted(found)


@pytest.mark.parametrize("before", ["os.rename checkpoints/step_00000002", "shutil.rmtree checkpoints/.trash-"])
def test_a_checkpoint_whose_deletion_a_crash_has_stopped_is_deleted_later(
    before: str, half: Path, operations: list[tuple[str, str]], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(half, tmp_path / "run"))
    crash(root, next(i for i, x in enumerate(operations, 1) if " ".join(x).startswith(before)))
    assert any("step_00000002" in name for name in names_in(root / "checkpoints"))
    fit(root, resume="auto")
    assert names_in(root / "checkpoints") == ["step_00000006"]


class Keep(jl.Callback):
    """Saves to one path, again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_a_crash_at_every_operation_of_replacing_a_checkpoint_leaves_the_old_or_the_new_one(
    whole: list[bytes], tmp_path: Path
) -> None:
    without = {"enable_checkpointing": False}

    def keep(folder: Path, **arguments: Any) -> jl.Trainer:
        quiet = {"strategy": "single", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        callbacks = [Keep(folder / "step_00000000")] if arguments.pop("saves", True) else []
        trainer = jl.Trainer(callbacks=callbacks, **quiet, **without, **{"max_epochs": 2, **arguments})
        trainer.fit(Mean(), make_data())
        return trainer

    with faults(tmp_path / "counted") as seen:
        keep(tmp_path / "counted")
    renames = [i for i, (operation, _) in enumerate(seen.operations, 1) if operation == "os.rename"]
    begin = renames[1]  # behind the first save, whose last rename gave it its name
    steps = []
    end = len(seen.operations) + 1
    for at in (*range(begin + 2, end - 12, 3), *range(end - 12, end)):  # each one where names change
        folder = tmp_path / str(at)
        with faults(folder, at=at), pytest.raises((Crash, CheckpointError)):
            keep(folder)
        newest, _ = checkpoint.newest(folder)
        assert newest is not None
        steps.append(newest.state["global_step"])
        if at % 4 == 0 or steps[-2:] == [2, 4]:  # a few: what verifies is the same everywhere
            # Finished in a folder of its own, from the folder of the checkpoints.
            trainer = keep(folder, saves=False, max_epochs=3, resume=folder, default_root_dir=tmp_path / f"{at}-end")
            assert state_of(trainer) == whole, seen.operations[at - 1]
    assert set(steps) == {2, 4} and steps == sorted(steps)
    assert len(steps) > 18


def test_what_crashes_have_left_is_deleted_at_the_next_start_and_never_taken_for_a_checkpoint(
    half: Path, whole: list[bytes], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(half, tmp_path / "run"))
    folder = root / "checkpoints"
    shutil.copytree(folder / "step_00000002", folder / ".tmp-step_00000099-0123abcd")
    shutil.copytree(folder / "step_00000002", folder / ".trash-step_00000098-0123abcd")
    (folder / ".trash-step_00000098-0123abcd" / "state.json").unlink()
    (folder / ".tmp-step_00000097-0123abcd").mkdir()
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("mine")
    trainer = fit(root, resume="auto")
    assert state_of(trainer) == whole
    assert names_in(folder) == ["notes", "step_00000006"] and (folder / "notes" / "mine.txt").read_text() == "mine"


def test_the_probe_of_a_start_that_crashed_is_deleted_at_the_next(half: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(half, tmp_path / "run"))
    with faults(root / "checkpoints") as seen:
        fit(root, resume="auto", max_epochs=1)
    (at,) = [i for i, (what, path) in enumerate(seen.operations, 1) if what == "os.remove" and ".probe-" in path]
    with faults(root / "checkpoints", at=at), pytest.raises(Crash):
        fit(root, resume="auto")
    fit(root, resume="auto")
    assert [p.name for p in (root / "checkpoints").iterdir() if ".probe-" in p.name] == []


# A full disk, and a folder that cannot be written -----------------------------------------------------


class Steps(jl.Callback):
    """Counts the steps that were trained; each begins when what is being saved is there, or has failed."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for thread in threading.enumerate():
            if thread.name == "jaxlit-checkpoint":
                thread.join(BOUND)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1


def waiting() -> list[str]:
    """Return the threads, begun by a save, that keep the process from ending; those about to end may do so."""
    threads = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    for thread in threads:
        thread.join(5)
    return [thread.name for thread in threads if thread.is_alive()]


def test_a_disk_that_is_full_at_any_operation_is_an_error_at_once_and_the_older_checkpoint_loads(
    half: Path, operations: list[tuple[str, str]], whole: list[bytes], tmp_path: Path
) -> None:
    failed = 0
    for at in range(1, len(operations) + 1):
        root, steps = Path(shutil.copytree(half, tmp_path / str(at))), Steps()
        folder, error = root / "checkpoints", None
        with faults(root, at=at, kind="full") as seen:
            try:
                # The second epoch's checkpoint fails, and no second step of the third is taken.
                fit(root, steps, resume="auto")
            except CheckpointError as raised:
                error = raised
        assert waiting() == [], operations[at - 1]
        assert all(".tmp-" not in name for name in names_in(folder)), operations[at - 1]
        newest, skipped = checkpoint.newest(folder)
        assert newest is not None and skipped == []
        if error is not None:
            failed += 1
            assert str(folder) in str(error) and "No space left" in str(error)
            # Where only the old one could not be deleted, the next save is the first to fail.
            deleting = at > operations.index(("os.rename", "checkpoints/step_00000002"))
            assert steps.count <= (5 if deleting else 3) and len(seen.operations) >= at, operations[at - 1]
        if at % 8 == 0:
            assert state_of(fit(root, resume="auto")) == whole
    assert failed >= len(operations) - 8  # all but those that only delete


def test_with_on_save_error_warn_training_goes_on_and_saves_again_once_there_is_room(
    half: Path, whole: list[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = Path(shutil.copytree(half, tmp_path / "run"))
    fault = faults(root / "checkpoints", at=1, kind="full")

    class Full(jl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            (fault.__enter__ if trainer.current_epoch == 1 else lambda: fault.__exit__())()

    callbacks = [Full(), jl.callbacks.ModelCheckpoint(on_save_error="warn")]
    trainer = fit(root, *callbacks, resume="auto")
    assert state_of(trainer) == whole and names_in(root / "checkpoints") == ["step_00000006"]
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "jaxlit" and r.levelname == "WARNING"]
    assert "step_00000004" in warning and "No space left" in warning


@pytest.mark.parametrize("where", ["the run's", "dirpath", "denied"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(where: str, tmp_path: Path) -> None:
    steps, root = Steps(), tmp_path / "run"
    root.mkdir()
    (root / ("checkpoints" if where == "the run's" else "file")).write_text("a file in the way")
    dirpath = {"the run's": None, "dirpath": root / "file", "denied": tmp_path / "denied"}[where]
    saver = jl.callbacks.ModelCheckpoint(dirpath)
    arguments = {"default_root_dir": None, "resume": None} if where == "the run's" else {}
    with faults(tmp_path / "denied", at=1, kind="denied"), pytest.raises(CheckpointError) as raised:
        if where == "the run's":
            saver = jl.callbacks.ModelCheckpoint(root / "checkpoints")
        fit(tmp_path / "other", steps, saver, **arguments)
    assert steps.count == 0 and str(saver.dirpath) in str(raised.value)


# Two trainings, older checkpoints, values that are not finite, arrays that move on --------------------

CHILD = """
import sys
sys.path[:0] = sys.argv[3:]
import jaxlit as jl
jl.testing.fake_devices(8)
import test_fault_points as own

class Wait(jl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 3 and sys.argv[2] == "wait":
            print("ready", flush=True)
            sys.stdin.readline()

at = int(sys.argv[2]) if sys.argv[2] != "wait" else None
with jl.testing.faults(sys.argv[1], at=at, kind="kill"):
    own.fit(own.Path(sys.argv[1]), Wait(), resume="auto")
"""


def start(root: Path, what: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = [sys.executable, "-c", CHILD, str(root), what, str(Path(__file__).parent)]
    return subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root.parent
    )


def test_a_second_training_in_a_folder_is_refused_by_name_until_the_first_is_killed(
    half: Path, whole: list[bytes], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(half, tmp_path / "run"))
    with start(root, "wait") as child:
        try:
            assert child.stdout is not None
            while (line := child.stdout.readline()) != "ready\n":
                assert line, "the child ended early"
            steps = Steps()
            with pytest.raises(CheckpointError) as raised:
                fit(root, steps, resume="auto")
            assert f"process {child.pid}" in str(raised.value) and str(root / "checkpoints") in str(raised.value)
            assert steps.count == 0
        finally:
            child.kill()
            child.wait(BOUND)
    assert child.returncode == -signal.SIGKILL
    assert state_of(fit(root, resume="auto")) == whole


def test_a_real_kill_in_the_middle_of_a_save_loses_nothing(
    half: Path, operations: list[tuple[str, str]], whole: list[bytes], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(half, tmp_path / "run"))
    at = next(i for i, (what, path) in enumerate(operations, 1) if what == "open" and "MANIFEST" in path)
    with start(root, str(at)) as child:
        child.communicate(timeout=BOUND)
    assert child.returncode == -signal.SIGKILL
    (left,) = [name for name in names_in(root / "checkpoints") if name.startswith(".tmp-step_00000004")]
    assert (root / "checkpoints" / left / "state.json").exists()
    assert checkpoint.newest(root / "checkpoints")[0].state["global_step"] == 2  # type: ignore[union-attr]
    assert state_of(fit(root, resume="auto")) == whole
    assert names_in(root / "checkpoints") == ["step_00000006"]


def test_after_an_older_checkpoint_and_a_crash_auto_goes_on_with_the_newer_history(tmp_path: Path) -> None:
    root = tmp_path / "run"
    keep = jl.callbacks.ModelCheckpoint
    fit(root, keep(every_n_train_steps=1, save_top_k=-1))
    older = root / "checkpoints" / "step_00000001"
    with faults(root / "checkpoints") as seen:
        fit(root, keep(every_n_train_steps=1, save_top_k=-1), resume=older, max_steps=3)
    renamed = [i for i, (what, path) in enumerate(seen.operations, 1) if what == "os.rename" and ".tmp-" in path]
    found, skipped = checkpoint.newest(root / "checkpoints")
    assert found is not None and skipped == [] and found.state["global_step"] == 3
    at = max(renamed)  # the rename of the newest
    with faults(root / "checkpoints", at=at), pytest.raises((Crash, CheckpointError)):
        fit(root, keep(every_n_train_steps=1, save_top_k=-1), resume=older, max_steps=3)
    found, skipped = checkpoint.newest(root / "checkpoints")
    assert found is not None and skipped == []
    # That of step 6, the largest number in the folder, belongs to the history that was left.
    assert found.state["global_step"] in (2, 3)


class Poison(jl.Callback):
    """Makes the weights, or a logged metric, NaN from an epoch on."""

    def __init__(self, weights: bool) -> None:
        self.weights = weights

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if self.weights and trainer.current_epoch == 1:
            module.w[...] = jnp.full(8, jnp.nan)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.log("score", [3.0, float("nan"), 5.0][trainer.current_epoch])


def test_the_last_finite_checkpoint_is_not_deleted_under_nan_policy_ignore(tmp_path: Path) -> None:
    fit(tmp_path / "run", Poison(True), jl.callbacks.ModelCheckpoint(), nan_policy="ignore")
    assert names_in(tmp_path / "run" / "checkpoints") == ["step_00000002", "step_00000006"]
    module = Mean.load_from_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000002")
    assert np.isfinite(np.asarray(module.w[...])).all()


@pytest.mark.parametrize(("mode", "best"), [("min", "step_00000002"), ("max", "step_00000006")])
def test_a_metric_that_is_nan_is_never_the_best(mode: str, best: str, tmp_path: Path) -> None:
    saver = jl.callbacks.ModelCheckpoint(monitor="score", mode=mode)
    fit(tmp_path / "run", Poison(False), saver)
    assert Path(saver.best_model_path).name == best
    assert saver.best_model_score == {"min": 3.0, "max": 5.0}[mode]


class Copies(jl.Callback):
    """Copies the values at each save, before the next step overwrites them."""

    def __init__(self) -> None:
        self.at: dict[int, dict[str, np.ndarray]] = {}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        names = [name for name, _, _ in checkpoint["arrays"]]
        leaves = [np.array(x) for x in jax.tree.leaves(trainer.state)]
        self.at[trainer.global_step] = dict(zip(names, leaves, strict=True))


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "pmap"])
def test_a_checkpoint_is_the_state_at_the_save_though_later_steps_overwrite_it(strategy: str, tmp_path: Path) -> None:
    copies, size = Copies(), 2**18
    saver = jl.callbacks.ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)
    arguments = {"strategy": strategy, "callbacks": [copies, saver], "max_epochs": 2}
    trainer = make_trainer(tmp_path / "run", **arguments)

    class Large(Mean):
        def training_step(self, batch: Any) -> jax.Array:
            return jnp.mean((self.w[...] - jnp.mean(batch["x"])) ** 2) * size

    trainer.fit(Large(size), make_data())
    assert sorted(n for n in copies.at if n) == [1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        found = checkpoint.read(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
        specs = found.specs
        read = found.arrays({i: np.zeros(shape, dtype) for i, (_, shape, dtype) in enumerate(specs)})
        for i, (name, _, _) in enumerate(specs):
            assert np.array_equal(read[i], copies.at[step][name]), f"{name} of step {step}"
    assert not np.array_equal(copies.at[1]["module.w"], copies.at[2]["module.w"])
