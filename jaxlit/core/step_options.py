"""How a training takes its optimizer steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optax

from jaxlit.core.optimizer import Optimizer
from jaxlit.core.parts import Part


@dataclass(frozen=True)
class StepOptions:
    """How a training takes its optimizer steps.

    Attributes:
        optimizer: What `configure_optimizers` returned, with a state for each of the parts.
        accumulate: Batches an optimizer step.
        nan_policy: "raise", "skip" or "ignore".
        clip: Transforms the gradients before the optimizer; without state. None for nothing.
        extras: Callbacks that keep arrays in the state, by their keys.
        parts: What is trained from an epoch on only.
        tolerates: A function of (error, callback, hook) to whether training continues without the callback.
        example: The first batch, for a strategy that looks at the step before it places the state.
    """

    optimizer: Optimizer
    accumulate: int = 1
    nan_policy: str = "raise"
    clip: optax.GradientTransformation | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[Part] = ()
    tolerates: Callable[[Exception, Any, str], bool] = lambda *_: False
    example: Any = None

    @property
    def tx(self) -> optax.GradientTransformation:
        """The optimizer's transform."""
        return self.optimizer.tx
