"""Where the stages of a pipeline may end: marks in a model, from the user or after layers, and what is between them."""

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxlit.errors import ArgumentError, ArgumentTypeError, did_you_mean
from jaxlit.programs.costs import count_flops
from jaxlit.programs.jaxpr import bodies, equations, follow, params_of

T = TypeVar("T")

_PREFIX = "jaxlit.pipeline_yield:"
_calls: ContextVar[list[int] | None] = ContextVar("pipeline_yield", default=None)  # marks of this trace


def pipeline_yield(x: T) -> T:
    """Return `x`, and mark that a stage of a pipeline may end here: what is computed from it belongs to the next one.

    It does nothing but under `strategy="pipeline"`. Call it between layers, as often as you like: more marks than the
    strategy has stages are grouped.

    Args:
        x: An array or a pytree of arrays, of any shape and dtype.

    Example:
        >>> import jax.numpy as jnp, jaxlit as jl
        >>> jl.pipeline_yield(jnp.ones(3))
        Array([1., 1., 1.], dtype=float32)
    """
    if (calls := _calls.get()) is None:
        return x
    calls[0] += 1
    name = f"{_PREFIX}{calls[0]}"
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name) if isinstance(leaf, jax.Array) else leaf, x)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Let `pipeline_yield` leave marks in what is traced."""
    token = _calls.set([0])
    try:
        yield
    finally:
        _calls.reset(token)


def restart() -> None:
    """Number the marks from one again, so that two traces of one step are equal."""
    if (calls := _calls.get()) is not None:
        calls[0] = 0


def mark_of(eqn: Any) -> str | None:
    """Return the name of the mark that an equation is, None if it is none."""
    name = params_of(eqn).get("name")
    return name if isinstance(name, str) and name.startswith(_PREFIX) else None


class Segments(NamedTuple):
    """The stretches of a program between its marks."""

    after: dict[int, int]  # by the identity of each marking equation the stage of what is computed from it
    stages: list[int]  # of each segment


def segments_of(jaxpr: Any, num_stages: int, balance: Any) -> Segments:
    """Return the segments of a program, its calls written out, grouped into stages.

    `balance` is "count" for stages of as many segments, "flops" for stages of about as many operations, or how many
    segments each stage has.
    """
    marks, count = _number(jaxpr)
    if (parts := count + 1) < num_stages:
        raise ArgumentError(
            f"Pipeline cuts a model into {num_stages} stages, and its training_step has {count} marks, so "
            f"{parts} part{'s' * bool(count)}. Call jl.pipeline_yield(x) between layers, name the list of layers "
            "(layers='blocks'; each is marked where it is called, module(x)), or take fewer stages."
        )
    if balance == "flops":
        sizes = _by_cost(_costs(jaxpr, marks, parts), num_stages)
    elif balance == "count":
        # What follows a mark after the last layer goes to the last stage.
        sizes = [parts // num_stages + (stage >= num_stages - parts % num_stages) for stage in range(num_stages)]
    else:
        sizes = list(balance)
        if len(sizes) != num_stages or sum(sizes) not in (parts, parts - 1):
            raise ArgumentError(
                f"Pipeline(balance={balance!r}) says how many of the model's parts each stage has: {num_stages} "
                f"numbers whose sum is {parts}, or {parts - 1} where a mark is after the last layer: training_step "
                f"has {count} marks."
            )
    stages = [*(stage for stage, size in enumerate(sizes) for _ in range(size)), num_stages - 1][:parts]
    return Segments({mark: stages[segment] for mark, segment in marks.items()}, stages)


def _number(jaxpr: Any) -> tuple[dict[int, int], int]:
    """Return the segment after each mark, and how many marks there are."""
    segments, count, last = dict[int, int](), 0, None

    def rule(eqn: Any, operands: list[int]) -> list[int]:
        nonlocal count, last
        segment = max(operands, default=0)
        if (name := mark_of(eqn)) is not None:
            # The arrays of one call have its name, and so have those of a layer that jax traces once for several.
            if name != last or segment >= count:
                count += 1
            segments[id(eqn)] = segment = max(segment, count)
            last = name
        elif holds_mark(eqn):
            raise ArgumentError(
                f"Pipeline: jl.pipeline_yield is called inside a {eqn.primitive.name}, where a program cannot be cut. "
                "Call it between layers that Python runs one by one, or leave scans over layers out."
            )
        return [segment] * len(eqn.outvars)

    follow(jaxpr, [0] * len(jaxpr.invars), rule, 0)
    return segments, count


def holds_mark(eqn: Any) -> bool:
    """Return whether a mark is in the program that an equation runs."""
    return any(mark_of(x) is not None for inner in bodies(eqn) for x in equations(inner))


def _costs(jaxpr: Any, marks: dict[int, int], parts: int) -> list[int]:
    """Return the operations of each segment."""
    costs = [0] * parts

    def rule(eqn: Any, operands: list[int]) -> list[int]:
        segment = marks.get(id(eqn), max(operands, default=0))
        costs[segment] += count_flops(jaxpr.replace(eqns=[eqn])).count
        return [segment] * len(eqn.outvars)

    follow(jaxpr, [0] * len(jaxpr.invars), rule, 0)
    return costs


def _by_cost(costs: list[int], stages: int) -> list[int]:
    """Return how many segments each stage has so that the most expensive stage is as cheap as possible."""
    total = [0, *itertools.accumulate(costs)]

    @functools.cache
    def best(end: int, count: int) -> tuple[float, list[int]]:
        """Return the cost of the most expensive of so many stages, and how many segments each has."""
        if count == 1:
            return total[end], [end]
        begins = range(count - 1, end)
        cost, begin = min((max(best(begin, count - 1)[0], total[end] - total[begin]), begin) for begin in begins)
        return cost, [*best(begin, count - 1)[1], end - begin]

    return best(len(costs), stages)[1]


class Layers:
    """The layers of a model after which a stage may end.

    They are given by the path of a list of modules, "blocks" or "encoder.blocks", by paths of single ones, or as None.
    """

    def __init__(self, layers: str | Sequence[str] | None, *, owner: str) -> None:
        are_paths = isinstance(layers, Sequence) and all(isinstance(x, str) for x in layers)
        if layers is not None and not are_paths:  # a str is a sequence of str too
            raise ArgumentTypeError(
                f"{owner}(layers=...) takes the path of a list of modules, such as 'blocks', or paths of single ones, "
                f"got {layers!r}."
            )
        self.layers, self.owner = layers, owner

    def mark(self, module: Any) -> Any:
        """Let the layers of a module, a copy for one trace, mark what they return, and return the module."""
        restart()
        for layer in self._layers(module):
            # By its class, as Python looks up __call__ there; its paths and its state stay what they are.
            object.__setattr__(layer, "__class__", _marking(type(layer)))
        return module

    def _layers(self, module: Any) -> list[Any]:
        if is_list := isinstance(self.layers, str):
            named = self._at(module, self.layers)
            layers = [*named] if isinstance(named, Iterable) else [named]
        else:
            layers = [self._at(module, path) for path in self.layers or []]
        # Functions between the layers of a list cannot be marked, and nothing comes after the last.
        modules = [x for x in layers if isinstance(x, nnx.Module)]
        chosen = modules[:-1] if is_list else modules
        if self.layers is not None and not (chosen and all(map(callable, layers))):
            raise ArgumentError(
                f"{self.owner}(layers={self.layers!r}) names {', '.join(type(x).__name__ for x in layers)}. Give "
                "the path of a list of modules that are called one after the other, or the paths of modules."
            )
        return list({id(x): x for x in chosen}.values())  # one that is called twice marks both calls

    def _at(self, module: Any, path: str) -> Any:
        value = module
        for part in re.findall(r"[^.\[\]]+", path):
            try:
                value = value[int(part)] if part.isdecimal() else getattr(value, part)
            except (AttributeError, IndexError, KeyError, TypeError):
                hint = did_you_mean(part, dir(value))
                raise ArgumentError(
                    f"{self.owner}(layers={self.layers!r}): {type(module).__name__} has no {path}. Name an attribute "
                    f"that holds the layers.{hint}"
                ) from None
        return value


@functools.lru_cache(maxsize=256)
def _marking(cls: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return pipeline_yield(cls.__call__(self, *args, **kwargs))  # type: ignore[operator]

    return type(
        cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )
