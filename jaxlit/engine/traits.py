"""What compiled programs were made of, beside the arrays that are given to them."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxlit.core.module import TrainModule
from jaxlit.core.plain_attributes import attributes_of, same
from jaxlit.core.precision import Precision
from jaxlit.core.stage import STAGES
from jaxlit.strategies.base import Strategy


@dataclass(frozen=True, eq=False)
class Traits:
    """All that a step's program depends on and jaxlit can see: programs of equal traits are the same.

    What a step reads from elsewhere, a global or the inside of an object of its author's own, is compiled into it, as
    by `jax.jit`.
    """

    graphdef: Any  # structure, modes and attributes of the module
    plain: dict[str, Any]  # what its lists and dicts hold, which the graph does not tell apart
    steps: tuple[Any, ...]  # a class in a notebook may be given another step
    strategy: Strategy
    setup: dict[str, Any]  # the strategy may be set up for other devices meanwhile
    precision: Precision
    eager: bool

    @classmethod
    def of(cls, module: TrainModule, strategy: Strategy, precision: Precision) -> "Traits":
        """Return the traits of a module's programs, if they were compiled now."""
        return cls(
            graphdef=nnx.graphdef(module),
            plain=attributes_of(module),
            steps=tuple(getattr(type(module), stage.step) for stage in STAGES.values()),
            strategy=strategy,
            setup=dict(vars(strategy)),
            precision=precision,
            eager=jax.config.jax_disable_jit,  # type: ignore[attr-defined]
        )

    def equal(self, other: "Traits") -> bool:
        """Tell whether programs of these traits can be used for the others."""
        mine = (self.precision, self.eager, self.graphdef, self.steps)
        try:
            return (
                self.strategy is other.strategy
                and mine == (other.precision, other.eager, other.graphdef, other.steps)
                and same(self.plain, other.plain)
                and same(self.setup, other.setup)
            )
        except Exception:  # an attribute's own comparison, of arrays say
            return False
