"""What compiled programs were made of, beside the arrays that are given to them."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxlit.core.module import TrainModule
from jaxlit.core.plain_attributes import copied, each_attribute, same
from jaxlit.core.precision import Precision
from jaxlit.strategies.base import Strategy

_LIBRARIES = ("builtins", "flax", "jax", "jaxlit")


@dataclass(frozen=True, eq=False)
class Traits:
    """All that a step's program depends on and jaxlit can see: programs of equal traits are the same.

    What a step reads from elsewhere, a global or the inside of an object of its author's own, is compiled into it, as
    by `jax.jit`.
    """

    graphdef: Any  # structure, modes and attributes of the module
    plain: dict[str, Any]  # what its lists and dicts hold, which the graph does not tell apart
    methods: list[Any]  # a class in a notebook may be given others
    strategy: Strategy
    setup: dict[str, Any]  # the strategy may be set up for other devices meanwhile
    precision: Precision
    eager: bool

    @classmethod
    def of(cls, module: TrainModule, strategy: Strategy, precision: Precision) -> "Traits":
        """Return the traits of a module's programs, if they were compiled now."""
        return cls(
            graphdef=nnx.graphdef(module),
            plain={path: copied(attributes[name]) for path, attributes, name in each_attribute(module)},
            methods=_methods(module),
            strategy=strategy,
            setup=dict(vars(strategy)),
            precision=precision,
            eager=jax.config.jax_disable_jit,  # type: ignore[attr-defined]
        )

    def equal(self, other: "Traits") -> bool:
        """Return whether programs of these traits can be used for the others."""
        mine = (self.precision, self.eager, self.graphdef)
        try:
            return (
                self.strategy is other.strategy
                and mine == (other.precision, other.eager, other.graphdef)
                and _are_same(self.methods, other.methods)
                and same(self.plain, other.plain)
                and same(self.setup, other.setup)
            )
        except Exception:  # an attribute's own comparison, of arrays say
            return False


def _methods(module: TrainModule) -> list[Any]:
    """Return every method of the module's and its parts' classes, and the code in it, in their order.

    The classes of the libraries below are left out: who changes these changes more than a module.
    """
    kinds = dict.fromkeys([type(node) for _, node in nnx.iter_graph(module)])
    classes = dict.fromkeys([cls for kind in kinds for cls in kind.__mro__])
    own = [cls for cls in classes if cls.__module__.partition(".")[0] not in _LIBRARIES]
    members = [member for cls in own for member in vars(cls).values()]
    return [part for member in members if hasattr(member, "__get__") for part in _parts(member)]


def _parts(member: Any) -> list[Any]:
    """Return a method and its code, also of one that is wrapped, by `property` or `jax.jit` say."""
    # IPython's autoreload puts the new code into the old function, which stays the same object.
    functions = [member, *[getattr(member, name, None) for name in ("__func__", "__wrapped__", "fget")]]
    return [member, *[getattr(function, "__code__", None) for function in functions]]


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
