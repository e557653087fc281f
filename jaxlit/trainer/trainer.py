"""The Trainer: what a user calls, and what hooks read."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.files import FOLDER
from jaxlit.checkpoints.places import place_of
from jaxlit.core.module import STAGES, TrainModule
from jaxlit.core.train_state import PrecisionName
from jaxlit.data.loaders import DataModule
from jaxlit.distributed.job import join_job
from jaxlit.engine.creation import lazy
from jaxlit.faces import no_such_name, takes_only_its_arguments
from jaxlit.loop.evaluate import evaluate, predict
from jaxlit.loop.settings import ClipAlgorithm, NanPolicy, Settings
from jaxlit.loop.train import fit
from jaxlit.programs.costs import Hardware
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.registry import StrategyName, resolve_strategy
from jaxlit.trainer.defaults import all_callbacks, config_of
from jaxlit.trainer.explanation import Explanation, explain
from jaxlit.trainer.plan import Plan, make_plan
from jaxlit.trainer.properties import TrainerProperties, check_settable
from jaxlit.trainer.refusals import Request, check_predictions
from jaxlit.trainer.session import Session


class Trainer(TrainerProperties):
    """Trains a `TrainModule` under a strategy.

    Names, meanings and defaults are Lightning's unless said. `fit` wants a limit: `max_epochs`, `max_steps`,
    `max_time` or `fast_dev_run`.

    Args:
        strategy: A name ("single", "ddp", "fsdp", "zero2", "zero1", "hsdp", "shard_map", "pmap", "replicas:8" or a
            registered one), a `Strategy`, or "auto" for the first that fits into memory, see `strategies.Auto`.
        devices: How many devices, or "auto" for all; `single` uses one. Absent ones are refused when a run begins.
        mesh: A `jax.sharding.Mesh`, whose axes keep their types, or the size of each axis by name, one -1 at most; None
            for the strategy's.
        precision: "32-true"; "bf16-mixed" or "16-mixed", whose steps compute in 16 bits while parameters, optimizer,
            loss and metrics stay in float32 ("16-mixed" scales the loss); or "bf16-true", whose parameters are
            bfloat16 as well.
        max_epochs: Epochs to train; None or -1 for no limit.
        min_epochs: Epochs before which `stop` does not end training.
        max_steps: Optimizer steps to train, -1 for no limit.
        min_steps: Optimizer steps before which `stop` does not end training, nor before the end of the first epoch if
            `min_epochs` is None.
        max_time: The time after which to stop: a timedelta, a dict of its arguments or "DD:HH:MM:SS".
        callbacks: A callback or a list of them.
        logger: True for a CSVLogger unless the callbacks hold one, False, or loggers (which are callbacks). With a
            WandbLogger there is a CSVLogger too, unless it is False: W&B loses rows if it is killed.
        limit_train_batches: Batches an epoch: an int counts, a float is a fraction.
        limit_val_batches: The same for validation; 0 turns it off.
        limit_test_batches: The same for `test`.
        limit_predict_batches: The same for `predict`.
        overfit_batches: Train on these few batches in every epoch, unshuffled, and validate on as many: a count, or a
            fraction as a float, over the limits above; 0.0 is off.
        fast_dev_run: Run this many batches (True: one) of everything once, without loggers and early stopping.
        num_sanity_val_steps: Validation batches of each loader before training, -1 for all.
        val_check_interval: Training batches between validations, a fraction of an epoch, or a time like `max_time`.
        check_val_every_n_epoch: Epochs from one that validates to the next; None counts batches across epochs.
        accumulate_grad_batches: Loader batches an optimizer step, weighted by their rows.
        gradient_clip_val: What the gradients of an optimizer step are clipped to; None for no clipping.
        gradient_clip_algorithm: "norm" (the default: the norm of all gradients together) or "value".
        steps_per_execution: Batches whose steps are one dispatch, wherever nothing is due between them; "auto" for as
            many as take 50 ms, at most 32. Batch hooks of all run before and after it, see docs/performance.md.
        log_every_n_steps: Optimizer steps between logged rows, 0 for none. "auto" (default): an eighth of an epoch,
            between 1 and 50 steps; 10 steps for a loader without a length.
        reload_dataloaders_every_n_epochs: Epochs after which a loader hook is called again, 0 for never.
        enable_checkpointing: Add a ModelCheckpoint, which writes after epochs and at the end, unless there is one.
        enable_progress_bar: Add a ProgressBar unless the callbacks hold one.
        enable_model_summary: Add a ModelSummary unless the callbacks hold one.
        default_root_dir: The run's folder; None for a fresh `runs/<time>-<id>`, made at the first write. A URL such as
            "gs://bucket/run" for one of this machine whose rows are copied there; checkpoints are written there.
        resume: "auto" to continue from the newest checkpoint in `default_root_dir`, if there is one: the same command
            starts a training and continues it. Or a checkpoint, or a run's folder, to continue from.
        seed: The seed of a lazy module's `rngs`.
        nan_policy: What a non-finite loss or gradient does: "raise" (training ends before it, which is saved),
            "skip" (no update for that step), "rollback" (back to the newest checkpoint, without the batches since)
            or "ignore" (nothing is checked).
        prefetch: Batches that a thread draws ahead of the step; 0 for no thread, "auto" for one (two batches) if the
            first batches are slow to come.
        host_keys: Keys of dict batches, or places in tuples, that stay on the host, for strings or objects. Hooks find
            them in their batch, and predictions that are dicts take them over; in a tuple a step finds None there.
        max_recompiles: How many times batches of another shape or dtype may make a loader's step compile again; None
            for no limit, with a warning from the third on.
        data_timeout: Seconds, or a timedelta, that a loader may take for a batch; then the stacks are printed, what can
            be saved is, and the process ends with code 76. None for no limit.
        hang_timeout: The same for all that happens: a step, its compiling, a hook, a save or a batch may take as long.
        fail_timeout: Seconds, or a timedelta, that each of several processes has for its end once one of them has
            failed: for `teardown`, and for what writes in the background.
        max_in_flight: The most steps dispatched and not finished; "auto": 32 on one device, 4 on several.
        compile_cache: Store compiled programs, so that a later start loads them: True for `~/.cache/jaxlit/compiled`,
            a folder, or False. A cache that you have configured in jax is used instead.
        debug: Check every batch and, unless nan_policy="ignore", every step's loss, wait for each step, overwrite no
            array, and warn of a step that each trace makes another. Slow; `jax.disable_jit` works as well.

    Raises:
        ArgumentError: A value is out of its set, or does not fit another.
        ArgumentTypeError: A value has the wrong type, or no argument has this name.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy="ddp", max_epochs=3, logger=False)
    """

    @takes_only_its_arguments("Trainer")
    def __init__(
        self,
        *,
        strategy: StrategyName | Strategy = "auto",
        devices: int | str = "auto",
        mesh: Mapping[str, int] | Mesh | None = None,
        precision: PrecisionName = "32-true",
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        logger: bool | Callback | Sequence[Callback] = True,
        limit_train_batches: int | float = 1.0,
        limit_val_batches: int | float = 1.0,
        limit_test_batches: int | float = 1.0,
        limit_predict_batches: int | float = 1.0,
        overfit_batches: int | float = 0.0,
        fast_dev_run: bool | int = False,
        num_sanity_val_steps: int = 2,
        val_check_interval: int | float | str | timedelta | dict[str, int] = 1.0,
        check_val_every_n_epoch: int | None = 1,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: ClipAlgorithm | None = None,
        steps_per_execution: int | Literal["auto"] = 1,
        log_every_n_steps: int | Literal["auto"] = "auto",
        reload_dataloaders_every_n_epochs: int = 0,
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        enable_model_summary: bool = True,
        default_root_dir: str | Path | None = None,
        resume: str | Path | None = None,
        seed: int = 0,
        nan_policy: NanPolicy = "raise",
        prefetch: int | Literal["auto"] = "auto",
        host_keys: Sequence[str | int] = (),
        max_recompiles: int | None = None,
        data_timeout: float | timedelta | None = None,
        hang_timeout: float | timedelta | None = None,
        fail_timeout: float | timedelta = 10.0,
        max_in_flight: int | Literal["auto"] = "auto",
        compile_cache: bool | str | Path = True,
        debug: bool = False,
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        settings = Settings(**arguments)
        join_job()
        # "auto" alone looks at the devices, as every strategy does when a run begins.
        if settings.strategy != "auto" or settings.mesh is not None:
            resolve_strategy(settings.strategy, settings.device_count, settings.mesh)
        chosen = all_callbacks(settings)
        self._session = Session(self, settings, chosen, config_of(arguments, chosen))

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            check_settable(self, name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if isinstance(known := getattr(type(self), name, None), property):
            return known.__get__(self)  # raises its AttributeError again, which says what to do
        raise no_such_name("Trainer", name, [x for x in dir(type(self)) if not x.startswith("_")])

    @takes_only_its_arguments("Trainer.fit")
    def fit(
        self,
        model: TrainModule | lazy,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        *,
        init_from: str | Path | Callable[[Any], object] | None = None,
        strict: bool = True,
        reset_optimizer: bool = False,
    ) -> None:
        """Train a module; afterwards it holds the trained weights.

        A second call starts again at epoch 0, unless `Trainer(resume=...)` says where to continue.

        Ctrl-C ends training after the step that runs, with a checkpoint and `trainer.interrupted` set; a second one
        raises KeyboardInterrupt. SIGTERM and SIGHUP end it as well, and leave by SystemExit with code 143 and 129.

        Args:
            model: The module, or `jl.lazy(...)`; then the built module is `trainer.module`.
            train_dataloaders: A `jl.ArrayLoader`, a grain dataset of batches or another re-iterable of pytrees of
                numpy arrays; a batch holds global rows. Left out, the module's `train_dataloader` hook is called.
            val_dataloaders: The same for validation, or a list of several.
            datamodule: A `jl.DataModule` in place of loaders.
            ckpt_path: Continue from a checkpoint: its path, a run's folder, "last" for the newest one in this Trainer's
                folder, or "best" for the best. A finished run ends at once; a larger `max_epochs` continues it.
            init_from: Begin a new training with the weights of a checkpoint, named as for `ckpt_path`, or of a file of
                safetensors or numpy, or a repository, `"hf://owner/name"`: those that fit by name and shape, while a
                table names the others. Or a function that gives the built module its weights:
                `lambda module: jl.load_weights(module, path, rename)`.
                Where `Trainer(resume="auto")` continues, only what its checkpoint has left out is taken.
            strict: Refuse a checkpoint to continue from that is not exactly of this model and optimizer; otherwise what
                fits is taken, and the rest named.
            reset_optimizer: Begin with a new state of the optimizer, made from the restored weights.

        Raises:
            JaxlitError: An argument, the module, the data or the checkpoint cannot be used.
        """
        train = (train_dataloaders, "train_dataloaders")
        val = (val_dataloaders, "val_dataloaders")
        loaders = {"training": train, "validation": val}
        begins_with = (ckpt_path, init_from, strict, reset_optimizer)
        self._session.run(Request(STAGES["training"], model, loaders, datamodule, *begins_with), fit)

    @takes_only_its_arguments("Trainer.validate")
    def validate(
        self,
        model: TrainModule | lazy | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        *,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Run the validation step over loaders.

        Args:
            model: The module; None for the one of the last fit.
            dataloaders: A loader, or a list of several.
            datamodule: A `jl.DataModule` in place of loaders.
            ckpt_path: Take the weights of a checkpoint, as in `fit`; a module that is not lazy keeps its weights.
            verbose: Whether to print the metrics.

        Returns:
            The metrics of each loader.
        """
        self._session.control.verbose = check.boolean("verbose", verbose, owner="Trainer.validate")
        return self._evaluate("validation", evaluate, model, dataloaders, datamodule, ckpt_path)

    @takes_only_its_arguments("Trainer.follow")
    def follow(
        self,
        run: str | Path,
        model: TrainModule | lazy,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        every: float = 10.0,
        timeout: float | None = None,
    ) -> list[dict[str, float]]:
        """Validate each new checkpoint of a run that trains in another process, until that has ended.

        Loggers get a row of each at the checkpoint's step. The training does not wait: pass it no validation loader,
        and `ModelCheckpoint(save_top_k=-1)` or enough, as it may delete a checkpoint before it is read here. One that
        was interrupted or paused, as by `max_time`, or has raised an error, is waited for.

        Args:
            run: A run's folder or URL, which need not be there yet; one of checkpoints only knows no end.
            model: The module, as for `validate`.
            dataloaders: A loader, or a list of several.
            datamodule: A `jl.DataModule` in place of loaders.
            monitor: The metric by which the best checkpoint is copied to `<run>/best`, to stay; None for no copy.
            mode: Whether "min" or "max" of it is best.
            every: Seconds between looks for a new checkpoint.
            timeout: Seconds without a new one after which it gives up with a warning; None to wait for ever.

        Returns:
            The metrics of each checkpoint, with its "step".

        Raises:
            ArgumentError: An argument is out of its set, or validation logs no such metric.

        Example:
            >>> import jaxlit as jl
            >>> from jaxlit.testing import Line, line_data
            >>> def watch():
            ...     watcher = jl.Trainer(default_root_dir="validation")
            ...     return watcher.follow("runs/x", Line(), line_data(16), monitor="val/loss")
        """
        from jaxlit.trainer.follow import follow

        owner = "Trainer.follow"
        check.require(isinstance(run, str | Path) and str(run) != "", "run", run, "takes a folder", owner=owner)
        place, root = place_of(check.url("run", run, owner=owner)), place_of(self.saver.root)
        rule = "takes a run's folder other than this Trainer's default_root_dir, which is for its own rows"
        check.require(place not in (root, root / FOLDER), "run", run, rule, owner=owner)
        check.require(isinstance(monitor, str | None) and monitor != "", "monitor", monitor, "takes a str", owner=owner)
        check.one_of("mode", mode, ("min", "max"), owner=owner)
        check.number("every", every, low=0, owner=owner)
        check.number("timeout", 0 if timeout is None else timeout, low=0, owner=owner)
        given = {"model": model, "dataloaders": dataloaders, "datamodule": datamodule}
        return follow(self, place, given, monitor, mode, every, timeout)

    @takes_only_its_arguments("Trainer.test")
    def test(
        self,
        model: TrainModule | lazy | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        *,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Run the test step over loaders; otherwise like `validate`."""
        self._session.control.verbose = check.boolean("verbose", verbose, owner="Trainer.test")
        return self._evaluate("test", evaluate, model, dataloaders, datamodule, ckpt_path)

    @takes_only_its_arguments("Trainer.predict")
    def predict(
        self,
        model: TrainModule | lazy | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        *,
        return_predictions: bool = True,
    ) -> list[Any] | None:
        """Run the predict step over loaders; the first arguments are those of `validate`.

        Args:
            model: The module.
            dataloaders: The loaders.
            datamodule: The `jl.DataModule`.
            ckpt_path: The checkpoint.
            return_predictions: Whether to keep and return what the step returns.

        Returns:
            One entry a batch: what `predict_step` returned, as numpy, with the real rows in loader order. For
            several loaders a list of such lists. None without `return_predictions`.
        """
        check_predictions(self.settings, return_predictions)
        work = partial(predict, keep=return_predictions)
        outputs = self._evaluate("predict", work, model, dataloaders, datamodule, ckpt_path)
        return None if not return_predictions else outputs if len(outputs) != 1 else outputs[0]

    def _evaluate(self, name: str, work: Any, model: Any, dataloaders: Any, datamodule: Any, ckpt_path: Any) -> Any:
        loaders = {name: (dataloaders, "dataloaders")}
        request = Request(STAGES[name], model, loaders, datamodule, ckpt_path)
        return self._session.run(request, lambda run: work(run, name, run.data.val))

    def apply(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Run `fn(module, *inputs)` compiled under the strategy, on the newest weights, for example from a callback.

        The module is a copy of `trainer.module` with the arrays that it has now, in evaluation mode, in the precision
        of a step; what `fn` writes to it is dropped. It is compiled once for each function, so pass the same function
        again, not a new lambda.

        Args:
            fn: A function of a module and arrays to a pytree of arrays.
            *inputs: Pytrees of arrays, split over the devices along their first dim where it divides.

        Returns:
            What `fn` returned, as device arrays.

        Raises:
            ArgumentError: Nothing has run yet.

        Example:
            >>> import jax, jaxlit as jl
            >>> def mean_output(module, x):
            ...     return module(x).mean()
            >>> class Watch(jl.Callback):
            ...     def __init__(self, x):
            ...         self.x = x
            ...     def on_train_epoch_end(self, trainer, module):
            ...         print(float(trainer.apply(mean_output, self.x)))
        """
        return self._session.apply(fn, *inputs)

    @takes_only_its_arguments("Trainer.save_checkpoint")
    def save_checkpoint(self, path: str | Path, weights_only: bool = False, *, trained_only: bool = False) -> None:
        """Write a checkpoint of everything, from a hook of `fit` or after it, and wait until it is there.

        After a fit it has what was written to the module since, but to random generators. In several processes all must
        call it. In a hook between `on_fit_start` and `on_train_end` it is written after the next `on_safe_point`, where
        nothing is left to do; in that hook at once.

        Args:
            path: Its folder; an older checkpoint there is replaced once the new one is complete.
            weights_only: Leave out all but the module's arrays; no training continues from it.
            trained_only: Leave out the module's arrays that no step changes, see `ModelCheckpoint`.

        Raises:
            CheckpointError: It cannot be written, or nothing was trained.
            NonFiniteError: A parameter is not finite, and `nan_policy` is not "ignore".
            ArgumentError: `path` is something else than a checkpoint.

        Example:
            >>> import jaxlit as jl
            >>> class Twice(jl.Callback):
            ...     def on_safe_point(self, trainer, module, epoch_over, training_over):
            ...         if trainer.global_step in (100, 1000):
            ...             trainer.save_checkpoint(f"kept/at_{trainer.global_step}")
        """
        self.saver.save(path, weights_only=weights_only, trained_only=trained_only)

    def explain(self) -> Explanation:
        """Return where the time of the newest run went, how its state is sharded, and what its programs cost.

        It prints as tables, also while the run continues; it waits for no device, and compiles nothing again.

        Raises:
            ArgumentError: Nothing has run yet.
        """
        return explain(self._session.current, self._session.compiles)

    def plan(
        self,
        model: TrainModule | lazy,
        data: Any = None,
        *,
        devices: int | Sequence[int] | None = None,
        strategies: Sequence[str | Strategy] | None = None,
        hardware: str | Hardware | None = None,
        batch_size: int | None = None,
        rows_per_device: int | None = None,
        timeout: float = 600.0,
    ) -> Plan:
        """Return what an optimizer step would take: memory, operations, traffic and time, before anything is trained.

        The step is compiled from shapes alone: no weights are made, and of the data only the first batch is read. More
        devices than there are here are simulated in another process.

        Args:
            model: The module; `jl.lazy(...)` for one that is too large for this machine.
            data: A loader, or a `jl.DataModule`; its first batch counts.
            devices: How many, or several numbers; None for those that are there.
            strategies: Names or strategies; None for the Trainer's.
            hardware: What is to train it: a name such as "NVIDIA H100", or a `jl.Hardware`; None for what is there.
            batch_size: Rows of a batch, of all devices together; None for those of the first batch.
            rows_per_device: The same for each device.
            timeout: Seconds that a compile in another process may take.

        Raises:
            JaxlitError: An argument or the data cannot be used, or no strategy can train the module; it says why.

        Example:
            >>> import jaxlit as jl
            >>> model, data = jl.testing.Line(), jl.testing.line_data()
            >>> plan = jl.Trainer(max_steps=1).plan(model, data, strategies=["single"], devices=1)
            >>> plan.rows()[0]["parameters"]
            4
        """
        asked = {"devices": devices, "strategies": strategies, "hardware": hardware, "batch_size": batch_size}
        return make_plan(self, model, data, **asked, rows_per_device=rows_per_device, timeout=timeout)
