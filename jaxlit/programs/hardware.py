"""How fast devices multiply at most, from their makers' data sheets."""

from typing import NamedTuple


class Peak(NamedTuple):
    """Operations a second of one jax device in dense products, in 10^12; None where its maker gives none.

    Attributes:
        half: Of 16-bit operands.
        fast: Of float32 that may be rounded to fewer bits: TF32 on NVIDIA's, bfloat16 on Google's.
        full: Of float32.
    """

    half: float | None
    fast: float | None
    full: float | None


# From the data sheets of NVIDIA, without sparsity, and the documentation of Cloud TPU. The first name that a device's
# kind begins with counts, so a longer one comes before a shorter. A chip of TPU v2 and v3 is two devices.
PEAKS = {
    "NVIDIA B200": Peak(2250, 1125, 75),
    "NVIDIA GH200": Peak(989, 494, 67),
    "NVIDIA H200 NVL": Peak(835, 417, 60),
    "NVIDIA H200": Peak(989, 494, 67),
    "NVIDIA H100 NVL": Peak(835, 417, 60),
    "NVIDIA H100 PCIe": Peak(756, 378, 51),
    "NVIDIA H100": Peak(989, 494, 67),
    "NVIDIA A100": Peak(312, 156, 19.5),
    "NVIDIA A40": Peak(149.7, 74.8, 37.4),
    "NVIDIA A10G": Peak(70, 35, 31.5),
    "NVIDIA A10": Peak(125, 62.5, 31.2),
    "NVIDIA L40S": Peak(362, 183, 91.6),
    "NVIDIA L40": Peak(181, 90.5, 90.5),
    "NVIDIA L4": Peak(121, 60, 30.3),
    "Tesla V100-SXM": Peak(125, 15.7, 15.7),
    "Tesla V100-PCIE": Peak(112, 14, 14),
    "Tesla T4": Peak(65, 8.1, 8.1),
    "TPU v6 lite": Peak(918, 918, None),
    "TPU v5 lite": Peak(197, 197, None),
    "TPU v5": Peak(459, 459, None),
    "TPU v4 lite": Peak(138, 138, None),
    "TPU v4": Peak(275, 275, None),
    "TPU v3": Peak(61.5, 61.5, None),
    "TPU v2": Peak(23, 23, None),
}

_COLUMNS = {"bfloat16": 0, "float16": 0, "float32 fast": 1, "float32": 2}


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
    peak = next((peak for name, peak in PEAKS.items() if kind.startswith(name)), (None,) * 3)
    operations = peak[_COLUMNS[dtype]] if dtype in _COLUMNS else None
    return operations and operations * 1e12
