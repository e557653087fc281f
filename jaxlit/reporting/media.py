"""Histograms and images that a user logs, and `MediaFolder`, which writes what a logger cannot store to files."""

import csv
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit import checks as check
from jaxlit.errors import ArgumentError
from jaxlit.reporting.terminal import say, short_path

BINS = 64
_FORBIDDEN = str.maketrans(dict.fromkeys('<>:"|?*\\' + "".join(map(chr, range(32))), "_"))
_logger = logging.getLogger("jaxlit")


def histogram(x: jax.Array, bins: int = BINS) -> jax.Array:
    """Count the finite entries of an array in bins of equal width, as `numpy.histogram` does; may be traced.

    Only the counts of a sharded array leave a device.

    Returns:
        (2 + bins,) float32: the lowest and the highest edge, and the counts. Counts above 2**24 are rounded.
    """
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x)
    any_finite = finite.any()
    low = jnp.where(any_finite, jnp.min(x, where=finite, initial=jnp.inf), 0.0)
    high = jnp.where(any_finite, jnp.max(x, where=finite, initial=-jnp.inf), 0.0)
    half = jnp.where(low == high, jnp.maximum(0.5, jnp.abs(low) * 2.0**-20), 0.0)
    low, high = low - half, high + half
    # By 16, so that the difference does not overflow, nor its reciprocal, by which XLA multiplies, underflow. The last
    # bin includes its upper edge. Not reshaped: a sharded array would be gathered for it.
    indices = jnp.clip(((x / 16 - low / 16) / (high / 16 - low / 16) * bins).astype(jnp.int32), 0, bins - 1)
    counts = jnp.zeros(bins, jnp.int32).at[jnp.where(finite, indices, bins)].add(1, mode="drop")
    return jnp.concatenate([jnp.stack([low, high]), counts.astype(jnp.float32)])


def count(values: Any, bins: int = BINS) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts, int64, and the edges, float64, of a histogram of the finite entries, on the host."""
    values = np.asarray(values, np.float64)
    return np.histogram(values[np.isfinite(values)], bins)


def unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts and the edges of what `histogram` returned."""
    return packed[2:].astype(np.int64), np.linspace(float(packed[0]), float(packed[1]), len(packed) - 1)


def as_image(call: str, x: Any) -> np.ndarray:
    """Return an image as a new array of uint8; `call` is for messages.

    An image is an array (height, width) or (height, width, 1, 3 or 4) of uint8, bool, or floats, which are clipped to 0
    to 1; a Pillow image; a matplotlib figure; or a path.
    """
    if not hasattr(x, "dtype"):
        from PIL import Image

        if hasattr(x, "savefig"):
            figure, x = x, io.BytesIO()
            figure.savefig(x, format="png")
        picture = Image.open(x) if isinstance(x, (str, Path, io.BytesIO)) else x
        return np.array(picture if picture.mode in ("L", "RGB", "RGBA") else picture.convert("RGBA"))
    array = np.asarray(x)
    channels = array.shape[-1] if array.ndim == 3 else 1
    has_known_dtype = array.dtype == np.uint8 or array.dtype.kind in "fVb"  # V is bfloat16
    if array.ndim not in (2, 3) or not array.size or channels not in (1, 3, 4) or not has_known_dtype:
        raise ArgumentError(
            f"{call} takes (height, width) or (height, width, 1, 3 or 4) arrays of uint8, or of floats from 0 to 1, "
            f"got {array.dtype}{list(array.shape)}. Pass a list for several images."
        )
    if array.dtype != np.uint8:
        array = (np.clip(np.nan_to_num(array.astype(np.float32)), 0.0, 1.0) * 255).round().astype(np.uint8)
    return (array[..., 0] if array.ndim == 3 and channels == 1 else array).copy()


def as_images(call: str, images: Any, caption: Sequence[str] | None = None) -> list[tuple[np.ndarray, str | None]]:
    """Return an image or a list of images, each as `as_image` returns it and with its caption; this needs Pillow."""
    check.import_package("PIL", owner=call, install="pillow")
    arrays = [as_image(call, x) for x in (images if isinstance(images, (list, tuple)) else [images])]
    texts = [None] * len(arrays) if caption is None else caption
    if isinstance(texts, str) or len(texts) != len(arrays):
        raise ArgumentError(
            f"{call} takes a list with a caption for each image, got {len(arrays)} images and {caption!r:.60}. Pass "
            "caption=['...']."
        )
    return list(zip(arrays, texts, strict=True))


class MediaFolder:
    """Writes media to `<run folder>/media/<key>/<step>`, with a suffix for its kind.

    Files of one key at one step are numbered, `3.png`, `3_1.png`; a resumed training overwrites those that it repeats.
    The methods take the arguments of those of `jaxlit.callbacks.Logger`.

    Args:
        run_dir: Returns the run's folder; None to convert everything and write nothing.
        step: Returns the step of media that are logged without one.
        goes_on: Returns whether training continues, so that a failure must not end it.
        announces: Whether a line names the folder.
    """

    _announced: Path | None = None

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

    def begin(self) -> None:
        """Begin a run, which overwrites files of an earlier run and prints its own failures."""
        self._newest: dict[Path, tuple[int, int]] = {}  # by key, the newest step and its number of files
        self._failures: set[tuple[str, type]] = set()

    def stand_in(self, call: str, method: str, error: Exception, *args: Any, **named: Any) -> None:
        """Write media that a logger's `method(*args, **named)` failed to store; warn once and never raise."""
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
        self._write(key, {".txt": str(text).encode()}, step)

    def log_table(
        self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], *, step: int | None = None
    ) -> None:
        """Write a table to a .csv file."""
        csv.writer(text := io.StringIO(), lineterminator="\n").writerows([columns, *data])
        self._write(key, {".csv": text.getvalue().encode()}, step)

    def log_histogram(self, key: str, values: Any, *, bins: int = 64, step: int | None = None) -> None:
        """Write counts and edges to a .json file."""
        counts, edges = count(values, bins)
        text = json.dumps({"counts": counts.tolist(), "edges": edges.tolist()})
        self._write(key, {".json": text.encode()}, step)

    def log_image(
        self, key: str, images: Any, step: int | None = None, *, caption: Sequence[str] | None = None
    ) -> None:
        """Write each image to a .png file, and its caption to a .txt file."""
        for image, text in as_images(f"log_image({key!r}, ...)", images, caption):
            from PIL import Image

            Image.fromarray(image).save(content := io.BytesIO(), format="png")
            caption_file = {} if text is None else {".txt": text.encode()}
            self._write(key, {".png": content.getvalue()} | caption_file, step)

    log_figure = log_image

    def _write(self, key: str, files: Mapping[str, bytes], step: int | None) -> None:
        """Write the contents of files by their suffixes, and print once where."""
        if (run_dir := self._run_dir()) is None:
            return
        step, media = int(self._step() if step is None else step), run_dir / "media"
        parts = [part.translate(_FORBIDDEN)[:60] for part in key.split("/")]  # 255 bytes, of at most 4 each
        path = Path(*("_" if part in ("", ".", "..") else part for part in parts))
        newest, number = self._newest.get(path, (step, 0))
        number, folder = number if newest == step else 0, media / path
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, content in files.items():
            (folder / f"{step}{f'_{number}' if number else ''}{suffix}").write_bytes(content)
        self._newest[path] = step, number + 1
        if self._announces and media != self._announced:
            self._announced = media
            say(f"images, tables and texts are saved in {short_path(media)}: their logger does not store them")
