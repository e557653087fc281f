"""What a program costs, and what devices can do at most.

The operations of a traced program; what devices send each other in a compiled one, read from its text; `ProgramCost`,
which has both and the memory; and a table of hardware.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.stages import Traced

from jaxlit.errors import ArgumentError, ArgumentTypeError, did_you_mean
from jaxlit.programs.jaxpr import bodies
from jaxlit.texts import shown


@dataclass(frozen=True)
class Flops:
    """Multiplications and additions of a program."""

    count: int = 0  # how many, at least
    exact: bool = True  # whether there are no more: a loop whose turns are known only while it runs counts as one turn
    # the part of each kind of operands: a dtype's name, or "float32 fast" for those of float32 that a device may round
    # to fewer bits, which is what it does unless a product asks for more
    by_dtype: Mapping[str, int] = field(default_factory=dict, compare=False)

    def __add__(self, other: "Flops") -> "Flops":
        by_dtype = Counter(self.by_dtype) + Counter(other.by_dtype)
        return Flops(self.count + other.count, self.exact and other.exact, by_dtype)

    def __mul__(self, times: int) -> "Flops":
        return Flops(self.count * times, self.exact, {kind: n * times for kind, n in self.by_dtype.items()})

    def __floordiv__(self, times: int) -> "Flops":
        return Flops(self.count // times, self.exact, {kind: n // times for kind, n in self.by_dtype.items()})


def count_flops(jaxpr: Any) -> Flops:
    """Return the operations of a program's matrix products and convolutions, on all devices together.

    Loops count by their turns, of several branches the longest. What XLA merges or leaves out later is counted too,
    and all else, for example elementwise work, is not: this is what a share of the devices' peak is taken of.

    Args:
        jaxpr: The program, of global arrays.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> count_flops(jax.make_jaxpr(lambda a, b: a @ b)(jnp.ones((2, 3)), jnp.ones((3, 4))).jaxpr).count
        48
    """
    return sum(map(_of_equation, jaxpr.eqns), Flops())


def _of_equation(eqn: Any) -> Flops:
    name, params = eqn.primitive.name, eqn.params
    if name in _PRODUCTS:
        count = 2 * _PRODUCTS[name](eqn)
        return Flops(count, by_dtype={_kind(eqn): count})
    if name == "custom_linear_solve":  # it has the product and the transposes as well, for gradients
        return count_flops(params["jaxprs"].solve.jaxpr)
    inner = list(map(count_flops, bodies(eqn)))
    if name == "cond":
        return replace(max(inner, key=lambda x: x.count), exact=all(x.exact for x in inner))
    total = sum(inner, Flops())
    if not total.count:  # the grid of a kernel may be a value
        return total
    if name == "while":
        return replace(total, exact=False)
    # Times how often it runs the program in it, on all devices together.
    if name == "scan":
        return total * params["length"]
    if name == "shard_map":
        return total * math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return total * math.prod(params["grid_mapping"].grid) if name == "pallas_call" else total


def _kind(eqn: Any) -> str:
    """Return the kind of an equation's operands, as `Flops.by_dtype` names it."""
    wider = max((x.aval.dtype for x in eqn.invars[:2]), key=lambda dtype: dtype.itemsize).name
    precision = eqn.params.get("precision")
    precisions = precision if isinstance(precision, tuple) else (precision,)
    is_fast = wider == "float32" and all(x in (None, jax.lax.Precision.DEFAULT) for x in precisions)
    return f"{wider} fast" if is_fast else wider


def _dot(eqn: Any) -> int:
    left, right = (x.aval for x in eqn.invars)
    (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    return left.size * _size(right, (*contracted, *batch))


def _ragged_dot(eqn: Any) -> int:
    left, right = (x.aval for x in eqn.invars[:2])
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    # Each row meets the matrix of its own group only.
    return left.size * _size(right, (*contracted, *batch, *numbers.rhs_group_dimensions))


def _size(array: Any, without: tuple[int, ...]) -> int:
    return math.prod(size for dim, size in enumerate(array.shape) if dim not in without)


def _convolution(eqn: Any) -> int:
    params, (image, kernel), out = eqn.params, (x.aval for x in eqn.invars), eqn.outvars[0].aval
    numbers = params["dimension_numbers"]
    _, features, *spatial = numbers.rhs_spec
    shapes = (image, numbers.lhs_spec[2:]), (kernel, spatial), (out, numbers.out_spec[2:])
    sizes = zip(*([array.shape[dim] for dim in dims] for array, dims in shapes), strict=True)
    settings = zip(*(params[key] for key in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")), strict=True)
    pairs = math.prod(map(_pairs, sizes, settings))
    rows, channels = (out.shape[dim] for dim in numbers.out_spec[:2])
    return rows * channels * kernel.shape[features] * pairs


def _pairs(sizes: tuple[int, ...], settings: tuple[Any, ...]) -> int:
    """Return how many (output, weight) pairs of a dim meet an entry of the image, not padding or a hole.

    So a convolution's two gradients, convolutions themselves of padded and spread arrays, count as much as it does.
    """
    (size, window, out), (stride, padding, hole, spread) = sizes, settings
    at = np.arange(out)[:, None] * stride + np.arange(window) * spread - padding[0]
    return int(np.count_nonzero((at >= 0) & (at <= (size - 1) * hole) & (at % hole == 0)))


_PRODUCTS = {"dot_general": _dot, "ragged_dot_general": _ragged_dot, "conv_general_dilated": _convolution}


_KINDS = ("all-gather", "all-reduce", "all-to-all", "ragged-all-to-all", "reduce-scatter")
_KINDS += ("collective-broadcast", "collective-permute")
_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")
# Its name, the type of its result, the opcode, and the rest.
_INSTRUCTION = re.compile(r"%?([\w.-]+) = (.*?) ([a-z][\w.-]*)\((.*)")
_TARGETS = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(?:\{([^}]*)\}|%?([\w.-]+))")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_PARTS = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([^\]]*)\]")


@dataclass(frozen=True)
class Collective:
    """One kind of collective in a program."""

    # "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all" or
    # "reduce-scatter"
    kind: str
    calls: int  # how many of them one call of the program runs; those in loops count by the loops' turns
    # of the results of all of them on one device: of an all-gather the entire array, of a reduce-scatter a device's
    # part
    bytes: int
    exact: bool = True  # whether there are no more: a loop whose turns are known only while it runs counts as one turn
    # bytes that a device sends at least, around a ring of its group, by the span of the group: how far apart its
    # devices are in the program's order, both ends counted. A span of more devices than a node has crosses nodes
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
        # A collective that is started and waited for apart counts where it is done, since only its done returns arrays.
        if (kind := opcode.removesuffix("-done")) in _KINDS:
            start = starts.get(rest.partition(")")[0].rpartition("%")[2], "") if opcode != kind else ""
            return (_collective(kind, _bytes(result), start or rest, devices),)
        if opcode.endswith(("-done", "-update")):  # its start has run the computation
            return ()
        targets = [name for names, name_alone in _TARGETS.findall(rest) for name in (names or name_alone).split(",")]
        inside = [of(name.strip().lstrip("%")) for name in targets]
        if opcode == "conditional":  # one branch runs
            return max(inside, key=lambda branch: sum(x.bytes for x in branch), default=())
        inner = _added(x for each in inside for x in each)
        if opcode != "while":
            return inner
        if turns := _TURNS.search(rest):
            return (x * int(turns[1]) for x in inner)
        return (replace(x, exact=False) for x in inner)

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


_LISTED = re.compile(r"\breplica_groups=\{\{(.*?)\}\}|\bsource_target_pairs=\{\{(.*?)\}\}")
_COUNTED = re.compile(r"\breplica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_OF_MESH = re.compile(r"\breplica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+))?")
_AXIS = re.compile(r"'([^']*)'(?:=(\d+))?")


def groups_of(text: str, devices: int) -> list[list[int]]:
    """Return the positions of the devices of each group, in the order of the program's devices.

    XLA writes groups in three ways: listed, `{{0,1},{2,3}}`, also the pairs of a permutation; as a reshaped and
    transposed range, `[2,4]<=[4,2]T(1,0)`; and as axes of a mesh, `mesh['a'=2,'b'=4] {'b'}`,
    which may have its devices in another order, `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`.

    Args:
        text: The attributes of an instruction.
        devices: How many devices there are; all are one group where none is named.

    Example:
        >>> groups_of("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
        [[0, 2], [1, 3]]
    """
    if listed := _LISTED.search(text):
        return list(map(_ints, (listed[1] or listed[2]).split("},{")))
    if counted := _COUNTED.search(text):
        count, size, *iota = counted.groups()
        return _iota(*iota).reshape(int(count), int(size)).tolist()
    if (of_mesh := _OF_MESH.search(text)) is None:
        return [list(range(devices))]
    axes, device_ids, group_axes = of_mesh.groups()
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    grouped = [name for name, _ in _AXIS.findall(group_axes)]
    if device_ids is None:  # the mesh has the devices in the program's order
        ids = np.arange(math.prod(sizes.values()))
    else:
        iota = _IOTA.match(device_ids)
        ids = _iota(*iota.groups()) if iota else np.array(_ints(device_ids))
    order = sorted(range(len(sizes)), key=lambda i: [*sizes][i] in grouped)
    ids = ids.reshape([*sizes.values()]).transpose(order)
    return ids.reshape(-1, math.prod(sizes[name] for name in grouped)).tolist()


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Return a range in these dims, transposed, as a list."""
    shape = _ints(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(_ints(order)) if order else ids).ravel()


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


@dataclass(frozen=True)
class Memory:
    """Bytes of a program on one device, by kind."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int  # the part of the outputs that takes the place of arguments
    exact: bool = True  # False where there may be more temporaries: a step that runs in parts does not count theirs


@dataclass(frozen=True)
class ProgramCost:
    """The cost of one call of a compiled program; None for what its strategy or its platform does not report."""

    name: str
    flops: Flops | None = None  # of its matrix products and convolutions, on all devices together
    memory: Memory | None = None  # on one device
    collectives: tuple[Collective, ...] | None = None  # what the devices send each other, by kind


def trace(program: Callable[..., Any], *args: Any) -> Traced | None:
    """Return the trace of a compiled function, or None if it has no `trace` as functions of `jax.jit` have."""
    return program.trace(*args) if hasattr(program, "trace") else None  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Hardware:
    """What one jax device can do at most, in bytes, seconds and operations; None where its maker gives no number.

    Attributes:
        half: Operations a second in dense products of 16-bit operands.
        fast: The same of float32 that may be rounded to fewer bits: TF32 on NVIDIA's, bfloat16 on Google's.
        full: The same of float32.
        memory: Bytes of its memory.
        bandwidth: Bytes a second that its memory reads or writes.
        link: Bytes a second that it sends to the other devices of its node, or slice.
        node: How many devices a node has.
        network: Bytes a second that it sends to devices of other nodes.

    Example:
        >>> import jaxlit as jl
        >>> mine = jl.Hardware(half=100e12, fast=50e12, full=25e12, memory=48e9, bandwidth=900e9, link=32e9, node=4)
    """

    half: float | None
    fast: float | None
    full: float | None
    memory: float | None = None
    bandwidth: float | None = None
    link: float | None = None
    node: int = 8
    network: float = 12.5e9


def _row(
    half: float, fast: float, full: float | None, *figures: float, node: int = 8, network: float = 12.5
) -> Hardware:
    """Return a row, given 10^12 operations, 10^9 bytes and 10^9 bytes a second."""
    full = None if full is None else full * 1e12
    return Hardware(half * 1e12, fast * 1e12, full, *(x * 1e9 for x in figures), node=node, network=network * 1e9)


# Operations: the data sheets of NVIDIA, without sparsity, and the documentation of Cloud TPU. Then the memory, its
# bandwidth, and what a device sends to its node: half of the data sheet's NVLink or PCIe, which counts both directions,
# and Google's bandwidth between chips; to other nodes what NVIDIA's DGX of that device has for each, 100 Gbit/s where
# there is none. The first name that a device's kind begins with counts, so a longer one comes before a shorter; where
# a name is of two sizes of memory, the smaller counts. A chip of TPU v2 and v3 is two devices.
HARDWARE = {
    "NVIDIA B200": _row(2250, 1125, 75, 180, 7700, 900, network=50),
    "NVIDIA GH200": _row(989, 494, 67, 96, 4000, 450, node=1, network=50),
    "NVIDIA H200 NVL": _row(835, 417, 60, 141, 4800, 450, node=4),
    "NVIDIA H200": _row(989, 494, 67, 141, 4800, 450, network=50),
    "NVIDIA H100 NVL": _row(835, 417, 60, 94, 3900, 300, node=2),
    "NVIDIA H100 PCIe": _row(756, 378, 51, 80, 2000, 300, node=2),
    "NVIDIA H100": _row(989, 494, 67, 80, 3350, 450, network=50),
    "NVIDIA A100-SXM4-80GB": _row(312, 156, 19.5, 80, 2039, 300, network=25),
    "NVIDIA A100": _row(312, 156, 19.5, 40, 1555, 300, network=25),
    "NVIDIA A40": _row(149.7, 74.8, 37.4, 48, 696, 56, node=2),
    "NVIDIA A10G": _row(70, 35, 31.5, 24, 600, 32),
    "NVIDIA A10": _row(125, 62.5, 31.2, 24, 600, 32),
    "NVIDIA L40S": _row(362, 183, 91.6, 48, 864, 32),
    "NVIDIA L40": _row(181, 90.5, 90.5, 48, 864, 32),
    "NVIDIA L4": _row(121, 60, 30.3, 24, 300, 32),
    "Tesla V100-SXM": _row(125, 15.7, 15.7, 16, 900, 150),
    "Tesla V100-PCIE": _row(112, 14, 14, 16, 900, 16),
    "Tesla T4": _row(65, 8.1, 8.1, 16, 320, 16),
    "TPU v6 lite": _row(918, 918, None, 32, 1640, 448, node=256),
    "TPU v5 lite": _row(197, 197, None, 16, 819, 200, node=256),
    "TPU v5": _row(459, 459, None, 95, 2765, 600, node=8960),
    "TPU v4 lite": _row(138, 138, None, 8, 614, 100, node=8),
    "TPU v4": _row(275, 275, None, 32, 1228, 300, node=4096),
    "TPU v3": _row(61.5, 61.5, None, 16, 450, 164, node=2048),
    "TPU v2": _row(23, 23, None, 8, 350, 124, node=512),
}

GPUS = [row for name, row in HARDWARE.items() if not name.startswith("TPU")]

_FIELDS = {"bfloat16": "half", "float16": "half", "float32 fast": "fast", "float32": "full"}


def hardware_of(kind: str) -> Hardware | None:
    """Return what a device can do, given `device.device_kind`; None if it is not in the table."""
    return next((row for name, row in HARDWARE.items() if kind.startswith(name)), None)


def resolve_hardware(hardware: str | Hardware) -> Hardware:
    """Return a row of the table by its name, or a row of the user's."""
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        raise ArgumentTypeError(f"hardware takes a name such as 'NVIDIA H100' or a jl.Hardware, got {shown(hardware)}.")
    if (row := hardware_of(hardware)) is None:
        hint = f"{did_you_mean(hardware, HARDWARE)} Known: {', '.join(HARDWARE)}."
        raise ArgumentError(f"Unknown hardware {hardware!r}.{hint} Or pass a jl.Hardware.")
    return row


def peak_flops(kind: str, dtype: str) -> float | None:
    """Return the most operations a second of one device, None if it is not known.

    Args:
        kind: `device.device_kind`.
        dtype: What is multiplied, as `Flops.by_dtype` names it.

    Example:
        >>> peak_flops("NVIDIA H200", "bfloat16") / 1e12
        989.0
        >>> peak_flops("cpu", "bfloat16") is None
        True
    """
    if dtype == "bfloat16" and kind.startswith("Tesla"):  # their fast products are of float16 only
        return None
    row = hardware_of(kind)
    return None if row is None else peak_of(row, dtype)


def peak_of(row: Hardware, dtype: str) -> float | None:
    """Return the most operations a second of products of a dtype, as `Flops.by_dtype` names it."""
    return getattr(row, _FIELDS[dtype]) if dtype in _FIELDS else None
