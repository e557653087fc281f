"""The body of a compiled evaluation step, as a pure function of a state and a batch."""

from collections.abc import Callable
from typing import Any

import jax

from jaxlit.core.pure_module import PureModule
from jaxlit.core.reduction import reduce_outputs, share_of_metrics
from jaxlit.core.replica import Replica
from jaxlit.core.state import Layout


def eval_step(
    pure: PureModule, stage: str, loader: int | None, layout: Layout, wrap: Callable[..., Any]
) -> Callable[..., tuple[list[jax.Array], jax.Array | None, Any]]:
    """Return the body of a validation, test or predict step, which adds one batch to the metrics.

    It takes the replica; the flat state, which is only read; the metrics so far, (4, num_metrics) float32 of this
    replica, and () int32 batches seen; and the batch. It returns the new metrics, the batch's own table if a metric
    shows its steps, and what the user's step returned.

    Args:
        pure: The module taken apart.
        stage: "validation", "test" or "predict".
        loader: The `dataloader_idx` for a step that takes one, else None.
        layout: How a flat list becomes (counters, params, frozen, model_state).
        wrap: What the strategy makes of the user's step.
    """

    def run(
        replica: Replica, leaves: list[Any], sums: list[jax.Array], batch: Any
    ) -> tuple[list[jax.Array], jax.Array | None, Any]:
        (counters, *variables), (table, batch_idx) = layout.unflatten(leaves), sums
        body, batch = wrap(pure.body(stage, replica, loader)), replica.constrain_batch(batch)
        _, (_, values, weights, outputs) = body(*variables, batch, counters[0], counters[1], batch_idx)
        traced = pure.trace_of(stage, loader)
        metrics, how = traced.table, traced.reduction
        entry = metrics.entry(*share_of_metrics(replica, metrics, values, weights, how), replica.share)
        outputs = reduce_outputs(replica, outputs, how, traced.rows_of)
        return [metrics.add(table, entry), batch_idx + 1], entry if metrics.has_steps else None, outputs

    return run
