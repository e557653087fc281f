"""A job of which one process is killed is started again by examples/supervise.py, and ends as if nothing had happened.

The file is the script that the supervisor starts as well.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from kit.batches import sized
from kit.journal import hooks
from kit.modules import Net
from kit.processes import CHEAP, ROOT
from kit.trainers import BARE, make_trainer

import jaxlit as jl
from jaxlit.distributed.team import fetch

ROWS, BATCH, STEPS, SAVE_EVERY, AT = 72, 16, 20, 4, 10  # five batches an epoch, the last of eight rows


def train(folder: Path, fault: str) -> None:
    """Train as one process of a job; the one that `fault` names kills itself once, after some steps."""
    jl.testing.fake_devices(8 // int(os.environ["JAX_NUM_PROCESSES"]))
    jl.distributed.initialize(dead_after=8.0)

    def kill(trainer: jl.Trainer, *_: object) -> None:
        if trainer.global_step == AT and fault == str(jax.process_index()) and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def begin(trainer: jl.Trainer, *_: object) -> None:
        with (folder / f"starts{jax.process_index()}").open("a") as file:
            file.write(f"{jax.process_count()} {jax.device_count()} {trainer.global_step}\n")

    saves = jl.callbacks.ModelCheckpoint(every_n_train_steps=SAVE_EVERY)
    callbacks = hooks(on_train_start=begin, on_train_batch_end=kill), saves
    given = {"strategy": "fsdp", "max_epochs": None, "max_steps": STEPS, "enable_checkpointing": True}
    trainer = make_trainer(*callbacks, **BARE | given, default_root_dir=folder / "run", resume="auto")
    (rows,) = sized(ROWS)
    trainer.fit(Net(16, 0, 0.2, rngs=nnx.Rngs(0)), jl.ArrayLoader(rows, BATCH, shuffle=True, seed=3))
    weights = [fetch(x) for x in jax.tree.leaves(nnx.state(trainer.module, nnx.Param))]
    if jax.process_index() == 0:
        np.savez(folder / "weights.npz", *weights)


def supervised(folder: Path, fault: str, *options: str) -> tuple[list[list[int]], list[np.ndarray]]:
    """Return the exit codes of each attempt, and the weights in the end."""
    folder.mkdir()
    paths = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | CHEAP | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    command = [sys.executable, ROOT / "examples" / "supervise.py", *options, __file__, folder, fault]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    codes = re.findall(r"^supervise: \d processes ended with \[(.*)\] after", done.stdout, re.M)
    with np.load(folder / "weights.npz") as file:
        return [[int(code) for code in line.split(", ")] for line in codes], list(file.values())


@pytest.mark.full
def test_a_killed_job_that_starts_again_ends_with_the_same_weights(tmp_path: Path) -> None:
    codes, expected = supervised(tmp_path / "unbroken", "")
    assert codes == [[0, 0]]
    assert len(expected) == 6
    for fault, options, ended, tolerance in (("1", [], [75, 137], 0.0), ("0", ["--fewer"], [137, 75], 1e-6)):
        folder, count = tmp_path / fault, 2 - len(options)
        codes, weights = supervised(folder, fault, *options)
        assert codes == [ended, [0] * count]
        first, again = ([int(x) for x in line.split()] for line in (folder / "starts0").read_text().splitlines())
        assert first == [2, 8, 0]
        assert again[:2] == [count, 8]
        assert 0 < again[2] <= AT
        for a, b in zip(weights, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


ENDS = """
import os, signal, sys
os.write(1, b"started\\n")  # at once, as both write into one pipe
code = sys.argv[1 + int(os.environ["JAX_PROCESS_ID"])]
if code == "wait":
    signal.pause()
if int(code) < 0:
    os.kill(os.getpid(), -int(code))
sys.exit(int(code))
"""


def supervisor(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the supervisor of a script whose processes end with the codes in the arguments, -9 for SIGKILL."""
    script = folder / "ends.py"
    script.write_text(ENDS)
    command = [sys.executable, ROOT / "examples" / "supervise.py", *arguments[:-2], script, *arguments[-2:]]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("codes", "attempts", "code"),
    [("0 0", 1, 0), ("1 1", 1, 1), ("75 3", 1, 3), ("75 -2", 1, 130), ("75 -9", 3, 75), ("0 76", 3, 76)],
)
def test_exit_codes_decide_whether_a_job_starts_again(codes: str, attempts: int, code: int, tmp_path: Path) -> None:
    with supervisor(tmp_path, "--max-restarts=2", *codes.split()) as process:
        lines = process.stdout.read().splitlines() if process.stdout else []
    assert sum(line.startswith("supervise: 2 processes ended with") for line in lines) == attempts
    assert sum(line == "started" for line in lines) == 2 * attempts
    assert process.returncode == code


def test_a_supervisor_that_is_to_end_ends_its_processes(tmp_path: Path) -> None:
    with supervisor(tmp_path, "wait", "wait") as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["started\n"] * 2
        process.terminate()
        assert "ended with [143, 143]" in process.stdout.read()
    assert process.returncode == 143


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
