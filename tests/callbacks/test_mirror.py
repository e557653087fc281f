"""A run is copied to a bucket: what is complete, in an order in which a machine may die at any moment."""

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from kit.batches import numbered
from kit.buckets import URL, Bucket, WaitsForCopies, checkpoints, go, in_bucket, in_folder, make_machine, replace, saves
from kit.checkpoints import train
from kit.journal import hooks
from kit.modules import Mean
from kit.refusals import fit_refuses, refuses, warnings_of

import jaxlit as jl
from jaxlit.checkpoints import files
from jaxlit.errors import ArgumentError, CheckpointError

OF_STEP = "checkpoints/step_{:08d}"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_machine(tmp_path, monkeypatch)


def fails(*operations: str, name: str = "") -> Any:
    """Return what a bucket meets if these operations on names with a text fail; `failed` is set once one has."""

    def meet(operation: str, path: str) -> None:
        if operation in operations and name in path:
            meet.failed.set()  # type: ignore[attr-defined]
            raise PermissionError(f"no {operation} of {path}")

    meet.failed = threading.Event()  # type: ignore[attr-defined]
    return staticmethod(meet)


@pytest.mark.parametrize(
    "kind", ["bucket://a/run", "memory://{name}/r[u]n *", "file://{path}/r[u]n", "dir::file://{path}"]
)
def test_the_bucket_has_what_the_folder_has(kind: str, tmp_path: Path) -> None:
    url = kind.format(name=tmp_path.name, path=tmp_path / "remote")
    best = saves(monitor="loss", mode="max", save_top_k=2)  # the first ones: others come and go
    trainer = go(5, best, jl.callbacks.RunReport(), url=url)
    there = in_bucket(url)
    assert there == in_folder(trainer.run_dir)
    assert checkpoints(url) == sorted(Path(path).name for path in {*best.best_k_models, best.last_model_path})
    assert {"metrics.csv", "report.html"} < there.keys()


@pytest.mark.parametrize("name", ["metrics.csv", ".mirror"])
def test_a_write_that_is_cut_leaves_the_old_file(name: str, machine: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The local file system writes in place; another machine then continues with what is in the copy."""
    url = f"file://{tmp_path}/copy"
    go(1, url=url)
    before = in_bucket(url)[name]

    def cut(fs: Any, path: str, value: bytes, *rest: Any, **named: Any) -> None:
        Path(path).write_bytes(value[: len(value) // 2] if name in path else value)
        if name in path:
            raise OSError("the process has ended")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "pipe_file", cut)
        refuses(CheckpointError, lambda: go(2, url=url), "the process has ended")
    assert in_bucket(url)[name] == before
    replace(machine)
    go(3, url=url)
    go(3, url=f"file://{tmp_path}/whole")
    assert in_bucket(url)["metrics.csv"] == in_bucket(f"file://{tmp_path}/whole")["metrics.csv"]


def test_a_shared_folder_is_copied_too(tmp_path: Path) -> None:
    train(tmp_path / "shared", 2, jl.callbacks.Mirror(URL), saves())
    assert in_bucket() == in_folder(tmp_path / "shared")


def test_the_manifest_is_the_last_file_that_comes_and_the_first_that_goes() -> None:
    go(3, WaitsForCopies(), saves())
    for number, seen in (("put", -1), ("remove", 0)):
        paths = [path for operation, path in Bucket.log if operation == number and OF_STEP.format(3) in path]
        assert len(paths) > 5
        assert [i for i, path in enumerate(paths) if path.endswith("MANIFEST.json")] == [range(len(paths))[seen]]


def test_an_old_checkpoint_goes_once_a_newer_one_is_complete() -> None:
    go(3, WaitsForCopies(), saves())
    order = [x for x in Bucket.log if x[1].endswith("MANIFEST.json")]
    steps = [(operation, int(path.split("step_")[1][:8])) for operation, path in order]
    assert steps == [("put", 3), ("put", 6), ("remove", 3), ("put", 9), ("remove", 6)]


def test_a_checkpoint_is_copied_although_it_is_deleted_meanwhile() -> None:
    goes_on, gone = threading.Event(), []

    def wait(operation: str, path: str) -> None:
        if operation == "put" and path.endswith(f"{OF_STEP.format(3)}/state.json"):
            assert goes_on.wait(60)

    def saved(trainer: jl.Trainer, module: Any, callback: Any, path: Path) -> None:
        gone.append(not (trainer.run_dir / OF_STEP.format(3)).exists())
        if path.name == "step_00000009":
            goes_on.set()

    Bucket.meet = staticmethod(wait)
    trainer = go(3, WaitsForCopies(3), hooks(on_checkpoint_saved=saved), saves())
    assert gone == [False, True, True]
    first, last = (f"/runs/net/{OF_STEP.format(step)}/MANIFEST.json" for step in (3, 9))
    assert Bucket.log.index(("put", first)) < Bucket.log.index(("put", last)) < Bucket.log.index(("remove", first))
    assert in_bucket() == in_folder(trainer.run_dir)


def test_a_copy_that_fails_ends_training_and_loses_nothing() -> None:
    Bucket.meet = fails("put", name="checkpoints/")
    trainer = jl.Trainer(default_root_dir=URL)
    error = refuses(CheckpointError, lambda: go(9), rf"{URL}.*PermissionError: no put", str(trainer.run_dir))
    assert isinstance(error.__cause__, PermissionError)
    (newest, *_) = files.candidates(trainer.run_dir / "checkpoints")
    assert files.read(newest).state["global_step"] >= 3
    assert checkpoints() == []
    Bucket.meet = staticmethod(lambda *_: None)
    trainer = go(9)  # the same command continues, and copies what is left
    assert in_bucket() == in_folder(trainer.run_dir)


def test_a_copy_that_fails_is_a_warning_if_a_save_would_be(caplog: pytest.LogCaptureFixture) -> None:
    Bucket.meet = fails("put", name="MANIFEST.json")

    def restore(trainer: jl.Trainer, module: Any) -> None:
        assert Bucket.meet.failed.wait(60)  # type: ignore[attr-defined]
        Bucket.meet = staticmethod(lambda *_: None)

    trainer = go(3, hooks(on_train_end=restore), saves(on_save_error="warn"))
    assert trainer.global_step == 9
    assert any(text.startswith(f"{URL} could not be written") for text in warnings_of(caplog))
    assert in_bucket() == in_folder(trainer.run_dir)


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    Bucket.meet = fails("remove", name=f"{OF_STEP.format(3)}/")
    go(2, WaitsForCopies(), saves())
    assert f"{URL}/{OF_STEP.format(3)} could not be deleted" in "".join(warnings_of(caplog))
    assert checkpoints() == ["step_00000003", "step_00000006"]


def test_a_bucket_that_cannot_be_written_is_refused_before_the_first_step() -> None:
    Bucket.meet = fails("put")
    fit_refuses(CheckpointError, URL, "PermissionError", default_root_dir=URL, max_epochs=1)


def test_checkpoints_outside_of_the_run_are_not_copied_and_named(caplog: pytest.LogCaptureFixture) -> None:
    go(1, saves(dirpath="elsewhere"))
    assert "step_00000003 is not in" in "".join(warnings_of(caplog))
    assert checkpoints() == []


def test_that_there_are_no_locks_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = jl.Trainer(default_root_dir=URL, max_epochs=1, strategy="single")
    for _ in range(2):
        trainer.fit(Mean(), numbered(2))
    lines = [line for line in capsys.readouterr().out.splitlines() if "no locks" in line]
    assert len(lines) == 1
    assert URL in lines[0]


def test_a_signal_waits_for_the_copies() -> None:
    ending = threading.Event()

    def wait(operation: str, path: str) -> None:
        assert "checkpoints/" not in path or ending.wait(60)

    Bucket.meet = staticmethod(wait)
    stop = hooks(on_train_epoch_start=lambda t, m: t.current_epoch == 1 and signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        go(3, stop, hooks(teardown=lambda *_: ending.set()), saves())
    assert ended.value.code == 143
    (folder,) = Path("machine").glob("jaxlit/runs/*/runs/net")
    assert in_bucket() == in_folder(folder)
    assert checkpoints()


def test_the_screen_has_the_address_the_folder_and_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = go(1, resume=None, enable_progress_bar=True)
    screen = capsys.readouterr().out
    assert f"pass default_root_dir='{URL}', resume='auto' and a larger max_epochs" in screen
    header = next(line for line in screen.splitlines() if line.startswith("jaxlit "))
    assert f"run {URL} in {trainer.run_dir.relative_to(Path.cwd())}" in header


def test_other_verbs_copy_nothing() -> None:
    trainer = go(1)
    before = in_bucket()
    trainer.validate(Mean(), numbered(2))
    assert in_bucket() == before


def test_a_path_is_no_address() -> None:
    refuses(ArgumentError, lambda: jl.callbacks.Mirror("runs/net"), r"Mirror\(url=...\) takes a URL")
