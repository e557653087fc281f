"""Logged rows in Weights & Biases."""

import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.progress_bar import say
from jaxlit.errors import ArgumentError, JaxlitError
from jaxlit.redaction import redact

if TYPE_CHECKING:
    import wandb

    from jaxlit.module import TrainModule
    from jaxlit.trainer import Trainer

_STEP = "trainer/global_step"
_FINISH_MARGIN = 10.0  # seconds beyond wandb's own limit


class WandbError(JaxlitError):
    """W&B is not installed, or failed where `on_error="raise"`."""


class WandbLogger(Callback):
    """Send every logged row to Weights & Biases.

    The x axis is `trainer/global_step`, the 0-based index of the optimizer step that made the values. The
    run's config holds the module's hyperparameters, the Trainer's arguments and the strategy; values whose
    names look like a secret's are left out.

    Without an API key or without network the run is kept on disk, one line says so, and `wandb sync`
    uploads it later. Training never waits longer than the timeouts. A later fit continues the same run.

    Args:
        project: The project; None for W&B's default.
        name: The run's name; None for one that W&B makes.
        id: The run's id, to continue a run; None for a new one.
        group: The group of runs that it belongs to.
        tags: Its tags.
        notes: A longer description.
        save_dir: Where W&B writes its files; None for `trainer.run_dir`.
        offline: Write to disk only.
        on_error: What a failure of W&B does: "offline" goes on without it, "raise" raises.
        init_timeout: Seconds to wait for the server at the start.
        finish_timeout: Seconds to wait for the upload at the end.

    Example:
        >>> import jaxlit as jl
        >>> logger = jl.callbacks.WandbLogger("digits", offline=True)
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=logger)
    """

    in_fast_dev_run = False

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        id: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        save_dir: str | Path | None = None,
        offline: bool = False,
        on_error: str = "offline",
        init_timeout: float = 20.0,
        finish_timeout: float = 60.0,
    ) -> None:
        for argument, text in (("project", project), ("name", name), ("id", id), ("group", group), ("notes", notes)):
            valid = text is None or (isinstance(text, str) and text != "")
            _check(argument, text, valid, "a string that is not empty, or None")
        _check("id", id, id is None or not set(id) & set("/\\#?%:"), "an id without any of / \\ # ? % :")
        tags_valid = isinstance(tags, (list, tuple)) and all(isinstance(tag, str) and tag for tag in tags)
        _check("tags", tags, tags_valid, "a list of strings that are not empty")
        _check("save_dir", save_dir, save_dir is None or isinstance(save_dir, (str, Path)), "a path or None")
        _check("offline", offline, isinstance(offline, bool), "True or False")
        _check("on_error", on_error, on_error in ("offline", "raise"), "'offline' or 'raise'")
        for argument, seconds in (("init_timeout", init_timeout), ("finish_timeout", finish_timeout)):
            number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
            _check(argument, seconds, number and 0 < seconds < float("inf"), "seconds, a number above 0")
        self.project, self.name, self.group, self.tags, self.notes = project, name, group, tuple(tags), notes
        self.save_dir = None if save_dir is None else Path(save_dir)
        self.offline, self.on_error = offline, on_error
        self.init_timeout, self.finish_timeout = float(init_timeout), float(finish_timeout)
        self._wanted_id = id
        self._id = id or secrets.token_hex(4)
        self._run: wandb.Run | None = None
        self._logging = self._failed = False

    @property
    def id(self) -> str:
        """The run's id, the same for every fit; a new one if the run had to go offline at its start."""
        return self._id

    @property
    def experiment(self) -> "wandb.Run | None":
        """W&B's run while a fit goes on in the process that logs, else None."""
        return self._run

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Start the run."""
        if stage != "fit" or not trainer.is_global_zero:
            return
        config = {**module.hparams, "trainer": trainer.config, "strategy": trainer.strategy.describe()}
        folder = self.save_dir or trainer.run_dir
        folder.mkdir(parents=True, exist_ok=True)
        self._run = self._start(folder, redact(config))
        self._logging, self._failed = True, False
        # Steps are a metric like others: W&B drops rows whose own `step` goes back, after a resume say.
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def on_log(self, trainer: "Trainer", values: dict[str, float], step: int) -> None:
        """Send one row."""
        if self._run is None or not self._logging:
            return
        try:
            self._run.log({**values, _STEP: step})
        except Exception as error:
            if self.on_error == "raise":
                raise
            self._logging = False
            say(f"W&B: off for the rest of this run, logging failed ({_first_line(error)})")

    def on_exception(self, trainer: "Trainer", module: "TrainModule", exception: BaseException) -> None:
        """Mark the run as failed."""
        self._failed = True

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Finish the run, in bounded time."""
        if stage != "fit" or self._run is None:
            return
        run, self._run = self._run, None
        errors: list[Exception] = []

        def finish() -> None:
            try:
                run.finish(exit_code=int(self._failed))
            except Exception as error:
                errors.append(error)

        # A thread that may be left behind: W&B's own limit does not cover its every wait.
        thread = threading.Thread(target=finish, name="wandb-finish", daemon=True)
        start = time.monotonic()
        thread.start()
        thread.join(self.finish_timeout + _FINISH_MARGIN)
        # At its own limit W&B gives up without an exception.
        if (waited := time.monotonic() - start) >= self.finish_timeout and not errors:
            errors.append(TimeoutError(f"no end after {waited:.0f} s"))
        if errors and self.on_error == "raise":
            raise WandbError(f"W&B could not finish run {self._id}: {errors[0]}.") from errors[0]
        if errors:
            say(f"W&B: the upload did not finish ({_first_line(errors[0])}); later: wandb sync {_folder(run)}")

    def _start(self, folder: Path, config: dict[str, Any]) -> "wandb.Run":
        try:
            import wandb
            from wandb import Settings
            from wandb.errors import UsageError
        except ImportError as error:
            raise WandbError(
                "WandbLogger needs the wandb package, which is not installed. Run `pip install wandb`, or leave "
                "WandbLogger out."
            ) from error

        settings: dict[str, Any] = {
            "init_timeout": self.init_timeout,
            "x_disable_meta": True,  # the command line and the environment may hold secrets
            "save_code": False,
            "console": "off",  # what the bar draws is no log
            "silent": True,
        }
        if "finish_timeout" in Settings.model_fields:
            settings["finish_timeout"] = self.finish_timeout

        def init(mode: Any) -> "wandb.Run":
            with _without_prompt():
                return wandb.init(
                    project=self.project,
                    name=self.name,
                    id=self._id,
                    group=self.group,
                    tags=self.tags,
                    notes=self.notes,
                    dir=str(folder),
                    config=config,
                    mode=mode,
                    resume="allow",
                    reinit="create_new",
                    settings=Settings(**settings),
                )

        why, wanted = "", self._wanted_id
        try:
            run = init("offline" if self.offline else None)  # None leaves the choice to WANDB_MODE
        except Exception as error:
            if self.on_error == "raise":
                raise
            why = f" ({_first_line(error)})"
            # The SDK holds a failed run's id until the process ends; without a key there is no run yet.
            if not isinstance(error, UsageError):
                self._id = secrets.token_hex(4)
            run = init("offline")
        if run.disabled:
            say("W&B: disabled")
        elif run.offline:
            onto = f"--id {wanted} " if wanted not in (None, self._id) else ""
            say(f"W&B: offline{why} -> {_folder(run)}; upload: wandb sync {onto}{_folder(run)}")
        else:
            say(f"W&B: {run.url}")
        return run


@contextmanager
def _without_prompt() -> Iterator[None]:
    """Let W&B find no one to ask for an API key: a job that waits for an answer has stopped."""
    stdin = sys.stdin
    with open(os.devnull) as nobody:
        sys.stdin = nobody
        try:
            yield
        finally:
            sys.stdin = stdin


def _folder(run: "wandb.Run") -> Path:
    return Path(run.dir).parent


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _check(name: str, value: Any, allowed: bool, rule: str) -> None:
    if not allowed:
        raise ArgumentError(f"WandbLogger({name}=...) takes {rule}, got {value!r}.")
