"""The arguments of a Trainer, checked and brought to one form."""

import dataclasses
import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optax

from jaxlit import checks as check
from jaxlit.core.precision import PRECISIONS
from jaxlit.core.stage import STAGES
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.shown import shown

_UNBOUNDED = (None, -1)
_PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true"}  # Lightning's short words
# What a trial of a few batches does once, whatever the other arguments say.
_ONCE = {"max_epochs": 1, "min_steps": 0, "min_epochs": 0}
_ONCE |= {"num_sanity_val_steps": 0, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}


@dataclass(frozen=True)
class Settings:
    """The arguments of a `Trainer`, by their names; `jaxlit.Trainer` says what each means.

    A value that can be given in several ways has one form here: no limit of epochs is None, a duration is a timedelta.
    The properties follow from several arguments.

    Raises:
        ArgumentError: A value is out of its set, or does not fit another.
        ArgumentTypeError: A value has the wrong type.
    """

    strategy: Any = "auto"
    devices: int | str = "auto"
    mesh: Any = None
    precision: str = "32-true"
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: Any = None
    callbacks: Any = None
    logger: Any = True
    limit_train_batches: int | float = 1.0
    limit_val_batches: int | float = 1.0
    limit_test_batches: int | float = 1.0
    limit_predict_batches: int | float = 1.0
    overfit_batches: int | float = 0.0
    fast_dev_run: int = 0
    num_sanity_val_steps: int = 2
    val_check_interval: Any = 1.0
    check_val_every_n_epoch: int | None = 1
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    log_every_n_steps: int | str = "auto"
    reload_dataloaders_every_n_epochs: int = 0
    enable_checkpointing: bool = True
    enable_progress_bar: bool = True
    enable_model_summary: bool = True
    default_root_dir: str | Path | None = None
    resume: Any = None
    seed: int = 0
    nan_policy: str = "raise"
    prefetch: int | str = "auto"
    host_keys: tuple[str | int, ...] = ()
    max_recompiles: int | None = None
    data_timeout: Any = None
    hang_timeout: Any = None
    max_in_flight: int | str = "auto"
    compile_cache: bool | str | Path = True
    debug: bool = False

    def __post_init__(self) -> None:
        """Check each value, and then what several say together."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, value in (given | _checked(given)).items():
            object.__setattr__(self, name, value)
        _check_combinations(self)

    def of_trial(self) -> "Settings":
        """Return what a `fast_dev_run` makes of them: a few batches of everything, once."""
        once = _ONCE | {"max_steps": self.fast_dev_run}
        return dataclasses.replace(self, **once) if self.fast_dev_run else self

    @property
    def device_count(self) -> int | None:
        """How many devices were asked for, None for all."""
        return None if self.devices == "auto" else int(self.devices)

    @property
    def least(self) -> tuple[int, int]:
        """The epochs and the steps before which a stop does not end training."""
        steps = self.min_steps or 0
        # As in Lightning: a least number of steps alone also keeps the first epoch going.
        return (1 if steps else 0) if self.min_epochs is None else self.min_epochs, steps

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
        return limits | (
            dict.fromkeys(("training", "validation"), self.overfit_batches) if self.overfit_batches else {}
        )

    @property
    def clip(self) -> optax.GradientTransformation | None:
        """What is done to gradients before the optimizer; None for nothing."""
        if self.gradient_clip_val is None:
            return None
        by_value = self.gradient_clip_algorithm == "value"
        return (optax.clip if by_value else optax.clip_by_global_norm)(self.gradient_clip_val)

    @property
    def intake(self) -> dict[str, Any]:
        """The arguments of the check of batches."""
        return {"host_keys": self.host_keys, "max_recompiles": self.max_recompiles, "debug": self.debug}

    @property
    def timeouts(self) -> tuple[float | None, float | None]:
        """The seconds after which a wait for data, and anything at all, counts as hanging."""
        return self.data_timeout, self.hang_timeout

    def steps_in_flight(self, devices: int) -> int:
        """Return how many steps may be dispatched and not finished on so many devices."""
        if self.debug:
            return 1
        if isinstance(self.max_in_flight, int):
            return self.max_in_flight
        return 32 if devices == 1 else 4  # unbounded, several CPU devices would end the process


def _as_here(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with Lightning's other words for a precision and a number of devices in place."""
    precision, devices = given["precision"], given["devices"]
    if type(precision) in (int, str):
        precision = _PRECISIONS.get(str(precision), precision)
    if type(devices) in (int, str) and str(devices) == "-1":
        devices = "auto"
    elif isinstance(devices, str) and devices.isdecimal():  # as a shell gives it
        devices = int(devices)
    elif isinstance(devices, (list, tuple)):
        raise ArgumentTypeError(
            f"Trainer(devices={devices}) takes an int, or 'auto' for all. CUDA_VISIBLE_DEVICES in the environment "
            f"says which, or a mesh: Trainer(mesh=jax.make_mesh(({len(devices)},), ('data',), devices=[...]))."
        )
    return given | {"precision": precision, "devices": devices}


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are checked one by one."""
    given, checked = _as_here(given), dict[str, Any]()
    if isinstance(windows := given["accumulate_grad_batches"], dict):
        raise ArgumentTypeError(
            f"Trainer(accumulate_grad_batches=...) takes an int of at least 1, got {shown(windows)}. Pass "
            f"callbacks=jl.callbacks.GradientAccumulationScheduler({shown(windows)}) for numbers that change by epoch."
        )
    for name, low in (
        ("max_steps", -1),
        ("num_sanity_val_steps", -1),
        ("accumulate_grad_batches", 1),
        ("reload_dataloaders_every_n_epochs", 0),
        ("seed", 0),
    ):
        checked[name] = check.integer(name, given[name], low=low)
    for name, low, special in (
        ("max_epochs", 0, _UNBOUNDED),
        ("min_epochs", 0, (None,)),
        ("min_steps", 0, (None,)),
        ("check_val_every_n_epoch", 1, (None,)),
        ("max_recompiles", 0, (None,)),
        ("devices", 1, ("auto",)),
        ("log_every_n_steps", 0, ("auto",)),
        ("prefetch", 0, ("auto",)),
        ("max_in_flight", 1, ("auto",)),
    ):
        checked[name] = check.integer(name, given[name], low=low, also=special)
    names = ("overfit_batches", *(stage.limit for stage in STAGES.values()))
    checked |= {name: check.limit(name, given[name]) for name in names}
    for name, check_value in (
        ("gradient_clip_val", check.positive),
        ("data_timeout", check.seconds),
        ("hang_timeout", check.seconds),
    ):
        checked[name] = None if given[name] is None else check_value(name, given[name])
    trial = given["fast_dev_run"]
    checked["fast_dev_run"] = int(trial) if isinstance(trial, bool) else check.integer("fast_dev_run", trial, low=0)
    allowed = f"takes one of {', '.join(map(repr, PRECISIONS))}; the mixed ones keep weights and optimizer in float32"
    check.require(given["precision"] in PRECISIONS, "precision", given["precision"], allowed, owner="Trainer")
    checked["precision"] = given["precision"]
    policies = ("raise", "skip", "rollback", "ignore")
    checked["nan_policy"] = check.one_of("nan_policy", given["nan_policy"], policies)
    if given["gradient_clip_algorithm"] is not None:
        check.one_of("gradient_clip_algorithm", given["gradient_clip_algorithm"], ("norm", "value"))
    if given["max_time"] is not None:
        checked["max_time"] = datetime.timedelta(seconds=check.duration("max_time", given["max_time"]))
    checked["val_check_interval"] = check.interval("val_check_interval", given["val_check_interval"])
    checked["debug"] = check.boolean("debug", given["debug"])
    checked["host_keys"] = check.keys("host_keys", given["host_keys"])
    for name, others, rule in (
        ("default_root_dir", (type(None),), "takes a path"),
        ("compile_cache", (bool,), "takes True, False or a path"),
    ):
        if not isinstance(folder := given[name], (str, Path, *others)):
            raise ArgumentTypeError(f"Trainer({name}=...) {rule}, got {shown(folder)}.")
    return checked


def _check_combinations(s: Settings) -> None:
    """Refuse values that do not fit each other.

    Raises:
        ArgumentError: Naming the two.
    """
    if s.check_val_every_n_epoch is None and isinstance(s.val_check_interval, float):
        raise ArgumentError(
            f"Trainer(check_val_every_n_epoch=None, val_check_interval={s.val_check_interval}) counts across epochs, "
            "where a fraction has no meaning. Give val_check_interval as an int or a duration."
        )
    if s.min_epochs is not None and s.max_epochs is not None and s.min_epochs > s.max_epochs:
        raise ArgumentError(
            f"Trainer(min_epochs={s.min_epochs}, max_epochs={s.max_epochs}): the least is more than the most. Lower "
            "min_epochs."
        )
    if (s.min_steps or 0) > s.max_steps >= 0:
        raise ArgumentError(
            f"Trainer(min_steps={s.min_steps}, max_steps={s.max_steps}): the least is more than the most. Lower "
            "min_steps."
        )
    if s.gradient_clip_algorithm is not None and s.gradient_clip_val is None:
        raise ArgumentError(
            f"Trainer(gradient_clip_algorithm={s.gradient_clip_algorithm!r}) clips nothing without gradient_clip_val. "
            "Pass it, or leave both out."
        )
    for stage in ("training", "validation") if s.overfit_batches else ():
        name = STAGES[stage].limit
        if (limit := getattr(s, name)) != 1.0 or not isinstance(limit, float):
            raise ArgumentError(
                f"Trainer(overfit_batches={s.overfit_batches}, {name}={limit}) names two limits. Leave {name} out."
            )
    _check_resume(s)


def _check_resume(s: Settings) -> None:
    if s.resume is None:
        return
    if not isinstance(s.resume, (str, Path)) or not str(s.resume):
        raise ArgumentTypeError(f"Trainer(resume=...) takes 'auto', a path or None, got {shown(s.resume)}.")
    if s.resume in ("last", "best"):
        raise ArgumentError(
            f"Trainer(resume={s.resume!r}): 'auto' continues from the newest checkpoint in default_root_dir. Pass it, "
            f"a path, or fit(ckpt_path={s.resume!r})."
        )
    if s.resume == "auto" and s.default_root_dir is None:
        raise ArgumentError(
            "Trainer(resume='auto') continues what is in default_root_dir, and there is none. Pass "
            "Trainer(default_root_dir=...)."
        )
    if s.fast_dev_run:
        raise ArgumentError(
            f"Trainer(resume={str(s.resume)!r}, fast_dev_run={s.fast_dev_run}): a trial of a few batches starts again. "
            "Leave one of them out."
        )
