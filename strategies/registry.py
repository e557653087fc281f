"""Strategies by name: `register_strategy` adds one, `resolve_strategy` returns that of a Trainer's argument."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import jax

from jaxlit.errors import ArgumentError, ArgumentTypeError, did_you_mean
from jaxlit.faces import advice
from jaxlit.strategies.auto import Auto, memory_limit
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.ddp import DDP
from jaxlit.strategies.fsdp import FSDP
from jaxlit.strategies.pmap import PMap
from jaxlit.strategies.replicas import Replicas
from jaxlit.strategies.shard_map import ShardMapDDP
from jaxlit.strategies.single import SingleDevice
from jaxlit.texts import shown

StrategyName = Literal[
    "auto", "single", "ddp", "fsdp", "zero1", "zero2", "hsdp", "shard_map", "pmap", "pipeline",
    "replicas:2", "replicas:4", "replicas:8", "simulate:8",
]  # fmt: skip

_T = TypeVar("_T", bound=type[Strategy])


def _pipeline(*args: Any) -> Strategy:
    from jaxlit.strategies.pipeline import Pipeline  # imported late: few runs need its many modules

    return Pipeline(*args)


_registry: dict[str, Callable[..., Strategy]] = {
    "auto": partial(Auto),  # a partial takes no number: "auto:3" is refused
    "single": SingleDevice,
    "ddp": DDP,
    "fsdp": FSDP,
    "zero1": partial(FSDP, stage=1),
    "zero2": partial(FSDP, stage=2),
    "hsdp": partial(FSDP, replicas="auto"),
    "shard_map": ShardMapDDP,
    "pmap": PMap,
    "replicas": Replicas,
    "simulate": lambda count=None: Replicas(count, devices=1),
    "pipeline": _pipeline,
}


def register_strategy(name: str) -> Callable[[_T], _T]:
    """Make a strategy class available as `Trainer(strategy=name)`.

    Args:
        name: A name that is not taken. `Trainer(strategy="name:5")` calls the class with `5`. A type checker knows
            jaxlit's names only: for others pass an object of the class.

    Raises:
        ArgumentError: The name is taken or no identifier.

    Example:
        >>> import jaxlit as jl
        >>> @jl.register_strategy("big_fsdp")
        ... class BigFSDP(jl.strategies.FSDP):
        ...     def __init__(self):
        ...         super().__init__(min_size=2**20)
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError(f"register_strategy(name) takes an identifier such as 'mine', got {name!r}.")
    if name in _registry:
        raise ArgumentError(f"register_strategy({name!r}): the name is taken. Known: {', '.join(strategy_names())}.")

    def register(cls: _T) -> _T:
        if not (isinstance(cls, type) and issubclass(cls, Strategy)):
            raise ArgumentTypeError(f"register_strategy({name!r}) takes a subclass of jaxlit.Strategy, got {cls!r}.")
        _registry[name] = cls
        return cls

    return register


def strategy_names() -> list[str]:
    """Return the names that `Trainer(strategy=...)` takes."""
    return list(_registry)


def class_of(name: str) -> tuple[type[Strategy], dict[str, Any]]:
    """Return the class of a strategy's name, and the arguments that the name implies."""
    make = _registry[name]
    cls = getattr(make, "func", make)
    return cls if isinstance(cls, type) else type(make()), dict(getattr(make, "keywords", {}))


def resolve_strategy(strategy: Any, devices: int | None, mesh: Any = None) -> Strategy:
    """Return the strategy of a name such as "ddp" or "replicas:8", or the object itself; a copy if it is in use.

    "auto" depends on the number of devices, None for all, and on the axes of the mesh.
    """
    resolved = _resolve(strategy, devices, mesh)
    if mesh is not None:
        resolved = copy.copy(resolved)
        resolved.use_mesh(mesh)
    return resolved


def _resolve(strategy: Any, devices: int | None, mesh: Any) -> Strategy:
    if isinstance(strategy, Strategy):
        # A strategy that has a mesh belongs to another Trainer.
        return copy.copy(strategy) if "mesh" in vars(strategy) else strategy
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise ArgumentTypeError(f"Trainer(strategy={strategy.__name__}) got a class. Pass {strategy.__name__}().")
    if not isinstance(strategy, str):
        raise ArgumentTypeError(f"Trainer(strategy=...) takes a name or a jaxlit.Strategy, got {shown(strategy)}.")
    if strategy == "auto":
        axes = getattr(mesh, "axis_names", mesh)
        return _choose(devices, axes if isinstance(axes, (tuple, Mapping)) else ())  # use_mesh refuses another type
    name, colon, argument = strategy.partition(":")
    if name not in _registry:
        replacement = advice("strategy").get(name.lower())
        hint = f" {replacement}" if replacement else did_you_mean(name.lower(), strategy_names())
        raise ArgumentError(f"Unknown strategy {strategy!r}.{hint} Known: {', '.join(strategy_names())}.")
    if not colon:
        return _registry[name]()
    if not argument.isdecimal() or isinstance(_registry[name], partial):
        raise ArgumentError(f"Trainer(strategy={strategy!r}): after the colon comes an int, as in 'replicas:8'.")
    try:
        return _registry[name](int(argument))
    except TypeError:
        raise ArgumentError(
            f"Trainer(strategy={strategy!r}): {name!r} takes no number. Use strategy={name!r}."
        ) from None


def _choose(devices: int | None, axes: Any) -> Strategy:
    if axes:
        chosen: Strategy = FSDP() if "fsdp" in axes else DDP()
        chosen.reason = f"auto: axes {', '.join(map(str, axes))}"
        return chosen
    if memory_limit() is not None:
        return Auto()
    count = jax.device_count() if devices is None else devices
    chosen = SingleDevice() if count == 1 else DDP()
    chosen.reason = f"auto: {count} device{'s' * (count > 1)}"
    return chosen
