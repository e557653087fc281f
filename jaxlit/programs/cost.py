"""What a compiled program costs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.stages import Compiled, Traced

from jaxlit.programs.collectives import Collective, count_collectives
from jaxlit.programs.flops import Flops, count_flops


@dataclass(frozen=True)
class Memory:
    """Bytes of a program on one device, by kind.

    Attributes:
        arguments: What it is given.
        outputs: What it returns.
        temporaries: What it holds meanwhile.
        aliased: The part of the outputs that takes the place of arguments.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int


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


def program_cost(name: str, program: Callable[..., Any], args: tuple[Any, ...]) -> ProgramCost:
    """Return what a compiled function costs; nothing is traced or compiled that jax still has of a call like this.

    Args:
        name: Its name.
        program: The function.
        args: The arguments that it was called with, abstract.
    """
    if (traced := trace(program, *args)) is None:
        return ProgramCost(name)
    compiled = traced.lower().compile()
    text = compiled.as_text()
    collectives = None if text is None else count_collectives(text)
    return ProgramCost(name, count_flops(traced.jaxpr.jaxpr), _memory(compiled), collectives)


def _memory(compiled: Compiled) -> Memory | None:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    sizes = (getattr(analysis, f"{kind}_size_in_bytes") for kind in ("argument", "output", "temp", "alias"))
    return Memory(*sizes)
