"""A file system that fails where it is told to: what counts, and how it fails."""

import contextlib
import os
import shutil
import threading
from pathlib import Path

import pytest

from kit.faults import Crash, faults
from kit.refusals import refuses


def do_everything(folder):
    """Do each operation that the docstring names once, and return what faults should hear."""
    folder.mkdir()
    (folder / "a").write_bytes(b"1")
    with (folder / "a").open("ab") as file:
        file.write(b"2")
    os.close(os.open(folder / "b", os.O_CREAT | os.O_WRONLY))
    (folder / "a").rename(folder / "c")
    os.replace(folder / "c", folder / "d")
    (folder / "d").unlink()
    (folder / "inner").mkdir()
    (folder / "inner" / "f").write_bytes(b"1")
    shutil.rmtree(folder / "inner")
    with (folder / "e").open("wb") as file:
        file.write(b"3")
        os.fsync(file)
    # Reading is no change.
    (folder / "e").read_bytes()
    os.close(os.open(folder / "e", os.O_RDONLY))
    assert len(list(folder.iterdir())) == 2 and (folder / "e").stat().st_size == 1
    first = ["mkdir", "open", "open", "open", "rename", "rename", "remove", "mkdir", "open"]
    return [*first, "rmtree", "remove", "rmdir", "open", "fsync"]


def test_every_change_counts_once_in_order(tmp_path):
    with faults(tmp_path / "folder") as seen:
        expected = do_everything(tmp_path / "folder")
        with contextlib.chdir(tmp_path / "folder"):  # names below a folder that is open are not relative to it
            do_everything(tmp_path / "folder2")
        (tmp_path / "file").write_text("1")
    (tmp_path / "folder" / "late").write_text("1")
    assert [operation.split(".")[-1] for operation, _ in seen.operations] == expected
    assert all(Path(path).is_relative_to(tmp_path / "folder") for _, path in seen.operations)
    with faults(tmp_path / "of a thread") as seen:
        thread = threading.Thread(target=do_everything, args=(tmp_path / "of a thread",))
        thread.start()
        thread.join(120)
    assert [operation.split(".")[-1] for operation, _ in seen.operations] == expected


def test_relative_paths_and_two_folders_count(tmp_path):
    with faults("folder") as inner, faults(tmp_path) as both:
        os.makedirs("folder/a/b")
        Path("folder/a/../a/b/c").write_text("1")
        Path("other").write_text("1")
    made = [str(tmp_path / x) for x in ("folder", "folder/a", "folder/a/b", "folder/a/b/c")]
    assert [path for _, path in inner.operations] == made
    assert [path for _, path in both.operations] == [*made, str(tmp_path / "other")]


@pytest.mark.parametrize("at", range(1, 15))
def test_a_crash_leaves_the_folder_as_it_is(at, tmp_path):
    folder, kept = tmp_path / "folder", lambda: {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    with faults(folder, at=at, kind="crash") as seen:
        with pytest.raises(Crash):
            do_everything(folder)
        before = kept()
        for change in (lambda: (folder / "z").write_text("1"), folder.mkdir, lambda: os.rename(folder, tmp_path / "y")):
            with pytest.raises(Crash):
                change()
        shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy")  # reading continues
    assert kept() == before
    assert len(seen.operations) == at + 3
    assert not issubclass(Crash, Exception), "no except catches it"


@pytest.mark.parametrize(("kind", "error", "code"), [("full", OSError, 28), ("denied", PermissionError, 13)])
def test_a_full_or_denied_folder_gives_the_systems_error(kind, error, code, tmp_path):
    with faults(tmp_path, at=2, kind=kind):
        (tmp_path / "a").write_text("1")
        for _ in range(2):
            assert refuses(error, lambda: (tmp_path / "b").write_text("1")).errno == code
        assert (tmp_path / "a").read_text() == "1"
        if kind == "full":
            (tmp_path / "a").unlink()  # a full disk lets files be deleted
        else:
            refuses(PermissionError, (tmp_path / "a").unlink)
    (tmp_path / "b").write_text("1")
