"""A bucket whose list is late, or that a training writes to which should have ended; and who waits for it."""

import json
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from kit.buckets import URL, Bucket, checkpoints, go, in_bucket, make_machine, replace, saves
from kit.checkpoints import bytes_of, train
from kit.journal import hooks


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_machine(tmp_path, monkeypatch)


def register(kind: type[Bucket]) -> None:
    fsspec.register_implementation("bucket", kind, clobber=True)


def test_the_newest_checkpoint_is_found_though_a_list_is_late(machine: Path) -> None:
    """The claim names it: an object of a known name is read as it is, in whatever store."""
    go(3)

    class Late(Bucket):
        def ls(self, path: str, detail: bool = True, **named: Any) -> Any:
            found = super().ls(path, detail=detail, **named)
            return [x for x in found if "step_00000009" not in (x["name"] if detail else x)]

    replace(machine)
    register(Late)
    trainer, whole = go(4), train("whole", 4, saves())
    assert bytes_of(trainer) == bytes_of(whole)
    register(Bucket)
    assert checkpoints() == ["step_00000012"]
    assert in_bucket()["metrics.csv"] == (whole.run_dir / "metrics.csv").read_bytes()


def test_the_loop_never_waits_for_the_bucket() -> None:
    """Every request between the first step and the last comes from another thread."""
    seen, watches = set[str](), threading.Event()

    class Watched(Bucket):
        def invalidate_cache(self, path: str | None = None) -> None:  # before each request that reads
            self.note()
            super().invalidate_cache(path)

        def open(self, *args: Any, **named: Any) -> Any:
            self.note()
            return super().open(*args, **named)

        def rm_file(self, path: str) -> None:
            self.note()
            super().rm_file(path)

        @staticmethod
        def note() -> None:
            if watches.is_set():
                seen.add(threading.current_thread().name)

    register(Watched)
    begins = hooks(on_train_start=lambda *_: watches.set(), on_train_end=lambda *_: watches.clear())
    go(6, begins, saves(every_n_epochs=None, every_n_train_steps=1))
    assert seen == {"jaxlit-checkpoint"}


def test_a_process_that_lives_on_after_its_job_cannot_spoil_a_checkpoint() -> None:
    """Its late files of the same step have other names; the manifest names those of the job that went on."""
    go(2)
    (manifest,) = [name for name in in_bucket() if name.endswith("MANIFEST.json")]
    folder = manifest.rpartition("/")[0]
    fs, base = fsspec.core.url_to_fs(URL)
    for name in ("0.safetensors", "1.safetensors", "state.json"):
        fs.pipe_file(f"{base}/{folder}/data-0123abcd/{name}", b"late")
    trainer, whole = go(3), train("whole", 3, saves())
    assert bytes_of(trainer) == bytes_of(whole)


def test_a_save_over_a_checkpoint_replaces_it_at_once_or_not_at_all(tmp_path: Path) -> None:
    """Between its first request and the manifest the bucket has the old one, complete."""
    trainer = train("run", 1)
    path = f"{URL}/kept"
    trainer.save_checkpoint(path)
    before = in_bucket(path)
    states = []

    def meet(operation: str, name: str) -> None:
        if operation == "put":
            there = {x.rpartition("/")[2]: y for x, y in Bucket.store.items() if "/kept/" in x}
            states.append((name.rpartition("/")[2], before["MANIFEST.json"] == there["MANIFEST.json"].getvalue()))

    Bucket.meet = staticmethod(meet)
    trainer.save_checkpoint(path)
    assert [name for name, _ in states][-1] == "MANIFEST.json"
    assert all(is_old for _, is_old in states)
    Bucket.meet = staticmethod(lambda *_: None)
    after = in_bucket(path)
    assert len(after) == len(before) == 3
    assert not (after.keys() & before.keys()) - {"MANIFEST.json"}


def test_a_machine_copies_back_nothing_but_rows(machine: Path) -> None:
    """Checkpoints under other names, and files of others in the bucket, are neither fetched nor written again."""
    keeps = hooks(on_train_epoch_end=lambda trainer, _: trainer.save_checkpoint(f"{URL}/kept/last"))
    go(1, keeps, saves())
    fs, base = fsspec.core.url_to_fs(URL)
    fs.pipe_file(f"{base}/notes/of_others.txt", b"first")
    replace(machine)
    go(2, keeps, saves(dirpath=f"{URL}/best"), saves())
    fs.pipe_file(f"{base}/notes/of_others.txt", b"second")
    go(3, saves(dirpath=f"{URL}/best"), saves())
    there = in_bucket()
    assert there["notes/of_others.txt"] == b"second"
    assert state_of_kept(there)["global_step"] == 6
    assert {name.split("/")[1] for name in there if name.startswith("best/step")} == {"step_00000009"}
    assert not [x for x in machine.rglob("*") if "kept" in x.parts or x.name == "of_others.txt"]


def state_of_kept(there: dict[str, bytes]) -> Any:
    return json.loads(next(x for name, x in there.items() if name.startswith("kept/") and name.endswith("state.json")))
