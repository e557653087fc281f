"""Every case of the tests of which the suite has a sample: each strategy, each kind of loader, each example.

    python tests/sweeps/cases.py [argument of pytest ...]

Such cases are told by `full=` of `kit.trainers.thinned`; they are run as pytest runs them otherwise.
"""

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    command = [sys.executable, "-m", "pytest", "-m", "sweep", *sys.argv[1:]]
    sys.exit(subprocess.run(command, cwd=Path(__file__).parents[2]).returncode)
