"""The loaders of a run are opened, looked at, and made to continue where a checkpoint stands."""

import logging

import jax

from jaxlit.core.module import call_step, is_overridden
from jaxlit.data.watchdog import Watchdog
from jaxlit.errors import ArgumentError
from jaxlit.loop import snapshot
from jaxlit.loop.restore import Resume
from jaxlit.loop.run import Run, validation_interval
from jaxlit.strategies.base import Strategy

_logger = logging.getLogger("jaxlit")


def open_fit(run: Run, strategy: Strategy, resume: Resume | None) -> None:
    """Open the loaders of a fit.

    Raises:
        ArgumentError: Training would have no end, or a setting does not fit the loaders.
        DataError: A loader cannot continue where the checkpoint stands.
    """
    settings, name = run.settings, type(run.module).__name__
    ((source, limit),) = run.loaders.open("training", required=True)
    timed = settings.max_time is not None or any(c.limits_time for c in run.hooks.callbacks)
    if limit is None and settings.max_steps < 0 and not timed and source.is_endless:
        raise ArgumentError(
            f"{source.argument} is a loader without end, and there is no limit. Pass Trainer(max_steps=...), "
            "Trainer(max_time=...), Trainer(limit_train_batches=...) or a jl.callbacks.Timer(...)."
        )
    run.train, run.val_every = (source, limit), validation_interval(settings, source, limit)
    run.val = run.loaders.open("validation", required=False)
    if run.val and not is_overridden(run.module, "validation_step"):
        _logger.warning("%s has no validation_step: %s is not used.", name, run.val[0][0].argument)
        run.val = []
    if run.val:
        call_step(run.module, "validation")
    every = settings.reload_dataloaders_every_n_epochs
    if every and not any(map(run.loaders.from_hook, ("training", "validation"))):
        raise ArgumentError(
            f"Trainer(reload_dataloaders_every_n_epochs={every}) with loaders as arguments has nothing to reload. "
            "Pass a datamodule, or define train_dataloader in the module."
        )
    run.count_batches()
    if resume is not None:
        state, count = resume.checkpoint.state, jax.process_count()
        for stage, pairs in (("training", [run.train]), ("validation", run.val)):
            for idx, (source, _) in enumerate(pairs):
                snapshot.load_loader(source, state, stage, count, jax.process_index(), idx)
        run.position.data = run.train[0].begins_at  # until a batch is used, a checkpoint has the place of this one


def warn_of_few_rows(run: Run) -> None:
    """Warn where an epoch, or all of training, has no step whose row is logged."""
    every, steps, most = run.log_every, run.epoch_steps, run.settings.max_steps
    if 0 < most < every:
        _logger.warning(
            "Trainer(max_steps=%d) ends before the first row of a step, as log_every_n_steps is %d. Pass "
            "log_every_n_steps=%d.",
            most,
            every,
            max(most // 8, 1),
        )
    elif 0 < steps < every:
        _logger.warning(
            "Trainer(log_every_n_steps=%d) is longer than an epoch (%d %s), so the curves have few points. Pass a "
            "smaller number or 'auto'.",
            every,
            steps,
            "step" if steps == 1 else "steps",
        )


def check_loaders(run: Run, watchdog: Watchdog) -> None:
    """Refuse what no step could take before anything is compiled."""
    for pair in (*([run.train] if run.train else []), *run.val, *run.evaluated):
        run.loaders.check_first(*pair, watchdog, required=pair is run.train)
    for source, _ in run.val:
        if source.is_grain and not run.settings.num_sanity_val_steps:
            source.close()  # its threads and processes would wait until the first validation
