"""Images, tables and texts that a logger cannot store, as files in the run's folder."""

import csv
import io
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxlit.reporting.histogram import count
from jaxlit.reporting.images import as_images
from jaxlit.reporting.terminal import say, short_path

_logger = logging.getLogger("jaxlit")
_FORBIDDEN = str.maketrans(dict.fromkeys('<>:"|?*\\' + "".join(map(chr, range(32))), "_"))

_File = tuple[str, bytes]  # a suffix, and what is in it


class MediaFolder:
    """Writes media to `<run folder>/media/<key>/<step>`, with a suffix for its kind.

    Several of one key at one step are numbered, `3.png`, `3_1.png`; a training that is resumed overwrites what it makes
    again. The methods take the arguments of those of `jaxlit.callbacks.Logger`.

    Args:
        run_dir: Returns the run's folder; None to make everything and keep nothing.
        step: Returns the step of media that are given without one.
        goes_on: Returns whether training continues, so that a failure must not end it.
        announces: Whether a line names the folder.
    """

    def __init__(
        self,
        run_dir: Callable[[], Path | None] = lambda: None,
        step: Callable[[], int] = lambda: 0,
        goes_on: Callable[[], bool] = lambda: False,
        *,
        announces: bool = True,
    ) -> None:
        self._run_dir, self._step, self.goes_on, self._announces = run_dir, step, goes_on, announces
        self.begin()

    _announced: Path | None = None

    def begin(self) -> None:
        """Begin a run: it overwrites files of an earlier one, and prints its failures again."""
        self._newest: dict[Path, tuple[int, int]] = {}  # by folder, the newest step, and how many files it has
        self._failures: set[tuple[str, type]] = set()

    def stand_in(self, call: str, method: str, error: Exception, *args: Any, **named: Any) -> None:
        """Keep media that a logger failed to take; warn once and never raise.

        Args:
            call: The logger's method that failed, for the warning.
            method: Its name, which this folder has as well.
            error: What it has raised.
            *args: Its arguments.
            **named: Its keyword arguments.
        """
        outcome = "It is kept in the run's media folder"
        try:
            getattr(self, method)(*args, **named)
        except Exception:
            outcome = "It is left out"
        if (failure := (call, type(error))) not in self._failures:
            self._failures.add(failure)
            words = "%s failed: %r. %s, and training continues; with on_error='raise' it ends."
            _logger.warning(words, call, error, outcome)

    def log_text(self, key: str, text: str, *, step: int | None = None) -> None:
        """Write a text to a .txt file."""
        self._keep(key, [(".txt", str(text).encode())], step)

    def log_table(
        self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], *, step: int | None = None
    ) -> None:
        """Write a table to a .csv file."""
        csv.writer(text := io.StringIO(), lineterminator="\n").writerows([columns, *data])
        self._keep(key, [(".csv", text.getvalue().encode())], step)

    def log_histogram(self, key: str, values: Any, *, bins: int = 64, step: int | None = None) -> None:
        """Write counts and edges to a .json file."""
        counts, edges = count(values, bins)
        text = json.dumps({"counts": counts.tolist(), "edges": edges.tolist()})
        self._keep(key, [(".json", text.encode())], step)

    def log_image(
        self, key: str, images: Any, *, caption: Sequence[str] | None = None, step: int | None = None
    ) -> None:
        """Write each image to a .png file, and its caption to a .txt file."""
        for image, text in as_images(f"log_image({key!r}, ...)", images, caption):
            from PIL import Image

            Image.fromarray(image).save(content := io.BytesIO(), format="png")
            files = [(".png", content.getvalue())]
            self._keep(key, files if text is None else [*files, (".txt", text.encode())], step)

    log_figure = log_image

    def _keep(self, key: str, files: Sequence[_File], step: int | None) -> None:
        """Write files of one name, and print once where."""
        if (run_dir := self._run_dir()) is None:
            return
        at, media = int(self._step() if step is None else step), run_dir / "media"
        parts = [part.translate(_FORBIDDEN) for part in key.split("/")]
        folder = media.joinpath(*("_" if part in ("", ".", "..") else part for part in parts))
        newest, number = self._newest.get(folder, (at, 0))
        number = number if newest == at else 0
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, content in files:
            (folder / f"{at}{f'_{number}' if number else ''}{suffix}").write_bytes(content)
        self._newest[folder] = at, number + 1
        if self._announces and media != self._announced:
            self._announced = media
            say(f"images, tables and texts are saved in {short_path(media)}: their logger does not store them")
