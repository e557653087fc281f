"""How a run begins: its loaders are opened and checked, and it continues where a checkpoint was taken."""

import logging

import jax

from jaxlit.checkpoints.files import Checkpoint
from jaxlit.core.module import call_step, is_overridden
from jaxlit.core.step_module import is_in_eval_mode
from jaxlit.data.prefetcher import Prefetcher
from jaxlit.data.watchdog import Watchdog
from jaxlit.errors import ArgumentError, CheckpointError
from jaxlit.loop import snapshot
from jaxlit.loop.dispatch import check_size
from jaxlit.loop.run import Run, Setup
from jaxlit.reporting.terminal import say
from jaxlit.strategies.base import Strategy
from jaxlit.trainer.defaults import log_hyperparams

_logger = logging.getLogger("jaxlit")

_LOOKED_AT = 1000  # epochs whose windows are looked at before a fit, which may have no last epoch


def open_fit(run: Setup) -> None:
    """Open the loaders of a fit.

    Raises:
        ArgumentError: Training would have no end, or a setting does not fit the loaders.
        DataError: A loader cannot continue where the checkpoint was taken.
    """
    settings = run.settings
    check_size(settings.steps_per_execution, settings.accumulate_grad_batches)
    for callback in run.hooks.callbacks:
        for epoch in range(_LOOKED_AT)[run.position.epoch : settings.max_epochs]:
            whose = f"{type(callback).__name__} in epoch {epoch}"
            check_size(settings.steps_per_execution, callback.batches_per_step(epoch) or 1, whose)
    source, limit = train = run.data.open_train(settings)
    timed = settings.max_time is not None or any(c.limits_time for c in run.hooks.callbacks)
    if limit is None and settings.max_steps < 0 and not timed and source.is_endless:
        raise ArgumentError(
            f"{source.argument} is a loader without end, and there is no limit. Pass Trainer(max_steps=...), "
            "Trainer(max_time=...), Trainer(limit_train_batches=...) or a jl.callbacks.Timer(...)."
        )
    run.data.val = run.data.loaders.open("validation", required=False)
    if run.data.val and not is_overridden(run.module, "validation_step"):
        run.data.val = []  # made by a hook: those of an argument are refused
    if run.data.val:
        call_step(run.module, "validation")
    every = settings.reload_dataloaders_every_n_epochs
    if every and not any(map(run.data.loaders.from_hook, ("training", "validation"))):
        raise ArgumentError(
            f"Trainer(reload_dataloaders_every_n_epochs={every}) with loaders as arguments has nothing to reload. "
            "Pass a datamodule, or define train_dataloader in the module."
        )
    run.data.count(run.control, run.window.given)
    if run.checkpoints.resume is not None:
        for stage, pairs in (("training", [train]), ("validation", run.data.val)):
            for idx, (source, _) in enumerate(pairs):
                snapshot.load_loader(source, run.checkpoints.resume.checkpoint.state, stage, idx)
        run.position.data = train[0].begins_at  # until a batch is used, a checkpoint has the place of this one


def warn_of_eval_mode(run: Setup) -> None:
    """Warn of a module that a fit would train in evaluation mode."""
    if is_in_eval_mode(run.module):
        _logger.warning(
            "%s is entirely in evaluation mode, and stays so in training: dropout drops nothing, statistics are "
            "not updated. Call module.train() before fit, and eval() on the parts that are frozen.",
            type(run.module).__name__,
        )


def check_loaders(run: Setup, watchdog: Watchdog) -> None:
    """Refuse what no step could take before anything is compiled."""
    for pair in (*run.data.train, *run.data.val):
        run.data.loaders.check_first(*pair, watchdog, required=pair in run.data.train)
    for source, _ in run.data.val if run.data.train else ():
        if source.is_grain and not run.settings.num_sanity_val_steps:
            source.close()  # its threads and processes would wait until the first validation


def restore_callbacks(run: Setup, checkpoint: Checkpoint) -> None:
    """Give the callbacks their states, and warn of states that none takes."""
    of_defaults = ("ModelCheckpoint", "CSVLogger", "JSONLLogger")
    if left := [x for x in snapshot.load_callbacks(run, checkpoint.state) if not x.startswith(of_defaults)]:
        _logger.warning(
            "%s keeps the state of %s, which is not among the callbacks now.", checkpoint.path, ", ".join(left)
        )


def begin_fit(run: Run) -> None:
    """Restore what a checkpoint has of the run, and begin the fit."""
    if (resume := run.checkpoints.resume) is not None:
        # Sums and counters go to the device, so not before there is an engine.
        snapshot.load_run(run, resume.checkpoint.state)
        if resume.strict and not resume.reset_optimizer:  # else a rollback could not restore its state
            run.checkpoints.written.append(resume.checkpoint.path)
        run.hooks("on_load_checkpoint", dict(resume.checkpoint.state))
    log_hyperparams(run.hooks)
    run.hooks("on_fit_start")


def prefetcher_of(run: Setup, strategy: Strategy, watchdog: Watchdog) -> Prefetcher:
    """Return what draws a run's batches and places them."""
    takes_host_arrays = strategy.mesh.size == 1 and type(strategy).shard_batch is Strategy.shard_batch
    return Prefetcher(
        None if takes_host_arrays else strategy.shard_batch,
        validator_of=run.data.loaders.validator_of,
        splits=strategy.splits_by_process,
        prefetch=run.settings.prefetch,
        watchdog=watchdog,
        epoch=lambda: run.position.epoch,
    )


def warn_of_bad_step(checkpoint: Checkpoint, nan_policy: str) -> None:
    """Print that a checkpoint was written before a step that was not finite, and what happens now."""
    if (bad := checkpoint.state.get("not_finite")) is None or jax.process_index():
        return
    first, end = bad["batches"]
    took = f" {len(bad['optimizer'])} arrays of the optimizer's state have taken it, see state.json."
    say(
        f"resume: step {bad['step']} (epoch {bad['epoch']}, batches {first} to {end - 1}) was not finite: now it runs "
        f"under nan_policy={nan_policy!r}.{took * bool(bad['optimizer'])}"
    )


def check_window(checkpoint: Checkpoint, run: Setup) -> None:
    """Refuse another `accumulate_grad_batches` in the middle of a window, unless a hook had set that of the window.

    Raises:
        CheckpointError: Naming the number that it needs.
    """
    was, filled = checkpoint.state["accumulate"], checkpoint.state["position"]["filled"]
    accumulate = run.settings.accumulate_grad_batches
    if filled and accumulate != was and not snapshot.keeps_accumulation(run, checkpoint.state):
        raise CheckpointError(
            f"{checkpoint.path} has {filled} of {was} batches in its accumulation window, and the Trainer has "
            f"accumulate_grad_batches={accumulate}. Resume with {was}, or from a checkpoint of an epoch's end."
        )
