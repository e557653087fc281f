"""Public names are imported when they are first used; `test_packaging` holds it for the rooms."""

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxlit.faces import lazy_imports


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a package with a file that has not been imported, and leaves a trace once it is."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wares.py").write_text("__all__ = ['spoon', 'fork']\nspoon, fork = object(), object()\n")
    monkeypatch.delitem(sys.modules, "wares", raising=False)
    return tmp_path


def face_of(code: str, **names: Any) -> dict[str, Any]:
    """Return the globals of a face with these imports in its block."""
    face: dict[str, Any] = {"__name__": "kitchen", "__all__": ["spoon"], "lazy_imports": lazy_imports, **names}
    exec(f"with lazy_imports(globals()):\n    {code}", face)
    return face


def test_a_name_is_imported_when_it_is_asked_for(made) -> None:
    face = face_of("from wares import spoon")
    assert "wares" not in sys.modules
    assert "spoon" not in face
    spoon = face["__getattr__"]("spoon")
    assert spoon is sys.modules["wares"].spoon
    assert face["spoon"] is spoon  # the next time, Python finds it


def test_a_star_stands_for_the_public_names_of_a_face(made) -> None:
    import wares  # type: ignore[import-not-found]

    face = face_of("from wares import *")
    assert "fork" not in face
    assert face["__getattr__"]("fork") is wares.fork


def test_imports_of_others_meanwhile_are_plain(made) -> None:
    """As from another thread, while the block is open."""
    face_of("other()", other=lambda: exec("from wares import spoon", {}))
    assert "wares" in sys.modules


def test_an_error_in_the_block_leaves_imports_as_they_were() -> None:
    plain = builtins.__import__
    with pytest.raises(ZeroDivisionError):
        face_of("1 / 0")
    assert builtins.__import__ is plain


def test_a_name_may_be_a_file_of_the_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "larder").mkdir()
    block = "with lazy_imports(globals()):\n    from larder import jam\n"
    (tmp_path / "larder" / "__init__.py").write_text(
        f"from jaxlit.faces import lazy_imports\n__all__ = ['jam']\n{block}"
    )
    (tmp_path / "larder" / "jam.py").write_text("fruit = 'plum'\n")
    monkeypatch.syspath_prepend(tmp_path)
    import larder  # type: ignore[import-not-found]

    assert "larder.jam" not in sys.modules
    assert larder.jam.fruit == "plum"
    assert larder.jam is sys.modules["larder.jam"]
