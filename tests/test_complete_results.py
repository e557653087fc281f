"""Complete results in one comparison each: all arrays of a checkpoint, all shardings, and what a fit leaves behind."""

import gc
import os
import signal
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from kit.batches import random
from kit.checkpoints import data_of, state_of
from kit.inside import listeners, lowered
from kit.journal import Rows, at_batch, hooks
from kit.modules import Linear, Wide
from kit.threads import as_processes
from kit.trainers import fit, splitting

import jaxlit as jl
from jaxlit.distributed import team as team_file

BATCHES = random(6)


def arrays_of(checkpoint: str) -> dict[str, np.ndarray]:
    """Return every array of a checkpoint by its path in the state, read by the safetensors package alone."""
    arrays = {name: np.full(shape, 77, dtype) for name, shape, dtype in state_of(checkpoint)["arrays"]}
    for key, part in safetensors.numpy.load_file(data_of(checkpoint) / "0.safetensors").items():
        name, _, start = key.partition("@")
        begins = [int(x) for x in start.split(",")] if start else [0] * part.ndim
        arrays[name][tuple(slice(i, i + n) for i, n in zip(begins, part.shape, strict=True))] = part
    return arrays


def state_by_hand(num_batches: int) -> dict[str, Any]:
    """Return what training `Linear` in windows of two batches leaves in the state, in numpy."""
    params = {"kernel": np.linspace(-1.0, 1.0, 3)[:, None], "bias": np.zeros(1)}
    trace = {name: np.zeros_like(x) for name, x in params.items()}
    average, count, window, sums = dict(params), 0, [], np.zeros(2)
    steps = 0
    for batch in BATCHES[:num_batches]:
        x, y = (batch[key].astype(np.float64) for key in ("x", "y"))
        error = x @ params["kernel"] + params["bias"] - y
        window.append(({"kernel": 2 * x.T @ error, "bias": 2 * error.sum(0)}, (error**2).sum(), len(x)))
        if len(window) < 2:
            continue
        rows = sum(n for *_, n in window)
        for name in params:
            trace[name] = 0.9 * trace[name] + sum(grads[name] for grads, *_ in window) / rows
            params[name] = params[name] - 0.1 * trace[name]
        sums += [sum(loss for _, loss, _ in window), rows]
        # The average begins at step 1, and takes each step.
        average = {k: (0.5 * average[k] + 0.5 * params[k]) if count else params[k] for k in params}
        steps, count, window = steps + 1, max(steps, 0), []
    (grads, loss, rows) = window[0]
    # The loss is logged twice: for the progress bar, and for the loggers.
    return {
        "counters": [steps, 0, num_batches, -1],
        "window.metrics": [[loss, loss], [rows, rows]],
        "sums": [[sums[0]] * 2, [sums[1]] * 2, [0, 0], [0, 0]],
        "extras['EMA'].count": count,
        **{f"module.{name}": x for name, x in params.items()},
        **{f"opt_state[0].trace.{name}": x for name, x in trace.items()},
        **{f"window.grads.{name}": x for name, x in grads.items()},
        **{f"extras['EMA'].average.{name}": x for name, x in average.items()},
    }


@pytest.mark.parametrize("strategy", ["single", "fsdp", "zero2"])
def test_every_array_of_a_checkpoint_is_that_of_a_hand_loop(strategy: str) -> None:
    save = at_batch(4, lambda trainer, module: trainer.save_checkpoint("run/middle"))  # of the third window
    ema = jl.callbacks.EMA(0.5, update_starting_at_step=1)
    given = {"strategy": splitting(strategy), "accumulate_grad_batches": 2, "default_root_dir": "run"}
    fit(Linear(), BATCHES, None, save, ema, **given)
    arrays, expected = arrays_of("run/middle"), state_by_hand(5)
    assert arrays.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(arrays[name], x, rtol=1e-5, atol=1e-6, err_msg=name)


# By strategy: what of a (64, 64) matrix each of the eight devices holds as a parameter, its moment and its gradient.
SPLIT, WHOLE = (8, 64), (64, 64)
PARTS = {"ddp": (WHOLE, WHOLE, WHOLE), "fsdp": (SPLIT, SPLIT, SPLIT), "zero1": (WHOLE, SPLIT, WHOLE)}
PARTS |= {"zero2": (WHOLE, SPLIT, SPLIT)}


@pytest.mark.parametrize("strategy", PARTS)
@pytest.mark.full
def test_every_array_of_a_step_has_the_sharding_of_its_stage(strategy: str) -> None:
    trainer = fit(Wide(rngs=nnx.Rngs(0)), BATCHES[:1], strategy=splitting(strategy))
    state = trainer.state
    of = lambda tree: {x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(tree) if x.shape == (64, 64)}  # noqa: E731
    assert (of(state.params), of(state.opt_state)) == ({PARTS[strategy][0]}, {PARTS[strategy][1]})
    text = lowered(trainer, "train_step", BATCHES[0]).as_text()
    constrained = [line for line in text.splitlines() if "sharding_constraint" in line and "tensor<64x64xf32>" in line]
    assert bool(constrained) == (PARTS[strategy][2] == SPLIT), text


def test_a_reset_optimizer_begins_with_the_first_loss_scale() -> None:
    given = {"precision": "16-mixed", "default_root_dir": "run"}
    first = fit(Linear(), [{k: 20 * x for k, x in batch.items()} for batch in BATCHES], **given)
    path = first.checkpoint_callback.last_model_path
    assert first.state.loss_scale[0] < 2**15, "the gradients did not overflow"
    seen: list[Any] = []
    keep = hooks(on_train_start=lambda trainer, module: seen.append(jax.device_get(trainer.state)))
    fit(Linear(), BATCHES, None, keep, ckpt_path=path, reset_optimizer=True, max_epochs=2, **given)
    np.testing.assert_array_equal(seen[0].loss_scale, [2**15, 0])
    for mine, theirs in zip(jax.tree.leaves(seen[0].params), jax.tree.leaves(first.state.params), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert all(not np.any(x) for x in jax.tree.leaves(seen[0].opt_state))


def surroundings() -> dict[str, Any]:
    """Return what a fit could leave changed in its process."""
    gc.collect()
    files = Counter(os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists())
    return {
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "files": {name: count for name, count in files.items() if name.startswith(os.getcwd())},
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "listeners": len(listeners()),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "warnings": len(warnings.filters),
    }


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="lists open files by /proc")
def test_a_fit_leaves_no_thread_file_handler_or_listener() -> None:
    def run(epochs: int) -> None:
        loggers = [jl.callbacks.CSVLogger(), jl.callbacks.CSVLogger("second.csv")]
        given = {"logger": loggers, "prefetch": 2, "data_timeout": 60, "hang_timeout": 60, "resume": "auto"}
        rows = [{name: x[0] for name, x in batch.items()} for batch in random(64, rows=1)]
        train = grain.MapDataset.source(rows).batch(4)  # which jaxlit reads ahead in threads, left in mid-epoch
        fit(Linear(), train, BATCHES[:2], default_root_dir="run", max_steps=4 * epochs, **given)

    run(1)  # what libraries start once a process stays
    before = surroundings()
    run(2)
    assert surroundings() == before


def test_keys_that_processes_agreed_on_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(index: int) -> int:
        for k in range(10):
            team_file.team().agree(f"topic {k}", index)
        return len(team_file._client().values)

    assert max(as_processes(monkeypatch, work, 3)) <= 2 * (3 + 2)  # of the last two topics


def test_traced_values_follow_the_rows_of_a_reloaded_loader() -> None:
    loaders = iter([random(80), random(8)])
    data = type("Reloads", (jl.DataModule,), {"train_dataloader": lambda self: next(loaders)})()
    norm, rows = jl.callbacks.GradientNorm(), Rows()
    fit(Linear(), data, None, norm, rows, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    second = [row for step, row in rows.rows if step >= 80]
    assert len(second) == 8 and all("grad_norm" in row for row in second)
