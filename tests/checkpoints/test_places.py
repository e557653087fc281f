"""Paths on disks and in buckets: the same methods, files that are fetched, and writes that are complete or not."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from kit.buckets import URL, Bucket, go, make_machine, replace, write
from kit.faults import Crash, faults
from kit.journal import raising
from kit.modules import Linear
from kit.refusals import refuses

import jaxlit as jl
from jaxlit.checkpoints import places
from jaxlit.checkpoints.places import RemotePath, place_of, staging
from jaxlit.errors import CheckpointError
from jaxlit.weights.sources import fetched


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_machine(tmp_path, monkeypatch)


LOOKS: dict[str, Any] = {
    "name": lambda p: p.name,
    "parent": lambda p: (p / "a").parent == p and (p / "a" / "b").parent.name == "a",
    "exists": lambda p: [(p / x).exists() for x in ("a", "a/b", "none", "a/none", "a/b/none")],
    "is_dir": lambda p: [(p / x).is_dir() for x in ("a", "a/b", "none")],
    "is_file": lambda p: [(p / x).is_file() for x in ("a", "a/b", "none")],
    "stat": lambda p: (p / "a" / "b").stat().st_size,
    "size_of": lambda p: places.size_of(p / "a" / "b"),
    "read_bytes": lambda p: (p / "a" / "b").read_bytes(),
    "iterdir": lambda p: sorted(x.name for x in p.iterdir()),
    "suffix of a path": lambda p: str(p / "a" / "b").removeprefix(str(p)),
    "hash": lambda p: {p / "a": 1}[p / "a"],
    "read_into": lambda p: [places.read_into(p / "a" / "b", at, memoryview(bytearray(3))) for at in (0, 1, 4)],
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_path_in_a_bucket_answers_as_one_on_a_disk(look: str, tmp_path: Path) -> None:
    answers = []
    for root in (tmp_path / "disk", RemotePath("bucket://x/disk")):
        if isinstance(root, Path):
            (root / "a").mkdir(parents=True)
        for name, data in (("a/b", b"12345"), ("c", b"")):
            places.write(root / name, data)
        answers.append(LOOKS[look](root))
    assert answers[0] == answers[1]


def test_what_is_not_there_raises_the_same(tmp_path: Path) -> None:
    for root in (tmp_path, RemotePath("bucket://x/y")):
        for act in (lambda x: x.read_bytes(), lambda x: x.stat(), lambda x: x.unlink(), lambda x: x.open("rb")):
            with pytest.raises(FileNotFoundError):
                act(root / "none")
        (root / "none").unlink(missing_ok=True)
        places.remove(root / "none")


def test_a_folder_in_a_bucket_is_removed_and_no_other() -> None:
    for name in ("a[1]/x", "a[1]/b/y", "a1/x", "a[1]x"):
        write(name, b"1")
    places.remove(RemotePath(f"{URL}/a[1]"))
    assert sorted(Bucket.store) == ["/runs/net/a1/x", "/runs/net/a[1]x"]


def test_any_error_of_a_file_system_is_one_error() -> None:
    def meet(operation: str, path: str) -> None:
        raise LookupError("of its own class")

    write("x", b"1")
    Bucket.meet = staticmethod(meet)
    for act in (lambda x: x.read_bytes(), lambda x: x.open("rb"), lambda x: places.read_into(x, 0, memoryview(b""))):
        refuses(CheckpointError, lambda act=act: act(RemotePath(f"{URL}/x")), f"{URL}/x cannot be read: LookupError")


def test_a_url_of_the_disk_is_a_path(tmp_path: Path) -> None:
    assert place_of(f"file://{tmp_path}/run") == tmp_path / "run"
    assert place_of("local://run") == place_of("run") == place_of(Path("run")) == tmp_path / "run"
    for url in ("bucket://x/y", "bucket://x/y/"):
        place = place_of(url)
        assert str(place) == "bucket://x/y"
        assert place_of(place) is place


def test_a_write_is_complete_or_leaves_the_old_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    places.write(folder / "x", b"old")
    with faults(folder) as seen:
        places.write(folder / "x", b"old")
    for at in range(1, len(seen.operations) + 1):
        with faults(folder, at=at), pytest.raises(Crash):
            places.write(folder / "x", b"new")
        assert (folder / "x").read_bytes() in (b"old", b"new")
        for kind in ("full", "denied"):
            with faults(folder, at=at, kind=kind):
                try:
                    places.write(folder / "x", b"new")
                except OSError:
                    assert (folder / "x").read_bytes() in (b"old", b"new")
                else:
                    assert (folder / "x").read_bytes() == b"new"


def test_arrays_are_read_in_several_threads_from_one_file_in_memory(tmp_path: Path) -> None:
    """fsspec opens it as one object for all of them: where each reads would be where another one is."""
    path = RemotePath(f"memory://{tmp_path.name}/x")
    path.write_bytes(b"".join(bytes([k]) * 1000 for k in range(64)))
    opened = [path.open("rb") for _ in range(2)]
    opened[0].seek(5000)
    data = [bytearray(1000) for _ in range(2)]
    assert [places.read_into(path, 1000 * k, memoryview(x)) for k, x in enumerate(data)] == [1000, 1000]
    assert [{*x} for x in data] == [{0}, {1}]
    assert opened[0].tell() == opened[1].tell() == 5000


@pytest.mark.parametrize(
    ("count", "code", "fails", "told"),
    [(3, errno.ESTALE, False, 3), (4, errno.ESTALE, True, 3), (1, errno.EBUSY, False, 1), (1, errno.EIO, True, 0)],
)
def test_an_error_that_passes_is_waited_for_and_no_other(count, code, fails, told, monkeypatch, caplog):
    left, waits = [OSError(code, "the file system is busy")] * count, []
    monkeypatch.setattr(places.time, "sleep", waits.append)

    def flaky(x):
        if left:
            raise left.pop()
        return x + 1

    if fails:
        with pytest.raises(OSError, match="is busy"):
            places.patiently(flaky, 1)
    else:
        assert places.patiently(flaky, 1) == 2
    assert caplog.text.count("is busy; trying again") == len(waits) == told
    for wait, least in zip(waits, (0.1, 0.5, 2.0), strict=False):
        assert least <= wait <= 1.5 * least


def test_fsync_may_fail_for_folders_but_not_for_files(tmp_path, monkeypatch):
    folder = tmp_path
    (folder / "state.json").write_text("{}")
    for code in (errno.EINVAL, errno.ENOTSUP):
        monkeypatch.setattr(os, "fsync", raising(OSError, code, "not here"))
        places.fsync(folder)
        with pytest.raises(OSError, match="not here"):
            places.fsync(folder / "state.json")
    monkeypatch.setattr(os, "fsync", raising(OSError, errno.EIO, "not here"))
    with pytest.raises(OSError, match="not here"):
        places.fsync(folder)


def test_an_archive_is_fetched_and_again_only_if_they_have_changed(machine: Path) -> None:
    arrays = {"kernel": np.full((3, 1), 2.0, np.float32), "bias": np.ones(1, np.float32)}
    url, files = f"{URL}/model.npz", []
    for scale in (1, 1, 3):
        if not files or scale == 3:
            archive = io.BytesIO()
            np.savez(archive, **{name: scale * x for name, x in arrays.items()})
            write("model.npz", archive.getvalue())
        module = Linear()
        jl.load_weights(module, url)
        np.testing.assert_array_equal(module.kernel[...], scale * arrays["kernel"])
        files.append(Bucket.log.count(("get", "/runs/net/model.npz")))
    assert files == [1, 1, 2]


def test_the_files_of_an_index_and_of_a_hubs_folder_are_read(machine: Path) -> None:
    write("a.safetensors", safetensors.numpy.save({"kernel": np.full((3, 1), 2.0, np.float32)}))
    write("b.safetensors", safetensors.numpy.save({"bias": np.full(1, 5.0, np.float32)}))
    index = {"weight_map": {"kernel": "a.safetensors", "bias": "b.safetensors"}}
    write("model.safetensors.index.json", json.dumps(index).encode())
    module = Linear()
    jl.load_weights(module, f"{URL}/model.safetensors.index.json")
    assert [float(module.kernel[0, 0]), float(module.bias[0])] == [2.0, 5.0]
    write("hub/model.safetensors", safetensors.numpy.save({"kernel": np.full((3, 1), 3.0, np.float32)}))
    jl.load_weights(module, f"{URL}/hub", strict=False)
    assert float(module.kernel[0, 0]) == 3.0


def test_copies_are_in_the_folder_of_caches_by_their_path(machine: Path) -> None:
    for url in ("memory://a/../../../b", "memory:///../b", "dir::file:///../../b"):
        assert machine / "jaxlit" / "runs" in staging(url).parents
        assert ".." not in staging(url).parts
    for path in ("runs/net", Path("runs/net"), Path("C:/runs")):
        assert fetched(path) == Path(path)


def test_a_name_in_a_bucket_that_leads_elsewhere_is_not_fetched(machine: Path) -> None:
    go(1)
    Bucket.store["/runs/net/../../../../outside.txt"] = Bucket.store["/runs/net/metrics.csv"]
    replace(machine)
    go(1)
    assert not list(machine.parent.rglob("outside.txt"))


def test_nothing_at_a_url_is_named() -> None:
    refuses(
        CheckpointError, lambda: Linear.load_from_checkpoint(URL), f"'{URL}' is not a checkpoint, and contains none"
    )
    refuses(CheckpointError, lambda: jl.load_weights(Linear(), f"{URL}/x.npz"), f"there is no file {URL}/x.npz")
