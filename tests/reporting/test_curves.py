"""Curves as SVG: each point stands where its value says, read back from the picture."""

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from jaxlit.reporting.curves import curves_svg, thinned, together


def lines_of(svg: str) -> list[tuple[str, np.ndarray]]:
    """Return each line's title and its points, (n, 2)."""
    result = []
    for line in ET.fromstring(svg).iter("polyline"):
        points = [list(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        result.append(("".join(line.itertext()), np.array(points)))
    return result


VALUES = {
    "down": np.array([4.0, 3.0, 2.5, 2.25, 0.5]),
    "negative": np.array([-3.0, 5.0, -1e-3, 2.0, 0.0]),
    "flat": np.full(5, 0.25),
    "decades": np.array([1e-4, 1e-2, 1.0, 10.0, 1e3]),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_point_stands_where_its_value_says(kind: str) -> None:
    steps, values = np.array([0, 10, 20, 30, 49]), VALUES[kind]
    svg = curves_svg("a & b", {"a<b>": (steps, values)})
    ((title, points),) = lines_of(svg)
    assert title == "a<b>" and ET.fromstring(svg).attrib["aria-label"] == "a & b"
    shown = np.log10(values) if kind == "decades" else values
    share = lambda x: (x - x[0]) / (x.max() - x.min() or 1)  # noqa: E731
    np.testing.assert_allclose(share(points[:, 0]), share(steps), atol=2e-3)
    np.testing.assert_allclose(-share(points[:, 1]), share(shown), atol=2e-3)  # y points down
    assert ((points >= 0) & (points <= [440, 250])).all()
    # The ticks' texts lie on the same scale: the value that a point's height reads is its own.
    ticks = [x for x in ET.fromstring(svg).iter("text") if x.attrib["text-anchor"] == "end" and x.text != "step"]
    low_y, high_y = (float(tick.attrib["y"]) for tick in (ticks[0], ticks[-1]))
    low, high = (float(str(tick.text).replace("k", "e3")) for tick in (ticks[0], ticks[-1]))
    low, high = (math.log10(low), math.log10(high)) if kind == "decades" else (low, high)
    read = low + (points[:, 1] + 4 - low_y) / (high_y - low_y) * (high - low)
    np.testing.assert_allclose(read, shown, atol=0.02 * (shown.max() - shown.min() or 1))


def test_values_that_are_not_finite_are_gaps() -> None:
    values = np.array([1.0, 2.0, np.nan, 3.0, np.inf, 4.0])
    svg = curves_svg("x", {"x": (np.arange(6), values)})
    (first, last), *dots = [points for _, points in lines_of(svg)]
    assert first[0] < last[0]
    assert all((start == end).all() for start, end in dots)
    assert len(dots) == 2
    assert "nan" not in svg and "inf" not in svg
    assert curves_svg("x", {"x": (np.arange(2), np.array([np.nan, np.nan]))}) == "" == curves_svg("x", {})


def test_a_long_curve_keeps_its_ends_and_its_spikes() -> None:
    values = np.sin(np.arange(10_000) / 500)
    values[4321], values[7777] = 9.0, -9.0
    values[-1] = values[-20]  # no extreme of its stretch
    steps, kept = thinned(np.arange(10_000), values)
    assert len(steps) <= 400 and (steps[0], steps[-1]) == (0, 9999)
    assert {4321, 7777} <= {*map(int, steps)} and (np.diff(steps) > 0).all()
    np.testing.assert_array_equal(kept, values[steps])


def test_metrics_whose_names_end_alike_share_a_picture() -> None:
    losses = ["train/loss", "val_loss", "loss_step", "loss_epoch", "val/loss/dataloader_idx_0"]
    losses.append("val/loss_epoch/dataloader_idx_12")
    assert together(["val/acc", *losses]) == {"acc": ["val/acc"], "loss": losses}
    assert together([]) == {}
