"""The copy of the module that a step runs: its modes, its statistics over replicas, its random keys."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit.core.replica import Replica
from jaxlit.leaf_names import is_key

# What train() and eval() set, by name: the value in training.
_TRAINING = {"deterministic": False, "use_running_average": False}


def set_modes(module: nnx.Module, training: bool) -> None:
    """Put a copy of the module into the mode of a stage.

    In training each layer keeps the mode that it has, so that a part which its user has frozen stays so; one that
    has none yet is trained. A `train` method of the module's own is called.
    """
    if not training:
        module.eval()
        return
    for node, name in _modes(module):
        if getattr(node, name) is None:
            setattr(node, name, _TRAINING[name])
    if type(module).train is not nnx.Module.train:
        module.train()


def is_in_eval_mode(module: nnx.Module) -> bool:
    """Return whether a module is entirely in evaluation mode, and not only in a part that its user has frozen.

    That is so if all of its layers with modes are, and every parameter is in the smallest sub-module around them.
    """
    layers = {path for path, node in _modules(module) if any(name in vars(node) for name in _TRAINING)}
    if not layers or type(module).train is not nnx.Module.train:
        return False
    if not all(getattr(node, name) for node, name in _modes(module)):
        return False
    same = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*(path[:-1] for path in layers), strict=False))
    around = tuple(names[0] for names in same)
    parameters = [path for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Param)]
    return all(path[: len(around)] == around for path in parameters)


def _modules(module: nnx.Module) -> list[tuple[tuple[Any, ...], nnx.Module]]:
    return [(path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Module)]


def _modes(module: nnx.Module) -> list[tuple[Any, str]]:
    return [(node, name) for _, node in _modules(module) for name in _TRAINING if name in vars(node)]


class _SyncedBatchNorm(nnx.BatchNorm):
    """BatchNorm whose masked statistics are those of all replicas: sums and counts are added, not means averaged."""

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        running = self.use_running_average if use_running_average is None else use_running_average
        if mask is None or running:
            return super().__call__(x, use_running_average, mask=mask)
        held = self.mean[...], self.var[...]
        self.mean[...], self.var[...] = self._statistics(x, mask)
        y = super().__call__(x, use_running_average=True)
        for variable, old in zip((self.mean, self.var), held, strict=True):
            new = self.momentum * old + (1 - self.momentum) * variable[...]
            variable[...] = jax.lax.stop_gradient(new)
        return y

    def _statistics(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the mean and the variance of what the mask lets through, on all replicas."""
        x = jnp.asarray(x, jnp.promote_types(self.dtype or x.dtype, jnp.float32))
        axes = tuple(i for i in range(x.ndim) if i != self.axis % x.ndim)
        valid = jnp.broadcast_to(mask, x.shape)

        def mean(values: jax.Array) -> jax.Array:
            summed = jnp.where(valid, values, 0).sum(axes), valid.sum(axes, dtype=values.dtype)
            total, count = jax.lax.psum(summed, self.axis_name)
            return total / count

        center = mean(x)
        if self.use_fast_variance:
            return center, jnp.maximum(0.0, mean(x * x) - center * center)
        return center, mean((x - jnp.expand_dims(center, axes)) ** 2)


def sync_batchnorm(module: nnx.Module, axis: str) -> None:
    """Make each BatchNorm take its statistics over all replicas."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.BatchNorm) and node.axis_name is None:
            node.axis_name = axis
            node.__class__ = _synced(type(node))


@functools.cache
def _synced(cls: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    """Return the class with the synchronised statistics between it and flax's own."""
    return _SyncedBatchNorm if cls is nnx.BatchNorm else type(cls.__name__, (cls, _SyncedBatchNorm), {})  # pyright: ignore


def fold_keys(module: nnx.Module, replica: Replica, batch_idx: jax.Array | None) -> Callable[[], None]:
    """Give each replica, or each evaluation batch, other random numbers.

    Args:
        module: The copy.
        replica: What the step sees.
        batch_idx: () int32 in an evaluation, whose streams start again with each batch; else None.

    Returns:
        A function that puts keys back, so that they leave the step as they came; not those that a step has written.
    """
    folded, keys = [], []
    several = replica.splits and replica.count > 1
    for _, variable in nnx.iter_graph(module):
        if not isinstance(variable, nnx.Variable) or not is_key(variable.get_value()):
            continue
        original = key = variable.get_value()
        if not isinstance(variable, nnx.RngKey):
            # A key of the user's own continues as it would on one device: there the first replica has it.
            if several:
                key = jnp.where(replica.is_first, key, _fold(key, replica.index))
                variable.set_value(key)
                keys.append((variable, key, original))
            continue
        for number in ([] if batch_idx is None else [batch_idx]) + ([replica.index] if several else []):
            key = _fold(key, number)
        if key is not original:
            variable.set_value(key)
            folded.append((variable, original))

    def put_back() -> None:
        # Always: nnx.remat and its like hand a key back as another value, though streams only ever count.
        for variable, original in folded:
            variable.set_value(original)
        for variable, key, original in keys:
            if variable.get_value() is key:  # nothing was written to it
                variable.set_value(original)

    return put_back


def _fold(key: jax.Array, number: jax.Array) -> jax.Array:
    fold = lambda k: jax.random.fold_in(k, number)  # noqa: E731
    for _ in range(key.ndim):  # layers that were built by nnx.vmap hold their keys stacked
        fold = jax.vmap(fold)
    return fold(key)
