"""Training loops written by hand in plain nnx, jax and optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sweeps.models.case import Batch, Case, Logs, Trained


def by_hand(case: Case, batches: list[Batch], replicas: int | None = None) -> Trained:
    """Train by nnx.value_and_grad and nnx.Optimizer under nnx.jit; the step sees the whole batch.

    Args:
        case: Its module has the loss.
        batches: One a step.
        replicas: Not used: a loss that is a mean over rows has the same gradient in shares.
    """
    module = case.make()
    wrt = module.wrt
    optimizer = nnx.Optimizer(module, module.tx(), wrt=wrt)

    @nnx.jit
    def step(module: Any, optimizer: nnx.Optimizer, batch: Batch) -> Any:
        loss_of = nnx.value_and_grad(lambda m: m.losses(batch), argnums=nnx.DiffState(0, wrt), has_aux=True)
        (loss, logs), grads = loss_of(module)
        optimizer.update(module, grads)
        return loss, logs

    @nnx.jit
    def validate(module: Any, batch: Batch) -> jax.Array:
        return module.losses(batch)[0]

    kept = Trained()
    for batch in batches:
        keep_step(kept, *step(module, optimizer, batch))
        if case.validation is not None:
            kept.validated.append(_validated(validate, module, case.validation()))
    kept.keep_module(module)
    return kept


def _validated(validate: Any, module: nnx.Module, batches: list[Batch]) -> float:
    """Return the mean over the rows of all batches, on a copy in evaluation mode."""
    total = 0.0
    for batch in batches:
        copy = nnx.clone(module)
        copy.eval()
        total += float(validate(copy, batch)) * num_rows(batch)
    return total / sum(map(num_rows, batches))


def by_shards(case: Case, batches: list[Batch], replicas: int | None = None) -> Trained:
    """Train on the mean of what the shards of a batch give, in plain jax; a batch that does not divide is one shard.

    Floating state is the mean of the shards'. Only what a batch holds may be random, as each shard would draw the same.

    Args:
        case: Its loss couples the rows of a batch.
        batches: One a step.
        replicas: Shards of a batch that divides; None for the loop that sees whole batches.
    """
    if replicas is None:
        return by_hand(case, batches)
    module = case.make()
    tx = module.tx()
    graphdef, params, rest = nnx.split(module, module.wrt, ...)
    params, rest = nnx.as_pure(params), nnx.as_pure(rest)
    opt_state = tx.init(params)

    def of_shard(params: Any, rest: Any, shard: Batch) -> Any:
        copy = nnx.merge(graphdef, params, rest, copy=True)
        loss, logs = copy.losses(shard)
        return loss, logs, nnx.as_pure(nnx.split(copy, copy.wrt, ...)[2])

    @jax.jit
    def step(params: Any, rest: Any, opt_state: Any, batch: Batch) -> Any:
        count = replicas if num_rows(batch) % replicas == 0 else 1
        shards = jax.tree.map(lambda x: jnp.reshape(x, (count, -1, *x.shape[1:])), batch)

        def loss_of(params: Any) -> Any:
            losses, logs, rests = jax.vmap(of_shard, in_axes=(None, None, 0))(params, rest, shards)
            mean = lambda x: x.mean(0) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]  # noqa: E731
            return losses.mean(), ({k: _joined(v) for k, v in logs.items()}, jax.tree.map(mean, rests))

        (loss, (logs, new_rest)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new_rest, opt_state, loss, logs

    kept = Trained()
    for batch in batches:
        params, rest, opt_state, loss, logs = step(params, rest, opt_state, batch)
        keep_step(kept, loss, logs)
    nnx.update(module, params, rest)
    kept.keep_module(module)
    return kept


def _joined(logged: Any) -> Any:
    if isinstance(logged, tuple):
        values, weights = logged
        return (values * weights).sum() / weights.sum(), weights.sum()
    return logged.mean(0)


def keep_step(kept: Trained, loss: jax.Array, logs: Logs) -> None:
    """Keep what a step gave."""
    if "draws" in logs:
        kept.draws.append(np.asarray(logs.pop("draws")))
    kept.losses.append(float(loss))
    kept.metrics.append({k: float(v[0] if isinstance(v, tuple) else v) for k, v in logs.items()})


def num_rows(batch: Batch) -> int:
    """Return the rows of a batch."""
    return len(next(iter(batch.values())))
