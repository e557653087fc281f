"""What both sides share: the network with its loss, its batches, what is trained, and the optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sweeps.mixed import parts, writers
from sweeps.mixed.case import Case

# How an epoch adds up each name that the loss logs.
LOGS = {"loss": "mean", "error": "mean", "masked": "mean", "hits": "sum", "peak": "max", "low": "min"}


class Net(nnx.Module):
    def __init__(self, case: Case, *, rngs: nnx.Rngs) -> None:
        makers = parts.MAKERS | writers.MAKERS
        self.parts = nnx.List([makers[part](rngs) for part in case.parts])
        self.head = nnx.Linear(parts.WIDTH, 2, rngs=rngs)
        self.kind = case.loss

    def loss(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, tuple[jax.Array, Any]]]:
        """Return the loss, and by name a value with its weight, None for the number of rows."""
        x = batch["x"]
        for part in self.parts:
            x = part(x, batch)
        error = (self.head(x) - batch["y"]).astype(jnp.float32)
        rows, mask = jnp.mean(error**2, axis=-1), batch["m"].astype(jnp.float32)
        masked = (rows * mask).sum() / jnp.maximum(mask.sum(), 1)
        return {"mean": rows.mean(), "sum": rows.sum(), "masked_mean": masked}[self.kind], {
            "loss": (rows.mean(), None),
            "error": (jnp.abs(error).mean(), None),
            "masked": (masked, mask.sum()),
            "hits": ((rows < 0.5).sum().astype(jnp.float32), None),
            "peak": (rows.max(), None),
            "low": (rows.min(), None),
        }


def make_net(case: Case) -> Net:
    """Return the network of a case, with the same weights at each call."""
    return Net(case, rngs=nnx.Rngs(0, params=1, dropout=2))


def make_batches(sizes: tuple[int, ...], mask: str, seed: int) -> list[dict[str, np.ndarray]]:
    """Return batches of these sizes; some row of each is in the mask."""
    rng, batches = np.random.default_rng(seed), []
    for rows in sizes:
        kept = rng.random(rows) < {"full": 2.0, "some": 0.6, "half": 2.0}[mask]
        kept[0] = True
        kept[rows - rows // 2 :] &= mask != "half"
        x, y = (rng.normal(size=(rows, width)).astype(np.float32) for width in (parts.WIDTH, 2))
        ids, label = (rng.integers(0, most, rows).astype(np.int32) for most in (5, 2))
        batches.append({"x": x, "y": y, "m": kept.astype(np.float32), "ids": ids, "label": label})
    return batches


def data_of(case: Case) -> tuple[list[Any], list[list[Any]]]:
    """Return the training batches, and the batches of each validation loader."""
    train, *val = (make_batches(sizes, case.mask, seed) for seed, sizes in enumerate((case.sizes, *case.val)))
    return train, val


def wrt_of(case: Case) -> Any:
    return {
        "all": nnx.Param,
        "head": nnx.All(nnx.Param, nnx.PathContains("head")),
        "no_bias": nnx.All(nnx.Param, nnx.Not(nnx.PathContains("bias"))),
        "lora": nnx.LoRAParam,
        "online": nnx.All(nnx.Param, nnx.Not(nnx.PathContains("target"))),
    }[case.wrt]


def make_tx(case: Case, steps_per_epoch: int) -> Any:
    """Return the optimizer of a case.

    Where a gradient is divided by its own size, a large eps keeps rounding noise small.
    """
    rate: Any = {
        "": 0.05,
        "by_step": optax.exponential_decay(0.08, 1, 0.7),
        "by_epoch": optax.piecewise_constant_schedule(0.08, {steps_per_epoch: 0.25}),
    }[case.schedule]
    return {
        "sgd": lambda: optax.sgd(rate),
        "momentum": lambda: optax.sgd(rate, momentum=0.9, nesterov=True),
        "adamw": lambda: optax.adamw(rate, eps=1e-2, weight_decay=0.1),
        "inject": lambda: optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(
            learning_rate=rate, eps=1e-2
        ),
        "multi_transform": lambda: optax.multi_transform(
            {"b": optax.sgd(0.1), "w": optax.adam(0.02, eps=1e-2)}, lambda params: _by_name(params, "b", "w")
        ),
        "masked_decay": lambda: optax.chain(
            optax.add_decayed_weights(0.2, mask=lambda params: _by_name(params, False, True)), optax.sgd(0.05)
        ),
        "multi_steps": lambda: optax.MultiSteps(optax.sgd(0.1, momentum=0.9), every_k_schedule=2),
        "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
        "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4, eps=1e-3),
        "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.1),
    }[case.optimizer]()


def _by_name(params: Any, bias: Any, other: Any) -> Any:
    name = jax.tree_util.keystr
    return jax.tree_util.tree_map_with_path(lambda path, _: bias if "bias" in name(path) else other, params)
