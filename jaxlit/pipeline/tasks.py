"""What a rank of a pipeline does with one microbatch at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a task computes of its stage.

    `BWD_INPUT` is the part of a backward pass that the stage before waits for, `BWD_WEIGHT` the rest of it.

    Example:
        >>> import jaxlit as jl
        >>> [kind.value for kind in jl.pipeline.Kind]
        ['fwd', 'bwd', 'bwdA', 'bwdW']
    """

    FWD = "fwd"
    BWD = "bwd"
    BWD_INPUT = "bwdA"
    BWD_WEIGHT = "bwdW"


@dataclass(frozen=True)
class Task:
    """A pass of one microbatch through one stage.

    Args:
        stage: The stage, from 0.
        mb: The microbatch, from 0.
        kind: What is computed.

    Example:
        >>> import jaxlit as jl
        >>> str(jl.strategies.Std1F1B(4).tasks(4)[2][0])
        'fwd_2__0'
    """

    stage: int
    mb: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind.value}_{self.stage}__{self.mb}"


class FusedTask(tuple[Task, ...]):
    """Tasks that run as one program, in their order.

    Example:
        >>> import jaxlit as jl
        >>> str(jl.strategies.Std1F1B(4).tasks(4)[3][0])
        'FusedTask(fwd_3__0, bwd_3__0)'
    """

    __slots__ = ()

    def __str__(self) -> str:
        return f"FusedTask({', '.join(map(str, self))})"


def parts(task: Task | FusedTask) -> tuple[Task, ...]:
    """Return the tasks of one program."""
    return (task,) if isinstance(task, Task) else tuple(task)


def flat(tasks: list[Task | FusedTask]) -> Iterator[Task]:
    """Yield the tasks of a rank one by one."""
    for task in tasks:
        yield from parts(task)
