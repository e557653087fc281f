"""What uses a device's memory, for errors where there was not enough of it."""

import contextlib
from collections.abc import Iterable
from typing import Any

import jax

from jaxlit.core.state import TrainState
from jaxlit.engine.compiled_program import CompiledProgram
from jaxlit.errors import OutOfMemoryError
from jaxlit.reporting.placement import bytes_per_device
from jaxlit.table import size

_REMEDIES = (
    'Parameters and optimizer shrink with strategy="fsdp" over more devices (the optimizer alone with "zero1") and '
    'precision="bf16-true"; batch and temporaries with smaller batches, which accumulate_grad_batches adds up to the '
    'same step, more devices, precision="bf16-mixed" and, for scanned layers, jl.strategies.FSDP(remat=True).'
)


def is_exhausted(error: BaseException) -> bool:
    """Return whether an error is jax's of a device without memory left."""
    # The message of a CPU may be INTERNAL: Out of memory allocating ...
    words = ("RESOURCE_EXHAUSTED", "Out of memory")
    return isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in words)


def out_of_memory(
    error: BaseException,
    place: str,
    *,
    state: TrainState | None = None,
    batch: int | None = None,
    programs: Iterable[CompiledProgram] = (),
) -> OutOfMemoryError:
    """Return jax's error with what uses the memory, and what to do.

    Args:
        error: The error.
        place: What was compiled or run: "in train_step".
        state: The shapes, dtypes and shardings of the training state.
        batch: The bytes of a batch on a device.
        programs: Those whose temporaries may be the cause.
    """
    trees: dict[str, Any] = {}
    if state is not None:
        trees = {"parameters": (state.params, state.frozen), "optimizer": state.opt_state}
        trees |= {"accumulation window": state.window, "callbacks": state.extras, "other state": state.model_state}
    parts = [(name, bytes_per_device(leaves)) for name, tree in trees.items() if (leaves := jax.tree.leaves(tree))]
    parts += [] if batch is None else [("batch", batch)]
    temporaries = list[tuple[int, str]]()
    for program in programs:
        with contextlib.suppress(Exception):  # it cannot even be compiled, or its platform reports none
            temporaries.append((program.cost.memory.temporaries, program.name))  # type: ignore[union-attr]
    parts += [(f"temporaries of {name}", most) for most, name in sorted(temporaries)[-1:]]
    used = ", ".join(f"{name} {size(count)}" for name, count in parts)
    used = f" On the device that holds the most: {used}." if used else ""
    what = str(error).strip().splitlines()[0].rstrip(".")[:300]
    exhausted = OutOfMemoryError(f"The devices ran out of memory {place}: {what}.{used} {_REMEDIES}")
    exhausted.__cause__ = error
    return exhausted
