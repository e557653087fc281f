"""Curves of metrics as pictures of lines: SVG, which needs no library and stays sharp."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np

from jaxlit.table import count

WIDTH, HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 12, 38  # around the lines
_MOST = 400  # points of a line: more cannot be told apart
_COLORS = 6
_STAGES = ("train", "val", "test")  # which have the first colors

_Curve = tuple[np.ndarray, np.ndarray]  # steps and values


def together(names: Iterable[str]) -> dict[str, list[str]]:
    """Return which metrics belong in one picture, by the end of their names: `train/loss`, `val_loss`, `loss_step`."""
    found: dict[str, list[str]] = {}
    for name in names:
        end = re.sub(r"/dataloader_idx_\d+$", "", name).removesuffix("_epoch").removesuffix("_step").split("/")[-1]
        found.setdefault(re.sub(f"^({'|'.join(_STAGES)})_", "", end), []).append(name)
    return found


def colors(names: Iterable[str]) -> dict[str, int]:
    """Return the number of each name's color in one picture: the first curve of a stage has the same in all of them."""
    found: dict[str, int] = {}
    for name in sorted(names, key=lambda name: (not name.startswith(_STAGES), name)):
        own = next((k for k, stage in enumerate(_STAGES) if name.startswith(stage)), 0)
        others = (*range(len(_STAGES), _COLORS), *range(len(_STAGES)))
        found[name] = next((k for k in (own, *others) if k not in found.values()), own)
    return found


def spans_decades(values: np.ndarray) -> bool:
    """Return whether finite values are easier to read on a logarithmic axis."""
    return bool(values.size and values.min() > 0 and values.max() > 30 * values.min())


def curves_svg(title: str, curves: Mapping[str, _Curve]) -> str:
    """Return a picture of curves, an SVG element that takes its colors from the page.

    Values that are not finite are gaps. Values above 0 that span more than a factor of 30 have a logarithmic axis.

    Args:
        title: What it shows, for who cannot see it.
        curves: Steps and values by name.
    """
    every = np.concatenate([values[np.isfinite(values)] for _, values in curves.values()] or [np.zeros(0)])
    steps = np.concatenate([steps for steps, _ in curves.values()] or [np.zeros(0)])
    if not every.size:
        return ""
    logarithmic, number_of = spans_decades(every), colors(curves)
    scale = np.log10 if logarithmic else np.asarray
    low, high = (float(scale(x)) for x in (every.min(), every.max()))
    room = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    low, high = low - room, high + room
    first, last = float(steps.min()), float(max(steps.max(), steps.min() + 1))

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in _ticks(low, high, whole=logarithmic):
        text = _short(10.0**tick if logarithmic else tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 6}" y="{y(tick) + 4:.1f}">{text}</text>')
    for tick in _ticks(first, last, whole=True):
        label = f'x="{x(tick):.1f}" y="{HEIGHT - _BOTTOM + 18}">{_short(tick)}'
        parts.append(f'<text class="tick" text-anchor="middle" {label}</text>')
    parts.append(f'<text class="tick" text-anchor="end" x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}">step</text>')
    for name, (at, values) in curves.items():
        at, values = thinned(at, values)
        color = f"var(--c{number_of[name]})"
        pieces = _pieces(
            [(x(float(s)), float(scale(v)) if np.isfinite(v) else math.nan) for s, v in zip(at, values, strict=True)]
        )
        for piece in pieces:
            points = " ".join(f"{px:.1f},{y(value):.1f}" for px, value in piece)
            parts.append(
                f'<polyline class="curve" stroke="{color}" points="{points}"><title>{escape(name)}</title></polyline>'
            )
            if len(at) < 30 or len(piece) == 1:
                parts += [f'<circle fill="{color}" r="2.6" cx="{px:.1f}" cy="{y(v):.1f}"/>' for px, v in piece]
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{inside}</svg>'


def thinned(steps: np.ndarray, values: np.ndarray, most: int = _MOST) -> _Curve:
    """Return at most so many points of a curve, with the least and the largest value of each stretch."""
    if len(steps) <= most:
        return steps, values
    kept = {0, len(steps) - 1}
    for stretch in np.array_split(np.arange(len(steps)), most // 2 - 1):
        finite = stretch[np.isfinite(values[stretch])]
        if finite.size:
            kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
    order = sorted(kept)
    return steps[order], values[order]


def _pieces(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Return the stretches of points between those that are not finite."""
    found: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            found[-1].append(point)
        elif found[-1]:
            found.append([])
    return [piece for piece in found if piece]


def _short(value: float) -> str:
    return count(value) if value >= 10_000 else f"{value:.6g}"


def _ticks(low: float, high: float, *, whole: bool = False, about: int = 5) -> list[float]:
    """Return round numbers between two, some five of them."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= raw)
    step = max(1.0, float(math.ceil(step))) if whole else step
    begin = math.ceil(low / step - 1e-9)
    return [k * step for k in range(begin, math.floor(high / step + 1e-9) + 1)]
