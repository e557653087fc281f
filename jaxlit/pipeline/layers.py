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
        if self.layers is None:
            return []
        if isinstance(self.layers, str):
            value = self._at(module, self.layers)
            layers = [*value] if isinstance(value, Iterable) else [value]
            chosen = [x for x in layers if isinstance(x, nnx.Module)][:-1]  # functions between them cannot be marked
            known = chosen and all(map(callable, layers))
        else:
            chosen = layers = [self._at(module, path) for path in self.layers]
            known = all(isinstance(x, nnx.Module) for x in layers)
        if not known:
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
                raise ArgumentError(
                    f"{self.owner}(layers={self.layers!r}): {type(module).__name__} has no {path}. Name an attribute "
                    f"that holds the layers.{did_you_mean(part, [*vars(value)] if hasattr(value, '__dict__') else [])}"
                ) from None
        return value


@lru_cache(maxsize=256)
def _marking(cls: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return pipeline_yield(cls.__call__(self, *args, **kwargs))  # type: ignore[operator]

    return type(
        cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )
