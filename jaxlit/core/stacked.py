"""Layers of one kind, which a scan runs."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxlit import checks as check

_NO_AXIS = {nnx.PARTITION_NAME: None}  # no mesh axis splits the dim of the layers


class Stacked(nnx.Module):
    """Layers of one kind, whose arrays are stacked along a first dim and which a scan runs one after the other.

    A scan is compiled once, not once for each layer. Under "fsdp" it gathers the weights of one layer at a time, and
    `FSDP(remat=True)` keeps only what goes from layer to layer for the backward pass. Each layer has its own random
    numbers and statistics. `jl.WeightRule(stack=...)` loads weights that are stored layer by layer. A layer cannot
    log: return what is to be logged with the array. `Pipeline` takes a list of layers in place of this.

    Args:
        make: A function of `rngs` that returns a layer: a module that is called with an array, or a pytree of arrays,
            and returns one of the same shapes and dtypes. A module that all layers share is an argument of the call; it
            may not write anything.
        count: The number of layers.
        rngs: The random numbers of all layers.

    Attributes:
        layers: The module that `make` returns, each of whose arrays has a first dim of `count`.

    Raises:
        ArgumentError: `count` is no number, or below 1.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> import jaxlit as jl
        >>> blocks = jl.Stacked(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 12, rngs=nnx.Rngs(0))
        >>> blocks.layers.kernel.shape
        (12, 8, 8)
        >>> blocks(jax.numpy.ones((2, 8))).shape
        (2, 8)
    """

    def __init__(self, make: Callable[[nnx.Rngs], Any], count: int, *, rngs: nnx.Rngs) -> None:
        count = check.integer("count", count, low=1, owner="jl.Stacked")
        make_all = nnx.vmap(make, transform_metadata=_NO_AXIS, graph=True, graph_updates=True)
        self.layers = nnx.split_rngs(splits=count)(make_all)(rngs)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the last layer returns; the other arguments are the same for all layers."""
        run = nnx.scan(
            lambda x, layer: layer(x, *args, **kwargs),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
            transform_metadata=_NO_AXIS,
        )
        return run(x, self.layers)
