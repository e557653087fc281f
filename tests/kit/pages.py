"""The code of the pages in docs/: what runs as one program, and what needs a package that need not be there."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kit.processes import CHEAP, ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def blocks(page: str) -> list[str]:
    """Return the blocks of a page that run one after the other."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)


def block_with(page: str, text: str) -> str:
    """Return the block with a text in it."""
    (result,) = [block for block in blocks(page) if text in block]
    return result


def blocks_before(page: str, package: str) -> list[str]:
    """Return the blocks of a page before the one that needs a package."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text().partition(f"```python {package}\n")[0], re.S)


def recipe(page: str, package: str) -> str:
    """Return the block of a page that needs a package."""
    return recipes(page)[package]


def recipes(page: str) -> dict[str, str]:
    """Return the blocks of a page that need a package, by its name."""
    return dict(re.findall(r"```python (\w+)\n(.*?)```", (DOCS / page).read_text(), re.S))


def needing(*packages: str) -> list[object]:
    """Return packages as cases of a test, which are a skipped part of the sweep where one is not installed."""
    absent = [pytest.mark.sweep, pytest.mark.skip("not installed")]
    return [pytest.param(name, marks=[] if importlib.util.find_spec(name) else absent) for name in packages]


def run_script(path: Path, code: str, *arguments: str) -> str:
    """Write a script, run it in its folder as a user would, and return what it printed."""
    path.write_text(code)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | CHEAP | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, path.name, *arguments]
    done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
