"""DeviceStatsMonitor against what the system tells of this process, and devices that a test makes up."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.batches import numbered
from kit.journal import Rows
from kit.modules import Mean
from kit.trainers import BARE, fit

from jaxlit.callbacks import DeviceStatsMonitor, device_stats_monitor
from jaxlit.callbacks.base import Measured

HOST = {"host/rss_bytes", "host/peak_rss_bytes", "host/available_bytes", "host/cpu_percent"}


def names(cpu_stats: bool | None) -> list[set[str]]:
    rows = Rows()
    fit(Mean(), numbered(4), None, DeviceStatsMonitor(cpu_stats), rows, **BARE | {"log_every_n_steps": 2})
    assert [step for step, _ in rows.rows] == [1, 3]
    return [{name for name in row if "/" in name} for _, row in rows.rows]


@pytest.mark.parametrize("cpu_stats", [None, True, False])
def test_on_cpus_the_host_is_told_unless_it_is_turned_off(cpu_stats: bool | None) -> None:
    assert names(cpu_stats) == [set() if cpu_stats is False else HOST] * 2


@pytest.mark.parametrize("cpu_stats", [None, True])
def test_a_device_tells_what_its_allocator_does(cpu_stats: bool | None) -> None:
    """The process's own devices only, and of each the names that it has."""
    stats = {"bytes_in_use": 7, "peak_bytes_in_use": 9, "bytes_limit": 80, "num_allocs": 3}
    full = SimpleNamespace(id=3, process_index=0, device_kind="made up", memory_stats=lambda: stats)
    few = SimpleNamespace(id=5, process_index=0, device_kind="made up", memory_stats=lambda: {"bytes_in_use": 1})
    other = SimpleNamespace(id=9, process_index=1, device_kind="made up", memory_stats=lambda: stats)
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=[full, few, other]))
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(mesh=mesh), log_every_n_steps=1)
    monitor, module, row = DeviceStatsMonitor(cpu_stats), Mean(), Measured({})
    monitor.setup(trainer, module, "fit")
    monitor.on_train_start(trainer, module)
    monitor.fill_row(trainer, module, row, 0)
    of_devices = {"3/bytes_in_use": 7, "3/peak_bytes_in_use": 9, "3/bytes_limit": 80, "5/bytes_in_use": 1}
    assert {k: v for k, v in row.items() if k not in HOST} == {f"device/{k}": v for k, v in of_devices.items()}
    assert (row.keys() & HOST == HOST) == (cpu_stats is True)


def test_the_hosts_numbers_are_those_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    held = bytearray(os.urandom(64 * 2**20))  # 64 MiB, so that a wrong unit shows
    pages = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    result = device_stats_monitor.host_memory()
    assert result["rss_bytes"] == pytest.approx(pages, rel=0.05) and result["rss_bytes"] > len(held)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert result["peak_rss_bytes"] == pytest.approx(peak, rel=0.05)
    assert 0 < result["available_bytes"] <= (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    monkeypatch.setattr(device_stats_monitor, "_fields", lambda path: {}[path])  # without /proc
    assert device_stats_monitor.host_memory() == {"peak_rss_bytes": pytest.approx(peak, rel=0.05)}


def test_the_cores_in_use_are_seconds_of_threads_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    used, clock = iter([1.0, 4.0, 4.0]), iter([10.0, 12.0, 16.0])
    times = SimpleNamespace(monotonic=lambda: next(clock), process_time=lambda: next(used))
    monkeypatch.setattr(device_stats_monitor, "time", times)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(mesh=SimpleNamespace(devices=SimpleNamespace(flat=[]))))
    (monitor := DeviceStatsMonitor(cpu_stats=True)).on_train_start(trainer, Mean())
    rows = [Measured({}), Measured({})]
    for row in rows:
        monitor.fill_row(trainer, Mean(), row, 0)
    assert [row["host/cpu_percent"] for row in rows] == [150.0, 0.0]
