"""Curves of metrics as SVG, which needs no library and is sharp at any size, and the parts of a page of HTML."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from jaxlit.texts import count

WIDTH, HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 12, 38  # margins around the curves
_MAX_POINTS = 400  # of a curve: more cannot be seen
_NUM_COLORS = 6
_STAGES = ("train", "val", "test")  # which have the first colors

Curve = tuple[np.ndarray, np.ndarray]  # steps and values
Cell = tuple[str, str]  # a text, and its class: "n" for a number, "n best" for the best number, "" for text


def together(names: Iterable[str]) -> dict[str, list[str]]:
    """Return which metrics share a picture, by the end of their names: `train/loss`, `val_loss`, `loss_step`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        end = re.sub(r"/dataloader_idx_\d+$", "", name).removesuffix("_epoch").removesuffix("_step").split("/")[-1]
        groups.setdefault(re.sub(f"^({'|'.join(_STAGES)})_", "", end), []).append(name)
    return groups


def colors(names: Iterable[str]) -> dict[str, int]:
    """Return the number of each curve's color: the first curve of a stage has the same one in all pictures."""
    numbers: dict[str, int] = {}
    for name in sorted(names, key=lambda name: (not name.startswith(_STAGES), name)):
        first = next((k for k, stage in enumerate(_STAGES) if name.startswith(stage)), 0)
        choices = (first, *range(len(_STAGES), _NUM_COLORS), *range(len(_STAGES)))
        numbers[name] = next((k for k in choices if k not in numbers.values()), first)
    return numbers


def spans_decades(values: np.ndarray) -> bool:
    """Return whether finite values are easier to read on a logarithmic axis."""
    return bool(values.size and values.min() > 0 and values.max() > 30 * values.min())


def curves_svg(title: str, curves: Mapping[str, Curve]) -> str:
    """Return a picture of curves, an SVG element that takes its colors from the page; "" without a finite value.

    Values that are not finite are gaps. Positive values that span more than a factor of 30 have a logarithmic axis. The
    title is for screen readers.
    """
    finite = np.concatenate([values[np.isfinite(values)] for _, values in curves.values()] or [np.zeros(0)])
    if not finite.size:
        return ""
    steps = np.concatenate([steps for steps, _ in curves.values()])
    logarithmic, number_of = spans_decades(finite), colors(curves)
    scale = np.log10 if logarithmic else np.asarray
    low, high = scale([finite.min(), finite.max()]).tolist()
    room = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    low, high = low - room, high + room
    first, last = float(steps.min()), float(max(steps.max(), steps.min() + 1))
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    x = partial(np.interp, xp=(first, last), fp=(_LEFT, right))
    y = partial(np.interp, xp=(low, high), fp=(bottom, _TOP))

    def label(anchor: str, x: str, y: str, text: str) -> str:
        return f'<text class="tick" text-anchor="{anchor}" x="{x}" y="{y}">{text}</text>'

    parts = []
    for tick in _ticks(low, high, integers=logarithmic):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(label("end", f"{_LEFT - 6}", f"{y(tick) + 4:.1f}", _short(10.0**tick if logarithmic else tick)))
    for tick in _ticks(first, last, integers=True):
        parts.append(label("middle", f"{x(tick):.1f}", f"{bottom + 18}", _short(tick)))
    parts.append(label("end", f"{right}", f"{HEIGHT - 4}", "step"))
    for name, curve in curves.items():
        curve_steps, values = thinned(*curve)
        for piece in np.ma.clump_unmasked(np.ma.masked_invalid(values)):
            positions = zip(x(curve_steps[piece]), y(scale(values[piece])), strict=True)
            points = [f"{px:.1f},{py:.1f}" for px, py in positions]
            points *= 2 if len(points) == 1 else 1  # a line from a point to itself is a dot
            color = f"var(--c{number_of[name]})"
            line = f'<polyline class="curve" stroke="{color}" points="{" ".join(points)}">'
            parts.append(f"{line}<title>{escape(name)}</title></polyline>")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def thinned(steps: np.ndarray, values: np.ndarray) -> Curve:
    """Return at most 400 points of a curve: the smallest and the largest value of each stretch, and both ends."""
    if len(steps) <= _MAX_POINTS:
        return steps, values
    points = {0, len(steps) - 1}
    finite = np.ma.masked_invalid(values)
    for stretch in np.array_split(np.arange(len(steps)), _MAX_POINTS // 2 - 1):
        points |= {stretch[finite[stretch].argmin()], stretch[finite[stretch].argmax()]}
    order = sorted(points)
    return steps[order], values[order]


def _short(value: float) -> str:
    return count(value) if value >= 10_000 else f"{value:.6g}"


def _ticks(low: float, high: float, *, integers: bool = False) -> list[float]:
    """Return about five round numbers between two."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= raw)
    step = max(1.0, float(math.ceil(step))) if integers else step
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def number(value: float, note: str = "", *, best: bool = False) -> Cell:
    """Return a number as a cell, followed by a note."""
    return f"{value:.6g}{note}", "n best" if best else "n"


def page(title: str, parts: Sequence[str]) -> str:
    """Return a page of the parts in HTML that are not empty."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    start = f'<!doctype html>\n<html lang="en"><head>{head}<style>\n{style}</style></head>\n<body><main>'
    return "\n".join([start, *filter(None, parts), "</main></body></html>\n"])


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table below its title, "" without rows."""
    if not rows:
        return ""
    top = "".join(f'<th class="{kind[:1]}">{escape(x)}</th>' for x, (_, kind) in zip(head, rows[0], strict=True))
    lines = ("".join(f'<td class="{kind}">{escape(x)}</td>' for x, kind in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<h2>{escape(title)}</h2><div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def pairs(title: str, values: Mapping[str, Any]) -> str:
    """Return a table of names and values."""
    return table(title, ("name", "value"), [[(name, ""), (_text(value), "")] for name, value in values.items()])


def text(title: str, content: str) -> str:
    """Return text whose line breaks and spaces are kept, below its title."""
    return f'<h2>{escape(title)}</h2><div class="wide"><pre>{escape(content)}</pre></div>'


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(x)}" for key, x in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, (list, tuple)) else str(value)
