"""What a training step costs each device, known before an array exists, and the strategy that "auto" picks by it."""

import contextlib
import copy
import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxlit.core.module import STAGES, TrainModule, attach, trainer_of
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import num_rows
from jaxlit.core.train_state import Precision, StepOptions
from jaxlit.distributed.team import team
from jaxlit.engine.compiled_program import CompiledProgram, is_exhausted, out_of_memory
from jaxlit.engine.creation import lazy, shape_lazy
from jaxlit.engine.training import Training, training_of
from jaxlit.errors import ArgumentError, JaxlitError, ModuleError, OutOfMemoryError
from jaxlit.loop.hooks import Hooks
from jaxlit.loop.run_data import RunData, make_loaders
from jaxlit.loop.settings import Settings
from jaxlit.programs.costs import Collective, Flops, Memory
from jaxlit.reporting.terminal import bytes_of, bytes_per_device
from jaxlit.sharding import HOST
from jaxlit.strategies.auto import Auto
from jaxlit.strategies.base import Strategy
from jaxlit.texts import size
from jaxlit.trainer.defaults import first_example, step_options
from jaxlit.variables import merge, split


@dataclass(frozen=True)
class StepCost:
    """The cost of a training step: bytes on the device that holds the most, operations on all devices together.

    Attributes:
        parameters: Bytes of the parameters, also of frozen ones.
        optimizer: Of the optimizer's state.
        window: Of the gradients that `accumulate_grad_batches` adds up.
        other: Of the rest of the state: batch statistics, random state, callbacks' arrays, counters.
        gradients: Of the gradients, in their shardings. They are a part of the temporaries where the compiler keeps
            all of them at once.
        devices: How many devices there are.
        device: Their kind.
        batch: Bytes of the device's share of a batch.
        memory: What the compiled program takes, as the compiler reports it; None before it is compiled.
        flops: Of its matrix products and convolutions; None where they are not known.
        collectives: What the devices send each other.
        undivided: The number of equal parts that the batch's rows do not divide into; 0 if they divide.
        per_replica: Whether each replica computes its own rows, and all of them if they do not divide.
        on_host: Bytes of the state's arrays that are in the memory of the hosts, not of the devices.
    """

    parameters: int
    optimizer: int
    window: int
    other: int
    gradients: int
    devices: int
    device: str
    batch: int = 0
    memory: Memory | None = None
    flops: Flops | None = None
    collectives: tuple[Collective, ...] | None = None
    undivided: int = 0
    per_replica: bool = False
    on_host: int = 0

    @property
    def held(self) -> int:
        """Bytes of the state and the batch."""
        return self.parameters + self.optimizer + self.window + self.other + self.batch

    @property
    def total(self) -> int:
        """Bytes of all that the step takes."""
        return self.held + self.temporaries + self.made

    @property
    def temporaries(self) -> int:
        """Bytes that the step holds in addition to its arguments and results."""
        return 0 if self.memory is None else self.memory.temporaries

    @property
    def made(self) -> int:
        """Bytes of results that take no argument's place: metrics and outputs."""
        return 0 if self.memory is None else self.memory.outputs - self.memory.aliased


def cost_of_step(trial: Any, model: TrainModule | lazy, batch: Any, num_batches: int | float) -> StepCost:
    """Compile the training step of a trial (see `trial_of`) from shapes and dtypes alone, and return what it takes.

    No array of the model is read. An epoch has `num_batches` of the batch's global rows, inf for an unknown number.
    """
    strategy = trial.strategy
    module = shape_lazy(model, strategy, trial.seed)[0] if isinstance(model, lazy) else shapes_of(model)
    attach(module, trial)
    # As a fit without data begins, for optimizers that ask how long training is.
    loaders = make_loaders(trial.settings, STAGES["training"], {"training": (None, "data")}, None)
    hooks, _ = trial._session.prepare(STAGES["training"], module, loaders, None)
    trial._session.control.num_training_batches = num_batches
    options = step_options(trial.settings, hooks, batch)
    return compiled_cost(abstract_training(module, strategy, options, Precision(trial.precision)), batch)


def abstract_training(module: TrainModule, strategy: Strategy, options: StepOptions, precision: Precision) -> Training:
    """Return how a module is trained, before its arrays exist: they may be shapes and dtypes."""
    pure = PureModule(nnx.graphdef(module, graph=True), options.optimizer.wrt, module, precision)
    return training_of(module, pure, strategy, options)


def cost_of_state(training: Training) -> StepCost:
    """Return what the state and the gradients take; no step is traced."""
    state, shardings = training.spec.tree, training.spec.grad_shardings
    devices = training.spec.strategy.mesh.devices
    grads = state.params
    if shardings is not None:
        grads = jax.tree.map(lambda x, to: x.update(sharding=to), grads, shardings)
    parts = {
        "parameters": (state.params, state.frozen),
        "optimizer": state.opt_state,
        "window": state.window,
        "other": (state.model_state, state.counters, state.sums, state.loss_scale, state.extras, state.window_start),
        "gradients": grads,
    }
    held: dict[str, Any] = {name: bytes_per_device(jax.tree.leaves(tree)) for name, tree in parts.items()}
    on_host = bytes_of(x for x in jax.tree.leaves(state) if x.sharding.memory_kind == HOST)
    return StepCost(**held, devices=devices.size, device=devices.flat[0].device_kind, on_host=on_host)


def compiled_cost(training: Training, batch: Any) -> StepCost:
    """Compile the step, and return what it takes."""
    strategy = training.spec.strategy
    training = training.trace(batch)  # with the metrics that the step logs
    placed = strategy.shard_batch(batch)
    program = CompiledProgram("train_step", strategy.compile(training.train))
    try:
        cost = program.note_arguments(training.spec.arrays, placed).cost
    except Exception as error:
        if is_exhausted(error):
            raise out_of_memory(error, "while the step was compiled", state=training.spec.tree) from error
        raise
    parts = 1 if strategy.mesh.size == 1 or strategy.replica.passes > 1 else strategy.num_replicas
    return replace(
        cost_of_state(training),
        batch=_bytes(placed),
        memory=cost.memory,
        flops=cost.flops,
        collectives=cost.collectives,
        undivided=parts if num_rows(batch) % parts else 0,
        per_replica=strategy.per_replica,
    )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raise a ModuleError in place of an error that is no JaxlitError, with the place in the user's code."""
    try:
        yield
    except JaxlitError:
        raise
    except Exception as error:
        frames = [x for x in traceback.extract_tb(error.__traceback__) if "site-packages" not in x.filename]
        users = [x for x in frames if not x.filename.startswith(str(Path(__file__).parents[1]))]
        place = f" at {users[-1].filename}:{users[-1].lineno}, in {users[-1].name}" if users else ""
        raise ModuleError(
            "A plan builds the module and traces its step on shapes alone, without the hooks of a fit such as setup, "
            f"and this raised {type(error).__name__}{place}: {str(error).strip().partition(chr(10))[0]}"
        ) from error


def shapes_of(module: TrainModule) -> TrainModule:
    """Return a copy of a module of shapes and dtypes."""
    graphdef, state = split(module)
    return merge(graphdef, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))


def bytes_of_module(module: TrainModule | lazy) -> int:
    """Return the bytes of a module's arrays on the device that has the most of them; a lazy module has no arrays."""
    leaves = [] if isinstance(module, lazy) else jax.tree.leaves(nnx.state(module, graph=True))
    return bytes_per_device(x for x in leaves if isinstance(x, jax.Array))


def _bytes(placed: Any) -> int:
    """Return the bytes of a placed batch on a device; on a single one it has no shardings."""
    leaves = jax.tree.leaves(placed)
    shards = [x.shape if x.sharding is None else x.sharding.shard_shape(x.shape) for x in leaves]
    return sum(math.prod(shape) * x.dtype.itemsize for shape, x in zip(shards, leaves, strict=True))


def choose(auto: Auto, settings: Settings, hooks: Hooks, data: RunData) -> Strategy:
    """Return the first candidate that fits, with the reason.

    A candidate is compiled unless it is certain not to fit. The program of the one that fits is in the compile cache
    then, so only those that did not fit are compiled in vain, as a rule one.
    """
    # Devices of one kind may report other limits.
    limit = min(team().agree("the memory of a device", max(auto.limit(bytes_of_module(hooks.module)) or 0, 0)))
    module = shapes_of(hooks.module)
    source, _ = data.training
    validator = data.loaders.validator_of(source)
    if validator.example is None and source.first is not None:  # a hook of the user's prepares it
        validator(copy.deepcopy(source.first))  # which the hook may change in place
    example = first_example(data)
    attach(module, trainer_of(hooks.module))
    options = step_options(settings, hooks, example)
    like: StepCost | None = None  # what the newest that was compiled takes
    chosen: Strategy | None = None
    names = ""
    reason = ""
    last = [*auto.candidates()][-1]
    for name, strategy in auto.candidates().items():
        strategy.setup(auto.mesh.size)
        try:
            training = abstract_training(module, strategy, options, Precision(settings.precision))
        except ArgumentError:  # `remat` of a step without a scan
            continue
        needs: float = _least(cost_of_state(training), None if name == last else like)
        text = f"needs at least {size(needs)} of {size(limit)} per device"
        if needs <= limit and example is not None and name != last:
            try:
                like = compiled_cost(training, example)
                needs = like.total
                text = f"needs {size(like.total)} of {size(limit)} per device"
            except OutOfMemoryError:
                needs = math.inf
                text = f"needs more than {size(limit)} per device to be compiled"
        chosen = strategy
        names = name
        if needs <= limit:
            reason = reason or text
            break
        reason = f"{name} {text}"
    assert chosen is not None
    chosen.reason = f"auto: {names}, {reason}"
    return chosen


def _least(state: StepCost, like: StepCost | None) -> int:
    """Return the bytes that a step takes at least, given what the step of another candidate takes.

    Its temporaries are the same, but for the gradients, which may be split otherwise, and for updates of their size.
    """
    if like is None:
        return state.held
    temporaries = like.temporaries - 2 * like.gradients + state.gradients
    return state.held + like.batch + max(temporaries, 0)
