"""What a bug report needs to know of a machine, as a block of text: `python -m jaxlit doctor`."""

import netrc
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from shutil import disk_usage
from typing import Any
from urllib.parse import urlsplit

import jax

from jaxlit.checks import is_url
from jaxlit.distributed.job import job_size
from jaxlit.engine.compile_cache import default_folder
from jaxlit.reporting.secrets import PLACEHOLDER, is_secret
from jaxlit.strategies.registry import resolve_strategy
from jaxlit.table import size, table
from jaxlit.version import __version__

_PACKAGES = ["jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "wandb"]
_PLUGINS = ["jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu"]
_WRITTEN_BYTES = 8 * 2**20
_SHORTEST_SECRET = 6  # characters; a shorter one would be found in other words
# Those whose values are shown: what changes numbers, or where programs run. For all others the name is enough.
_SHOWN = re.compile(
    r"(CUDA|HIP|ROCR|TPU)_VISIBLE_(DEVICES|CHIPS)|(OMP|MKL|OPENBLAS)_NUM_THREADS|LD_PRELOAD|XDG_CACHE_HOME|XLA_FLAGS|"
    r"LIBTPU_INIT_ARGS|NVIDIA_TF32_OVERRIDE|NCCL_(ALGO|DEBUG|PROTO)|XLA_PYTHON_CLIENT_(ALLOCATOR|MEM_FRACTION|PREALLOCATE)"
    r"|JAX_(PLATFORMS|ENABLE_X64|DEFAULT_MATMUL_PRECISION|DEFAULT_PRNG_IMPL|THREEFRY_PARTITIONABLE|DISABLE_JIT|DEBUG_NANS|"
    r"NUM_CPU_DEVICES|NUM_PROCESSES|PROCESS_ID|COMPILATION_CACHE_DIR|ENABLE_COMPILATION_CACHE)"
)
_NAMED = re.compile(
    "(JAX|XLA|LIBTPU|TPU|NVIDIA(?!_REQUIRE)|CUDA|NCCL|CUDNN|CUBLAS|TF_CPP|TF_XLA|OMP|MKL|OPENBLAS|MALLOC|WANDB|HIP|ROCR)_"
)
# The name of a flag, of a part of an address's query, of a header or of a key in JSON.
_NAME = re.compile(r"""(--[\w-]+(?=\s)|[\w-]+(?=["']?\s*[=:]))["']?\s*[=:]?\s*""")
# A quote that is not closed, for example in a text that was cut, hides the rest.
_VALUE = re.compile(r"""((Bearer|Basic|Token)\s+)?("[^"]*"?|'[^']*'?|[^\s&]+)""", re.IGNORECASE)
_USER = re.compile(r"(?<=://)\S*@")


def diagnosis(root: str) -> str:
    """Return what is installed, which devices there are, where runs are written and what the environment sets.

    Secrets are left out, and no process of a job is waited for. A part that fails shows its error.

    Args:
        root: The folder to write to; if it does not exist, the first one above it that does.
    """
    parts: dict[str, Callable[[], str]] = {
        "versions": _versions,
        "platform": lambda: f"{platform.platform()}, {os.cpu_count()} cores",
        "devices": _devices,
        "processes": _processes,
        "auto": _mesh,
        "run folder": lambda: _disk(root),
        "W&B": _wandb,
        "compile cache": _compile_cache,
    }
    rows = [[name, _shown(part)] for name, part in parts.items()]
    names = sorted(name for name in os.environ if _SHOWN.fullmatch(name) or _NAMED.match(name))
    lines = [f"{x}={_hidden(os.environ[x])}" if _SHOWN.fullmatch(x) else f"{x} (set)" for x in names]
    rows += [["environment" if i == 0 else "", x] for i, x in enumerate(lines or ["-"])]
    text = "\n".join(table(rows, texts=2))
    for name, value in os.environ.items():  # wherever else a secret may appear, for example in a path
        is_folder = os.path.isabs(value) and os.path.isdir(value)  # as PWD is
        if len(value) >= _SHORTEST_SECRET and is_secret(name) and not is_folder:
            text = text.replace(value, PLACEHOLDER)
    return text


def _shown(part: Callable[[], str]) -> str:
    try:
        return part()
    except AssertionError:  # of jax, without a text
        return f"jax found no device of JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}"
    except Exception as error:  # a broken driver, a disk without space: what a report is about
        first, *_ = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {_hidden(first)}"


def _versions() -> str:
    versions = {"jaxlit": __version__, "python": platform.python_version()}
    versions |= dict.fromkeys(_PACKAGES, "missing")
    for name in (*_PACKAGES, *_PLUGINS):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _devices() -> str:
    devices = jax.devices()
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices()]
    memory = f"{size(min(limits))} each" if all(limits) else "no memory limit reported"
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    return f"{len(devices)} x {kinds} ({jax.default_backend()}), {memory}"


def _processes() -> str:
    count = job_size()
    return "1, no job in the environment" if count == 1 else f"{count}, by the environment; this one has not joined"


def _mesh() -> str:
    strategy: Any = resolve_strategy("auto", None)
    strategy.setup()
    axes = ", ".join(f"{name}={length}" for name, length in strategy.mesh.shape.items())
    return f"{type(strategy).__name__} on the mesh {axes}"


def _disk(path: str) -> str:
    root = Path(path)
    if is_url(path) or root.is_file():
        return (
            f"{path}: {'a bucket' if is_url(path) else 'a file'}, which is not measured. Pass a folder of this machine"
        )
    folder = next(path for path in (root.absolute(), *root.absolute().parents) if path.is_dir())
    free = size(disk_usage(folder).free)
    data = os.urandom(_WRITTEN_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:  # is gone after it, also if this process is killed
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
    return f"{folder}: {free} free, {size(len(data) / seconds)} a second written and synced"


def _wandb() -> str:
    mode = os.environ.get("WANDB_MODE", "online")
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    logged_in = bool(os.environ.get("WANDB_API_KEY"))
    for path in (os.environ.get("NETRC", "~/.netrc"), "~/_netrc"):
        with suppress(OSError, netrc.NetrcParseError):
            logged_in = logged_in or netrc.netrc(os.path.expanduser(path)).authenticators(host) is not None
    return f"mode {mode}, {'a key' if logged_in else 'no key'} for {host}"


def _compile_cache() -> str:
    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return "off"
    place = config.jax_compilation_cache_dir or default_folder()
    if is_url(place):
        return f"{place}: a bucket, which is not measured"
    folder = Path(place)
    sizes = [path.stat().st_size for path in folder.glob("*-cache")]
    return f"{folder}: {len(sizes)} programs, {size(sum(sizes))}"


def _hidden(text: str) -> str:
    """Return a text without the secrets that have a name in it, and without the user of an address."""
    text = _USER.sub(f"{PLACEHOLDER}@", text)
    for match in reversed([*_NAME.finditer(text)]):
        if is_secret(match[1]):
            text = text[: match.end()] + _VALUE.sub(PLACEHOLDER, text[match.end() :], count=1)
    return text
