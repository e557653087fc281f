"""What a user logs as an image, as the pixels that it becomes."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from kit.refusals import refuses
from kit.wandb_runs import PIXELS
from PIL import Image

from jaxlit.errors import ArgumentError
from jaxlit.reporting.media import as_image

GRAYS = np.linspace(0, 1, 20, dtype=np.float32).reshape(4, 5)
ALPHA = np.dstack([PIXELS, PIXELS[..., :1]])
WILD = np.array([[-1.0, 0.0, 0.5], [2.0, np.nan, np.inf]])


def test_arrays_become_the_pixels_that_they_mean_and_are_copied():
    for given, expected in (
        (PIXELS, PIXELS),
        (ALPHA, ALPHA),
        (PIXELS[..., :1], PIXELS[..., 0]),
        (PIXELS / 255, PIXELS),
        (jnp.asarray(GRAYS), np.uint8(np.round(GRAYS * 255))),
        (np.ones((2, 3), jnp.bfloat16), np.full((2, 3), 255, np.uint8)),
        (np.eye(3, dtype=bool), np.eye(3, dtype=np.uint8) * 255),
        (WILD, np.array([[0, 0, 128], [255, 0, 255]], np.uint8)),
    ):
        result = as_image("here", given)
        assert result.dtype == np.uint8 and not np.shares_memory(result, given)
        np.testing.assert_array_equal(result, expected)
    picture = Image.fromarray(PIXELS)
    copy = as_image("here", picture)
    picture.putpixel((0, 0), (9, 9, 9))
    np.testing.assert_array_equal(np.asarray(copy), PIXELS)
    picture.convert("P").save("a.png")  # of a palette
    np.testing.assert_array_equal(as_image("here", Path("a.png")), np.asarray(picture.convert("P").convert("RGBA")))


def test_an_array_that_is_no_image_is_refused():
    for shape in ((3,), (2, 3, 4, 5), (4, 5, 2), (3, 4, 5), (0, 5)):
        array = np.zeros(shape, np.uint8)
        refuses(ArgumentError, lambda array=array: as_image("key", array), "^key takes", f"{list(shape)}"[1:-1])
    for array in (np.zeros((4, 5), np.int32), np.zeros((4, 5), np.complex64), np.array([["a"]])):
        refuses(ArgumentError, lambda array=array: as_image("key", array), f"got {array.dtype}")
