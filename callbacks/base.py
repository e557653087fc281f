"""`Callback`, the base of every callback: its attributes that the loop and the Trainer read, and its hooks.

`Measure`, at the end, is the base of callbacks that add measurements to the rows of a training.
"""

from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from jaxlit.checkpoints.places import Place
from jaxlit.core.log import named_values
from jaxlit.core.module import TrainModule
from jaxlit.errors import ArgumentError, LogError, did_you_mean
from jaxlit.faces import Configured

if TYPE_CHECKING:
    from jaxlit.trainer import Trainer


class Traits(Configured):
    """The attributes of a `jl.Callback` that the loop and the Trainer read; any callback can set them."""

    runs_last: bool = False
    """Whether `on_train_epoch_end` and `on_safe_point` run after the module's: they see what it logged and did."""

    limits_time: bool = False
    """Whether the callback ends every fit, for example by `trainer.stop_after(...)`, so that no limit is needed."""

    in_fast_dev_run: bool = True
    """Whether the callback is used in `Trainer(fast_dev_run=...)`; loggers and early stopping are not."""

    role: str = ""
    """Which of the Trainer's callbacks it replaces: "progress_bar", "model_summary", "checkpoint" or "csv_logger". A
    "checkpoint" has the attributes of a `ModelCheckpoint`, and its hooks run after all others; "early_stopping" is
    `trainer.early_stopping_callback`."""

    is_logger: bool = False
    """Whether the callback is one of `trainer.loggers`, with the methods of a `jl.callbacks.Logger`."""

    may_fail: bool = False
    """Whether training continues after an error in one of its hooks: with a warning, and without its other hooks for
    the rest of the run, except `teardown`. Otherwise an error ends training."""

    row_files: Sequence[str] = ()
    """The files in the run's folder that no other callback may write to."""

    rates_in: str | None = None
    """Which rows have the learning rates, also if nothing else is logged there: "step" or "epoch"."""

    changes_step: bool = False
    """Whether the callback changes what an optimizer step computes: `jl.lr_find` keeps such callbacks only."""

    frozen_part: Any = None
    """The part of the parameters that is untrained for some epochs, as that of a `BackboneFreeze`, with its `names`,
    `unfreeze_at_epoch` and `tx`; None for none."""

    exclusive: tuple[str, Any] | None = None
    """What no two callbacks may share, in words, and its value: ("folder, the dirpath", path) if `dirpath=` sets it."""

    def conflict_with(self, other: "Traits") -> str | None:
        """Return why a Trainer cannot have this callback and an earlier one, as an error message; None if it can."""
        if self.exclusive is not None and self.exclusive == other.exclusive:
            what, _, argument = self.exclusive[0].partition(", the ")
            remedy = f"Give one of them another {argument}=, or leave it out." if argument else "Leave one of them out."
            return f"The callbacks hold two {type(self).__name__}s of one {what}. {remedy}"
        if shared := sorted({*self.row_files} & {*other.row_files}):
            return (
                f"The callbacks hold two loggers that write to {shared[0]}. Leave one of them out, give it another "
                "filename, or pass Trainer(logger=False)."
            )
        return None

    def batches_per_step(self, epoch: int) -> int | None:
        """Return how many batches an optimizer step of an epoch takes; None for the Trainer's argument."""
        return None


def steps_of(callbacks: Sequence[Traits], accumulate_grad_batches: int, batches: int, epochs: int) -> int:
    """Return the optimizer steps of the first epochs, by `batches_per_step` of callbacks, or the Trainer's argument."""
    if all(c.batches_per_step(0) is None for c in callbacks):
        return epochs * -(-batches // accumulate_grad_batches)
    every = (max(c.batches_per_step(epoch) or 1 for c in callbacks) for epoch in range(epochs))
    return sum(-(-batches // n) for n in every)


def hyperparams_named(name: str, trainer: "Trainer", owner: str) -> list[str]:
    """Return the names of a hyperparameter of the optimizer, one for each transform that has it; refuse if none has."""
    known = list(trainer.hyperparams)
    if names := [x for x in known if x == name or x.startswith(f"{name}/")]:
        return names
    raise ArgumentError(
        f"{owner}(hyperparam={name!r}): the optimizer keeps no such hyperparameter.{did_you_mean(name, known)} It "
        f"keeps: {', '.join(known) or 'none'}. Build it in configure_optimizers as "
        "optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(learning_rate=1e-3)."
    )


class Callback(Traits):
    """What a user adds to training: override the hooks that are needed.

    A callback's hook runs before the module's hook of the same name, a DataModule's before both. Only hooks that are
    overridden are called, so an empty hook costs nothing. The order, in which `log` calls `on_log` if there is a row,
    and before it `on_trace` if callbacks traced its step:

    ```
    def fit():
        configure_callbacks()                      # of the module: callbacks after the Trainer's own
        prepare_data()                             # of the DataModule and the module
        setup("fit")
        train_dataloader(), val_dataloader()       # of the DataModule or the module
        configure_optimizers()
        if checkpoint is not None:                 # Trainer(resume=...) or fit(ckpt_path=...)
            on_load_checkpoint(checkpoint)
        on_fit_start()
        if num_sanity_val_steps:
            on_sanity_check_start()
            validate(num_sanity_val_steps)
            on_sanity_check_end()
        on_train_start()
        for epoch in range(max_epochs):            # or until max_steps, max_time or trainer.stop(reason)
            train_epoch()
        on_train_end()
        on_fit_end()
        teardown("fit")                            # after an error too, after on_exception

    def train_epoch():
        on_train_epoch_start()
        row = None
        for batch_idx, batch in enumerate(train_batches):
            if on_train_batch_start(batch, batch_idx) == -1:
                break                              # the rest of the epoch is skipped
            training_step(batch, batch_idx)        # compiled: gradients, optimizer, metrics
            on_train_batch_end(outputs, batch, batch_idx)
            log(row)                               # the one before, whose values are ready by now
            row = row_of_step()                    # every log_every_n_steps optimizer steps
            if validation_is_due():                # val_check_interval, check_val_every_n_epoch
                row = log(row)
                validate()
            if batch_idx + 1 < len(train_batches):
                on_safe_point(False, False)        # (False, True) where training stops in mid-epoch
        log(row)
        on_train_epoch_end()                       # callbacks with runs_last come after the module
        log(row_of_epoch())
        on_safe_point(True, training_is_over())    # ModelCheckpoint saves there, after on_save_checkpoint(checkpoint);
                                                   # on_checkpoint_saved(callback, path) comes once it is written

    def validate(num_batches=None):
        on_validation_start()
        on_validation_epoch_start()
        for dataloader_idx, batches in enumerate(val_batches):
            for batch_idx, batch in enumerate(batches[:num_batches]):
                on_validation_batch_start(batch, batch_idx, dataloader_idx)
                validation_step(batch, batch_idx)  # compiled
                on_validation_batch_end(outputs, batch, batch_idx, dataloader_idx)
        on_validation_epoch_end()
        log(row_of_validation())
        on_validation_end()
    ```

    Checkpoints are taken in `on_safe_point` only; one that another hook asks for is written after the next safe point.
    Before a checkpoint the newest row is logged. A resumed training makes no sanity check, and continues after that
    safe point: in mid-epoch `on_train_epoch_start` does not run again. An interrupted validation begins again.

    `trainer.validate`, `test` and `predict` call `prepare_data`, `setup`, the loader hook, then the hooks of `validate`
    above with `test` or `predict` in place of `validation`, and `teardown`.

    `batch` is the host batch as the loader returned it; `outputs` has device arrays: reading one waits for the step.
    The `module` in a hook is the object passed to `fit`; touching it brings its arrays up to date. Writing to its
    Variables is allowed in every hook but the batch hooks, `on_log` and `on_trace`.

    Example:
        >>> import jaxlit as jl
        >>> class StopAtLoss(jl.Callback):
        ...     def __init__(self, target):
        ...         self.target = target
        ...     def on_log(self, trainer, values, step):
        ...         if values.get("train/loss", float("inf")) <= self.target:
        ...             trainer.stop(f"train/loss reached {self.target}")
    """

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value from a hook, with the arguments and in the places of `TrainModule.log`."""
        TrainModule.log(None, name, value, *args, **kwargs)  # type: ignore[arg-type]

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Log several values from a hook, a mapping or an `nnx.MultiMetric`."""
        for name, value in named_values(dictionary).items():
            self.log(name, value, *args, **kwargs)

    def setup(self, trainer: "Trainer", module: TrainModule, stage: str) -> None:
        """Run first; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: "Trainer", module: TrainModule, stage: str) -> None:
        """Run last, also after an error."""

    def on_fit_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run when the state is on its devices, before any training."""

    def on_fit_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run after `on_train_end`."""

    def on_sanity_check_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run before the few validation batches that precede training."""

    def on_sanity_check_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run after them; their metrics are dropped."""

    def on_train_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run before the first epoch."""

    def on_train_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run after the last epoch."""

    def on_train_epoch_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run after the last batch of an epoch and its validation."""

    def on_train_batch_start(self, trainer: "Trainer", module: TrainModule, batch: Any, batch_idx: int) -> int | None:
        """Run before a training step; returning -1 skips the rest of the epoch."""

    def on_train_batch_end(
        self, trainer: "Trainer", module: TrainModule, outputs: Mapping[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Run after a training step was dispatched; `outputs["loss"]` is its loss."""

    def on_validation_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run before validation."""

    def on_validation_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run after validation, when its metrics have been logged."""

    def on_validation_epoch_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run before the first validation batch."""

    def on_validation_epoch_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run after the last validation batch; its metrics are in `trainer.callback_metrics`."""

    def on_validation_batch_start(
        self, trainer: "Trainer", module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before the step of a batch; `on_test_batch_start` and `on_predict_batch_start` take the same."""

    def on_validation_batch_end(
        self, trainer: "Trainer", module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after the step of a batch; `on_test_batch_end` and `on_predict_batch_end` take the same.

        `outputs` is what the step returned, as device arrays.
        """

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_test_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run before testing."""

    def on_test_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run after testing."""

    def on_test_epoch_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run before the first test batch."""

    def on_test_epoch_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run after the last test batch."""

    def on_predict_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run before prediction."""

    def on_predict_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run after prediction."""

    def on_predict_epoch_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run before the first batch to predict."""

    def on_predict_epoch_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Run after the last batch to predict."""

    def on_safe_point(self, trainer: "Trainer", module: TrainModule, epoch_over: bool, training_over: bool) -> None:
        """Run between two batches, or after an epoch, when all work of them is done.

        Their rows are known and a validation that was due is over, unless an interrupt leaves it to a resume. It does
        not run after the last batch of an epoch, but at the epoch's end. Changes of the module that a checkpoint should
        contain must be made before.

        Args:
            trainer: The trainer.
            module: The module.
            epoch_over: Whether an epoch has ended.
            training_over: Whether training ends here.
        """

    def due_in(self, step: int) -> int | None:
        """Return in how many optimizer steps this callback acts next; None for not before the epoch's end.

        A callback that overrides this costs nothing in the steps between: its `on_train_batch_start`,
        `on_train_batch_end` and, between two batches, `on_safe_point` run in the batches of that step only. The ends of
        epochs and of training always call `on_safe_point`. This method is called when an epoch or a resumed training
        begins, after each step in which such a callback acted, after steps are undone or compiled, after a checkpoint
        is written, and after an argument of the Trainer was set. A hook that a subclass overrides without overriding
        this method runs in each step.

        Args:
            step: Optimizer steps taken.

        Example:
            >>> import jaxlit as jl
            >>> class Every100(jl.Callback):
            ...     def due_in(self, step):
            ...         return 100 - step % 100
            ...     def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            ...         print(trainer.global_step, float(outputs["loss"]))
        """
        return 1

    def due_in_seconds(self) -> float | None:
        """Return in how many seconds this callback acts next, even if `due_in` names a later step; None for no time.

        The callback acts in the first dispatch that begins after that time, and cuts none. This method is called after
        each call of `due_in`. Each of several processes has its own clock, so a callback that acts by time must not
        wait for others.
        """
        return None

    def on_save_checkpoint(self, trainer: "Trainer", module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Run before a checkpoint is written; JSON values in `checkpoint` are saved with it."""

    def on_checkpoint_saved(self, trainer: "Trainer", module: TrainModule, callback: "Callback", path: Place) -> None:
        """Run when a checkpoint is complete on the disk, which may be some steps later.

        Args:
            trainer: The trainer.
            module: The module.
            callback: The callback that wrote it, a ModelCheckpoint or the like.
            path: The checkpoint's folder; of one in a bucket, an object with methods of `Path` whose text is the URL.
        """

    def on_load_checkpoint(self, trainer: "Trainer", module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Run when training has restored its state from a checkpoint, before `on_fit_start`."""

    def on_log(self, trainer: "Trainer", values: dict[str, float], step: int) -> None:
        """Receive one logged row.

        Args:
            trainer: The trainer.
            values: The row's metrics and `epoch`, as Python floats.
            step: 0-based index of the optimizer step of the values.
        """

    trace_every_n_steps: int | None = None
    """Optimizer steps between calls of `trace_step`; None for `log_every_n_steps`, 0 for no call."""

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        """Compute something inside the compiled optimizer step, as a pure function of what is in it.

        It is compiled into the last step of each `trace_every_n_steps`; other steps cost nothing. Unlike a hook, it
        sees traced arrays, sharded by the strategy, and no trainer.

        Args:
            grads: The gradients, averaged over devices and batches, before clipping.
            updates: What the optimizer adds to the parameters; zeros for a step that was skipped as not finite.
            params: The parameters before the step.
            opt_state: The optimizer's state after the step.

        Returns:
            Arrays by name. Scalars are logged by their names in the row of that step, which is added if there is none;
            all arrays, also scalars, are passed to `on_trace`.

        Example:
            >>> import jaxlit as jl, optax
            >>> class UpdateRatio(jl.Callback):
            ...     trace_every_n_steps = 100
            ...     def trace_step(self, grads, updates, params, opt_state):
            ...         return {"update_ratio": optax.tree.norm(updates) / optax.tree.norm(params)}
        """
        return {}

    def on_trace(self, trainer: "Trainer", values: dict[str, np.ndarray], step: int) -> None:
        """Receive what `trace_step` computed, a step later.

        Args:
            trainer: The trainer.
            values: The arrays, on the host.
            step: 0-based index of the optimizer step.
        """

    def init_arrays(self, params: Any) -> Any:
        """Return arrays that this callback stores in the training state; `update_arrays` changes them at each step.

        For averages of the weights, statistics of the gradients and the like, whose arrays are as large as the
        parameters and change with every step. They are saved in checkpoints and restored bit by bit, also under another
        strategy. An array with the shape and path of a parameter is split over the devices like that parameter, any
        other is replicated. `trainer.callback_arrays(callback)` reads them. When training continues from a checkpoint
        without them, they are initialized from its parameters.

        Both methods are compiled: they read attributes of the callback once in a fit, when they are traced. Values that
        change belong in the arrays, or follow from `global_step`.

        Args:
            params: The trained parameters of step 0, a pytree of arrays on their devices.

        Returns:
            A pytree of arrays, which may be `params` themselves.

        Example:
            >>> import jax, jaxlit as jl
            >>> class EMA(jl.Callback):
            ...     def __init__(self, decay=0.999):
            ...         self.decay = decay
            ...     def init_arrays(self, params):
            ...         return params
            ...     def update_arrays(self, arrays, params, grads, global_step):
            ...         mix = lambda old, new: self.decay * old + (1 - self.decay) * new
            ...         return jax.tree.map(mix, arrays, params), params
        """

    def update_arrays(self, arrays: Any, params: Any, grads: Any, global_step: jax.Array) -> tuple[Any, Any]:
        """Return the arrays and the parameters after an optimizer step: a pure function, compiled into it.

        Attributes that it reads are compiled in, see `init_arrays`. It runs once an optimizer step, after the
        optimizer, however many batches a step takes. In a step that is skipped as not finite, arrays and parameters do
        not change. Callbacks run in their order, each with the parameters that the one before has returned.

        Args:
            arrays: The arrays of `init_arrays`, after the last step.
            params: The parameters after the optimizer's update.
            grads: The gradients, averaged over devices and batches, before clipping.
            global_step: () int32, the optimizer step's index, from 0.

        Returns:
            `(arrays, params)`, both of the same structure, shapes and dtypes as the arguments.
        """
        return arrays, params

    def eval_params(self, arrays: Any) -> Any:
        """Return the arrays that validations of a fit and `trainer.apply` use in place of the parameters.

        Args:
            arrays: Placeholders for the arrays of `init_arrays`.

        Returns:
            A pytree like the parameters, of unchanged leaves of `arrays`; None for the parameters themselves.
        """

    def on_exception(self, trainer: "Trainer", module: TrainModule, exception: BaseException) -> None:
        """Run when training raised, before `teardown`; the exception is raised again."""

    @property
    def state_key(self) -> str:
        """The name of its state in a checkpoint; callbacks with the same name are numbered in their order."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint, as JSON values; called before the first step, too."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Measured(UserDict[str, float]):
    """Values that callbacks add to a row, by names that are not logged otherwise; only `put` writes to it."""

    def __init__(self, row: dict[str, float]) -> None:
        super().__init__()
        self._logged = {*row, "step", "epoch"}

    def put(self, owner: Callback, values: dict[str, float]) -> None:
        """Add numbers; refuse a name that is logged already."""
        name = type(owner).__name__
        if duplicates := sorted(values.keys() & (self._logged | self.keys())):
            raise LogError(f"{name} adds {duplicates[0]!r} to rows, which is logged already. Rename yours.")
        for key, value in values.items():
            try:
                self.data[key] = float(value)
            except (TypeError, ValueError):
                raise LogError(f"{name} adds {key!r} to rows, which takes a number, got {value!r:.60}.") from None

    def __setitem__(self, key: str, value: float) -> NoReturn:
        """Refuse to overwrite a value."""
        raise LogError(f"row[{key!r}] = ... could overwrite a value of the row. Write row.put(self, {{{key!r}: ...}}).")


class Measure(Callback):
    """Adds values to the rows of steps, those of every `log_every_n_steps`.

    They wait for no device: a row is filled a step late, when its values have arrived and its step is done.

    Example:
        >>> import jaxlit as jl
        >>> class Queue(jl.callbacks.Measure):
        ...     def __init__(self, queue):
        ...         self.queue = queue
        ...     def fill_row(self, trainer, module, row, step):
        ...         row.put(self, {"waiting": len(self.queue)})
    """

    def setup(self, trainer: "Trainer", module: TrainModule, stage: str) -> None:
        """Raise an ArgumentError if the training has no rows of steps."""
        if stage == "fit" and not trainer.log_every_n_steps:
            raise ArgumentError(
                f"{type(self).__name__} adds to the rows of steps, and Trainer(log_every_n_steps=0) makes none. Pass "
                "log_every_n_steps=50, or leave it out of the callbacks."
            )

    def begin_row(self, trainer: "Trainer", module: TrainModule, step: int) -> None:
        """Run when an optimizer step with a row was dispatched."""

    def fill_row(self, trainer: "Trainer", module: TrainModule, row: Measured, step: int) -> None:
        """Run when the row's values have arrived.

        Args:
            trainer: The trainer.
            module: The module.
            row: Takes values.
            step: 0-based index of the optimizer step.
        """
