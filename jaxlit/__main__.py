"""The commands of `jaxlit`, or `python -m jaxlit`: `plan`, what a step takes; `doctor`, what a bug report needs."""

import argparse
import importlib
import json
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxlit.checks import cache_folder, is_url
from jaxlit.errors import ArgumentError, JaxlitError
from jaxlit.texts import size, table
from jaxlit.version import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "grain", "numpy", "wandb")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    description = "Commands around a training with jaxlit. `jaxlit COMMAND --help` shows the options of a command."
    epilog = "A training itself is a Python script: docs/scripts.md shows one with a command line of its own."
    parser = argparse.ArgumentParser(prog="jaxlit", description=description, epilog=epilog)
    parser.add_argument("--version", action="version", version=f"jaxlit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    example = "Example: jaxlit plan train.py:make --devices 8,64 --strategies ddp,fsdp"
    plan = commands.add_parser("plan", help="memory and time of a step, before anything is trained", epilog=example)
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
    options = vars(parser.parse_args(arguments))
    if options.pop("command") == "doctor":
        print(_diagnosis())
        return 0
    try:
        _plan(options.pop("target"), as_json=options.pop("json"), plot=options.pop("plot"), **options)
    except JaxlitError as error:
        pattern = r"Trainer\.plan\((\w+)=\.\.\.\)"
        text = re.sub(pattern, lambda match: f"--{match[1].replace('_', '-')}", str(error))
        print(f"{type(error).__name__}: {text}", file=sys.stderr)
        return 1
    return 0


def _plan(target: str, *, as_json: bool, plot: Path | None, **options: Any) -> None:
    trainer, model, data = _called(target)
    plan = trainer.plan(model, data, **options)
    print(json.dumps(plan.rows(), indent=2) if as_json else plan)
    if plot is not None:
        plan.plot().savefig(plot)


def _called(target: str) -> Any:
    """Return what a function of a file returns, given as "train.py:function"."""
    path, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    if not path or not name:
        raise ArgumentError(
            f"jaxlit plan takes a file and a function in it, such as {path or 'train.py'}:{name or 'make'}, "
            f"got {target!r}."
        )
    if not Path(path).is_file():
        raise ArgumentError(f"jaxlit plan: there is no file {path!r} in {Path.cwd()}.")
    # As when the file is run: what is next to it can be imported, also by the process that simulates devices.
    sys.path.insert(0, str(Path(path).resolve().parent))
    module = importlib.import_module(Path(path).stem)
    if not callable(function := getattr(module, name, None)):
        raise ArgumentError(f"jaxlit plan: {path} has no function {name!r}.")
    result = function()
    if not (isinstance(result, tuple) and len(result) == 3):
        raise ArgumentError(f"jaxlit plan: {name}() has to return (trainer, model, data), got {result!r:.80}.")
    return result


def _counts(text: str) -> list[int]:
    numbers = text.strip("[]").split(",")  # the brackets of jl.cli
    if not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"takes numbers such as 8,64, got {text!r}")
    return [int(number) for number in numbers]


def _diagnosis() -> str:
    """Return versions, packages, devices and the size of the compile cache.

    Environment variables, paths and names of hosts are left out, since they may contain secrets.
    """
    rows = [
        ["versions", f"jaxlit {__version__}, python {platform.python_version()}, {platform.system()}"],
        ["packages", ", ".join(map(_version, _PACKAGES))],
        ["devices", _devices()],
        ["compile cache", _compile_cache()],
    ]
    return "\n".join(table(rows, texts=2))


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} missing"


def _devices() -> str:
    try:
        kinds = ", ".join(sorted({device.device_kind for device in jax.devices()}))
    except Exception as error:  # a broken driver is what a report is about
        return f"none: {type(error).__name__} of jax.devices()"
    return f"{jax.device_count()} x {kinds} ({jax.default_backend()})"


def _compile_cache() -> str:
    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return "off"
    try:
        folder = config.jax_compilation_cache_dir or cache_folder("compiled")
        if is_url(folder):
            return "in a bucket"
        sizes = [path.stat().st_size for path in Path(folder).glob("*-cache")]
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        return f"none: {type(error).__name__}"
    return f"{len(sizes)} programs, {size(sum(sizes))}"


if __name__ == "__main__":
    sys.exit(main())
