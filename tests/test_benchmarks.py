"""Benchmarks that need an accelerator, or private parts of jax, run small on a CPU as well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.processes import CHEAP

ROOT = Path(__file__).parent.parent


@pytest.mark.full
def test_the_benchmark_of_accelerators_runs_tiny() -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--tiny"]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | CHEAP, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    heads = ("nan_policy", "k", "batch", "leaves", "MFU", "collectives", "first save", "cache")
    assert [head for head in heads if head not in result.stdout] == []


@pytest.mark.full
def test_the_benchmark_of_agreements_runs_with_three_clients() -> None:
    command = [sys.executable, "benchmarks/scale.py", "agreement", "3"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr  # every client has the values of all
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["clients", "3"]
