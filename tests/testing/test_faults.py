"""A file system that fails where it is told to: what counts, and how it fails."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.inside import files

from jaxlit.errors import ArgumentError
from jaxlit.testing import Crash, faults

fsynced = files.manifest.write  # which puts what it writes onto the disk


def do_everything(folder: Path) -> list[str]:
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
    (folder / "inner").rmdir()
    fsynced(folder / "e", b"3")
    # Reading is no change.
    (folder / "e").read_bytes()
    os.close(os.open(folder / "e", os.O_RDONLY))
    assert len(list(folder.iterdir())) == 2 and (folder / "e").stat().st_size == 1
    return ["mkdir", "open", "open", "open", "rename", "rename", "remove", "mkdir", "rmdir", "open", "fsync"]


def test_every_change_counts_once_in_order_and_reading_does_not(tmp_path: Path) -> None:
    with faults(tmp_path / "folder") as seen:
        expected = do_everything(tmp_path / "folder")
    assert [operation.split(".")[-1] for operation, _ in seen.operations] == expected
    assert {Path(path).parts[: len(tmp_path.parts) + 1] for _, path in seen.operations} == {(*tmp_path.parts, "folder")}


def test_other_folders_do_not_count_not_even_with_a_longer_name(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with faults(tmp_path / "folder") as seen:
        do_everything(tmp_path / "folder2")
        (tmp_path / "file").write_text("1")
    assert seen.operations == []


def test_relative_paths_below_count_and_nothing_does_once_it_is_over(tmp_path: Path) -> None:
    with faults("folder") as seen:
        os.makedirs("folder/a/b")
        Path("folder/a/../a/b/c").write_text("1")
    Path("folder/d").write_text("1")
    made = {path for _, path in seen.operations}
    assert made == {str(tmp_path / x) for x in ("folder", "folder/a", "folder/a/b", "folder/a/b/c")}


def test_other_threads_count(tmp_path: Path) -> None:
    with faults(tmp_path / "folder") as seen:
        thread = threading.Thread(target=do_everything, args=(tmp_path / "folder",))
        thread.start()
        thread.join(120)
    assert len(seen.operations) == 11


def test_each_file_that_rmtree_deletes_counts(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for name in ("a", "b", "inner/c"):
        (tmp_path / "folder" / name).write_text("1")
    with faults(tmp_path / "folder") as seen:
        shutil.rmtree(tmp_path / "folder")
    assert sum(operation == "os.remove" for operation, _ in seen.operations) == 3
    assert sum(operation == "os.rmdir" for operation, _ in seen.operations) == 2


def test_what_rmtree_deletes_elsewhere_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").write_text("1")
    monkeypatch.chdir(tmp_path / "folder")
    with faults(tmp_path / "folder") as seen:
        shutil.rmtree(tmp_path / "other")
    assert seen.operations == []


@pytest.mark.parametrize("how", [os.rename, os.replace, os.link, os.symlink])
def test_what_comes_into_the_folder_from_outside_counts(how: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("1")
    with faults(tmp_path / "folder") as seen:
        how(tmp_path / "file", tmp_path / "folder" / "file")
    assert len(seen.operations) == 1


def test_two_folders_are_watched_at_once(tmp_path: Path) -> None:
    with faults(tmp_path / "a") as first, faults(tmp_path) as both:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
    assert (len(first.operations), len(both.operations)) == (1, 2)


# Failing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, 12))
def test_a_crash_stops_at_its_operation_and_leaves_the_folder_alone_ever_after(at: int, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with faults(folder, at=at, kind="crash") as seen:
        with pytest.raises(Crash):
            do_everything(folder)
        before = {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")}
        for change in (lambda: (folder / "z").write_text("1"), folder.mkdir, lambda: os.rename(folder, tmp_path / "y")):
            with pytest.raises(Crash):
                change()
        shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy")  # reading goes on
    assert {p: p.read_bytes() if p.is_file() else None for p in tmp_path.rglob("*")} == before
    assert len(seen.operations) == at + 3


def test_a_crash_is_caught_by_no_except_exception() -> None:
    assert issubclass(Crash, BaseException) and not issubclass(Crash, Exception)


@pytest.mark.parametrize(("kind", "error"), [("full", OSError), ("denied", PermissionError)])
def test_a_full_or_denied_folder_gives_the_systems_own_error_from_there_on(
    kind: str, error: type[OSError], tmp_path: Path
) -> None:
    with faults(tmp_path, at=2, kind=kind):
        (tmp_path / "a").write_text("1")
        for _ in range(2):
            with pytest.raises(error) as raised:
                (tmp_path / "b").write_text("1")
            assert raised.value.errno == {"full": 28, "denied": 13}[kind]
        assert (tmp_path / "a").read_text() == "1"
    (tmp_path / "b").write_text("1")


def test_a_full_disk_lets_files_be_deleted_and_a_denied_folder_does_not(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("1")
    with faults(tmp_path, at=1, kind="full"):
        (tmp_path / "a").unlink()
    with faults(tmp_path, at=1, kind="denied"), pytest.raises(PermissionError):
        (tmp_path / "b").unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize(
    "arguments", [{"kind": "explode"}, {"kind": None}, {"at": 0}, {"at": -1}, {"at": 1.0}, {"at": True}, {"at": "1"}]
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any], tmp_path: Path) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(ArgumentError, match=rf"{name}=.*{value!r}"):
        faults(tmp_path, **arguments)
