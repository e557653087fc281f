"""A folder is what its manifest says, byte by byte, or it is refused by the name of the file."""

import errno
import json
import os
import pickle
import re
from pathlib import Path

import pytest
from kit.checkpoints import canonical, entry_of, flip, seal
from kit.faults import faults
from kit.refusals import warnings_of

from jaxlit.checkpoints import files
from jaxlit.errors import CheckpointError

FILES = {"state.json": b'{"a":1}', "arrays/state/x": b"12345", "arrays/y": b""}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "outer" / "step_00000003"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    files.seal(folder, 7)
    return folder


def refused(folder, match):
    with pytest.raises(CheckpointError, match=match) as raised:
        files.verify(folder)
    assert str(folder) in str(raised.value)


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
    body = json.loads((folder / "MANIFEST.json").read_bytes())
    body["files"].pop("state.json")
    body.pop("digest")
    seal(folder, **body)
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
    path.write_bytes(data)
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
    code = [0]

    def refuse(handle):
        raise OSError(code[0], "not here")

    monkeypatch.setattr(os, "fsync", refuse)
    for code[0] in (errno.EINVAL, errno.ENOTSUP):
        files.fsync(folder)
        with pytest.raises(OSError, match="not here"):
            files.fsync(folder / "state.json")
    code[0] = errno.EIO
    with pytest.raises(OSError, match="not here"):
        files.fsync(folder)
