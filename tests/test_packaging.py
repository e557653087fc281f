"""What a user installs is what the checkout holds, and what an editor and a type checker make of it."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import jaxlit as jl

pytestmark = [pytest.mark.smoke, pytest.mark.full]

ROOT = Path(__file__).resolve().parents[1]
# Folder in the checkout -> package that it ships as.
PACKAGES = {"jaxlit": "jaxlit", "strategies": "jaxlit.strategies", "callbacks": "jaxlit.callbacks"}


PLANNED = """import jaxlit as jl
from jaxlit.testing import Line, line_data
def make():
    return jl.Trainer(max_steps=1, logger=False), jl.lazy(Line), line_data()
"""


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Return what a command prints, without the caller's Python settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | env
    result = subprocess.run(
        command, cwd=cwd, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an sdist built from a copy of the checkout, links and all."""

    def unneeded(folder: str, names: list[str]) -> list[str]:
        if Path(folder) != ROOT:
            return ["__pycache__"]
        return [name for name in names if Path(folder, name).is_dir() and name not in PACKAGES]

    tmp = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, tmp / "checkout", symlinks=True, ignore=unneeded)
    # Not from the checkout: a folder build/ there would hide the module.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp / "dist", tmp / "checkout", cwd=tmp)
    assert len(list((tmp / "dist").glob("*.tar.gz"))) == 1
    (path,) = (tmp / "dist").glob("*.whl")
    return path


def environment(folder: Path) -> Path:
    """Return the Python of a fresh environment that borrows the dependencies of this one, and no jaxlit."""
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    # Folders named by a .pth file come last on the path and their own .pth files are not read, so an
    # editable jaxlit among the dependencies stays unseen.
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site_packages(python) / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return python


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(python, "-I", "-c", code, cwd=python.parent).strip())


def test_wheel_holds_every_source_file(wheel: Path) -> None:
    expected = {"jaxlit/py.typed", "jaxlit/porting.toml", "jaxlit/reporting/report.css"}
    for root, package in PACKAGES.items():
        # Links are not followed, so that strategies and callbacks are met once, where they are.
        for folder, _, names in os.walk(ROOT / root):
            shipped_as = Path(package.replace(".", "/"), Path(folder).relative_to(ROOT / root))
            expected |= {(shipped_as / name).as_posix() for name in names if name.endswith(".py")}
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert shipped == expected


def test_the_wheel_is_imported_and_nothing_else_installed(wheel: Path, tmp_path: Path) -> None:
    python, packages = environment(tmp_path), ", ".join(PACKAGES.values())
    site = site_packages(python)
    zipfile.ZipFile(wheel).extractall(site)
    code = f"import json, {packages}; print(json.dumps([m.__file__ for m in ({packages})]))"
    files = json.loads(run(python, "-I", "-c", code, cwd=tmp_path))
    assert [Path(file).parent for file in files] == [site.joinpath(*x.split(".")) for x in PACKAGES.values()]
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"jaxlit", "borrowed.pth"}


def test_the_wheel_puts_jaxlit_on_the_path(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path)
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    command = shutil.which("jaxlit", path=path)
    assert command is not None
    assert Path(command).parent == python.parent
    assert run(command, "--version", cwd=tmp_path) == f"jaxlit {jl.__version__}\n"
    doctors = [run(*x, cwd=tmp_path).splitlines() for x in ((command, "doctor"), (python, "-m", "jaxlit", "doctor"))]
    first, second = ([x.split()[:1] for x in lines] for lines in doctors)  # with times and counts, which change
    assert first == second and ["versions"] in first
    (tmp_path / "train.py").write_text(PLANNED)
    plan = ("plan", "train.py:make", "--devices", "4", "--strategies", "ddp", "--json")
    (row,) = json.loads(run(command, *plan, cwd=tmp_path, JAX_PLATFORMS="cpu"))
    assert row["devices"] == 4


def added_by(code: str, folder: Path) -> list[str]:
    """Return the modules that a statement imports over jax, flax and optax."""
    code = f"import json, sys, jax, flax.nnx, optax; before = set(sys.modules); {code};"
    code += "print(json.dumps(sorted(set(sys.modules) - before)))"
    return json.loads(run(sys.executable, "-c", code, cwd=folder, PYTHONPATH=str(ROOT)))


def test_import_reads_the_faces_of_the_rooms_only(tmp_path: Path) -> None:
    added = added_by("import jaxlit", tmp_path)
    assert [name for name in added if name.startswith("jaxlit.") and name.count(".") > 1] == []
    assert len(added) <= 20


def test_a_trainer_imports_only_jax_flax_optax_and_numpy(tmp_path: Path) -> None:
    added = added_by("import jaxlit; jaxlit.Trainer(max_epochs=1)", tmp_path)
    assert "jaxlit.trainer.session" in added
    assert [name for name in added if name.split(".")[0] in ("grain", "orbax", "wandb", "rich")] == []
    assert [name for name in added if name.startswith(("jaxlit.pipeline.", "jaxlit.testing."))] == []


def install(kind: str, checkout: Path, folder: Path) -> Path:
    """Return the Python of a fresh environment with a wheel or an editable install of a checkout."""
    run(sys.executable, "-c", f"import setuptools.build_meta as b; b.build_{kind}('dist')", cwd=checkout)
    (built,), python = (checkout / "dist").glob("*.whl"), environment(folder)
    zipfile.ZipFile(built).extractall(site_packages(python))
    return python


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "checkout")
    return tmp_path / "checkout"


@pytest.mark.parametrize("left", ["a text file", "nothing"])
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_a_checkout_without_links_installs_and_imports(kind: str, left: str, checkout: Path, tmp_path: Path) -> None:
    """As git leaves it on Windows, or an archive that drops links."""
    for name in ("strategies", "callbacks"):
        link = checkout / "jaxlit" / name
        link.unlink()
        if left == "a text file":
            link.write_text(f"../{name}")
    python = install(kind, checkout, tmp_path)
    code = "import jaxlit as jl; print(jl.__file__, jl.strategies.FSDP.__name__, jl.callbacks.EMA.__name__, jl.Trainer)"
    file, *names = run(python, "-I", "-c", code, cwd=tmp_path).split(maxsplit=3)
    home = site_packages(python) if kind == "wheel" else checkout
    assert Path(file) == home / "jaxlit" / "__init__.py"
    assert names[:2] == ["FSDP", "EMA"]


PROGRAM = """# pyright: strict, reportMissingTypeStubs=false
import jax
import numpy as np, optax
from flax import nnx
import jaxlit as jl
import jaxlit.strategies
from jaxlit.callbacks import WandbLogger
from jaxlit.loggers import CSVLogger

class Line(jl.TrainModule):
    def __init__(self, width: int = 2, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(width, 1, rngs=rngs)

    def training_step(self, batch: jax.Array) -> jax.Array:
        loss = (self.linear(batch) ** 2).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: jax.Array) -> None:
        self.log_dict({"val": batch.mean()})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)

class Watch(jl.Callback):
    def on_train_epoch_end(self, trainer: jl.Trainer, module: jl.TrainModule) -> None:
        print(trainer.global_step, trainer.callback_metrics["loss"], trainer.current_epoch)
        trainer.stop("enough")

@jl.register_strategy("mine")
class Mine(jl.strategies.FSDP): ...

data = jl.ArrayLoader(np.ones((8, 2), np.float32), batch_size=8)
callbacks = [Watch(), jl.EarlyStopping("loss"), jl.callbacks.EMA(0.9), jl.callbacks.ModelCheckpoint(monitor="val")]
trainer = jl.Trainer(strategy="fsdp", max_epochs=1, callbacks=callbacks, logger=[CSVLogger(), WandbLogger("w")])
trainer.fit(Line(rngs=nnx.Rngs(0)), data, data)
print(trainer.validate(dataloaders=data)[0]["val"], trainer.predict(dataloaders=data), trainer.explain())
print(trainer.checkpoint_callback.best_model_path, trainer.checkpoint_callback is None, trainer.history["loss"])
print(trainer.state.params, trainer.hyperparams["learning_rate"], trainer.strategy.describe())
print(trainer.plan(jl.lazy(Line, 2), data, devices=8, hardware="NVIDIA H100").rows()[0]["total"])
print(jl.scale_batch_size(trainer, jl.lazy(Line), data, 10_000).batch_size, jl.lr_find(trainer, jl.lazy(Line), data))
print(jl.fit_many(Line, [{"seed": 1}], data, max_epochs=1).rows(), jl.export(Line(rngs=nnx.Rngs(0)), np.ones((1, 2))))
jl.save_weights(Line(rngs=nnx.Rngs(0)), "w.safetensors")
jl.load_weights(Line(rngs=nnx.Rngs(0)), "w.safetensors")
jl.Trainer(strategy="replicas:8")
jl.Trainer(strategy=Mine())
jl.Trainer(strategy=jaxlit.strategies.Replicas(16))
jl.nope  # wrong
jl.callbacks.Nope  # wrong
jl.strategies.Nope  # wrong
jl.Trainer(strategy="fspd")  # wrong
jl.Trainer(startegy="fsdp")  # wrong
trainer.checkpoint_callback.best_model  # wrong
"""


def test_pyright_reports_only_the_mistakes_of_a_strict_program(checkout: Path, tmp_path: Path) -> None:
    """After the README's editable install."""
    pytest.importorskip("pyright")
    python, program = install("editable", checkout, tmp_path), tmp_path / "program" / "train.py"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", python, program]
    reported = json.loads(subprocess.run(command, cwd=program.parent, capture_output=True, text=True).stdout)
    lines = {x["range"]["start"]["line"] for x in reported["generalDiagnostics"] if x["severity"] == "error"}
    wrong = {i for i, line in enumerate(PROGRAM.splitlines()) if line.endswith("# wrong")}
    assert lines == wrong, reported["generalDiagnostics"]
