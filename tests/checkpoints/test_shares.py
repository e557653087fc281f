"""Files of several processes: each is verified once, and the states of loaders return to their process."""

import json
import shutil
from pathlib import Path

import pytest
from kit.checkpoints import OLDER, edit, flip, put, seal, train
from kit.threads import as_processes

from jaxlit.checkpoints import files
from jaxlit.errors import CheckpointError

SIZES = {"state.json": 10, "arrays/a": 4000, "arrays/b": 3900, "arrays/c": 2000, "arrays/d": 2000, "arrays/e": 0}


@pytest.fixture
def folder(tmp_path):
    for name, size in SIZES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    files.seal(tmp_path, 1)
    return tmp_path


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_file_is_verified_in_one_share(count, folder):
    for name, size in SIZES.items():
        (folder / name).write_bytes(b"y" + b"x" * max(size - 1, 0))
        refusals = []
        for index in range(count):
            try:
                files.verify(folder, index=index, count=count)
            except CheckpointError as error:
                refusals.append(str(error))
        assert len(refusals) == 1 and name in refusals[0]
        (folder / name).write_bytes(b"x" * size)


def test_a_file_that_the_manifest_lacks_is_noticed_in_the_first_share(folder):
    (folder / "arrays/more").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="arrays/more is not in its manifest"):
        files.verify(folder, index=0, count=2)


def test_known_hashes_make_the_same_manifest(folder):
    expected = (folder / "MANIFEST.json").read_bytes()
    (folder / "MANIFEST.json").unlink()
    known = files.on_disk(folder, [folder / "arrays/a", folder / "arrays/e"])
    assert known.keys() == {"arrays/a", "arrays/e"}
    files.seal(folder, 1, known)
    assert (folder / "MANIFEST.json").read_bytes() == expected


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    """A checkpoint of one process; tests work on copies of it."""
    root = tmp_path_factory.mktemp("trained") / "run"
    train(root, 1)
    return root / "checkpoints" / OLDER


def loaders(process):
    state = {"epoch": 1, "at": {"rows": process}, "fingerprint": None}
    return {"training": {"idx": 0, "states": [state]}}


def of_three(of_one, separate):
    """Return the checkpoint as if three processes had written it, with the loaders in files or all in state.json."""
    path = Path(shutil.copytree(of_one, OLDER))
    states = [loaders(process)["training"]["states"][0] for process in range(3)]
    if separate:
        (path / "loaders").mkdir()
        for process in (1, 2):
            (path / "loaders" / f"process_{process}.json").write_text(json.dumps(loaders(process)))
    edit(path, put("processes", value=3))
    states = states[:1] if separate else states
    edit(path, put("loaders", value={"training": {"idx": 0, "states": states}}))
    return path.absolute()


@pytest.fixture(params=[True, False], ids=["files", "state.json"])
def either(request, of_one):
    return of_three(of_one, request.param)


@pytest.fixture
def path(of_one):
    return of_three(of_one, separate=True)


def places(path):
    """Return what the loaders' states of this process, or of all, say of their places."""
    read = files.read(path).state["loaders"]
    assert read["training"]["idx"] == 0
    return [state["at"]["rows"] for state in read["training"]["states"]]


def test_each_process_gets_its_own_loaders_back(either, monkeypatch):
    assert as_processes(monkeypatch, lambda index: places(either), 3) == [[0], [1], [2]]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_other_numbers_of_processes_get_the_loaders_of_all(count, either, monkeypatch):
    assert as_processes(monkeypatch, lambda index: places(either), count) == [[0, 1, 2]] * count


def all_refuse(path, words, monkeypatch):
    errors = as_processes(monkeypatch, lambda index: places(path), 3)
    assert {type(error) for error in errors} == {CheckpointError}
    assert len({str(error) for error in errors}) == 1 and words in str(errors[0])


def test_loaders_of_a_process_that_are_not_there_are_refused(either, monkeypatch):
    shutil.rmtree(either / "loaders", ignore_errors=True)
    edit(either, lambda state: state["loaders"]["training"].update(states=state["loaders"]["training"]["states"][:2]))
    all_refuse(either, "no state of the training loader of process", monkeypatch)


@pytest.mark.parametrize("text", ["x", "{}", json.dumps(loaders(2) | {"training": {"idx": 0, "states": []}})])
def test_loaders_that_no_process_saves_are_refused(text, path, monkeypatch):
    (path / "loaders" / "process_2.json").write_text(text)
    seal(path)
    all_refuse(path, "process_2.json", monkeypatch)


def test_damage_that_one_process_finds_is_an_error_in_all(path, monkeypatch):
    damaged = [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]
    assert len(damaged) > 8
    for file in damaged:
        data = file.read_bytes()
        file.write_bytes(flip(data, 0))
        all_refuse(path, file.name, monkeypatch)
        file.write_bytes(data)
    assert as_processes(monkeypatch, lambda index: places(path), 3) == [[0], [1], [2]]


def test_a_file_that_one_process_cannot_look_at_is_an_error_in_all(path, monkeypatch):
    def verify(folder, *, index, count):
        if index == 1:
            raise OSError(116, "Stale file handle")
        return real(folder, index=index, count=count)

    real = files.verify
    monkeypatch.setattr(files, "verify", verify)
    all_refuse(path, "cannot be read: [Errno 116] Stale file handle.", monkeypatch)
