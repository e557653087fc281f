"""Rules that map the names and layouts of another library to those of a module."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError
from jaxlit.texts import shown


@dataclass(frozen=True)
class WeightRule:
    r"""Describe how an array of another library becomes one or more leaves of a module; see `load_weights`.

    The array is transposed, split, reshaped and stacked, in this order. A rule with `to` only can be written as a str.

    Args:
        to: The name of the leaf, for example `r"blocks.\1.attention.out.kernel"`, where `\1` is the first group of the
            expression. Among several leaves, the array is split.
        transpose: True to reverse the dims, as a torch `Linear` needs, or the axes of `numpy.transpose`: `(2, 3, 1, 0)`
            for the kernel of a torch `Conv2d`.
        axis: The dim along which the array is split among several leaves.
        sizes: The size of each leaf's part along `axis`; None for equal parts.
        reshape: Reshape to the shape of the leaf, for example from (width, heads * size) to (width, heads, size).
        stack: The group of the expression, by number or name, that is the index of the array in the leaf's first dim,
            for layers that `nnx.scan` runs.

    Raises:
        ArgumentError: `to` is empty, or `axis` or `sizes` is given and `to` is a single leaf.

    Example:
        >>> import jaxlit as jl
        >>> rename = {
        ...     r"h\.(\d+)\.ln_1\.weight": r"blocks.\1.norm.scale",
        ...     r"h\.(\d+)\.attn\.c_attn\.weight": jl.WeightRule(
        ...         [r"blocks.\1.query.kernel", r"blocks.\1.key.kernel", r"blocks.\1.value.kernel"], axis=1
        ...     ),
        ...     r"h\.(\d+)\.attn\.bias": None,
        ... }
    """

    to: str | Sequence[str]
    _: KW_ONLY
    transpose: bool | Sequence[int] = False
    axis: int = 0
    sizes: Sequence[int] | None = None
    reshape: bool = False
    stack: int | str | None = None

    def __post_init__(self) -> None:
        if not self.to:
            raise ArgumentError(
                f"WeightRule(to=...) takes the name of a leaf or a list of names, got {self.to!r}. To leave an "
                "array out, map its name to None in rename=."
            )
        name = "axis" if self.axis else "sizes"
        if (self.axis or self.sizes is not None) and (isinstance(self.to, str) or len(self.to) == 1):
            raise ArgumentError(
                f"WeightRule({name}={getattr(self, name)!r}) splits an array among several leaves, got to={self.to!r}. "
                f"Leave {name} out, or list all leaves."
            )

    def parts(
        self, match: re.Match[str], x: np.ndarray, shapes: Mapping[str, tuple[int, ...]]
    ) -> list[tuple[str, int | None, np.ndarray]]:
        """Return the (leaf, index in its first dim or None, part of the array x) for each leaf.

        `match` is that of the expression with the name of the array, `shapes` those of the leaves of the module.
        """
        try:
            names = [in_files(match.expand(name)) for name in ([self.to] if isinstance(self.to, str) else self.to)]
            index = None if self.stack is None else int(match[self.stack])
            if self.transpose is not False:
                x = np.transpose(x, None if self.transpose is True else tuple(self.transpose))
            sizes = self.sizes
            if sizes is not None and (len(sizes) != len(names) or min(sizes) < 1 or sum(sizes) != x.shape[self.axis]):
                raise ValueError("sizes= must have one size per leaf, and their sum must be the size of the dim")
            parts = [x]
            if len(names) > 1:
                parts = np.split(x, len(names) if sizes is None else np.cumsum(sizes)[:-1], self.axis)
            if self.reshape:
                for i, (name, part) in enumerate(zip(names, parts, strict=True)):
                    shape = shapes.get(name, part.shape)[index is not None :]
                    # A part of another size keeps its shape, and is reported later with all that do not fit.
                    parts[i] = part.reshape(shape) if part.size == math.prod(shape) else part
        except (ValueError, LookupError, TypeError, re.error) as error:
            raise ArgumentError(
                f"rename=: {self} cannot be applied to {match[0]} of shape {list(x.shape)}: {error}. Change the rule."
            ) from error
        return [(name, index, part) for name, part in zip(names, parts, strict=True)]


@dataclass(frozen=True)
class Ranged:
    """An array that `read` reads, by a range for each dim; numpy's transpose and split call its methods."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[Sequence[range]], np.ndarray]

    @property
    def size(self) -> int:
        """How many numbers the array has."""
        return math.prod(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read([*map(range, self.shape)]), dtype)

    def __getitem__(self, index: Any) -> "Ranged":
        index = [*(index if isinstance(index, tuple) else [index]), *[slice(None)] * len(self.shape)]
        outer = [range(n)[part] for n, part in zip(self.shape, index, strict=False)]

        def read(at: Sequence[range]) -> np.ndarray:
            return self.read([x[_slice(y)] for x, y in zip(outer, at, strict=True)])

        return replace(self, shape=tuple(map(len, outer)), read=read)

    def transpose(self, axes: Sequence[int] | None = None) -> "Ranged":
        """Return the array with its dims in reverse, or in another order."""
        order = np.arange(len(self.shape))[slice(None, None, -1) if axes is None else list(axes)]
        shape = np.broadcast_to(0, self.shape).transpose(order).shape  # refuses what is not an order
        back = order.argsort()
        return replace(self, shape=shape, read=lambda at: self.read([at[i] for i in back]).transpose(order))

    def swapaxes(self, first: int, second: int) -> "Ranged":
        """Return the array with two dims exchanged."""
        order = [*range(len(self.shape))]
        order[first], order[second] = order[second], order[first]
        return self.transpose(order)

    def reshape(self, shape: tuple[int, ...]) -> "Ranged":
        """Return the array in another shape, of which each part needs all of it."""
        return replace(self, shape=shape, read=lambda at: np.asarray(self).reshape(shape)[tuple(map(_slice, at))])

    def fetched(self, indices: Iterable[tuple[slice, ...]]) -> "Ranged":
        """Return the array with the parts at some indices read at once: the smallest box that contains them."""
        spans = [[range(n)[part] for n, part in zip(self.shape, index, strict=True)] for index in indices]
        hull = [range(min(x.start for x in dim), max(x.stop for x in dim)) for dim in zip(*spans, strict=True)]
        box = self.read(hull)
        return replace(self, read=lambda at: box[tuple(_slice(x, y.start) for x, y in zip(at, hull, strict=True))])


def in_files(leaf: str) -> str:
    r"""Return the name of a leaf in files, layers.0 of layers[0]; of a rule's too, layers.\1 of layers[\1]."""
    return re.sub(r"\[([\w\\<>]+)\]", r".\1", leaf)


def _slice(x: range, begin: int = 0) -> slice:
    return slice(x.start - begin, x.stop - begin)


class Stacked:
    """A stack of arrays, of which only the parts that are read are stacked."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts = parts
        self.shape, self.dtype = (len(parts), *parts[0].shape), parts[0].dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return np.stack([part[index[1:]] for part in self.parts[index[0]]])


@dataclass(frozen=True)
class Assigned:
    """The arrays that rules assign to the leaves of a module."""

    arrays: dict[str, np.ndarray | Ranged | Stacked]  # for each leaf; includes leaves that the module does not have
    origins: dict[str, list[str]]  # the name, dtype and shape of the source arrays for each leaf
    idle: list[str]  # the expressions of rules with a leaf that matched no name


def assign(
    arrays: Mapping[str, np.ndarray], rename: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Assigned:
    """Apply the rules of `load_weights` to the arrays of a source, given the shape of each leaf of the module.

    Raises:
        ArgumentError: An expression is invalid, or a rule cannot be applied to an array that it matches.
        CheckpointError: Two arrays are assigned to the same leaf, or an array of a stack is missing.
    """
    rules, idle = _compiled(rename), {pattern: 0 for pattern, rule in rename.items() if rule is not None}
    parts_of, origins = {}, {}  # by leaf: its parts by index, and the descriptions of their arrays
    for name, x in arrays.items():
        parts: list = [(name, None, x)]
        if match := next((match for pattern in rules if (match := pattern.fullmatch(name))), None):
            idle.pop(match.re.pattern, None)
            parts = [] if (rule := rules[match.re]) is None else rule.parts(match, x, shapes)
        for leaf, index, part in parts:
            known, names = parts_of.setdefault(leaf, {}), origins.setdefault(leaf, [])
            names.append(f"{name}: {x.dtype}{list(x.shape)}")
            if index in known or (known and (None in known or index is None)):
                raise CheckpointError(
                    f"{' and '.join(names[-2:])} are both assigned to {leaf}. Map each to its own leaf in rename=."
                )
            known[index] = part
    return Assigned({leaf: _joined(leaf, parts) for leaf, parts in parts_of.items()}, origins, list(idle))


def _compiled(rename: Mapping[str, Any]) -> dict[re.Pattern[str], WeightRule | None]:
    if not isinstance(rename, Mapping):
        raise ArgumentTypeError(f"rename= takes a mapping of regular expressions to rules, got {shown(rename)}.")
    rules = {}
    for pattern, rule in rename.items():
        if not (isinstance(pattern, str) and (rule is None or isinstance(rule, (str, WeightRule)))):
            raise ArgumentTypeError(
                f"rename= maps regular expressions to names of leaves, jl.WeightRule or None, got {pattern!r}: "
                f"{shown(rule)}."
            )
        try:
            rules[re.compile(pattern)] = WeightRule(rule) if isinstance(rule, str) else rule
        except re.error as error:
            raise ArgumentError(
                f"rename= has {pattern!r}, which is not a valid regular expression: {error}."
            ) from error
    return rules


def _joined(leaf: str, parts: Mapping[int | None, Any]) -> np.ndarray | Ranged | Stacked:
    if None in parts:
        return parts[None]
    if missing := {*range(len(parts))} - parts.keys():
        raise CheckpointError(
            f"{leaf} is a stack of {len(parts)} arrays with indices from {min(parts)} to {max(parts)}, and the index "  # type: ignore[type-var]
            f"{min(missing)} is missing."
        )
    stack = [parts[i] for i in range(len(parts))]
    if len(kinds := {f"{x.dtype}{list(x.shape)}" for x in stack}) > 1:
        raise CheckpointError(f"{leaf} is a stack of arrays of different shapes or dtypes: {', '.join(sorted(kinds))}.")
    if isinstance(first := stack[0], Ranged):
        shape = (len(stack), *first.shape)
        return Ranged(shape, first.dtype, lambda at: np.stack([x.read(at[1:]) for x in stack[_slice(at[0])]]))
    return Stacked(stack)
