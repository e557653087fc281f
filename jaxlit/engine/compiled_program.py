"""A compiled program that can be asked what it costs."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Traced

from jaxlit.distributed.same_job import same_program
from jaxlit.mesh_context import is_out, out
from jaxlit.programs.collectives import count_collectives
from jaxlit.programs.cost import Memory, ProgramCost, trace
from jaxlit.programs.flops import Flops, count_flops
from jaxlit.strategies.program import Program, state_shardings


class CompiledProgram:
    """A program as a strategy has compiled it, and the shapes of its first call.

    Args:
        name: Its name.
        program: The strategy's function.
        step: The trace of the user's step in it, for messages; None for none.

    Attributes:
        run: What to call: after the first call the strategy's function itself, so that no step waits for more.
        ran: Whether it was called.
        steps: How many optimizer steps a call takes.
    """

    def __init__(self, name: str, program: Callable[..., Any], step: Any = None) -> None:
        self.name, self.program, self._step = name, program, step
        self.run: Callable[..., Any] = self._first
        self.ran, self.steps = False, 1
        self._arguments: tuple[Any, ...] | None = None
        self._out = False  # whether the first call left a mesh of the caller's, which jax keeps programs by

    def _first(self, *args: Any) -> Any:
        self.given(*args)  # before the call, which may overwrite arrays
        same_program(self.name, lambda: trace(self.program, *args), self._step)  # a trace that the call uses again
        result = self.program(*args)
        self.ran, self.run = True, self.program
        return result

    def given(self, *args: Any) -> Self:
        """Note the arguments of a call, or their shapes, dtypes and shardings, without a call; returns itself."""
        self._arguments, self._out = jax.tree.map(_abstract, args), is_out.get()
        return self

    @property
    def failed(self) -> bool:
        """Whether its first call has raised an error."""
        return self._arguments is not None and not self.ran

    @cached_property
    def flops(self) -> Flops | None:
        """The operations of a call like the first one, from its trace; None if they are not known."""
        traced = self._trace()
        return None if traced is None else count_flops(traced.jaxpr.jaxpr)

    @cached_property
    def cost(self) -> ProgramCost:
        """What a call like the first one costs; nothing is traced or compiled that jax still has of it."""
        if hasattr(self.program, "estimate"):  # it runs in parts
            return self.program.estimate(*self._arguments)  # type: ignore[attr-defined]
        if (traced := self._trace()) is None:
            return ProgramCost(self.name)
        with out(self._out):
            compiled = traced.lower().compile()
        text, analysis = compiled.as_text(), compiled.memory_analysis()
        kinds = ("argument", "output", "temp", "alias")
        memory = None if analysis is None else Memory(*(getattr(analysis, f"{x}_size_in_bytes") for x in kinds))
        return ProgramCost(self.name, self.flops, memory, None if text is None else count_collectives(text))

    def _trace(self) -> Traced | None:
        assert self._arguments is not None, "nothing is known of a program before its first call"
        with out(self._out):
            return trace(self.program, *self._arguments)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Return what jax knows an argument of a compiled function by."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if isinstance(x, jax.Array):
        placed = x.sharding if x.committed else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed, weak_type=x.aval.weak_type)  # type: ignore[attr-defined]
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))


def run_eagerly(run: Callable[..., Any], program: Program) -> Callable[..., Any]:
    """Do by hand what jit does besides compiling: take numpy arrays, and give results their shardings."""

    def call(*args: Any) -> tuple[Any, ...]:
        args = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, args)
        pairs = zip(run(*args), state_shardings(program), strict=True)
        return tuple(x if to is None else jax.device_put(x, to) for x, to in pairs)

    return call
