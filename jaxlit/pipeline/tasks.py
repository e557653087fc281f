"""What a rank of a pipeline does with one microbatch at a time."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from jaxlit.errors import ArgumentError


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


_OURS = re.compile(r"(fwd|bwd|bwdA|bwdW)_(\d+)__(\d+)")
_LETTERS = {"F": Kind.FWD, "B": Kind.BWD, "I": Kind.BWD_INPUT, "W": Kind.BWD_WEIGHT}
_TORCH = re.compile(r"(\d+)([FBIW])(\d+)")


def parse(text: str) -> Task | FusedTask:
    """Return the task that `str` has written, or one in the notation of torch.distributed.pipelining: `2F0`.

    Raises:
        ArgumentError: It is none.
    """
    text = text.strip()
    if text.startswith("FusedTask(") and text.endswith(")"):
        inner = [parse(part) for part in text[len("FusedTask(") : -1].split(",")]
        return FusedTask(task for task in inner if isinstance(task, Task))
    if found := _OURS.fullmatch(text):
        return Task(int(found[2]), int(found[3]), Kind(found[1]))
    if found := _TORCH.fullmatch(text):
        return Task(int(found[1]), int(found[3]), _LETTERS[found[2]])
    raise ArgumentError(
        f"A schedule's task is written like 'fwd_2__0' (stage 2, microbatch 0), 'bwd_2__0', 'FusedTask(fwd_3__0, "
        f"bwd_3__0)', or '2F0', '2B0', '2I0', '2W0', got {text!r}."
    )
