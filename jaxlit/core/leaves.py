"""What each leaf of a module's state is, by index: its name, its kind of Variable, and whose it is."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit.leaf_names import leaf_name

# Layers that normalize their parameters in place at each call, in evaluation too.
_NORMALIZING = (nnx.WeightNorm, nnx.SpectralNorm)


@dataclass(frozen=True)
class Leaf:
    """One leaf of (params, frozen, model_state).

    Attributes:
        name: Its path in the module, as a user writes it.
        kind: Its class of Variable; None for an array that is in none.
        owner: "batchnorm" or "normalizing" if it belongs to such a layer, else "".
    """

    name: str
    kind: type | None
    owner: str = ""

    def continues(self, dtype: Any) -> bool:
        """Return whether a step that is left out keeps what it wrote here: counts and random keys, but no statistic."""
        is_metric = self.kind is not None and issubclass(self.kind, nnx.metrics.MetricState)
        return not (is_metric or jnp.issubdtype(dtype, jnp.floating))


def leaves_of(module: nnx.Module, wrt: Any) -> list[Leaf]:
    """Return the leaves of a module in the order of `Model.split`."""
    owners: dict[int, str] = {}
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.BatchNorm):
            owners |= {id(x): "batchnorm" for x in (node.mean, node.var)}
        elif isinstance(node, _NORMALIZING):
            owners |= {id(x): "normalizing" for _, x in nnx.iter_graph(node.layer_instance)}
    leaves = []
    for state in nnx.split(module, wrt, nnx.Param, ...)[1:]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable)):
            kind = type(leaf) if isinstance(leaf, nnx.Variable) else None
            leaves.append(Leaf(leaf_name(path), kind, owners.get(id(leaf), "")))
    return leaves
