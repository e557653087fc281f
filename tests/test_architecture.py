"""The shape of the library: rooms that import downwards only, small files, and faces that are the documentation.

It is read from the source by `ast`, so imports inside functions and those for annotations count as well.
"""

import ast
import importlib
import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

# Lowest first: a room imports itself and the rooms before it.
_GROUND = "errors version texts values background checks control faces sharding variables compat"
GROUND = _GROUND.split()  # the files on the ground floor, which is one room
_ROOMS = """ground programs distributed checkpoints reporting weights core pipeline strategies data engine callbacks
loop populations trainer integrations testing jaxlit"""
ROOMS = _ROOMS.split()

# Where users look.
FACES = ("jaxlit", "callbacks", "distributed", "integrations", "pipeline", "strategies", "testing", "trainer")

MAX_FILE, MAX_FUNCTION = 700, 60


class Import(NamedTuple):
    """One import of one of our files by another."""

    where: str  # "jaxlit/loop/run.py:12"
    importer: str  # "jaxlit.loop.run"
    target: str  # "jaxlit.data.source"
    name: str  # what is taken out of it: "Source"
    kind: str  # "run time", "lazy" (inside a function) or "annotation"


def modules() -> dict[str, Path]:
    """Return our files by the name that Python gives them; the rooms of the top level are links."""
    result = {}
    for folder, _, files in os.walk(ROOT / "jaxlit", followlinks=True):
        for file in (Path(folder, name) for name in files if name.endswith(".py")):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            result[name.removesuffix(".__init__")] = file
    return dict(sorted(result.items()))


FILES = modules()


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(file.read_text()) for name, file in FILES.items()}


def where(module: str, line: int) -> str:
    return f"{FILES[module].relative_to(ROOT)}:{line}"


def room(module: str) -> str:
    """Return the room of a file: `jaxlit.loop.run` is in loop."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] in ("loggers", "cli", "__main__"):
        return "jaxlit"
    return "ground" if parts[1] in GROUND else parts[1]


def statements(node: ast.AST, kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Yield each import statement below a node, and when it runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, kind
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from statements(ast.Module(child.body, []), "annotation")
            yield from statements(ast.Module(child.orelse, []), kind)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from statements(child, "lazy")
        else:
            yield from statements(child, kind)


@cache
def imports() -> list[Import]:
    """Return every import of one of our files."""
    result = []
    for module, tree in trees().items():
        for statement, kind in statements(tree, "run time"):
            if isinstance(statement, ast.Import):
                pairs = [(alias.name, alias.name) for alias in statement.names]
            else:
                package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
                for _ in range(statement.level - 1):
                    package = package.rpartition(".")[0]
                base = ".".join(filter(None, [package if statement.level else "", statement.module]))
                pairs = [(f"{base}.{x.name}" if f"{base}.{x.name}" in FILES else base, x.name) for x in statement.names]
            for target, name in pairs:
                if target in FILES:
                    result.append(Import(where(module, statement.lineno), module, target, name, kind))
    return result


def goes_down(one: Import) -> bool:
    """Return whether it is of a lower room, or the exception: hooks of callbacks are annotated to take the Trainer."""
    if one.kind == "annotation" and room(one.importer) == "callbacks" and one.name in ("Trainer", "TrainModule"):
        return True
    mine, theirs = room(one.importer), room(one.target)
    return mine in ROOMS and theirs in ROOMS and ROOMS.index(theirs) <= ROOMS.index(mine)


def arrows(*kinds: str) -> dict[str, set[str]]:
    """Return the files that each imports by these kinds; a file of another room comes with that room's face."""
    graph: dict[str, set[str]] = {}
    for one in imports():
        face = ".".join(one.target.split(".")[:2])
        faces = {face} & FILES.keys() if room(one.target) != room(one.importer) else set()
        if one.kind in kinds:
            graph.setdefault(one.importer, set()).update({one.target, *faces} - {one.importer})
    return graph


def test_every_file_has_a_room() -> None:
    assert [where(module, 1) for module in FILES if room(module) not in ROOMS] == []


def test_rooms_import_lower_rooms_only() -> None:
    wrong = [x for x in imports() if not goes_down(x)]
    assert not wrong, "\n".join(f"{x.where} imports {x.name} of {x.target} ({x.kind})" for x in wrong)


@pytest.mark.parametrize("kinds", [("run time",), ("run time", "lazy")], ids=" and ".join)
def test_there_is_no_import_circle(kinds: tuple[str, ...]) -> None:
    TopologicalSorter(arrows(*kinds)).prepare()  # a CycleError names the files


def test_files_are_short() -> None:
    long = [where(name, 1) for name, file in FILES.items() if len(file.read_text().splitlines()) > MAX_FILE]
    assert not long, "\n".join(long)


def test_no_two_files_have_one_name() -> None:
    names = [file.name for file in FILES.values() if file.name != "__init__.py"]
    assert {name for name in names if names.count(name) > 1} == {"base.py"}  # of strategies and of callbacks


def test_functions_are_short() -> None:
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= MAX_FUNCTION, f"{where(module, node.lineno)} {node.name}"


def test_a_room_says_in_one_line_what_is_in_it() -> None:
    """A face also exports; no other `__init__` holds anything."""
    wrong = []
    for module, tree in trees().items():
        if FILES[module].name != "__init__.py":
            continue
        if len((ast.get_docstring(tree) or "").splitlines()) != 1:
            wrong.append(f"{where(module, 1)} has no docstring of one line")
        for node in tree.body[1:]:
            shows = ("__all__ =", "if TYPE_CHECKING:", "with lazy_imports(globals()):")
            exports = isinstance(node, ast.ImportFrom) or ast.unparse(node).startswith(shows)
            if room(module) not in FACES or not exports:
                wrong.append(f"{where(module, node.lineno)} is more than exports" + " of a face" * exports)
    assert not wrong, "\n".join(wrong)


PUBLIC = {
    "jl": "jaxlit",
    **{f"jl.{x}": f"jaxlit.{x}" for x in ("cli", "errors", "sharding", "integrations.ray", *FACES[1:])},
}


def documentation() -> str:
    """Return the code in the README and the pages: its blocks, and what stands in backticks."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join("\n".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.S)) for page in pages)


@pytest.mark.parametrize("face", PUBLIC)
def test_a_face_shows_its_public_names_only(face: str) -> None:
    module = importlib.import_module(PUBLIC[face])
    assert dir(module) == sorted(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_no_public_name_is_also_a_file_of_its_room() -> None:
    """Importing the file would set the room's attribute of this name to the file."""
    rooms = {face: importlib.import_module(PUBLIC[face]) for face in PUBLIC}
    names = [(face, x) for face, room in rooms.items() for x in room.__all__]
    files = [(face, x) for face, x in names if f"{PUBLIC[face]}.{x}" in FILES]
    assert files == [(face, x) for face, x in names if f"{face}.{x}" in PUBLIC]


@pytest.mark.parametrize("face", PUBLIC)
def test_every_public_name_is_documented(face: str) -> None:
    code = documentation()
    # A class is known by its name. That of a function or a room is a common word, so its path has to be there.
    assert [
        name
        for name in importlib.import_module(PUBLIC[face]).__all__
        if not re.search(rf"\b{name}\b" if name[0].isupper() else rf"{re.escape(face)}\.{name}\b", code)
    ] == []


def test_the_documentation_names_public_names_only() -> None:
    unknown = set()
    for path in re.findall(r"\bjl(?:\.\w+)+", documentation()):
        face, name = "jl", path.split(".")[1]
        if f"jl.{name}" in PUBLIC and path.count(".") > 1:
            face, name = f"jl.{name}", path.split(".")[2]
        if name not in importlib.import_module(PUBLIC[face]).__all__:
            unknown.add(path)
    assert unknown == set()


def test_the_map_shows_rooms_and_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert re.findall(r"^\| `(\w+)/", text, re.M) == ["jaxlit", *ROOMS[1:-1]]
    named = set(re.findall(r"`(\w+/\w+\.py)`", text))
    assert len(named) > 20
    assert not [name for name in named if not ((ROOT / "jaxlit" / name).exists() or (ROOT / name).exists())]


def own_names() -> set[str]:
    """Return the names that the library itself defines: functions, classes, variables, arguments, attributes."""
    names: set[str] = {"_replace", "_exit", "_getframe"}  # of Python
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.update([node.attr] if ast.unparse(node.value) in ("self", "cls") else [])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def test_private_parts_of_other_libraries_are_in_compat_alone() -> None:
    own, wrong = own_names(), list[str]()
    for module, tree in trees().items():
        for node in ast.walk(tree) if module != "jaxlit.compat" else ():
            private = isinstance(node, ast.Attribute) and re.fullmatch(r"_[a-z]\w*", node.attr)
            if (private and node.attr not in own) or (isinstance(node, ast.ImportFrom) and "_src" in str(node.module)):
                wrong.append(f"{where(module, node.lineno)} {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_only_the_trainers_room_names_its_private_parts() -> None:
    others = {where(name, 1): file.read_text() for name, file in FILES.items() if room(name) != "trainer"}
    assert [file for file, text in others.items() if re.search(r"\btrainer\._\w|\._session\b", text)] == []


def test_each_extra_installs_what_something_imports() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    called = {"scikit-learn": "sklearn", "pillow": "PIL", "gcp-storage-emulator": "gcp_storage_emulator"}
    sources = "\n".join(
        file.read_text() for file in [*FILES.values(), *ROOT.glob("examples/*.py"), *ROOT.glob("docs/*.md")]
    )
    for others in ("data/test_resumed_loaders.py", "integrations/test_stores.py", "kit/stores.py"):  # loaders, stores
        sources += (ROOT / "tests" / others).read_text()
    tried = (ROOT / "tests/sweeps/packages.py").read_text()  # whose models are trained, as they are pinned
    for extra in extras.keys() - {"test", "dev", "docs", "cuda"}:
        for package in [name for name in extras[extra] if f'"{name}"' not in tried]:
            name = re.split(r"\W", called.get(package, package))[0]  # without extras and versions
            words = rf"\b(import|from) {name}\b|import_(module|package)\(\W{name}\b"
            assert re.search(words, sources), (extra, package)


def test_loops_and_trainer_know_no_concrete_callback() -> None:
    """What they ask is in `Traits`, for callbacks of users too; only the defaults are made by their class."""
    known = {"jaxlit.callbacks.base"}
    for x in imports():
        asks = room(x.importer) in ("loop", "trainer", "engine") and x.importer != "jaxlit.trainer.defaults"
        if asks and room(x.target) == "callbacks" and x.kind != "annotation":
            assert x.target in known, f"{x.where} imports {x.name} of {x.target}"
