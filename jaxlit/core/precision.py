"""What a step computes in: the dtypes of a precision, and the scale of its loss."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxlit.leaf_names import is_key

_FIRST_SCALE = 2.0**15  # the largest power of two that float16 holds, as the loss itself may be float16
_GROWTH_INTERVAL = 2000  # finite steps after which the scale doubles

FullPrecisionName = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"]
PrecisionName = Literal[FullPrecisionName, "32", "bf16", "16"]  # and Lightning's short words
PRECISIONS = get_args(FullPrecisionName)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training.

    A mixed precision keeps parameters, optimizer, state, loss and metrics in float32, and casts floating
    parameters and batch leaves for the step. "16-mixed" scales the loss so that small gradients survive
    float16, after Micikevicius et al., 2017 (https://arxiv.org/abs/1710.03740): the scale halves when a
    gradient overflows, whose step changes nothing, and doubles after 2000 steps without.

    Args:
        name: "32-true", "bf16-mixed", "bf16-true" or "16-mixed".
    """

    name: str = "32-true"

    @property
    def compute(self) -> Any:
        """The dtype that parameters and batches have in a step; None leaves them as they are."""
        return {"bf16-mixed": jnp.bfloat16, "bf16-true": jnp.bfloat16, "16-mixed": jnp.float16}.get(self.name)

    @property
    def held(self) -> Any:
        """The dtype in which parameters are held; None leaves them as they are."""
        return jnp.bfloat16 if self.name == "bf16-true" else None

    def first_scale(self) -> jax.Array | None:
        """Return the loss scale to begin with: (2,) float32, the scale and the finite steps since it changed."""
        return jnp.array([_FIRST_SCALE, 0.0], jnp.float32) if self.name == "16-mixed" else None

    def next_scale(self, scale: jax.Array, overflow: jax.Array) -> jax.Array:
        """Return the scale after an optimizer step."""
        factor, steps = scale[0], scale[1] + 1
        grown = steps >= _GROWTH_INTERVAL
        factor = jnp.where(overflow, factor / 2, jnp.where(grown, factor * 2, factor))
        return jnp.stack([factor, jnp.where(overflow | grown, 0.0, steps)])


def cast(tree: Any, dtype: Any) -> Any:
    """Return the tree with its floating arrays in `dtype`; None changes nothing."""
    if dtype is None:
        return tree

    def to_dtype(x: Any) -> Any:
        floating = not is_key(x) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if floating and x.dtype != dtype else x

    return jax.tree.map(to_dtype, tree)
