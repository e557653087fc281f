"""jaxlit plan: the same as the Trainer's methods, from a shell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlit.__main__ import main

SCRIPT = """
import jax.numpy as jnp, numpy as np, optax, jaxlit as jl
from flax import nnx
from beside import WIDTH
class Net(jl.TrainModule):
    def __init__(self, *, rngs):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    def training_step(self, batch):
        return jnp.mean(self.layer(batch) ** 2)
    def configure_optimizers(self):
        return optax.sgd(0.1)
def make():
    return jl.Trainer(max_steps=1, logger=False), jl.lazy(Net), [np.ones((16, WIDTH), np.float32)]
def wrong():
    return 5
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a script that imports a file next to it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("WIDTH = 64\n")
    path = tmp_path / f"script_{tmp_path.name}.py"
    path.write_text(SCRIPT)
    return path


def test_a_plan_is_printed_and_drawn(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, asked = script.with_name("plan.png"), ("--devices", "2,8", "--strategies", "[ddp,fsdp]", "--json")
    assert main(["plan", f"{script}:make", *asked, "--rows-per-device", "4", "--plot", str(picture)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["strategy"], row["devices"], row["batch_size"]) for row in rows] == [
        ("ddp", 2, 8),
        ("fsdp", 2, 8),
        ("ddp", 8, 32),
        ("fsdp", 8, 32),
    ]
    assert {row["parameters"] for row in rows if row["strategy"] == "ddp"} == {4 * (64 * 64 + 64)}
    assert picture.stat().st_size > 0


def test_the_help_names_the_commands_and_where_a_training_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("usage: jaxlit ")
    for words in ("plan memory and time of a step", "doctor versions and devices", "COMMAND --help", "docs/scripts.md"):
        assert words in printed


@pytest.mark.full
def test_a_shell_plans_devices_that_are_not_there(script: Path) -> None:
    command = [sys.executable, "-m", "jaxlit", "plan", f"{script}:make", "--devices", "4", "--hardware", "TPU v4"]
    env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert [line.split()[:3] for line in done.stdout.splitlines() if "GiB" in line] == [
        [name, "4", "16"] for name in ("ddp", "zero1", "fsdp")
    ]
    assert "scans over none" in done.stdout  # fsdp with remat


@pytest.mark.parametrize("option", ["--devices", "--batch-size", "--rows-per-device", "--timeout"])
def test_an_error_names_the_option(option: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{script}:make", option, "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ArgumentError: {option} takes a")
    assert "=" not in line


def test_a_hint_names_the_option(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{script}:make", "--strategies", "single", "--devices", "1"]) == 0
    printed = capsys.readouterr().out
    assert "(in a shell --hardware)" in printed


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("absent.py:make", "there is no file 'absent.py' in"),
        ("p.py", "a file and a function in it, such as p.py:make, got 'p.py'"),
        ("p.py:", "such as p.py:make, got 'p.py:'"),
        (":make", "such as train.py:make, got ':make'"),
        ("{}:absent", "no function 'absent'"),
        ("{}:wrong", "(trainer, model, data)"),
    ],
)
def test_a_wrong_target_is_an_error_of_one_line(
    target: str, words: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", target.format(script)]) == 1
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
