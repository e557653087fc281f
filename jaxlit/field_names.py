"""What the names of PyTorch Lightning, Keras and Flax trainers are called here, where they are not called the same."""

import inspect
import sys
from collections.abc import Iterable, Mapping

from jaxlit.errors import ArgumentTypeError, did_you_mean

_WATCH = "Log it: self.log('lr', schedule(self.global_step))."
_ARRAYS = "Subclass jl.Callback with init_arrays and update_arrays, which keep arrays in the training state."
_LOGGER = "Subclass jl.callbacks.Logger: log_metrics(metrics, step) takes every row."
_ONE_STEP = "The optimizer's update is compiled into the step; a loop of your own takes jl.compile_step."
_CLI = "jsonargparse takes the classes as they are: parser.add_class_arguments(jl.Trainer, 'trainer')."
_PARTS = "Give parts optimizers of their own: optax.multi_transform, and jax.lax.stop_gradient in the loss."
_FOLDER = "The run's folder holds the file: Trainer(default_root_dir='logs')."
_FLUSHED = "Every row is flushed as it comes."
_TOLD = "The last lines of a run tell what it did."
_PLACED = "The strategy says where arrays lie: Trainer(strategy='fsdp')."
_RANK = "Ask jax.process_index(), or trainer.is_global_zero."

# By what has not the name: of each name one line of advice.
ADVICE: Mapping[str, Mapping[str, str]] = {
    "jl": {
        "LightningModule": "It is jl.TrainModule.",
        "LightningDataModule": "It is jl.DataModule.",
        "seed_everything": "Random numbers of jax have no global state: nnx.Rngs(seed) for a module, Trainer(seed=0) "
        "for jl.lazy, jl.ArrayLoader(seed=seed) for the order of rows.",
        "loggers": "They are in jl.callbacks: loggers are callbacks.",
        "LightningCLI": _CLI,
        "cli": _CLI,
        "Fabric": "It is jl.compile_step: the Trainer's step for a loop of your own.",
        "profilers": "jl.callbacks.Profiler traces some steps; trainer.explain() tells where the time went.",
        "plugins": "What they do is said by Trainer(strategy=..., precision=...).",
        "DataLoader": "It is jl.ArrayLoader for arrays in memory; a DataLoader of torch is taken as it is.",
        "Tuner": "There is no tuner: fit with max_steps for each value.",
        "rank_zero_only": "Ask trainer.is_global_zero in the hook: if trainer.is_global_zero: ...",
    },
    "jl.callbacks": {
        "LearningRateMonitor": _WATCH,
        "MLflowLogger": "It is jl.callbacks.MLFlowLogger, as Lightning spells it.",
        "CometLogger": _LOGGER,
        "NeptuneLogger": _LOGGER,
        "RichProgressBar": "It is jl.callbacks.ProgressBar.",
        "TQDMProgressBar": "It is jl.callbacks.ProgressBar.",
        "RichModelSummary": "It is jl.callbacks.ModelSummary.",
        "Timer": "Pass Trainer(max_time='00:01:00:00').",
        "EMAWeightAveraging": "It is jl.callbacks.EMA(decay).",
        "StochasticWeightAveraging": "It is jl.callbacks.WeightAveraging(update_starting_at_epoch=...); the "
        "optimizer's schedule says the learning rate.",
        "BackboneFinetuning": "Train some variables only: jl.Optimizer(tx, wrt=filter).",
        "BaseFinetuning": "Train some variables only: jl.Optimizer(tx, wrt=filter).",
        "GradientAccumulationScheduler": "Set trainer.accumulate_grad_batches in on_train_epoch_start.",
        "BasePredictionWriter": "Write in on_predict_batch_end, with trainer.predict(..., return_predictions=False).",
        "OnExceptionCheckpoint": "jl.callbacks.ModelCheckpoint writes one after an error as well.",
        "LearningRateFinder": "There is none: train a few steps with each rate, Trainer(max_steps=100).",
        "BatchSizeFinder": "There is none: trainer.explain() tells the memory that a step takes.",
        "ModelPruning": "Mask the gradients and weights by optax: optax.chain(tx, optax.masked(...)).",
    },
    "log argument": {
        "sync_dist": "Values are those of all devices and processes anyway: leave it out.",
        "sync_dist_group": "Values are those of all devices and processes anyway: leave it out.",
        "rank_zero_only": "Values are those of all devices, and the first process writes them: leave it out.",
        "metric_attribute": "Leave it out.",
        "enable_graph": "jax keeps no graph of a value: leave it out.",
    },
    "save_hyperparameters argument": {
        "logger": "Every logger is told of them when a run begins: leave it out.",
        "frame": "The constructor's arguments are known: leave it out.",
    },
    "jl.strategies": {
        "DDPStrategy": "It is jl.strategies.DDP, 'ddp'.",
        "FSDPStrategy": "It is jl.strategies.FSDP, 'fsdp'.",
        "DeepSpeedStrategy": "Its stages are jl.strategies.FSDP(stage=1, 2 or 3).",
        "ModelParallelStrategy": "It is jl.strategies.TensorParallel.",
        "SingleDeviceStrategy": "It is jl.strategies.SingleDevice, 'single'.",
    },
    "TrainModule": {
        "optimizers": _ONE_STEP,
        "lr_schedulers": "A schedule is a part of the optimizer: optax.adam(schedule).",
        "manual_backward": _ONE_STEP,
        "toggle_optimizer": _PARTS,
        "untoggle_optimizer": _PARTS,
        "clip_gradients": "Pass Trainer(gradient_clip_val=1.0).",
        "device": f"jax places what a step makes. {_PLACED}",
        "to": _PLACED,
        "cuda": _PLACED,
        "cpu": "jax.device_get(nnx.state(module)) brings the weights to the host.",
        "dtype": "Trainer(precision='bf16-mixed') says the dtype of a step; an array has its own.",
        "global_rank": _RANK,
        "local_rank": _RANK,
        "print": "In a step jax.debug.print('{}', x); in a hook print, where self.trainer.is_global_zero.",
        "freeze": "Train some variables only: jl.Optimizer(tx, wrt=filter) from configure_optimizers.",
        "unfreeze": "Train other variables: jl.Optimizer(tx, wrt=filter) from configure_optimizers.",
        "all_gather": "A step sees the whole batch; under 'shard_map' jax.lax.all_gather(x, 'data') gathers.",
        "state_dict": "nnx.state(module) is it.",
        "load_state_dict": "nnx.update(module, state), or a checkpoint: Model.load_from_checkpoint(path).",
        "parameters": "nnx.state(module, nnx.Param) are they.",
        "named_parameters": "nnx.to_flat_state(nnx.state(module, nnx.Param)) are they.",
        "register_buffer": "Keep the array in a Variable: self.buffer = nnx.Variable(x).",
        "zero_grad": "Gradients are values of each step: there is nothing to reset.",
        "example_input_array": "The first batch is looked at: nothing has to be given.",
        "to_onnx": "jax.export writes a compiled function: jax.export.export(jax.jit(fn))(x).",
        "backward": _ONE_STEP,
        "optimizer_step": _ONE_STEP,
        "lr_scheduler_step": "A schedule is a part of the optimizer: optax.adam(schedule).",
        "automatic_optimization": f"It always is automatic. {_PARTS}",
        "requires_grad_": "Train some variables only: jl.Optimizer(tx, wrt=filter) from configure_optimizers.",
        "log_grad_norm": "Pass Trainer(callbacks=jl.callbacks.GradientNorm()).",
        "half": "Pass Trainer(precision='16-mixed').",
        "to_torchscript": "jax.export writes a compiled function: jax.export.export(jax.jit(fn))(x).",
    },
    "Trainer": {
        "optimizers": "trainer.state.opt_state is their state, trainer.hyperparams what optax has injected.",
        "lr_scheduler_configs": "A schedule is a part of the optimizer: optax.adam(schedule).",
        "world_size": "trainer.strategy.mesh.size is the number of devices, jax.process_count() that of processes.",
        "num_devices": "trainer.strategy.mesh.size is it.",
        "device_ids": "trainer.strategy.mesh.devices are they.",
        "global_rank": _RANK,
        "local_rank": _RANK,
        "node_rank": _RANK,
        "num_nodes": "jax.process_count() is it: processes meet by jl.distributed.initialize.",
        "is_last_batch": "A hook knows its batch_idx: it is the last at trainer.num_training_batches - 1.",
        "received_sigterm": "It is trainer.interrupted.",
        "progress_bar_callback": "Look through trainer.callbacks.",
        "tune": "There is no tuner: fit with max_steps for each value.",
        "training": "A hook knows by its name; trainer.is_running tells whether a run goes on.",
        "optimizer": "trainer.state.opt_state is its state.",
        "lr_schedulers": "A schedule is a part of the optimizer: optax.adam(schedule).",
        "default_root_dir": "It is trainer.run_dir.",
        "lightning_module": "It is trainer.model.",
        "accelerator": "trainer.strategy.mesh.devices are what it trains on.",
        "print": "print, where trainer.is_global_zero.",
        "lr_find": "There is no tuner: fit with max_steps for each rate.",
        "profiler": "Pass callbacks=jl.callbacks.Profiler(start_step=10); trainer.explain() tells where the time went.",
    },
    "Trainer argument": {
        "accelerator": "jax takes the devices that it finds; JAX_PLATFORMS=cpu in the environment chooses others.",
        "gpus": "Pass devices=4.",
        "tpu_cores": "Pass devices=8.",
        "num_processes": "Pass devices=8 for devices; processes meet by jl.distributed.initialize.",
        "num_nodes": "Start a process on each, and call jl.distributed.initialize in it.",
        "deterministic": "Runs repeat bit by bit as they are; on GPUs set XLA_FLAGS=--xla_gpu_deterministic_ops=true.",
        "benchmark": "XLA chooses its kernels while it compiles: nothing has to be said.",
        "profiler": "Pass callbacks=jl.callbacks.Profiler(start_step=10); trainer.explain() tells where the time went.",
        "detect_anomaly": "nan_policy='raise', the default, stops at the first; debug=True looks at every batch.",
        "terminate_on_nan": "nan_policy='raise' is the default.",
        "track_grad_norm": "Pass callbacks=jl.callbacks.GradientNorm().",
        "sync_batchnorm": "It always is; strategy=jl.strategies.ShardMapDDP(sync_batchnorm=False) says otherwise.",
        "use_distributed_sampler": "A batch holds the rows of all devices: the strategy splits it.",
        "replace_sampler_ddp": "A batch holds the rows of all devices: the strategy splits it.",
        "plugins": "What they do is said by strategy= and precision=.",
        "inference_mode": "Evaluation takes no gradient.",
        "checkpoint_callback": "Pass enable_checkpointing=, or a jl.callbacks.ModelCheckpoint in callbacks.",
        "resume_from_checkpoint": "Pass resume=, or fit(ckpt_path=...).",
        "progress_bar_refresh_rate": "Pass callbacks=jl.callbacks.ProgressBar(...), or enable_progress_bar=False.",
        "weights_summary": "Pass callbacks=jl.callbacks.ModelSummary(...), or enable_model_summary=False.",
        "auto_lr_find": "There is no tuner: fit with max_steps for each rate.",
        "auto_scale_batch_size": "There is no tuner: trainer.explain() tells the memory that a step takes.",
        "barebones": "Pass logger, enable_checkpointing, enable_progress_bar and enable_model_summary as False.",
        "stochastic_weight_avg": _ARRAYS,
        "epochs": "Pass max_epochs=.",
        "batch_size": "It is the loader's: jl.ArrayLoader(data, batch_size).",
        "optimizer": "configure_optimizers of the module returns it.",
        "loss": "training_step of the module returns it.",
        "metrics": "Log them in a step: self.log('accuracy', value).",
        "verbose": "Pass enable_progress_bar=False, or logging.getLogger('jaxlit').setLevel(...).",
    },
    "CSVLogger argument": {
        "save_dir": _FOLDER,
        "name": _FOLDER,
        "version": _FOLDER,
        "flush_logs_every_n_steps": _FLUSHED,
    },
    "JSONLLogger argument": {"save_dir": _FOLDER, "name": _FOLDER, "version": _FOLDER},
    "MLFlowLogger argument": {
        "synchronous": "Everything is sent by a thread, and the end waits for it at most finish_timeout=60 seconds.",
        "checkpoint_path_prefix": "Checkpoints are artifacts in checkpoints/<name>.",
    },
    "Profiler argument": {
        "filename": "jax names the files: pass dirpath=.",
        "schedule": "The steps are start_step=10, num_steps=5.",
    },
    "EarlyStopping argument": {"verbose": _TOLD, "log_rank_zero_only": "One process tells."},
    "ModelCheckpoint argument": {
        "verbose": _TOLD,
        "save_weights_only": "Model.load_from_checkpoint takes the weights alone, out of any checkpoint.",
        "auto_insert_metric_name": "Names stand in the file name as filename= has them: '{epoch}-{val/loss:.3f}'.",
        "save_on_train_epoch_end": "A checkpoint that falls on a validation knows its metrics.",
        "enable_version_counter": "Names begin with the step, and do not meet.",
        "every_n_steps": "Pass every_n_train_steps=.",
    },
    "ArrayLoader argument": {
        "drop_last": "Pass drop_remainder=.",
        "num_workers": "Rows are taken by one index; for work on each use grain with worker processes.",
        "sampler": "Pass shuffle=True: several processes take their shares by themselves.",
        "collate_fn": "Pass arrays with a row for each row: a batch is taken by one index.",
        "pin_memory": "The next batch is placed while the devices compute.",
        "persistent_workers": "There are none: a batch is taken by one index.",
        "generator": "Pass seed=.",
    },
    "DataModule": {
        "save_hyperparameters": "Keep what you need as attributes: self.batch_size = batch_size.",
        "hparams": "Keep what you need as attributes: self.batch_size = batch_size.",
        "transfer_batch_to_device": "The strategy places batches; on_before_batch_transfer may change them.",
        "on_after_batch_transfer": "Change a batch in on_before_batch_transfer, or in the step.",
        "from_datasets": "Pass loaders to fit(model, train_dataloaders, val_dataloaders).",
        "prepare_data_per_node": "prepare_data runs once on each computer.",
    },
    "Logger": {
        "save_dir": "It is trainer.run_dir.",
        "root_dir": "It is trainer.run_dir.",
        "log_audio": "Write the file yourself, into trainer.run_dir: no logger holds sounds.",
        "log_video": "Write the file yourself, into trainer.run_dir: no logger holds films.",
        "log_graph": "jax.make_jaxpr(fn)(x) prints a program; log_text keeps it.",
    },
}


def no_such_name(owner: str, name: str, known: Iterable[str] = (), *, called: str = "") -> AttributeError | ImportError:
    """Return the error of a name that is not there: with what takes its place, or a name that is spelt like it.

    Args:
        owner: A key of `ADVICE`.
        name: The name.
        known: Those that are there.
        called: What the owner is called in the message; its key if left out.
    """
    advice = ADVICE[owner].get(name)
    text = f"{called or owner} has no attribute {name!r}.{f' {advice}' if advice else did_you_mean(name, known)}"
    # `from jaxlit import name` asks in this frame, and puts words of its own in the place of an AttributeError.
    imports = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    return ImportError(text, name=name) if advice and imports else AttributeError(text)


def refuse_arguments(called: str, given: Iterable[str], table: str) -> None:
    """Refuse arguments that a method does not have.

    Args:
        called: The method, as a user calls it.
        given: The names of the arguments.
        table: Where in `ADVICE` it stands what takes their place.

    Raises:
        ArgumentTypeError: There is one.
    """
    for argument in given:
        hint = f" {ADVICE[table][argument]}" if argument in ADVICE[table] else ""
        raise ArgumentTypeError(f"{called} has no argument {argument!r}.{hint}")


def refuse_unknown(cls: type, given: Iterable[str], *, called: str = "") -> None:
    """Refuse an argument that a constructor does not have.

    Args:
        cls: Whose constructor it is.
        given: The names of the arguments that it was given.
        called: What help knows it by; its arguments are listed if left out.

    Raises:
        ArgumentTypeError: With what takes its place, or one that is spelt like it.
    """
    none = cls.__init__ is object.__init__
    parameters = [] if none else [*inspect.signature(cls.__init__).parameters.values()][1:]
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    advice = {k: v for base in reversed(cls.__mro__) for k, v in ADVICE.get(f"{base.__name__} argument", {}).items()}
    for name in given:
        if name not in known:
            listed = f"help({called}) lists those it has" if called else f"It has {', '.join(known) or 'none'}"
            hint = f" {advice[name]}" if name in advice else f"{did_you_mean(name, known)} {listed}."
            raise ArgumentTypeError(f"{cls.__name__} has no argument {name!r}.{hint}")
