"""`python -m jaxlit doctor`: one block for a bug report, without secrets."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from kit.pages import run_script

from jaxlit.__main__ import main

KEY = "planted0123456789secret"
NAMES = ("versions", "platform", "devices", "processes", "auto", "run folder", "W&B", "compile cache", "environment")


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, str]]:
    """Return a function that runs the command, and returns its lines by their names."""

    def run(*arguments: str) -> dict[str, str]:
        assert main(["doctor", *arguments]) == 0
        text = capsys.readouterr().out
        assert KEY not in text
        lines = [line for line in text.splitlines() if not line.startswith(" ")]
        column = text.index("jaxlit ")
        found = {line[:column].strip(): line[column:] for line in lines}
        return found | {"environment": text[text.index("\nenvironment") :]}

    return run


def test_the_report_has_versions_devices_and_the_mesh(report) -> None:
    printed = report()
    assert tuple(printed) == NAMES
    for name in ("jax", "optax", "grain", "wandb", "orbax-checkpoint"):
        assert f" {name} {importlib.metadata.version(name)}" in printed["versions"]
    assert f"python {platform.python_version()}" in printed["versions"]
    assert printed["devices"] == f"8 x {jax.devices()[0].device_kind} (cpu), no memory limit reported"
    assert printed["auto"] == "DDP on the mesh data=8"
    assert printed["processes"].startswith("1,")


def test_a_missing_package_is_named(report, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without_wandb(name: str) -> str:
        if name == "wandb":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_wandb)
    assert "wandb missing" in report()["versions"]


def test_the_command_needs_neither_wandb_nor_grain(tmp_path: Path) -> None:
    block = "import sys\nfor name in ('wandb', 'grain'):\n    sys.modules[name] = None\n"
    run = "from jaxlit.__main__ import main\nmain(['doctor'])\n"
    assert run_script(tmp_path / "blocked.py", block + run).startswith("versions ")


def test_the_run_folder_is_measured_and_left_as_it_was(report, tmp_path: Path) -> None:
    absent = tmp_path / "not" / "there"
    assert report("--default-root-dir", str(absent))["run folder"].startswith(f"{tmp_path}: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "kind"), [("gs://bucket/x", "a bucket"), ("memory://b", "a bucket"), ("f", "a file")]
)
def test_what_is_no_folder_of_this_machine_is_not_measured(place: str, kind: str, report) -> None:
    Path("f").touch()
    assert report("--default-root-dir", place)["run folder"].startswith(f"{place}: {kind}, which is not measured.")


def test_a_platform_without_a_device_is_named(report, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError  # as jax does

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", fail)
    assert report()["devices"] == "jax found no device of JAX_PLATFORMS=cuda"


def test_a_part_that_fails_shows_its_error(report, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("jaxlit.trainer.doctor.disk_usage", fail)
    assert report()["run folder"] == "OSError: [Errno 5] Input/output error"


def test_an_error_is_shown_without_secrets(report, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: object) -> None:
        raise ValueError(f"https://me:{KEY}@host refused api_key={KEY}\nand more")

    monkeypatch.setattr("jaxlit.trainer.doctor.disk_usage", fail)
    shown = "ValueError: https://<redacted>@host refused api_key=<redacted>"
    assert report()["run folder"] == shown


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("XLA_FLAGS", f"--xla_a=1 --xla_api_key={KEY}", "--xla_a=1 --xla_api_key=<redacted>"),
        ("XLA_FLAGS", f"https://me:{KEY}/1@x@host/?token={KEY}&b=2", "https://<redacted>@host/?token=<redacted>&b=2"),
        (
            "XLA_FLAGS",
            f'a=1;api_key={KEY},{KEY} token: {KEY} --auth-token "{KEY} x"',
            "a=1;api_key=<redacted> token: <redacted> --auth-token <redacted>",
        ),
        ("XLA_FLAGS", f"Authorization: Bearer {KEY} a=1", "Authorization: <redacted> a=1"),
        ("XLA_FLAGS", f"a=1 authorization=basic {KEY}&b=2", "a=1 authorization=<redacted>&b=2"),
        ("XLA_FLAGS", f"a=1 api_token='not closed {KEY}", "a=1 api_token=<redacted>"),
        ("XLA_FLAGS", f'--auth-token "not closed {KEY}', "--auth-token <redacted>"),
        ("XLA_FLAGS", f"{{'api_key': '{KEY}', \"a\": 1}}", "{'api_key': <redacted>, \"a\": 1}"),
        ("XLA_FLAGS", f"api_key = {KEY} a = 1", "api_key = <redacted> a = 1"),
        ("NVIDIA_TF32_OVERRIDE", "0", "0"),
        ("OMP_NUM_THREADS", "4", "4"),
    ],
)
def test_the_environment_is_shown_without_secrets(
    name: str, value: str, shown: str, report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("NVIDIA_REQUIRE_CUDA", "cuda>=13.0")  # many lines of a container that change nothing
    printed = report()["environment"]
    assert f" {name}={shown}\n" in f"{printed}\n"
    assert "REQUIRE_CUDA" not in printed


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_X_EXTRA_HTTP_HEADERS", "JAX_FOO_TOKEN", "JAX_COORDINATOR_ADDRESS"],
)
def test_of_other_variables_names_are_shown(name: str, report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, f'https://me:a@b{KEY}@host "Authorization": "Bearer {KEY}"')
    assert f" {name} (set)\n" in f"{report()['environment']}\n"


def test_the_current_folder_is_no_secret(report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PWD", str(tmp_path))  # as each shell does
    assert report("--default-root-dir", str(tmp_path))["run folder"].startswith(f"{tmp_path}: ")


def test_a_secret_is_hidden_wherever_it_appears(report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_SECRET", KEY)  # not shown itself
    (tmp_path / KEY).mkdir()
    printed = report("--default-root-dir", str(tmp_path / KEY))
    assert printed["run folder"].startswith(f"{tmp_path}{os.sep}<redacted>: ")
    assert "MY_SECRET" not in printed["environment"]


@pytest.mark.parametrize(("value", "hidden"), [("flaxy", False), ("flaxen", True)])
def test_a_secret_of_six_characters_or_more_is_hidden(
    value: str, hidden: bool, report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_SECRET", value)
    (tmp_path / f"of_{value}").mkdir()
    name = "of_<redacted>" if hidden else f"of_{value}"
    assert report("--default-root-dir", str(tmp_path / f"of_{value}"))["run folder"].startswith(f"{tmp_path}/{name}: ")


def test_wandb_is_logged_in_by_a_file(report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert report()["W&B"] == "mode offline, no key for api.wandb.ai"
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert report()["W&B"] == "mode offline, a key for api.wandb.ai"


def test_the_compile_cache_is_counted(report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    for name, size in (("a-cache", 1000), ("b-cache", 1048), ("a-atime", 5)):
        (tmp_path / name).write_bytes(bytes(size))
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_enable_compilation_cache", True)
        assert report()["compile cache"] == f"{tmp_path}: 2 programs, 2.0 KiB"
        jax.config.update("jax_compilation_cache_dir", "gs://x/y")
        assert report()["compile cache"] == "gs://x/y: a bucket, which is not measured"
        jax.config.update("jax_enable_compilation_cache", False)
        assert report()["compile cache"] == "off"
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_enable_compilation_cache", before[1])


def test_the_free_space_is_that_of_the_disk(report, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free / 2**30
    printed = float(report()["run folder"].split(": ")[1].split(" GiB free")[0])
    assert printed == pytest.approx(free, rel=0.1)
