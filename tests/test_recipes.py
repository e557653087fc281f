"""The recipes for schedulers start a job again after the exit codes of docs/processes.md, and after no others."""

import os
import re
import runpy
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.pages import DOCS, ROOT

RECIPES = ROOT / "examples" / "recipes"
SIGNALS = ("SIGHUP", "SIGABRT", "SIGBUS", "SIGKILL", "SIGUSR1", "SIGSEGV", "SIGTERM")  # that end a training
AGAIN = {75, 76, *(128 + signal.Signals[name] for name in SIGNALS)}
NEVER = {0, 1, 2, 3, 77, 128, 128 + signal.SIGINT}


def test_the_page_has_the_codes() -> None:
    rows = re.findall(r"^\| (.*?) \| .* \| (yes|no) \|$", (DOCS / "processes.md").read_text(), re.M)
    assert [code for code, again in rows if again == "yes"][:2] == ["75", "76"]
    assert [code.split(",")[0] for code, again in rows if again == "no"] == ["0", "1"]


def test_the_supervisor_starts_again_after_them() -> None:
    may_restart: Callable[[int], bool] = runpy.run_path(str(ROOT / "examples" / "supervise.py"))["may_restart"]
    assert {code for code in AGAIN | NEVER if may_restart(code)} == AGAIN


@pytest.fixture
def slurm(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Return a function that runs slurm.sh where `srun` ends with a code; it returns its code and what it requeued."""

    def run(code: int, restarts: int) -> tuple[int, str]:
        requeued = tmp_path / "requeued"
        requeued.write_text("")
        for name, line in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" >> {requeued}')):
            (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
            (tmp_path / name).chmod(0o755)
        told = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
        done = subprocess.run(["bash", RECIPES / "slurm.sh"], env=os.environ | told)
        return done.returncode, requeued.read_text()

    return run


def test_slurm_requeues_after_them(slurm: Any) -> None:
    ended = {code: slurm(code, 0) for code in AGAIN | NEVER}
    assert {code: returned for code, (returned, _) in ended.items()} == {code: code for code in ended}
    assert {code for code, (_, requeued) in ended.items() if requeued} == AGAIN
    assert ended[75][1] == "requeue 7\n"
    assert slurm(75, 50) == (75, "")


def test_a_job_set_starts_again_after_them() -> None:
    spec = yaml.safe_load((RECIPES / "jobset.yaml").read_text())["spec"]
    (job,) = spec["replicatedJobs"]
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["operator"] == "NotIn"
    assert set(rule["onExitCodes"]["values"]) == AGAIN
    assert [x["action"] for x in spec["failurePolicy"]["rules"]] == ["FailJobSet"]


def test_skypilot_recovers_after_them_except_its_own() -> None:
    recovery = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())["resources"]["job_recovery"]
    assert set(recovery["recover_on_exit_codes"]) == AGAIN - {128 + signal.SIGKILL}


@pytest.mark.parametrize("name", ["jobset.yaml", "skypilot.yaml"])
def test_a_recipe_names_the_job_in_the_environment(name: str) -> None:
    text = (RECIPES / name).read_text()
    names = ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
    assert [name for name in names if f"JAX_{name}" not in text] == []
