"""The copy of the module that a step runs: its modes, its statistics over replicas, its random keys."""

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
    if not (modes := _modes(module)) or type(module).train is not nnx.Module.train:
        return False
    if not all(getattr(node, name) for node, name in modes):
        return False
    with_modes, graph = {id(node) for node, _ in modes}, list(nnx.iter_graph(module))
    paths = [path[:-1] for path, node in graph if id(node) in with_modes]
    around = tuple(same[0] for same in itertools.takewhile(lambda keys: len({*keys}) == 1, zip(*paths, strict=False)))
    return all(path[: len(around)] == around for path, node in graph if isinstance(node, nnx.Param))


def _modes(module: nnx.Module) -> list[tuple[Any, str]]:
    nodes = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Module)]
    return [(node, name) for node in nodes for name in _TRAINING if name in vars(node)]


def sync_batchnorm(module: nnx.Module, axis: str) -> None:
    """Make each BatchNorm take its statistics over all replicas."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.BatchNorm) and node.axis_name is None:
            node.axis_name = axis


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
