"""How many floating-point operations a traced program takes."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxlit.programs.jaxpr import bodies


@dataclass(frozen=True)
class Flops:
    """Multiplications and additions of a program.

    Attributes:
        count: How many, at least.
        exact: Whether there are no more: a loop whose turns are known only while it runs counts as one turn.
        by_dtype: The part of each kind of operands: a dtype's name, or "float32 fast" for those of float32 that a
            device may round to fewer bits, which is what it does unless a product asks for more.
    """

    count: int = 0
    exact: bool = True
    by_dtype: Mapping[str, int] = field(default_factory=dict, compare=False)

    def __add__(self, other: "Flops") -> "Flops":
        by_dtype = Counter(self.by_dtype) + Counter(other.by_dtype)
        return Flops(self.count + other.count, self.exact and other.exact, by_dtype)

    def __mul__(self, times: int) -> "Flops":
        return Flops(self.count * times, self.exact, {kind: n * times for kind, n in self.by_dtype.items()})

    def __floordiv__(self, times: int) -> "Flops":
        return Flops(self.count // times, self.exact, {kind: n // times for kind, n in self.by_dtype.items()})


def count_flops(jaxpr: Any) -> Flops:
    """Return the operations of a program's matrix products and convolutions, on all devices together.

    Loops count by their turns, of several branches the longest. What XLA merges or leaves out later is counted too,
    and all else, for example elementwise work, is not: this is what a share of the devices' peak is taken of.

    Args:
        jaxpr: The program, of global arrays.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> count_flops(jax.make_jaxpr(lambda a, b: a @ b)(jnp.ones((2, 3)), jnp.ones((3, 4))).jaxpr).count
        48
    """
    return sum(map(_of_equation, jaxpr.eqns), Flops())


def _of_equation(eqn: Any) -> Flops:
    name, params = eqn.primitive.name, eqn.params
    if name in _PRODUCTS:
        count = 2 * _PRODUCTS[name](eqn)
        return Flops(count, by_dtype={_kind(eqn): count})
    if name == "custom_linear_solve":  # it has the product and the transposes as well, for gradients
        return count_flops(params["jaxprs"].solve.jaxpr)
    inner = list(map(count_flops, bodies(eqn)))
    if name == "cond":
        longest = max(inner, key=lambda x: x.count)
        return replace(longest, exact=all(x.exact for x in inner))
    total, turns = sum(inner, Flops()), 1  # how often it runs the program in it, on all devices together
    if not total.count:  # the grid of a kernel may be a value
        return total
    if name == "while":
        return replace(total, exact=False)
    if name == "scan":
        turns = params["length"]
    elif name == "shard_map":
        turns = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    elif name == "pallas_call":
        turns = math.prod(params["grid_mapping"].grid)
    return total * turns


def _kind(eqn: Any) -> str:
    """Return what its operands are, as `Flops.by_dtype` names it."""
    wider = max((x.aval.dtype for x in eqn.invars[:2]), key=lambda dtype: dtype.itemsize).name
    asked = eqn.params.get("precision")
    asked = asked if isinstance(asked, tuple) else (asked,)
    fast = all(x is None or x == jax.lax.Precision.DEFAULT for x in asked)
    return f"{wider} fast" if wider == "float32" and fast else wider


def _dot(eqn: Any) -> int:
    left, right = (x.aval for x in eqn.invars)
    (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    return left.size * _size(right, (*contracted, *batch))


def _ragged_dot(eqn: Any) -> int:
    left, right = (x.aval for x in eqn.invars[:2])
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    # Each row meets the matrix of its own group only.
    return left.size * _size(right, (*contracted, *batch, *numbers.rhs_group_dimensions))


def _size(array: Any, without: tuple[int, ...]) -> int:
    return math.prod(size for dim, size in enumerate(array.shape) if dim not in without)


def _convolution(eqn: Any) -> int:
    params, (image, kernel), (out,) = eqn.params, (x.aval for x in eqn.invars), (x.aval for x in eqn.outvars)
    numbers = params["dimension_numbers"]
    _, features, *spatial = numbers.rhs_spec
    shapes = (image, numbers.lhs_spec[2:]), (kernel, spatial), (out, numbers.out_spec[2:])
    sizes = zip(*([array.shape[dim] for dim in dims] for array, dims in shapes), strict=True)
    settings = zip(*(params[key] for key in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")), strict=True)
    pairs = math.prod(map(_pairs, sizes, settings))
    rows, channels = (out.shape[dim] for dim in numbers.out_spec[:2])
    return rows * channels * kernel.shape[features] * pairs


def _pairs(sizes: tuple[int, ...], settings: tuple[Any, ...]) -> int:
    """Return how many (output, weight) pairs of a dim meet an entry of the image, not padding or a hole.

    So a convolution's two gradients, convolutions themselves of padded and spread arrays, count as much as it does.
    """
    (size, window, out), (stride, padding, hole, spread) = sizes, settings
    at = np.arange(out)[:, None] * stride + np.arange(window) * spread - padding[0]
    return int(np.count_nonzero((at >= 0) & (at <= (size - 1) * hole) & (at % hole == 0)))


_PRODUCTS = {"dot_general": _dot, "ragged_dot_general": _ragged_dot, "conv_general_dilated": _convolution}
