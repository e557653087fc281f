"""Marks that are put into a model for the user: after the layers that a list holds."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from flax import nnx

from jaxlit.errors import ArgumentError, ArgumentTypeError, did_you_mean
from jaxlit.pipeline.marks import pipeline_yield, restart


class Layers:
    """The layers of a model after which a stage may end.

    Args:
        layers: The path of a list of modules, "blocks" or "encoder.blocks"; or paths of single ones; or None.
        owner: The strategy's name, for errors.
    """

    def __init__(self, layers: str | Sequence[str] | None, *, owner: str) -> None:
        several = isinstance(layers, Sequence) and all(isinstance(x, str) for x in layers)
        known = layers is None or isinstance(layers, str) or several
        if not known:
            raise ArgumentTypeError(
                f"{owner}(layers=...) takes the path of a list of modules, such as 'blocks', or paths of single ones, "
                f"got {layers!r}."
            )
        self.layers, self.owner = layers, owner

    def mark(self, module: Any) -> Any:
        """Let the layers of a module mark what they return, and return the module.

        Args:
            module: A copy of the user's module, made for one trace.
        """
        restart()
        for layer in self._layers(module):
            # By its class, as Python looks up __call__ there; its paths and its state stay what they are.
            object.__setattr__(layer, "__class__", _marking(type(layer)))
        return module

    def _layers(self, module: Any) -> list[Any]:
        several = [self.layers] if isinstance(self.layers, str) else self.layers or []
        named = [self._at(module, path) for path in several]
        layers = [*named[0]] if isinstance(self.layers, str) and isinstance(named[0], Iterable) else named
        # Functions between the layers of a list cannot be marked, and nothing comes after the last.
        modules = [x for x in layers if isinstance(x, nnx.Module)]
        chosen = modules[:-1] if isinstance(self.layers, str) else modules
        if self.layers is not None and not (chosen and all(map(callable, layers))):
            raise ArgumentError(
                f"{self.owner}(layers={self.layers!r}) names {', '.join(type(x).__name__ for x in layers)}. Give "
                "the path of a list of modules that are called one after the other, or the paths of modules."
            )
        return list({id(x): x for x in chosen}.values())  # one that is called twice marks both calls

    def _at(self, module: Any, path: str) -> Any:
        value = module
        for part in re.findall(r"[^.\[\]]+", path):
            try:
                value = value[int(part)] if part.isdecimal() else getattr(value, part)
            except (AttributeError, IndexError, KeyError, TypeError):
                hint = did_you_mean(part, dir(value))
                raise ArgumentError(
                    f"{self.owner}(layers={self.layers!r}): {type(module).__name__} has no {path}. Name an attribute "
                    f"that holds the layers.{hint}"
                ) from None
        return value


@lru_cache(maxsize=256)
def _marking(cls: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return pipeline_yield(cls.__call__(self, *args, **kwargs))  # type: ignore[operator]

    return type(
        cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )
