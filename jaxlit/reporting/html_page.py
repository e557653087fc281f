"""A page of HTML that needs nothing beside itself."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jaxlit.reporting.curves import colors
from jaxlit.table import count

# One look for light and dark: the colors are named here, and nowhere else.
_STYLE = """
:root { --bg: #fbfbfa; --card: #ffffff; --ink: #1d2327; --soft: #667078; --line: #e3e5e6; --good: #1a7f52;
  --bad: #b3372f; --warn: #8d6708; --c0: #2f6db3; --c1: #d9772b; --c2: #2c9163; --c3: #8b5bb5; --c4: #bb3f5e;
  --c5: #5f6b73;
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --card: #1c2024; --ink: #e6e9eb; --soft: #98a2aa;
  --line: #2e343a; --good: #5cc795; --bad: #ef837b; --warn: #dcb350; --c0: #6aa5e8; --c1: #eea05c;
  --c2: #64c598;
  --c3: #b990e0; --c4: #e77f9a; --c5: #a3adb5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 36px 24px 72px; }
h1 { font-size: 25px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 38px 0 12px; }
.sub { color: var(--soft); margin: 0; }
.state { font-weight: 600; } .good { color: var(--good); } .bad { color: var(--bad); }
.warn { color: var(--warn); }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 22px 0 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 16px;
  min-width: 128px; }
.tile b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 14px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px 12px 6px; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; padding: 0 4px 6px; }
figcaption i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
svg { width: 100%; height: auto; display: block; } .grid { stroke: var(--line); } .tick { fill: var(--soft);
  font-size: 13px; }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; } td, th { text-align: left;
  padding: 6px 14px; vertical-align: top; }
th { color: var(--soft); font-weight: 500; } tr + tr td { border-top: 1px solid var(--line); }
td { overflow-wrap: anywhere; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; } .best { color: var(--good);
  font-weight: 600; }
pre { margin: 0; padding: 14px 16px; overflow-x: auto;
  font: 12.5px/1.45 ui-monospace, Menlo, Consolas, monospace; }
details { margin-top: 12px; } summary { cursor: pointer; font-weight: 600; font-size: 17px;
  margin: 26px 0 12px; }
"""


class Cell(str):
    """A cell of a table, in one of the style's classes.

    Attributes:
        kind: "n" for a number, "n best" for the best, "" for a text.
    """

    kind: str

    def __new__(cls, text: object, kind: str = "") -> "Cell":
        """Return the text with its class."""
        found = super().__new__(cls, str(text))
        found.kind = kind
        return found


def number(value: float, note: str = "", *, best: bool = False) -> Cell:
    """Return a number as a cell, with a note after it."""
    if not math.isfinite(value):  # numpy warns where infinity is divided
        shown = f"{value}"
    elif value == value // 1 and abs(value) < 1e9:
        shown = f"{value:,.0f}"
    else:
        shown = f"{value:.5g}" if abs(value) < 1e5 else count(value)
    return Cell(shown + note, "n best" if best else "n")


def page(title: str, parts: Sequence[str]) -> str:
    """Return a page of parts, each of them HTML."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body><main>\n' + (
        "\n".join(filter(None, parts)) + "\n</main></body></html>\n"
    )


def heading(title: str, state: str, kind: str, rest: str) -> str:
    """Return the head of the page: how it ended stands first, "good", "bad" or "warn"."""
    said = f'<span class="state {kind}">{escape(state)}</span>{escape(rest)}'
    return f'<h1>{escape(title)}</h1><p class="sub">{said}</p>'


def tiles(found: Mapping[str, str]) -> str:
    """Return large values with their names below."""
    inside = "".join(
        f'<div class="tile"><b>{escape(x)}</b><span>{escape(k)}</span></div>' for k, x in found.items() if x
    )
    return f'<div class="tiles">{inside}</div>'


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table below its title, "" without rows."""
    if not rows:
        return ""
    cells = [[x if isinstance(x, Cell) else Cell(x) for x in row] for row in rows]
    kinds = [x.kind.partition(" ")[0] for x in cells[0]]
    top = "".join(f'<th class="{kind}">{escape(x)}</th>' for x, kind in zip(head, kinds, strict=True))
    body = "".join("<tr>" + "".join(f'<td class="{x.kind}">{escape(x)}</td>' for x in row) + "</tr>" for row in cells)
    return f'<h2>{escape(title)}</h2><div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def pairs(title: str, found: Mapping[str, Any]) -> str:
    """Return names and values below a title, "" if there are none."""
    return table(title, ("name", "value"), [(name, _plain(value)) for name, value in found.items()])


def text(title: str, content: str) -> str:
    """Return a text whose lines and spaces count, below its title."""
    return f'<h2>{escape(title)}</h2><div class="wide"><pre>{escape(content)}</pre></div>'


def folded(part: str) -> str:
    """Return a table or a text that is shown when its title is clicked."""
    title, _, rest = part.partition("</h2>")
    return f"<details><summary>{title.removeprefix('<h2>')}</summary>{rest}</details>" if part else ""


def figures(title: str, pictures: Mapping[str, tuple[str, Sequence[str]]]) -> str:
    """Return pictures side by side, "" if there are none.

    Args:
        title: Their title.
        pictures: By name the SVG, and the names of its curves.
    """
    found = []
    for svg, names in pictures.values():
        keys = [
            f'<span><i style="background:var(--c{color})"></i>{escape(name)}</span>'
            for name, color in colors(names).items()
        ]
        found.append(f"<figure><figcaption>{''.join(keys)}</figcaption>{svg}</figure>" if svg else "")
    inside = "".join(found)
    return f'<h2>{escape(title)}</h2><div class="curves">{inside}</div>' if inside else ""


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_plain(x)}" for key, x in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, (list, tuple)) else str(value)
