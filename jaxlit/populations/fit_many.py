"""Trains many members of one module at once: `jl.fit_many`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlit.callbacks.early_stopping import EarlyStopping
from jaxlit.core.module import TrainModule
from jaxlit.core.state import Layout
from jaxlit.data.batch_validator import BatchValidator
from jaxlit.data.kinds import check_rows, each_loader, source_of
from jaxlit.data.prefetcher import Prefetcher
from jaxlit.data.source import Source
from jaxlit.data.watchdog import Watchdog
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.mesh_context import out_of_meshes
from jaxlit.populations.alike import check_distinct
from jaxlit.populations.members import build, check_variations
from jaxlit.populations.options import OWNER, Options
from jaxlit.populations.population import Population
from jaxlit.populations.programs import Programs, members_mesh
from jaxlit.populations.saves import Saves
from jaxlit.populations.training import Run, restore, train
from jaxlit.porting import takes_only_its_arguments


@takes_only_its_arguments(OWNER)
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

    Members differ in their seeds, and in every number that their steps read. All see the same batches.

    Args:
        make_module: A subclass of `jl.TrainModule`, or a function that returns a module.
        variations: For each member the arguments of `make_module`; `seed` makes the `rngs`, where it takes them.
        train_dataloaders: As for `Trainer.fit`.
        val_dataloaders: A loader; all members are validated on it after each epoch.
        max_epochs: How many epochs.
        early_stopping: Ends a member whose metric no longer improves; its weights stay as they are.
        log: Called with each row: the member's index, the step and the metrics.
        log_every_n_steps: The steps between rows.
        limit_train_batches: The most batches of an epoch, which a loader without end needs.
        default_root_dir: The folder of the checkpoints of all members, written after each epoch. None for none.
        every_n_train_steps: The steps between further checkpoints.
        resume: "auto" continues from the newest checkpoint, if there is one: the result is bit-identical.
        devices: The most devices, or "auto" for all: as many are used as divide the number of members.
        precision: As for the Trainer, except for "16-mixed".

    Raises:
        JaxlitError: An argument, a module or a loader cannot be used, or members differ in more than numbers.
    """
    stopping = (early_stopping, log, log_every_n_steps, limit_train_batches)
    options = Options(max_epochs, *stopping, default_root_dir, every_n_train_steps, resume, devices, precision)
    return _fit(make_module, variations, train_dataloaders, val_dataloaders, options)


@out_of_meshes
def _fit(
    make_module: Any, variations: Any, train_dataloaders: Any, val_dataloaders: Any, options: Options
) -> Population:
    sources = [_source(train_dataloaders, "train_dataloaders", limit=options.limit_train_batches, may_continue=True)]
    if val_dataloaders is not None:
        sources.append(_source(val_dataloaders, "val_dataloaders"))
    validators = {source.argument: BatchValidator(source.argument) for source in sources}
    saves = (
        None
        if options.default_root_dir is None
        else Saves(Path(options.default_root_dir), resume=options.resume == "auto")
    )
    try:
        checkpoint = None if saves is None else saves.newest()
        if checkpoint is not None:
            sources[0].load_state_dict(checkpoint.state["loader"])
        examples = [_example(source, validators) for source in sources]
        programs, layout, arrays = _built(make_module, variations, options, examples)
        prefetcher = Prefetcher(
            None if programs.mesh.size == 1 else programs.place_batch,
            validator_of=lambda source: validators[source.argument],
            splits=lambda _: True,
            prefetch="auto",
            watchdog=Watchdog(None),
        )
        run = Run(programs, [], sources[0], sources[1:], prefetcher, options, saves)
        if checkpoint is not None:
            restore(run, checkpoint)
        else:
            run.leaves = programs.init(layout, arrays)
            check_distinct(programs.members, arrays, programs.numbers)
        arrays.clear()  # the devices have them
        try:
            return train(run)
        finally:
            prefetcher.close()
    finally:
        for source in sources:
            source.close()
        if saves is not None:
            saves.close()


def _built(
    make_module: Any, variations: Any, options: Options, examples: list[Any]
) -> tuple[Programs, Layout, list[list[np.ndarray]]]:
    """Return the programs of all members, the layout of a module's arrays, and the arrays of each member."""
    check_variations(make_module, variations)
    programs = Programs(members_mesh(len(variations), options.most_devices), *examples)
    arrays, layouts = list[list[np.ndarray]](), list[Layout]()
    for member, layout, own in build(make_module, variations, options.dtypes):
        programs.add(member)  # traced before the next one is built
        layouts.append(layout)
        arrays.append(own)
    programs.compile()
    return programs, layouts[0], arrays


def _source(loaders: Any, argument: str, *, limit: int | None = None, may_continue: bool = False) -> Source:
    """Return the source of the only loader of an argument; an endless one needs a limit of batches."""
    each = each_loader(loaders, f"{OWNER}({argument}=...)")
    if len(each) != 1:
        raise ArgumentError(f"{OWNER}({argument}=...) takes one loader, got {len(each)}.")
    source = source_of(*each[0], may_continue=may_continue)
    if source.is_endless and limit is None:
        way = f"Pass {OWNER}(limit_train_batches=...)" if may_continue else "Pass one that ends"
        raise ArgumentError(f"{source.argument} is a loader without end. {way}.")
    return source


def _example(source: Source, validators: Mapping[str, BatchValidator]) -> Any:
    """Draw the first batch ahead of time, and return its shapes and dtypes."""
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
