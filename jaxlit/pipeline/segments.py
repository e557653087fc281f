"""From marks in a program to the stages of a pipeline."""

import functools
import itertools
from typing import Any, NamedTuple

from jax.extend.core import Literal

from jaxlit.errors import ArgumentError
from jaxlit.pipeline.marks import mark_of
from jaxlit.programs.flops import count_flops
from jaxlit.programs.jaxpr import bodies, equations, walk


class Segments(NamedTuple):
    """The stretches of a program between its marks.

    Attributes:
        after: By the identity of each marking equation the stage of what is computed from it.
        stages: The stage of each segment.
    """

    after: dict[int, int]
    stages: list[int]


def segments_of(jaxpr: Any, num_stages: int, balance: Any) -> Segments:
    """Return the segments of a program, grouped into stages.

    Args:
        jaxpr: The program, its calls written out.
        num_stages: Stages.
        balance: "count" for stages of as many segments, "flops" for stages of about as many operations, or how many
            segments each stage has.

    Raises:
        ArgumentError: There are too few marks, or one is inside a loop.
    """
    marks, count = _number(jaxpr)
    if count + 1 < num_stages:
        raise ArgumentError(
            f"Pipeline cuts a model into {num_stages} stages, and its training_step has {count} marks, so "
            f"{count + 1} part{'s' * bool(count)}. Call jl.pipeline_yield(x) between layers, name the list of layers "
            "(layers='blocks'; each is marked where it is called, module(x)), or take fewer stages."
        )
    parts = count + 1
    if balance == "flops":
        sizes = _by_cost(_costs(jaxpr, marks, parts), num_stages)
    elif balance == "count":
        sizes = _evenly(parts, num_stages)  # what follows a mark after the last layer goes to the last stage
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


def _segment_of(x: Any, values: dict[Any, int]) -> int:
    return 0 if isinstance(x, Literal) else values.get(x, 0)


def _number(jaxpr: Any) -> tuple[dict[int, int], int]:
    """Return the segment after each mark, and how many marks there are."""
    segments, count, last = dict[int, int](), 0, None

    def rule(eqn: Any, given: list[int]) -> list[int]:
        nonlocal count, last
        segment = max(given, default=0)
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

    walk(jaxpr.eqns, {}, rule, _segment_of)
    return segments, count


def holds_mark(eqn: Any) -> bool:
    """Return whether a mark is in the program that an equation runs."""
    return any(mark_of(x) is not None for inner in bodies(eqn) for x in equations(inner))


def _evenly(parts: int, stages: int) -> list[int]:
    return [parts // stages + (stage >= stages - parts % stages) for stage in range(stages)]


def _costs(jaxpr: Any, marks: dict[int, int], parts: int) -> list[int]:
    """Return the operations of each segment."""
    costs = [0] * parts

    def rule(eqn: Any, given: list[int]) -> list[int]:
        segment = marks.get(id(eqn), max(given, default=0))
        costs[segment] += count_flops(jaxpr.replace(eqns=[eqn])).count
        return [segment] * len(eqn.outvars)

    walk(jaxpr.eqns, {}, rule, _segment_of)
    return costs


def _by_cost(costs: list[int], stages: int) -> list[int]:
    """Return how many segments each stage has so that the most expensive stage is as cheap as possible."""
    total = [0, *itertools.accumulate(costs)]

    @functools.cache
    def best(end: int, count: int) -> tuple[float, int, list[int]]:
        """Return the cost of the most expensive of so many stages, where the last begins, and how many each has."""
        if count == 1:
            return total[end], 0, [end]
        begins = range(count - 1, end)
        cost, begin = min((max(best(begin, count - 1)[0], total[end] - total[begin]), begin) for begin in begins)
        return cost, begin, [*best(begin, count - 1)[2], end - begin]

    return best(len(costs), stages)[2]
