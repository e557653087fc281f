"""Pictures, tables and texts that no logger holds, as files in the run's folder."""

import csv
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlit.errors import ArgumentError
from jaxlit.reporting.histogram import count
from jaxlit.reporting.images import as_image, has_pillow
from jaxlit.reporting.terminal import say, short_path

_logger = logging.getLogger("jaxlit")
_FORBIDDEN = str.maketrans(dict.fromkeys('<>:"|?*\\' + "".join(map(chr, range(32))), "_"))

_File = tuple[str, bytes]  # a suffix, and what is in it


class MediaFolder:
    """Writes what is no number to `<run folder>/media/<key>/<step>`, with a suffix that says what it is.

    What comes again under one key at one step is numbered, `3.png`, `3_1.png`; a training that is resumed writes over
    what it makes again. The methods take what those of `jaxlit.callbacks.Logger` take.

    Args:
        run_dir: Returns the run's folder; None to make everything and keep nothing.
        step: Returns the step of what comes without one.
        goes_on: Returns whether a training continues, which what fails here does not end.
        tells: Whether a line says where the folder is.
    """

    def __init__(
        self,
        run_dir: Callable[[], Path | None] = lambda: None,
        step: Callable[[], int] = lambda: 0,
        goes_on: Callable[[], bool] = lambda: False,
        *,
        tells: bool = True,
    ) -> None:
        self._run_dir, self._step, self.goes_on, self._tells = run_dir, step, goes_on, tells
        self._told: set[Any] = set()
        self._newest: dict[Path, tuple[int, int]] = {}  # by folder, the newest step, and how many files it has

    def begin(self) -> None:
        """Begin a run: it writes over what one before it has left, and tells again of what fails."""
        self._newest.clear()
        self._told = {told for told in self._told if isinstance(told, Path)}

    def stand_in(
        self, owner: str, method: str, error: Exception, args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        """Keep what a logger was given and could not take; tells of it once and never raises.

        Args:
            owner: The logger's class.
            method: Its method, which is one of this folder as well.
            error: What it has raised.
            args: What it was given.
            named: The same by name.
        """
        outcome = "It is kept in the run's media folder"
        try:
            getattr(self, method)(*args, **named)
        except Exception:
            outcome = "It is left out"
        if (told := (owner, method, type(error))) not in self._told:
            self._told.add(told)
            words = "%s.%s failed: %r. %s, and training continues; with on_error='raise' it ends."
            _logger.warning(words, owner, method, error, outcome)

    def log_text(self, key: str, text: str, *, step: int | None = None) -> None:
        """Write a text to a .txt file, without secrets."""
        self._keep(key, [(".txt", str(text).encode())], step)

    def log_table(
        self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], *, step: int | None = None
    ) -> None:
        """Write a table to a .csv file, without secrets."""
        rows = [columns, *data]
        for i, row in enumerate(rows[1:]):
            if len(row) != len(rows[0]):
                raise ArgumentError(
                    f"log_table({key!r}, ...): row {i} has {len(row)} cells, and there are {len(rows[0])} columns. "
                    "Give each row a cell for each column."
                )
        csv.writer(text := io.StringIO(), lineterminator="\n").writerows(rows)
        self._keep(key, [(".csv", text.getvalue().encode())], step)

    def log_histogram(self, key: str, values: Any, *, bins: int = 64, step: int | None = None) -> None:
        """Write counts and edges to a .json file."""
        counts, edges = count(values, bins)
        text = json.dumps({"counts": counts.tolist(), "edges": edges.tolist()})
        self._keep(key, [(".json", text.encode())], step)

    def log_image(
        self, key: str, images: Any, *, caption: Sequence[str] | None = None, step: int | None = None
    ) -> None:
        """Write each image to a .png file, or an array to a .npy file without Pillow; its caption to a .txt beside."""
        images = list(images) if isinstance(images, (list, tuple)) else [images]
        if caption is not None and len(caption) != len(images):
            raise ArgumentError(f"log_image({key!r}, ...) got {len(images)} images and {len(caption)} captions.")
        for i, image in enumerate(images):
            files = [_image_file(f"log_image({key!r}, ...)", image)]
            files += [] if caption is None else [(".txt", caption[i].encode())]
            self._keep(key, files, step)

    def log_figure(self, key: str, figure: Any, *, step: int | None = None) -> None:
        """Write a matplotlib figure to a .png file."""
        figure.savefig(picture := io.BytesIO(), format="png")
        self._keep(key, [(".png", picture.getvalue())], step)

    def _keep(self, key: str, files: Sequence[_File], step: int | None) -> None:
        """Write files of one name, and say once where."""
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
        if self._tells and media not in self._told:
            self._told.add(media)
            how = "" if has_pillow() else "; images as .npy, as Pillow is not installed"
            say(f"images, tables and texts are saved in {short_path(media)} (no logger here takes them{how})")


def _image_file(where: str, x: Any) -> _File:
    image = as_image(where, x)
    if isinstance(image, str):
        return Path(image).suffix, Path(image).read_bytes()
    content = io.BytesIO()
    if not isinstance(image, np.ndarray):  # Pillow's own
        image.save(content, format="png")
    elif has_pillow():
        from PIL import Image

        Image.fromarray(image).save(content, format="png")
    else:
        np.save(content, image)
        return ".npy", content.getvalue()
    return ".png", content.getvalue()
