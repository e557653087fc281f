"""A plan: memory, traffic and time of a training step, for each strategy and number of devices.

Each row compiles one step, of a trial: a second Trainer, whose steps compute what those of the user's Trainer will.
For devices that are absent another process compiles it, for simulated ones (`jaxlit.trainer.plan_worker`).
"""

import copy
import logging
import operator
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import jax
from flax import nnx

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.core.module import STAGES, TrainModule
from jaxlit.core.replica import num_rows, with_rows
from jaxlit.data.loaders import DataModule
from jaxlit.data.watchdog import Watchdog
from jaxlit.distributed.job import JAX_SETTINGS
from jaxlit.engine.creation import lazy
from jaxlit.errors import ArgumentError, JaxlitError
from jaxlit.loop.hooks import overrides
from jaxlit.loop.run_data import batches_or_inf, make_loaders
from jaxlit.programs.costs import GPUS, Hardware, hardware_of, peak_of, resolve_hardware
from jaxlit.reporting.terminal import say
from jaxlit.sharding import out_of_meshes
from jaxlit.strategies.auto import Auto, candidates, memory_limit
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.registry import resolve_strategy
from jaxlit.texts import count, duration, size, table
from jaxlit.trainer.defaults import without
from jaxlit.trainer.properties import TrainerProperties
from jaxlit.trainer.refusals import check_model
from jaxlit.trainer.step_cost import StepCost, bytes_of_module, cost_of_step, explained, shapes_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("parameters", "optimizer", "gradients", "temporaries", "batch", "other")
_TAKEN = 0.75  # of a GPU's memory, which is jax's default
# XLA plans the memory before LLVM generates machine code, which nobody will run.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# The arguments that decide what a step computes.
_SAME = ("strategy", "devices", "mesh", "precision", "limit_train_batches", "overfit_batches", "seed", "prefetch")
_SAME += ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "host_keys", "max_recompiles")
_SAME += ("data_timeout", "hang_timeout", "max_in_flight", "compile_cache", "debug")
_SILENT = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
_logger = logging.getLogger("jaxlit")


@dataclass(frozen=True)
class PlanRow:
    """A training step under one strategy on one number of devices.

    Attributes:
        strategy: The strategy.
        devices: How many devices.
        batch_size: Rows of a batch, of all devices together.
        hardware: What one of them can do; None if it is not known.
        cost: What the step takes; None if the strategy refuses the model or the devices.
        error: Why, in that case.
    """

    strategy: str
    devices: int
    batch_size: int
    hardware: Hardware | None
    cost: StepCost | None
    error: str = ""

    @cached_property
    def bytes(self) -> dict[str, int]:
        """Bytes by kind on the device that holds the most: what they sum to is its use of memory.

        Gradients are what the compiled step keeps of them at the same time as its temporaries, at most all, and the
        window of `accumulate_grad_batches`.
        """
        if (cost := self.cost) is None:
            return {}
        gradients = min(cost.gradients, cost.temporaries)
        held = {"parameters": cost.parameters, "optimizer": cost.optimizer, "gradients": cost.window + gradients}
        return held | {
            "temporaries": cost.temporaries - gradients,
            "batch": cost.batch,
            "other": cost.other + cost.made,
        }

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return 0 if self.cost is None else self.cost.total

    @property
    def bound(self) -> str:
        """Whether a device uses at most ("<=") or at least (">=") the total, or the total itself ("").

        It is an upper bound where the step was compiled for CPUs in place of the hardware, and a lower bound for a
        pipeline, whose programs' own temporaries are not counted.
        """
        if self.cost is None or self.cost.memory is None or not self.cost.memory.exact:
            return ">="
        return "<=" if self.cost.device == "cpu" else ""

    @property
    def note(self) -> str:
        """What a run does with rows that do not divide among the devices, and what is on the hosts; "" for neither."""
        if self.cost is None:
            return ""
        hosts = f"{size(self.cost.on_host)} of the state are in the memory of the hosts." * (self.cost.on_host > 0)
        if not (parts := self.cost.undivided):
            return hosts
        work = "holds and computes" if self.cost.per_replica else "holds"
        return (
            f"{self.batch_size:,} rows do not divide into {parts} equal parts. Nothing is padded or dropped: every "
            f"device {work} all {self.batch_size:,}. {hosts}".rstrip()
        )

    @property
    def left(self) -> int | None:
        """Bytes of a device's memory that are left, negative if it does not fit; None if its size is not known."""
        if self.cost is None or self.hardware is None or self.hardware.memory is None:
            return None
        return int(self.hardware.memory) - self.total

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if the size of the memory is not known."""
        return None if self.left is None else self.left >= 0

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds that a step spends on products ("compute"), on its memory and on the network, at the hardware's peak.

        Roofline (Williams et al., 2009): operations over their peak, the bytes of arguments, results and temporaries,
        each moved once, over the memory's bandwidth, and the bytes sent over that of the links. The first two are lower
        bounds. So is the third, unless the step was compiled for CPUs: these reduce where accelerators reduce and
        scatter, and send 16-bit numbers as 32 bits, up to four times the bytes.
        """
        cost = self.cost
        row = self.hardware
        if cost is None or row is None:
            return {}
        seconds: dict[str, float] = {}
        if cost.flops is not None:
            peaks = {dtype: peak_of(row, dtype) or row.fast or row.half for dtype in cost.flops.by_dtype}
            times = [n / peaks[dtype] for dtype, n in cost.flops.by_dtype.items() if peaks[dtype]]  # type: ignore[operator]
            seconds["compute"] = sum(times) / cost.devices
        if cost.memory is not None and row.bandwidth is not None:
            moved = cost.memory.arguments + cost.memory.outputs + 2 * cost.memory.temporaries
            seconds["memory"] = moved / row.bandwidth
        if cost.collectives is not None and row.link is not None:
            pairs = [pair for x in cost.collectives for pair in x.sent_by_span.items()]
            seconds["network"] = sum(sent / (row.link if span <= row.node else row.network) for span, sent in pairs)
        return seconds

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        """Seconds of a step if everything overlaps, from and to; both the same unless it was compiled for CPUs."""
        if not self.seconds:
            return None
        longest = max(self.seconds.values())
        sure = [seconds for name, seconds in self.seconds.items() if name != "network" or self.bound != "<="]
        return max(sure, default=longest), longest

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        cost = self.cost
        flops = None if cost is None or cost.flops is None else cost.flops.count
        collectives = () if cost is None or cost.collectives is None else cost.collectives
        sent = {x.kind: {"calls": x.calls, "bytes": x.bytes, "sent": x.sent} for x in collectives}
        row: dict[str, Any] = {name: getattr(self, name) for name in ("strategy", "devices", "batch_size")}
        row |= {kind: self.bytes.get(kind) for kind in KINDS} | {
            "total": self.total if self.bytes else None,
            "bound": self.bound,
        }
        row |= {"fits": self.fits, "left": self.left, "flops": flops, "collectives": sent}
        row |= {f"{name}_seconds": self.seconds.get(name) for name in ("compute", "memory", "network")}
        return row | {"step_seconds": self.step_seconds, "note": self.note or None, "error": self.error or None}


@dataclass(frozen=True)
class Plan:
    """What `Trainer.plan` returns; printed, it is a table.

    Attributes:
        plans: The rows, in the order in which strategies and devices were given.
    """

    plans: tuple[PlanRow, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Return each row as a dict of plain values, bytes and seconds."""
        return [row.as_dict() for row in self.plans]

    @property
    def best(self) -> PlanRow | None:
        """The first row that fits; None if none is known to fit."""
        return next((row for row in self.plans if row.fits), None)

    def __str__(self) -> str:
        known = [row for row in self.plans if row.cost is not None]
        blocks = [_table(known), _collectives(known), _notes(self.plans)]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    __repr__ = __str__

    def plot(self) -> "Figure":
        """Draw the bytes of a device, stacked by kind, for each strategy and number of devices.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            LoggerError: matplotlib is not installed.
        """
        matplotlib = check.import_package("matplotlib.figure", owner="Plan.plot", install="matplotlib")
        known = [row for row in self.plans if row.cost is not None]
        figure = matplotlib.Figure(layout="constrained", figsize=(1.5 + max(len(known), 3), 4))
        axes = figure.add_subplot(ylabel="GiB per device")
        places = range(len(known))
        bottom = [0.0] * len(known)
        for kind in KINDS:
            heights = [row.bytes[kind] / 2**30 for row in known]
            axes.bar(places, heights, bottom=bottom, label=kind)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        for memory in {row.hardware.memory for row in known if row.hardware is not None and row.hardware.memory}:
            axes.axhline(memory / 2**30, color="black", linestyle="--", linewidth=1)
        axes.set_xticks(places, [f"{row.strategy}\n{row.devices}" for row in known])
        axes.legend()
        return figure


@out_of_meshes
def make_plan(
    trainer: Any,
    model: TrainModule | lazy,
    data: Any,
    *,
    devices: int | Sequence[int] | None,
    strategies: Sequence[str | Strategy] | None,
    hardware: str | Hardware | None,
    batch_size: int | None,
    rows_per_device: int | None,
    timeout: float,
) -> Plan:
    """Return a plan; see `Trainer.plan`."""
    owner = "Trainer.plan"
    if jax.process_count() > 1:
        raise ArgumentError(f"{owner} runs in one process, got {jax.process_count()}. Call it before the job starts.")
    check_model(model, STAGES["training"])
    counts: list[int | None] = [*devices] if isinstance(devices, Sequence) else [devices]
    asked = [trainer.settings.strategy] if strategies is None else strategies
    for name, values in (("devices", counts), ("strategies", asked)):
        if isinstance(values, str) or not values:
            raise ArgumentError(f"{owner}({name}=...) takes a list of at least one, got {values!r}.")
    for each in asked:
        resolve_strategy(each, None)  # before any row is compiled
    for each in counts:
        check.integer("devices", each, low=1, also=(None,), owner=owner)
    for name, value in (("batch_size", batch_size), ("rows_per_device", rows_per_device)):
        check.integer(name, value, low=1, also=(None,), owner=owner)
    if batch_size is not None and rows_per_device is not None:
        raise ArgumentError(f"{owner} takes batch_size, of all devices together, or rows_per_device. Leave one out.")
    check.positive("timeout", timeout, owner=owner)
    target = hardware_of(jax.devices()[0].device_kind) if hardware is None else resolve_hardware(hardware)
    if hardware is None and target is not None and (limit := memory_limit(bytes_of_module(model))) is not None:
        target = replace(target, memory=limit)
    _, batch, num_batches = first_batch(trainer, model, data)
    model = model if isinstance(model, lazy) else shapes_of(model)
    cases = [(*each, n) for n in counts for strategy in asked for each in named_strategies(trainer, strategy, n)]
    rows = list[PlanRow]()
    failures = list[JaxlitError]()
    logged = set[str]()
    for i, (name, strategy, n) in enumerate(cases):
        num = batch_size or num_rows(batch)
        try:
            trial = plan_trial(trainer, strategy, n)
            here = n is None or n <= jax.device_count()
            if n is None:
                n = trial.strategy.mesh.size
            num = (rows_per_device or 0) * n or num
            say(f"plan {i + 1}/{len(cases)}: {name} on {n} device{'s' * (n > 1)}, {num:,} rows", aside=True)
            job = trial, model, with_rows(batch, num), num_batches
            with explained():
                cost = cost_of_step(*job) if here else cost_elsewhere(*job, devices=n, timeout=timeout, logged=logged)
            rows.append(PlanRow(name, cost.devices if here else n, num, target, cost))
        except JaxlitError as failure:
            failures.append(failure)
            rows.append(PlanRow(name, n or jax.device_count(), num, target, None, str(failure)))
    if len(failures) == len(cases):
        raise failures[0]
    return Plan(tuple(rows))


def named_strategies(trainer: Any, strategy: Any, devices: int | None) -> list[tuple[str, Any]]:
    """Return a strategy with its name; of "auto" all among which it chooses on as many devices."""
    if (strategy == "auto" and trainer.settings.mesh is None) or isinstance(strategy, Auto):
        return [*candidates(devices or trainer.settings.device_count or jax.device_count()).items()]
    return [(strategy if isinstance(strategy, str) else repr(strategy), strategy)]


def plan_trial(trainer: Any, strategy: str | Strategy, devices: int | None, **changed: Any) -> Any:
    """Return a separate Trainer for one compile; refuse a number of devices that is not that of the user's mesh.

    Raises:
        ArgumentError: The user's Trainer has a mesh of another number of devices.
    """
    settings = trainer.settings
    mesh = settings.mesh
    count = settings.devices if devices is None else devices
    is_fixed = mesh is not None and not (isinstance(mesh, Mapping) and -1 in mesh.values())
    if devices is not None and is_fixed:
        raise ArgumentError(
            f"Trainer.plan(devices={devices}) with Trainer(mesh={mesh!r}), whose number of devices is fixed. Leave "
            "devices out, or give an axis of the mesh the size -1."
        )
    known = settings.device_count if devices is None else devices
    resolved = copy.copy(resolve_strategy(strategy, known, mesh))  # the user's stays as it is, for any devices
    vars(resolved).pop("mesh", None)  # of the devices of another run
    arguments = {name: settings.arguments[name] for name in ("max_epochs", "max_steps", "nan_policy")} | changed
    if arguments["nan_policy"] == "rollback":  # the step of "raise", with checkpoints
        arguments["nan_policy"] = "raise"
    return trial_of(
        trainer,
        takes=lambda c: c.changes_step or overrides(c, "init_arrays"),
        strategy=resolved,
        devices=count,
        mesh=None,
        **arguments,
    )


def first_batch(trainer: Any, model: TrainModule | lazy, data: Any) -> tuple[Any, Any, int | float]:
    """Return a loader's first batch, what a step takes of it, and how many batches an epoch has."""
    if isinstance(data, DataModule):
        data.prepare_data()
        data.setup("fit")
    if data is None and not isinstance(model, TrainModule):
        raise ArgumentError("A plan takes a loader or a jl.DataModule as data, got None. Its first batch counts.")
    loaders = make_loaders(trainer.settings, STAGES["training"], {"training": (data, "data")}, None, method="plan")
    loaders.module = None if isinstance(model, lazy) else model
    ((source, limit),) = loaders.open("training", required=True)
    if source.is_iterator:
        raise ArgumentError(
            f"{source.argument} takes a re-iterable loader, got an iterator, whose first batch is lost."
        )
    try:
        with Watchdog(trainer.settings.data_timeout, trainer.settings.hang_timeout) as watchdog:
            loaders.check_first(source, None, watchdog, required=True)
            loader_batch, _ = next(source.epoch(0))
            _, batch = loaders.validator_of(source)(loader_batch)
    finally:
        source.close()
    return loader_batch, batch, batches_or_inf(limit)


def cost_elsewhere(
    trial: Any, model: Any, batch: Any, num_batches: int | float, *, devices: int, timeout: float, logged: set[str]
) -> StepCost:
    """Return what `cost_of_step` returns on as many simulated devices, in a process that is ended after `timeout` s.

    What is raised there is raised here. Its warnings are logged, and added to `logged`, unless they are there already.

    Raises:
        ArgumentError: The module cannot be sent to another process, or the process took too long or was ended.
        Exception: What `cost_of_step` has raised there.
    """
    try:
        config = {name: getattr(jax.config, name) for name in JAX_SETTINGS}
        job = cloudpickle.dumps((config, trial.settings.arguments, model, batch, num_batches))
    except Exception as error:
        raise ArgumentError(
            "Trainer.plan sends the module, its callbacks and its strategy to a process that simulates devices, and "
            f"one of them cannot be pickled: {error}. Keep open files, locks and the like out of their attributes."
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        log = Path(folder, "log")
        flags = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS} --xla_force_host_platform_device_count={devices}"
        # The process is no part of the job that this one belongs to.
        env = os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu", "JAX_NUM_PROCESSES": "1"}
        with log.open("wb") as output:
            command = [sys.executable, "-m", "jaxlit.trainer.plan_worker", str(result)]
            # A new session: Ctrl-C reaches this process alone, which ends the other.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=env, start_new_session=True
            )
            try:
                process.communicate(cloudpickle.dumps(sys.path) + job, timeout=timeout)
            except subprocess.TimeoutExpired:
                raise ArgumentError(
                    f"Trainer.plan: {devices} devices: the compile took longer than {timeout:g} s. Raise timeout."
                ) from None
            finally:
                process.kill()
                process.wait()
        if not result.exists():
            last = " ".join(log.read_text(errors="replace").split())[-500:]
            raise ArgumentError(
                f"Trainer.plan: the process for {devices} devices ended with {process.returncode}: {last}"
            )
        outcome, failed, warnings = cloudpickle.loads(result.read_bytes())
    for text in warnings:
        if text not in logged:
            logged.add(text)
            _logger.warning(text)
    if failed:
        raise outcome
    return outcome


def trial_of(
    trainer: Any,
    *callbacks: Callback,
    takes: Callable[[Callback], bool] = operator.attrgetter("changes_step"),
    **arguments: Any,
) -> Any:
    """Return a Trainer that takes the steps of another one, without loggers, files and validation."""
    settings = {key: getattr(trainer.settings, key) for key in _SAME} | dict.fromkeys(_SILENT, False)
    settings |= {"limit_val_batches": 0, "log_every_n_steps": 0} | arguments
    of_trainer = filter(takes, without(trainer.callbacks, trainer._session.added))
    # A subclass of the user's may take other arguments.
    plain = next(cls for cls in type(trainer).__mro__ if TrainerProperties in cls.__bases__)
    trial = plain(**settings, callbacks=[*of_trainer, *callbacks])
    trial._session.takes = takes  # of the callbacks that the module adds
    return trial


def copied(model: TrainModule | lazy) -> TrainModule | lazy:
    """Return a copy of a module for a trial to train; a lazy one, which is built each time, as it is."""
    return model if isinstance(model, lazy) else nnx.clone(model, graph=True)


def _table(rows: Sequence[PlanRow]) -> list[str]:
    head = ("strategy", "devices", "rows", *KINDS, "total", "left", "FLOP", "step")
    lines: list[Sequence[str]] = []
    for row in rows:
        held = [size(row.bytes[kind]) for kind in KINDS]
        left = "-" if row.left is None else size(row.left) if row.left >= 0 else f"-{size(-row.left)}"
        flops = "-" if row.cost is None or row.cost.flops is None else count(row.cost.flops.count)
        time = "-"
        if row.step_seconds is not None:
            time = " to ".join(dict.fromkeys(map(duration, row.step_seconds)))
            time += f" ({max(row.seconds, key=lambda name: row.seconds[name])})"
        total = f"{row.bound} {size(row.total)}".strip()
        lines.append((row.strategy, str(row.devices), f"{row.batch_size:,}", *held, total, left, flops, time))
    return table([head, *lines]) if lines else []


def _collectives(rows: Sequence[PlanRow]) -> list[str]:
    lines = [
        (row.strategy, str(row.devices), x.kind, f"{x.calls:,}", size(x.bytes), size(x.sent))
        for row in rows
        for x in (row.cost.collectives or () if row.cost is not None else ())
    ]
    head = ("strategy", "devices", "collective", "calls", "result bytes", "sent by a device")
    return table([head, *lines], texts=3) if lines else []


def _notes(rows: Sequence[PlanRow]) -> list[str]:
    texts = [(row, text) for row in rows if (text := row.error or row.note)]
    notes = [f"{row.strategy} on {row.devices} device{'s' * (row.devices != 1)}: {text}" for row, text in texts]
    bounds = {row.bound for row in rows if row.cost is not None}
    if "<=" in bounds:
        notes.append(
            "<=: compiled for CPUs, whose compiler fuses less, reduces where others reduce and scatter, and sends "
            "16-bit numbers as 32 bits: temporaries and traffic are upper bounds. All other bytes are exact."
        )
    if ">=" in bounds:
        notes.append(
            ">=: the step runs in parts: temporaries are the gradients' sums and what microbatches keep, without those "
            "within a part."
        )
    free_memory = [(row.left, row.hardware) for row in rows if row.fits and row.hardware in GPUS]
    if any(x is not None and x < (1 - _TAKEN) * (gpu.memory or 0) for x, gpu in free_memory if gpu is not None):
        notes.append(
            f"jax takes {_TAKEN:.0%} of a GPU's memory. For more, set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the "
            "environment of the run."
        )
    if all(row.hardware is None for row in rows):
        notes.append(
            "Pass hardware= (in a shell --hardware), for example 'NVIDIA H100', to see what fits and how long a step "
            "takes."
        )
    return notes
