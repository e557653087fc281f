"""The plain loop: nnx.value_and_grad inside nnx.jit, optax, and sums in numpy; nothing of jaxlit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sweeps.mixed.case import Case
from sweeps.mixed.net import LOGS, Net, data_of, make_net, make_tx, wrt_of
from sweeps.mixed.record import Record

CLIP = 0.1


def train(case: Case) -> Record:
    """Train a case by hand, as if it were never cut."""
    record, net = Record(), make_net(case)
    batches, val = data_of(case)
    gradient, update, evaluate = make_steps(case)
    for fit in range(2 if case.again else 1):
        opt_state, step = make_tx(case, case.steps_per_epoch).init(nnx.as_pure(nnx.state(net, wrt_of(case)))), 0
        for epoch in range(case.epochs):
            window, entries = [], []
            for i, batch in enumerate(batches[: case.num_batches]):
                loss, logs, grads = gradient(net, batch)
                rows = len(batch["x"])
                record.losses.append(float(loss))
                entries.append((rows, jax.device_get(logs)))
                window.append((rows, grads, float(logs["loss"][0])))
                if len(window) == case.accumulate or i + 1 == case.num_batches:
                    opt_state = update(net, opt_state, mean_of(window))
                    record.steps[fit, step] = float(np.average([w[2] for w in window], weights=[w[0] for w in window]))
                    step, window = step + 1, []
                due = (i + 1) % case.val_every == 0 if case.val_every else i + 1 == case.num_batches
                if case.val and due:
                    record.validations.append((step, validate(averaged(case, net, opt_state), evaluate, val)))
            record.epochs[fit, epoch] = add_up(entries)
        net = averaged(case, net, opt_state)
    record.take(net)
    return record


def averaged(case: Case, net: Net, opt_state: Any) -> Net:
    """Return the network as evaluations see it, and as it is after a fit."""
    if case.optimizer != "schedule_free":
        return net
    copy = nnx.clone(net)
    params = nnx.as_pure(nnx.state(net, wrt_of(case)))
    nnx.update(copy, optax.contrib.schedule_free_eval_params(opt_state, params))
    return copy


def make_steps(case: Case) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the compiled gradient, optimizer step and evaluation of a case; the first two change the network."""
    wrt, tx = wrt_of(case), make_tx(case, case.steps_per_epoch)

    def loss_of(net: Net, batch: Any) -> Any:
        return net.loss(batch) if case.precision == "32-true" else in_bfloat16(net, batch)

    @nnx.jit
    def gradient(net: Net, batch: Any) -> Any:
        differentiate = nnx.value_and_grad(
            loss_of, argnums=nnx.DiffState(0, wrt), has_aux=True, graph=True, graph_updates=True
        )
        (loss, logs), grads = differentiate(net, batch)
        return loss, logs, nnx.as_pure(grads)

    @nnx.jit
    def update(net: Net, opt_state: Any, grads: Any) -> Any:
        if case.clip == "norm":
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / norm), grads)
        if case.clip == "value":
            grads = jax.tree.map(lambda g: jnp.clip(g, -CLIP, CLIP), grads)
        params = nnx.as_pure(nnx.state(net, wrt))
        updates, opt_state = tx.update(grads, opt_state, params)
        nnx.update(net, jax.tree.map(lambda p, u: p + u, params, updates))
        return opt_state

    @nnx.jit
    def evaluate(net: Net, batch: Any) -> Any:
        # A copy: a validation changes nothing, neither state nor modes.
        copy = nnx.clone(net)
        copy.eval()
        return loss_of(copy, batch)[1]

    return gradient, update, evaluate


def in_bfloat16(net: Net, batch: Any) -> Any:
    """Return the loss computed in bfloat16, with everything that is no parameter kept as it is."""
    graphdef, params, rest = nnx.split(net, nnx.Param, ...)
    half = lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    copy = nnx.merge(graphdef, jax.tree.map(half, params), rest, copy=True)
    loss, logs = copy.loss(jax.tree.map(half, batch))
    nnx.update(net, nnx.state(copy, nnx.Not(nnx.Param)))
    return loss, logs


def mean_of(window: list[Any]) -> Any:
    """Return the mean of a window's gradients over its rows."""
    shares = [rows / sum(rows for rows, *_ in window) for rows, *_ in window]
    return jax.tree.map(lambda *gs: sum(x * g for x, g in zip(shares, gs, strict=True)), *[w[1] for w in window])


def validate(net: Net, evaluate: Callable[..., Any], loaders: list[list[Any]]) -> dict[str, float]:
    result = {}
    for i, loader in enumerate(loaders):
        suffix = f"/dataloader_idx_{i}" if len(loaders) > 1 else ""
        metrics = add_up([(len(batch["x"]), jax.device_get(evaluate(net, batch))) for batch in loader])
        result |= {f"val/{name}{suffix}": value for name, value in metrics.items()}
    return result


def add_up(entries: list[tuple[int, Any]]) -> dict[str, float]:
    result = {}
    for name, kind in LOGS.items():
        values = np.array([logs[name][0] for _, logs in entries], np.float64)
        weights = [rows if logs[name][1] is None else float(logs[name][1]) for rows, logs in entries]
        reduced = {"mean": lambda v, w: np.average(v, weights=w), "sum": lambda v, w: v.sum()}
        reduced |= {"max": lambda v, w: v.max(), "min": lambda v, w: v.min()}
        result[name] = float(reduced[kind](values, weights))
    return result
