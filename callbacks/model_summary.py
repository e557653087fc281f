"""`ModelSummary`, which prints the parameters of a module and how they are sharded."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import jax
from flax import nnx

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.reporting.terminal import bytes_of, bytes_per_device, devices_of, join, line_width, partition, say
from jaxlit.texts import keys_of, leaf_name, size, table

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.core.train_state import TrainState
    from jaxlit.trainer import Trainer


MOST_ROWS = 20  # of parameters; a longer table would fill the terminal before training has begun
_COLUMNS = ("path", "type", "shape", "sharding", "params", "per device")


@dataclass(frozen=True)
class Row:
    """One line of the summary: a parameter, or a group, all parameters below a path."""

    path: str
    type: str  # class of the module that has the parameter, or of the module at the path
    shape: tuple[int, ...] | None  # None for a group
    params: int
    trained: int  # how many of the params the optimizer trains
    sharding: str  # see `partition`
    bytes: int  # of the unsharded arrays
    bytes_per_device: int  # on the device that has the most


class ModelSummary(Callback):
    """Print the parameters, their shardings and their bytes on each device before training.

    A fit with the same summary as the fit before prints none. Nothing is computed and no array is read. The last line
    has the number of parameters and their bytes, the optimizer's bytes, and the bytes of the state on each device.

    Args:
        max_depth: How many components of a path to show: 1 for a line for each part of the module, 0 for the last line
            only, -1 for a line for each parameter. "auto" is -1 for at most 20 parameter arrays, otherwise the least
            depth with more than one line.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=jl.callbacks.ModelSummary(max_depth=1), logger=False)
    """

    role = "model_summary"

    def __init__(self, max_depth: int | Literal["auto"] = "auto") -> None:
        self.max_depth = check.integer("max_depth", max_depth, low=-1, also=("auto",), owner="ModelSummary")
        self._printed = ""

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Print the summary."""
        if not trainer.is_global_zero:
            return
        state, lines = trainer.state, list[str]()
        if self.max_depth:
            rows = summarize(state, module, max_depth=self.max_depth, notes=trainer.strategy.notes)
            lines.append(_table(rows))
            if self.max_depth == "auto" and any(row.shape is None for row in rows):
                total = len(jax.tree.leaves((state.params, state.frozen)))
                lines.append(f"ModelSummary(max_depth=-1) shows all {total} parameter arrays.")
        text = "\n".join([*lines, totals(state), *trainer.strategy.describe().split("\n")[1:]])
        if text != self._printed:
            say(text)
        self._printed = text


def summarize(
    state: "TrainState",
    module: nnx.Module,
    *,
    max_depth: int | str = -1,
    notes: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """Return a row for each parameter, in the order of their paths, or for each path of `max_depth` components.

    The leaves of the state may be shapes, dtypes and shardings. -1 is a row for each parameter, "auto" chooses by their
    number. Notes, by path, are texts before the shardings of parameters.
    """
    types = {path: type(node).__name__ for path, node in nnx.iter_graph(module, graph=True)}
    devices = devices_of(jax.tree.leaves(_parts(state)))
    trees = (state.params, state.frozen)
    pairs = [(tree, keys, x) for tree in trees for keys, x in jax.tree_util.tree_leaves_with_path(tree)]
    parameters = [(tuple(keys_of(keys)), x, tree is state.params) for tree, keys, x in pairs]
    # Indices and names cannot be compared, and two paths may have one of each at one level.
    parameters.sort(key=lambda leaf: [(isinstance(key, str), key) for key in leaf[0]])
    depth: Any = None if max_depth == -1 or (max_depth == "auto" and len(parameters) <= MOST_ROWS) else max_depth
    if depth == "auto":
        depth = next(d for d in count(1) if len({keys[:d] for keys, *_ in parameters}) > 1)
    rows = []
    for path, group in groupby(parameters, lambda leaf: leaf[0][:depth]):
        leaves = [*group]
        is_single, arrays = leaves[0][0] == path, [array for _, array, _ in leaves]
        remarks = dict.fromkeys(notes[name] for keys, *_ in leaves if (name := leaf_name(keys)) in notes)
        rows.append(
            Row(
                path=leaf_name(path),
                type=next(types[path[:i]] for i in range(len(path) - is_single, -1, -1) if path[:i] in types),
                shape=arrays[0].shape if is_single else None,
                params=sum(x.size for x in arrays),
                trained=sum(x.size for _, x, trained in leaves if trained),
                sharding=", ".join([*remarks, partition(arrays, devices)]),
                bytes=bytes_of(arrays),
                bytes_per_device=bytes_per_device(arrays),
            )
        )
    return rows


def totals(state: "TrainState") -> str:
    """Return the summary's last line, and a line on replicated arrays if others are sharded."""
    leaves, arrays = jax.tree.leaves((state.params, state.frozen)), jax.tree.leaves(_parts(state))
    params, trained = sum(x.size for x in leaves), sum(x.size for x in jax.tree.leaves(state.params))
    optimizer = size(bytes_of(jax.tree.leaves(state.opt_state)))
    parts = [f"{params:,} params ({trained:,} trained)", size(bytes_of(leaves)), f"optimizer {optimizer}"]
    text = join([*parts, f"{size(bytes_per_device(arrays))} per device"], between=", ")
    replicated = [x for x in arrays if x.sharding.is_fully_replicated]
    if replicated and len(replicated) < len(arrays):  # these bytes do not shrink on more devices
        text += f"\n  {size(bytes_of(replicated))} of it is replicated (not sharded)"
    return text


def _parts(state: "TrainState") -> tuple[Any, ...]:
    return state.params, state.frozen, state.model_state, state.opt_state


def _table(rows: list[Row]) -> str:
    """Return the rows as a table; a narrow terminal gets fewer columns."""
    cells = []
    for row in rows:
        mark = "" if row.trained == row.params else "(frozen) " if not row.trained else "(partly frozen) "
        shape = "" if row.shape is None else "x".join(map(str, row.shape)) or "()"
        cells.append((row.path, row.type, shape, row.sharding, f"{mark}{row.params:,}", size(row.bytes_per_device)))
    columns = {name: [name, *column] for name, *column in zip(_COLUMNS, *cells, strict=True)}
    if not any(columns["shape"][1:]):
        del columns["shape"]
    width = line_width() or 200  # a file has no width
    for name in ("", "type", "per device", "shape"):
        columns.pop(name, None)
        lines = table([*zip(*columns.values(), strict=True)], texts=len(columns) - 1 - ("per device" in columns))
        if max(map(len, lines)) <= width:
            break
    return "\n".join(lines)
