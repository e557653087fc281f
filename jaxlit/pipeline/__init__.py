"""Pipelines: the order of the microbatches' passes over stages, checked, timed and drawn."""

from jaxlit.faces import lazy_imports

with lazy_imports(globals()):
    from jaxlit.pipeline.drawing import chart
    from jaxlit.pipeline.schedules import Schedule
    from jaxlit.pipeline.simulator import Simulation, simulate
    from jaxlit.pipeline.tasks import FusedTask, Kind, Task

__all__ = ["FusedTask", "Kind", "Schedule", "Simulation", "Task", "chart", "simulate"]
