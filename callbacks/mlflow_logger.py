"""`MLFlowLogger`, which sends logged rows to MLflow."""

import re
import secrets
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxlit import checks as check
from jaxlit.background import BackgroundQueue
from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.logger import Logger
from jaxlit.callbacks.monitor import saved_checkpoints
from jaxlit.checkpoints.places import Place, RemotePath, place_of
from jaxlit.errors import ArgumentError, LoggerError
from jaxlit.reporting.media import MediaFolder
from jaxlit.reporting.secrets import redacted
from jaxlit.reporting.terminal import absolute, say

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

# MLflow's limits: metrics or parameters in one call, and characters of a parameter and of a name.
_MAX_BATCH, _MAX_LENGTH, _MAX_NAME = 100, 6000, 250
_KEY = "jaxlit_run"  # a tag
_FORBIDDEN = re.compile(r"[^\w\-. :/]")  # in the names of metrics and parameters


class MLFlowLogger(Logger):
    """Send every logged row to an MLflow run, with hyperparameters as its parameters, and media as artifacts.

    Another thread sends everything: training waits for MLflow at the end only. A failure is printed once, and nothing
    more is sent; rows stay in the CSV file. A resumed training continues in its run, where repeated rows appear twice,
    at the same step. It needs MLflow, `pip install mlflow`.

    Args:
        experiment_name: The experiment, which is created if it does not exist.
        run_name: The run's name; None for the name of its folder.
        tracking_uri: MLflow's address; None for `MLFLOW_TRACKING_URI`, or MLflow's default.
        tags: Tags of the run.
        save_dir: A folder for an `mlflow.db` and artifacts, in place of `tracking_uri`.
        log_model: True uploads the checkpoints that exist at the end, "all" each once it is written.
        prefix: The beginning of the names of all metrics, before a slash.
        artifact_location: Where a new experiment stores its artifacts; None for MLflow's default.
        run_id: A run to continue with.
        finish_timeout: Seconds to wait at the end until everything is sent.
        on_error: "warn" prints a failure once; "raise" ends training.

    Raises:
        LoggerError: MLflow is not installed.

    Example:
        >>> import jaxlit as jl
        >>> try:
        ...     logger = jl.callbacks.MLFlowLogger("digits", save_dir="mlflow")
        ... except jl.errors.LoggerError as error:
        ...     print("pip install" in str(error))
        True
    """

    def __init__(
        self,
        experiment_name: str = "jaxlit",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | Path | None = None,
        *,
        log_model: bool | Literal["all"] = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        finish_timeout: float = 60.0,
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        if not isinstance(log_model, bool):
            check.one_of("log_model", log_model, ("all",), owner="MLFlowLogger")
        check.one_of("on_error", on_error, ("warn", "raise"), owner="MLFlowLogger")
        self.finish_timeout = check.seconds("finish_timeout", finish_timeout, owner="MLFlowLogger")
        if save_dir is not None and tracking_uri is not None:
            raise ArgumentError(
                f"MLFlowLogger(save_dir={str(save_dir)!r}, tracking_uri={tracking_uri!r}) are two places. Pass one."
            )
        check.import_package("mlflow.tracking", owner="MLFlowLogger", install="mlflow")
        self.experiment_name, self.run_name, self.tags = experiment_name, run_name, dict(tags or {})
        self.save_dir = None if save_dir is None else absolute(Path(save_dir))
        self.tracking_uri, self.artifact_location = tracking_uri, artifact_location
        self.log_model, self.prefix, self.on_error = log_model, prefix, on_error
        self.run_id, self.experiment_id = run_id, None
        self._users_id = run_id
        self._client: Any = None
        self._key = ""  # a tag of the run, which is known before its id
        self._sender: BackgroundQueue | None = None
        self._error: Exception | None = None
        self._names: dict[str, str] = {}  # of metrics in MLflow
        self._param_names: dict[Hashable, str] = {}  # by path
        self._refused: set[str] = set()
        self._folder = Path()  # of the medium that is written
        self._files = MediaFolder(lambda: self._folder, announces=False)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The experiment's name."""
        return self.experiment_name

    @property
    def version(self) -> str | None:  # type: ignore[override]
        """The run's id; None until it is known."""
        return self.run_id

    @property
    def experiment(self) -> Any:  # type: ignore[override]
        """The `mlflow.MlflowClient`; None until the run is open, and in other processes."""
        return self._client

    @property
    def location(self) -> str | None:
        """The run's page, or its store; None until it is open."""
        if self._client is None or self.run_id is None:
            return None
        uri = str(self._client.tracking_uri)
        page = f"{uri.rstrip('/')}/#/experiments/{self.experiment_id}/runs/{self.run_id}"
        return page if uri.startswith("http") else f"{uri} (run {self.run_id})"

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Begin a run of the Trainer; each fit has its own run in MLflow, unless it is resumed."""
        if stage == "fit":
            self.run_id, self._client, self._key = self._users_id, None, secrets.token_hex(8)
            self._files.begin()
        self._error = None

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Send hyperparameters, without secrets, nested ones by paths; MLflow cannot change those that the run has."""
        values = dict(_flat(redacted(dict(params))))
        _add_names(self._param_names, {path: "/".join(map(str, path)) for path in values})
        flat = {self._param_names[path]: value for path, value in values.items()}

        def send() -> None:
            from mlflow.entities import Param  # type: ignore[import-not-found]

            known = self._client.get_run(self.run_id).data.params  # MLflow cannot change them
            self._log_batch("params", [Param(key, value) for key, value in flat.items() if key not in known])

        self._send(send)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send a row."""
        _add_names(self._names, {name: f"{self.prefix}/{name}" if self.prefix else name for name in metrics})
        row = {self._names[name]: float(x) for name, x in metrics.items()}
        time_ms, step = int(time.time() * 1000), self._step_or_newest(step)

        def send() -> None:
            from mlflow.entities import Metric  # type: ignore[import-not-found]

            sent = [Metric(k, x, time_ms, step) for k, x in row.items() if k not in self._refused]
            self._log_batch("metrics", sent)

        self._send(send)

    def on_checkpoint_saved(self, trainer: "Trainer", module: "TrainModule", callback: Callback, path: Place) -> None:
        """Upload a copy of the checkpoint, which may be deleted before it is sent."""
        if self.log_model == "all" and trainer.is_global_zero and self._error is None:
            folder = tempfile.mkdtemp(prefix="jaxlit-mlflow-")
            if isinstance(path, Path):
                shutil.copytree(path, Path(folder, path.name))
            else:  # in a bucket, where it is
                Path(folder, f"{path.name}.url").write_text(str(path))
            self._send(lambda: self._client.log_artifacts(self.run_id, folder, "checkpoints"), folder)

    def finalize(self, status: str) -> None:
        """End the run, and wait until everything is sent."""
        if self._sender is None or (trainer := self._attached) is None:
            return
        if self.log_model is True:
            for _, path, _ in saved_checkpoints(trainer):
                target = f"checkpoints/{Path(path).name}"
                log = self._client.log_artifacts
                if isinstance(place_of(path), RemotePath):
                    log, target = self._client.log_text, f"{target}.url"
                self._send(lambda log=log, path=path, target=target: log(self.run_id, path, target))
        run_status = "KILLED" if trainer.interrupted else "FINISHED"
        if status == "failed":
            run_status = "FAILED"
        self._send(lambda: self._client.set_terminated(self.run_id, status=run_status))
        sender, self._sender = self._sender, None
        if not sender.wait_idle(self.finish_timeout):
            say(f"MLFlowLogger waited {self.finish_timeout:g} s for MLflow: {len(sender)} rows or files are not sent.")
        sender.stop()
        self._raise()

    def state_dict(self) -> dict[str, Any]:
        """Return the tag that identifies the run, and the names of its metrics."""
        return {"run": self._key, "names": self._names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue in the run of the checkpoint, unless `run_id` is set."""
        self._key, self._names = state_dict["run"], dict(state_dict.get("names", {}))

    def _store(self, method: str, key: str, *args: Any, step: int | None = None, **named: Any) -> None:
        """Send media as files."""
        if self._attached is None or not self._attached.is_global_zero or self._error is not None:
            return
        folder = tempfile.mkdtemp(prefix="jaxlit-mlflow-")
        self._folder = Path(folder)
        getattr(self._files, method)(key, *args, step=self._step_or_newest(step), **named)
        self._send(lambda: self._client.log_artifacts(self.run_id, folder), folder)

    def _send(self, job: Callable[[], Any], folder: str | None = None) -> None:
        """Run a job in the thread, which opens the run first, and delete the folder afterwards."""
        self._raise()
        trainer = self._attached
        if trainer is None or not trainer.is_global_zero:
            return
        if self._sender is None:
            self._sender = BackgroundQueue("mlflow", self._fail)
        name = self.run_name or trainer.run_dir.name

        def work() -> None:
            try:
                if self._error is None:
                    if self._client is None:
                        self._open(name)
                    job()
            finally:
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)

        self._sender.submit(work)

    def _raise(self) -> None:
        if self._error is not None and self.on_error == "raise":
            raise LoggerError(
                f"MLFlowLogger cannot send to MLflow: {self._error!r}. Look at its server, or leave the logger out."
            ) from self._error

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            if self.on_error == "warn":
                say(f"MLFlowLogger cannot send to MLflow: {error!r}. Nothing more is sent to it; training continues.")

    def _open(self, name: str) -> None:
        from mlflow.tracking import MlflowClient  # type: ignore[import-not-found]

        uri, artifacts = self.tracking_uri, self.artifact_location
        if (folder := self.save_dir) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", artifacts or (folder / "artifacts").as_uri()
        client = MlflowClient(tracking_uri=uri)
        if self.run_id is None:
            experiment = client.get_experiment_by_name(self.experiment_name)
            if experiment is None:
                self.experiment_id = client.create_experiment(self.experiment_name, artifacts)
            else:
                self.experiment_id = experiment.experiment_id
            runs = client.search_runs([self.experiment_id], f"tags.{_KEY} = '{self._key}'")
            self.run_id = runs[0].info.run_id if runs else None
        if self.run_id is not None:
            self.experiment_id = client.get_run(self.run_id).info.experiment_id
            client.update_run(self.run_id, status="RUNNING")
        else:
            tags = {str(key): str(value) for key, value in redacted(self.tags).items()} | {_KEY: self._key}
            self.run_id = client.create_run(self.experiment_id, run_name=name, tags=tags).info.run_id
        self._client = client

    def _log_batch(self, kind: str, values: list[Any]) -> None:
        """Send values, in halves if they are too many or refused: because of one, which is found and left out."""
        try:
            if len(values) <= _MAX_BATCH:
                self._client.log_batch(self.run_id, **{kind: values})
                return
        except Exception as error:
            if getattr(error, "error_code", None) != "INVALID_PARAMETER_VALUE" or not values:
                raise
            if len(values) == 1:
                if not self._refused:
                    say(f"MLFlowLogger leaves out what MLflow refuses, first {values[0].key!r}: {error}")
                self._refused.add(values[0].key)
                return
        self._log_batch(kind, values[: len(values) // 2])
        self._log_batch(kind, values[len(values) // 2 :])


def _add_names(names: dict[Any, str], texts: Mapping[Any, str]) -> None:
    """Add names that MLflow accepts for the keys of `texts`; two keys never have one name."""
    new = {}
    for key in texts.keys() - names.keys():
        parts = _FORBIDDEN.sub("_", texts[key]).split("/")  # a name must be the normal form of a path
        name = re.sub(r"^\.\.", "_", "/".join("_" if part in ("", ".", "..") else part for part in parts))
        new[key] = name if len(name) <= _MAX_NAME else name[:_MAX_NAME].rstrip("/.")
    # In the order of `texts`, first those that stay as they are.
    for key in sorted((key for key in texts if key in new), key=lambda key: new[key] != texts[key]):
        taken = new[key] in names.values()
        names[key] = f"{new[key][: _MAX_NAME - 9]}-{zlib.crc32(repr(key).encode()):08x}" if taken else new[key]


def _flat(params: Mapping[Any, Any], parent: tuple = ()) -> Iterator[tuple[tuple, str]]:
    """Yield values as texts that MLflow takes, with the paths of their keys."""
    for key, value in params.items():
        path = (*parent, key)
        if isinstance(value, Mapping) and value:
            yield from _flat(value, path)
        else:
            yield path, str(value)[:_MAX_LENGTH]
