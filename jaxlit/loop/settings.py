"""The arguments of a Trainer, checked and brought to one form."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import optax

from jaxlit import checks as check
from jaxlit.core.module import STAGES
from jaxlit.core.train_state import PRECISIONS
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.texts import shown

_PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true"}  # Lightning's short words
NanPolicy = Literal["raise", "skip", "rollback", "ignore"]
ClipAlgorithm = Literal["norm", "value"]
# What a trial of a few batches does once, whatever the other arguments say.
_ONCE = {"max_epochs": 1, "min_steps": 0, "min_epochs": 0}
_ONCE |= {"num_sanity_val_steps": 0, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}


class Arguments:
    """The arguments of a `Trainer`, checked and brought to one form; `jaxlit.Trainer` says what each means."""

    strategy: Any
    devices: int | str
    mesh: Any
    precision: str
    max_epochs: int | None  # None for no limit
    min_epochs: int
    max_steps: int  # -1 for no limit
    min_steps: int
    max_time: timedelta | None
    callbacks: Any
    logger: Any
    limit_train_batches: int | float
    limit_val_batches: int | float
    limit_test_batches: int | float
    limit_predict_batches: int | float
    overfit_batches: int | float
    fast_dev_run: int
    num_sanity_val_steps: int
    val_check_interval: int | float | timedelta
    check_val_every_n_epoch: int | None
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    steps_per_execution: int | str
    log_every_n_steps: int | str
    reload_dataloaders_every_n_epochs: int
    enable_checkpointing: bool
    enable_progress_bar: bool
    enable_model_summary: bool
    default_root_dir: str | Path | None
    resume: str | Path | None
    seed: int
    nan_policy: str
    prefetch: int | str
    host_keys: tuple[str | int, ...]
    max_recompiles: int | None
    data_timeout: float | None  # seconds
    hang_timeout: float | None
    fail_timeout: float
    max_in_flight: int | str
    compile_cache: bool | str | Path
    debug: bool


class Settings(Arguments):
    """The arguments of a `Trainer`, frozen; the properties follow from several of them.

    Raises:
        ArgumentTypeError: A value has the wrong type.
    """

    arguments: dict[str, Any]  # as they were given

    def __init__(self, **arguments: Any) -> None:
        checked = {
            name: None if arguments[name] is None and name in _OPTIONAL else check_value(name, arguments[name])
            for name, check_value in _CHECKS.items()
        }
        vars(self).update(arguments, arguments=arguments, **checked)
        vars(self)["min_steps"] = self.min_steps or 0
        if self.min_epochs is None:  # as in Lightning a least number of steps alone keeps the first epoch going
            vars(self)["min_epochs"] = int(self.min_steps > 0)
        _check_combinations(self)
        if self.fast_dev_run:  # a few batches of everything, once, whatever the other arguments say
            vars(self).update(_ONCE, max_steps=self.fast_dev_run)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"trainer.settings is frozen. Set trainer.{name}.")

    def replace(self, name: str, value: Any) -> "Settings":
        """Return the settings with another value of an argument, as it is given."""
        return Settings(**{**self.arguments, name: value})

    @property
    def device_count(self) -> int | None:
        """How many devices were asked for, None for all."""
        return None if self.devices == "auto" else int(self.devices)

    @property
    def has_limit(self) -> bool:
        """Whether anything ends a training."""
        return self.max_epochs is not None or self.max_steps >= 0 or self.max_time is not None

    @property
    def limits(self) -> dict[str, int | float]:
        """By stage, how many batches of a loader are used, or which fraction of them."""
        if self.fast_dev_run:
            return dict.fromkeys(STAGES, self.fast_dev_run)
        limits = {name: getattr(self, stage.limit) for name, stage in STAGES.items()}
        overfitted = ("training", "validation") if self.overfit_batches else ()
        return limits | dict.fromkeys(overfitted, self.overfit_batches)

    @property
    def clip(self) -> optax.GradientTransformation | None:
        """What is done to gradients before the optimizer; None for nothing."""
        if self.gradient_clip_val is None:
            return None
        by_value = self.gradient_clip_algorithm == "value"
        return (optax.clip if by_value else optax.clip_by_global_norm)(self.gradient_clip_val)

    def steps_in_flight(self, devices: int) -> int:
        """Return how many steps may be dispatched and not finished on so many devices."""
        if self.debug:
            return 1
        if isinstance(self.max_in_flight, int):
            return self.max_in_flight
        return 32 if devices == 1 else 4  # unbounded, several CPU devices would end the process


def _devices(name: str, value: Any) -> int | str:
    if isinstance(value, (list, tuple)):
        raise ArgumentTypeError(
            f"Trainer(devices={value}) takes an int, or 'auto' for all. CUDA_VISIBLE_DEVICES in the environment "
            f"says which, or a mesh: Trainer(mesh=jax.make_mesh(({len(value)},), ('data',), devices=[...]))."
        )
    is_text = isinstance(value, str) and value.lstrip("-").isdecimal()  # as a shell gives it
    return check.integer(name, int(value) if is_text else value, low=1, also=("auto", -1))


def _folder(name: str, value: Any) -> Any:
    if not isinstance(value, str | Path | None):
        raise ArgumentTypeError(f"Trainer({name}=...) takes a path, a URL or None, got {shown(value)}.")
    return check.url(name, value)


def _int(low: int, *also: Any) -> Callable[[str, Any], Any]:
    return partial(check.integer, low=low, also=also)


_OPTIONAL = {"max_time", "gradient_clip_val", "gradient_clip_algorithm", "data_timeout", "hang_timeout"}
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "devices": _devices,
    "precision": lambda name, value: check.one_of(name, _PRECISIONS.get(str(value), value), PRECISIONS),
    "max_epochs": _int(0, None, -1),
    "min_epochs": _int(0, None),
    "max_steps": _int(-1),
    "min_steps": _int(0, None),
    "max_time": lambda name, value: timedelta(seconds=check.duration(name, value)),
    "overfit_batches": check.limit,
    **{stage.limit: check.limit for stage in STAGES.values()},
    "fast_dev_run": lambda name, value: int(value) if isinstance(value, bool) else check.integer(name, value, low=0),
    "num_sanity_val_steps": _int(-1),
    "val_check_interval": check.interval,
    "check_val_every_n_epoch": _int(1, None),
    "accumulate_grad_batches": _int(1),
    "gradient_clip_val": check.positive,
    "gradient_clip_algorithm": partial(check.one_of, allowed=get_args(ClipAlgorithm)),
    "steps_per_execution": _int(1, "auto"),
    "log_every_n_steps": _int(0, "auto"),
    "reload_dataloaders_every_n_epochs": _int(0),
    "default_root_dir": _folder,
    "resume": check.url,
    "seed": _int(0),
    "nan_policy": partial(check.one_of, allowed=get_args(NanPolicy)),
    "prefetch": _int(0, "auto"),
    "host_keys": check.keys,
    "max_recompiles": _int(0, None),
    "data_timeout": check.seconds,
    "hang_timeout": check.seconds,
    "fail_timeout": check.seconds,
    "max_in_flight": _int(1, "auto"),
    **dict.fromkeys(("debug", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), check.boolean),
}


def _check_combinations(s: Settings) -> None:
    """Refuse values that do not fit each other."""
    if s.check_val_every_n_epoch is None and isinstance(s.val_check_interval, float):
        raise ArgumentError(
            f"Trainer(check_val_every_n_epoch=None, val_check_interval={s.val_check_interval}) counts across epochs, "
            "where a fraction has no meaning. Give val_check_interval as an int or a duration."
        )
    if s.gradient_clip_algorithm is not None and s.gradient_clip_val is None:
        raise ArgumentError(
            f"Trainer(gradient_clip_algorithm={s.gradient_clip_algorithm!r}) clips nothing without gradient_clip_val. "
            "Pass it, or leave both out."
        )
    if s.resume == "auto" and s.default_root_dir is None:
        raise ArgumentError(
            "Trainer(resume='auto') continues what is in default_root_dir, and there is none. Pass "
            "Trainer(default_root_dir=...)."
        )
    if check.is_url(s.resume) and s.default_root_dir is None:
        raise ArgumentError(
            f"Trainer(resume={str(s.resume)!r}) without default_root_dir would continue in a folder of this machine "
            "that is copied nowhere. Pass Trainer(default_root_dir=...) as well: the URL of the run, or a folder."
        )
    if s.resume is not None and s.fast_dev_run:
        raise ArgumentError(
            f"Trainer(resume={str(s.resume)!r}, fast_dev_run={s.fast_dev_run}): a trial of a few batches starts again. "
            "Leave one of them out."
        )
