"""What the devices send each other in a compiled program."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from jaxlit.programs.device_groups import groups_of

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
# Its name, the type of its result, the opcode, and the rest.
_INSTRUCTION = re.compile(r"%?([\w.-]+) = (.*?) ([a-z][\w.-]*)\((.*)")
_TARGETS = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(?:\{([^}]*)\}|%?([\w.-]+))")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_PARTS = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
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
        sent_by_span: Bytes that a device sends at least, around a ring of its group, by the span of the group: how far
            apart its devices are in the program's order, both ends counted. A span of more devices than a node has
            crosses nodes.
    """

    kind: str
    calls: int
    bytes: int
    exact: bool = True
    sent_by_span: Mapping[int, int] = field(default_factory=dict, compare=False)

    @property
    def sent(self) -> int:
        """Bytes that a device sends at least."""
        return sum(self.sent_by_span.values())

    def __add__(self, other: "Collective") -> "Collective":
        sent = Counter(self.sent_by_span) + Counter(other.sent_by_span)
        exact = self.exact and other.exact
        return Collective(self.kind, self.calls + other.calls, self.bytes + other.bytes, exact, sent)

    def __mul__(self, times: int) -> "Collective":
        sent = {span: num_bytes * times for span, num_bytes in self.sent_by_span.items()}
        return replace(self, calls=self.calls * times, bytes=self.bytes * times, sent_by_span=sent)


def count_collectives(hlo: str) -> tuple[Collective, ...]:
    """Return what one call of a compiled program sends, by kind.

    Args:
        hlo: The text of the compiled program.
    """
    computations, entry = _parse(hlo)
    known: dict[str, tuple[Collective, ...]] = {}
    devices = math.prod(int(count) for count in _PARTS.findall(hlo.partition("\n")[0]))
    # A collective that is started and waited for apart names its devices where it is started.
    starts = {name: rest for lines in computations.values() for name, _, _, rest in lines if "replica_groups=" in rest}

    def of(name: str) -> tuple[Collective, ...]:
        if name not in known:
            known[name] = _added(x for line in computations.get(name, ()) for x in of_instruction(*line[1:]))
        return known[name]

    def of_instruction(result: str, opcode: str, rest: str) -> Iterable[Collective]:
        # A collective that is started and waited for apart counts where it is done, whose result is its own.
        if (kind := opcode.removesuffix("-done")) in _KINDS:
            start = starts.get(rest.partition(")")[0].rpartition("%")[2], "") if opcode != kind else ""
            return (_collective(kind, _bytes(result), start or rest, devices),)
        if opcode.endswith(("-done", "-update")):  # its start has run the computation
            return ()
        targets = [name for several, one in _TARGETS.findall(rest) for name in (several or one).split(",")]
        inside = [of(name.strip().lstrip("%")) for name in targets]
        if opcode == "conditional":  # one branch runs
            return max(inside, key=lambda branch: sum(x.bytes for x in branch), default=())
        inner = _added(x for each in inside for x in each)
        if opcode != "while":
            return inner
        turns = _TURNS.search(rest)
        times = int(turns[1]) if turns else 1
        return (replace(x * times, exact=x.exact and turns is not None) for x in inner)

    return of(entry)


def _parse(hlo: str) -> tuple[dict[str, list[tuple[str, ...]]], str]:
    """Return the instructions of each computation, and the name of the one that runs."""
    computations: dict[str, list[tuple[str, ...]]] = {}
    lines, entry = [], ""
    for line in hlo.splitlines():
        if line[:1].strip():
            if head := _HEAD.match(line):
                lines = computations[head[2]] = []
                entry = head[2] if head[1] else entry
        elif match := _INSTRUCTION.search(line):
            lines.append(match.groups())
    return computations, entry


def _collective(kind: str, num_bytes: int, rest: str, devices: int) -> Collective:
    """Return one collective, given the bytes of its result and the text that names its devices."""
    groups = groups_of(rest, devices)
    size = max(map(len, groups))
    shares = {"all-reduce": 2 * (size - 1) / size, "reduce-scatter": size - 1, "collective-permute": 1}
    sent = math.ceil(num_bytes * shares.get(kind, (size - 1) / size))
    span = max(max(group) - min(group) + 1 for group in groups)
    return Collective(kind, 1, num_bytes, sent_by_span={span: sent})


def _bytes(type_text: str) -> int:
    total = 0
    for kind, bits, shape in _ARRAY.findall(type_text):
        size = math.prod(map(int, re.findall(r"\d+", shape)))
        total += -(-size * int(bits or {"pred": 8}.get(kind, 0)) // 8)
    return total


def _added(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    by_kind: dict[str, Collective] = {}
    for x in collectives:
        by_kind[x.kind] = by_kind[x.kind] + x if x.kind in by_kind else x
    return tuple(by_kind[kind] for kind in sorted(by_kind))
