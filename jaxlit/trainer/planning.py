"""How a plan is made: one compile for each strategy and number of devices."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxlit import checks as check
from jaxlit.core.module import TrainModule
from jaxlit.core.replica import num_rows, with_rows
from jaxlit.core.stage import STAGES
from jaxlit.data.datamodule import DataModule
from jaxlit.data.watchdog import Watchdog
from jaxlit.engine.lazy import lazy
from jaxlit.errors import ArgumentError, JaxlitError
from jaxlit.loop.hooks import overrides
from jaxlit.loop.run_data import count, make_loaders
from jaxlit.mesh_context import out_of_meshes
from jaxlit.programs.hardware import Hardware, hardware_of, resolve_hardware
from jaxlit.reporting.terminal import say
from jaxlit.strategies.auto import Auto, candidates, memory_limit
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.registry import resolve_strategy
from jaxlit.trainer.plan import Plan, PlanRow
from jaxlit.trainer.plan_process import cost_elsewhere
from jaxlit.trainer.refusals import check_model
from jaxlit.trainer.step_cost import bytes_of_module, cost_of_step, explained, shapes_of
from jaxlit.trainer.trial import trial_of


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
    """Return a separate Trainer for one compile.

    Args:
        trainer: The user's.
        strategy: The strategy.
        devices: How many devices; None for those of the user's Trainer, and its mesh.
        **changed: Arguments in place of the user's.

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
    takes = lambda c: c.changes_step or overrides(c, "init_arrays")  # noqa: E731
    return trial_of(trainer, takes=takes, strategy=resolved, devices=count, mesh=None, **arguments)


def first_batch(trainer: Any, model: TrainModule | lazy, data: Any) -> tuple[Any, Any, int | float]:
    """Return a loader's first batch, what a step takes of it, and how many batches an epoch has.

    Args:
        trainer: The Trainer whose limits and keys apply.
        model: The module, whose hooks may make the loader and prepare a batch.
        data: A loader or a `DataModule`; None for the module's hook.
    """
    if isinstance(data, DataModule):
        data.prepare_data()
        data.setup("fit")
    if data is None and not isinstance(model, TrainModule):
        raise ArgumentError("A plan takes a loader or a jl.DataModule as data, got None. Its first batch counts.")
    loaders = make_loaders(trainer.settings, STAGES["training"], {"training": (data, "data")}, None)
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
    return loader_batch, batch, count(limit)
