"""Ray Train: it starts the processes of a job in a Ray cluster, and starts them again after a failure."""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints import files
from jaxlit.distributed.job import initialize
from jaxlit.distributed.team import team
from jaxlit.errors import ProcessError

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

__all__ = ["RayReport", "RayTrainer"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class RayTrainer:
    """Run a function in the workers of a Ray cluster, which are the processes of one job.

    After a failure Ray ends all workers and starts new ones, up to `max_failures` times; with
    `jl.Trainer(default_root_dir=folder, resume="auto")` they continue from the newest checkpoint. It needs Ray,
    `pip install "ray[train]"`.

    Args:
        train_fn: Trains; Ray calls it in each worker, in a thread that is not the main one, with the folder
            `<storage_path>/<name>`. Only checkpoints in this folder can be reported.
        num_workers: The number of processes, or a tuple of the fewest and the most: then training continues on those
            that a lost machine leaves, and on more of them once there are, each time from the newest checkpoint.
        storage_path: A folder that all machines share.
        name: The name of the run: another start with the same name continues it.
        devices: What jax uses: "cpu", "gpu" or "tpu".
        resources_per_worker: What Ray reserves for each worker, as `{"CPU": 4}`; None for Ray's default, which is one
            device.
        max_failures: How often the workers are started again, -1 for always.
        scaling: Other arguments of `ray.train.ScalingConfig`, as `{"topology": "4x4", "accelerator_type": "TPU-V6E"}`.

    Example:
        >>> import jaxlit as jl
        >>> def train(folder):
        ...     report = jl.integrations.ray.RayReport()
        ...     trainer = jl.Trainer(max_epochs=3, default_root_dir=folder, resume="auto", callbacks=report)
        >>> job = jl.integrations.ray.RayTrainer(train, num_workers=2, storage_path="shared", name="digits")
    """

    train_fn: Callable[[Path], object]
    num_workers: int | tuple[int, int] = field(kw_only=True)
    storage_path: str | Path = field(kw_only=True)
    name: str = field(kw_only=True)
    devices: str = field(default="cpu", kw_only=True)
    resources_per_worker: Mapping[str, float] | None = field(default=None, kw_only=True)
    max_failures: int = field(default=0, kw_only=True)
    scaling: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        check.one_of("devices", self.devices, ("cpu", "gpu", "tpu"), owner="RayTrainer")

    def fit(self) -> Any:
        """Train, and return Ray's `Result`, whose `checkpoint` is the newest that was reported.

        Raises:
            ProcessError: Ray is not installed.
            ray.train.TrainingFailedError: The workers failed once more than `max_failures` times.
        """
        ray: dict[str, Any] = {"owner": "RayTrainer", "install": '"ray[train]"', "kind": ProcessError}
        train = check.import_package("ray.train", **ray)
        parallel = check.import_package("ray.train.v2.api.data_parallel_trainer", **ray)
        function, devices, folder = self.train_fn, self.devices, Path(os.path.abspath(self.storage_path), self.name)
        # Ray would refuse to continue a run whose old checkpoints are gone: `ModelCheckpoint` deletes them.
        (folder / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)

        def work() -> None:
            _join(devices)
            function(folder)

        resources = None if self.resources_per_worker is None else dict(self.resources_per_worker)
        failures = train.FailureConfig(max_failures=self.max_failures)
        uses = {f"use_{self.devices}": True} if self.devices != "cpu" else {}
        return parallel.DataParallelTrainer(
            work,
            scaling_config=train.ScalingConfig(
                num_workers=self.num_workers, resources_per_worker=resources, **uses, **self.scaling
            ),
            run_config=train.RunConfig(name=self.name, storage_path=str(folder.parent), failure_config=failures),
        ).fit()


class RayReport(Callback):
    """Report each complete checkpoint to Ray with the values logged before it, by `ray.train.report`.

    Ray keeps values only with a checkpoint. In a report all workers wait for each other, and Ray takes one every two
    seconds (`RAY_TRAIN_HEALTH_CHECK_INTERVAL_S`), so rows are not reported one by one. The checkpoint stays where it
    is, and `ModelCheckpoint` alone deletes it: leave Ray's `num_to_keep` out.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=jl.integrations.ray.RayReport())
    """

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}  # the newest value of each name

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Refuse workers that do not train together.

        Raises:
            ProcessError: There are more or fewer workers than jax has processes.
        """
        from ray import train  # type: ignore[import-not-found]

        workers, processes = train.get_context().get_world_size(), jax.process_count()
        if workers != processes:
            raise ProcessError(
                f"RayReport: the workers of Ray must be the processes of one job, but Ray has {workers}, and jax "
                f"{processes}: each would train alone. Ray's JaxTrainer does not join workers on CPUs. Start them with "
                "jl.integrations.ray.RayTrainer."
            )

    def on_log(self, trainer: "Trainer", values: dict[str, float], step: int) -> None:
        """Keep the values for the next checkpoint."""
        self._logged = {**self._logged, **values, "step": step}

    def on_checkpoint_saved(self, trainer: "Trainer", module: "TrainModule", callback: Callback, path: Path) -> None:
        """Report it, unless a process has failed, which would not come to the report."""
        from ray import train  # type: ignore[import-not-found]

        if team().over:
            return
        metrics, checkpoint = dict[str, float](), None
        if train.get_context().get_world_rank() == 0:  # Ray takes both from this worker
            state = files.read_state(path)
            metrics = {**state["callbacks"][self.state_key]["logged"], "global_step": state["global_step"]}
            checkpoint = train.Checkpoint(str(path))
        train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD)

    def state_dict(self) -> dict[str, Any]:
        """Return the values: later rows have come when a checkpoint is complete."""
        return {"logged": self._logged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back the values."""
        self._logged = state_dict["logged"]


def _join(devices: str) -> None:
    """Make the workers of a Ray run the processes of one job; called first in each.

    It uses only what Ray documents for training functions, so that an error counts as a failure of its worker: one in
    a `Backend` of Ray's would start the job again and again. A worker's end calls no `jax.distributed.shutdown`, which
    would wait for all others.

    Raises:
        ProcessError: The workers did not meet, or jax has other devices than those that were asked for.
    """
    from ray.train import collective, get_context  # type: ignore[import-not-found]
    from ray.util import get_node_ip_address  # type: ignore[import-not-found]

    index, address = get_context().get_world_rank(), None
    if index == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"{get_node_ip_address()}:{free.getsockname()[1]}"
    address = collective.broadcast_from_rank_zero(address)
    if devices == "cpu":
        jax.config.update("jax_platforms", "cpu")
    initialize(address, get_context().get_world_size(), index)
    if devices != "cpu" and jax.default_backend() != devices:
        raise ProcessError(
            f"RayTrainer(devices={devices!r}): jax uses {jax.default_backend()} in worker {index}. Install the jax of "
            f"these devices on each machine, for example jax[cuda13], and look at Ray's resources for the worker."
        )
