"""Strategies, which distribute training over devices; each is `jaxlit.strategies.X`."""

from jaxlit.faces import lazy_imports

with lazy_imports(globals()):
    from jaxlit.pipeline.schedules import ZBV, Eager1F1B, GPipe, Interleaved1F1B, Schedule, Std1F1B, ZeroBubbleH1
    from jaxlit.strategies.auto import Auto
    from jaxlit.strategies.base import Program, Strategy, like_params
    from jaxlit.strategies.ddp import DDP
    from jaxlit.strategies.fsdp import FSDP
    from jaxlit.strategies.per_replica import PerReplica
    from jaxlit.strategies.pipeline import Pipeline
    from jaxlit.strategies.pmap import PMap
    from jaxlit.strategies.registry import register_strategy
    from jaxlit.strategies.replicas import Replicas
    from jaxlit.strategies.rules import Rules
    from jaxlit.strategies.sequence import SequenceParallel
    from jaxlit.strategies.shard_map import ShardMapDDP
    from jaxlit.strategies.single import SingleDevice
    from jaxlit.strategies.tensor import TensorParallel

__all__ = [
    "DDP",
    "FSDP",
    "ZBV",
    "Auto",
    "Eager1F1B",
    "GPipe",
    "Interleaved1F1B",
    "PMap",
    "PerReplica",
    "Pipeline",
    "Program",
    "Replicas",
    "Rules",
    "Schedule",
    "SequenceParallel",
    "ShardMapDDP",
    "SingleDevice",
    "Std1F1B",
    "Strategy",
    "TensorParallel",
    "ZeroBubbleH1",
    "like_params",
    "register_strategy",
]
