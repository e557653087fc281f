"""Docstrings for Sphinx: Markdown becomes reStructuredText, and a class has the arguments of its `__init__`."""

import inspect
import re

from sphinx.util.inspect import stringify_signature


def to_rst(app, what, name, obj, options, lines):
    """Turn a docstring's `code` and fences, which are Markdown's, into those of reStructuredText."""
    paragraphs = re.split(r"(```.*?```)|\n\n", "\n".join(lines), flags=re.S)
    result = []
    for text in filter(None, paragraphs):
        if text.startswith("```"):
            text = "::\n\n" + "\n".join(f"    {line}" for line in text.strip("`").strip("\n").splitlines())
        elif ">>>" not in text:
            parts = re.split(r"(?<!`)(`[^`]+`)(?!`)", text)
            parts[::2] = [re.sub(r'(?<=[\w.({\[,/" ])\*(?=\S)', r"\*", x) for x in parts[::2]]
            parts[1::2] = [f"``{x[1:-1]}``\\ " for x in parts[1::2]]
            text = "".join(parts)
        result.append(text)
    lines[:] = "\n\n".join(result).splitlines()


def with_arguments(app, what, name, obj, options, signature, returned):
    """Return the signature of a class by its `__init__`, where `__new__`, which checks arguments, takes any."""
    if what == "class" and signature == "(*args: ~typing.Any, **kwargs: ~typing.Any)":
        given = list(inspect.signature(obj.__init__).parameters.values())[1:]
        signature = stringify_signature(inspect.Signature(given), unqualified_typehints=True)
    return signature, returned
