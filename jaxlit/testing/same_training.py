"""The same training under every strategy, compared number by number."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from flax import nnx

from jaxlit import checks as check
from jaxlit.core.replica import num_rows
from jaxlit.data.datamodule import DataModule
from jaxlit.errors import ArgumentError
from jaxlit.testing.difference import PARTS, RTOL, assert_close
from jaxlit.testing.pairwise import pairwise
from jaxlit.testing.training import Training, by_path, train

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.strategies.base import Strategy

FACTORS: dict[str, Sequence[Any]] = {
    "accumulate_grad_batches": (1, 3),
    "gradient_clip_val": (None, 0.1),
    "precision": ("32-true", "bf16-mixed"),
}
"""Arguments of the Trainer that a strategy affects, each with values under which it must train equally."""

_NONE: Mapping[str, Sequence[Any]] = MappingProxyType({})


def assert_same_training(
    model_fn: "Callable[[], TrainModule]",
    data: Any,
    *,
    strategies: "Sequence[str | Strategy]",
    devices: Sequence[int] = (1, 2, 8),
    steps: int = 5,
    tx: optax.GradientTransformation | None = None,
    rtol: float | Mapping[str, float] = RTOL,
    compare: Sequence[str] = PARTS,
    reference: "Callable[..., Sequence[Any]] | None" = None,
    factors: Mapping[str, Sequence[Any]] = _NONE,
    **trainer_arguments: Any,
) -> dict[str, float]:
    """Assert that a model trains to the same numbers under every strategy as on a single device.

    Losses, logged metrics and first-step gradients agree under any optimizer. Parameters and other floating state
    agree under SGD or AdamW(eps=1e-3): under Adam with its default eps a parameter whose true gradient is zero moves
    by the sign of rounding noise. Whole numbers must be equal. Where all batches divide among the devices, a part of
    the first is put after them as one step more, so that a tail is trained on too. Strategies that run the step once
    a replica draw other random numbers than `single`; if the model draws some, they are compared with `simulate`, and
    `simulate` with `shard_map`, on as many replicas.

    Strategies share the steps that they compile, and with them a fault: only a loop of your own, `reference`, knows
    what the numbers should be.

    Args:
        model_fn: Returns a new module with the same weights at each call.
        data: A loader that gives the same batches each time, or a DataModule.
        strategies: Names or objects.
        devices: Device counts to run on; `single` runs on one.
        steps: Optimizer steps, without that of a tail.
        tx: The optimizer in place of the module's own.
        rtol: Tolerance relative to the largest magnitude: of the metric, or among all gradients or parameters. One
            number, or one for each precision.
        compare: Which of "loss", "metrics", "grads", "params"; the last is the module's entire state.
        reference: Trains a module in place on a list of batches, without a Trainer, and returns the loss of each
            batch; takes the value of each factor by its name. `single` is compared with it in losses and parameters.
        factors: Values of arguments of the Trainer, such as `FACTORS`. Each meets each value of the others, each
            strategy and each number of devices, in few trainings.
        **trainer_arguments: Other arguments of the Trainer.

    Returns:
        The largest difference of each training, relative as `rtol` is, by its name.

    Raises:
        AssertionError: Two trainings differ; it names them, the part and the difference.
        ArgumentError: An argument is out of its set, or nothing is compared.

    Example:
        >>> import jaxlit as jl, numpy as np
        >>> def check(model_fn):
        ...     data = jl.ArrayLoader({"x": np.ones((16, 2)), "y": np.ones((16, 1))}, 8)
        ...     jl.testing.assert_same_training(model_fn, data, strategies=["ddp"], factors=jl.testing.FACTORS)
    """
    given = {"tx": tx, **trainer_arguments}
    return _compare(model_fn, data, strategies, devices, steps, given, rtol, compare, reference, factors)


def _compare(
    model_fn: Any,
    data: Any,
    strategies: Sequence[Any],
    devices: Sequence[int],
    steps: int,
    given: dict[str, Any],
    rtol: float | Mapping[str, float],
    compare: Sequence[str],
    reference: Any,
    factors: Mapping[str, Sequence[Any]],
) -> dict[str, float]:
    """Train each pair of all that is given, `single` once for each case, and return the differences by name."""
    others, differences = [s for s in strategies if s != "single"], dict[str, float]()
    for name, values in factors.items():  # the letters of a str would be values too
        valid, rule = bool(values) and not isinstance(values, str), f"takes a sequence of values of {name!r}"
        check.require(valid, "factors", factors, rule, owner="assert_same_training")
    if not others and reference is None:
        raise ArgumentError(
            f"assert_same_training(strategies={list(strategies)}) has nothing to compare 'single' with. Name "
            "another strategy, or give a loop of your own as reference=."
        )

    def batches(case: dict[str, Any]) -> tuple[list[Any], int]:
        return _some_batches(data, steps * (given | case).get("accumulate_grad_batches", 1), devices)

    def run(strategy: Any, count: int | str, case: dict[str, Any]) -> Training:
        some, tails = batches(case)
        training = train(model_fn, some, strategy=strategy, devices=count, steps=steps + tails, **(given | case))
        return replace(training, name=", ".join([training.name, *(f"{k}={v}" for k, v in case.items())]))

    def compared(parts: Sequence[str], case: dict[str, Any], first: Training, other: Training) -> None:
        most = rtol[(given | case).get("precision", "32-true")] if isinstance(rtol, Mapping) else rtol
        difference = assert_close(parts, first, other, most)
        # Two objects of one class have one name.
        differences[other.name] = max(difference, differences.get(other.name, 0.0))

    singles: list[tuple[dict[str, Any], Training]] = []  # by case
    for case in pairwise({**({"devices": devices, "strategy": others} if others else {}), **factors}):
        strategy, count = case.pop("strategy", None), case.pop("devices", 1)
        if (single := next((x for of, x in singles if of == case), None)) is None:
            single = run("single", "auto", case)
            singles.append((case, single))
            if reference is not None:
                module = model_fn()
                losses = [float(x) for x in reference(module, batches(case)[0], **case)]
                state = nnx.as_pure(nnx.state(module, nnx.Not(nnx.Intermediate)))
                by_hand = Training("the reference", loss=losses, params=by_path(state))
                # A loop returns no other parts.
                compared([part for part in ("loss", "params") if part in compare], case, by_hand, single)
        if strategy is not None:
            other, kin = run(strategy, count, case), _kin_of(strategy) if single.random else None
            compared(compare, case, single if kin is None else run(kin, count, case), other)
    return differences


def _some_batches(data: Any, count: int, devices: Sequence[int]) -> tuple[list[Any], int]:
    """Return the first batches of a loader, repeated if it ends, and how many tails were added."""
    if isinstance(data, DataModule):
        data.setup("fit")
        data = data.train_dataloader()
    batches: list[Any] = []
    while len(batches) < count:
        some = list(itertools.islice(iter(data), count - len(batches)))
        if not some:
            raise ArgumentError("assert_same_training(data=...) gave no batch. Give a re-iterable loader.")
        batches += some
    several = [n for n in devices if n > 1]
    rows = num_rows(batches[0])
    if all(any(num_rows(batch) % n for batch in batches) for n in several) or rows == 1:
        return batches, 0
    size = next((r for r in range(rows - 1, 0, -1) if all(r % n for n in several)), rows - 1)
    return [*batches, jax.tree.map(lambda x: x[:size] if np.ndim(x) else x, batches[0])], 1


def _kin_of(strategy: Any) -> "Strategy | None":
    """Return another strategy that draws the same random numbers on as many replicas; None if they draw as `single`."""
    from jaxlit.strategies.registry import resolve_strategy
    from jaxlit.strategies.shard_map import ShardMapDDP
    from jaxlit.strategies.simulated import Simulated

    given: Any = resolve_strategy(strategy, None)
    if not given.per_replica:
        return None
    cls = ShardMapDDP if isinstance(given, Simulated) else Simulated
    return cls(**{name: getattr(given, name) for name in ("sync_batchnorm", "loss_reduction") if hasattr(given, name)})
