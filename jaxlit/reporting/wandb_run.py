"""A run of Weights & Biases that cannot stop training, or keep it waiting.

Opening a run of Weights & Biases in bounded time, offline if it cannot be online.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlit import checks as check
from jaxlit.background import Background, BackgroundQueue
from jaxlit.errors import JaxlitError
from jaxlit.reporting.terminal import join, say, short_path

if TYPE_CHECKING:
    import wandb

_open_runs: list[Any] = []  # of this process, which have not ended

MARGIN = 10.0  # seconds beyond W&B's own limits, which do not cover all of its waits


class WandbError(JaxlitError):
    """W&B is not installed, or failed where `on_error="raise"`."""


def open_run(
    arguments: Mapping[str, Any], settings: Mapping[str, Any], *, offline: bool, raises: bool
) -> "wandb.Run | None":
    """Open a run online; if that fails, offline; if that fails too, continue without. One line tells which it is.

    Args:
        arguments: Those of `wandb.init`, without mode and settings.
        settings: Those of `wandb.Settings` that a user chooses.
        offline: Whether to write to disk only.
        raises: Whether the first failure is raised.

    Returns:
        The SDK's run; None if there is none.

    Raises:
        WandbError: The SDK is not installed.
        Exception: With `raises`, what the SDK raised.
    """
    why = ""
    for mode in ("offline",) if offline or os.environ.get("WANDB_MODE") == "offline" else (None, "offline"):
        try:
            run = _init(arguments, settings, mode)
        except BaseException as error:
            end_run(None, failed=True)  # the SDK holds the id of a run that failed as long as its service runs
            if raises or not isinstance(error, Exception):
                raise
            why = f" ({first_line(error)})"
        else:
            if run.disabled:
                say("W&B disabled")
            elif run.offline:
                say(join([f"W&B offline{why}", f"upload: wandb sync {short_path(Path(run.dir).parent)}"]))
            else:
                say(f"W&B {run.url}")
            _open_runs.append(run)
            return run
    say(f"W&B: off for this run{why}")
    return None


def _init(arguments: Mapping[str, Any], settings: Mapping[str, Any], mode: str | None) -> "wandb.Run":
    wandb = import_wandb()
    if (asked := os.environ.get("WANDB_MODE")) and (mode is None or asked == "disabled"):
        mode = asked  # the SDK reads it only at its first use
    # Its reports of its own errors would keep the process from its end if the server does not answer.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    settings = {
        "finish_timeout_raises": True,
        "x_disable_meta": True,  # the command line and the environment may hold secrets
        "save_code": False,
        "console": "off",  # what the progress bar draws is no log
        "silent": True,
        **settings,
    }
    known = {k: v for k, v in settings.items() if k in wandb.Settings.model_fields}  # 0.22 has no finish_timeout

    def init() -> Any:
        if wandb.run is None:  # otherwise the user has set up the SDK already
            # Its lines come also from outside of runs, and some versions ask for an API key in a terminal.
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


def open_already(wanted: str | None) -> "wandb.Run | None":
    """Return the run that the program has opened itself, as the agents of sweeps ask for, unless it is another.

    Args:
        wanted: The id of the run that was asked for, None for any.
    """
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None or wanted not in (None, run.id):
        return None
    say(f"W&B {short_path(Path(run.dir).parent) if run.offline else run.url} (the run that is open)")
    return run


def end_run(run: "wandb.Run | None", *, failed: bool) -> None:
    """Close the SDK's service after a run that failed, without waiting for it, unless other runs are open.

    At the end of the process the SDK would wait for the service, which may hang; one that is closed is not waited for.

    Args:
        run: The run that has ended; None for one that could not be opened.
        failed: Whether it could not be opened or finished.
    """
    if run in _open_runs:
        _open_runs.remove(run)
    wandb = import_wandb()
    if failed and not _open_runs and wandb.run is None:
        # The SDK unregisters its wait at the beginning of a teardown, so a moment is enough.
        Background("wandb-teardown", wandb.teardown).start().join(1.0)


def import_wandb() -> Any:
    """Return the SDK.

    Raises:
        WandbError: It is not installed.
    """
    return check.import_package("wandb", owner="WandbLogger", install="wandb", kind=WandbError)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; an OSError's without its path, so that it is printed once."""
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


STEP = "trainer/global_step"

_MAX_WAITING = 10_000  # rows that a run may lag behind


class WandbRun:
    """A run that is open. A thread gives everything to the SDK, in order.

    After a row that fails nothing more is sent: one line says so, and training continues.

    Args:
        run: The SDK's run.
        finish_timeout: Seconds to wait at the end.
        raises: Whether a failure is raised at the next call; otherwise it is printed.
        finishes: Whether to finish the run at the end: it was opened for this training.
    """

    def __init__(self, run: "wandb.Run", finish_timeout: float, *, raises: bool, finishes: bool = True) -> None:
        self.run: Any = run
        self._finish_timeout, self._raises, self._finishes = finish_timeout, raises, finishes
        self._error: Exception | None = None
        self._failed = self._skipped = False
        self._reasons: set[str] = set()  # of failures that were printed
        self._deadline = math.inf  # jobs that begin after it are left out
        self._uploads: dict[str, Any] = {}  # artifacts by what they are of; the SDK sends them meanwhile
        self._queue = BackgroundQueue("wandb", self._fail)

    def do(self, job: Callable[[], Any], what: str | None = None) -> None:
        """Hand a job to the thread.

        Args:
            job: Sends something: the SDK writes an image to disk when it is made, so that is a part of it.
            what: What it sends, if that is no row of numbers; a failure is one of it only.

        Raises:
            WandbError: Something has failed, and `raises` is set.
        """
        if self._raises and (error := self._error) is not None:
            raise WandbError(f"W&B failed: {first_line(error)}.") from error
        if len(self._queue) > _MAX_WAITING:
            self._fail(TimeoutError(f"it is {_MAX_WAITING:,} rows behind"))
        if not self._failed:
            self._queue.submit(lambda: self._work(job, what))

    def log_checkpoint(
        self, path: Path, *, name: str, aliases: Sequence[str], metadata: Mapping[str, Any], lasts: bool
    ) -> None:
        """Send a checkpoint's folder as an artifact.

        Args:
            path: The folder.
            name: The artifact's name; the same for all checkpoints of a run.
            aliases: Names of this version.
            metadata: What W&B shows of it, as well as its step and epoch.
            lasts: Whether the folder exists until the run is finished. Otherwise the SDK copies it at once.

        Raises:
            WandbError: Something has failed, and `raises` is set.
        """

        def send() -> None:
            import wandb

            state = json.loads((path / "state.json").read_text())
            known = {"step": state["global_step"], "epoch": state["epoch"], **metadata}
            artifact = wandb.Artifact(name, type="model", metadata=known)
            # Offline the SDK must keep a copy until it is synced.
            artifact.add_dir(str(path), policy="immutable" if lasts and not self.run.offline else "mutable")
            upload = self.run.log_artifact(artifact, aliases=list(aliases))
            if not self.run.offline:
                self._uploads[path.name] = upload

        self.do(send, path.name)

    def finish(self, *, failed: bool) -> None:
        """Wait until everything is sent, in bounded time, and close the run.

        Raises:
            WandbError: It could not be finished, and `raises` is set.
        """
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
            why = "there was no time left" if in_time else f"no end after {time.monotonic() - start:.0f} s"
            errors.append(TimeoutError(why))
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
            if not isinstance(error.__cause__, TimeoutError):  # the SDK's own limit is the one that counts
                raise

    def _end(self, *, failed: bool) -> None:
        if self._finishes:
            end_run(self.run, failed=failed)

    def _work(self, job: Callable[[], Any], what: str | None) -> None:
        self._skipped |= time.monotonic() > self._deadline
        if self._failed or self._skipped:
            return
        try:
            job()
        except Exception as error:
            if what is None or self._raises:
                raise
            if (why := first_line(error)) not in self._reasons and not self._failed:
                self._reasons.add(why)
                say(f"W&B: {what} was not sent ({why})")

    def _fail(self, error: Exception) -> None:
        first, self._failed, self._error = not self._failed, True, self._error or error
        if first and not self._raises:
            say(f"W&B: off for the rest of this run ({first_line(error)})")
