"""What the devices and the host hold while training runs."""

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxlit import checks as check
from jaxlit.callbacks.measure import Measure, Measured

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")

_OF_DEVICE = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")


class DeviceStatsMonitor(Measure):
    """Log the memory of this process's devices, and what it takes of its computer, in the rows of steps.

    Of each device `device/<id>/bytes_in_use`, `peak_bytes_in_use` and `bytes_limit`, as its allocator tells them: that
    waits for nothing. CPU devices tell none. Of the host:

    - `host/rss_bytes`, `host/peak_rss_bytes`: the memory of this process, now and at most so far;
    - `host/available_bytes`: what the computer has left;
    - `host/cpu_percent`: what all threads of this process have used since the last row, 100 for one core.

    On systems without `/proc` two of them, `rss_bytes` and `available_bytes`, are there if psutil is installed.

    Args:
        cpu_stats: Whether the host's are logged; None: where the devices tell nothing.

    Example:
        >>> import jaxlit as jl
        >>> stats = jl.callbacks.DeviceStatsMonitor(cpu_stats=True)
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=stats, logger=False)
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = (
            None if cpu_stats is None else check.boolean("cpu_stats", cpu_stats, owner="DeviceStatsMonitor")
        )
        self._devices: list[Any] = []
        self._with_host = False
        self._used = self._at = 0.0  # seconds of all cores, and when

    def on_train_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Find out who tells what."""
        mine = [x for x in trainer.strategy.mesh.devices.flat if x.process_index == jax.process_index()]
        self._devices = [device for device in mine if device.memory_stats()]
        self._with_host = not self._devices if self.cpu_stats is None else self.cpu_stats
        if not self._devices and not self._with_host:
            _logger.warning(
                "DeviceStatsMonitor(cpu_stats=False) logs nothing: devices of kind %s tell nothing of their memory.",
                mine[0].device_kind if mine else "unknown",
            )
        self._used, self._at = time.process_time(), time.monotonic()

    def fill_row(self, trainer: "Trainer", module: "TrainModule", row: Measured, step: int) -> None:
        """Add what is held now."""
        found: dict[str, float] = {}
        for device in self._devices:
            stats = device.memory_stats() or {}
            found |= {f"device/{device.id}/{name}": float(stats[name]) for name in _OF_DEVICE if name in stats}
        if self._with_host:
            found |= {f"host/{name}": float(value) for name, value in self._host().items()}
        row.put(self, found)

    def _host(self) -> dict[str, float]:
        used, at, before = time.process_time(), time.monotonic(), (self._used, self._at)
        self._used, self._at = used, at
        seconds = at - before[1]
        share = {"cpu_percent": 100 * (used - before[0]) / seconds} if seconds > 0 else {}
        return host_memory() | share


def host_memory() -> dict[str, float]:
    """Return the bytes that this process holds, that it held at most, and that are left, as far as the system tells."""
    found = dict[str, float]()
    with contextlib.suppress(OSError, ValueError, KeyError):
        status = _fields("/proc/self/status")
        found |= {"rss_bytes": status["VmRSS"], "peak_rss_bytes": status["VmHWM"]}
    with contextlib.suppress(OSError, ValueError, KeyError):
        found["available_bytes"] = _fields("/proc/meminfo")["MemAvailable"]
    if "peak_rss_bytes" not in found:
        with contextlib.suppress(ImportError):
            import resource  # not on Windows
            import sys

            unit = 1 if sys.platform == "darwin" else 1024
            found["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if "rss_bytes" not in found or "available_bytes" not in found:
        with contextlib.suppress(ImportError):
            import psutil  # type: ignore[import-not-found, import-untyped]

            found["rss_bytes"] = psutil.Process().memory_info().rss
            found["available_bytes"] = psutil.virtual_memory().available
    return {name: float(value) for name, value in found.items()}


def _fields(path: str) -> dict[str, float]:
    """Return the sizes in a file of /proc, in bytes."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0].rstrip(":"): 1024.0 * int(words[1]) for words in lines if words[2:] == ["kB"]}
