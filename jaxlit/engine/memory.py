"""What has taken a device's memory, where there was not enough of it."""

from collections.abc import Iterable

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
    # A CPU may say INTERNAL: Out of memory allocating ...
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
    """Return jax's error with what it does not say.

    Args:
        error: It.
        place: What was compiled or run: "in train_step".
        state: The shapes, dtypes and shardings of the training state.
        batch: The bytes of a batch on a device.
        programs: Those whose temporaries may be the reason.
    """
    parts = [] if state is None else _parts(state)
    parts += [] if batch is None else [("batch", batch)]
    if temporaries := list(filter(None, map(_temporaries, programs))):
        most, name = max(temporaries)
        parts.append((f"temporaries of {name}", most))
    told = ", ".join(f"{name} {size(count)}" for name, count in parts)
    told = f" On the device that holds the most: {told}." if told else ""
    what = str(error).strip().splitlines()[0].rstrip(".")[:300]
    found = OutOfMemoryError(f"The devices ran out of memory {place}: {what}.{told} {_REMEDIES}")
    found.__cause__ = error
    return found


def _parts(state: TrainState) -> list[tuple[str, int]]:
    trees = {
        "parameters": (state.params, state.frozen),
        "optimizer": state.opt_state,
        "accumulation window": state.window,
        "arrays of callbacks": state.extras,
        "other state": state.model_state,
    }
    return [(name, bytes_per_device(found)) for name, tree in trees.items() if (found := jax.tree.leaves(tree))]


def _temporaries(program: CompiledProgram) -> tuple[int, str] | None:
    try:
        memory = program.cost.memory
    except Exception:  # it cannot even be compiled
        return None
    return None if memory is None else (memory.temporaries, program.name)
