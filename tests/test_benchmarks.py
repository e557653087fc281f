"""The benchmarks that need an accelerator run on a CPU as well."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_benchmark_of_accelerators_runs_tiny() -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--tiny"]
    environment = {key: x for key, x in os.environ.items() if key != "XLA_FLAGS"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    heads = ("nan_policy", "k", "batch", "leaves", "MFU", "collectives", "first save", "cache")
    assert [head for head in heads if head not in result.stdout] == []
