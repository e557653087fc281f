"""Traces a user's step before it is compiled: what it logs, returns and writes, and what replicas make of it."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica, is_row, num_rows, with_rows
from jaxlit.core.replica_rules import StepTraces, share_evaluation, share_training
from jaxlit.core.stage import STAGES
from jaxlit.core.state import TrainState
from jaxlit.strategies.base import Strategy


def trace_step(
    pure: PureModule,
    strategy: Strategy,
    state: TrainState,
    stage: str,
    loader: int | None,
    inspect: Callable[..., None],
    batch: Any,
) -> None:
    """Trace a stage's step as it will run, and note what it does.

    Args:
        pure: The module taken apart, which keeps the notes.
        strategy: The strategy.
        state: The state, abstract.
        stage: The stage.
        loader: The loader, for a step that asks for it.
        inspect: Looks at the step, given the replica and the arguments of its body.
        batch: The first batch.
    """
    states = (state.params, state.frozen, state.model_state, state.counters)
    batch = strategy.part_of(batch) if stage == "training" else batch
    programs: list[tuple[Any, ...]] = []  # the program, its arguments and its results, for each number of rows

    def keep(replica: Replica, *args: Any) -> None:
        arguments = _arguments(replica, *args)
        program, results = jax.make_jaxpr(pure.body(stage, replica, loader), return_shape=True)(*arguments)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        programs.append((program, shapes, results))
        traced, rows = pure.trace_of(stage, loader), num_rows(arguments[3])
        pairs = zip(traced.rows_of, jax.tree.leaves(results[1][3]), strict=True)
        traced.rows_of = tuple(was and is_row(x, rows) for was, x in pairs)

    if strategy.replica.splits:
        strategy.trace(keep, states, batch)
        # With twice the rows: what differs then, in shapes and numbers, comes from them. One row alone could be any
        # array's only one.
        rows, least = num_rows(batch), strategy.num_replicas
        with contextlib.suppress(Exception):  # the step may take this very number only
            for factor in (2, 4) if rows <= least else (2,):
                strategy.trace(keep, states, with_rows(batch, factor * max(rows, least)))
    strategy.trace(lambda replica, *args: inspect(replica, *_arguments(replica, *args)), states, batch)
    if strategy.replica.splits and strategy.num_replicas > 1:
        (program, shapes, results), longer = programs[-2:] if len(programs) > 1 else (programs[0], (None,))
        traces = StepTraces(program, longer[0], shapes, results, f"{pure.name}.{STAGES[stage].step}")
        _share(pure, strategy.replica, stage, loader, traces)


def _arguments(replica: Replica, params: Any, frozen: Any, model_state: Any, counters: Any, batch: Any) -> Any:
    return (params, frozen, model_state, replica.constrain_batch(batch), *counters[:3])


def _share(pure: PureModule, replica: Replica, stage: str, loader: int | None, traces: StepTraces) -> None:
    """Note how what the replicas compute becomes what one device computes."""
    traced = pure.trace_of(stage, loader)
    if stage == "training":
        leaves = pure.leaves(*traces.arguments[:3])
        traced.sharing = share_training(traces, replica, leaves, traced.changed, traced.rows_of)
    else:
        traced.sharing = share_evaluation(traces, replica, traced.rows_of)
