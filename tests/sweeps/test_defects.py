"""Defects planted one at a time, each with the tests that must notice it.

They are in tests/sweeps/mutants/*.toml: the file, a text that occurs once there, its replacement, the tests. Each is
planted in a copy of the tree. `pytest -m sweep tests/sweeps/test_defects.py -k checkpoints` runs those of one file.
"""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # a defect that makes a test hang is noticed


@dataclass(frozen=True)
class Defect:
    room: str  # the name of its toml file
    name: str  # what it does, in words
    file: str
    old: str  # a text that occurs there once
    new: str
    tests: list[str]  # what must notice it: files, or tests in them, as pytest takes them

    def problem(self) -> str:
        """Return what is out of date in it; "" if nothing is."""
        path = ROOT / self.file
        if not path.exists():
            return f"there is no {self.file}"
        if (count := path.read_text().count(self.old)) != 1 or self.old == self.new:
            return f"its text occurs {count} times in {self.file}"
        if path.suffix == ".py":
            try:
                ast.parse(path.read_text().replace(self.old, self.new))
            except SyntaxError as error:  # every test would notice it, or none, as pytest could not begin
                return f"with it {self.file} is no program: {error}"
        gone = [test for test in self.tests if not exists(test)]
        return f"there is no {', '.join(gone)}" if gone else ""


def exists(test: str) -> bool:
    file, *names = test.split("::")
    path = ROOT / file
    return path.exists() and all(f"def {name.split('[')[0]}(" in path.read_text() for name in names)


def defects() -> list[Defect]:
    result = []
    for path in sorted((Path(__file__).parent / "mutants").glob("*.toml")):
        for file, entries in tomllib.loads(path.read_text()).items():
            result += [Defect(path.stem, file=file, **entry) for entry in entries]
    return result


def test_each_planted_defect_fits_code_and_tests() -> None:
    stale = [f"{defect.name}: {problem}" for defect in defects() if (problem := defect.problem())]
    assert not stale, "\n".join(stale)


def test_no_defect_is_planted_twice() -> None:
    result = [(defect.file, defect.old, defect.new) for defect in defects()]
    assert len(result) == len(set(result))


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what the tests need, once for each worker."""
    folder = tmp_path_factory.mktemp("tree")
    for part in ("jaxlit", "strategies", "callbacks", "tests", "examples", "docs", "README.md", "pyproject.toml"):
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, folder / part)
    return folder


@pytest.fixture
def planted(request: pytest.FixtureRequest, tree: Path) -> Iterator[Path]:
    """Return the tree; what the test writes into the defect's file is undone."""
    path = tree / request.param.file
    text = path.read_text()
    yield tree
    path.write_text(text)


def exit_code(tests: list[str], folder: Path) -> int | None:
    """Run tests in a folder, and return pytest's exit code, None if they took too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-m", "not sweep", "-p", "no:cacheprovider", *tests]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}  # of this worker
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}  # before an editable install
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=SECONDS).returncode
    except subprocess.TimeoutExpired:
        return None


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("defect", "planted"), [pytest.param(x, x, id=f"{x.room}: {x.name}") for x in defects()], indirect=["planted"]
)
def test_a_planted_defect_is_noticed(defect: Defect, planted: Path) -> None:
    assert exit_code(defect.tests, planted) == 0
    path = planted / defect.file
    path.write_text(path.read_text().replace(defect.old, defect.new))
    # 1: a test failed; None: one hung. Others: pytest found no test, or could not begin, which notices nothing.
    assert exit_code(defect.tests, planted) in (1, None)
