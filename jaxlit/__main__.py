"""The command line, `python -m jaxlit`."""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlit.errors import ArgumentError, JaxlitError
from jaxlit.trainer.doctor import diagnosis


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxlit", description="Training with jaxlit, from a shell.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="what a training step takes, before anything is trained")
    plan.add_argument("target", help="train.py:function, which returns (trainer, model, data)")
    plan.add_argument("--devices", type=_counts, help="how many, for example 8,64,512 (default: those that are here)")
    plan.add_argument("--strategies", type=lambda text: text.strip("[]").split(","), help="for example ddp,fsdp")
    plan.add_argument("--hardware", help='what is to train it, for example "NVIDIA H100"')
    rows = plan.add_mutually_exclusive_group()
    rows.add_argument("--batch-size", type=int, help="rows of a batch, of all devices together")
    rows.add_argument("--rows-per-device", type=int, help="the same for each device")
    plan.add_argument("--timeout", type=float, default=600.0, help="seconds for one compile (default: 600)")
    plan.add_argument("--json", action="store_true", help="print the rows as JSON")
    plan.add_argument("--plot", type=Path, help="draw the bytes of a device into this file")
    commands.add_parser("doctor", help="versions and devices in a block of text, for a bug report")
    given = vars(parser.parse_args(arguments))
    if given.pop("command") == "doctor":
        print(diagnosis())
        return 0
    try:
        _plan(given.pop("target"), as_json=given.pop("json"), plot=given.pop("plot"), **given)
    except JaxlitError as error:
        option = lambda match: f"--{match[1].replace('_', '-')}"  # noqa: E731
        text = re.sub(r"Trainer\.plan\((\w+)=\.\.\.\)", option, str(error))
        print(f"{type(error).__name__}: {text}", file=sys.stderr)
        return 1
    return 0


def _plan(target: str, *, as_json: bool, plot: Path | None, **asked: Any) -> None:
    trainer, model, data = _called(target)
    plan = trainer.plan(model, data, **asked)
    print(json.dumps(plan.rows(), indent=2) if as_json else plan)
    if plot is not None:
        plan.plot().savefig(plot)


def _called(target: str) -> Any:
    """Return what a function of a file returns, given as "train.py:function"."""
    path, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    if not path or not name:
        raise ArgumentError(
            f"python -m jaxlit plan takes a file and a function in it, such as {path or 'train.py'}:{name or 'make'}, "
            f"got {target!r}."
        )
    if not Path(path).is_file():
        raise ArgumentError(f"python -m jaxlit plan: there is no file {path!r} in {Path.cwd()}.")
    # As when the file is run: what is next to it can be imported, also by the process that simulates devices.
    sys.path.insert(0, str(Path(path).resolve().parent))
    module = importlib.import_module(Path(path).stem)
    if not callable(function := getattr(module, name, None)):
        raise ArgumentError(f"python -m jaxlit plan: {path} has no function {name!r}.")
    made = function()
    if not (isinstance(made, tuple) and len(made) == 3):
        raise ArgumentError(f"python -m jaxlit plan: {name}() has to return (trainer, model, data), got {made!r:.80}.")
    return made


def _counts(text: str) -> list[int]:
    numbers = text.strip("[]").split(",")  # the brackets of jl.cli
    if not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"takes numbers such as 8,64, got {text!r}")
    return [int(number) for number in numbers]


if __name__ == "__main__":
    sys.exit(main())
