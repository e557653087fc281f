"""A training step for a user's own loop: a strategy without a Trainer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxlit import checks as check
from jaxlit.core.log import Table
from jaxlit.core.module import TrainModule
from jaxlit.core.parts import optimizer_of
from jaxlit.core.replica import num_rows, with_rows
from jaxlit.core.train_state import PRECISIONS, Precision, StepOptions, TrainState
from jaxlit.data.batch_validator import BatchValidator, joined
from jaxlit.distributed.job import environment, same_job
from jaxlit.engine.compiled_program import Bound, is_exhausted, out_of_memory
from jaxlit.engine.creation import build_lazy, lazy
from jaxlit.engine.engine import Engine
from jaxlit.errors import ArgumentTypeError, StateError
from jaxlit.sharding import out_of_meshes
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.registry import StrategyName, resolve_strategy
from jaxlit.texts import shown
from jaxlit.variables import merge


@jax.tree_util.register_dataclass
@dataclass(eq=False, repr=False)
class StepState:
    """The state of a `compile_step`, a pytree of arrays; `params`, `opt_state` and others are those of `TrainState`."""

    leaves: list[jax.Array]
    engine: Engine = field(metadata={"static": True})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.unflatten(), name)

    def unflatten(self) -> TrainState:
        """Return the state as a `TrainState`."""
        return self.engine.state.spec.layout.unflatten(self.leaves)


class StepLogs(Mapping[str, jax.Array]):
    """The `loss` and the logged metrics of a step: () arrays, made when they are asked for.

    Args:
        columns: The column of each, by its name.
        logs: The step's table, (2, num_metrics).
    """

    def __init__(self, table: Table, columns: Mapping[str, int], logs: jax.Array) -> None:
        self._table, self._columns, self._logs = table, columns, logs

    def __getitem__(self, name: str) -> jax.Array:
        return self._table.value(self._logs, self._columns[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class CompiledStep:
    """A compiled training step: `step(state, batch) -> state, logs`. The old state is overwritten.

    Args:
        engine: The engine that compiled it.

    Attributes:
        strategy: The strategy that it runs under.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._table, self.strategy = engine, engine.pure.table("training"), engine.strategy
        self._columns = {metric.name: i for i, metric in enumerate(self._table.metrics)}
        self._processes = jax.process_count()
        self._validator = BatchValidator("step(state, batch)")
        # Unbounded, several CPU devices would end the process.
        self._wait = Bound(32 if engine.strategy.mesh.size == 1 else 4)

    @out_of_meshes
    def __call__(self, state: StepState, batch: Any) -> tuple[StepState, StepLogs]:
        """Take one optimizer step with a host batch of global rows, or in several processes with this one's.

        Raises:
            DataError: No step could take the batch.
            StateError: An earlier step has overwritten it.
            OutOfMemoryError: The devices have too little memory.
        """
        if state.leaves[0].is_deleted():
            raise StateError(
                "step(state, batch) got a state that an earlier step has overwritten. Continue with the one that it "
                "returned, or keep a copy: jax.tree.map(jnp.copy, state)."
            )
        _, batch = self._validator(batch)  # no hook could read what stays on the host
        engine, strategy, count = self._engine, self.strategy, self._processes
        if count > 1 and not strategy.splits_by_process(with_rows(batch, count * (rows := num_rows(batch)))):
            batch = joined(batch, [rows] * count)  # devices of several processes hold each row
        try:
            leaves, logs = engine.run_step(state.leaves, strategy.shard_batch(batch))
            self._wait(logs)
        except jax.errors.JaxRuntimeError as error:
            if is_exhausted(error):
                raise out_of_memory(error, "in step(state, batch)", state=engine.state.spec.tree) from error
            raise
        return StepState(leaves, self._engine), StepLogs(self._table, self._columns, logs)

    @out_of_meshes
    def module(self, state: StepState) -> Any:
        """Return a copy of the module with the state's arrays."""
        spec = self._engine.state.spec
        indices, treedef = jax.tree.flatten(spec.index.variables)
        leaves = [spec.outside_array(i, jnp.copy(state.leaves[i])) for i in indices]
        parts = treedef.unflatten(self._engine.strategy.gather(leaves))
        return merge(self._engine.pure.graphdef, *parts)


@out_of_meshes
def compile_step(
    module: TrainModule | lazy,
    *,
    batch: Any,
    strategy: StrategyName | Strategy = "auto",
    devices: int | str = "auto",
    precision: str = "32-true",
    seed: int = 0,
) -> tuple[StepState, CompiledStep]:
    """Return a state and a step that trains it, for a loop without a Trainer.

    The step is the Trainer's: flat, donated and sharded by the strategy. Leave to optax what only a Trainer can do:
    accumulate with `optax.MultiSteps`, clip with `optax.clip_by_global_norm`, skip bad steps with
    `optax.apply_if_finite`. The module is not changed; `step.module(state)` returns a trained copy.

    Args:
        module: The module, or `jl.lazy(...)`.
        batch: A host batch like those to come, for its shapes and dtypes; under a strategy whose step sees one
            replica's rows, also to compare what replicas compute with what one device does.
        strategy: As for the Trainer.
        devices: How many devices, or "auto" for all.
        precision: As for the Trainer.
        seed: The seed of a lazy module's `rngs`.

    Returns:
        The state, and `step(state, batch) -> state, logs`. `logs` maps "loss" and every logged name to a () array. A
        state that was passed to the step is overwritten by it.

    Raises:
        JaxlitError: An argument, the module or the batch cannot be used.

    Example:
        >>> import jax.numpy as jnp, jaxlit as jl, numpy as np, optax
        >>> from flax import nnx
        >>> class Line(jl.TrainModule):
        ...     def __init__(self):
        ...         self.slope = nnx.Param(jnp.zeros(()))
        ...     def training_step(self, batch):
        ...         return jnp.mean((self.slope * batch["x"] - batch["y"]) ** 2)
        ...     def configure_optimizers(self):
        ...         return optax.sgd(0.1)
        >>> batch = {"x": np.ones(4, np.float32), "y": np.full(4, 2.0, np.float32)}
        >>> state, step = jl.compile_step(Line(), batch=batch, strategy="single")
        >>> state, logs = step(state, batch)
        >>> float(logs["loss"])
        4.0
    """
    count = _checked(module, devices, seed, precision)
    _, rows = BatchValidator("compile_step(batch=...)")(batch)
    chosen = resolve_strategy(strategy, count)
    chosen.setup(count)
    built = build_lazy(module, chosen, seed) if isinstance(module, lazy) else module
    example = rows if jax.process_count() == 1 else with_rows(rows, jax.process_count() * num_rows(rows))
    options = StepOptions(optimizer_of(built), nan_policy="ignore", example=example)
    engine = Engine(built, chosen, options, precision=Precision(precision), take_ownership=isinstance(module, lazy))
    engine.prepare_training(example, chosen.shard_batch(rows) if chosen.per_replica else None)
    # The state is the caller's alone: the first step gives its buffers away.
    leaves, engine.state.leaves = engine.state.leaves, []
    return StepState(leaves, engine), CompiledStep(engine)


def _checked(module: Any, devices: int | str, seed: int, precision: str) -> int | None:
    """Refuse arguments of `compile_step` that are out of their sets; returns the number of devices, None for all."""
    arguments = {"devices": str(devices), "seed": str(seed), "precision": precision}
    same_job("compile_step", lambda: environment() | {f"compile_step({key}=)": x for key, x in arguments.items()})
    check.integer("devices", devices, low=1, also=("auto",), owner="compile_step")
    check.integer("seed", seed, low=0, owner="compile_step")
    check.require(precision in PRECISIONS, "precision", precision, f"takes one of {PRECISIONS}", owner="compile_step")
    if not isinstance(module, (TrainModule, lazy)):
        raise ArgumentTypeError(f"compile_step(module, ...) takes a jl.TrainModule or jl.lazy, got {shown(module)}.")
    return None if isinstance(devices, str) else int(devices)
