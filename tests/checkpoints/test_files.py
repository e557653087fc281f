"""Checkpoints on the disk: damage is noticed, the newest is found, and data never become code."""

import json
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from kit.checkpoints import (
    NEWER,
    OLDER,
    bytes_of,
    canonical,
    data_of,
    edit,
    entry_of,
    flip,
    keep_all,
    names,
    put,
    seal,
    train,
)
from kit.faults import Crash, faults
from kit.journal import hooks
from kit.refusals import refuses, warnings_of

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


PATHS = {"deleted": Path.unlink, "a folder": lambda path: (path.unlink(), path.mkdir())}
PATHS["a link to a device"] = lambda path: (path.unlink(), path.symlink_to("/dev/null"))  # another may have no end
BYTES = {
    "empty": lambda x: b"",
    "one byte less": lambda x: x[:-1],
    "one byte more": lambda x: x + b"\0",
    "first byte": lambda x: flip(x, 0) if x else x,
    "last byte": lambda x: flip(x, len(x) - 1) if x else x,
}


def damage(path, how):
    """Damage a file, by its name in a checkpoint."""
    if not path.exists():
        path = data_of(path.parent) / path.name
    if how in PATHS:
        PATHS[how](path)
    else:
        path.write_bytes(BYTES[how](path.read_bytes()))


@pytest.mark.parametrize("how", [*BYTES, *PATHS])
def test_damage_of_any_file_is_named_and_an_older_one_used(how, newest, tmp_path):
    whole = shutil.copytree(newest, tmp_path / "whole")
    for name in ("MANIFEST.json", "state.json", "0.safetensors"):
        damage(newest / name, how)
        with pytest.raises(CheckpointError) as raised:
            files.locate(newest, "here")  # by its own path it is an error, though an older one is whole
        assert name in str(raised.value) and str(newest) in str(raised.value)
        assert how != "a link to a device" or "it is no file" in str(raised.value)
        result, skipped = files.newest(newest.parent)
        is_none = name == "MANIFEST.json" and how == "deleted"  # then it is no checkpoint
        assert result is not None and result.path.name == OLDER and skipped == [str(raised.value)] * (not is_none)
        shutil.rmtree(newest)
        shutil.copytree(whole, newest)
    assert {x.name for x in newest.rglob("*") if x.is_file()} == {"0.safetensors", "MANIFEST.json", "state.json"}
    shutil.copy(data_of(newest.with_name(OLDER)) / "0.safetensors", data_of(newest))
    with pytest.raises(CheckpointError, match=r"0\.safetensors is damaged"):
        files.read(newest)


@pytest.mark.parametrize(("name", "how"), [("MANIFEST.json", "deleted"), ("state.json", "first byte")])
def test_training_after_a_damaged_checkpoint_is_bit_identical(name, how, newest, ends, caplog):
    damage(newest / name, how)
    trainer = train("run", 3, keep_all(), resume="auto")
    assert trainer.global_step == 9 and bytes_of(trainer) == ends[3]
    told = warnings_of(caplog)
    assert len(told) == (how != "deleted")  # without a manifest it is no checkpoint
    assert all(x.startswith("A newer checkpoint was skipped.") and name in x and str(newest) in x for x in told)
    assert files.read(newest).state["global_step"] == 6
    assert names() == [OLDER, NEWER, "step_00000009"]


def test_training_is_refused_if_no_checkpoint_verifies(root, newest):
    damage(root / "checkpoints" / OLDER / "state.json", "empty")
    damage(newest / "MANIFEST.json", "first byte")
    before, began = sorted(root.rglob("*")), []
    for given in ({"resume": "auto"}, {"resume": root}, {"ckpt_path": "last"}):
        with pytest.raises(CheckpointError, match="None of the 2 checkpoints in .* can be used") as raised:
            train("run", 3, hooks(on_train_start=lambda *_: began.append("training")), **given)
        for part in (OLDER, NEWER, "state.json has", "MANIFEST.json is no JSON", "does not start again"):
            assert part in str(raised.value)
    assert began == [] and sorted(root.rglob("*")) == before


def test_a_shorter_history_that_was_written_later_is_the_newest(root, ends):
    folder = root / "checkpoints"
    for name, clock in ((OLDER, 4e9), (NEWER, 1)):
        for path in (folder / name, *(folder / name).rglob("*")):
            os.utime(path, (clock, clock))
    assert files.locate(folder, "here")[0].path.name == NEWER, "whatever the clock has noted"
    train("run", 3, keep_all(), resume=folder / OLDER, max_steps=4)
    assert names() == [OLDER, "step_00000004", NEWER]
    assert files.locate(folder, "here")[0].path.name == "step_00000004"
    assert files.last_order(folder) == files.order_of(folder / "step_00000004")
    moved = root.rename(root.with_name("elsewhere"))
    trainer = train(moved, 3, keep_all(), resume="auto")
    assert trainer.global_step == 9 and bytes_of(trainer) == ends[3]
    assert Path(trainer.checkpoint_callback.last_model_path).parent == moved / "checkpoints"


def test_equal_orders_are_sorted_by_step(tmp_path):
    for name in ("step_00000001", "step_00000002-epoch=1", "step_2", "step_0000000x", ".step_00000009"):
        (tmp_path / name).mkdir()
        seal(tmp_path / name)
    (tmp_path / "step_00000003" / "data-0123abcd").mkdir(parents=True)  # which has no manifest
    (tmp_path / "step_00000004").write_text("a file")
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


def test_of_two_folders_one_may_be_unreadable(root, monkeypatch):
    folder, other, listed = root / "checkpoints", Path("other"), files.names_in

    def names_in(place):
        if place == other:
            raise CheckpointError("other cannot be read")
        return listed(place)

    monkeypatch.setattr(files, "names_in", names_in)
    for folders in ((other, folder), (folder, other)):
        result, skipped = files.newest(*folders)
        assert result.path.name == NEWER
        assert skipped == ["other cannot be read"]
    refuses(CheckpointError, lambda: files.newest(other), "^other cannot be read$")
    refuses(CheckpointError, lambda: files.newest(other, Path("none")), "None of the 1 .* in other or none.*cannot be")


def test_a_runs_folder_means_its_newest_checkpoint(root, newest):
    for path in ("run", Path("run"), "run/", root, "run/checkpoints"):
        result, skipped = files.locate(path, "here")
        assert result.path == newest and skipped == []
    damage(newest / "state.json", "first byte")
    result, skipped = files.locate("run", "here")
    assert result.path.name == OLDER and len(skipped) == 1 and "state.json is damaged" in skipped[0]
    for name in ("mine", "best", "last"):
        shutil.copytree(root / "checkpoints" / OLDER, name)
        for path in (name, Path(name), f"{name}/", Path(name).absolute()):
            assert files.locate(path, "here")[0].path.name == name


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


def test_only_what_writes_have_left_is_swept(root):
    folder = root / "checkpoints"
    left = {
        "step_00000004": ["data-0123abcd"],
        "step_00000005": [],
        f"{NEWER}-x": ["data-0123abcd", ".MANIFEST.json-01234567"],
    }
    others = {"step_00000008": ["data-0123abcd", "notes"], "step_00000009": ["data-0123abcd", "MANIFEST.json"]}
    others |= {"notes": ["data-0123abcd"], "step_8": ["data-0123abcd"], ".step_00000007": []}
    for name, inside in (left | others).items():
        (folder / name).mkdir()
        for x in inside:
            (folder / name / x).write_text("x")
    (folder / "step_00000007").write_text("a file")
    files.sweep(folder)
    assert {p.name for p in folder.iterdir()} == {*others, OLDER, NEWER, "step_00000007", ".lock"}
    assert {name: sorted(names(folder / name)) for name in others} == {k: sorted(x) for k, x in others.items()}
    files.sweep(folder / "none")


def test_a_removal_begins_with_the_manifest(newest):
    with faults(newest.parent, at=2), pytest.raises(Crash):
        files.remove(newest)
    assert [p.name for p in files.candidates(newest.parent)] == [OLDER]
    assert names(newest) == [data_of(newest).name]
    files.remove(newest)
    files.remove(newest)  # one that is gone already is no error
    assert names(newest.parent) == [OLDER]


LIES = [
    (1, [2**40], r"not .*1099511627776"),
    (1, [3, 1, 1], "is not what a checkpoint|not as"),
    (1, [2**70], "not"),
    (1, [-1, 4], "not"),
    (1, "x", "is not what a checkpoint"),
    (2, "float64", r"is stored as \w+\[.*\], not as float64"),
    (2, "object", r"is stored as \w+\[.*\], not as object"),
    (2, "nonsense", "nonsense"),
    (2, None, "not"),
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
        (lambda a: a.append(["window.surprise", [2**45], "float32"]), r"window\.surprise is not stored"),
        (lambda a: a.pop(), "is not what a checkpoint of this version has: KeyError"),
        (lambda a: a.append([a[0][0], *a[-1][1:]]), "is stored as|cannot be read"),
        (lambda a: a[0].__setitem__(0, "@"), "is not what a checkpoint of this version has: KeyError"),
    ],
)
def test_arrays_more_less_or_twice_are_refused(change, words, one):
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
    for where in ("arrays.pkl", "state.pkl", "state"):
        (data_of(one) / where).write_bytes(pickle.dumps(Evil()))
    np.save(data_of(one) / "0.npy", np.array([Evil()], object), allow_pickle=True)
    seal(one)
    assert bytes_of(train("run", 2, resume="auto")) == ends[2]
    assert executed() == []


CONTENTS = (b"{}", b"[]", b"\xff", b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", pickle.dumps(Evil()))


@pytest.mark.parametrize("name", ["state.json", "0.safetensors"])
def test_hostile_content_of_a_file_is_refused_and_not_run(name, one, executed):
    path = data_of(one) / name
    for content in CONTENTS:
        for data in (content, len(content).to_bytes(8, "little") + content):
            path.write_bytes(data)
            seal(one)
            with pytest.raises(CheckpointError, match=f"{OLDER}"):
                train("run", 2, resume=one)
            assert executed() == []


FILES = {
    "data-0123abcd/state.json": b'{"a":1}',
    "data-0123abcd/0.safetensors": b"12345",
    "data-0123abcd/1.safetensors": b"",
}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "outer" / "step_00000003"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    files.seal(folder, 7, {name: entry_of(data) for name, data in FILES.items()})
    return folder


def refused(folder, words):
    refuses(CheckpointError, lambda: files.verify(folder), re.escape(str(folder)), words)


def test_a_seal_is_the_documented_one_and_verifies(folder):
    text = (folder / "MANIFEST.json").read_bytes()
    files.verify(folder)
    assert files.order_of(folder) == 7
    assert json.loads(text)["files"] == {name: entry_of(data) for name, data in FILES.items()}
    seal(folder, order=7)  # the one made by the kit
    assert (folder / "MANIFEST.json").read_bytes() == text


def test_files_that_the_manifest_lacks_are_not_read(folder):
    listed = files.verify(folder)
    (folder / "notes.txt").write_text("the good one")
    (folder / "data-0123abcd" / "2.safetensors").write_text("not its own")
    assert files.verify(folder) == listed
    assert [path.name for path in files.load(folder).files] == ["0.safetensors", "1.safetensors"]
    seal(folder, files={name: x for name, x in listed.items() if "state.json" not in name})
    refuses(CheckpointError, lambda: files.load(folder), re.escape(str(folder)), r"its manifest names no state\.json")


def test_every_change_of_a_manifest_is_noticed(tmp_path):
    files.seal(tmp_path, 7, {})
    path = tmp_path / "MANIFEST.json"
    data = path.read_bytes()
    for at in range(len(data)):
        for changed in (*(flip(data, at, bits) for bits in (1, 32, 128)), data[:at], data[:at] + b" " + data[at:]):
            path.write_bytes(changed)
            with pytest.raises(CheckpointError, match=r"MANIFEST\.json|(newer|older) jaxlit"):
                files.verify(tmp_path)


OUTSIDE = [
    "/etc/passwd",
    "../outside",
    "data-0123abcd/../../outside",
    "a//b",
    "/",
    "",
    ".",
    "./state.json",
    "data-0123abcd/..",
]
OUTSIDE += [
    "..\\outside",
    "data-0123abcd\\x",
    "C:\\outside",
    "C:/outside",
    "a\0b",
    "data-0123abcd/",
    "state.json",
    "file:///x",
]
OUTSIDE += [
    "data-0123abcd/state.json/",
    "data-0123abcd/a/b",
    "0123ABCD/x",
    "data-0123abcd/../state.json",
    "data-0123abcd/x\n",
]


def test_a_name_outside_the_folder_is_refused(folder):
    (folder.parent / "outside").write_bytes(b"outside")
    for name in (*OUTSIDE, str(folder / "data-0123abcd/state.json")):
        seal(folder, {name: entry_of(b"outside")})
        refused(folder, r"MANIFEST\.json names")


def test_a_manifest_of_wrong_types_is_refused(folder):
    nan = float("nan")
    for entry in (*([size, "x"] for size in (-1, 1e3, True, None, "3", nan)), [3], [3, 7], None, "x", {"0": 3}):
        seal(folder, {"data-0123abcd/state.json": entry})
        refused(folder, r"MANIFEST\.json names 'data-0123abcd/state\.json' with")
    members = {"format_version": ("1", 1.0, True, None, [1], nan), "format": (None, "orbax", 7), "files": (None, [], 7)}
    for member, values in members.items():
        for value in values:
            seal(folder, **{member: value})
            refused(folder, "no manifest of a checkpoint")
    for version, words in (
        (0, "no manifest"),
        (-1, "no manifest"),
        (2, "an older"),
        (4, "a newer"),
        (10**30, "a newer"),
    ):
        seal(folder, format_version=version)
        age = rf"by {words} jaxlit, in format {version}; this one reads format 3\. (Update|Continue)"
        refused(folder, words if version < 1 else age)


def test_a_manifest_without_digest_or_with_doubles_is_refused(folder):
    text = (folder / "MANIFEST.json").read_text()
    (folder / "MANIFEST.json").write_bytes(canonical(json.loads(text) | {"digest": None}))
    refused(folder, r"MANIFEST\.json is damaged")
    for member in ('"order":1', '"format_version":3', '"files":{}', '"format":"jaxlit"'):
        for changed in ("{" + member + "," + text[1:], text[:-1] + "," + member + "}"):
            (folder / "MANIFEST.json").write_text(changed)
            refused(folder, r"MANIFEST\.json")


TEXTS = {
    "a list": (b"[]", "holds a list, not a JSON object"),
    "null": (b"null", "holds a NoneType"),
    "nothing": (b"", "is no JSON"),
    "no JSON": (b"{'a': 1}", "is no JSON"),
    "no text": (b"\xff\xfe\x00", "is no JSON"),
    "nested deeply": (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "is no JSON"),
    "a number of 10000 digits": (b'{"a":' + b"9" * 10_000 + b"}", "is no JSON"),
    "a pickle": (pickle.dumps({"a": 1}), "is no JSON"),
    "two objects": (b"{}{}", "is no JSON"),
}


@pytest.mark.parametrize(("text", "words"), TEXTS.values(), ids=TEXTS)
def test_what_is_no_json_object_is_refused_by_name(text, words, folder):
    (folder / "MANIFEST.json").write_bytes(text)
    refused(folder, rf"MANIFEST\.json {words}")
    assert files.order_of(folder) == float("inf")
    (folder / "state.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=rf"state\.json {words}"):
        files.read_json(folder / "state.json")


def test_json_of_100_mb_is_refused_before_it_is_read(folder, monkeypatch):
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("it was read"))
    for name in ("MANIFEST.json", "state.json"):
        with (folder / name).open("wb") as file:
            file.truncate(100 * 2**20)  # takes no room
        with pytest.raises(CheckpointError, match=rf"{name} has {100 * 2**20} bytes, more than"):
            files.read_json(folder / name)


def test_what_is_deleted_is_a_checkpoint_and_no_file_of_others(one):
    folder = shutil.copytree(one, "kept")
    (Path("kept") / "notes").write_text("mine")
    Path("mine/data").mkdir(parents=True)
    Path("mine/file").write_text("mine")
    for path in ("kept", "mine", "file", ""):
        files.remove(Path(path).absolute())
    assert names(".") == ["kept", "mine", "run"] and names("kept") == ["notes"] and names("mine") == ["data", "file"]
    files.remove(Path(shutil.copytree(one, folder + "2")).absolute())
    assert names(".") == ["kept", "mine", "run"]
