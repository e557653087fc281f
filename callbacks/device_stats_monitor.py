"""`DeviceStatsMonitor`, which logs the memory of devices and host."""

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxlit.callbacks.base import Measure, Measured

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_DEVICE_STATS = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")


class DeviceStatsMonitor(Measure):
    """Log the memory of this process's devices, and its use of the host, in the rows of steps.

    For each device `device/<id>/bytes_in_use`, `peak_bytes_in_use` and `bytes_limit` of its allocator, without a wait.
    CPU devices have none. For the host:

    - `host/rss_bytes`, `host/peak_rss_bytes`: the memory of this process, now and the maximum;
    - `host/available_bytes`: the free memory of the computer;
    - `host/cpu_percent`: the time of all threads of this process since the last row, 100 for one core.

    Systems without `/proc` have the peak and the time only.

    Args:
        cpu_stats: Whether to log those of the host; None: if the devices have none.

    Example:
        >>> import jaxlit as jl
        >>> stats = jl.callbacks.DeviceStatsMonitor(cpu_stats=True)
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=stats, logger=False)
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats
        self._devices: list[Any] = []
        self._cpu_seconds = self._time = 0.0  # of the last row

    def on_train_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Find the devices that have statistics."""
        devices = trainer.strategy.mesh.devices.flat
        self._devices = [x for x in devices if x.process_index == jax.process_index() and x.memory_stats()]
        self._cpu_seconds, self._time = time.process_time(), time.monotonic()

    def fill_row(self, trainer: "Trainer", module: "TrainModule", row: Measured, step: int) -> None:
        """Add the current statistics."""
        for device in self._devices:
            stats = device.memory_stats() or {}
            row.put(self, {f"device/{device.id}/{name}": stats[name] for name in _DEVICE_STATS if name in stats})
        if not self._devices if self.cpu_stats is None else self.cpu_stats:
            stats = host_memory()
            cpu_seconds, now = time.process_time(), time.monotonic()
            if now > self._time:
                stats["cpu_percent"] = 100 * (cpu_seconds - self._cpu_seconds) / (now - self._time)
            self._cpu_seconds, self._time = cpu_seconds, now
            row.put(self, {f"host/{name}": value for name, value in stats.items()})


def host_memory() -> dict[str, float]:
    """Return the bytes that this process uses, their maximum so far, and the free bytes, as far as known."""
    memory = dict[str, float]()
    with contextlib.suppress(ImportError):
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        memory["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    with contextlib.suppress(OSError, ValueError, KeyError):
        memory["rss_bytes"] = _fields("/proc/self/status")["VmRSS"]
        memory["available_bytes"] = _fields("/proc/meminfo")["MemAvailable"]
    return memory


def _fields(path: str) -> dict[str, float]:
    """Return the sizes in a file of /proc, in bytes."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0].rstrip(":"): 1024.0 * int(words[1]) for words in lines if words[2:] == ["kB"]}
