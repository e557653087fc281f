"""`python -m jaxlit doctor`: one block for a bug report, without secrets."""

import importlib.metadata
import platform
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from kit.journal import raising
from kit.pages import run_script

from jaxlit.__main__ import main

KEY = "planted0123456789secret"


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, str]]:
    """Return a function that runs the command, and returns its lines by their names."""

    def run() -> dict[str, str]:
        assert main(["doctor"]) == 0
        text = capsys.readouterr().out
        column = text.index("jaxlit ")
        return {line[:column].strip(): line[column:] for line in text.splitlines()}

    return run


def test_the_report_has_versions_packages_devices_and_the_cache(report) -> None:
    printed = report()
    assert [*printed] == ["versions", "packages", "devices", "compile cache"]
    assert f"python {platform.python_version()}" in printed["versions"]
    for name in ("jax", "optax", "grain", "wandb"):
        assert f"{name} {importlib.metadata.version(name)}" in printed["packages"]
    assert printed["devices"] == f"8 x {jax.devices()[0].device_kind} (cpu)"


def test_a_missing_package_is_named(report, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version(name.replace("wandb", "no-such-package")))
    assert "wandb missing" in report()["packages"]


@pytest.mark.full
def test_the_command_needs_neither_wandb_nor_grain(tmp_path: Path) -> None:
    block = "import sys\nfor name in ('wandb', 'grain'):\n    sys.modules[name] = None\n"
    run = "from jaxlit.__main__ import main\nmain(['doctor'])\n"
    assert run_script(tmp_path / "blocked.py", block + run).startswith("versions ")


def test_an_error_of_the_devices_is_named(report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", raising(RuntimeError, f"no device, {KEY}"))
    assert report()["devices"] == "none: RuntimeError of jax.devices()"


def test_a_folder_that_cannot_be_listed_is_named(report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", raising(PermissionError, KEY))
    assert report()["compile cache"] == "none: PermissionError"


def test_no_environment_variable_and_no_path_is_printed(report, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "XLA_FLAGS", "NCCL_DEBUG", "MY_SECRET"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / KEY))
    assert KEY not in "\n".join(report().values())


def test_the_compile_cache_is_counted(report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    for name, size in (("a-cache", 1000), ("b-cache", 1048), ("a-atime", 5)):
        (tmp_path / name).write_bytes(bytes(size))
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert report()["compile cache"] == "2 programs, 2.0 KiB"
        jax.config.update("jax_compilation_cache_dir", "gs://x/y")
        assert report()["compile cache"] == "in a bucket"
        jax.config.update("jax_enable_compilation_cache", False)
        assert report()["compile cache"] == "off"
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_enable_compilation_cache", before[1])
