"""A step that a strategy compiles, with the specs of its inputs and outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxlit import checks as check
from jaxlit.core.microbatch_step import MicrobatchStep


@dataclass(frozen=True)
class Program:
    """A step to compile: `fn(replica, *states, batch)`, where a state is a flat list of arrays.

    Attributes:
        name: The name under which it compiles, for example `train_step`.
        kind: "train" for an optimizer step, "micro" for a batch of a window that continues, "eval" for an evaluation.
        fn: The body.
        inputs: The spec of each array of each state.
        outputs: A list of `ArraySpec` for a state, else a pytree of `EACH`, `ROWS` and `SHARED`.
        donate: Indices of the states that the step may overwrite.
        passes: For a training program under a strategy that takes gradients itself, in passes over parts of a batch.
    """

    name: str
    kind: str
    fn: Callable[..., Any]
    inputs: tuple[list["ArraySpec"], ...]
    outputs: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    passes: MicrobatchStep | None = None


@dataclass(frozen=True)
class ArraySpec:
    """How an array of the state is stored on the devices.

    Attributes:
        sharding: The global array's.
        per_replica: Each replica has its own part along a leading dim, which its step body does not see.
    """

    sharding: NamedSharding
    per_replica: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReplicatedBatch:
    """A batch whose rows do not divide: every replica, or in several processes every process, has all of them."""

    batch: Any


class Out:
    """The kind of an output that is no state."""


SHARED = Out()  # the same on every replica
EACH = Out()  # one value a replica, stacked along a new leading dim
ROWS = Out()  # one row for each row of the batch


def state_shardings(program: Program) -> tuple[Any, ...]:
    """Return the shardings of the states that a program returns, and None, XLA's choice, for its other results.

    A state's sharding that XLA chose could differ from the one it had before, for example for an array without
    elements, and the next call would compile again.
    """
    is_state = lambda x: isinstance(x, list) and all(isinstance(y, ArraySpec) for y in x)  # noqa: E731
    # Not every list: what a user's step returns may be one.
    return tuple([spec.sharding for spec in x] if is_state(x) else None for x in program.outputs)


def jit(mesh: jax.sharding.Mesh, fn: Callable[..., Any], **options: Any) -> Any:
    """Compile a program with collectives over a mesh by `jax.jit`, which takes the options."""
    if mesh.devices.flat[0].platform == "cpu" and mesh.size > 1:
        # Collectives of one loop run at once otherwise, for which simulated devices have too few threads: they wait
        # for each other, and the process is ended.
        options["compiler_options"] = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
    return jax.jit(fn, **options)


# Those of jax.checkpoint_policies that are policies; the others make one of arguments.
_POLICIES = ("everything_saveable", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")


def remat_policy(remat: bool | str, owner: str) -> Any:
    """Return what a backward pass keeps, one of `jax.checkpoint_policies`; None for False, to keep everything."""
    valid = isinstance(remat, bool) or remat in _POLICIES
    check.require(valid, "remat", remat, f"takes True, False or one of {', '.join(_POLICIES)}", owner=owner)
    name = "nothing_saveable" if remat is True else remat
    return getattr(jax.checkpoint_policies, name) if name else None


def named(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` under another name, by which its compiled program is reported."""

    def call(*args: Any) -> Any:
        return fn(*args)

    call.__name__ = call.__qualname__ = name
    return call
