"""Several real processes of one training on this computer, each with simulated devices."""

import importlib.util
import inspect
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# Nearly all time of the tests goes to compiling small programs: they are kept from run to run, for all processes, and
# compiled without what only long runs are worth.
FLAGS = [*os.environ.get("XLA_FLAGS", "").split()]
FLAGS += ["--xla_llvm_disable_expensive_passes=true", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):  # later releases know no other way, and end at a flag that they do not know
    FLAGS += ["--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false"]
else:  # at 0 they round a small loop, which is one kernel there, unlike what it repeats
    FLAGS += ["--xla_backend_optimization_level=1"]
CHEAP = {
    "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax")),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "MALLOC_ARENA_MAX": "2",  # else glibc keeps for each compiling thread what it once needed
    "XLA_FLAGS": " ".join(dict.fromkeys(FLAGS)),
}


@dataclass(frozen=True)
class Ended:
    """How a process ended: without a code if it was stopped because it, or another, did not end in time."""

    code: int | None
    said: dict[str, Any]  # what it told by `say`, by name
    output: str
    errors: str


def launch(
    work: Callable[[], None],
    folder: Path,
    *,
    count: int = 2,
    devices: int = 4,
    join: bool = True,
    timeout: float = 600.0,  # on a busy machine; only what hangs takes as long
    grace: float = 10.0,
    dead_after: float = 30.0,
) -> list[Ended]:
    """Run a function at the top of a test file in several processes, and stop those that do not end.

    They run and write in the folder, each with its simulated devices; `jl.distributed.initialize` comes first where
    they join. When one has failed the others have `grace` seconds: in a collective they would wait for ever.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | CHEAP | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    children, ended = [], []
    for index in range(count):
        told = {"file": inspect.getfile(work), "name": work.__name__, "port": port if join else None}
        told |= {"index": index, "count": count, "devices": devices, "dead_after": dead_after}
        command = [sys.executable, __file__, json.dumps(told)]
        with (folder / f"output{index}").open("w") as output, (folder / f"errors{index}").open("w") as errors:
            children.append(subprocess.Popen(command, stdout=output, stderr=errors, cwd=folder, env=environment))
    try:
        codes = _wait(children, time.monotonic() + timeout, grace)
    finally:
        for child in children:
            child.kill()
            child.wait()
    for index, code in enumerate(codes):
        path = folder / f"said{index}"
        said = dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}
        ended.append(Ended(code, said, *((folder / f"{name}{index}").read_text() for name in ("output", "errors"))))
    return ended


def _wait(children: list[subprocess.Popen[bytes]], deadline: float, grace: float) -> list[int | None]:
    failed = False
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        if not failed and any(child.poll() for child in children):
            failed, deadline = True, min(deadline, time.monotonic() + grace)
        for child in children:
            try:
                child.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
    return [child.poll() for child in children]


def say(name: str, value: Any) -> None:
    """Tell the test a value of JSON's; what was said before a process fails stays said."""
    with open(f"said{_told['index']}", "a") as file:
        file.write(json.dumps([name, value]) + "\n")


def error_of(work: Callable[[], Any]) -> str:
    """Return what a process may say of the error that a call raises."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


_told: dict[str, Any] = {}

if __name__ == "__main__":
    sys.modules["kit.processes"] = sys.modules["__main__"]  # for the test file's own import of it
    _told |= json.loads(sys.argv[1])
    import jaxlit as jl

    jl.testing.fake_devices(_told["devices"])
    if _told["port"] is not None:
        address = f"127.0.0.1:{_told['port']}"
        jl.distributed.initialize(address, _told["count"], _told["index"], timeout=60, dead_after=_told["dead_after"])
    spec = importlib.util.spec_from_file_location("child", _told["file"])
    assert spec is not None and spec.loader is not None
    sys.modules["child"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, _told["name"])()
