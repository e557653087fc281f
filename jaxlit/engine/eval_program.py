"""A compiled evaluation step, and what it can be used for again."""

from dataclasses import dataclass
from typing import Any

from jaxlit.core.pure_module import PureModule
from jaxlit.engine.compiled_program import CompiledProgram


@dataclass(frozen=True)
class EvalProgram:
    """A stage's step, compiled for batches like the first one that it was given.

    Args:
        pure: The module taken apart, with what the traces of this program have found out.
        stage: "validation", "test" or "predict".
        loader: The loader, for a step that asks for it.
        like: The structure, shapes and dtypes of the first batch: for another one the step may log other things.
        program: The compiled step.
    """

    pure: PureModule
    stage: str
    loader: int | None
    like: Any
    program: CompiledProgram

    @property
    def holds(self) -> bool:
        """Whether the step would read of the Trainer what it has read while it was traced."""
        return self.pure.trace_of(self.stage, self.loader).reads.hold()

    def fits(self, like: Any) -> bool:
        """Return whether it is what would be compiled now for such a first batch."""
        return self.like == like and self.holds
