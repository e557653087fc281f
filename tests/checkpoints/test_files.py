"""Checkpoints on the disk: damage is noticed and gone around, the newest is found, and data never become code."""

import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from kit.checkpoints import NEWER, OLDER, bytes_of, edit, flip, keep_all, names, put, seal, train
from kit.faults import Crash, faults
from kit.journal import hooks
from kit.refusals import warnings_of

from jaxlit.checkpoints import files
from jaxlit.errors import CheckpointError


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The states at the ends of the epochs of a training that nothing has interrupted."""
    result = {}
    look = hooks(on_train_epoch_end=lambda t, m: result.update({t.current_epoch + 1: bytes_of(t)}))
    train(tmp_path_factory.mktemp("whole"), 3, look)
    assert len({*map(tuple, result.values())}) == 3
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run with the checkpoints of two epochs; tests work on copies of it."""
    root = tmp_path_factory.mktemp("trained") / "run"
    train(root, 2, keep_all())
    assert names(root / "checkpoints") == [OLDER, NEWER]
    return root


@pytest.fixture
def root(trained):
    return Path(shutil.copytree(trained, "run")).absolute()


@pytest.fixture
def newest(root):
    return root / "checkpoints" / NEWER


@pytest.fixture
def one(root):
    """The only checkpoint of its run."""
    shutil.rmtree(root / "checkpoints" / NEWER)
    return root / "checkpoints" / OLDER


def into_link(path):
    """Put a link to the same bytes, outside of the checkpoint, in the place of a file."""
    path.rename("away")
    path.symlink_to(Path("away").absolute())


PATHS = {"deleted": Path.unlink, "a folder": lambda path: (path.unlink(), path.mkdir()), "a link": into_link}
BYTES = {
    "empty": lambda x: b"",
    "one byte less": lambda x: x[:-1],
    "one byte more": lambda x: x + b"\0",
    "first byte": lambda x: flip(x, 0) if x else x,
    "last byte": lambda x: flip(x, len(x) - 1) if x else x,
}


def damage(path, how):
    """Damage a file; tells whether that changed it: orbax writes an empty one too."""
    if how in PATHS:
        PATHS[how](path)
        return True
    data = path.read_bytes()
    path.write_bytes(BYTES[how](data))
    return BYTES[how](data) != data


@pytest.mark.parametrize("how", [*BYTES, *PATHS])
def test_damage_of_any_file_is_named_and_an_older_one_used(how, newest, tmp_path):
    every = sorted(p.relative_to(newest).as_posix() for p in newest.rglob("*") if p.is_file())
    assert {"MANIFEST.json", "state.json"} < set(every) and len(every) > 5
    whole, damaged = shutil.copytree(newest, tmp_path / "whole"), 0
    for name in every:
        if damage(newest / name, how):
            damaged += 1
            with pytest.raises(CheckpointError) as raised:
                files.locate(newest, "here")  # by its own path it is an error, though an older one is whole
            assert name in str(raised.value) and str(newest) in str(raised.value)
            result, skipped = files.newest(newest.parent)
            assert result is not None and result.path.name == OLDER and skipped == [str(raised.value)]
        shutil.rmtree(newest)
        shutil.copytree(whole, newest)
    assert damaged >= len(every) - 1
    shutil.rmtree(newest / "arrays")
    shutil.copytree(newest.with_name(OLDER) / "arrays", newest / "arrays")
    with pytest.raises(CheckpointError, match="arrays/"):
        files.read(newest)


@pytest.mark.parametrize(("name", "how"), [("MANIFEST.json", "deleted"), ("state.json", "first byte")])
def test_training_after_a_damaged_checkpoint_is_bit_identical(name, how, newest, ends, caplog):
    damage(newest / name, how)
    trainer = train("run", 3, keep_all(), resume="auto")
    assert trainer.global_step == 9 and bytes_of(trainer) == ends[3]
    (warning,) = warnings_of(caplog)
    assert warning.startswith("A newer checkpoint was skipped.") and name in warning and str(newest) in warning
    assert files.read(newest).state["global_step"] == 6
    assert names() == [OLDER, NEWER, "step_00000009"]


def test_training_is_refused_if_no_checkpoint_verifies(root, newest):
    damage(root / "checkpoints" / OLDER / "state.json", "empty")
    damage(newest / "MANIFEST.json", "deleted")
    before, began = sorted(root.rglob("*")), []
    for given in ({"resume": "auto"}, {"resume": root}, {"ckpt_path": "last"}):
        with pytest.raises(CheckpointError, match="None of the 2 checkpoints in .* can be used") as raised:
            train("run", 3, hooks(on_train_start=lambda *_: began.append("training")), **given)
        for part in (OLDER, NEWER, "state.json has", "MANIFEST.json is missing", "does not start again"):
            assert part in str(raised.value)
    assert began == [] and sorted(root.rglob("*")) == before


def newest_of(folder):
    result, skipped = files.newest(Path(folder))
    assert result is not None and skipped == []
    return result.path.name


def test_a_shorter_history_that_was_written_later_is_the_newest(root, ends):
    folder = root / "checkpoints"
    for name, clock in ((OLDER, 4e9), (NEWER, 1)):
        for path in (folder / name, *(folder / name).rglob("*")):
            os.utime(path, (clock, clock))
    assert newest_of(folder) == NEWER, "whatever the clock has noted"
    train("run", 3, keep_all(), resume=folder / OLDER, max_steps=4)
    assert names() == [OLDER, "step_00000004", NEWER] and newest_of(folder) == "step_00000004"
    assert files.last_order(folder) == files.order_of(folder / "step_00000004")
    moved = root.rename(root.with_name("elsewhere"))
    trainer = train(moved, 3, keep_all(), resume="auto")
    assert trainer.global_step == 9 and bytes_of(trainer) == ends[3]
    assert Path(trainer.checkpoint_callback.last_model_path).parent == moved / "checkpoints"


def test_equal_orders_are_sorted_by_step(tmp_path):
    for name in ("step_00000001", "step_00000002-epoch=1", "step_2", "step_0000000x", ".tmp-step_00000009-0123abcd"):
        (tmp_path / name).mkdir()
        seal(tmp_path / name)
    assert [path.name for path in files.candidates(tmp_path)] == ["step_00000002-epoch=1", "step_00000001"]
    assert files.candidates(tmp_path / "none") == [] and files.newest(tmp_path / "none") == (None, [])
    assert files.name_of(7) == "step_00000007" and files.step_of(Path("a/step_123456789-x")) == 123456789


def test_a_list_that_changes_meanwhile_is_read_again(root, monkeypatch):
    folder, read = root / "checkpoints", files.read
    (folder / NEWER).rename("later")

    def racing(path):
        if Path("later").exists():
            Path("later").rename(folder / NEWER)
            shutil.rmtree(folder / OLDER)
        return read(path)

    monkeypatch.setattr(files, "read", racing)
    assert files.newest(folder)[0].path.name == NEWER


def test_a_runs_folder_means_its_newest_checkpoint(root, newest):
    for path in ("run", Path("run"), "run/", root, "run/checkpoints"):
        result, skipped = files.locate(path, "here")
        assert result.path == newest and skipped == []
    damage(newest / "state.json", "first byte")
    result, skipped = files.locate("run", "here")
    assert result.path.name == OLDER and len(skipped) == 1 and "state.json is damaged" in skipped[0]
    (root / "checkpoints" / OLDER).rename("mine")
    for path in ("mine", Path("mine"), "mine/", Path("mine").absolute()):
        assert files.locate(path, "here")[0].state["global_step"] == 3


@pytest.mark.parametrize(
    ("typo", "near"),
    [
        ("run/checkpoints/step_00000007", f"{NEWER}.*there are: {NEWER}, {OLDER}"),
        ("run/checkpoints/step_3", f"there are: {NEWER}, {OLDER}"),
        ("rum", "Did you mean 'run'"),
        ("run/chekpoints", f"Did you mean 'checkpoints'.*there are: {NEWER}"),
        ("empty", "contains none\\.$"),
        ("empty/best", "contains none\\.$"),
    ],
)
def test_a_missing_path_is_an_error_that_lists_what_is_near(typo, near, root):
    Path("empty").mkdir()
    with pytest.raises(CheckpointError, match=rf"^here: '{typo}' is not a checkpoint, and .*{near}"):
        files.locate(typo, "here")


@pytest.mark.parametrize("name", ["best", "last"])
def test_a_folder_may_be_called_best_or_last(name, root):
    shutil.copytree(root / "checkpoints" / OLDER, name)
    assert files.locate(name, "here")[0].path.name == name


def test_only_what_checkpoints_have_left_is_swept(root):
    folder = root / "checkpoints"
    left = [".tmp-step_00000004-9bf84c46", ".trash-step_00000004-9bf84c46", f"{NEWER}-replaced_9bf84c46", ".probe-x"]
    others = [".tmp-precious", ".trash-1000", "notes", "step_00000001-replaced_9bf84c46"]  # with nothing in its place
    for name in (*left[:3], *others):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    (folder / left[3]).write_text("x")
    files.sweep(folder)
    assert {p.name for p in folder.iterdir()} == {*others, OLDER, NEWER, ".lock"}
    assert all((folder / name / "file").read_text() == "x" for name in others)
    files.sweep(folder / "none")


def test_a_removal_begins_by_hiding_the_checkpoint(newest):
    with faults(newest.parent, at=2), pytest.raises(Crash):
        files.remove(newest)
    assert [p.name for p in files.candidates(newest.parent)] == [OLDER]
    (left,) = [name for name in names(newest.parent) if name != OLDER]
    assert re.fullmatch(rf"\.trash-{NEWER}-[0-9a-f]{{8}}", left)
    files.remove(newest)  # one that is gone already is no error


LIES = [
    (1, [2**40], r"is stored as \w+\[.*\], not as \w+\[1099511627776\]"),
    (1, [3, 1, 1], r"not as \w+\[3, 1, 1\]"),
    (2, "float64", r"not as float64\["),
    (2, "object", r"not as object\["),
    (2, "nonsense", r"not as nonsense\["),
]


def test_specs_that_lie_are_refused_before_anything_is_allocated(one):
    for k in map([name for name, _, _ in files.read(one).specs].index, ("module.kernel", "counters")):
        for at, value, words in LIES:
            copy = Path(shutil.copytree(one, "copy"))
            edit(copy, put("arrays", k, at, value=value))
            with pytest.raises(CheckpointError, match=words):
                files.read(copy).arrays({k: None})
            shutil.rmtree(copy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.append(["window.surprise", [2**45], "float32"]), "its arrays cannot be read: '6'"),
        (lambda a: a.pop(), "its arrays cannot be read: .*do not match"),
        (lambda a: a.reverse(), r"is stored as int32\[4\], not as float32\["),
    ],
)
def test_arrays_more_less_or_in_another_order_are_refused(change, words, one):
    edit(one, lambda state: change(state["arrays"]))
    checkpoint = files.read(one)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.arrays(dict.fromkeys(range(len(checkpoint.specs))))


class Evil:
    def __reduce__(self):
        return (os.system, ("touch pwned",))


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """What a checkpoint made Python do: import a module, or write a file."""
    sys.modules.pop("hostile_code", None)
    (tmp_path / "hostile_code.py").write_text("def run(*a, **k):\n    raise SystemExit('ran')\nclass A:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    return lambda: ["import"] * ("hostile_code" in sys.modules) + ["file"] * Path("pwned").exists()


def test_a_pickle_in_a_checkpoint_is_never_loaded(one, ends, executed):
    for where in ("arrays/arrays.pkl", "arrays/state/0", "state.pkl"):
        (one / where).write_bytes(pickle.dumps(Evil()))
    np.save(one / "arrays/state/0.npy", np.array([Evil()], object), allow_pickle=True)
    seal(one)
    assert bytes_of(train("run", 2, resume="auto")) == ends[2]
    assert executed() == []


CONTENTS = (b"{}", b"[]", b"\xff", b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", pickle.dumps(Evil()))


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "state/_METADATA", "state/_sharding", "commit_success.txt"])
def test_orbax_metadata_imports_no_code(name, one, executed):
    """Reading gives the true numbers, or refuses."""
    path, checkpoint = one / "arrays" / name, files.read(one)
    wanted = dict.fromkeys(range(len(checkpoint.specs)))
    true = {i: np.asarray(x).tobytes() for i, x in checkpoint.arrays(wanted).items()}
    hostile = re.sub(r'"([\w.]*(?:Handler|Array|Tree|orbax)[\w.]*)"', '"hostile_code.A"', path.read_text())
    for content in (hostile.encode(), *CONTENTS):
        path.write_bytes(content)
        seal(one)
        try:
            result = files.read(one).arrays(wanted)
        except CheckpointError as error:
            assert "its arrays cannot be read" in str(error)
        else:
            assert {i: np.asarray(x).tobytes() for i, x in result.items()} == true
        assert executed() == []
