"""How a value that each replica computes from its rows relates to the value of the entire batch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Relation:
    """How the value of each of n replicas relates to that of the entire batch.

    Attributes:
        kind: "same", the batch's value is `n**power` times each replica's; "total", it is `n**power` times their sum;
            "mixed", a sum of several of these; "rows", the replicas' values are blocks of it, in the one dim that grows
            with the rows; "zero"; "unknown". Of what a row is looked up by: "index", the row's own index; "never", that
            index compared with 0, which is false.
        power: The power of n: a mean over rows is a total of power -1, a count of rows is the same of power 1.
    """

    kind: str
    power: int = 0

    def as_total(self) -> "Relation":
        """Return what is the same on every replica as a sum over them."""
        return Relation("total", self.power - 1) if self.kind == "same" else self


KINDS = ("same", "total", "zero", "unknown", "mixed", "rows", "index", "never")
SAME, TOTAL, ZERO, UNKNOWN, MIXED, ROWS, INDEX, NEVER = map(Relation, KINDS)
MEAN = Relation("total", -1)


class Differ(Exception):
    """Two traces of a program are not the same but for the number of rows."""


@dataclass(frozen=True)
class Equation:
    """An equation of both traces, and the relations of its inputs."""

    one: Any
    longer: Any
    ins: list[Relation]

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.one.primitive.name

    @property
    def params(self) -> Any:
        """The primitive's parameters."""
        return self.one.params

    @property
    def out(self) -> Any:
        """The first output's shape and dtype."""
        return self.one.outvars[0].aval

    @property
    def grows(self) -> list[int]:
        """The dims of the first output that depend on the number of rows."""
        return row_dims(self.one.outvars[0], self.longer.outvars[0])

    def shape(self, i: int) -> tuple[int, ...]:
        """Return the shape of input i."""
        return self.one.invars[i].aval.shape

    def row_dim(self, i: int) -> int:
        """Return the dim of the rows of input i, which has rows."""
        return row_dims(self.one.invars[i], self.longer.invars[i])[0]


def row_dims(a: Any, b: Any) -> list[int]:
    """Return the dims in which a value of the two traces differs."""
    shape, longer = getattr(a.aval, "shape", ()), getattr(b.aval, "shape", ())
    if len(shape) != len(longer):
        raise Differ
    return [i for i, (x, y) in enumerate(zip(shape, longer, strict=True)) if x != y]


def join(relations: list[Relation]) -> Relation:
    """Return the relation of a value that is one of several, or their sum."""
    kinds, unclear = {r for r in relations if r != ZERO}, UNKNOWN
    if len(kinds) > 1 and all(r.kind in ("same", "total", "mixed") for r in kinds):
        kinds, unclear = {r.as_total() for r in kinds}, MIXED
    return unclear if len(kinds) > 1 else kinds.pop() if kinds else ZERO
