"""Trains many members of one module at once: `jl.fit_many`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlit import checks as check
from jaxlit.callbacks.early_stopping import EarlyStopping
from jaxlit.core.module import TrainModule, call_step
from jaxlit.core.precision import PRECISIONS, Precision
from jaxlit.data.batch_validator import BatchValidator
from jaxlit.data.kinds import check_rows, each_loader, source_of
from jaxlit.data.prefetcher import Prefetcher
from jaxlit.data.source import Source
from jaxlit.data.watchdog import Watchdog
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.mesh_context import out_of_meshes
from jaxlit.populations.alike import check_distinct
from jaxlit.populations.members import build
from jaxlit.populations.population import Population
from jaxlit.populations.programs import Programs, members_mesh
from jaxlit.populations.saves import Saves
from jaxlit.populations.training import Plan, Run, restore, train
from jaxlit.porting import takes_only_its_arguments
from jaxlit.shown import shown

_OWNER = "jl.fit_many"


@takes_only_its_arguments(_OWNER)
@out_of_meshes
def fit_many(
    make_module: Callable[..., TrainModule],
    variations: Sequence[Mapping[str, Any]],
    train_dataloaders: Any,
    val_dataloaders: Any = None,
    *,
    max_epochs: int,
    early_stopping: EarlyStopping | None = None,
    log: Callable[[int, int, dict[str, float]], object] | None = None,
    log_every_n_steps: int = 50,
    limit_train_batches: int | None = None,
    default_root_dir: str | Path | None = None,
    every_n_train_steps: int | None = None,
    resume: str | None = None,
    devices: int | str = "auto",
    precision: str = "32-true",
) -> Population:
    """Train many members of one module at once: one compiled step takes a step of all of them.

    Members may differ in their seeds, and in every number that their steps read: rates of the optimizer, weights of a
    loss, a rate of dropout. Each member's step is traced, and the numbers in which the programs differ become inputs of
    one program, so none is lost. Members that differ in shapes, layers, or what is computed are refused.

    All members see the same batches. A member whose step is not finite keeps the weights before it and does not touch
    the others. Members are spread over the devices; each device has as many.

    Args:
        make_module: A subclass of `jl.TrainModule`, or a function that returns a module.
        variations: For each member the arguments of `make_module`. `seed` is given as `rngs=nnx.Rngs(seed)` where it
            takes `rngs`, which are `nnx.Rngs(0)` without a seed.
        train_dataloaders: As for `Trainer.fit`.
        val_dataloaders: A loader; all members are validated on it after each epoch.
        max_epochs: How many epochs.
        early_stopping: Ends a member whose metric no longer improves, after an epoch; its weights stay as they are.
        log: Called with each row: the member's index, the step and the metrics.
        log_every_n_steps: The steps between rows.
        limit_train_batches: The most batches of an epoch, which a loader without end needs.
        default_root_dir: Where checkpoints of all members are written, after each epoch. None for none.
        every_n_train_steps: Write one after so many steps as well.
        resume: "auto" continues from the newest checkpoint, if there is one: the result is bit-identical.
        devices: How many devices at most, or "auto" for all. As many are used as divide the number of members.
        precision: As for the Trainer, except for "16-mixed".

    Returns:
        The population: `rows()`, `best(metric)`, `module(index)`; print it for a table.

    Raises:
        JaxlitError: An argument, a module or a loader cannot be used, or members differ in more than numbers.

    Example:
        >>> import jax.numpy as jnp, jaxlit as jl, numpy as np, optax
        >>> from flax import nnx
        >>> class Line(jl.TrainModule):
        ...     def __init__(self, lr=0.1):
        ...         self.lr, self.slope = lr, nnx.Param(jnp.zeros(()))
        ...     def training_step(self, batch):
        ...         loss = jnp.mean((self.slope * batch["x"] - 3 * batch["x"]) ** 2)
        ...         self.log("loss", loss, on_step=False, on_epoch=True)
        ...         return loss
        ...     def configure_optimizers(self):
        ...         return optax.sgd(self.lr)
        >>> data = [{"x": np.ones(8, np.float32)}]
        >>> population = jl.fit_many(Line, [{"lr": 0.01}, {"lr": 0.5}], data, max_epochs=2)
        >>> population.best_index("loss"), float(population.best("loss").slope[...])
        (1, 3.0)
    """
    plan = Plan(
        check.integer("max_epochs", max_epochs, low=1, owner=_OWNER),
        check.integer("limit_train_batches", limit_train_batches, low=1, also=(None,), owner=_OWNER),
        check.integer("log_every_n_steps", log_every_n_steps, low=1, owner=_OWNER),
        check.integer("every_n_train_steps", every_n_train_steps, low=1, also=(None,), owner=_OWNER),
        early_stopping,
        log,
    )
    check.integer("devices", devices, low=1, also=("auto",), owner=_OWNER)
    check.one_of("precision", precision, [x for x in PRECISIONS if x != "16-mixed"], owner=_OWNER)
    _check(plan, resume, default_root_dir)
    train_source = _source(train_dataloaders, "train_dataloaders", may_continue=True)
    val_source = None if val_dataloaders is None else _source(val_dataloaders, "val_dataloaders")
    if train_source.is_endless and limit_train_batches is None:
        raise ArgumentError(
            f"{train_source.argument} is a loader without end. Pass {_OWNER}(limit_train_batches=...), the batches of "
            "an epoch."
        )
    members, layout, arrays = build(make_module, variations, Precision(precision))
    programs = Programs(members, members_mesh(len(members), None if devices == "auto" else int(devices)))
    saves = None if default_root_dir is None else Saves(Path(default_root_dir), resume=resume is not None)
    validators = {x.argument: BatchValidator(x.argument) for x in (train_source, val_source) if x is not None}
    prefetcher = Prefetcher(
        programs.place_batch,
        validator_of=lambda source: validators[source.argument],
        splits=lambda _: True,
        prefetch="auto",
        watchdog=Watchdog(None),
    )
    try:
        checkpoint = None if saves is None else saves.newest()
        if checkpoint is not None:
            train_source.load_state_dict(checkpoint.state["loader"])
        # Everything is traced and compared before the first step.
        programs.train_step(_example(train_source, validators))
        if val_source is not None:
            call_step(members[0].pure.origin, "validation", 0)
            programs.eval_step(_example(val_source, validators))
        run = Run(programs, [], train_source, val_source, prefetcher, plan, saves)
        if checkpoint is not None:
            restore(run, checkpoint)
        else:
            run.leaves = programs.init(layout, arrays)
            check_distinct([x.name for x in members], variations, arrays, programs.numbers)
        return train(run)
    finally:
        prefetcher.close()
        for source in (train_source, val_source):
            if source is not None:
                source.close()
        if saves is not None:
            saves.close()


def _check(plan: Plan, resume: str | None, root: str | Path | None) -> None:
    """Refuse arguments that are out of their sets, or that do not fit each other."""
    if plan.early_stopping is not None and not isinstance(plan.early_stopping, EarlyStopping):
        raise ArgumentTypeError(
            f"{_OWNER}(early_stopping=...) takes a jl.callbacks.EarlyStopping, got {shown(plan.early_stopping)}."
        )
    if plan.log is not None and not callable(plan.log):
        raise ArgumentTypeError(
            f"{_OWNER}(log=...) takes a function of (member, step, metrics), got {shown(plan.log)}."
        )
    check.require(resume in (None, "auto"), "resume", resume, "takes None or 'auto'", owner=_OWNER)
    if root is None and (resume is not None or plan.every_n_train_steps is not None):
        name = "resume" if resume is not None else "every_n_train_steps"
        raise ArgumentError(f"{_OWNER}({name}=...) needs default_root_dir, the folder of the checkpoints.")
    if (count := jax.process_count()) > 1:
        raise ArgumentError(f"{_OWNER} trains in one process, and there are {count}. Start one process for each part.")


def _source(loaders: Any, argument: str, *, may_continue: bool = False) -> Source:
    """Return the source of the only loader of an argument."""
    each = each_loader(loaders, f"{_OWNER}({argument}=...)")
    if len(each) != 1:
        raise ArgumentError(f"{_OWNER}({argument}=...) takes one loader, got {len(each)}.")
    return source_of(*each[0], may_continue=may_continue)


def _example(source: Source, validators: Mapping[str, BatchValidator]) -> Any:
    """Return the shapes and dtypes of the first batch, which is drawn ahead of time."""
    first = source.peek()
    if not first and source.peeked:
        raise source.empty()
    if not first:
        raise ArgumentTypeError(
            f"{source.argument} takes a loader that can be iterated again, got an iterator, "
            f"{type(source.loader).__name__}. Pass a list of its batches, or an object whose __iter__ begins again."
        )
    validator = validators[source.argument]
    check_rows(source.loader, first[0], source.argument)
    validator(first[0])
    return validator.kind.example
