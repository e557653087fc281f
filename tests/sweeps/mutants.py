"""Defects planted one at a time, each with the tests that must notice it.

    python tests/sweeps/mutants.py [part of a name or a file ...] [--jobs N]

The defects are in tests/sweeps/mutants/*.toml: a text that occurs once in a file, its replacement, the tests. They
are applied in copies of the tree. Prints what was noticed; fails if a defect that a user can notice goes unnoticed.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # a defect that makes a test hang is noticed


@dataclass(frozen=True)
class Defect:
    """A change of the code that would hurt some user."""

    name: str  # what it does, in words
    file: str
    old: str  # a text that occurs there once
    new: str
    tests: tuple[str, ...]  # what must notice it: files, or tests in them, as pytest takes them
    invisible: str = ""  # why no user can notice it; "" if one can

    @property
    def problem(self) -> str:
        """What is out of date in it; "" if nothing is."""
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
        gone = [test for test in self.tests if not _exists(test)]
        return f"there is no {', '.join(gone)}" if gone else ""


def defects() -> list[Defect]:
    """Return all of them, in the order of their files."""
    files = sorted((Path(__file__).parent / "mutants").glob("*.toml"))
    entries = [entry for path in files for entry in tomllib.loads(path.read_text())["defect"]]
    return [Defect(**(entry | {"tests": tuple(entry["tests"])})) for entry in entries]


def main() -> int:
    """Run the chosen ones; return how many went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chosen", nargs="*", help="part of a name or a file; all if there is none")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    given = parser.parse_args()
    todo = [d for d in defects() if not given.chosen or any(part in d.name or part in d.file for part in given.chosen)]
    if stale := [f"{d.name}: {d.problem}" for d in todo if d.problem]:
        print("\n".join(["Out of date:", *stale]))
        return len(stale)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        copies: Queue[Path] = Queue()
        for k in range(given.jobs):
            copies.put(_copy(Path(folder) / str(k)))
        noticed = list(pool.map(lambda d: _is_noticed(d, copies), todo))
    missed = [d for d, is_noticed in zip(todo, noticed, strict=True) if not is_noticed]
    print("\n".join(f"unnoticed: {d.file}: {d.name} {d.invisible}" for d in missed))
    print(f"{len(todo)} defects, {len(todo) - len(missed)} noticed")
    return sum(not d.invisible for d in missed)


def _exists(test: str) -> bool:
    file, *names = test.split("::")
    path = ROOT / file
    return path.exists() and all(f"def {name.split('[')[0]}(" in path.read_text() for name in names)


def _copy(folder: Path) -> Path:
    folder.mkdir()
    for part in ("jaxlit", "strategies", "callbacks", "tests", "examples", "docs", "README.md", "pyproject.toml"):
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, folder / part)
    return folder


def _is_noticed(defect: Defect, copies: "Queue[Path]") -> bool:
    """Return whether the tests pass without the defect and fail, or hang, with it."""
    copy = copies.get()
    path = copy / defect.file
    text = path.read_text()
    try:
        before = _pytest(defect, copy)
        path.write_text(text.replace(defect.old, defect.new))
        # 1: a test failed; None: one hung. 4 and 5: pytest found no such test, which notices nothing.
        noticed = before == 0 and _pytest(defect, copy) not in (0, 4, 5)
    finally:
        path.write_text(text)
        copies.put(copy)
    print(f"{'noticed' if noticed else 'UNNOTICED':<10} {defect.file}: {defect.name}", flush=True)
    return noticed


def _pytest(defect: Defect, copy: Path) -> int | None:
    """Return the exit code of a defect's tests, None if they took too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-m", "not sweep", "-p", "no:cacheprovider"]
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "JAX_COMPILATION_CACHE_DIR": cache}
    environment["PYTHONPATH"] = str(copy)  # before an editable install
    run = [*command, *defect.tests]
    try:
        return subprocess.run(run, cwd=copy, env=environment, capture_output=True, timeout=SECONDS).returncode
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    sys.exit(min(main(), 1))
