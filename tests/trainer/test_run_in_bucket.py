"""A run in a bucket: its checkpoints are written there, its rows are copied, and another machine continues it."""

import itertools
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from kit.batches import numbered
from kit.buckets import (
    URL,
    Bucket,
    checkpoints,
    go,
    in_bucket,
    in_folder,
    make_machine,
    replace,
    rows_in_bucket,
    saves,
    write,
)
from kit.checkpoints import bytes_of, keep_all, names, train
from kit.faults import Crash
from kit.journal import hooks
from kit.modules import Linear, Mean
from kit.refusals import fit_refuses, refuses, warnings_of
from kit.trainers import thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError, CheckpointError

NAME = "step_{:08d}"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_machine(tmp_path, monkeypatch)


def delete(name: str) -> None:
    fs, base = fsspec.core.url_to_fs(URL)
    fs.rm(f"{base}/{name}", recursive=True)


def found(step: int, name: str) -> str:
    """Return the path in the bucket of a checkpoint's file."""
    (path,) = [x for x in in_bucket() if x.startswith(f"checkpoints/{NAME.format(step)}/") and x.endswith(name)]
    return path


def fails(*operations: str, name: str = "") -> Any:
    """Return what a bucket meets if these operations on names with a text fail."""

    def meet(operation: str, path: str) -> None:
        if operation in operations and name in path:
            raise PermissionError(f"no {operation} of {path}")

    return staticmethod(meet)


def same(trainer: jl.Trainer, epochs: int, *callbacks: jl.Callback, url: str = URL) -> None:
    """See that a training in a bucket has ended as one on a disk that nothing has interrupted."""
    whole = train("whole", epochs, *(callbacks or [saves()]))
    assert bytes_of(trainer) == bytes_of(whole)
    rows = (whole.run_dir / "metrics.csv").read_bytes()
    assert (trainer.run_dir / "metrics.csv").read_bytes() == rows
    assert in_bucket(url)["metrics.csv"] == rows
    assert checkpoints(url) == names("whole/checkpoints")


@pytest.mark.parametrize("kind", ["bucket://a/run", "memory://{name}/r[u]n *"])
def test_another_machine_continues_bit_by_bit(kind: str, machine: Path, tmp_path: Path) -> None:
    url = kind.format(name=tmp_path.name)
    go(2, url=url)
    replace(machine)
    same(go(4, url=url), 4, url=url)


def test_the_bucket_has_the_rows_and_reports_of_the_folder() -> None:
    best = saves(monitor="loss", mode="max", save_top_k=2)  # the first ones: others come and go
    trainer = go(5, best, jl.callbacks.RunReport())
    assert rows_in_bucket() == in_folder(trainer.run_dir)
    assert {"metrics.csv", "report.html"} <= rows_in_bucket().keys()
    assert checkpoints() == sorted(Path(path).name for path in {*best.best_k_models, best.last_model_path})
    assert all(path.startswith(f"{URL}/checkpoints/") for path in best.best_k_models)


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """What a second fit does in the bucket, whose two epochs each write a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        make_machine(tmp_path_factory.mktemp("counted"), patch)
        go(1)
        Bucket.log.clear()
        go(3)
        return [*Bucket.log]


def dies(at: int) -> list[str]:
    """End the machine at an operation: neither it nor a later one is done. Return what was asked for, as it comes."""
    asked, lock = list[str](), threading.Lock()

    def meet(operation: str, path: str) -> None:
        with lock:
            asked.append(f"{operation} {path}")
            if len(asked) >= at:
                raise Crash(asked[-1])

    Bucket.meet = staticmethod(meet)
    return asked


@pytest.mark.parametrize("share", thinned(range(8), 0, full=()))
def test_a_machine_may_die_at_any_operation(share: int, machine: Path, operations: list[tuple[str, str]]) -> None:
    """Another one continues with the same numbers, and with all rows."""
    assert 25 < len(operations) < 120
    seldom = [k for k, x in enumerate(operations, 1) if "MANIFEST" in x[1] or "metrics" in x[1]] if share == 0 else []
    for at in {*seldom, *range(1 + share, len(operations) + 1, 8)}:
        delete("") if in_bucket() else None
        go(1)
        asked, died = dies(at), False
        try:
            go(3)
        except (Crash, CheckpointError):
            died = True
        assert died or len(operations) - 5 <= len(asked) < at  # a last copy of rows may have nothing to do
        Bucket.meet = staticmethod(lambda *_: None)
        replace(machine)
        same(go(3), 3)
        assert "step_00000003" not in "".join(in_bucket())
        replace(machine)
        replace(Path("whole"))


def test_the_manifest_is_the_last_file_that_comes_and_the_first_that_goes() -> None:
    go(3)
    for kind, seen in (("put", -1), ("remove", 0)):
        paths = [path for operation, path in Bucket.log if operation == kind and f"/{NAME.format(3)}/" in path]
        assert len(paths) == 3
        assert [i for i, path in enumerate(paths) if path.endswith("MANIFEST.json")] == [range(3)[seen]]
    order = [x for x in Bucket.log if x[1].endswith("MANIFEST.json") and x[0] != "get"]
    steps = [(operation, int(path.split("step_")[1][:8])) for operation, path in order]
    assert steps == [("put", 3), ("put", 6), ("remove", 3), ("put", 9), ("remove", 6)]


def test_rows_are_there_before_the_checkpoint_that_has_seen_them() -> None:
    rows: list[int] = []

    def meet(operation: str, path: str) -> None:
        if operation == "put" and path.endswith("MANIFEST.json"):
            rows.append(in_bucket()["metrics.csv"].count(b"\n"))

    Bucket.meet = staticmethod(meet)
    go(3, log_every_n_steps=1)
    assert all(there >= seen for there, seen in zip(rows, (4, 7, 10), strict=True))  # with the header


def test_a_machine_that_was_left_behind_takes_what_others_did(machine: Path) -> None:
    go(2)
    machine.rename("first")
    go(4)
    replace(machine)
    Path("first").rename(machine)
    same(go(5), 5)


def test_the_same_machine_fetches_no_rows() -> None:
    go(2)
    Bucket.log.clear()
    go(3)
    assert ("get", "/runs/net/metrics.csv") not in Bucket.log


def flip(name: str) -> None:
    data = in_bucket()[name]
    write(name, bytes([data[0] ^ 1]) + data[1:])


DAMAGES: dict[str, tuple[Callable[[], None], str | None]] = {  # and what is warned of
    "it has no manifest": (lambda: delete(found(9, "MANIFEST.json")), None),
    "its manifest is cut": (lambda: write(x := found(9, "MANIFEST.json"), in_bucket()[x][:-7]), "is no JSON"),
    "a file is damaged": (lambda: flip(found(9, "0.safetensors")), "0.safetensors is damaged"),
    "a file is missing": (lambda: delete(found(9, "state.json")), "state.json is missing"),
}


@pytest.mark.parametrize("damage", thinned(DAMAGES, *[*DAMAGES][::2], full=()))
def test_the_one_before_is_taken_if(damage: str, machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    go(3, keep_all())
    do, warned = DAMAGES[damage]
    do()
    replace(machine)
    begins: list[int] = []
    look = hooks(on_fit_start=lambda t, m: begins.append(t.global_step))
    same(go(3, look, keep_all()), 3, keep_all())
    skipped = [text for text in warnings_of(caplog) if "step_00000009" in text]
    assert len(skipped) == (warned is not None)
    assert all(f"{warned}" in text and URL in text for text in skipped)
    go(3, look, keep_all())
    assert begins == [6, 9]  # it was written again


def test_a_machine_that_stops_while_it_fetches_fetches_the_rest_later(machine: Path) -> None:
    go(2, saves(), jl.callbacks.RunReport())
    replace(machine)
    Bucket.meet = fails("get", name="report.html")
    refuses(CheckpointError, lambda: go(3), f"{URL}/report.html cannot be read: PermissionError")
    Bucket.meet = staticmethod(lambda *_: None)
    same(go(3), 3)


def test_a_run_of_which_nothing_can_be_used_does_not_start_again(machine: Path) -> None:
    go(1)
    flip(found(3, "state.json"))
    replace(machine)
    refuses(CheckpointError, lambda: go(2), f"None of the 1 checkpoints in {URL}", "state.json is damaged")


def test_a_list_that_is_late_hides_no_checkpoint(machine: Path) -> None:
    go(2)
    replace(machine)

    class Late(Bucket):
        def ls(self, path: str, *arguments: Any, **named: Any) -> Any:
            return [] if path.endswith("/checkpoints") else super().ls(path, *arguments, **named)

    fsspec.register_implementation("bucket", Late, clobber=True)
    begins: list[int] = []
    go(3, hooks(on_fit_start=lambda t, m: begins.append(t.global_step)), saves())
    assert begins == [6]


def test_what_a_crash_left_in_the_bucket_is_deleted() -> None:
    go(1)
    write("checkpoints/step_00000099/data-0123abcd/0.safetensors", b"half of it")
    write("checkpoints/step_00000098/notes.txt", b"mine")
    go(3)
    assert {x.split("/")[1] for x in in_bucket() if x.startswith("checkpoints/")} == {"step_00000009", "step_00000098"}


@pytest.mark.full
def test_the_best_ones_are_known_on_another_machine(machine: Path) -> None:
    best = lambda: saves(monitor="loss", mode="max", save_top_k=2)  # noqa: E731
    whole, first, second = best(), best(), best()
    train("whole", 5, whole)
    go(4, first)
    replace(machine)
    go(4, second)
    assert second.best_k_models == first.best_k_models
    assert len(second.best_k_models) == 2
    go(5, best())
    assert checkpoints() == names("whole/checkpoints")  # those that are no longer among the best are deleted
    module = Linear.load_from_checkpoint(f"{URL}/best")
    expected = Linear.load_from_checkpoint(whole.best_model_path)
    np.testing.assert_array_equal(module.kernel[...], expected.kernel[...])


def test_a_bucket_or_a_folder_with_another_run_is_refused(machine: Path) -> None:
    go(1)
    refuses(ArgumentError, lambda: go(1, resume=None), f"{URL}.*of another run")
    replace(machine)
    refuses(ArgumentError, lambda: go(1, resume=None), f"{URL}.*of another run")
    go(1)
    delete("")
    refuses(ArgumentError, lambda: go(1, resume=None), f"{URL}.*in .*machine/jaxlit/runs/bucket/runs/net, holds")


def test_a_bucket_that_cannot_be_read_is_no_new_run(machine: Path) -> None:
    go(1)
    replace(machine)

    class Closed(Bucket):
        def ls(self, *_: Any, **__: Any) -> Any:
            raise PermissionError("closed")

    fsspec.register_implementation("bucket", Closed, clobber=True)
    refuses(CheckpointError, lambda: go(1), f"{URL}.* cannot be read: PermissionError: closed")


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_bucket_that_cannot_be_written_is_refused_before_the_first_step(resume: str | None) -> None:
    Bucket.meet = fails("put")
    arguments = {"default_root_dir": URL, "max_epochs": 1, "resume": resume}
    for _ in range(2):  # the first has left no lock
        fit_refuses(CheckpointError, URL, "PermissionError: no put", "default_root_dir", **arguments)


def test_a_save_that_fails_ends_training_and_loses_nothing() -> None:
    go(1)
    Bucket.meet = fails("put", name=f"{NAME.format(6)}/")
    error = refuses(CheckpointError, lambda: go(9), rf"{URL}.*{NAME.format(6)} could not be written: no put", "Earlier")
    assert isinstance(error.__cause__, PermissionError)
    assert checkpoints() == [NAME.format(3)]
    Bucket.meet = staticmethod(lambda *_: None)
    same(go(3), 3)  # the same command continues


@pytest.mark.parametrize("name", ["MANIFEST.json", ".lock"])
def test_a_save_that_fails_is_a_warning_if_asked_for(name: str, caplog: pytest.LogCaptureFixture) -> None:
    start = hooks(on_train_start=lambda *_: setattr(Bucket, "meet", fails("put", name=f"checkpoints/{name}")))
    middle = hooks(on_train_start=lambda *_: setattr(Bucket, "meet", fails("put", name="MANIFEST.json")))
    end = hooks(on_train_end=lambda *_: setattr(Bucket, "meet", staticmethod(lambda *_: None)))
    trainer = go(3, middle if name == "MANIFEST.json" else start, end, saves(on_save_error="warn"))
    assert trainer.global_step == 9
    assert any("could not be written: no put" in text for text in warnings_of(caplog))
    # What is there can be used, whatever failed after it was sealed.
    Bucket.meet = staticmethod(lambda *_: None)
    same(go(4), 4)


def test_a_copy_of_rows_that_fails_never_ends_training(caplog: pytest.LogCaptureFixture) -> None:
    Bucket.meet = fails("put", name="metrics.csv")
    assert go(2).global_step == 6
    assert "metrics.csv" not in in_bucket()
    told = [text for text in warnings_of(caplog) if "could not be copied" in text]
    assert told
    assert all(text.startswith(f"The rows of the run could not be copied to {URL} (PermissionError") for text in told)
    Bucket.meet = staticmethod(lambda *_: None)
    same(go(3), 3)


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    Bucket.meet = fails("remove", name=f"{NAME.format(3)}/")
    go(2)
    told = f"The old checkpoint {URL}/checkpoints/{NAME.format(3)} could not be deleted: no remove"
    assert any(text.startswith(told) for text in warnings_of(caplog))
    assert checkpoints() == [NAME.format(3), NAME.format(6)]
    Bucket.meet = staticmethod(lambda *_: None)
    same(go(3), 3)


def test_checkpoints_and_rows_may_be_in_different_places(machine: Path) -> None:
    trainer = go(2, saves(dirpath="elsewhere"))
    assert checkpoints() == []
    assert names("elsewhere") == [NAME.format(6)]
    assert in_bucket()["metrics.csv"] == (trainer.run_dir / "metrics.csv").read_bytes()
    trainer = train("run", 2, saves(dirpath=f"{URL}/kept"))
    assert {x.split("/")[1] for x in in_bucket() if x.startswith("kept")} == {NAME.format(6)}
    assert trainer.checkpoint_callback.best_model_path == f"{URL}/kept/{NAME.format(6)}"
    same_one = train("run", 3, saves(dirpath=f"{URL}/kept"), resume="auto")
    assert bytes_of(same_one) == bytes_of(train("whole", 3))


def test_a_signal_waits_for_the_checkpoint() -> None:
    ending = threading.Event()

    def wait(operation: str, path: str) -> None:
        assert "checkpoints/step" not in path or operation != "put" or ending.wait(60)

    Bucket.meet = staticmethod(wait)
    stop = hooks(on_train_epoch_start=lambda t, m: t.current_epoch == 1 and signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        go(3, stop, hooks(on_exception=lambda *_: ending.set(), on_train_batch_end=lambda *_: ending.set()), saves())
    assert ended.value.code == 143
    assert checkpoints()
    (folder,) = Path("machine").glob("jaxlit/runs/*/runs/net")
    assert rows_in_bucket() == in_folder(folder)
    Bucket.meet = staticmethod(lambda *_: None)
    same(go(3), 3)


def test_the_screen_has_the_address_the_folder_and_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = go(1, resume=None, enable_progress_bar=True)
    screen = capsys.readouterr().out
    assert f"pass default_root_dir='{URL}', resume='auto' and a larger max_epochs" in screen
    assert f"checkpoint  {URL}/checkpoints/{NAME.format(3)}" in screen
    header = next(line for line in screen.splitlines() if line.startswith("jaxlit "))
    assert f"run {URL} in {trainer.run_dir.relative_to(Path.cwd())}" in header


class Measured(Mean):
    def test_step(self, batch: Any) -> None:
        self.log("error", self.error(batch).mean())


def test_other_verbs_copy_and_claim_nothing() -> None:
    go(1)
    before = dict(Bucket.store)
    Bucket.log.clear()
    trainer = jl.Trainer(default_root_dir=URL, strategy="single")
    trainer.test(Measured(), numbered(2), ckpt_path=None)
    assert Bucket.store == before
    assert [x for x in Bucket.log if x[0] != "get"] == []


URLS = (f"{URL}/checkpoints/step_00000006", URL, f"{URL}/", f"{URL}/last", f"{URL}/checkpoints")
USES: dict[str, Callable[[str], Any]] = {
    "load_from_checkpoint": lambda url: Linear.load_from_checkpoint(url),
    "init_from": lambda url: train("other", 0, init_from=url).module,
    "ckpt_path": lambda url: train("other", 2, ckpt_path=url).module,
    "resume": lambda url: train("other", 2, resume=url).module,
}


@pytest.mark.parametrize(
    ("url", "use"),
    thinned(
        itertools.product(URLS, USES),
        *[*zip(URLS, [*USES] * 2, strict=False)][::2],
        full=[*zip(URLS, [*USES] * 2, strict=False)][1::2],
    ),
)
def test_a_checkpoint_at_a_url_is_taken_by(use: str, url: str, machine: Path) -> None:
    kernel = np.asarray(go(2).module.kernel[...])
    replace(machine)
    np.testing.assert_array_equal(USES[use](url).kernel[...], kernel)


def test_a_machine_that_has_loaded_weights_continues_with_all_rows(machine: Path) -> None:
    go(2)
    replace(machine)
    Linear.load_from_checkpoint(URL)
    same(go(3), 3)
