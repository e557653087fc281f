"""A run of Weights & Biases that cannot stop training or keep it waiting, and how it is opened in bounded time."""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlit import checks as check
from jaxlit.background import Background, BackgroundQueue
from jaxlit.checkpoints.files import read_state
from jaxlit.checkpoints.places import Place
from jaxlit.errors import JaxlitError
from jaxlit.reporting.terminal import join, say, short_path

if TYPE_CHECKING:
    import wandb

STEP = "trainer/global_step"
MARGIN = 10.0  # seconds beyond W&B's limits, which do not cover all of its waits
_MAX_WAITING = 10_000  # rows that are not sent yet
_open_runs: list[Any] = []  # of this process, which have not ended


class WandbError(JaxlitError):
    """W&B is not installed, or failed where `on_error="raise"`."""


def open_run(
    arguments: Mapping[str, Any], settings: Mapping[str, Any], *, offline: bool, raises: bool
) -> "wandb.Run | None":
    """Open a run online; if that fails, offline; if that fails too, return None. One line says which it is.

    The arguments are those of `wandb.init`, without mode and settings, the settings those that a user chooses. With
    `raises` the first failure is raised.
    """
    reason = ""
    for mode in ("offline",) if offline or os.environ.get("WANDB_MODE") == "offline" else (None, "offline"):
        try:
            run = _init(arguments, settings, mode)
        except BaseException as error:
            end_run(None, failed=True)  # the SDK reserves the id of a failed run as long as its service runs
            if raises or not isinstance(error, Exception):
                raise
            reason = f" ({first_line(error)})"
        else:
            if run.disabled:
                say("W&B disabled")
            elif run.offline:
                say(join([f"W&B offline{reason}", f"upload: wandb sync {short_path(Path(run.dir).parent)}"]))
            else:
                say(f"W&B {run.url}")
            _open_runs.append(run)
            return run
    say(f"W&B: off for this run{reason}")
    return None


def _init(arguments: Mapping[str, Any], settings: Mapping[str, Any], mode: str | None) -> "wandb.Run":
    wandb = import_wandb()
    if (user_mode := os.environ.get("WANDB_MODE")) and (mode is None or user_mode == "disabled"):
        mode = user_mode  # the SDK reads it only at its first use
    # Error reports of the SDK would keep the process from ending if the server does not answer.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    settings = {
        "finish_timeout_raises": True,
        "x_disable_meta": True,  # the command line and the environment may contain secrets
        "save_code": False,
        "console": "off",  # the progress bar is not a log
        "silent": True,
        **settings,
    }
    known = {k: v for k, v in settings.items() if k in wandb.Settings.model_fields}  # 0.22 has no finish_timeout

    def init() -> Any:
        if wandb.run is None:  # otherwise the user has set up the SDK already
            # It prints outside of runs as well, and some versions ask for an API key in a terminal.
            wandb.setup(settings=wandb.Settings(silent=True, login_timeout=settings["init_timeout"]))
        return wandb.init(
            **arguments,
            mode=mode,
            resume="allow",
            allow_val_change=True,  # a resumed run may train longer
            reinit="create_new",
            settings=wandb.Settings(**known),
        )

    return Background("wandb-init", init).start().result(settings["init_timeout"] + MARGIN)


def open_already(run_id: str | None) -> "wandb.Run | None":
    """Return the run that the program has opened itself, as in sweeps, if it has this id; None for any id."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None or run_id not in (None, run.id):
        return None
    say(f"W&B {short_path(Path(run.dir).parent) if run.offline else run.url} (the run that is open)")
    return run


def end_run(run: "wandb.Run | None", *, failed: bool) -> None:
    """Note that a run has ended; if it failed and no other run is open, close the SDK's service without a wait.

    At the end of the process the SDK would wait for the service, which may hang, unless it is closed.
    """
    if run in _open_runs:
        _open_runs.remove(run)
    wandb = import_wandb()
    if failed and not _open_runs and wandb.run is None:
        # The SDK unregisters its wait at the beginning of a teardown, so a moment is enough.
        Background("wandb-teardown", wandb.teardown).start().join(1.0)


def import_wandb() -> Any:
    """Return the SDK; raise a WandbError if it is not installed."""
    return check.import_package("wandb", owner="WandbLogger", install="wandb", kind=WandbError)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; that of an OSError without the path, so that it is printed once."""
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


class WandbRun:
    """An open run. A thread passes everything to the SDK, in order.

    After a row that fails nothing more is sent: one line says so, and training continues, or with `raises` the next
    call raises. `finishes` is whether the run was opened for this training, and is finished at its end.
    """

    def __init__(self, run: "wandb.Run", finish_timeout: float, *, raises: bool, finishes: bool = True) -> None:
        self.run: Any = run
        self._finish_timeout, self._raises, self._finishes = finish_timeout, raises, finishes
        self._error: Exception | None = None
        self._failed = self._skipped = False
        self._reasons: set[str] = set()  # of failures that were printed
        self._deadline = math.inf  # jobs that begin after it are skipped
        self._uploads: dict[str, Any] = {}  # artifacts by the names of checkpoints; the SDK sends them meanwhile
        self._queue = BackgroundQueue("wandb", self._fail)

    def do(self, job: Callable[[], Any], topic: str | None = None) -> None:
        """Run a job in the thread; if it sends media or the like, named `topic`, its failure concerns that only."""
        if self._raises and (error := self._error) is not None:
            raise WandbError(f"W&B failed: {first_line(error)}.") from error
        if len(self._queue) > _MAX_WAITING:
            self._fail(TimeoutError(f"it is {_MAX_WAITING:,} rows behind"))
        if not self._failed:
            self._queue.submit(lambda: self._work(job, topic))

    def log_checkpoint(
        self, path: Place, *, name: str, aliases: Sequence[str], metadata: Mapping[str, Any], lasts: bool
    ) -> None:
        """Send a checkpoint's folder as a version of an artifact; unless it `lasts`, the SDK copies it at once.

        Of a checkpoint in a bucket only its URL is sent.
        """

        def send() -> None:
            import wandb

            state = read_state(path)
            counts = {"step": state["global_step"], "epoch": state["epoch"]}
            artifact = wandb.Artifact(name, type="model", metadata={**counts, **metadata})
            if isinstance(path, Path):  # offline the SDK must keep a copy until it is synced
                artifact.add_dir(str(path), policy="immutable" if lasts and not self.run.offline else "mutable")
            else:
                artifact.add_reference(str(path), name=path.name, checksum=False)
            upload = self.run.log_artifact(artifact, aliases=list(aliases))
            if not self.run.offline:
                self._uploads[path.name] = upload

        self.do(send, path.name)

    def finish(self, *, failed: bool) -> None:
        """Wait until everything is sent, in bounded time, and close the run; raise a WandbError only with `raises`."""
        start, errors = time.monotonic(), list[Exception]()
        later = f"; later: wandb sync {short_path(Path(self.run.dir).parent)}"

        def close() -> None:
            for name, upload in self._uploads.items():
                if time.monotonic() < self._deadline:
                    self._work(lambda upload=upload: self._wait_for(upload), name)
            try:
                if self._finishes:
                    self.run.finish(exit_code=int(failed))
            except Exception as error:
                errors.append(error)

        # Jobs have half of the time, then the SDK has its own limit.
        self._deadline = start + self._finish_timeout / 2
        self._queue.submit(close)
        self._queue.stop()
        try:
            in_time = self._queue.wait_idle(1.5 * self._finish_timeout + MARGIN)
        except BaseException:  # a second Ctrl-C
            self._end(failed=True)
            say(f"W&B: the upload was interrupted{later}")
            raise
        if not in_time or self._skipped:
            reason = "there was no time left" if in_time else f"no end after {time.monotonic() - start:.0f} s"
            errors.append(TimeoutError(reason))
        self._failed |= bool(errors)  # jobs that hang may continue later, and then print nothing
        self._end(failed=bool(errors))
        if self._raises and (error := next(iter(errors), self._error)) is not None:
            raise WandbError(f"W&B could not finish run {self.run.id}: {first_line(error)}.") from error
        if errors:
            say(f"W&B: the upload did not finish ({first_line(errors[0])}){later}")

    def _wait_for(self, upload: Any) -> None:
        """Raise if the server has refused an upload, which nothing else reports."""
        try:
            upload.wait(math.ceil(self._deadline - time.monotonic()))
        except Exception as error:
            if not isinstance(error.__cause__, TimeoutError):  # the limit of `finish` counts
                raise

    def _end(self, *, failed: bool) -> None:
        if self._finishes:
            end_run(self.run, failed=failed)

    def _work(self, job: Callable[[], Any], topic: str | None) -> None:
        self._skipped |= time.monotonic() > self._deadline
        if self._failed or self._skipped:
            return
        try:
            job()
        except Exception as error:
            if topic is None or self._raises:
                raise
            if (reason := first_line(error)) not in self._reasons and not self._failed:
                self._reasons.add(reason)
                say(f"W&B: {topic} was not sent ({reason})")

    def _fail(self, error: Exception) -> None:
        is_first, self._failed, self._error = not self._failed, True, self._error or error
        if is_first and not self._raises:
            say(f"W&B: off for the rest of this run ({first_line(error)})")
