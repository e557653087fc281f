"""What tests know of jaxlit's private parts: all of it stands here."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax._src import monitoring

import jaxlit as jl
from jaxlit.checkpoints import files  # of a checkpoint
from jaxlit.core.log import Metric as Metric
from jaxlit.core.parts import optimizer_of, rates_of
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica as Replica
from jaxlit.core.train_state import Precision
from jaxlit.data.prefetcher import Prefetcher
from jaxlit.data.watchdog import Watchdog
from jaxlit.distributed.team import _client
from jaxlit.engine.creation import init_state
from jaxlit.engine.engine import Engine
from jaxlit.loop import hooks as loop_hooks
from jaxlit.pipeline.executor import BatchRun, Places
from jaxlit.strategies import registry
from jaxlit.texts import is_key as is_key
from jaxlit.texts import leaf_name as leaf_name


def engine_of(trainer: jl.Trainer) -> Engine:
    """Return the engine of a Trainer's newest fit."""
    engine = trainer._session.engine
    assert engine is not None
    return engine


def leaves_of(trainer: jl.Trainer) -> list[Any]:
    """Return the flat training state."""
    return engine_of(trainer).state.leaves


def position_of(trainer: jl.Trainer) -> Any:
    """Return where a Trainer's training stands."""
    return trainer._session.position


def lowered(trainer: jl.Trainer, name: str, batch: Any) -> Any:
    """Return a program of the newest fit, lowered for a host batch; "traced" is the step that callbacks look into."""
    engine = engine_of(trainer)
    result = [fn for key, fn in engine._programs.items() if (type(key) is tuple if name == "traced" else key == name)]
    assert len(result) == 1, list(engine._programs)
    program: Any = result[0].program
    return program.trace(engine.state.leaves, engine.strategy.shard_batch(batch)).lower()


def laid_out(strategy: jl.Strategy, module: Any, tx: Any = None, *, accumulate: bool = False) -> tuple[Any, Any]:
    """Return a module's abstract training state of step 0, with a window or not, and its shardings; compile nothing."""
    optimizer = optimizer_of(module) if tx is None else jl.Optimizer(tx)
    graphdef, params, frozen, rest = nnx.split(module, optimizer.wrt, nnx.Param, ...)
    parts = [nnx.as_pure(part) for part in (params, frozen, rest)]
    strategy.setup()
    init = lambda *parts: init_state(optimizer.tx, None if accumulate else 0, Precision(), *parts)  # noqa: E731
    state = jax.eval_shape(init, *parts)
    return state, strategy.state_sharding(state, PureModule(graphdef, optimizer.wrt, module), None)


def rates_along(optimizer: jl.Optimizer, params: Any, steps: int) -> dict[str, list[float]]:
    """Return the learning rates that are read off an optimizer, at each of some steps on parameters that stay."""
    rates, state = rates_of(optimizer, params), optimizer.tx.init(params)
    result: dict[str, list[float]] = {name: [] for name in rates.names}
    for k in range(steps):
        values = rates.values(state, jnp.float32(1), jnp.int32(k), jnp.int32(0))
        for name, rate in zip(rates.names, values, strict=True):
            result[name].append(float(rate))
        grads = jax.tree.map(lambda x, k=k: jnp.cos(x + k), params)
        _, state = optax.with_extra_args_support(optimizer.tx).update(grads, state, params, value=1.0, grad=grads)
    return result


def key_value_store() -> Any:
    """Return what jax's processes tell each other things by."""
    return _client()


@contextmanager
def hashes() -> Iterator[list[tuple[str, int]]]:
    """Yield a list that gets the path and the size of each file that is read for its hash."""
    result: list[tuple[str, int]] = []
    hash_of = files._digest

    def noting(path: Any) -> str:
        result.append((str(path), path.stat().st_size))
        return hash_of(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_digest", noting)
        yield result


registered_strategies = registry._registry


def own_strategies() -> list[str]:
    """Return the names of jaxlit's own strategies, without those that tests register."""
    classes = {name: getattr(make, "func", make) for name, make in registered_strategies.items()}
    return [name for name, cls in classes.items() if cls.__module__.startswith("jaxlit.")]


class Clock:
    """Time that passes only where a test lets it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def stop_clocks(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stop every clock that a run looks at, and return the one in their place."""
    clock = Clock()
    monkeypatch.setattr(loop_hooks, "perf_counter", clock)
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def listeners() -> list[Any]:
    """Return who listens to what jax says of its compiling."""
    return list(monitoring._event_duration_secs_listeners)


def prefetcher_of(prefetch: int) -> Prefetcher:
    """Return a prefetcher that places nothing."""
    return Prefetcher(lambda batch: batch, splits=lambda batch: True, prefetch=prefetch, watchdog=Watchdog(None))


def evaluated(trainer: jl.Trainer) -> Any:
    """Return the flat state that the evaluation which continues takes its arrays from."""
    return trainer._session.active.state  # type: ignore[union-attr]


def pipelined(trainer: jl.Trainer, module: Any, batches: Any, shape: tuple[int, ...]) -> tuple[list[int], int]:
    """Train in a pipeline; returns the most that each rank held at once, and how many arrays of a shape were sent."""
    live, peaks, sent, send = Counter[int](), Counter[int](), 0, Places.send

    def counting(change: int, method: Any, meanwhile: int = 0) -> Any:
        def call(self: Any, task: Any) -> None:
            rank = self.rank_of(task.stage)
            live[rank] += change
            peaks[rank] = max(peaks[rank], live[rank] + meanwhile)
            method(self, task)

        return call

    def counted(self: Places, arrays: Any, ranks: Any) -> Any:
        nonlocal sent
        pairs = zip(arrays, ranks, strict=True)
        sent += sum(x.shape == shape and self.rank_of(x) != rank for x, rank in pairs)
        return send(self, arrays, ranks)

    with pytest.MonkeyPatch.context() as patch:
        for name, *change in (("forward", 1), ("backward", -1), ("backward_weight", -1), ("fused", 0, 1)):
            patch.setattr(BatchRun, name, counting(change[0], getattr(BatchRun, name), *change[1:]))
        patch.setattr(Places, "send", counted)
        trainer.fit(module, batches)
    return [peaks[rank] for rank in sorted(peaks)], sent
