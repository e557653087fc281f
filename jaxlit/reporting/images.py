"""Images that a user logs, as Pillow takes them."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from jaxlit.errors import ArgumentError, LoggerError


def as_image(where: str, x: Any) -> Any:
    """Return an image as an array of uint8, or what is no array as it is; a copy, which the caller may keep.

    Args:
        where: The call, for messages.
        x: (height, width) or (height, width, 1, 3 or 4) of uint8, bool, or floats from 0 to 1, others are clipped; a
            Pillow image; or a path.

    Raises:
        ArgumentError: It is an array, and no image.
    """
    if not hasattr(x, "dtype"):
        return x.copy() if hasattr(x, "copy") else str(x) if isinstance(x, Path) else x
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


def as_images(where: str, images: Any) -> list[Any]:
    """Return an image or a list of them as a list, each as `as_image` returns it."""
    return [as_image(where, x) for x in (images if isinstance(images, (list, tuple)) else [images])]


def figure_image(where: str, figure: Any) -> Any:
    """Return a matplotlib figure as a Pillow image, as it is now.

    Raises:
        LoggerError: Pillow is not installed.
    """
    need_pillow(where)
    from PIL import Image

    figure.savefig(picture := io.BytesIO(), format="png")
    return Image.open(picture)


def has_pillow() -> bool:
    """Return whether Pillow is installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return False
    return True


def need_pillow(where: str) -> None:
    """Refuse to continue without Pillow.

    Raises:
        LoggerError: It is not installed.
    """
    if not has_pillow():
        raise LoggerError(f"{where} needs Pillow, which is not installed. Run `pip install pillow`.")
