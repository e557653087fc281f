"""A page of HTML that loads no other file."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

Cell = tuple[str, str]  # the text, and its class: "n" for a number, "n best" for the best, "" for text


def number(value: float, note: str = "", *, best: bool = False) -> Cell:
    """Return a number as a cell, followed by a note."""
    return f"{value:.6g}{note}", "n best" if best else "n"


def page(title: str, parts: Sequence[str]) -> str:
    """Return a page of parts, each of them HTML; empty ones are left out."""
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
