"""One data-parallel step three ways: n devices simulated on one, n devices, and a loop by hand over n shards."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from kit.batches import random
from kit.by_hand import assert_same, params_of
from kit.journal import Losses
from kit.modules import Linear, module
from kit.trainers import fit, thinned

RATE = 0.1


def by_hand(batches: list[Any], count: int) -> tuple[list[float], Any]:
    """Train by a Python loop over shards: the mean of their gradients, one update a step."""
    params, losses = params_of(Linear()), []
    loss_of = lambda p, x, y: ((x @ p["['kernel']"] + p["['bias']"] - y) ** 2).mean()  # noqa: E731
    for batch in batches:
        shards = zip(np.split(batch["x"], count), np.split(batch["y"], count), strict=True)
        result = [jax.value_and_grad(loss_of)(params, *shard) for shard in shards]
        losses.append(float(np.mean([loss for loss, _ in result])))
        params = jax.tree.map(lambda p, *g: p - RATE * sum(g) / count, params, *(grads for _, grads in result))
    return losses, params


@pytest.mark.parametrize(
    ("strategy", "devices", "count"),
    thinned(
        [
            ("simulate:1", "auto", 1),
            ("simulate:4", "auto", 4),
            ("shard_map", 4, 4),
            ("pmap", 2, 2),
            ("simulate:8", "auto", 8),
        ],
        ("simulate:4", "auto", 4),
    ),
)
def test_a_step_is_one_update_on_the_mean_of_the_shards(strategy: str, devices: Any, count: int) -> None:
    model, losses, batches = module(base=Linear, tx=optax.sgd(RATE)), Losses(), random(4)
    trainer = fit(model, batches, None, losses, strategy=strategy, devices=devices)
    for shards in (count, 1):  # the full batch is the same
        expected, params = by_hand(batches, shards)
        np.testing.assert_allclose(losses.losses, expected, rtol=1e-5)
        assert_same(model, params)
    assert trainer.global_step == 4
