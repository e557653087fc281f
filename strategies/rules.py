"""`Rules`, which split parameters by their paths, or by the names of their dims."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.sharding import axes_of
from jaxlit.texts import leaf_name, shown
from jaxlit.variables import is_array


class Rules:
    r"""Which mesh axes the dims of arrays are split over.

    A rule of a path is the partition of an array: `{r"attention\.(query|key)\.kernel$": P(None, "tp")}`, or a list with
    None or a list in it, as in YAML: `[null, tp]`, `[[tp]]`. The expression is searched for in the array's path in the
    module, such as `blocks[0].attention.query.kernel`, and the first match applies. A rule of a name has the mesh axes
    of a dim of this name, if the module names its dims (`nnx.with_partitioning`, `out_sharding`):
    `{"mlp": "tp", "vocab": ("tp", "fsdp"), "embed": None}`. A dim with the name of a mesh axis needs no rule. If two
    dims of an array have one axis, the first is split.

    Args:
        rules: By path or name, as above.
        owner: The strategy's name, for messages.

    Raises:
        ArgumentError: A path is no regular expression.
        ArgumentTypeError: A rule is neither a `PartitionSpec` nor mesh axes.

    Example:
        >>> import jaxlit as jl
        >>> from jax.sharding import PartitionSpec as P
        >>> rules = jl.strategies.Rules({r"up\.kernel$": P(None, "tp"), "embed": "fsdp"})
    """

    def __init__(self, rules: Mapping[str, Any] | None = None, *, owner: str = "Rules") -> None:
        self.owner, self.given = owner, rules or {}
        self.paths: dict[re.Pattern[str], P] = {}
        self.names: dict[str, tuple[str, ...]] = {}
        if not isinstance(rules, Mapping | None):
            raise ArgumentTypeError(f"{owner}(rules=...) takes a dict of paths or names of dims, got {shown(rules)}.")
        for key, value in self.given.items():
            if not isinstance(key, str):
                raise ArgumentTypeError(f"{owner}(rules=...) has a key that is no str: {key!r}.")
            if isinstance(value, MutableSequence):  # from YAML or a command line, which have no partitions or tuples
                is_path = not all(isinstance(x, str) for x in value)
                value = (
                    P(*(tuple(x) if isinstance(x, MutableSequence) else x for x in value)) if is_path else tuple(value)
                )
            axes = (value,) if isinstance(value, str) else value
            if isinstance(value, P):
                if P.UNCONSTRAINED in value:
                    raise ArgumentError(
                        f"{owner}(rules=...): the rule of {key!r} has an unconstrained dim: {value}. Use None."
                    )
                try:
                    self.paths[re.compile(key)] = value
                except re.error as error:
                    message = f"{owner}(rules=...): {key!r} is no regular expression: {error}."
                    raise ArgumentError(message) from error
            elif axes is None or (isinstance(axes, tuple) and all(isinstance(axis, str) for axis in axes)):
                self.names[key] = axes or ()
            else:
                raise ArgumentTypeError(
                    f"{owner}(rules={{{key!r}: {value!r}}}): a path takes a jax.sharding.PartitionSpec or a list, the "
                    "name of a dim takes a mesh axis, a tuple of them, or None."
                )

    def __repr__(self) -> str:
        return f"Rules({self.given})"

    def check(self, mesh: Mesh, paths: Sequence[str], names: Iterable[P] = ()) -> None:
        """Refuse rules that name no axis of the mesh, or a path that no array has.

        Args:
            mesh: The mesh.
            paths: The paths of all arrays.
            names: The names of the dims of arrays.

        Raises:
            ArgumentError: A rule cannot apply.
        """
        for key, axes in (*((k.pattern, axes_of(spec)) for k, spec in self.paths.items()), *self.names.items()):
            if unknown := [axis for axis in axes if axis not in mesh.axis_names]:
                raise ArgumentError(
                    f"{self.owner}(rules=...): the rule of {key!r} names {unknown[0]!r}, and the mesh has "
                    f"{dict(mesh.shape)}."
                )
        for pattern in self.paths:
            if not any(map(pattern.search, paths)):
                raise ArgumentError(
                    f"{self.owner}(rules=...): no parameter's path has {pattern.pattern!r}. They are named like "
                    f"{paths[0] if paths else 'blocks[0].kernel'!r}."
                )
        known = {name for spec in names for name in axes_of(spec)}
        if self.names and not known & self.names.keys():
            raise ArgumentError(
                f"{self.owner}(rules=...): no dim is named {' or '.join(map(repr, self.names))}; those that have names "
                f"are {sorted(known)}. Name dims by nnx.with_partitioning, or give a path and a PartitionSpec."
            )

    def sharding(self, path: str, x: Any, names: P, mesh: Mesh) -> NamedSharding | None:
        """Return the sharding of an array, or None if no rule applies.

        Args:
            path: The array's path in the module.
            x: The array, or its shape and dtype.
            names: The names of its dims, `P()` without names.
            mesh: The mesh.

        Raises:
            ArgumentError: A dim does not divide, or does not exist.
        """
        spec = next((spec for pattern, spec in self.paths.items() if pattern.search(path)), None)
        if spec is None:
            spec = self.of_names(names, mesh)
        if spec is None:
            return None
        if len(spec) > len(x.shape):
            raise ArgumentError(f"{self.owner}: {path} has shape {x.shape}, and is to be split by {spec}.")
        for dim, entry in enumerate(spec):
            parts = math.prod(mesh.shape[axis] for axis in axes_of(P(entry)))
            if x.shape[dim] % parts:
                raise ArgumentError(
                    f"{self.owner}: dim {dim} of {path} has {x.shape[dim]} elements, and is to be split by {spec} over "
                    f"{entry!r} into {parts}. Choose a size that divides, or a rule that does not split it."
                )
        return NamedSharding(mesh, spec)

    def of_names(self, names: P, mesh: Mesh) -> P | None:
        """Return the partition of an array whose dims have names, None if they are of another mesh."""
        if not any(name in self.names or name in mesh.axis_names for name in axes_of(names)):
            return None
        entries, used = [], set[str]()
        for entry in names:
            axes = [axis for name in axes_of(P(entry)) for axis in self.names.get(name, (name,))]
            axes = [axis for axis in axes if axis in mesh.axis_names and axis not in used]
            used |= set(axes)
            entries.append(axes[0] if len(axes) == 1 else tuple(axes) or None)
        return P(*entries)


def placed_by_names(rules: Rules, module: nnx.Module, parts: Any, mesh: Mesh, other: Callable[[Any], Any]) -> Any:
    """Return parts of a state with the shardings that the module gives to its arrays, and `other(leaf)` for the rest.

    Args:
        rules: The axes of names.
        module: The module, see `dim_names`; the types of its arrays count.
        parts: The parts.
        mesh: The mesh.
        other: A function of a leaf to its sharding.
    """
    names = dim_names(module, typed=True)

    def place(path: Any, x: Any) -> Any:
        spec = rules.of_names(names.get(leaf_name(path), P()), mesh)
        return other(x) if spec is None else NamedSharding(mesh, spec)

    return tuple(jax.tree.map_with_path(place, part) for part in parts)


def dim_names(module: nnx.Module, *, typed: bool = False) -> dict[str, P]:
    """Return the names that a module gives to the dims of its arrays, by path; arrays without names are left out.

    Args:
        module: The module; its Variables may hold shapes and dtypes in place of arrays.
        typed: Count the mesh axes in the type of an array as well: Explicit axes over which it is split.
    """
    state = nnx.state(module, graph=True)
    trees = [nnx.get_partition_spec(state)]
    if typed:
        trees.append(jax.tree.map(lambda x: jax.typeof(x).sharding.spec if is_array(x) else x, state))
    values = {}
    for path, x in (pair for tree in trees for pair in nnx.to_flat_state(tree)):
        spec = x.get_raw_value() if isinstance(x, nnx.Variable) else x
        if isinstance(spec, P) and axes_of(spec):
            values[leaf_name(path)] = spec
    return values
