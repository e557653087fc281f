"""A training in a checkpoint: its state is taken from a run, and restored with the arrays of the engine."""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit.checkpoints.files import POSITION, Checkpoint, Resume, fitting
from jaxlit.checkpoints.module_state import match_base, report
from jaxlit.core.log import table_of
from jaxlit.core.module import hparams_of
from jaxlit.data.source import Source
from jaxlit.distributed.team import fetch
from jaxlit.engine.engine import Engine
from jaxlit.errors import CheckpointError, DataError, raised_everywhere
from jaxlit.loop.hooks import Hooks
from jaxlit.loop.run import Run
from jaxlit.loop.settings import Settings
from jaxlit.texts import NotJSONError, to_json
from jaxlit.values import encode

# Metrics of the epoch and of the window; their columns depend on the step and the Trainer's arguments.
_METRICS = ("sums", "window.metrics")
_EXACT = {"callbacks", "datamodule", "loaders", "latest"}  # of which all comes back as it was
_OF_CALLBACK = re.compile(r"""extras\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]""")
_logger = logging.getLogger("jaxlit")


def take(
    run: Run, arrays: Mapping[int, str], *, ask: bool = True, weights_only: bool = False, trained_only: bool = False
) -> dict[str, Any]:
    """Return the state of a training as JSON values; waits for the device.

    `arrays` is what `stored` returns, `ask` whether `on_save_checkpoint` is called; see `jaxlit.trainer.saver`.
    """
    engine, data, ask_for, at = run.engine, run.data.loaders.datamodule, run.hooks.ask, run.position
    entries = _entries(run)
    hparams, added = hparams_of(run.module).saved()
    states = {key: ask_for(c, "state_dict", c.state_dict) for key, c in run.hooks.keyed().items()}
    state = {
        "global_step": at.global_step,
        "epoch": at.epoch,
        "position": {name: getattr(at, name) for name in POSITION},
        "loaders": _loaders(run),
        "arrays": [(name, *entries[i][1:]) for i, name in arrays.items()],
        "optimizer": engine.state.spec.optimizer_kind,
        "metrics": [asdict(metric) for metric in engine.training_table.metrics],
        # The newest step's table, bit by bit: callbacks that read metrics after a resume see what they would have seen.
        "latest": None if run.results.latest is None else fetch(run.results.latest),
        "results": run.results.state_dict(),
        "row": run.results.steps_at_row,
        # What hooks have logged since the last row of the step or the epoch; those before a first batch run again.
        "log": run.hooks.log.state_dict() if at.batch_idx or at.over else {"window": [], "epoch": []},
        # Without that of a callback that fails to return it and is disabled.
        "callbacks": {key: x for key, x in states.items() if x is not None},
        "datamodule": {} if data is None else ask_for(data, "state_dict", data.state_dict),
        "module": {"class": type(run.module).__name__, "hparams": hparams},
        "accumulate": run.accumulation.batches,
        "processes": run.times.team.size,
    }
    # Of hyperparameters those that the constructor does not take.
    optional: dict[str, Any] = {"added_hparams": added, "not_finite": run.unchecked.bad, "auto_size": run.auto_size}
    optional["hyperparams"] = engine.state.hyperparams_at_start
    optional["numbers"] = {name: encode(x) for name, x in engine.state.spec.numbers.items()}
    later = run.accumulation.argument_at_end or run.settings.accumulate_grad_batches
    if not run.accumulation.argument == later == run.accumulation.batches:
        optional["accumulate_set"] = [run.accumulation.argument, later]  # the Trainer's, and that of hooks
    optional["stopped"] = run.control.stop_reason or "trainer.should_stop" if run.control.is_final else ""
    optional["left_out"] = [(*entries[i], x) for i, x in engine.left_out().items()] if trained_only else []
    optional["evaluated"] = {} if weights_only else {entries[i][0]: entries[k][0] for i, k in _evaluated(run).items()}
    state |= {key: x for key, x in optional.items() if x}
    ours = state.keys() - _EXACT
    if ask:  # last, so that a hook sees, and may add to, all there is
        run.hooks("on_save_checkpoint", state)
    return _json(state, ours)


def stored(run: Run, weights_only: bool, trained_only: bool) -> dict[int, str]:
    """Return by index the name of each array in a checkpoint; of weights only, an average has its parameter's name."""
    left_out = run.engine.left_out() if trained_only else {}
    names = {i: name for i, (name, _, _) in enumerate(_entries(run)) if i not in left_out}
    if not weights_only:
        return names
    evaluated = _evaluated(run)
    return {evaluated.get(i, i): name for i, name in names.items() if name.startswith("module.")}


def _entries(run: Run) -> list[tuple[str, tuple[int, ...], str]]:
    """Return the (name, shape, dtype) of each array of the state, and then of those of `State.averaged`."""
    spec = run.engine.state.spec
    computed = [spec.entries[i] for i in jax.tree.leaves(spec.index.params) if spec.averages]
    return [*spec.entries, *((f"evaluated.{name}", *kind) for name, *kind in computed)]


def _evaluated(run: Run) -> dict[int, int]:
    """Return by the index of a parameter that of the array which evaluations see in its place, such as an average."""
    spec = run.engine.state.spec
    params = jax.tree.leaves(spec.index.params)
    computed = [len(spec.arrays) + k for k in range(len(params))]  # see `_entries`
    pairs = zip(params, computed if spec.averages else jax.tree.leaves(spec.eval_params), strict=True)
    # After a fit a checkpoint has the parameters as they are: `WeightAveraging` has left the average in them, and the
    # caller may have written others since.
    return {} if run.times.ended is not None and not run.times.has_failed else {i: k for i, k in pairs if i != k}


def _loaders(run: Run) -> dict[str, Any]:
    """Return the states of this process's loaders."""
    if not run.data.train:
        return {"training": None}
    (source, _), position = run.data.train[0], run.position
    # If nothing is left of this epoch, the loader begins the next.
    at = source.between_epochs(position.data) if position.over else position.data
    return {"training": {"idx": 0, "states": [source.state_dict(position.epoch + position.over, at)]}}


def load_engine(engine: Engine, resume: Resume) -> None:
    """Give an engine the state of a checkpoint, whatever strategy and number of devices wrote it."""
    checkpoint, reset_optimizer, evaluates = resume.checkpoint, resume.reset_optimizer, engine.evaluates_only
    with fitting(checkpoint.path):
        saved = checkpoint.weights if evaluates else checkpoint.specs
        wanted = engine.state.spec.entries
        # Bookkeeping of the same name and shape is read like all other arrays; of another shape it is converted.
        same = {name for name, _, _ in {*saved} & {*wanted}}
        saved_keys, wanted_keys = (
            {key for name, _, _ in specs if (key := _callback_key(name))} for specs in (saved, wanted)
        )

        def skip(name: str) -> bool:
            """Return whether an array is not read into its shards: it is read to the host, or stays as at step 0."""
            if evaluates:
                return not name.startswith("module.")
            fresh = reset_optimizer and name.startswith(("opt_state", "loss_scale"))
            fresh |= name.startswith("window.") and not checkpoint.state["position"]["filled"]
            fresh |= name.startswith("evaluated.") or (_is_bookkeeping(name) and name not in same)
            return fresh or _callback_key(name) in (saved_keys ^ wanted_keys)

        arrays = engine.state.leaves, engine.left_out() if checkpoint.state.get("left_out") else {}
        pairs, rows = match_base(checkpoint, saved, wanted, *arrays, strict=resume.strict, skip=skip, cast=evaluates)
        kind = checkpoint.state.get("optimizer")
        # The arrays of another optimizer may fit by name and shape, but mean something else.
        if not (evaluates or reset_optimizer) and kind != engine.state.spec.optimizer_kind:
            rows.insert(0, ("the optimizer", kind or "nothing", engine.state.spec.optimizer_kind or "nothing"))
            pairs = {i: k for i, k in pairs.items() if not wanted[k][0].startswith("opt_state")}
            reset_optimizer = True
        report(checkpoint, rows, type(engine.module).__name__, resume.strict, resumes=not evaluates)
        # With strict=False a callback's arrays may fit in part: those start again too, as a mixture would mean nothing.
        again = {*(wanted_keys - saved_keys), *(key for name, _, _ in rows if (key := _callback_key(name)))}
        pairs = {i: k for i, k in pairs.items() if _callback_key(wanted[k][0]) not in again}
        extra = {} if evaluates else _bookkeeping(engine, checkpoint, same)
        # Free the engine's arrays first: both states together may not fit into the devices' memory.
        released = engine.state.release(pairs.values())
        # Each array is read straight into its shards; None reads metrics, and windows of other replicas, to the host.
        target: dict[int, Any] = {i: released[k] for i, k in pairs.items()} | dict.fromkeys(extra)
        read = checkpoint.arrays(target)
        arrays = {k: read[i] for i, k in pairs.items()}
        # Of a run with 64 bits, or without them, they have another dtype.
        arrays |= {k: fit(read[i]).astype(engine.state.spec.arrays[k].dtype) for i, (k, fit) in extra.items()}
        engine.restore(arrays, None if evaluates else table_of(checkpoint.state["metrics"]))
        if reset_optimizer:
            engine.init_optimizer()
        if not evaluates:
            engine.init_extras(key for key in engine.extras if repr(key) in again)
            for keys, text in (
                (saved_keys - wanted_keys, "keeps the arrays of %s, which is not among the callbacks now."),
                (wanted_keys - saved_keys, "has no arrays of %s: they start again, from the restored parameters."),
            ):
                if keys:
                    _logger.warning(f"%s {text}", checkpoint.path, ", ".join(sorted(keys)))


def load_callbacks(hooks: Hooks, state: Mapping[str, Any]) -> list[str]:
    """Give the callbacks and the DataModule their states; return the keys of states that no callback took."""
    saved, known = dict(state["callbacks"]), hooks.keyed()
    owners: list[Any] = [(callback, saved[key]) for key, callback in known.items() if key in saved]
    owners += [] if hooks.datamodule is None else [(hooks.datamodule, state["datamodule"])]
    for owner, state_of_owner in owners:
        try:
            hooks.ask(owner, "load_state_dict", partial(owner.load_state_dict, state_of_owner))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{type(owner).__name__}.load_state_dict cannot load its state from the checkpoint: {error!r}. The "
                "state is of another version, or damaged. Leave the callback out, or resume from another checkpoint."
            ) from error
    # A callback with an empty state loses nothing.
    return [key for key, x in saved.items() if key not in known and not (isinstance(x, dict) and not x)]


def load_loader(source: Source, state: Mapping[str, Any]) -> None:
    """Make the training loader continue where the checkpoint was taken."""
    if (saved := state["loaders"]["training"]) is None:
        return
    states, before, processes = saved["states"], state["processes"], jax.process_count()
    if before == processes:  # each process continues with its share, the only one that was read
        source.load_state_dict(states[0])
        return
    if states[0]["at"] is not None and not (source.is_shared and all(x["at"] == states[0]["at"] for x in states)):
        raise raised_everywhere(
            DataError(
                f"{source.argument}: the checkpoint is from the middle of an epoch, where this kind of loader "
                f"continues only with as many processes as before: {before}, not {processes}. Resume with as "
                "many, use a jl.ArrayLoader or a grain MapDataset, or resume from the end of an epoch."
            )
        )
    # The fingerprint of another kind of loader is of each process's share.
    source.load_state_dict({**states[0], "fingerprint": None if source.is_grain else states[0]["fingerprint"]})


def load_run(run: Run, state: Mapping[str, Any]) -> None:
    """Restore what hooks had logged, and the metrics."""
    table = table_of(state["metrics"])
    run.checkpoints.resumed = True
    reason, resume = state.get("stopped"), run.checkpoints.resume
    if reason and resume and not resume.named:
        states = {key: x.values() for key, x in state["callbacks"].items() if isinstance(x, dict)}
        judges = {key for key, x in states.items() for y in x if type(y) is str and y == reason}
        if not judges or run.hooks.keyed().keys() & judges:  # else the callback that gave the verdict is not here
            run.control.take([f"finish {reason}"])
    run.auto_size = state.get("auto_size") or 0
    run.unchecked.warned_of = run.engine.bad_step()  # that step has been warned of
    # The window of the epoch continues, and the number that hooks had set holds, unless the Trainer has another.
    keeps = keeps_accumulation(run.accumulation.argument, run.settings, state)
    accumulate = run.settings.accumulate_grad_batches
    run.accumulation.batches = state["accumulate"] if keeps or state["position"]["filled"] else accumulate
    if keeps and (numbers := state.get("accumulate_set")):
        run.hooks.trainer.accumulate_grad_batches = numbers[1]
    # First the names of steps' values: `load_state_dict` replaces those that epochs also have.
    if state["latest"] is not None:
        run.results.latest = jnp.asarray(state["latest"].view())  # nothing else than an array has it
        run.results.show_steps(replace(run.engine.step_table, metrics=table))
    run.results.load_state_dict(state["results"])
    run.results.steps_at_row = state.get("row", -1)
    run.hooks.log.load_state_dict(state["log"])


def warn_of_hyperparams(run: Run, state: Mapping[str, Any]) -> None:
    """Warn of hyperparameters that `configure_optimizers` has set since training began, and that are not used."""
    began = run.engine.state.hyperparams_at_start
    now = run.engine.state.hyperparams()
    saved = state.get("hyperparams") or {}
    unused = {name: began[name] for name, x in saved.items() if name in began and began[name] not in (x, now[name])}
    began |= {name: saved[name] for name in unused}
    if unused:
        _logger.warning(
            "configure_optimizers has %s, and the checkpoint's optimizer, which is used, %s. To train with the new "
            "values set trainer.hyperparams[name] in on_fit_start, or pass fit(reset_optimizer=True).",
            ", ".join(f"{name}={x:.6g}" for name, x in unused.items()),
            ", ".join(f"{name}={now[name]:.6g}" for name in unused),
        )


def keeps_accumulation(argument: int, settings: Settings, state: Mapping[str, Any]) -> bool:
    """Return whether training keeps the accumulate_grad_batches of hooks; after 1 a `setup` sets it again."""
    before, _ = state.get("accumulate_set") or (state["accumulate"], None)
    return 1 < before == argument == settings.accumulate_grad_batches


def check_loader(run: Run, at: Any) -> None:
    """Refuse before a step the state of the loader after its batch, if a checkpoint would refuse it."""
    if any(callback.role == "checkpoint" for callback in run.hooks.callbacks):
        _json({"loaders": run.data.training[0].state_dict(run.position.epoch, at)})


def _json(state: dict[str, Any], ours: Collection[str] = ()) -> dict[str, Any]:
    try:
        # What users keep comes back as it was; all else is of JSON's types, with tuples for lists.
        return {key: to_json(x, exact=key not in ours, path=f"[{key!r}]") for key, x in state.items()}
    except NotJSONError as error:
        place = error.path.replace("['callbacks']", "the state_dict of ").replace("['loaders']", "the loader's state ")
        raise CheckpointError(
            f"A checkpoint keeps values, and {place or 'it'} {error.problem}. Return numbers, strings, arrays, lists, "
            "sets and dicts from state_dict. Arrays of the training state are kept by Callback.init_arrays."
        ) from None


def _callback_key(name: str) -> str | None:
    """Return the key, as `repr` writes it, of the callback that an array belongs to; None for all other arrays."""
    found = _OF_CALLBACK.match(name)
    return None if found is None else found[1]


def _bookkeeping(engine: Engine, checkpoint: Checkpoint, same: set[str]) -> dict[int, Any]:
    """Return by index in the checkpoint the engine's place of each bookkeeping array, and how it is converted."""
    state, conversions = checkpoint.state, dict[int, Any]()
    replicas, table = engine.strategy.replica.stack_size, table_of(state["metrics"])

    def refit(ndim: int, x: np.ndarray) -> np.ndarray:
        """Return a sum over the rows of a window, of which the first replica gets that of all."""
        x = x.sum(0) if x.ndim > ndim else x
        return x if replicas is None else np.stack([x, *[np.zeros_like(x)] * (replicas - 1)])

    places = {name: k for k, (name, _, _) in enumerate(engine.state.spec.entries)}
    for i, (name, _, _) in enumerate(checkpoint.specs):
        of_window = name.startswith("window")
        # An empty window stays as it is.
        if not _is_bookkeeping(name) or name in same or (of_window and not state["position"]["filled"]):
            continue
        if name in _METRICS:
            conversions[i] = places[name], partial(table.refit, replicas=replicas if of_window else None)
        elif name in places:
            ndim = len(engine.state.spec.arrays[places[name]].shape) - (replicas is not None)
            conversions[i] = places[name], partial(refit, ndim)
    return conversions


def _is_bookkeeping(name: str) -> bool:
    return name in ("sums", "loss_scale") or name.startswith(("window.", "window_start."))
