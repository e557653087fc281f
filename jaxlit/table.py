"""Tables of plain text, and short forms of large numbers."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Return the lines of a table with aligned columns.

    Args:
        rows: The cells of each row, the head first.
        texts: How many columns, from the left, are text and aligned to the left; the others are numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def size(num_bytes: float) -> str:
    """Return a number of bytes with its unit."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        num_bytes /= 1024
        if num_bytes < 1024 or unit == "TiB":
            break
    return f"{num_bytes:.{1 if num_bytes < 100 else 0}f} {unit}"


def count(number: float) -> str:
    """Return a number with three digits and a letter for its thousands."""
    for letter in ("", "k", "M", "G", "T", "P"):
        if number < 999.5 or letter == "P":
            break
        number /= 1000
    return f"{number:.3g}{letter}" if number < 999.5 else f"{number:,.0f}{letter}"


def duration(seconds: float) -> str:
    """Return a duration with three digits and its unit."""
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
