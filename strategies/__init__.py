"""Strategies, which distribute training over devices; each is `jaxlit.strategies.X`."""

from typing import TYPE_CHECKING, Any

from jaxlit.pipeline.schedules import (
    ZBV,
    Eager1F1B,
    GPipe,
    Interleaved1F1B,
    Schedule,
    Std1F1B,
    ZeroBubbleH1,
)
from jaxlit.porting import no_such_name
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.ddp import DDP
from jaxlit.strategies.fsdp import FSDP
from jaxlit.strategies.like_params import like_params
from jaxlit.strategies.pipeline import Pipeline
from jaxlit.strategies.pmap import PMap
from jaxlit.strategies.program import Program
from jaxlit.strategies.registry import register_strategy
from jaxlit.strategies.replicas import PerReplica
from jaxlit.strategies.rules import Rules
from jaxlit.strategies.sequence import SequenceParallel
from jaxlit.strategies.shard_map import ShardMapDDP
from jaxlit.strategies.simulated import Simulated
from jaxlit.strategies.single import SingleDevice
from jaxlit.strategies.tensor import TensorParallel

__all__ = [
    "DDP",
    "FSDP",
    "ZBV",
    "Eager1F1B",
    "GPipe",
    "Interleaved1F1B",
    "PMap",
    "PerReplica",
    "Pipeline",
    "Program",
    "Rules",
    "Schedule",
    "SequenceParallel",
    "ShardMapDDP",
    "Simulated",
    "SingleDevice",
    "Std1F1B",
    "Strategy",
    "TensorParallel",
    "ZeroBubbleH1",
    "like_params",
    "register_strategy",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a type checker would take any name that it finds a __getattr__ for

    def __getattr__(name: str) -> Any:
        raise no_such_name("jl.strategies", name, __all__)
