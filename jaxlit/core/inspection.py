"""Looks at the program of a step for mistakes that its numbers would not show."""

import logging
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit.core.leaves import Leaf
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica
from jaxlit.core.stage import STAGES
from jaxlit.core.step_notes import RETURN_THE_LOSS
from jaxlit.errors import ModuleError, StateError
from jaxlit.leaf_names import is_key, named_leaves
from jaxlit.programs import jaxpr
from jaxlit.programs.flops import Flops, count_flops

_logger = logging.getLogger("jaxlit")


def inspect_step(pure: PureModule, replica: Replica, *args: Any, twice: bool = False) -> None:
    """Note what a training step writes to, and refuse or warn of a program that is not what its author means.

    Args:
        pure: The module taken apart.
        replica: What the step sees.
        *args: The arguments of the step's body, abstract.
        twice: Trace the step once more, and warn if it comes out another.

    Raises:
        StateError: It writes to trained parameters in a lower precision than theirs.
        ModuleError: It updates parameters by an optimizer of its own, and returns a loss to train them by.
    """
    closed = pure.body("training", replica).trace(*args).jaxpr
    traced, trained = pure.trace_of("training"), len(jax.tree.leaves(args[0]))
    traced.program = closed
    traced.changed = written_to(pure, closed, *args[:3])
    precision = pure.precision
    if any(traced.changed[:trained]) and precision.compute is not None and precision.held is None:
        raise StateError(
            f"{pure.name}.training_step writes to {pure.leaves(*args[:3])[traced.changed.index(True)].name}, which is "
            f"trained, and under precision={precision.name!r} it sees it as {jnp.dtype(precision.compute).name}: each "
            "step would round the weights to that. Use precision='32-true'."
        )
    flops = count_flops(closed.jaxpr) if precision.compute is not None else Flops()
    wide = sum(count for kind, count in flops.by_dtype.items() if kind.startswith("float32"))
    if 2 * wide > flops.count:
        _logger.warning(
            f"Under precision={precision.name!r}, {wide / flops.count:.0%} of the matrix products of "
            f"{pure.name}.training_step take float32: a layer or constant of float32 makes what comes after it so. "
            f"Pass dtype=jnp.{jnp.dtype(precision.compute).name} to such layers, for example to each nnx.Embed."
        )
    reached = jaxpr.reaches(closed.jaxpr, [0], gradient=True)[:trained]
    if traced.stepped is not None and any(traced.changed[:trained]) and any(reached):
        raise ModuleError(
            f"{pure.name}.training_step has updated parameters by self.{traced.stepped}, an optimizer of nnx. "
            f"{RETURN_THE_LOSS}"
        )
    used = [a or b for a, b in zip(reached, traced.changed, strict=False)]  # a step may train its parameters itself
    paths = [path for path, _ in named_leaves(args[0])]
    if unused := [path for path, is_used in zip(paths, used, strict=True) if not is_used]:
        some = ", ".join(unused[:5]) + f" and {len(unused) - 5} more" * (len(unused) > 5)
        number = f"{len(unused)} of {len(paths)} parameters" if any(used) else "any parameter: nothing is trained"
        _logger.warning(
            f"The loss of {pure.name}.training_step does not depend on {number}. The gradient is zero: {some}. Call "
            "the layer in the step, or leave it out of training: "
            "jl.Optimizer(tx, wrt=nnx.All(nnx.Param, nnx.Not(nnx.PathContains('head'))))."
        )
    # Two new functions: a trace of the body itself would be taken from the cache.
    again = [jax.make_jaxpr(partial(pure.run, "training", replica, None))(*args) for _ in range(2 * twice)]
    texts = [[text for text, _ in jaxpr.described(x)] for x in again]
    if again and texts[0] != texts[1]:
        _logger.warning(
            f"{pure.name}.training_step gave a different program when it was traced again: it draws from numpy or "
            "random, or reads a clock. What it reads is frozen into the compiled step. Draw from nnx.Rngs, or pass it "
            "in the batch."
        )


def written_to(pure: PureModule, closed: Any, params: Any, frozen: Any, model_state: Any) -> tuple[bool, ...]:
    """Return for each leaf of the state whether a training step, given its program, writes to it."""
    parameters, count = (len(jax.tree.leaves(x)) for x in ((params, frozen), (params, frozen, model_state)))
    origins = _origins_of_state(pure, closed.jaxpr, [*range(count)], parameters)
    # nnx.scan and its like return every variable as a new value: what leaves as it came in was not written to.
    return tuple(x != i for i, x in enumerate(origins))


def _origins_of_state(pure: PureModule, program: Any, leaves: list[int], parameters: int) -> list[int | None]:
    """Return which input each of some leaves of the state is, of those that come after a step's loss."""
    compute = pure.precision.compute
    casts = () if compute is None else (jnp.dtype(jnp.float32), jnp.dtype(compute))
    exact, rounded = (jaxpr.origins(program, dtypes)[1:] for dtypes in ((), casts))
    # Only parameters are cast.
    return [(rounded if leaf < parameters else exact)[i] for i, leaf in enumerate(leaves)]


def inspect_evaluation(pure: PureModule, stage: str, loader: int | None, replica: Replica, *args: Any) -> None:
    """Refuse an evaluation step that writes to the module's state: only training changes it.

    Args:
        pure: The module taken apart.
        stage: The stage.
        loader: The loader, for a step that asks for it.
        replica: What the step sees.
        *args: The arguments of the step's body, abstract; the first three are the state.

    Raises:
        StateError: Naming the variable and what to do.
    """
    trace = pure.body(stage, replica, loader).trace(*args)
    closed, (_, (written, *_)) = trace.jaxpr, trace.out_info
    pure.trace_of(stage, loader).program = closed
    leaves, state, parameters = pure.leaves(*args[:3]), jax.tree.leaves(args[:3]), len(jax.tree.leaves(args[:2]))
    indices = sorted(written)  # the order of a dict's leaves
    for i, origin in zip(indices, _origins_of_state(pure, closed.jaxpr, indices, parameters), strict=True):
        # A key differs between replicas already.
        if origin != i and not _is_scratch(leaves[i]) and not (is_key(state[i]) and replica.splits):
            raise StateError(
                f"{pure.name}.{STAGES[stage].step} wrote to {leaves[i].name}. Only training changes the state, so the "
                "write would be lost. Return the value, or log it; log an nnx metric itself: "
                f"self.log('acc', metric). Or write to the variable in on_{stage}_end. Draw random numbers from an "
                "nnx.Rngs that the module holds, whose streams differ between batches."
            )


def _is_scratch(leaf: Leaf) -> bool:
    """Return whether a step may use a variable as it likes: what it writes there is meant for itself."""
    scratch = (nnx.RngState, nnx.Cache, nnx.Intermediate)
    return leaf.owner == "normalizing" or (leaf.kind is not None and issubclass(leaf.kind, scratch))
