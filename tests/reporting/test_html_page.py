"""Numbers on the page of a training."""

import numpy as np
import pytest

from jaxlit.reporting.html_page import number

SHOWN = [
    (3.0, "3"),
    (1234567.0, "1,234,567"),
    (0.123456, "0.12346"),
    (np.float32(2.5), "2.5"),
    (np.inf, "inf"),
    (-np.inf, "-inf"),
    (np.nan, "nan"),
]


@pytest.mark.parametrize("kind", [float, np.float64, np.float32])
@pytest.mark.parametrize(("value", "text"), SHOWN)
def test_a_number_is_shown_in_few_digits(value: float, text: str, kind: type) -> None:
    assert number(kind(value), " at 3") == (f"{text} at 3", "n")
