"""What belongs to each stage: the names of the Trainer's method, its step, loaders, limit and program."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One of the four things that a Trainer does with batches."""

    name: str  # as in hooks: on_<name>_batch_end, but on_train_batch_end for "training"
    method: str  # the Trainer's method
    step: str  # the module's method
    loaders: str  # the hook that makes its loaders
    limit: str  # the Trainer's argument that limits them
    program: str  # how its compiled step is called


STAGES = {
    stage.name: stage
    for stage in (
        Stage("training", "fit", "training_step", "train_dataloader", "limit_train_batches", "train_step"),
        Stage("validation", "validate", "validation_step", "val_dataloader", "limit_val_batches", "eval_step"),
        Stage("test", "test", "test_step", "test_dataloader", "limit_test_batches", "test_step"),
        Stage("predict", "predict", "predict_step", "predict_dataloader", "limit_predict_batches", "predict_step"),
    )
}
