"""Checkpoints on the disk: damage is noticed, the newest is found, data never become code, and one training writes."""

import errno
import fcntl
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kit.batches import numbered
from kit.checkpoints import NEWER, OLDER, bytes_of, canonical, edit, entry_of, flip, keep_all, names, put, seal, train
from kit.faults import Crash, faults
from kit.journal import hooks, raising
from kit.modules import Mean
from kit.refusals import refuses, warnings_of
from kit.trainers import fit

import jaxlit as jl
from jaxlit.checkpoints import files
from jaxlit.checkpoints.files import FolderLock, check_filename, filled
from jaxlit.errors import ArgumentError, CheckpointError


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


FILES = {"state.json": b'{"a":1}', "arrays/state/x": b"12345", "arrays/y": b""}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "outer" / "step_00000003"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    files.seal(folder, 7)
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
    (folder / ".nfs0001").write_text("left by a file system")
    files.verify(folder)


def test_files_are_on_disk_before_their_manifest(folder):
    (folder / "MANIFEST.json").unlink()
    with faults(folder) as seen:
        files.seal(folder, 1)
    done = [f"{what} {os.path.relpath(path, folder)}" for what, path in seen.operations]
    at = done.index("open MANIFEST.json")
    assert sorted(done[:at]) == sorted(f"os.fsync {name}" for name in FILES)
    # Then the manifest, and the names of the files, inner folders first.
    assert done[at + 1] == "os.fsync MANIFEST.json" and done[-1] == "os.fsync ."
    assert done[at + 2 : -1] == ["os.fsync arrays/state", "os.fsync arrays"]


def test_files_that_the_manifest_lacks_are_refused_or_named(folder, caplog):
    (folder / "notes.txt").write_text("the good one")
    files.verify(folder)
    (told,) = warnings_of(caplog)
    assert told == f"{folder}: notes.txt is not in its manifest, and is ignored."
    seal(folder)
    listed = json.loads((folder / "MANIFEST.json").read_bytes())["files"]
    listed.pop("state.json")
    seal(folder, files=listed)
    refused(folder, r"state\.json is not in its manifest")


def test_every_change_of_a_manifest_is_noticed(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    files.seal(tmp_path, 7)
    path = tmp_path / "MANIFEST.json"
    data = path.read_bytes()
    for at in range(len(data)):
        for changed in (*(flip(data, at, bits) for bits in (1, 32, 128)), data[:at], data[:at] + b" " + data[at:]):
            path.write_bytes(changed)
            with pytest.raises(CheckpointError, match=r"MANIFEST\.json|newer jaxlit"):
                files.verify(tmp_path)


OUTSIDE = ["/etc/passwd", "../outside", "arrays/../../outside", "a//b", "/", "", ".", "./state.json", "arrays/.."]
OUTSIDE += ["..\\outside", "arrays\\x", "C:\\outside", "C:/outside", "a\0b", "arrays/", "state.json/", "file:///x"]


def test_a_name_outside_the_folder_is_refused(folder):
    (folder.parent / "outside").write_bytes(b"outside")
    for name in (*OUTSIDE, str(folder / "state.json")):
        seal(folder, {name: entry_of(FILES["state.json"] if name.endswith("state.json") else b"outside")})
        refused(folder, r"MANIFEST\.json names")


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["state.json", "arrays", "arrays/state/x"])
def test_a_link_is_refused_wherever_it_leads(name, inside, listed, folder):
    target, entries = (folder if inside else folder.parent) / "target", {}
    if listed:  # by the name of the link, as if there had never been another file
        entries = {path: entry_of(data) for path, data in FILES.items() if path == name or path.startswith(f"{name}/")}
    (folder / name).rename(target)
    seal(folder, entries)
    (folder / name).symlink_to(target)
    refused(folder, re.escape(name))


def test_a_manifest_of_wrong_types_is_refused(folder):
    nan = float("nan")
    for entry in (*([size, "x"] for size in (-1, 1e3, True, None, "3", nan)), [3], [3, 7], None, "x", {"0": 3}):
        seal(folder, {"state.json": entry})
        refused(folder, r"MANIFEST\.json names 'state\.json' with")
    members = {"format_version": ("1", 1.0, True, None, [1], nan), "format": (None, "orbax", 7), "files": (None, [], 7)}
    for member, values in members.items():
        for value in values:
            seal(folder, **{member: value})
            refused(folder, "no manifest of a checkpoint")
    for version in (0, -1, 2, 10**30):
        seal(folder, format_version=version)
        words = rf"newer jaxlit, in format {version}; .* up to 1\. Update"
        refused(folder, words if version > 1 else "no manifest of a checkpoint")


def test_a_manifest_without_digest_or_with_doubles_is_refused(folder):
    text = (folder / "MANIFEST.json").read_text()
    (folder / "MANIFEST.json").write_bytes(canonical(json.loads(text) | {"digest": None}))
    refused(folder, r"MANIFEST\.json is damaged")
    for member in ('"order":1', '"format_version":1', '"files":{}', '"format":"jaxlit"'):
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
    assert files.order_of(folder) is None
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


@pytest.mark.parametrize(
    ("count", "code", "fails", "told"),
    [(3, errno.ESTALE, False, 3), (4, errno.ESTALE, True, 3), (1, errno.EBUSY, False, 1), (1, errno.EIO, True, 0)],
)
def test_an_error_that_passes_is_waited_for_and_no_other(count, code, fails, told, monkeypatch, caplog):
    left, waits = [OSError(code, "the file system is busy")] * count, []
    monkeypatch.setattr(files.time, "sleep", waits.append)

    def flaky(x):
        if left:
            raise left.pop()
        return x + 1

    if fails:
        with pytest.raises(OSError, match="is busy"):
            files.patiently(flaky, 1)
    else:
        assert files.patiently(flaky, 1) == 2
    assert caplog.text.count("is busy; trying again") == len(waits) == told
    for wait, least in zip(waits, (0.1, 0.5, 2.0), strict=False):
        assert least <= wait <= 1.5 * least


def test_fsync_may_fail_for_folders_but_not_for_files(folder, monkeypatch):
    for code in (errno.EINVAL, errno.ENOTSUP):
        monkeypatch.setattr(os, "fsync", raising(OSError, code, "not here"))
        files.fsync(folder)
        with pytest.raises(OSError, match="not here"):
            files.fsync(folder / "state.json")
    monkeypatch.setattr(os, "fsync", raising(OSError, errno.EIO, "not here"))
    with pytest.raises(OSError, match="not here"):
        files.fsync(folder)


@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("{epoch}-{val/loss:.3f}", "epoch=3-val_loss=0.123"),
        ("{step:04d}", "step=0040"),
        ("best of/{epoch:02d} é", "best_of_epoch=03_é"),
        ("../../up", ".._.._up"),
        ("{val/loss:.1e}+{val/loss}", "val_loss=1.2e-01+val_loss=0.12345"),
        ("{bad:.2f},{epoch}", "bad=nan,epoch=3"),
    ],
)
def test_a_filename_is_filled_and_fit_for_a_folders_name(filename, name):
    check_filename(filename)
    assert filled(filename, {"epoch": 3, "step": 40}, {"val/loss": 0.12345, "bad": math.nan}.get) == name


def test_a_filename_that_is_no_format_is_refused():
    cases = {"{epoch:.3q}": r"epoch:\.3q is no format", "{epoch:.2f}{step:x}{val:d}": "val:d is no format"}
    cases |= dict.fromkeys(("{epoch:d", "{}", "a}", "{{epoch}}"), "has a brace without its other, or an empty pair")
    for filename, words in cases.items():
        refuses(ArgumentError, lambda filename=filename: check_filename(filename), words)


HOLDER = """
import os, signal, sys
from pathlib import Path
from jaxlit.checkpoints.files import FolderLock
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
        for at in (1, 2, 3):  # the folder, the probe, the lock's file
            with faults("held", at=at, kind=kind):
                refuses(CheckpointError, take, "can be written in")
    take().close()


def test_where_a_file_system_has_no_locks_one_line_says_so(monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "lockf", raising(OSError, errno.ENOLCK, "No locks available"))
    assert fit(Mean(), numbered(1), default_root_dir="run").global_step == 1
    (told,) = warnings_of(caplog)
    assert "run is on a file system without locks ([Errno 37] No locks available)" in told and "no other" in told


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
