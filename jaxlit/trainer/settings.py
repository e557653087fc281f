"""The Trainer's arguments about the loop, checked and brought to one form."""

from collections.abc import Mapping
from typing import Any

import optax

from jaxlit import checks as check
from jaxlit.errors import ArgumentError


def loop_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer's attributes that say how long to train and when to validate.

    Args:
        given: The Trainer's arguments by name.

    Raises:
        ArgumentError: A value is out of its set, or does not fit another.
    """
    max_epochs, max_steps = given["max_epochs"], check.integer("max_steps", given["max_steps"], low=-1)
    found: dict[str, Any] = {
        "max_epochs": None if max_epochs in (None, -1) else check.integer("max_epochs", max_epochs, low=0),
        "max_steps": max_steps,
        "max_time": None if given["max_time"] is None else check.duration("max_time", given["max_time"]),
        "num_sanity_val_steps": check.integer("num_sanity_val_steps", given["num_sanity_val_steps"], low=-1),
        "val_check_interval": check.interval("val_check_interval", given["val_check_interval"]),
    }
    found |= _least(given["min_epochs"], given["min_steps"], found["max_epochs"], max_steps)
    every = given["check_val_every_n_epoch"]
    found["check_val_every_n_epoch"] = None if every is None else check.integer("check_val_every_n_epoch", every, low=1)
    if every is None and isinstance(found["val_check_interval"], float):
        raise ArgumentError(
            f"Trainer(check_val_every_n_epoch=None, val_check_interval={given['val_check_interval']}) counts across "
            "epochs, where a fraction has no meaning. Give val_check_interval as an int or a duration."
        )
    for name, low in (
        ("accumulate_grad_batches", 1),
        ("log_every_n_steps", 0),
        ("reload_dataloaders_every_n_epochs", 0),
    ):
        found[name] = check.integer(name, given[name], low=low)
    return found


def batch_limits(given: Mapping[str, Any]) -> tuple[dict[str, int | float], int | float]:
    """Return the limits by stage, in batches or as a fraction, and `overfit_batches`.

    Args:
        given: The Trainer's arguments by name.

    Raises:
        ArgumentError: A value is out of its set, or two arguments limit the same loader.
    """
    short = {"training": "train", "validation": "val", "test": "test", "predict": "predict"}
    names = {stage: f"limit_{name}_batches" for stage, name in short.items()}
    limits = {stage: check.limit(name, given[name]) for stage, name in names.items()}
    overfit = check.limit("overfit_batches", given["overfit_batches"])
    if overfit:
        for stage in ("training", "validation"):
            if limits[stage] != 1.0 or not isinstance(limits[stage], float):
                raise ArgumentError(
                    f"Trainer(overfit_batches={overfit}, {names[stage]}={limits[stage]}) names two limits. "
                    f"Leave {names[stage]} out."
                )
            limits[stage] = overfit
    return limits, overfit


def fast_dev_run(value: Any) -> tuple[int, dict[str, Any]]:
    """Return the batches of a `fast_dev_run`, 0 for none, and the settings that it overrides."""
    count = int(value) if isinstance(value, bool) else check.integer("fast_dev_run", value, low=0)
    if not count:
        return 0, {}
    once = {"max_steps": count, "max_epochs": 1, "min_steps": 0, "min_epochs": 0}
    return count, once | {"num_sanity_val_steps": 0, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}


def clipping(value: Any, algorithm: Any) -> optax.GradientTransformation | None:
    """Return what `gradient_clip_val` and `gradient_clip_algorithm` do to gradients; None for nothing."""
    if algorithm is not None:
        check.one_of("gradient_clip_algorithm", algorithm, ("norm", "value"))
        if value is None:
            raise ArgumentError(
                f"Trainer(gradient_clip_algorithm={algorithm!r}) clips nothing without gradient_clip_val. Pass it, or "
                "leave both out."
            )
    if value is None:
        return None
    most = check.positive("gradient_clip_val", value)
    return optax.clip(most) if algorithm == "value" else optax.clip_by_global_norm(most)


def _least(min_epochs: Any, min_steps: Any, max_epochs: int | None, max_steps: int) -> dict[str, int]:
    steps = 0 if min_steps is None else check.integer("min_steps", min_steps, low=0)
    # As in Lightning: a least number of steps alone also keeps the first epoch going.
    default = 1 if steps else 0
    epochs = default if min_epochs is None else check.integer("min_epochs", min_epochs, low=0)
    if min_epochs is not None and max_epochs is not None and epochs > max_epochs:
        raise ArgumentError(
            f"Trainer(min_epochs={epochs}, max_epochs={max_epochs}): the least is more than the most. Lower min_epochs."
        )
    if steps > max_steps >= 0:
        raise ArgumentError(
            f"Trainer(min_steps={steps}, max_steps={max_steps}): the least is more than the most. Lower min_steps."
        )
    return {"min_epochs": epochs, "min_steps": steps}
