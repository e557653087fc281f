"""A run of Weights & Biases that cannot stop training, or keep it waiting."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlit.background import BackgroundQueue
from jaxlit.reporting.terminal import say, short_path
from jaxlit.reporting.wandb_start import MARGIN, WandbError, end_run, first_line

if TYPE_CHECKING:
    import wandb

STEP = "trainer/global_step"

_MAX_WAITING = 10_000  # rows that a run may lag behind
_MAX_COPIES = 3  # of checkpoints on the disk, while no upload arrives
_LAST = 2.0  # seconds until the outcome of the last upload is known, once the run is finished


class WandbRun:
    """A run that is open. One thread gives rows to the SDK in order; another waits for uploads, which may take long.

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
        self._failed = False
        self._reasons: set[str] = set()  # of failures that were printed
        self._copies, self._arrived_at = 0, 0.0  # checkpoints on their way, and when the newest of them arrived
        self._rows, self._uploads = BackgroundQueue("wandb", self._fail), BackgroundQueue("wandb-upload", self._fail)

    def define_metric(self, name: str, **options: Any) -> None:
        """Define the axis of a metric, or what its summary is."""
        self._do(lambda: self.run.define_metric(name, **options))

    def log(self, row: Mapping[str, Any] | Callable[[], Mapping[str, Any]], *, what: str | None = None) -> None:
        """Send a row.

        Args:
            row: The row, or a function that makes it in the thread: the SDK writes an image to disk when it is made.
            what: The name of a row that is no row of numbers; a failure is one of that row only.

        Raises:
            WandbError: Something has failed, and `raises` is set.
        """
        self._do(lambda: self.run.log(dict(row() if callable(row) else row)), what)

    def update_config(self, values: Mapping[str, Any]) -> None:
        """Set values of the config."""
        self._do(lambda: self.run.config.update(dict(values), allow_val_change=True))

    def update_summary(self, values: Mapping[str, Any]) -> None:
        """Set values of the summary."""
        self._do(lambda: self.run.summary.update(dict(values)))

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

            waited = time.monotonic() - self._arrived_at
            if self._copies >= _MAX_COPIES and waited > self._finish_timeout:
                raise TimeoutError(f"none before it has arrived for {waited:.0f} s")
            state = json.loads((path / "state.json").read_text())
            known = {"step": state["global_step"], "epoch": state["epoch"], **metadata}
            artifact = wandb.Artifact(name, type="model", metadata=known)
            # Offline the SDK must keep a copy until it is synced.
            artifact.add_dir(str(path), policy="immutable" if lasts and not self.run.offline else "mutable")
            logged = self.run.log_artifact(artifact, aliases=list(aliases))
            if self.run.offline:
                return
            self._arrived_at = self._arrived_at if self._copies else time.monotonic()
            self._copies += 1

            def wait() -> None:
                try:
                    logged.wait()  # only this raises if the server refuses one
                finally:
                    self._copies, self._arrived_at = self._copies - 1, time.monotonic()

            self._do(wait, path.name)

        self._do(send, path.name, self._rows)

    def finish(self, *, failed: bool) -> None:
        """Wait until everything is sent, in bounded time, and close the run.

        Raises:
            WandbError: It could not be finished, and `raises` is set.
        """
        start, errors = time.monotonic(), list[Exception]()
        later = f"; later: wandb sync {short_path(Path(self.run.dir).parent)}"

        def close() -> None:
            try:
                if self._finishes:
                    self.run.finish(exit_code=int(failed))
            except Exception as error:
                errors.append(error)

        try:
            # Jobs have half of the time, then the SDK has its own limit.
            self._rows.wait_idle(self._finish_timeout / 2)
            self._uploads.wait_idle(start + self._finish_timeout / 2 - time.monotonic())
            self._rows.submit(close)
            self._rows.stop()
            self._uploads.stop()
            if not self._rows.wait_idle(self._finish_timeout + MARGIN):
                errors.append(TimeoutError(f"no end after {time.monotonic() - start:.0f} s"))
            if not self._uploads.wait_idle(_LAST):
                errors.append(TimeoutError("there was no time left"))
        except BaseException:  # a second Ctrl-C
            self._end(failed=True)
            say(f"W&B: the upload was interrupted{later}")
            raise
        self._failed |= bool(errors)  # jobs that hang may continue later, and then print nothing
        self._end(failed=bool(errors))
        if self._raises and (error := next(iter(errors), self._error)) is not None:
            raise WandbError(f"W&B could not finish run {self.run.id}: {first_line(error)}.") from error
        if errors:
            say(f"W&B: the upload did not finish ({first_line(errors[0])}){later}")

    def _end(self, *, failed: bool) -> None:
        if self._finishes:
            end_run(self.run, failed=failed)

    def _do(self, job: Callable[[], Any], what: str | None = None, jobs: BackgroundQueue | None = None) -> None:
        """Hand a job to its thread.

        Args:
            job: The job.
            what: What it sends, if a failure concerns that alone; None for rows, without which there is no run.
            jobs: The thread; None for that of uploads if `what` is given.

        Raises:
            WandbError: Something has failed, and `raises` is set.
        """
        if self._raises and (error := self._error) is not None:
            raise WandbError(f"W&B failed: {first_line(error)}.") from error
        if jobs is None:
            jobs = self._rows if what is None else self._uploads
        if len(jobs) > _MAX_WAITING:
            self._fail(TimeoutError(f"it is {_MAX_WAITING:,} rows behind"))

        def work() -> None:
            if self._failed:
                return
            try:
                job()
            except Exception as error:
                if what is None or self._raises:
                    raise
                if (why := first_line(error)) not in self._reasons and not self._failed:
                    self._reasons.add(why)
                    say(f"W&B: {what} was not sent ({why})")

        if not self._failed:
            jobs.submit(work)

    def _fail(self, error: Exception) -> None:
        first, self._failed, self._error = not self._failed, True, self._error or error
        if first and not self._raises:
            say(f"W&B: off for the rest of this run ({first_line(error)})")
