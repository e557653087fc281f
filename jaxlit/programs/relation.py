"""How a value that each replica computes from its rows relates to the value of the entire batch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Relation:
    """How the value of each of n replicas relates to that of the entire batch.

    Attributes:
        kind: "same", the batch's value is `n**power` times each replica's; "rows", the replicas' values are blocks of
            it along `dim`, up to that factor; "total", it is that factor times their sum; "mixed", a sum of several
            relations; "zero", the value is zero; "unknown". Of what a row is looked up by: "index", the row's own
            index, first in the last dim; "never", an index compared with 0, which is false.
        power: The power of n: a mean over rows is a total of power -1, a count of rows is the same of power 1.
        dim: The dim of the rows.
    """

    kind: str
    power: int = 0
    dim: int = 0

    @property
    def is_total(self) -> bool:
        """Whether the replicas' values add up to the batch's: a sum over rows, or their number."""
        return self.as_total() == TOTAL

    def as_total(self) -> "Relation":
        """Return what is the same on every replica as a sum over them."""
        return Relation("total", self.power - 1) if self.kind == "same" else self

    def times(self, power: int) -> "Relation":
        """Return the relation of the value times `n**-power`."""
        return Relation(self.kind, self.power + power, self.dim)


SAME, TOTAL, ZERO, UNKNOWN, MIXED, ROWS = map(Relation, ("same", "total", "zero", "unknown", "mixed", "rows"))
MEAN = Relation("total", -1)


class Differ(Exception):
    """Two traces of a program are not the same but for the number of rows."""


@dataclass(frozen=True)
class Equation:
    """An equation of both traces, and the relations of its inputs."""

    one: Any
    longer: Any
    ins: list[Relation]
    num_rows: tuple[int, int]  # of the batch, in both traces

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

    def shape(self, i: int) -> tuple[int, ...]:
        """Return the shape of input i."""
        return self.one.invars[i].aval.shape

    @property
    def grows(self) -> bool:
        """Whether an output's shape depends on the number of rows."""
        return any(row_dims(a, b) for a, b in zip(self.one.outvars, self.longer.outvars, strict=True))

    @property
    def only_same(self) -> bool:
        """Whether every input is the same on all replicas."""
        return all(r in (SAME, ZERO) for r in self.ins)

    def rows(self, power: int = 0) -> Relation:
        """Return the relation of an output with rows, in the dim that grows with them; unknown if others grow."""
        dims, longer = row_dims(self.one.outvars[0], self.longer.outvars[0]), self.longer.outvars[0].aval.shape
        fits = len(dims) == 1 and self.out.shape[dims[0]] * self.num_rows[1] == longer[dims[0]] * self.num_rows[0]
        return Relation("rows", power, dims[0]) if fits else UNKNOWN


def row_dims(a: Any, b: Any) -> list[int]:
    """Return the dims in which a value of the two traces differs."""
    shape, longer = getattr(a.aval, "shape", ()), getattr(b.aval, "shape", ())
    if len(shape) != len(longer):
        raise Differ
    return [i for i, (x, y) in enumerate(zip(shape, longer, strict=True)) if x != y]


def join(relations: list[Relation]) -> Relation:
    """Return the relation of a value that is one of several, or their sum."""
    kinds = {r for r in relations if r != ZERO}
    if len(kinds) > 1 and all(r.kind in ("same", "total", "mixed") for r in kinds):
        kinds = {r.as_total() for r in kinds}
        return kinds.pop() if len(kinds) == 1 else MIXED
    return ZERO if not kinds else kinds.pop() if len(kinds) == 1 else UNKNOWN
