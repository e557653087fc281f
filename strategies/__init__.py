"""How training is laid out over devices; every strategy is `jaxlit.strategies.X`."""

from jaxlit.strategies.base import Program as Program
from jaxlit.strategies.base import Strategy as Strategy
from jaxlit.strategies.ddp import DDP as DDP
from jaxlit.strategies.fsdp import FSDP as FSDP
from jaxlit.strategies.pmap import PMap as PMap
from jaxlit.strategies.registry import register_strategy as register_strategy
from jaxlit.strategies.replicas import PerReplica as PerReplica
from jaxlit.strategies.shard_map import ShardMapDDP as ShardMapDDP
from jaxlit.strategies.simulated import Simulated as Simulated
from jaxlit.strategies.single import SingleDevice as SingleDevice
