"""`GradientNorm`, which logs the norm of the gradients."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.core.train_state import sum_dtype
from jaxlit.texts import named_leaves


class GradientNorm(Callback):
    """Log the norm of the gradients, before they are clipped, as `grad_norm`.

    It is computed in the compiled step, on the steps that are logged; other steps cost nothing.

    Args:
        norm_type: The p of the norm, above 0; `float("inf")` for the largest absolute value.
        every_n_steps: Optimizer steps between values; None for the Trainer's `log_every_n_steps`.
        per_parameter: Log each parameter's norm too, as `grad_norm/<path>`.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=jl.callbacks.GradientNorm(every_n_steps=10), logger=False)
    """

    def __init__(
        self, norm_type: float = 2.0, *, every_n_steps: int | None = None, per_parameter: bool = False
    ) -> None:
        owner = "GradientNorm"
        if norm_type != float("inf"):
            check.positive("norm_type", norm_type, owner=owner, rule="takes a number above 0")
        self.norm_type = float(norm_type)
        self.trace_every_n_steps = check.integer("every_n_steps", every_n_steps, low=1, also=(None,), owner=owner)
        self.per_parameter = check.boolean("per_parameter", per_parameter, owner=owner)

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        """Compute the norms."""
        norms = {name: self._norm(x) for name, x in named_leaves(grads)}
        # The norm of the norms is that of all entries together.
        total = {"grad_norm": self._norm(jnp.stack(list(norms.values())))}
        return total | ({f"grad_norm/{k}": v for k, v in norms.items()} if self.per_parameter else {})

    def _norm(self, x: jax.Array) -> jax.Array:
        # Without a reshape, for which a sharded gradient would be gathered.
        size, p = jnp.abs(x.astype(sum_dtype(x))), self.norm_type
        return jnp.max(size, initial=0.0) if p == float("inf") else jnp.sum(size**p) ** (1 / p)
