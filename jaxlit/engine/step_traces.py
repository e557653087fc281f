"""Traces a user's step before it is compiled: what it logs, returns and writes, and how replicas share it."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica, is_row, num_rows, with_rows
from jaxlit.core.replica_rules import StepTraces, reduction_of
from jaxlit.core.stage import STAGES
from jaxlit.core.state import TrainState
from jaxlit.strategies.base import Strategy


def trace_step(
    pure: PureModule,
    strategy: Strategy,
    state: TrainState,
    key: tuple[str, int | None],
    inspect: Callable[..., None],
    batch: Any,
) -> None:
    """Trace a stage's step as it will run, and note what it does.

    Args:
        pure: The module taken apart, which keeps the notes.
        strategy: The strategy.
        state: The state, abstract.
        key: The stage, and the loader for a step that asks for it.
        inspect: Looks at the step, given the replica and the arguments of its body.
        batch: The first batch.
    """
    states = (*state.variables, state.counters)
    (stage, loader), replica = key, strategy.replica
    batch = replica.part_of(batch) if stage == "training" else batch
    several = replica.splits and replica.count > 1
    traces = _of_replica(pure, strategy, states, key, batch) if several else None
    strategy.trace(lambda replica, *args: inspect(replica, *_arguments(replica, *args)), states, batch)
    if traces is None:
        return
    traced = pure.trace_of(stage, loader)
    leaves = pure.leaves(*traces.arguments[:3]) if stage == "training" else []
    traced.reduction = reduction_of(traces, replica, traced.rows_of, leaves, traced.changed)


def _of_replica(
    pure: PureModule, strategy: Strategy, states: Any, key: tuple[str, int | None], batch: Any
) -> StepTraces:
    """Return the program of a step for the rows of one replica, and for those of the batch, which one device sees."""
    (stage, loader), replicas = key, strategy.replica.count
    programs: list[tuple[Any, ...]] = []  # the program, its arguments and its results, for each number of rows

    def keep(replica: Replica, *args: Any) -> None:
        arguments = _arguments(replica, *args)
        program, results = jax.make_jaxpr(pure.body(stage, replica, loader), return_shape=True)(*arguments)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        programs.append((program, shapes, results))
        traced, rows = pure.trace_of(stage, loader), num_rows(arguments[3])
        triples = zip(traced.rows_of, *(jax.tree.leaves(x[1][3]) for x in (results, programs[0][2])), strict=True)
        traced.rows_of = tuple(was and is_row(x, rows) and x.shape[1:] == y.shape[1:] for was, x, y in triples)

    strategy.trace(keep, states, batch)
    rows = num_rows(programs[0][1][3])
    # What differs between the two, in shapes and numbers, comes from the rows. One row alone could be any array's only
    # one: then twice as many of both.
    with contextlib.suppress(Exception):  # the step may take this very number only
        for seen in (2, 2 * replicas) if rows == 1 else (rows * replicas,):
            strategy.trace(keep, states, with_rows(batch, seen * replicas))
    (program, shapes, results), longer = programs[-2:] if len(programs) > 1 else (programs[0], (None,))
    name, metrics = f"{pure.name}.{STAGES[stage].step}", pure.table(stage, loader).metrics
    return StepTraces(program, longer[0], shapes, results, name, metrics)


def _arguments(replica: Replica, params: Any, frozen: Any, model_state: Any, counters: Any, batch: Any) -> Any:
    return (params, frozen, model_state, replica.constrain_batch(batch), *counters[:3])
