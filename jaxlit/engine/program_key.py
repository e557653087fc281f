"""All that compiled programs of a module depend on, except for the arrays that are given to them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit.core.module import TrainModule
from jaxlit.core.plain_attributes import copied, each_attribute, same
from jaxlit.core.precision import Precision
from jaxlit.leaf_names import is_key
from jaxlit.strategies.base import Strategy

_LIBRARIES = ("builtins", "flax", "jax", "jaxlit")


def program_key(module: TrainModule, strategy: Strategy, precision: Precision) -> tuple[Any, Any]:
    """Return what the programs of a module depend on; those of equal keys (see `same_key`) are the same.

    What a step reads from elsewhere, a global or the inside of an object of its author's own, is compiled into it, as
    by `jax.jit`, and is not in the key.

    Returns:
        What is compared by `==`, and what is compared by identity, but for plain values.
    """
    eager = jax.config.jax_disable_jit  # type: ignore[attr-defined]
    attributes = {path: at[name] for path, at, name in each_attribute(module)}  # the graph does not compare lists
    # A strategy may be set up for other devices meanwhile.
    compared = [strategy, dict(vars(strategy)), attributes, _methods(module)]
    return (precision, eager, _kinds(module, precision.held), nnx.graphdef(module)), copied(compared)


def same_key(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    """Return whether programs of one key can be used for the other."""
    try:
        return a[0] == b[0] and same(a[1], b[1])
    except Exception:  # an attribute's own comparison, for example of arrays
        return False


def _kinds(module: TrainModule, held: Any) -> list[Any]:
    """Return the shape and dtype of each array of a module; floating ones are held in one dtype under bf16-true."""
    kinds = list[Any]()
    for x in jax.tree.leaves(nnx.as_pure(nnx.state(module))):
        dtype = getattr(x, "dtype", type(x))
        if hasattr(x, "dtype") and not is_key(x):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
            dtype = held if held is not None and jnp.issubdtype(dtype, jnp.floating) else dtype
        kinds.append((getattr(x, "shape", None), str(dtype)))
    return kinds


def _methods(module: TrainModule) -> list[Any]:
    """Return every method of the classes of a module and its parts, and the code in it.

    A class in a notebook may be given other methods, and IPython's autoreload puts new code into the old function. The
    classes of the libraries are left out: who changes these changes more than a module.
    """
    kinds = dict.fromkeys([type(node) for _, node in nnx.iter_graph(module)])
    classes = dict.fromkeys([cls for kind in kinds for cls in kind.__mro__])
    members = [x for cls in classes if cls.__module__.partition(".")[0] not in _LIBRARIES for x in vars(cls).values()]
    methods = [x for x in members if hasattr(x, "__get__")]
    # The function in a property, a classmethod or a jax.jit has the code.
    wrapped = [getattr(x, name, None) for x in methods for name in ("__func__", "__wrapped__", "fget")]
    return [*methods, *(getattr(x, "__code__", None) for x in (*methods, *wrapped))]
