"""The body of a compiled evaluation step, as a pure function of a state and a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxlit.core.pure_module import PureModule
from jaxlit.core.reduction import reduce_outputs, share_of_metrics
from jaxlit.core.replica import Replica, same
from jaxlit.core.state import Layout


@dataclass(frozen=True)
class EvalStep:
    """Builds the validation, test or predict step of a module.

    Args:
        pure: The module taken apart.
        stage: "validation", "test" or "predict".
        loader: The `dataloader_idx` of a step that takes one, else None.
        layout: How a flat list becomes (counters, params, frozen, model_state).
        wrap: What the strategy makes of the user's step.
    """

    pure: PureModule
    stage: str
    loader: int | None
    layout: Layout
    wrap: Callable[..., Any] = same

    def run(
        self, replica: Replica, leaves: list[Any], sums: list[jax.Array], batch: Any
    ) -> tuple[list[jax.Array], jax.Array | None, Any]:
        """Add one batch to the metrics; the state is only read.

        Args:
            replica: What this body sees.
            leaves: The flat state.
            sums: The metrics so far, (4, num_metrics) float32 of this replica, and () int32 batches seen.
            batch: The batch.

        Returns:
            The new `sums`, the batch's own table if a metric shows its steps, and what the step returned.
        """
        counters, params, frozen, model_state = self.layout.unflatten(leaves)
        step, epoch = counters[0], counters[1]
        batch = replica.constrain_batch(batch)
        table, batch_idx = sums
        body = self.wrap(self.pure.body(self.stage, replica, self.loader))
        _, (_, values, weights, outputs) = body(params, frozen, model_state, batch, step, epoch, batch_idx)
        metrics, traced = self.pure.table(self.stage, self.loader), self.pure.trace_of(self.stage, self.loader)
        entry = metrics.entry(*share_of_metrics(replica, metrics, values, weights, traced.reduction), replica.share)
        outputs = reduce_outputs(replica, outputs, traced.reduction, traced.rows_of)
        return [metrics.add(table, entry), batch_idx + 1], entry if metrics.has_steps else None, outputs
