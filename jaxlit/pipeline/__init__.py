"""Pipelines: the order of the microbatches' passes over stages, checked, timed and drawn."""

from jaxlit.faces import lazy_imports

with lazy_imports(globals()):
    from jaxlit.pipeline.schedules import FusedTask, Kind, Schedule, Simulation, Task, chart, simulate

__all__ = ["FusedTask", "Kind", "Schedule", "Simulation", "Task", "chart", "simulate"]
