"""Draw docs/hooks.svg, the order of the hooks, from the pseudocode of `jl.Callback`: `python docs/hooks.py`."""

import inspect
import re
from pathlib import Path

import jaxlit as jl

CHAR, LINE, PAD = 7.3, 18, 14  # pixels: a character, a line, the border of a box
COLORS = {"hook": "#0b5cad", "compiled": "#b3470b", "box": "#5b21b6", "plain": "#59636e"}
LEGEND = {"hook": "a hook", "compiled": "compiled", "box": "another box", "plain": "the loop"}


def functions():
    """Return the lines of each function of the pseudocode, without comments, arguments and rows."""
    pseudocode = re.findall(r"```\n(.*?)```", inspect.cleandoc(jl.Callback.__doc__), re.S)[0]
    pseudocode = re.sub(r"#.*|^ +row = row.*|^ +row = None", "", pseudocode, flags=re.M)
    pseudocode = re.sub(r"(row = )?\blog\(.*\)", "on_log()", pseudocode)
    result = {}
    for name, body in re.findall(r"^def (\w+)\(.*?\):\n(.*?)(?=^def|\Z)", pseudocode, re.S | re.M):
        lines = [line[4:].rstrip() for line in body.splitlines() if line.strip()]
        arguments = r"\((?:[^()]|\([^()]*\))*\)"
        result[name] = [x if x.endswith(":") else re.sub(arguments, "", x) for x in lines]
    return result


def kind(line, names):
    """Return what a line is: "hook", "compiled", "box" (another function) or "plain"."""
    words = set(re.findall(r"\w+", line))
    if words & set(names):
        return "box"
    if words & {"training_step", "validation_step"}:
        return "compiled"
    of_loop = line.strip() == "break" or (line.endswith(":") and " on_" not in line)
    return "plain" if of_loop else "hook"


def box(left, top, name, lines, names):
    """Return the elements of a function's box, and its width and height."""
    width = max(map(len, lines)) * CHAR + 2 * PAD
    height = (len(lines) + 1) * LINE + 2 * PAD
    result = [
        f'<rect x="{left}" y="{top}" width="{width:.0f}" height="{height}" rx="8" fill="#f6f8fa" stroke="#d1d9e0"/>'
    ]
    result.append(text(left + PAD, top + PAD + 12, name, COLORS["box"], "bold"))
    for i, line in enumerate(lines, 1):
        indent = len(line) - len(line.lstrip())
        x, y = left + PAD + indent * CHAR, top + PAD + i * LINE + 14
        result += [
            f'<path d="M{left + PAD + n * CHAR + 3:.1f} {y - 13}v{LINE}" stroke="#d1d9e0"/>'
            for n in range(0, indent, 4)
        ]
        what = kind(line, names)
        result.append(text(x, y, line.strip(), COLORS[what], "normal" if what == "plain" else "bold"))
    return result, width, height


def text(x, y, words, color, weight):
    """Return a line of text."""
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-weight="{weight}">{words}</text>'


def draw():
    """Return the picture: `fit` next to the two functions that it calls, and a legend below them."""
    codes = functions()
    first, *others = codes
    shapes, width, height = box(PAD, PAD, first, codes[first], codes)
    left, right, top = round(2 * PAD + width), 0, PAD
    bottom = top + height
    for name in others:
        elements, width, height = box(left, top, name, codes[name], codes)
        shapes, right, top = shapes + elements, max(right, round(left + width + PAD)), top + height + PAD
    bottom = max(bottom, top)
    for i, (what, words) in enumerate(LEGEND.items()):
        shapes.append(
            text(2 * PAD + i * 18 * CHAR, bottom + 24, words, COLORS[what], "normal" if what == "plain" else "bold")
        )
    size = f'width="{right}" height="{bottom + 40}" viewBox="0 0 {right} {bottom + 40}"'
    style = 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12"'
    picture = [
        "<title>The order of the hooks</title>",
        f'<rect width="{right}" height="{bottom + 40}" fill="#fff"/>',
        *shapes,
    ]
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *picture, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
