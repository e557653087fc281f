"""What a bug report needs to know of a machine, as a block of text: `python -m jaxlit doctor`."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxlit.checks import is_url
from jaxlit.engine.compiled_program import default_folder
from jaxlit.texts import size, table
from jaxlit.version import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "wandb")


def diagnosis() -> str:
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
    folder = config.jax_compilation_cache_dir or default_folder()
    if not config.jax_enable_compilation_cache:
        return "off"
    if is_url(folder):
        return "in a bucket"
    sizes = [path.stat().st_size for path in Path(folder).glob("*-cache")]
    return f"{len(sizes)} programs, {size(sum(sizes))}"
