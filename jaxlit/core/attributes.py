"""The plain attributes of a module, which no compiled step changes, and the modules that functions in them hide.

At the end: notes on what a user's step raises while it is traced.
"""

import functools
import traceback
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.errors import CallCompactUnboundModuleError, TraceContextError

from jaxlit.core.module import Hparams
from jaxlit.errors import ModuleError, StateError, add_note
from jaxlit.faces import advice
from jaxlit.sharding import note_mesh
from jaxlit.texts import leaf_name, shown
from jaxlit.values import is_omegaconf
from jaxlit.variables import fits, is_array

# What train() and eval() set: a step may switch a part of its module.
MODES = {"deterministic", "use_running_average", "decode"}
CONTAINERS = (list, tuple, set, dict, deque)
_COPIED = (*CONTAINERS, OrderedDict, defaultdict, Hparams)
# The attributes of its own that nnx adds to a module, and to an `nnx.List`.
_OF_NNX = frozenset(vars(nnx.Module()))
_OF_NNX_LIST = frozenset(vars(nnx.List([])))


def each_attribute(module: nnx.Module, *, of: type = object) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each plain attribute of a module, its sub-modules and objects that they hold, if the owner is `of` a type.

    Yields:
        The path of the attribute, the dict that contains it, and its name there.
    """
    for path, node in list(nnx.iter_graph(module, graph=True)):
        if isinstance(node, nnx.Variable) or not (isinstance(node, of) and hasattr(node, "__dict__")):
            continue
        if not _OF_NNX.isdisjoint(path):
            continue
        for name, value in list(vars(node).items()):
            if not (name in MODES or name in _OF_NNX or isinstance(value, (nnx.Variable, nnx.Pytree))):
                yield leaf_name((*path, name)), vars(node), name


def list_changes(before: nnx.Module, after: nnx.Module) -> str:
    """Return the attributes that were added, removed and set between two states of a module, outermost ones alone."""
    old, new, verbs = _structure(before), _structure(after), {}
    for name in sorted(old | new):
        if name not in old or name not in new:
            verbs[name] = "removed" if name in old else "added"
        elif not same(old[name], new[name]):
            verbs[name] = "set"
    outer = [x for x in verbs if not any(x.startswith((f"{y}.", f"{y}[")) for y in verbs)]
    return ", ".join(f"{verbs[name]} {name}" for name in outer)


def _structure(module: nnx.Module) -> dict[str, Any]:
    """Return each attribute of a module and its parts by path: its value, or its type where it contains arrays."""
    attributes = {}
    for path, node in nnx.iter_graph(module, graph=True):
        for name, value in vars(node).items() if isinstance(node, nnx.Pytree) else ():
            if name not in (_OF_NNX_LIST if isinstance(node, nnx.List) else _OF_NNX):
                key = int(name) if isinstance(node, nnx.List) else name
                has_shape = hasattr(value, "shape") and not isinstance(value, (nnx.Variable, nnx.Pytree))
                kind = jax.Array if has_shape else type(value) if nnx.has_data(value) else value
                if isinstance(value, nnx.Variable):  # with what is in it, where that is no array
                    kind = [type(value), *(x for x in jax.tree.leaves(value.get_raw_value()) if not is_array(x))]
                attributes[leaf_name((*path, key))] = kind
    return attributes


def copied(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Return a value with copies of the containers in it, and everything else as it is."""
    # Each once, as containers may refer to each other.
    seen = {} if seen is None else seen
    if type(value) not in _COPIED:
        return value
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, tuple):
        return tuple(copied(x, seen) for x in value)
    copy = seen[id(value)] = value.copy()
    if not isinstance(value, set):
        for key, x in value.items() if isinstance(value, dict) else enumerate(value):
            copy[key] = copied(x, seen)
    return copy


def same(a: Any, b: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Return whether two values are the same: what their class calls equal, containers if the same is in them.

    An array is the same as itself alone.
    """
    seen = set() if seen is None else seen
    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b) or isinstance(a, (jax.Array, np.ndarray, nnx.Variable, nnx.Pytree)):
        return False
    if type(a) in _COPIED and len(a) != len(b):
        return False
    seen.add((id(a), id(b)))
    try:
        if type(a) in _COPIED and not isinstance(a, set):
            keys = a.keys() if isinstance(a, dict) else range(len(a))
            return (not isinstance(a, dict) or keys == b.keys()) and all(same(a[key], b[key], seen) for key in keys)
        (leaves, structure), (others, other) = jax.tree.flatten(a), jax.tree.flatten(b)
        if jax.tree_util.treedef_is_leaf(structure):
            return bool(a == b)
        return structure == other and all(same(x, y, seen) for x, y in zip(leaves, others, strict=True))
    except Exception:  # of the values' own class
        return False


_NOTHING = object()


class AttributesOfStep:
    """Looks at what a step writes to the plain attributes of its module, which no compiled step changes.

    Args:
        module: The copy of the module that the step runs on. Containers are copied as well, so that a traced value
            that the step appends is not left in the user's module.
    """

    def __init__(self, module: nnx.Module) -> None:
        self._before, seen = {}, {}
        for path, attributes, name in each_attribute(module, of=nnx.Pytree):
            self._before[path] = attributes[name]
            attributes[name] = copied(attributes[name], seen)

    def dropped(self, module: nnx.Module, step: str, *, training: bool) -> list[str]:
        """Return the attributes in which the step has left what does not outlast it.

        Those are arrays, where there were none of their structure before, and in an evaluation all values.
        """
        names = []
        for path, attributes, name in each_attribute(module, of=nnx.Pytree):
            before, after = self._before.get(path, _NOTHING), attributes[name]
            if same(before, after) or _is_next(before, after):
                continue
            has_array = any(isinstance(x, jax.Array) for x in _leaves(after))
            if training and before is not _NOTHING and before is not None and not has_array:
                raise StateError(
                    f"{step} changed the attribute {path} to {shown(after)}. A step is traced once, so the change "
                    "would happen once and be lost: make it an nnx.Variable, return it as an output, or log it "
                    "with self.log."
                )
            names.append(path)
        return names


def _is_next(before: Any, after: Any) -> bool:
    """Return whether an attribute holds arrays like those before, which are part of the state."""
    (old, structure), (new, other) = jax.tree.flatten(before), jax.tree.flatten(after)
    are_arrays = bool(old) and structure == other and all(map(is_array, (*old, *new)))
    return are_arrays and all(map(fits, old, new))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what is in a value, also in a deque or a set."""
    for x in jax.tree.leaves(value):
        if isinstance(x, (deque, set)):
            yield from (inner for item in x for inner in _leaves(item))
        else:
            yield x


# Whose objects hold no module of a user's.
_LIBRARIES = ("builtins", "flax", "jax", "jaxlib", "jaxlit", "numpy", "optax")


_PLAIN = (bool, int, float, complex, str, bytes, type, type(None), ModuleType, nnx.Rngs, nnx.RngStream)


_MOST = 10_000  # objects in an attribute


def check_hidden(module: nnx.Module, step: str, is_used: Callable[[Any], bool]) -> None:
    """Refuse a step that calls a function or plain object which holds Variables where nnx does not see them.

    A copy of the module calls the function with the original, whose arrays are then compiled into the step and never
    trained.

    `step` is for the message; `is_used` returns whether the step has used the value of a Variable.
    """
    for name, attributes, key in each_attribute(module, of=nnx.Pytree):
        value = attributes[key]
        for hidden, variables in _hidden(value):
            if not any(is_used(x.get_raw_value()) for x in variables):
                continue
            kind = "function" if callable(value) else type(value).__name__
            article = "an nnx." if isinstance(hidden, nnx.Variable) else "the module "
            raise ModuleError(
                f"{step} uses {type(module).__name__}.{name}, a {kind} that holds {article}{type(hidden).__name__}, "
                "which nnx does not see there: its weights would be constants of the compiled step, and not trained. "
                "Make the layer an attribute of the module, and write a method that calls it (def f(self, x): return "
                "self.layer(x)) or an nnx.Sequential. Leave out a layer that stays frozen by jl.Optimizer(wrt=...)."
            )


def hide_values(module: nnx.Module) -> None:
    """Leave shapes in the Variables that `check_hidden` finds: the trace that has made their arrays ends."""
    for _, attributes, key in each_attribute(module, of=nnx.Pytree):
        for variable in [x for _, variables in _hidden(attributes[key]) for x in variables]:
            leaves, treedef = jax.tree.flatten(variable.get_raw_value())
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x for x in leaves]
            variable.set_raw_value(treedef.unflatten(shapes))


def _hidden(value: Any) -> Iterator[tuple[Any, list[nnx.Variable]]]:
    """Yield the modules and Variables that a function or plain object in a value holds, with the Variables in each."""
    todo, seen = [(value, False)], dict[tuple[int, bool], Any]()  # with whether nnx cannot see it
    while todo and len(seen) < _MOST:
        value, inside = todo.pop()
        if (id(value), inside) in seen or isinstance(value, _PLAIN):
            continue
        seen[id(value), inside] = value  # also to keep it, as another object could get its id
        parts: Iterable[Any] = ()
        if is_omegaconf(value):
            continue  # it holds no module, and reading a value that is missing raises
        if isinstance(value, (Mapping, *CONTAINERS)):
            parts = value.values() if isinstance(value, Mapping) else value
        elif isinstance(value, (nnx.Variable, nnx.Pytree)):
            if inside:
                yield value, [x for _, x in nnx.iter_graph(value, graph=True) if isinstance(x, nnx.Variable)]
        elif isinstance(value, functools.partial):
            inside, parts = True, (value.func, value.args, value.keywords)
        elif isinstance(value, MethodType):
            inside, parts = True, (value.__self__,)
        elif isinstance(value, FunctionType):
            around = (cell.cell_contents for cell in value.__closure__ or () if cell != CellType())  # not an empty one
            inside, parts = True, (*around, value.__defaults__, value.__kwdefaults__)
        elif callable(value) or type(value).__module__.partition(".")[0] not in _LIBRARIES:
            inside, parts = True, (getattr(value, "__dict__", {}),)
        todo += [(part, inside) for part in parts]


LINEN_AS_NNX = "self.net = nnx.bridge.ToNNX(Net(), rngs=rngs).lazy_init(x), with x as a batch has it"
RETURN_THE_LOSS = (
    "The Trainer takes the optimizer's step, with the gradient of the loss that training_step returns: return the loss "
    "alone, and the transform from configure_optimizers: return optax.adam(1e-3). To take all steps yourself, return "
    "jax.lax.stop_gradient(loss) and optax.set_to_zero(), or write a loop of your own with jl.compile_step."
)

_TRACED = (
    "A step is traced with arrays that have no values yet: Python's if, float, range and numpy need some. Use "
    "jnp.where, jax.lax.cond or jnp in their place, log arrays as they are, or look at values under jax.disable_jit()."
)
_NUMPY = "Functions of jax have the arguments of numpy: axis= and keepdims= in place of dim= and keepdim=."
# The kind of an error, what its message contains, and the note.
_NOTES: tuple[tuple[Any, str, str], ...] = (
    (CallCompactUnboundModuleError, "", f"A linen module has no variables of its own. Give it some: {LINEN_AS_NNX}."),
    (
        TypeError,
        "unsupported format string passed to",
        "A step is traced once, without numbers. Print by jax.debug.print('{:.3f}', x), or self.log it.",
    ),
    (NotImplementedError, "array.view()", "An array's view() is not a tensor's. In its place: x.reshape(shape)."),
    (
        TypeError,
        "'int' object is not callable",
        "If this was x.size(): size is no method of arrays. In its place: x.shape.",
    ),
    (TypeError, "argument 'dim'", _NUMPY),
    (TypeError, "argument 'keepdim'", _NUMPY),
    (TraceContextError, "Cannot mutate Opt", f"An optimizer of nnx was updated in the step. {RETURN_THE_LOSS}"),
    (
        TraceContextError,
        "",
        "A step may change the Variables of its own module only. A layer that is held by a closure, by a global or by "
        "an object that is no nnx.Module is not part of it: make the layer an attribute of the module, and call it in "
        "a method.",
    ),
    ((jax.errors.JAXTypeError, jax.errors.JAXIndexError), "", _TRACED),
)


def note_step_error(error: Exception, step: str, batch: Any) -> None:
    """Note on what a traced step, `Model.training_step`, raised: the batch, the layer, and what to write instead."""
    shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", batch)
    add_note(error, f"{step} was traced with a batch of {shapes}.")
    if layer := _layer_of(error):
        add_note(error, f"It was raised in {layer}.")
    if isinstance(error, AttributeError) and isinstance(error.obj, jax.Array):
        remedies = advice("jax.Array")
        name = str(error.name)
        if name in remedies:
            add_note(error, f"Arrays of jax have no {name}(). In its place: {remedies[name]}.")
    note_mesh(error, batch)
    for kind, words, note in _NOTES:
        if isinstance(error, kind) and words in str(error):
            add_note(error, note)


def _layer_of(error: Exception) -> str | None:
    """Return the path and the class of the innermost layer whose method raised an error."""
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Not isinstance, which reads an attribute: the Trainer's module would fetch its newest arrays, in a trace.
    layers = [x for x in frames if issubclass(type(x), nnx.Module)]
    if not layers:
        return None
    kind = type(layers[-1])
    name = f"{'nnx.' * kind.__module__.startswith('flax.nnx.')}{kind.__name__}"
    # None of a copy that a transform of nnx has made.
    path = next((path for path, node in nnx.iter_graph(layers[0], graph=True) if node is layers[-1]), None)
    return None if path == () else name if path is None else f"self.{leaf_name(path)} ({name})"
