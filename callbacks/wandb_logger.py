"""`WandbLogger`, which sends logged rows to Weights & Biases."""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from jaxlit import checks as check
from jaxlit.callbacks.logger import Logger, facts_of
from jaxlit.callbacks.monitor import monitored, saved_checkpoints
from jaxlit.checkpoints.places import Place, place_of
from jaxlit.errors import ArgumentError, LoggerError
from jaxlit.reporting.media import as_images, count, histogram, unpack
from jaxlit.reporting.secrets import redacted
from jaxlit.reporting.wandb_run import STEP, WandbRun, import_wandb, open_already, open_run
from jaxlit.texts import named_leaves

if TYPE_CHECKING:
    import wandb

    from jaxlit.callbacks.model_checkpoint import ModelCheckpoint
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

# Of metrics: W&B writes these names itself.
_RENAMED = {name: f"jaxlit/{name}" for name in (STEP, "_step", "_runtime", "_timestamp", "_wandb")}


class WandbLogger(Logger):
    """Send every logged row to Weights & Biases, and images, tables, checkpoints and histograms of gradients if asked.

    The x axis is `trainer/global_step`, the 0-based index of the optimizer step of the values. The run's config has the
    module's hyperparameters, the Trainer's arguments, devices and versions, without secrets. The summary has the last
    value of each metric, and the best value of those that a callback monitors. A training that is resumed from a
    checkpoint continues in the same run.

    No failure of W&B stops training, or keeps it waiting longer than the timeouts: another thread sends everything.
    Without an API key or without network the run is stored on disk, and one line says how to upload it.

    Args:
        project: The project; None for W&B's default.
        name: The run's name; None for W&B's choice.
        id: The run's id, to continue with a run; None for that of the checkpoint, or a new one.
        entity: The user or team; None for W&B's default.
        group: The group of the run.
        job_type: The kind of the run.
        tags: Tags of the run, of 1 to 64 characters.
        notes: A longer description.
        config: Other values of the config; secrets are hidden in them as well.
        save_dir: Where W&B writes its files; None for `trainer.run_dir`.
        offline: Write to disk only.
        log_model: Upload checkpoints as artifacts `model-<id>`, aliases `latest` and `best`: "all" each as soon as it
            is written, True those that exist at the end, "best" the best one at the end.
        watch: "gradients", "parameters" or "all": log a histogram of each array's entries, computed on the devices.
        watch_every_n_steps: Optimizer steps between histograms.
        experiment: A run that you have opened by `wandb.init`; it is used in place of a new one, and left open. So is
            the run that is open when training begins.
        on_error: After a failure of W&B, "warn" prints a line and continues without it, "raise" raises.
        init_timeout: Seconds to wait for the server at the start.
        finish_timeout: Seconds to wait for the upload at the end.

    Example:
        >>> import jaxlit as jl
        >>> logger = jl.callbacks.WandbLogger("digits", offline=True, watch="gradients", log_model="best")
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=logger)
    """

    hyperparams_of_module = False  # the config has the hyperparameters
    may_lose_rows = True
    name: str | None = None  # type: ignore[assignment]  # the argument, not the folder's name

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        id: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        config: Mapping[str, Any] | None = None,
        save_dir: str | Path | None = None,
        offline: bool = False,
        log_model: bool | Literal["all", "best"] = False,
        watch: Literal["gradients", "parameters", "all"] | None = None,
        watch_every_n_steps: int = 100,
        experiment: "wandb.Run | None" = None,
        on_error: Literal["warn", "raise"] = "warn",
        init_timeout: float = 20.0,
        finish_timeout: float = 60.0,
    ) -> None:
        owner = "WandbLogger"
        check.require(not isinstance(tags, str), "tags", tags, "takes a list of strings", owner=owner)
        if not isinstance(log_model, bool):
            check.one_of("log_model", log_model, ("all", "best"), owner=owner)
        if watch is not None:
            check.one_of("watch", watch, ("gradients", "parameters", "all"), owner=owner)
        trace_every = check.integer("watch_every_n_steps", watch_every_n_steps, low=1, owner=owner)
        self.on_error = check.one_of("on_error", on_error, ("warn", "raise"), owner=owner)
        self.init_timeout = check.seconds("init_timeout", init_timeout, owner=owner)
        self.finish_timeout = check.seconds("finish_timeout", finish_timeout, owner=owner)
        self.project, self.name, self.entity, self.group, self.job_type = project, name, entity, group, job_type
        self.tags, self.notes, self.config = tuple(tags), notes, dict(config or {})
        self.save_dir = None if save_dir is None else Path(os.path.abspath(save_dir))
        self.offline, self.log_model, self.watch = offline, log_model, watch
        self.trace_every_n_steps = 0 if watch is None else trace_every
        self.exclusive = "project of W&B, the project", (entity, project)
        self._users_run, self._users_id = experiment, id
        self._id: str | None = experiment.id if experiment is not None else id
        self._trainer: Trainer | None = None  # while one runs
        self._folder: Path | None = None  # of the newest fit
        self._run: WandbRun | None = None
        self._last: wandb.Run | None = None  # the newest finished one
        self._opened = False

    @property
    def id(self) -> str | None:
        """The run's id, the same for every fit of a Trainer and for a resumed one; None before it is opened."""
        return self._id

    @property
    def version(self) -> str | None:
        """The run's id, as `id`."""
        return self._id

    @property
    def experiment(self) -> "wandb.Run | None":
        """W&B's run, also after it is finished; None before it is open, and in other processes than the first."""
        return self._run.run if self._run is not None else self._last or self._users_run

    @property
    def location(self) -> str | None:
        """The run's address, or its folder if it is offline; None if there is none."""
        if (run := self.experiment) is None or run.disabled or not self._opened:
            return None
        return str(Path(run.dir).parent) if run.offline else run.url

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Begin a run of the Trainer; W&B's run is opened after a checkpoint is loaded, which may name it."""
        self._trainer, self._module = trainer, module
        if stage == "fit":
            if self._folder not in (None, trainer.run_dir):  # another training; its checkpoint may name a run
                self._id = self._users_id if self._users_run is None else self._users_run.id
            self._folder = trainer.run_dir
        self._opened = False
        self._sent: set[str] = set()  # checkpoints

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Open the run; refuse `log_model` if no checkpoints are written."""
        if self.log_model and not trainer.checkpoint_callbacks:
            raise ArgumentError(
                f"WandbLogger(log_model={self.log_model!r}) without a ModelCheckpoint has nothing to upload. Leave "
                "log_model out, or let the Trainer write checkpoints."
            )
        self._open(trainer)

    def on_log(self, trainer: "Trainer", values: dict[str, float], step: int) -> None:
        """Send one row."""
        self._open_here()  # in validate and test, which have a run only if there are rows
        if self._run is not None:
            run, row = self._run.run, {**{_RENAMED.get(name, name): x for name, x in values.items()}, STEP: step}
            self._run.do(lambda: run.log(row))

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        """Compute the histograms that `watch` asks for."""
        watched = {"gradients": grads, "parameters": params}
        kinds = watched if self.watch == "all" else [self.watch]
        return {f"{kind}/{name}": histogram(x) for kind in kinds for name, x in named_leaves(watched[str(kind)])}

    def on_trace(self, trainer: "Trainer", values: dict[str, np.ndarray], step: int) -> None:
        """Send the histograms."""
        if self._run is None:
            return
        run, make = self._run.run, import_wandb().Histogram

        def send() -> None:
            run.log({name: make(np_histogram=unpack(packed)) for name, packed in values.items()} | {STEP: step})

        self._run.do(send, "a row of histograms")

    def on_checkpoint_saved(
        self, trainer: "Trainer", module: "TrainModule", callback: "ModelCheckpoint", path: Place
    ) -> None:
        """Upload the checkpoint, with `log_model="all"`."""
        if self.log_model == "all" and callback in trainer.checkpoint_callbacks:
            self._upload(trainer, callback, path, lasts=False)

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Finish the run, in bounded time."""
        self._trainer = None
        try:
            if stage == "fit" and self._run is not None:
                self._conclude(trainer, self._run)
        except Exception:  # with on_error="raise"; the run ends all the same
            self._failed = True
            raise
        finally:
            super().teardown(trainer, module, stage)

    def finalize(self, status: str) -> None:
        """Finish the run, in bounded time."""
        if self._run is not None:
            run, self._run, self._last = self._run, None, self._run.run
            run.finish(failed=status != "success")

    def state_dict(self) -> dict[str, Any]:
        """Return the run's id."""
        return {"id": self._id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the run of the checkpoint, unless the user has chosen another."""
        if self._users_id is None and self._users_run is None and state_dict["id"] is not None:
            self._id = str(state_dict["id"])

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Set values of the run's config, without secrets; it has those of the module from the beginning."""
        self._open_here()
        if self._run is not None:
            self._update_config(self._run, redacted(dict(params)))

    def _open_here(self) -> None:
        """Open the run for a call outside of the logger's hooks."""
        trainer = self._trainer
        if trainer is None or not trainer.is_running:  # the run's id is known after setup
            raise LoggerError(
                "WandbLogger has no run open. Log from a hook of fit, validate, test or predict other than setup and "
                "teardown."
            )
        self._open(trainer)

    def _store(self, method: str, key: str, *args: Any, step: int | None = None, **named: Any) -> None:
        """Send media in the thread of the run; a histogram has at most 512 bins, W&B's limit."""
        if method == "log_image":
            args = tuple(as_images(f"WandbLogger.log_image({key!r}, ...)", *args, **named))
        elif method == "log_histogram":
            args = count(*args, **named)
        self._open_here()
        if self._run is None:
            return
        run, step = self._run.run, self._step_or_newest(step)

        def send() -> None:
            wandb = import_wandb()
            make = {
                "log_text": str,
                "log_table": lambda columns, data: wandb.Table(columns=columns, data=data, allow_mixed_types=True),
                "log_histogram": lambda *np_histogram: wandb.Histogram(np_histogram=np_histogram),
                "log_image": lambda *pairs: [wandb.Image(x, caption=text) for x, text in pairs],
            }[method]
            run.log({_RENAMED.get(key, key): make(*args), STEP: step})

        self._run.do(send, key)

    def _update_config(self, run: WandbRun, values: Mapping[str, Any]) -> None:
        run.do(lambda: run.run.config.update(values, allow_val_change=True))

    def _open(self, trainer: "Trainer") -> None:
        """Open the run in the first process, if it is not open yet."""
        if self._opened:
            return
        self._opened = True
        raises = self.on_error == "raise"
        run = self._users_run or open_already(self._users_id)
        is_new = run is None
        if run is not None:
            self._id = run.id
        self._id = self._id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        if not trainer.is_global_zero:
            return
        if run is None:
            folder = self.save_dir or Path(os.path.abspath(trainer.run_dir))
            folder.mkdir(parents=True, exist_ok=True)
            # A run that could not be online before stays offline: a later stage would only wait again.
            offline = self.offline or (self._last is not None and bool(self._last.offline))
            names = ("project", "entity", "name", "id", "group", "job_type", "tags", "notes")
            arguments = {name: getattr(self, name) for name in names}
            arguments |= {"dir": str(folder), "config": _config(trainer, self._module, self.config)}
            timeouts = {"init_timeout": self.init_timeout, "finish_timeout": self.finish_timeout}
            run = open_run(arguments, timeouts, offline=offline, raises=raises)
        if run is None:
            return
        self._run = WandbRun(run, self.finish_timeout, raises=raises, finishes=is_new)
        if not is_new:
            self._update_config(self._run, _config(trainer, self._module, self.config))
        # The step is a metric: W&B drops rows whose built-in `step` goes back, for example after a resume.
        # Names with a star are patterns for W&B, and refused unless it is the last character.
        modes = {_RENAMED.get(name, name): mode for name, mode in monitored(trainer).items() if "*" not in name}
        summaries = {name: {"summary": f"last,{mode}"} for name, mode in modes.items()}

        def define() -> None:
            run.define_metric(STEP)
            for name, options in {"*": {}, **summaries}.items():
                run.define_metric(name, step_metric=STEP, **options)

        self._run.do(define)

    def _conclude(self, trainer: "Trainer", run: WandbRun) -> None:
        """Send the best values and the checkpoints that exist at the end of training."""
        bests = {}
        for callback in reversed(trainer.checkpoint_callbacks):
            if callback.best_model_score is not None:
                bests[f"best/{callback.monitor}"] = callback.best_model_score
                bests["best/checkpoint"] = Path(callback.best_model_path).name
        run.do(lambda: run.run.summary.update(bests))
        for callback, path, _ in sorted(saved_checkpoints(trainer), key=lambda x: Path(x.path).name):
            if self.log_model is True or (self.log_model == "best" and path == callback.best_model_path):
                self._upload(trainer, callback, place_of(path), lasts=True)

    def _upload(self, trainer: "Trainer", callback: "ModelCheckpoint", path: Place, *, lasts: bool) -> None:
        """Send a checkpoint; unless it `lasts`, it may be deleted as soon as this returns."""
        if self._run is None or str(path) in self._sent:
            return
        self._sent.add(str(path))
        marks = {"latest": callback.last_model_path, "best": callback.best_model_path}
        aliases = [*(mark for mark, marked_path in marks.items() if marked_path == str(path)), path.name]
        metadata = {"monitor": callback.monitor, "score": getattr(callback, "best_k_models", {}).get(str(path))}
        index = trainer.checkpoint_callbacks.index(callback)
        name = f"model-{self._id}" + (f"-{index}" if index else "")
        self._run.log_checkpoint(path, name=name, aliases=aliases, metadata=metadata, lasts=lasts)


def _config(trainer: "Trainer", module: "TrainModule", extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config without secrets: hyperparameters, `extra` values, and `facts_of` the training."""
    data = trainer.datamodule
    values = {**({} if data is None else data.hparams.readable()), **module.hparams.readable(), **extra}
    # A fact with the name of one of the user's values is renamed.
    facts = {f"jaxlit/{k}" if k in values else k: v for k, v in facts_of(trainer, module).items()}
    return redacted({**facts, **values})
