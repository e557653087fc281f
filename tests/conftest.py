"""Eight simulated devices, and tests that leave nothing behind."""

import ctypes
import gc
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.processes import CHEAP

os.environ |= CHEAP  # here, since no test file may use jax before

import jax

from jaxlit.testing import fake_devices

fake_devices(8)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# At how many megabytes a worker lets go of its programs. What stays (jax keeps every class of a module for ever) moves
# it up: at a fixed place each test would come to begin without a single program.
FIRST = 1500.0
clear_at = [FIRST]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Have a worker more than there are cores: tests wait for processes of their own, for threads and for the disk."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pytest_collection_finish() -> None:
    """Let the collector of garbage leave alone what imports and the collection have made, and come less often.

    Tracing makes many objects and few cycles: it would take a sixth of the time of all tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def hermetic_wandb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let W&B find no key and no setting, print nothing, and write into a temporary folder only."""
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("NETRC", str(folder / "no_netrc"))  # the other place where W&B looks for a key
        patch.setenv("WANDB_SILENT", "true")
        for kind in ("DIR", "CACHE_DIR", "DATA_DIR", "CONFIG_DIR"):
            (folder / kind).mkdir()
            patch.setenv(f"WANDB_{kind}", str(folder / kind))
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_disk() -> Iterator[None]:
    """Wait for no disk, as a checkpoint does 20 times: no test cuts the power; audit events tell who asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """Let go of the programs of many tests at a time: a worker would come to hold gigabytes of them."""
    yield
    if resident() < clear_at[0]:
        return
    jax.clear_caches()
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    clear_at[0] = max(FIRST, resident() + 100)


def resident() -> float:
    """Return the megabytes that this process holds; infinite where nobody tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return math.inf
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
