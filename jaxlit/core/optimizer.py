"""What `configure_optimizers` returns."""

from dataclasses import dataclass
from typing import Any

import optax
from flax import nnx

from jaxlit.errors import ArgumentError


@dataclass(frozen=True)
class Optimizer:
    """An optax transform and the variables that it trains.

    Args:
        tx: The transform.
        wrt: An nnx filter for the variables to train; the other `nnx.Param`s are frozen.
        lr_schedule: The schedule inside `tx`, for those who show it.

    Example:
        >>> import jaxlit as jl, optax
        >>> from flax import nnx
        >>> head_only = jl.Optimizer(optax.adam(1e-3), wrt=nnx.All(nnx.Param, nnx.PathContains("head")))
    """

    tx: optax.GradientTransformation
    wrt: Any = nnx.Param
    lr_schedule: optax.Schedule | None = None

    def __post_init__(self) -> None:
        """Refuse what is no filter, or no schedule."""
        try:
            nnx.filterlib.to_predicate(self.wrt)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"jl.Optimizer(wrt=...) takes an nnx filter, got {self.wrt!r}. Pass nnx.Param or "
                "nnx.PathContains('head'), say."
            ) from None
        if self.lr_schedule is not None and not callable(self.lr_schedule):
            raise ArgumentError(
                "jl.Optimizer(lr_schedule=...) takes an optax schedule, a function of the step, got "
                f"{self.lr_schedule!r}. Pass optax.constant_schedule(0.1), say."
            )
