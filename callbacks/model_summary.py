"""What is trained, and where it lies."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxlit.callbacks.base import Callback
from jaxlit.errors import ArgumentError
from jaxlit.leaf_names import leaf_name
from jaxlit.reporting.placement import bytes_of, bytes_per_device, devices_of, placement
from jaxlit.reporting.terminal import join, line_width, say
from jaxlit.table import size

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.core.state import TrainState
    from jaxlit.trainer import Trainer


MOST_ROWS = 20  # of parameters; a longer table would fill the terminal before training has begun


@dataclass(frozen=True)
class Row:
    """One line of the summary: a parameter, or all those below a path."""

    path: str
    type: str  # class of the module that holds it, or of the module at the path
    shape: tuple[int, ...] | None  # None for a group
    params: int
    trained: int  # how many of them the optimizer trains
    sharding: str  # see `Placement.partition`
    bytes: int  # of the whole arrays
    bytes_per_device: int  # on the device that holds the most


class ModelSummary(Callback):
    """Print the parameters, their shardings and their bytes on each device before training.

    A fit whose summary is that of the one before prints none. Nothing is computed and no array is read. The last line
    counts the parameters and their bytes, the optimizer's bytes, and what the whole state takes on each device.

    Args:
        max_depth: How many components of a path to show: 1 for a line for each part of the module, 0 for
            the last line only, -1 for a line for each parameter. "auto" is -1 for at most 20 parameter
            arrays, else the least depth with more than one line.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=jl.callbacks.ModelSummary(max_depth=1), logger=False)
    """

    role = "model_summary"

    def __init__(self, max_depth: int | str = "auto") -> None:
        if max_depth != "auto" and (type(max_depth) is not int or max_depth < -1):
            raise ArgumentError(
                f"ModelSummary(max_depth=...) takes an int of at least -1 or 'auto', got {max_depth!r}."
            )
        self.max_depth = max_depth
        self._said = ""

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Print the summary."""
        if not trainer.is_global_zero:
            return
        state, lines = trainer.state, list[str]()
        paths = [keys for tree in (state.params, state.frozen) for keys, _ in _leaves(tree)]
        depth = _auto_depth(paths) if isinstance(self.max_depth, str) else self.max_depth
        if depth:
            lines.append(_table(summarize(state, module, max_depth=depth, notes=trainer.strategy.notes)))
            if depth != self.max_depth and depth > 0:
                rule = f"ModelSummary(max_depth=-1) shows all {len(paths)} parameter arrays."
                lines.append(f"Depth {depth} of {max(map(len, paths))}. {rule}")
        text = "\n".join([*lines, totals(state), *trainer.strategy.describe().split("\n")[1:]])
        if text != self._said:
            say(text)
        self._said = text


def summarize(
    state: "TrainState",
    module: nnx.Module,
    *,
    max_depth: int | str = -1,
    notes: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """Return a row for each parameter, in the order of their paths.

    Args:
        state: The state on its devices; its leaves may be shapes, dtypes and shardings.
        module: The module that it belongs to, for the names of its classes.
        max_depth: Put the parameters whose paths start with the same `max_depth` components, at least 1,
            into one row; -1 for none, "auto" by their number.
        notes: What is said of a parameter before how it is split, by its path.
    """
    types = {path: type(node).__name__ for path, node in nnx.iter_graph(module)}
    devices = devices_of(jax.tree.leaves(_held(state)))
    groups: dict[tuple[Any, ...], list[tuple[tuple[Any, ...], Any, bool]]] = {}
    found = sorted(
        [(keys, x, True) for keys, x in _leaves(state.params)]
        + [(keys, x, False) for keys, x in _leaves(state.frozen)],
        # Indices and names never meet at one place of a path, but may at one place of two.
        key=lambda leaf: [(isinstance(key, str), key) for key in leaf[0]],
    )
    depth = _auto_depth([keys for keys, *_ in found]) if isinstance(max_depth, str) else max_depth
    for keys, array, trained in found:
        groups.setdefault(keys if depth < 0 else keys[:depth], []).append((keys, array, trained))
    rows = []
    for path, leaves in groups.items():
        alone = leaves[0][0] == path
        arrays = [array for _, array, _ in leaves]
        lies = placement(arrays, devices)
        told = dict.fromkeys(notes[name] for keys, *_ in leaves if (name := leaf_name(keys)) in notes)
        rows.append(
            Row(
                path=leaf_name(path),
                type=types[path[:-1] if alone else path],
                shape=arrays[0].shape if alone else None,
                params=sum(x.size for x in arrays),
                trained=sum(x.size for _, x, trained in leaves if trained),
                sharding=", ".join([*told, lies.partition]),
                bytes=lies.bytes,
                bytes_per_device=lies.bytes_per_device,
            )
        )
    return rows


def totals(state: "TrainState") -> str:
    """Return the summary's last line."""
    params, trained = (
        sum(x.size for x in jax.tree.leaves(tree)) for tree in ((state.params, state.frozen), state.params)
    )
    whole, optimizer = (bytes_of(jax.tree.leaves(tree)) for tree in ((state.params, state.frozen), state.opt_state))
    held = jax.tree.leaves(_held(state))
    parts = [f"{params:,} params ({trained:,} trained)", size(whole), f"optimizer {size(optimizer)}"]
    return join([*parts, f"{size(bytes_per_device(held))} per device"], between=", ") + _replicated(held)


def _replicated(held: list[Any]) -> str:
    """Return a line on what each device holds in full, if the rest is sharded: it does not shrink on more devices."""
    whole = [x for x in held if x.sharding.is_fully_replicated]
    if not whole or len(whole) == len(held):
        return ""
    return f"\n  {size(bytes_of(whole))} of it is replicated (not sharded)"


def _held(state: "TrainState") -> tuple[Any, ...]:
    return state.params, state.frozen, state.model_state, state.opt_state


def _leaves(tree: Any) -> list[tuple[tuple[Any, ...], jax.Array]]:
    """Return (keys, array) of each leaf; a key is an attribute's name or an index."""
    return [(tuple(keys), x) for keys, x in nnx.to_flat_state(tree)]


def _auto_depth(paths: list[tuple[Any, ...]]) -> int:
    """Return -1 for few arrays, else the least depth with more than one row."""
    return -1 if len(paths) <= MOST_ROWS else next(d for d in count(1) if len({path[:d] for path in paths}) > 1)


def _table(rows: list[Row]) -> str:
    from rich.console import Console
    from rich.table import Table

    columns = {name: [name] for name in ("path", "type", "shape", "params", "sharding", "per device")}
    for row in rows:
        mark = "" if row.trained == row.params else " (frozen)" if not row.trained else " (partly frozen)"
        shape = "" if row.shape is None else "x".join(map(str, row.shape)) or "()"
        cells = (row.path, row.type, shape, f"{row.params:,}{mark}", row.sharding, size(row.bytes_per_device))
        for column, cell in zip(columns.values(), cells, strict=True):
            column.append(cell)
    width = line_width() or 200  # a file has no width
    for name in ("type", "per device", "shape"):  # what tells the least first: a path in two lines is hard to read
        if not any(columns[name][1:]) or sum(max(map(len, x)) + 3 for x in columns.values()) + 1 > width:
            del columns[name]
    table = Table()
    for name in columns:
        table.add_column(name, justify="right" if name in ("params", "per device") else "left", overflow="fold")
    for cells in list(zip(*columns.values(), strict=True))[1:]:
        # A path may hold [0], which is markup to Rich.
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))
    # Drawn here and printed as text, since Rich ends the process when stdout is closed, shows HTML in a notebook, and
    # colors in a file where FORCE_COLOR is set.
    console = Console(file=io.StringIO(), width=width, force_terminal=False, force_jupyter=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")
