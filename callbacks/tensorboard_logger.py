"""`TensorBoardLogger`, which writes logged rows to event files."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxlit import checks as check
from jaxlit.callbacks.logger import Logger
from jaxlit.errors import ArgumentError
from jaxlit.reporting.media import as_images, count
from jaxlit.reporting.secrets import redacted
from jaxlit.reporting.terminal import absolute

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


class TensorBoardLogger(Logger):
    """Write every logged row to an event file, and images, figures, texts, tables, histograms and hyperparameters.

    View them by `tensorboard --logdir runs`. A resumed training drops the rows that it repeats. It needs tensorboardX,
    `pip install tensorboardX`.

    Args:
        save_dir: The folder of several runs; None for the folder of the Trainer's run, without a name and a version.
        name: A folder in `save_dir`; "" for none.
        version: The run's folder in `name`; None for the name of the Trainer's run.
        prefix: The beginning of the names of all metrics, before a slash.
        on_error: If a file cannot be written, "warn" prints that once and does not call the logger any more, "raise"
            ends training.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, logger=jl.callbacks.TensorBoardLogger("logs", name="digits"))
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        *,
        name: str = "",
        version: str | None = None,
        prefix: str = "",
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        if save_dir is None and (name or version is not None):
            raise ArgumentError(
                f"TensorBoardLogger(name={name!r}, version={version!r}) are folders in save_dir, which is not given. "
                "Pass save_dir='logs', or leave them out."
            )
        self.save_dir = None if save_dir is None else absolute(Path(save_dir))
        self._name, self._version, self.prefix, self.on_error = name, version, prefix, on_error
        self._writer: Any = None
        self._open = False
        self._purge: int | None = None  # the step from which on earlier rows are dropped

    @property
    def log_dir(self) -> Path | None:
        """The folder of the event file; None before the first run."""
        if (trainer := self._attached) is None or self.save_dir is None:
            return None if trainer is None else trainer.run_dir
        return self.save_dir / self._name / (self._version or trainer.run_dir.name)

    @property
    def location(self) -> str | None:
        """The folder of the event file; None before there is one."""
        return str(self.log_dir) if self._open else None

    @property
    def experiment(self) -> Any:
        """The `tensorboardX.SummaryWriter`, also after a fit; None before the first row, and in other processes."""
        return self._writer

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Raise a LoggerError if tensorboardX is not installed."""
        check.import_package("tensorboardX", owner="TensorBoardLogger", install="tensorboardX")
        self._purge = None

    def on_load_checkpoint(self, trainer: "Trainer", module: "TrainModule", checkpoint: dict[str, Any]) -> None:
        """Drop the rows that training will repeat."""
        self._purge = int(checkpoint["global_step"])

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write hyperparameters, for TensorBoard's table of runs, without secrets."""
        if (writer := self._opened()) is None:
            return
        from tensorboardX.summary import hparams  # type: ignore[import-not-found]

        plain = {k: v if isinstance(v, (bool, int, float, str)) else json.dumps(v) for k, v in params.items()}
        # Without the first summary, which fixes the metrics, TensorBoard shows all metrics of the run.
        for summary in hparams(redacted(plain), {})[1:]:
            writer.file_writer.add_summary(summary)
        writer.flush()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a row."""
        if (writer := self._opened()) is not None:
            from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[import-not-found]

            # `add_scalar` would replace characters, so that two names become one.
            tags = {name: f"{self.prefix}/{name}" if self.prefix else name for name in metrics}
            row = [Summary.Value(tag=tags[name], simple_value=float(x)) for name, x in metrics.items()]
            writer.file_writer.add_summary(Summary(value=row), self._step_or_newest(step))

    def save(self) -> None:
        """Write out what has been logged."""
        if self._open:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Close the file; a later run begins another in the same folder."""
        if self._open:
            self._open = False
            self._writer.close()

    def _store(self, method: str, key: str, *args: Any, step: int | None = None, **named: Any) -> None:
        """Write media: a table is a text in Markdown, several images are `key/0`, `key/1` and so on."""
        if (writer := self._opened()) is None:
            return
        step = self._step_or_newest(step)
        if method == "log_text":
            writer.add_text(key, str(args[0]), step)
        elif method == "log_table":
            columns, data = args
            rows = [[str(x).replace("|", "\\|").replace("\n", " ") for x in row] for row in (columns, *data)]
            rows.insert(1, ["---"] * len(columns))
            writer.add_text(key, "\n".join(f"| {' | '.join(row)} |" for row in rows), step)
        elif method == "log_histogram":
            counts, edges = count(*args, **named)
            x = np.asarray(args[0], np.float64)
            x = x[np.isfinite(x)]
            figures = (edges[0], edges[-1], x.size, float(x.sum()), float((x**2).sum()))
            writer.add_histogram_raw(key, *figures, edges[1:].tolist(), counts.tolist(), step)
        else:
            from tensorboardX.summary import image  # type: ignore[import-not-found]

            pairs = as_images(f"TensorBoardLogger.log_image({key!r}, ...)", *args, **named)
            for i, (x, _) in enumerate(pairs):
                summary = image(key, x, dataformats="HWC"[: x.ndim])
                summary.value[0].tag = f"{key}/{i}" if len(pairs) > 1 else key  # it has replaced characters
                writer.file_writer.add_summary(summary, step)
            if (captions := named.get("caption")) is not None:
                writer.add_text(f"{key}/captions", "\n\n".join(captions), step)

    def _opened(self) -> Any:
        """Return the writer, None in a process that writes nothing."""
        if (trainer := self._attached) is None:
            raise self._no_run()
        if not trainer.is_global_zero:
            return None
        if not self._open:
            from tensorboardX import SummaryWriter  # type: ignore[import-not-found]

            # The name has whole seconds only, and a second file of that name would replace the first.
            suffix = f".{time.time_ns() % 10**9:09d}"
            self._writer = SummaryWriter(str(self.log_dir), purge_step=self._purge, filename_suffix=suffix)
            self._open, self._purge = True, None
        return self._writer
