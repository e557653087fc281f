"""What devices can do at most, from their makers' data sheets."""

from dataclasses import dataclass

from jaxlit.errors import ArgumentError, ArgumentTypeError, did_you_mean
from jaxlit.shown import shown


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
    half: float | None, fast: float | None, full: float | None, *others: float, node: int = 8, network: float = 12.5
) -> Hardware:
    """Return a row, given 10^12 operations, 10^9 bytes and 10^9 bytes a second."""
    operations = (None if x is None else x * 1e12 for x in (half, fast, full))
    return Hardware(*operations, *(x * 1e9 for x in others), node=node, network=network * 1e9)


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
    """Return a row of the table by its name, or a row of the user's.

    Raises:
        ArgumentError: No device has this name.
        ArgumentTypeError: It is neither.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        raise ArgumentTypeError(f"hardware takes a name such as 'NVIDIA H100' or a jl.Hardware, got {shown(hardware)}.")
    if (row := hardware_of(hardware)) is None:
        names = [*HARDWARE]
        hint = did_you_mean(hardware, names)
        raise ArgumentError(f"Unknown hardware {hardware!r}.{hint} Known: {', '.join(names)}. Or pass a jl.Hardware.")
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
