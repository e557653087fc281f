"""In which layer of a module an error was raised."""

import traceback
from typing import Any

from flax import nnx

from jaxlit.leaf_names import leaf_name


def note_layer(error: Exception) -> None:
    """Note on an error the path of the innermost layer whose method it was raised in, and the layer's class."""
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Not isinstance, which reads an attribute: the Trainer's module would fetch its newest arrays, in a trace.
    layers = [x for x in frames if issubclass(type(x), nnx.Module)]
    owner, paths = "self", dict[int, tuple[Any, ...]]()
    for layer in layers:
        if id(layer) not in paths:
            owner = f"{type(layer).__name__}(...)" if paths else "self"  # a copy, which a transform of nnx has made
            paths = {id(node): path for path, node in nnx.iter_graph(layer)}
    if layers and (path := paths[id(layers[-1])]):
        kind = type(layers[-1])
        name = f"{'nnx.' * kind.__module__.startswith('flax.nnx.')}{kind.__name__}"
        error.add_note(f"It was raised in {owner}.{leaf_name(path)} ({name}).")
