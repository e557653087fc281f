"""Notebooks, run in a kernel of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat

from kit.processes import CHEAP, ROOT

RUN = """
import nbclient, nbformat as f
notebook = f.read("in.ipynb", 4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="ours").execute()
f.write(notebook, "out.ipynb")
"""


def executed(notebook: Any, folder: Path, environment: dict[str, str] | None = None) -> Any:
    """Return a notebook of nbformat 4 with what its cells have put out in an empty folder; an error fails the test."""
    spec = folder / "jupyter" / "kernels" / "ours"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.joinpath("kernel.json").write_text(json.dumps({"argv": argv, "display_name": "ours", "language": "python"}))
    nbformat.write(notebook, folder / "in.ipynb")
    own = {k: str(folder / k.lower()) for k in ("HOME", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")}
    own |= {"JUPYTER_PATH": str(folder / "jupyter"), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    # In a process of its own, whose event loop and warnings are none of this one's.
    command, own = [sys.executable, "-c", RUN], (environment or os.environ | CHEAP) | own
    child = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return nbformat.read(folder / "out.ipynb", 4)
