"""How what a replica computes from its rows relates to what one device computes from the whole batch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Relation:
    """How the value that each of n replicas has relates to the one of the whole batch.

    Attributes:
        kind: "same", the whole value is `n**power` times each replica's; "rows", a replica's value is its block of it
            along `dim`, but for that factor; "total", it is that factor times the sum over replicas; "mixed", values
            of several relations are added up; "zero", the value is zero; "unknown". Of what a row is looked up by:
            "index", the place of a row among those that are seen; "indexed", such places and, after them along the
            last dim, rows; "never", false for each row.
        power: The power of n: a mean over rows is a total of power -1, a count of rows is the same of power 1.
        dim: Where the rows are.
    """

    kind: str
    power: int = 0
    dim: int = 0

    @property
    def is_total(self) -> bool:
        """Whether the replicas' values add up to the whole one: a sum over rows, or their number."""
        return self.as_total() == Relation("total")

    def as_total(self) -> "Relation":
        """Return what the same on every replica is as a sum over them."""
        return Relation("total", self.power - 1) if self.kind == "same" else self


PLACES = ("index", "indexed", "never")
BY_ROW = ("rows", *PLACES)  # a value of these has something for each row

SAME, TOTAL, ZERO, UNKNOWN = Relation("same"), Relation("total"), Relation("zero"), Relation("unknown")
MIXED = Relation("mixed")
MEAN, ROWS = Relation("total", -1), Relation("rows")


class Differ(Exception):
    """Two traces of a program are not the same but for the number of rows."""


@dataclass(frozen=True)
class Equation:
    """One equation of both traces, and the relations of its inputs."""

    one: Any
    longer: Any
    ins: list[Relation]
    rows: tuple[int, int]  # of the batch, in both traces

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.one.primitive.name

    def shape(self, i: int) -> tuple[int, ...]:
        """The shape of input i."""
        return self.one.invars[i].aval.shape

    @property
    def row_dims(self) -> list[int]:
        """The dims of the first output that depend on the number of rows."""
        return row_dims(self.one.outvars[0], self.longer.outvars[0])

    @property
    def row_dim(self) -> int | None:
        """The one dim of the first output that grows as the rows do; None if there is no such dim, or another grows."""
        dims, (one, longer) = self.row_dims, (self.one.outvars[0].aval.shape, self.longer.outvars[0].aval.shape)
        fits = len(dims) == 1 and one[dims[0]] * self.rows[1] == longer[dims[0]] * self.rows[0]
        return dims[0] if fits else None

    @property
    def has_rows(self) -> bool:
        """Whether an input has rows."""
        return any(r.kind == "rows" for r in self.ins)

    @property
    def makes_rows(self) -> bool:
        """Whether an output's shape depends on the number of rows."""
        return any(row_dims(a, b) for a, b in zip(self.one.outvars, self.longer.outvars, strict=True))


def row_dims(a: Any, b: Any) -> list[int]:
    """Return the dims in which a value of the two traces differs."""
    shape, longer = getattr(a.aval, "shape", ()), getattr(b.aval, "shape", ())
    if len(shape) != len(longer):
        raise Differ
    return [i for i, (x, y) in enumerate(zip(shape, longer, strict=True)) if x != y]


def join(relations: list[Relation]) -> Relation:
    """Return the relation of a value that is one of several, or their sum."""
    found = {r for r in relations if r != ZERO}
    if len(found) > 1 and all(r.kind in ("same", "total", "mixed") for r in found):
        found = {r.as_total() for r in found}
        return found.pop() if len(found) == 1 else MIXED
    return ZERO if not found else found.pop() if len(found) == 1 else UNKNOWN
