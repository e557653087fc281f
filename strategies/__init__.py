"""How training is laid out over devices; every strategy is `jaxlit.strategies.X`."""

from jaxlit.strategies.base import Strategy
from jaxlit.strategies.ddp import DDP
from jaxlit.strategies.explicit import ExplicitFSDP
from jaxlit.strategies.fsdp import FSDP
from jaxlit.strategies.like_params import like_params
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
    "ExplicitFSDP",
    "PMap",
    "PerReplica",
    "Program",
    "Rules",
    "SequenceParallel",
    "ShardMapDDP",
    "Simulated",
    "SingleDevice",
    "Strategy",
    "TensorParallel",
    "like_params",
    "register_strategy",
]


def __dir__() -> list[str]:
    return __all__
