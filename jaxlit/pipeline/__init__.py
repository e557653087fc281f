"""Pipelines: the order of the microbatches' passes over stages, checked, timed and drawn."""

from jaxlit.pipeline.chart import chart
from jaxlit.pipeline.schedules import Schedule
from jaxlit.pipeline.simulator import Simulation, simulate
from jaxlit.pipeline.tasks import FusedTask, Kind, Task

__all__ = ["FusedTask", "Kind", "Schedule", "Simulation", "Task", "chart", "simulate"]


def __dir__() -> list[str]:
    return __all__
