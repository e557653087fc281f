"""The states of loaders are in a file of each process, and return to it."""

import json
import shutil
from pathlib import Path

import pytest
from kit.checkpoints import OLDER, edit, put, seal, train
from kit.threads import as_processes

from jaxlit.checkpoints import files
from jaxlit.errors import CheckpointError


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    """A checkpoint of one process; tests work on copies of it."""
    root = tmp_path_factory.mktemp("trained") / "run"
    train(root, 1)
    return root / "checkpoints" / OLDER


def loaders(process):
    state = {"epoch": 1, "at": {"rows": process}, "fingerprint": None}
    return {"training": {"idx": 0, "states": [state]}, "validation": None}


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
    edit(path, put("loaders", value={"training": {"idx": 0, "states": states}, "validation": None}))
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
    assert read["validation"] is None and read["training"]["idx"] == 0
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
