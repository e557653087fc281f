"""Restores an engine from a checkpoint: arrays that fit are read straight into their shards, the others are named."""

import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jaxlit.checkpoints.files import Checkpoint
from jaxlit.checkpoints.weights import match, report
from jaxlit.core.log import table_of
from jaxlit.engine.engine import Engine
from jaxlit.errors import CheckpointError

_logger = logging.getLogger("jaxlit")

# Metrics of the epoch and of the window; their columns depend on the step and the Trainer's arguments.
_METRICS = ("sums", "window.metrics")
_OF_CALLBACK = re.compile(r"""extras\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]""")


@dataclass(frozen=True)
class Resume:
    """A checkpoint to begin with, and how much of it must fit.

    Attributes:
        checkpoint: A verified checkpoint.
        strict: Refuse a checkpoint whose arrays are not exactly those of the engine. Otherwise those that fit are
            taken, and the others named.
        reset_optimizer: Leave the optimizer as it is at step 0.
    """

    checkpoint: Checkpoint
    strict: bool = True
    reset_optimizer: bool = False


def load_engine(engine: Engine, resume: Resume) -> None:
    """Give an engine the state of a checkpoint, whatever strategy and number of devices wrote it.

    Raises:
        CheckpointError: It does not fit: a table says what differs.
    """
    checkpoint = resume.checkpoint
    reset_optimizer = resume.reset_optimizer
    evaluates = engine.evaluates_only
    filled = checkpoint.state["position"]["filled"]
    saved = checkpoint.weights if evaluates else checkpoint.specs
    wanted = engine.state.spec.entries
    # Bookkeeping of the same name and shape is read like all other arrays; of another shape it is converted.
    same = {name for name, _, _ in {*saved} & {*wanted}}
    saved_keys, wanted_keys = ({key for name, _, _ in specs if (key := _callback(name))} for specs in (saved, wanted))

    def skip(name: str) -> bool:
        """Return whether an array is not read into its shards: it comes by way of the host, or stays as at step 0."""
        if evaluates:
            return not name.startswith("module.")
        fresh = reset_optimizer and name.startswith(("opt_state", "loss_scale"))
        fresh = fresh or (name.startswith("window.") and not filled)
        return fresh or (_is_bookkeeping(name) and name not in same) or _callback(name) in (saved_keys ^ wanted_keys)

    pairs, rows = match(saved, wanted, skip=skip, cast=evaluates)
    kind = checkpoint.state.get("optimizer")
    # The arrays of another optimizer may fit by name and shape, but mean something else.
    if not (evaluates or reset_optimizer) and kind != engine.state.spec.optimizer_kind:
        rows.insert(0, ("the optimizer", kind or "nothing", engine.state.spec.optimizer_kind or "nothing"))
        pairs = {i: k for i, k in pairs.items() if not wanted[k][0].startswith("opt_state")}
    report(checkpoint, rows, type(engine.module).__name__, resume.strict, resumes=not evaluates)
    # With strict=False a callback's arrays may fit in part: those start again too, as a mixture would mean nothing.
    again = {*(wanted_keys - saved_keys), *(key for name, _, _ in rows if (key := _callback(name)))}
    pairs = {i: k for i, k in pairs.items() if _callback(wanted[k][0]) not in again}
    extra = {} if evaluates else _bookkeeping(engine, checkpoint, same)
    # The engine's arrays are freed first: both states together may not fit into the devices' memory.
    # Each array straight into its shards; metrics, and windows of another number of replicas, come by way of the host.
    released = engine.state.release(pairs.values())
    target: dict[int, Any] = {i: released[k] for i, k in pairs.items()} | dict.fromkeys(extra)
    read = checkpoint.arrays(target)
    arrays = {k: read[i] for i, k in pairs.items()} | {k: fit(read[i]) for i, (k, fit) in extra.items()}
    engine.restore(arrays, None if evaluates else table_of(checkpoint.state["metrics"]))
    if not evaluates:
        engine.init_extras(key for key in engine.extras if repr(key) in again)
        for keys, text in (
            (saved_keys - wanted_keys, "keeps the arrays of %s, which is not among the callbacks now."),
            (wanted_keys - saved_keys, "has no arrays of %s: they start again, from the restored parameters."),
        ):
            if keys:
                _logger.warning(f"%s {text}", checkpoint.path, ", ".join(sorted(keys)))
        _check_counters(engine, checkpoint)


def _check_counters(engine: Engine, checkpoint: Checkpoint) -> None:
    position = checkpoint.state["position"]
    stated = [position[k] for k in ("global_step", "epoch", "batch_idx")]
    counted = engine.state.counters()
    # Between epochs the arrays still count in the one before.
    count = 3 if position["batch_idx"] or position["over"] else 1
    if stated[:count] != counted[:count]:
        raise CheckpointError(
            f"{checkpoint.path} is at (step, epoch, batch) {stated[:count]}, but its arrays are at {counted[:count]}."
        )


def _callback(name: str) -> str | None:
    """Return the key, as `repr` writes it, of the callback that an array belongs to; None for all other arrays."""
    return match[1] if (match := _OF_CALLBACK.match(name)) else None


def _bookkeeping(engine: Engine, checkpoint: Checkpoint, same: set[str]) -> dict[int, Any]:
    """Return by index in the checkpoint the engine's place of each bookkeeping array, and how it is converted."""
    state = checkpoint.state
    replicas = engine.strategy.replica.stack_size
    conversions = dict[int, Any]()
    table = table_of(state["metrics"])
    places = {name: k for k, (name, _, _) in enumerate(engine.state.spec.entries)}
    for i, (name, _, _) in enumerate(checkpoint.specs):
        of_window = name.startswith("window")
        # An empty window stays as it is.
        if not _is_bookkeeping(name) or name in same or (of_window and not state["position"]["filled"]):
            continue
        if name in _METRICS:
            conversions[i] = places[name], partial(table.refit, replicas=replicas if of_window else None)
        elif name in places:  # a sum over the rows of a window: the first replica gets the sum of all
            fit = partial(_refit, was=state["window_replicas"], replicas=replicas)
            conversions[i] = places[name], fit
    return conversions


def _refit(x: np.ndarray, was: int | None, replicas: int | None) -> np.ndarray:
    x = x if was is None else x.sum(0)
    return x if replicas is None else np.stack([x, *[np.zeros_like(x)] * (replicas - 1)])


def _is_bookkeeping(name: str) -> bool:
    return name in ("sums", "loss_scale") or name.startswith(("window.", "window_start."))
