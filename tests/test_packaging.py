"""What a user installs is what the checkout holds."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.smoke, pytest.mark.full]

ROOT = Path(__file__).resolve().parents[1]
# Folder in the checkout -> package that it ships as.
PACKAGES = {"jaxlit": "jaxlit", "strategies": "jaxlit.strategies", "callbacks": "jaxlit.callbacks"}


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Return what a command prints, without the caller's Python settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        command,
        cwd=cwd,
        env=clean | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def folders() -> Iterator[tuple[str, Path]]:
    """Yield every folder that ships, with the dotted name it ships as."""
    for root, package in PACKAGES.items():
        # Links are not followed, so that strategies and callbacks are met once, where they lie.
        for folder, subfolders, _ in os.walk(ROOT / root):
            subfolders[:] = [name for name in subfolders if name != "__pycache__"]
            yield ".".join([package, *Path(folder).relative_to(ROOT / root).parts]), Path(folder)


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


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment that holds the wheel."""
    python = environment(tmp_path_factory.mktemp("fresh"))
    zipfile.ZipFile(wheel).extractall(site_packages(python))
    return python


def site_packages(python: Path) -> Path:
    """Return where an environment keeps its packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(python, "-I", "-c", code, cwd=python.parent).strip())


def test_wheel_holds_every_source_file(wheel: Path) -> None:
    expected = {"jaxlit/py.typed", "jaxlit/porting.toml", "jaxlit/reporting/report.css"}
    for name, folder in folders():
        expected |= {f"{name.replace('.', '/')}/{path.name}" for path in folder.glob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert shipped == expected


def test_installed_packages_import_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = (
        "import json, jaxlit, jaxlit.strategies, jaxlit.callbacks;"
        "print(json.dumps([m.__file__ for m in (jaxlit, jaxlit.strategies, jaxlit.callbacks)]))"
    )
    files = json.loads(run(installed, "-I", "-c", code, cwd=tmp_path))
    home = site_packages(installed) / "jaxlit"
    assert [Path(file) for file in files] == [
        home / "__init__.py",
        home / "strategies" / "__init__.py",
        home / "callbacks" / "__init__.py",
    ]


def test_nothing_but_jaxlit_reaches_site_packages(installed: Path) -> None:
    names = {path.name for path in site_packages(installed).iterdir()} - {"borrowed.pth"}
    assert {name for name in names if not name.endswith(".dist-info")} == {"jaxlit"}


def test_import_adds_only_jax_flax_optax_and_numpy(tmp_path: Path) -> None:
    code = (
        "import json, sys, jax, flax.nnx, optax; before = set(sys.modules); import jaxlit;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    added = json.loads(run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT)))
    assert "jaxlit.trainer" in added
    assert [name for name in added if name.split(".")[0] in ("grain", "orbax", "wandb", "rich")] == []


@pytest.mark.parametrize("left", ["a text file", "nothing"])
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_a_checkout_without_links_installs_and_imports(kind: str, left: str, tmp_path: Path) -> None:
    """As git leaves it on Windows, or an archive that drops links."""
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("strategies", "callbacks"):
        link = checkout / "jaxlit" / name
        link.unlink()
        if left == "a text file":
            link.write_text(f"../{name}")
    run(sys.executable, "-c", f"import setuptools.build_meta as b; b.build_{kind}('dist')", cwd=checkout)
    (built,), python = (checkout / "dist").glob("*.whl"), environment(tmp_path)
    zipfile.ZipFile(built).extractall(site_packages(python))
    code = "import jaxlit as jl; print(jl.__file__, jl.strategies.FSDP.__name__, jl.callbacks.EMA.__name__, jl.Trainer)"
    file, *names = run(python, "-I", "-c", code, cwd=tmp_path).split(maxsplit=3)
    home = site_packages(python) if kind == "wheel" else checkout
    assert Path(file) == home / "jaxlit" / "__init__.py"
    assert names[:2] == ["FSDP", "EMA"]
