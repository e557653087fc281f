"""Images that a user logs, as Pillow takes them."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlit import checks as check
from jaxlit.errors import ArgumentError


def as_image(where: str, x: Any) -> np.ndarray:
    """Return an image as an array of uint8 of its own.

    Args:
        where: The call, for messages.
        x: (height, width) or (height, width, 1, 3 or 4) of uint8, bool, or floats from 0 to 1, others are clipped; a
            Pillow image; a matplotlib figure; or a path.

    Raises:
        ArgumentError: It is an array, and no image.
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
    # bfloat16 is of kind V.
    known = array.dtype == np.uint8 or array.dtype.kind in "fVb"
    if array.ndim not in (2, 3) or not array.size or channels not in (1, 3, 4) or not known:
        raise ArgumentError(
            f"{where} takes (height, width) or (height, width, 1, 3 or 4) arrays of uint8, or of floats from 0 to 1, "
            f"got {array.dtype}{list(array.shape)}. Pass a list for several images."
        )
    if array.dtype != np.uint8:
        array = (np.clip(np.nan_to_num(array.astype(np.float32)), 0.0, 1.0) * 255).round().astype(np.uint8)
    return (array[..., 0] if array.ndim == 3 and channels == 1 else array).copy()


def as_images(where: str, images: Any, caption: Sequence[str] | None = None) -> list[tuple[np.ndarray, str | None]]:
    """Return an image or a list of them as `as_image` returns each, with their captions.

    Raises:
        ArgumentError: An array is no image, or there is not a caption for each image.
        LoggerError: Pillow is not installed.
    """
    check.import_package("PIL", owner=where, install="pillow")
    given = [as_image(where, x) for x in (images if isinstance(images, (list, tuple)) else [images])]
    texts = [None] * len(given) if caption is None else caption
    if isinstance(texts, str) or len(texts) != len(given):
        raise ArgumentError(
            f"{where} takes a list with a caption for each image, got {len(given)} images and {caption!r:.60}. Pass "
            "caption=['...']."
        )
    return list(zip(given, texts, strict=True))
