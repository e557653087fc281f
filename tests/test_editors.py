"""What an editor and a type checker make of a program, after the README's editable install."""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import numpy as np, optax
from flax import nnx
import jaxlit as jl
import jaxlit.strategies
from jaxlit.callbacks import WandbLogger
from jaxlit.loggers import CSVLogger

class Line(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 1, rngs=rngs)

    def training_step(self, batch):
        return (self.linear(batch) ** 2).mean()

    def configure_optimizers(self):
        return optax.sgd(0.1)

@jl.register_strategy("mine")
class Mine(jl.strategies.FSDP): ...

trainer = jl.Trainer(strategy="fsdp", max_epochs=1, callbacks=[jl.EarlyStopping("loss"), jl.callbacks.EMA(0.9)])
trainer.fit(Line(rngs=nnx.Rngs(0)), [np.ones((8, 2), np.float32)])
print(trainer.checkpoint_callback.best_model_path, trainer.checkpoint_callback is None)
jl.Trainer(strategy="simulate:8")
jl.Trainer(strategy=Mine())
jl.Trainer(strategy=jl.strategies.Simulated(16))
jl.nope  # wrong
jl.callbacks.Nope  # wrong
jl.strategies.Nope  # wrong
jl.Trainer(strategy="fspd")  # wrong
jl.Trainer(startegy="fsdp")  # wrong
trainer.checkpoint_callback.best_model  # wrong
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The Python of an environment with an editable install of a copy of the checkout, and what that depends on."""
    checkout = tmp_path / "checkout"
    for name in ("jaxlit", "strategies", "callbacks"):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    build = "import setuptools.build_meta as backend; backend.build_editable('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True)
    venv.create(tmp_path / "venv", with_pip=False)
    (packages,) = (tmp_path / "venv").rglob("site-packages")
    (wheel,) = (checkout / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    # Folders that a .pth file names are searched, and their own .pth files are not read: no other jaxlit is found.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return tmp_path / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def test_pyright_reports_only_the_mistakes_of_a_program(python, tmp_path) -> None:
    pytest.importorskip("pyright")
    (tmp_path / "program").mkdir()
    program = tmp_path / "program" / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", python, program]
    told = json.loads(subprocess.run(command, cwd=program.parent, capture_output=True, text=True).stdout)
    lines = {x["range"]["start"]["line"] for x in told["generalDiagnostics"] if x["severity"] == "error"}
    wrong = {i for i, line in enumerate(PROGRAM.splitlines()) if line.endswith("# wrong")}
    assert lines == wrong, told["generalDiagnostics"]
