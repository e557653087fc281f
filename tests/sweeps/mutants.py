"""Defects planted one at a time, each with the tests that must notice it.

    python tests/sweeps/mutants.py [part of a name or a file ...] [--jobs N]

The defects are in tests/sweeps/mutants/*.toml: a text that stands once in a file, what takes its place, the tests.
They are applied in a copy of the tree. Prints a table of what was noticed; fails if the tests fail without a defect,
or if a defect that is not said to be invisible goes unnoticed.
"""

import argparse
import ast
import collections
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # a defect that makes a test hang is noticed
PARTS = ("jaxlit", "strategies", "callbacks", "tests", "examples", "docs", "README.md", "pyproject.toml")


@dataclass(frozen=True)
class Defect:
    """A change of the code that some user would be hurt by.

    Args:
        name: What it does, in words.
        file: Where.
        old: A text that stands there once.
        new: What takes its place.
        tests: What must notice it: files, or tests in them, as pytest takes them.
        invisible: Why no user can notice it; "" if one can.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    invisible: str = ""

    @property
    def problem(self) -> str:
        """What is out of date in it; "" if nothing is."""
        path = ROOT / self.file
        if not path.exists():
            return f"there is no {self.file}"
        if (count := path.read_text().count(self.old)) != 1 or self.old == self.new:
            return f"its text stands {count} times in {self.file}"
        if path.suffix == ".py":
            try:
                ast.parse(path.read_text().replace(self.old, self.new))
            except SyntaxError as error:  # which every test would notice, or none, as pytest could not begin
                return f"with it {self.file} is no program: {error}"
        gone = [test for test in self.tests if not _exists(test)]
        return f"there is no {', '.join(gone)}" if gone else ""


def defects() -> list[Defect]:
    """Return all of them, in the order of their files."""
    found = []
    for path in sorted((Path(__file__).parent / "mutants").glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["defect"]:
            found.append(Defect(**(entry | {"tests": tuple(entry["tests"])})))
    return found


def main() -> int:
    """Run the chosen ones; returns how many went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chosen", nargs="*", help="part of a name or a file; all if there is none")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    parser.add_argument("--trust", action="store_true", help="do not first run the tests without a defect")
    given = parser.parse_args()

    every = defects()
    if stale := [f"{d.name}: {d.problem}" for d in every if d.problem]:
        print("\n".join(["Out of date:", *stale]))
        return len(stale)
    todo = [d for d in every if not given.chosen or any(part in d.name or part in d.file for part in given.chosen)]
    with tempfile.TemporaryDirectory() as folder:
        copies: Queue[Path] = Queue()
        for k in range(given.jobs):
            copies.put(_copy(Path(folder) / str(k)))
        if not given.trust:
            failed = _failures(sorted({test for d in todo for test in d.tests}), copies.queue[0])
            if failed:
                print(f"Without a defect:\n{failed}")
                return 1
        with ThreadPoolExecutor(given.jobs) as pool:
            outcomes = list(pool.map(lambda d: _outcome(d, copies), todo))
    return _report(todo, outcomes)


def _exists(test: str) -> bool:
    file, *names = test.split("::")
    path = ROOT / file
    return path.exists() and all(name.split("[")[0] in path.read_text() for name in names)


def _copy(folder: Path) -> Path:
    for part in PARTS:
        source, target = ROOT / part, folder / part
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder


def _pytest(tests: Sequence[str], copy: Path, *options: str, seconds: float = 3600.0) -> tuple[int | None, str]:
    """Return the exit code, None if it was stopped, and the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not sweep", "-p", "no:cacheprovider", *options, *tests]
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "JAX_COMPILATION_CACHE_DIR": cache}
    environment["PYTHONPATH"] = str(copy)  # before an editable install
    with tempfile.TemporaryFile("w+") as output:
        # A session of its own, so that what it has started is stopped with it.
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        output.seek(0)
        return code, output.read()


def _failures(tests: list[str], copy: Path) -> str:
    code, output = _pytest(tests, copy)
    return "" if code == 0 else output[-4000:]


def _outcome(defect: Defect, copies: "Queue[Path]") -> tuple[bool, float]:
    copy, start = copies.get(), time.monotonic()
    path = copy / defect.file
    text = path.read_text()
    path.write_text(text.replace(defect.old, defect.new))
    try:
        code, _ = _pytest(defect.tests, copy, "-x", "-n0", seconds=SECONDS)
        # 1: a test failed; None: one hung. 4 and 5: what the list names could not be found, which notices nothing.
        noticed = code not in (0, 4, 5)
    finally:
        path.write_text(text)
        copies.put(copy)
    seconds = time.monotonic() - start
    print(f"{'noticed' if noticed else 'UNNOTICED':<10}{seconds:6.1f} s  {defect.file}: {defect.name}", flush=True)
    return noticed, seconds


def _report(todo: list[Defect], outcomes: list[tuple[bool, float]]) -> int:
    rooms: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for defect, (noticed, _) in zip(todo, outcomes, strict=True):
        row = rooms[_room(defect.file)]
        row[0] += 1
        row[1] += noticed
        row[2] += bool(defect.invisible) and not noticed
    print(f"\n{'room':<14}{'defects':>8}{'noticed':>9}{'invisible':>11}")
    for room, (count, noticed, invisible) in sorted(rooms.items()):
        print(f"{room:<14}{count:>8}{noticed:>9}{invisible:>11}")
    left = [d for d, (noticed, _) in zip(todo, outcomes, strict=True) if not noticed]
    for defect in left:
        print(f"unnoticed: {defect.file}: {defect.name}" + (f" ({defect.invisible})" if defect.invisible else ""))
    print(f"{len(todo)} defects, {len(todo) - len(left)} noticed, {len(left)} not")
    return sum(not d.invisible for d in left)


def _room(file: str) -> str:
    parts = Path(file).parts
    return parts[1] if parts[0] == "jaxlit" and len(parts) > 2 else parts[0]


if __name__ == "__main__":
    sys.exit(min(main(), 1))
