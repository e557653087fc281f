"""A run of Weights & Biases that cannot stop training, or keep it waiting."""

import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlit.background import Background, BackgroundQueue
from jaxlit.reporting.terminal import say, short_path
from jaxlit.reporting.wandb_start import MARGIN, PATIENCE, WandbError, first_line, limit_exit

if TYPE_CHECKING:
    import wandb

STEP = "trainer/global_step"

_MOST_WAITING = 10_000  # rows that a run may lag after
_MOST_COPIES = 3  # of checkpoints that wait to be sent
_LAST = 2.0  # seconds until the outcome of the last upload is known, once the run is finished


class WandbRun:
    """A run that is open. Rows are sent by a thread, in order, and by another what is uploaded: that may take long.

    A row that fails is told in one line, and the run is left alone from then on; training continues.

    Args:
        run: The SDK's run, or what it will be in: rows wait for it.
        finish_timeout: Seconds to wait at the end.
        raises: Whether a failure is raised, at the next call, in place of being told.
        own: Whether the run is to be finished: it was opened for this training.

    Attributes:
        run: The SDK's run; None until it is open.
        own: See above.
    """

    def __init__(
        self, run: "wandb.Run | Background[wandb.Run]", finish_timeout: float, *, raises: bool, own: bool = True
    ) -> None:
        self._opening = run if isinstance(run, Background) else None
        self.run: Any = None if isinstance(run, Background) else run
        self._finish_timeout, self._raises, self.own = finish_timeout, raises, own
        self._error: Exception | None = None
        self._copies = 0  # of checkpoints, until they are sent
        self._sending_since = math.inf  # when the newest of them began to be sent; inf if none is
        self._failed = self._cut = False
        self._late: list[tuple[str, Exception]] = []  # what failed while the run was being finished
        self._told: set[str] = set()
        self._send_until = math.inf  # what is not sent by then is left out
        self._rows, self._uploads = BackgroundQueue("wandb", self._fail), BackgroundQueue("wandb-upload", self._fail)
        if self._opening is not None:
            self._rows.submit(self._open)
            self._uploads.submit(self._open)

    @property
    def folder(self) -> Path | None:
        """Where its files are; None until it is open."""
        return None if self.run is None else Path(self.run.dir).parent

    def _open(self) -> None:
        assert self._opening is not None
        self.run = self._opening.result()

    def define_metric(self, name: str, **given: Any) -> None:
        """Say what a metric's axis is, or what stands in the summary."""
        self._do(lambda: self.run.define_metric(name, **given), None)

    def log(self, row: Mapping[str, Any] | Callable[[], Mapping[str, Any]], *, what: str | None = None) -> None:
        """Send a row.

        Args:
            row: It, or what makes it, in the thread: the SDK writes an image to the disk as soon as it is made.
            what: What it is if it is no row of numbers: then a failure, of its upload say, is that of this row only.

        Raises:
            WandbError: Something has failed, and `raises` is set.
        """
        self._do(lambda: self.run.log(dict(row() if callable(row) else row)), what)

    def update_config(self, values: Mapping[str, Any]) -> None:
        """Set values of the config."""
        self._do(lambda: self.run.config.update(dict(values), allow_val_change=True), None)

    def update_summary(self, values: Mapping[str, Any]) -> None:
        """Set values of the summary."""
        self._do(lambda: self.run.summary.update(dict(values)), None)

    def log_checkpoint(
        self, path: Path, *, name: str, aliases: Sequence[str], metadata: Mapping[str, Any], lasts: bool
    ) -> None:
        """Send a checkpoint's folder as an artifact.

        Args:
            path: The folder.
            name: The artifact's name; the same for all checkpoints of a run.
            aliases: Names of this version.
            metadata: What W&B shows of it, beside its step and epoch.
            lasts: Whether it will be there until the run is finished; if not, it may be deleted once this returns.

        Raises:
            WandbError: It cannot be read, and `raises` is set.
        """
        folder = path
        try:
            if not lasts:
                # Each keeps on the disk what was to be deleted: there are only a few of them while one gets nowhere.
                busy = time.monotonic() - self._sending_since
                if self._copies >= _MOST_COPIES and busy > self._finish_timeout:
                    raise TimeoutError(f"one before it is not through after {self._finish_timeout:g} s")
                # Beside it, where links are possible; what a crash leaves of it is swept away there.
                folder = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
                shutil.copytree(path, folder, copy_function=_link)
            state = json.loads((folder / "state.json").read_text())
        except OSError as error:
            if self._raises:
                raise WandbError(f"W&B cannot send {path.name}: {error}.") from error
            self._tell(path.name, error)
            return
        known = {"step": state["global_step"], "epoch": state["epoch"], **metadata}
        self._copies += not lasts
        wanted: list[Any] = []  # what the SDK has taken, and not sent yet

        def send() -> None:
            import wandb

            self._sending_since = time.monotonic()
            artifact = wandb.Artifact(name, type="model", metadata=known)
            # Offline the SDK must keep a copy until it is synced, else the folder itself can be sent.
            offline = bool(self.run.offline)
            artifact.add_dir(str(folder), policy="mutable" if offline else "immutable")
            logged = self.run.log_artifact(artifact, aliases=list(aliases))
            if not offline:
                wanted.append(logged)
                logged.wait()  # only there the SDK says that one was refused; the end of the run ends it as well
                wanted.clear()

        def done() -> None:
            self._copies, self._sending_since = self._copies - (not lasts), math.inf
            if not (lasts or wanted):  # else a later sync needs it
                shutil.rmtree(folder, ignore_errors=True)

        self._do(send, path.name, done)

    def finish(self, *, failed: bool) -> None:
        """Wait until everything is sent, in bounded time, and close the run.

        Raises:
            WandbError: It could not be finished, and `raises` is set.
        """
        start, problems = time.monotonic(), list[Exception]()
        try:
            self._finish(start, problems, failed=failed)
        except BaseException:  # a second Ctrl-C
            limit_exit()
            say(f"W&B: the upload was interrupted{self._later()}")
            raise
        if problems:
            limit_exit()
        if self._raises and (error := next(iter(problems), self._error)) is not None:
            name = "that did not open" if self.run is None else self.run.id
            raise WandbError(f"W&B could not finish run {name}: {first_line(error)}.") from error
        if problems:
            self._failed = True  # what hangs may continue later, and then says nothing more
            say(f"W&B: the upload did not finish ({first_line(problems[0])}){self._later()}")

    def _later(self) -> str:
        return "" if self.folder is None else f"; later: wandb sync {short_path(self.folder)}"

    def _finish(self, start: float, problems: list[Exception], *, failed: bool) -> None:
        if self._opening is not None and not self._opening.is_done:
            say("W&B: training has ended, and waits for the offline run to open; Ctrl-C leaves it")
            self._opening.join(PATIENCE)
            start = time.monotonic()
        # Half of it for what is still to be sent, then the SDK's own limit.
        self._send_until = start + self._finish_timeout / 2
        self._uploads.wait_idle(self._finish_timeout / 2)

        def close() -> None:
            try:
                if self.own and self.run is not None:
                    self.run.finish(exit_code=int(failed))
            except Exception as error:
                problems.append(error)

        self._rows.submit(close)
        self._rows.stop()
        self._uploads.stop()
        if not self._rows.wait_idle(self._finish_timeout + MARGIN):
            problems.append(TimeoutError(f"no end after {time.monotonic() - start:.0f} s"))
        # The outcome of what was on its way is known by now.
        if not self._uploads.wait_idle(_LAST) or self._cut:
            problems.append(TimeoutError("there was no time left"))
        if not problems:
            for what, error in self._late:
                self._tell(what, error)
            problems += [error for _, error in self._late if self._raises]

    def _tell(self, what: str, error: Exception) -> None:
        """Say in a line that something was not sent, once for each reason."""
        if (why := first_line(error)) not in self._told and not self._failed:
            self._told.add(why)
            say(f"W&B: {what} was not sent ({why})")

    def _do(self, job: Callable[[], Any], what: str | None, done: Callable[[], None] = lambda: None) -> None:
        """Hand a job to its thread; `done` is called in any case.

        Args:
            job: What to do.
            what: What it sends, if a failure is of that alone; None for rows, without which there is no run.
            done: What follows, also if the job is left out.

        Raises:
            WandbError: Something has failed, and `raises` is set.
        """
        if self._raises and (error := self._error) is not None:
            raise WandbError(f"W&B failed: {first_line(error)}.") from error
        jobs = self._rows if what is None else self._uploads
        if len(jobs) > _MOST_WAITING and not self._failed:
            self._fail(TimeoutError(f"it is {_MOST_WAITING:,} rows after"))

        def work() -> None:
            self._cut |= time.monotonic() > self._send_until
            try:
                if not (self._failed or self._cut):
                    job()
            except Exception as error:
                if what is not None and self._send_until < math.inf:  # the run is being finished: that says one thing
                    self._late.append((what, error))
                elif what is None or self._raises:
                    raise
                else:
                    self._tell(what, error)
            finally:
                done()

        if self._failed:
            done()
        else:
            jobs.submit(work)

    def _fail(self, error: Exception) -> None:
        first, self._failed, self._error = not self._failed, True, self._error or error
        if first and not self._raises:
            say(f"W&B: off for the rest of this run ({first_line(error)})")


def _link(source: str, target: str) -> None:
    """Give a file a second name, which costs nothing; where there are no such links, copy it."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise  # a copy would go through the link that is there, into the file that it stands for
    except OSError:
        shutil.copy2(source, target)
