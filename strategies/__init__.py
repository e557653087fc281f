"""How training is laid out over devices; every strategy is `jaxlit.strategies.X`."""

from jaxlit.strategies.base import Strategy
from jaxlit.strategies.ddp import DDP
from jaxlit.strategies.fsdp import FSDP
from jaxlit.strategies.like_params import like_params
from jaxlit.strategies.pmap import PMap
from jaxlit.strategies.program import Program
from jaxlit.strategies.registry import register_strategy
from jaxlit.strategies.replicas import PerReplica
from jaxlit.strategies.shard_map import ShardMapDDP
from jaxlit.strategies.simulated import Simulated
from jaxlit.strategies.single import SingleDevice

__all__ = [
    "DDP",
    "FSDP",
    "PMap",
    "PerReplica",
    "Program",
    "ShardMapDDP",
    "Simulated",
    "SingleDevice",
    "Strategy",
    "like_params",
    "register_strategy",
]


def __dir__() -> list[str]:
    return __all__
