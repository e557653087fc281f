"""What a compiled program costs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.stages import Traced

from jaxlit.programs.collectives import Collective
from jaxlit.programs.flops import Flops


@dataclass(frozen=True)
class Memory:
    """Bytes of a program on one device, by kind.

    Attributes:
        arguments: What it is given.
        outputs: What it returns.
        temporaries: What it holds meanwhile.
        aliased: The part of the outputs that takes the place of arguments.
        exact: Whether there are no more temporaries: of a step that runs in parts those of each part are not counted.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    exact: bool = True


@dataclass(frozen=True)
class ProgramCost:
    """What one call of a compiled program costs; None for what its strategy or its platform does not report.

    Attributes:
        name: The program's name.
        flops: Of its matrix products and convolutions, on all devices together.
        memory: What it takes on one device.
        collectives: What the devices send each other, by kind.
    """

    name: str
    flops: Flops | None = None
    memory: Memory | None = None
    collectives: tuple[Collective, ...] | None = None


def trace(program: Callable[..., Any], *args: Any) -> Traced | None:
    """Return the trace of a compiled function, or None if it has no `trace` as functions of `jax.jit` have.

    Args:
        program: The function.
        *args: Its arguments, or their shapes, dtypes and shardings.
    """
    return program.trace(*args) if hasattr(program, "trace") else None  # type: ignore[attr-defined]
