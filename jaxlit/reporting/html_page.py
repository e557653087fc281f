"""A page of HTML that loads no other file."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

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


Cell = tuple[str, str]  # the text, and its class: "n" for a number, "n best" for the best, "" for text


def number(value: float, note: str = "", *, best: bool = False) -> Cell:
    """Return a number as a cell, followed by a note."""
    if not math.isfinite(value):  # numpy warns where infinity is divided
        text = f"{value}"
    elif value == value // 1 and abs(value) < 1e9:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.5g}" if abs(value) < 1e5 else count(value)
    return text + note, "n best" if best else "n"


def page(title: str, parts: Sequence[str]) -> str:
    """Return a page of parts, each of them HTML; empty ones are left out."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(filter(None, parts))
    start = f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body><main>\n'
    return f"{start}{body}\n</main></body></html>\n"


def heading(title: str, state: str, kind: str, rest: str) -> str:
    """Return the head of the page: how the training ended, of the class "good", "bad" or "warn", and other text."""
    state = f'<span class="state {kind}">{escape(state)}</span>'
    return f'<h1>{escape(title)}</h1><p class="sub">{state}{escape(rest)}</p>'


def tiles(values: Mapping[str, str]) -> str:
    """Return large values with their names below."""
    tile = '<div class="tile"><b>{}</b><span>{}</span></div>'
    return f'<div class="tiles">{"".join(tile.format(escape(x), escape(k)) for k, x in values.items() if x)}</div>'


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str | Cell]], *, folded: bool = False) -> str:
    """Return a table below its title, "" without rows; a folded one is shown when its title is clicked."""
    if not rows:
        return ""
    cells = [[(x, "") if isinstance(x, str) else x for x in row] for row in rows]
    top = "".join(
        f'<th class="{kind.split(" ")[0]}">{escape(x)}</th>' for x, (_, kind) in zip(head, cells[0], strict=True)
    )
    lines = ("".join(f'<td class="{kind}">{escape(x)}</td>' for x, kind in row) for row in cells)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    content = f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'
    title = escape(title)
    return f"<details><summary>{title}</summary>{content}</details>" if folded else f"<h2>{title}</h2>{content}"


def pairs(title: str, values: Mapping[str, Any], *, folded: bool = False) -> str:
    """Return a table of names and values."""
    return table(title, ("name", "value"), [(name, _text(value)) for name, value in values.items()], folded=folded)


def text(title: str, content: str) -> str:
    """Return text whose line breaks and spaces are kept, below its title."""
    return f'<h2>{escape(title)}</h2><div class="wide"><pre>{escape(content)}</pre></div>'


def figure(svg: str, colors: Mapping[str, int]) -> str:
    """Return a picture with its legend.

    Args:
        svg: The picture.
        colors: The number of each curve's color by the curve's name.
    """
    key = '<span><i style="background:var(--c{})"></i>{}</span>'
    legend = "".join(key.format(color, escape(name)) for name, color in colors.items())
    return f"<figure><figcaption>{legend}</figcaption>{svg}</figure>"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(x)}" for key, x in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, (list, tuple)) else str(value)
