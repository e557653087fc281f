"""What the devices send each other in a compiled program."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")
_TARGETS = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(?:\{([^}]*)\}|%?([\w.-]+))")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([^\]]*)\]")


@dataclass(frozen=True)
class Collective:
    """One kind of collective in a program.

    Attributes:
        kind: "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute",
            "ragged-all-to-all" or "reduce-scatter".
        calls: How many of them one call of the program runs; those in loops count by the loops' turns.
        bytes: Of the results of all of them on one device: of an all-gather the entire array, of a reduce-scatter a
            device's part.
        exact: Whether there are no more: a loop whose turns are known only while it runs counts as one turn.
    """

    kind: str
    calls: int
    bytes: int
    exact: bool = True

    def __add__(self, other: "Collective") -> "Collective":
        exact = self.exact and other.exact
        return Collective(self.kind, self.calls + other.calls, self.bytes + other.bytes, exact)


@dataclass(frozen=True)
class _Instruction:
    """One line of a computation."""

    type: str  # of its result
    opcode: str
    rest: str  # operands and attributes


def count_collectives(hlo: str) -> tuple[Collective, ...]:
    """Return what one call of a compiled program sends, by kind.

    Args:
        hlo: The text of the compiled program.
    """
    computations, entry = _parse(hlo)
    known: dict[str, tuple[Collective, ...]] = {}

    def of(name: str) -> tuple[Collective, ...]:
        if name not in known:
            known[name] = _added(x for line in computations.get(name, ()) for x in of_instruction(line))
        return known[name]

    def of_instruction(line: _Instruction) -> Iterable[Collective]:
        kind, _, part = line.opcode.partition("-start")
        if kind in _KINDS and not part:
            return (Collective(kind, 1, _result_bytes(line)),)
        inside = [of(name) for name in _targets(line)]
        if line.opcode == "conditional":  # one branch runs
            return max(inside, key=lambda branch: sum(x.bytes for x in branch), default=())
        inner = _added(x for each in inside for x in each)
        if line.opcode != "while":
            return inner
        turns = _TURNS.search(line.rest)
        times = int(turns[1]) if turns else 1
        return (Collective(x.kind, x.calls * times, x.bytes * times, x.exact and turns is not None) for x in inner)

    return of(entry)


def _parse(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Return the instructions of each computation, and the name of the one that runs."""
    computations: dict[str, list[_Instruction]] = {}
    lines, entry = [], ""
    for line in hlo.splitlines():
        if line[:1].strip():
            if head := _HEAD.match(line):
                lines = computations[head[2]] = []
                entry = head[2] if head[1] else entry
        elif " = " in line:
            text = line.partition(" = ")[2]
            end = _end_of_type(text)
            opcode, _, rest = text[end:].strip().partition("(")
            lines.append(_Instruction(text[:end], opcode, rest))
    return computations, entry


def _end_of_type(text: str) -> int:
    if not text.startswith("("):
        return text.find(" ")
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return i + 1
    return len(text)


def _targets(line: _Instruction) -> Iterator[str]:
    """Yield the names of the computations that an instruction runs."""
    if line.opcode.endswith(("-done", "-update")):  # its start has run them
        return
    for several, one in _TARGETS.findall(line.rest):
        yield from (name.strip().lstrip("%") for name in (several or one).split(","))


def _result_bytes(line: _Instruction) -> int:
    """Return the bytes of a collective's result; its start returns its operands as well, except an all-reduce."""
    apart = line.opcode.endswith("-start") and line.opcode != "all-reduce-start"
    return _bytes(_second(line.type) if apart and line.type.startswith("(") else line.type)


def _second(tuple_type: str) -> str:
    """Return the second type of a tuple's."""
    depth, parts = 0, [""]
    for letter in tuple_type[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts[1]


def _bytes(type_text: str) -> int:
    total = 0
    for kind, bits, shape in _ARRAY.findall(type_text):
        size = 1
        for dim in re.findall(r"\d+", shape):
            size *= int(dim)
        total += -(-size * int(bits or {"pred": 8}.get(kind, 0)) // 8)
    return total


def _added(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    by_kind: dict[str, Collective] = {}
    for x in collectives:
        by_kind[x.kind] = by_kind[x.kind] + x if x.kind in by_kind else x
    return tuple(by_kind[kind] for kind in sorted(by_kind))
