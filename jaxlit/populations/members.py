"""The members of a population: a module is built from each variation and split into its arrays and functions."""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxlit.callbacks.base import Callback
from jaxlit.core.hparams import share_hparams
from jaxlit.core.module import TrainModule, is_overridden
from jaxlit.core.optimizer_of import optimizer_of
from jaxlit.core.precision import Precision
from jaxlit.core.pure_module import PureModule
from jaxlit.core.state import Layout
from jaxlit.core.step_options import StepOptions
from jaxlit.engine.creation import check_variables
from jaxlit.engine.state import StateSpec
from jaxlit.engine.training import Training, training_of
from jaxlit.errors import ArgumentError, ArgumentTypeError, ModuleError, did_you_mean
from jaxlit.leaf_names import is_key
from jaxlit.populations.contents import argument_text, content_text
from jaxlit.populations.options import OWNER
from jaxlit.shown import shown
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.single import SingleDevice


@dataclass(frozen=True, eq=False)
class Member:
    """One training of a population.

    Attributes:
        index: The position of its variation.
        variation: The arguments of its module.
        contents: What they held before the module was built, as texts: see `content_text`.
        training: How its module is trained alone, on one device. It holds no array.
        like: The index of the first member with the same programs.
    """

    index: int
    variation: Mapping[str, Any]
    contents: Mapping[str, str]
    training: Training
    like: int

    @property
    def name(self) -> str:
        """The name of the member in messages."""
        return name_of(self.index, self.variation)

    @property
    def pure(self) -> PureModule:
        """The steps of its module as pure functions."""
        return self.training.pure

    @property
    def strategy(self) -> Strategy:
        """The strategy of one member alone."""
        return self.training.spec.strategy

    def with_spec(self, spec: StateSpec) -> "Member":
        """Return the member with another spec of its state."""
        return replace(self, training=replace(self.training, spec=spec))


class _OneMember(SingleDevice):
    """The strategy of one member: one device and no mesh. The program of all members has the mesh."""

    def in_mesh(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn


def name_of(index: int, variation: Mapping[str, Any]) -> str:
    """Return the name of a member in messages: `member 1 (seed=0, lr=0.1)`."""
    return f"member {index} ({', '.join(f'{key}={argument_text(value, 40)}' for key, value in variation.items())})"


def check_variations(make_module: Any, variations: Any) -> list[dict[str, Any]]:
    """Return the arguments of `make_module` for each member.

    Raises:
        ArgumentTypeError: `make_module` cannot be called, or `variations` is no list of dicts.
        ArgumentError: There is none, or `make_module` does not take an argument.
    """
    if not callable(make_module) or isinstance(make_module, nnx.Module):
        raise ArgumentTypeError(
            f"{OWNER}(make_module, ...) takes a subclass of jl.TrainModule or a function that returns a module, got "
            f"{shown(make_module)}. Each member has a module of its own."
        )
    if not isinstance(variations, (list, tuple)) or not all(isinstance(x, Mapping) for x in variations):
        raise ArgumentTypeError(
            f"{OWNER}(variations=...) takes a list of dicts, the arguments of make_module by name, got "
            f"{shown(variations)}. For seeds alone: [{{'seed': i}} for i in range(8)]."
        )
    if not variations:
        raise ArgumentError(f"{OWNER}(variations=...) takes at least one dict, got none.")
    parameters, takes_more = _parameters(make_module)
    known = [*parameters, *(["seed"] if "rngs" in parameters else [])]
    for i, variation in enumerate(variations):
        if unknown := [name for name in variation if name not in known and not takes_more]:
            raise ArgumentError(
                f"{OWNER}: {name_of(i, variation)} has {unknown[0]!r}, which {_name(make_module)} does not take."
                f"{did_you_mean(unknown[0], known)} It takes {', '.join(known) or 'nothing'}."
            )
    return [_arguments(parameters, name_of(i, variation), variation) for i, variation in enumerate(variations)]


def _parameters(make_module: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the names of the arguments of a function or class, and whether it takes others too."""
    if isinstance(make_module, partial):
        names, more = _parameters(make_module.func)
        # A variation may replace an argument of a partial, but a seed must not replace its rngs.
        return [x for x in names[len(make_module.args) :] if x != "rngs" or x not in make_module.keywords], more
    is_class = isinstance(make_module, type)
    # A class that hands on **kwargs takes what its base takes.
    makers = [x.__init__ for x in make_module.__mro__ if "__init__" in vars(x)] if is_class else [make_module]
    names, more = list[str](), True
    for make in makers:
        parameters = [*inspect.signature(make).parameters.values()][is_class:]
        names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not (more := any(p.kind is p.VAR_KEYWORD for p in parameters)):
            break
    return names, more


def _arguments(parameters: Sequence[str], member: str, variation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `make_module`: a seed makes the `rngs` of a module that takes them."""
    given = dict(variation)
    if "rngs" in parameters and "rngs" not in given:
        seed = given.get("seed", 0)
        try:
            given["rngs"] = nnx.Rngs(seed if is_key(seed) else operator.index(seed))  # flax takes no int of numpy
        except TypeError:
            raise ArgumentTypeError(f"{OWNER}: {member} takes an int as seed, got {shown(seed)}.") from None
        if "seed" not in parameters:
            given.pop("seed", None)
    return given


def _name(make_module: Any) -> str:
    make_module = getattr(make_module, "func", make_module)
    return getattr(make_module, "__qualname__", type(make_module).__name__)


class Built(NamedTuple):
    """A member, and the arrays of its module.

    Attributes:
        member: The member.
        layout: How the arrays become the module's trained, frozen and other variables.
        arrays: The arrays, on the host; random keys as raw data.
    """

    member: Member
    layout: Layout
    arrays: list[np.ndarray]


def build(
    make_module: Callable[..., Any], variations: Sequence[Mapping[str, Any]], precision: Precision
) -> Iterator[Built]:
    """Yield the members; each module is built when the iterator reaches it.

    Args:
        make_module: Returns a module.
        variations: The members' variations.
        precision: The dtypes.

    Raises:
        ModuleError: A module cannot be trained here.
    """
    strategy = _OneMember()
    strategy.setup(1)
    for i, given in enumerate(check_variations(make_module, variations)):
        contents = {name: content_text(x) for name, x in variations[i].items()}
        module = make_module(**given)
        check_module(module, _name(make_module))
        optimizer = optimizer_of(module)
        graphdef, state = nnx.split(module)
        # Without arrays: otherwise those of all modules would stay in memory next to the training state.
        origin = nnx.merge(graphdef, jax.tree.map(abstract, state))
        share_hparams(origin, module)
        pure = PureModule(nnx.graphdef(module), optimizer.wrt, origin, precision)
        variables = pure.split(module)
        layout = Layout(variables)
        training = training_of(origin, pure, strategy, StepOptions(optimizer))
        # Copies: an attribute may be an array of numpy that make_module fills again for the next member.
        arrays = list(map(np.array, jax.device_get(layout.flatten(variables))))
        yield Built(Member(i, dict(variations[i]), contents, training, i), layout, arrays)


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def check_module(module: Any, made_by: str) -> None:
    """Refuse what a population cannot train.

    Raises:
        ModuleError: `module` is not a module, or has hooks, which see one training.
    """
    if not isinstance(module, TrainModule):
        raise ModuleError(f"{OWNER}: {made_by} must return a jl.TrainModule, got {shown(module)}.")
    check_variables(module)
    if not is_overridden(module, "training_step"):
        raise ModuleError(f"{type(module).__name__} has no training_step. Define training_step(self, batch).")
    hooks = [name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
    hooks += ["configure_callbacks", "on_before_batch_transfer"]
    if has := [name for name in hooks if callable(getattr(type(module), name, None))]:
        raise ModuleError(
            f"{OWNER} calls no hooks, which see one training, and {type(module).__name__} has {has[0]}. Leave it out, "
            "or train each module with a Trainer. Rows of all members reach jl.fit_many(log=...)."
        )


def check_same_state(first: Member, member: Member) -> None:
    """Refuse a member whose arrays are not those of the first one.

    Raises:
        ArgumentError: Naming the array, with both shapes.
    """
    specs = [{name: f"{dtype}{list(shape)}" for name, shape, dtype in x.training.spec.entries} for x in (first, member)]
    names = [name for name in specs[0] | specs[1] if name != "sums"]  # of metrics, which are compared by their names
    for name in names:
        a, b = (spec.get(name, "nothing") for spec in specs)
        if a != b:
            raise ArgumentError(
                f"{OWNER}: all members must have the same arrays, and {name} is {a} in {first.name} and {b} in "
                f"{member.name}. Leave out what changes shapes, layers or the kind of optimizer, and call jl.fit_many "
                "once for each."
            )
    kinds = [x.training.spec.optimizer_kind for x in (first, member)]
    if kinds[0] != kinds[1] or first.training.spec.layout.treedef != member.training.spec.layout.treedef:
        raise ArgumentError(
            f"{OWNER}: all members must have the same kind of optimizer, and it is {kinds[0]} in {first.name} and "
            f"{kinds[1]} in {member.name}. Call jl.fit_many once for each."
        )
