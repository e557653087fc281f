"""The arrays of a module as nnx splits them: in Variables, in attributes, and in pytrees that either holds.

What is no array there, a number, a text or None in a Variable, is a `Constant` of the state: it belongs to the
programs that are compiled of the module, and no step changes it. Here and elsewhere nnx is called with graph=True, as
the default of flax may be its tree mode, in which no two layers share a Variable.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlit.texts import is_key, keys_of, leaf_name


@jax.tree_util.register_static
class Constant:
    """A leaf of a module's state that is no array.

    Args:
        value: The value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant) or type(self.value) is not type(other.value):
            return False
        try:
            return self.value is other.value or bool(self.value == other.value)
        except Exception:  # of the value's own class
            return False

    def __hash__(self) -> int:
        try:
            return hash((type(self.value), self.value))
        except TypeError:
            return hash(type(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


class _Entries:
    """A mapping that a Variable holds, which nnx would take for a part of the module."""

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self.mapping = mapping


def _entries_of(x: _Entries) -> tuple[Any, Any]:
    entries, structure = jax.tree.flatten_with_path(x.mapping, is_leaf=lambda value: value is not x.mapping)
    return [(path[0], value) for path, value in entries], structure


jax.tree_util.register_pytree_with_keys(_Entries, _entries_of, lambda structure, x: _Entries(structure.unflatten(x)))


def is_array(x: Any) -> bool:
    """Return whether a value is an array, or the shape and dtype of one."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def fits(old: Any, new: Any) -> bool:
    """Return whether an array may take the place of another: of the same shape, and dtype but for its precision."""
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (old, new))
    return old.shape == new.shape and (floats or old.dtype == new.dtype)


def is_variable(x: Any) -> bool:
    """Return whether a value is an `nnx.Variable`."""
    return isinstance(x, nnx.Variable)


def split(module: nnx.Module, *filters: Any) -> tuple[Any, ...]:
    """Return the graph of a module, and a state of raw arrays and constants for each filter, see `nnx.split`."""
    graphdef, *states = nnx.split(module, *filters, graph=True)
    states = jax.tree.map(_raw, states, is_leaf=is_variable)
    return graphdef, *jax.tree.map(lambda x: x if is_array(x) else Constant(x), states)


def merge(graphdef: Any, *states: Any) -> Any:
    """Return a module of a graph and of what `split` returned for it, with Variables of its own.

    It has shapes where the states have shapes, but for arrays in pytrees: there nnx takes a shape for no array, and
    they are zeros of numpy that take no memory.
    """
    values = jax.tree.map(_value_of, states, is_leaf=is_constant)
    module = nnx.merge(graphdef, *values, copy=True)
    if any(map(_is_entries, jax.tree.leaves(values, is_leaf=_is_entries))):
        for _, x in nnx.iter_graph(module, graph=True):
            if is_variable(x) and _is_entries(x.get_raw_value()):
                x.set_raw_value(x.get_raw_value().mapping)
    shapes = {leaf_name(path[1:]): x for path, x in jax.tree_util.tree_leaves_with_path(states) if is_shape(x)}
    for leaf in leaves_of(module) if shapes else ():
        if leaf.name in shapes and leaf.variable is not None:
            leaf.place.set_raw_value(shapes[leaf.name])
    return module


def _raw(x: Any) -> Any:
    value = x.get_raw_value() if is_variable(x) else x
    return _Entries(value) if isinstance(value, Mapping) else value


def _is_entries(x: Any) -> bool:
    return isinstance(x, _Entries)


def _value_of(x: Any) -> Any:
    if is_shape(x) and is_key(x):
        data = jax.eval_shape(jax.random.key_data, x)
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=impl_of(x))
    if is_shape(x):
        return np.broadcast_to(np.zeros((), x.dtype), x.shape)
    return x.value if isinstance(x, Constant) else x


def impl_of(key: Any) -> Any:
    """Return the implementation of a random key, or of the shape of one, of which only a trace knows it."""
    impls: list[Any] = []
    jax.eval_shape(lambda x: impls.append(jax.random.key_impl(x)), key)
    return impls[0]


def is_shape(x: Any) -> bool:
    """Return whether a value is the shape and dtype of an array."""
    return isinstance(x, jax.ShapeDtypeStruct)


def numbers_in(states: Sequence[Any]) -> dict[str, bool | int | float]:
    """Return the constants of states that are numbers, by their paths: a checkpoint has them."""
    leaves = jax.tree_util.tree_leaves_with_path(states, is_leaf=is_constant)
    constants = {leaf_name(path[1:]): x.value for path, x in leaves if is_constant(x)}
    return {name: x for name, x in constants.items() if isinstance(x, (bool, int, float))}


def is_constant(x: Any) -> bool:
    """Return whether a value is a `Constant`."""
    return isinstance(x, Constant)


class ArrayAttribute:
    """An array that a module holds without a Variable, read and set like one.

    Args:
        owner: The module, or a part of it.
        name: The attribute's name, or its index in an `nnx.List`.
    """

    def __init__(self, owner: nnx.Pytree, name: Any) -> None:
        self._attributes, self._name = vars(owner), str(name)

    def get_raw_value(self) -> Any:
        """Return the array."""
        return self._attributes[self._name]

    def set_raw_value(self, array: Any) -> None:
        """Put another array in its place."""
        self._attributes[self._name] = array  # not by setattr, which asks the Trainer whether it may


class Element:
    """An array in a pytree that a Variable or an attribute holds, read and set like a Variable.

    Args:
        holder: The Variable, or the `ArrayAttribute`.
        index: Which leaf of the pytree it is.
    """

    def __init__(self, holder: Any, index: int) -> None:
        self._holder, self._index = holder, index

    def get_raw_value(self) -> Any:
        """Return the array."""
        return jax.tree.leaves(self._holder.get_raw_value(), is_leaf=is_variable)[self._index]

    def set_raw_value(self, array: Any) -> None:
        """Put another array in its place, in a new pytree: many of them cannot be written to."""
        leaves, treedef = jax.tree.flatten(self._holder.get_raw_value(), is_leaf=is_variable)
        leaves[self._index] = array
        self._holder.set_raw_value(treedef.unflatten(leaves))


class ModuleLeaf(NamedTuple):
    """A leaf of a module's state."""

    path: tuple[Any, ...]  # the keys of its place in the module
    place: Any  # the Variable, `ArrayAttribute` or `Element` that holds it
    variable: nnx.Variable | None  # that it is in
    value: Any

    @property
    def name(self) -> str:
        """Its path as a user writes it."""
        return leaf_name(self.path)


def arrays_of(module: nnx.Module, *filters: Any) -> list[ModuleLeaf]:
    """Return the arrays of a module in the order of the states that `split` returns for the filters."""
    return [leaf for leaf in leaves_of(module, *filters) if is_array(leaf.value)]


def leaves_of(module: nnx.Module, *filters: Any) -> Iterator[ModuleLeaf]:
    """Yield the arrays and constants of a module in the order of the states that `split` returns for the filters."""
    _, *states = nnx.split(module, *filters, graph=True)
    nodes = functools.cache(lambda: dict(nnx.iter_graph(module, graph=True)))  # walked only if a leaf is in no Variable
    for state in states:
        for keys, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_variable):
            path = tuple(keys_of(keys))
            if not isinstance(leaf, nnx.Variable):
                yield ModuleLeaf(path, _place(nodes(), path), None, leaf)
            elif is_array(value := leaf.get_raw_value()):
                yield ModuleLeaf(path, leaf, leaf, value)
            else:
                for i, (inner, x) in enumerate(jax.tree_util.tree_leaves_with_path(value)):
                    yield ModuleLeaf((*path, *keys_of(inner)), Element(leaf, i) if inner else leaf, leaf, x)


def _place(nodes: dict[Any, Any], path: Sequence[Any]) -> ArrayAttribute | Element:
    """Return the place of a leaf that is in no Variable."""
    depth = next(i for i in range(len(path) - 1, -1, -1) if isinstance(nodes.get(tuple(path[:i])), nnx.Pytree))
    attribute, rest = ArrayAttribute(nodes[tuple(path[:depth])], path[depth]), path[depth + 1 :]
    if not rest:
        return attribute
    leaves = jax.tree_util.tree_leaves_with_path(attribute.get_raw_value(), is_leaf=is_variable)
    return Element(attribute, [leaf_name(keys) for keys, _ in leaves].index(leaf_name(rest)))
