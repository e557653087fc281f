"""What training takes under several strategies and on several numbers of devices: memory, traffic and time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxlit import checks as check
from jaxlit.programs.hardware import GPUS, Hardware, peak_of
from jaxlit.table import count, duration, size, table
from jaxlit.trainer.step_cost import StepCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("parameters", "optimizer", "gradients", "temporaries", "batch", "other")
_TAKEN = 0.75  # of a GPU's memory, which is jax's default


@dataclass(frozen=True)
class PlanRow:
    """A training step under one strategy on one number of devices.

    Attributes:
        strategy: The strategy.
        devices: How many devices.
        batch_size: Rows of a batch, of all devices together.
        hardware: What one of them can do; None if it is not known.
        cost: What the step takes; None if the strategy refuses the model or the devices.
        error: Why, in that case.
    """

    strategy: str
    devices: int
    batch_size: int
    hardware: Hardware | None
    cost: StepCost | None
    error: str = ""

    @cached_property
    def bytes(self) -> dict[str, int]:
        """Bytes by kind on the device that holds the most: what they sum to is its use of memory.

        Gradients are what the compiled step keeps of them at the same time as its temporaries, at most all, and the
        window of `accumulate_grad_batches`.
        """
        if (cost := self.cost) is None:
            return {}
        gradients = min(cost.gradients, cost.temporaries)
        held = {"parameters": cost.parameters, "optimizer": cost.optimizer, "gradients": cost.window + gradients}
        return held | {
            "temporaries": cost.temporaries - gradients,
            "batch": cost.batch,
            "other": cost.other + cost.made,
        }

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return 0 if self.cost is None else self.cost.total

    @property
    def bound(self) -> str:
        """Whether a device uses at most ("<=") or at least (">=") the total, or the total itself ("").

        It is an upper bound where the step was compiled for CPUs in place of the hardware, and a lower bound for a
        pipeline, whose programs' own temporaries are not counted.
        """
        if self.cost is None or self.cost.memory is None or not self.cost.memory.exact:
            return ">="
        return "<=" if self.cost.device == "cpu" else ""

    @property
    def note(self) -> str:
        """What a run does with rows that do not divide among the devices; "" if they divide."""
        if self.cost is None or not (parts := self.cost.undivided):
            return ""
        work = "holds and computes" if self.cost.per_replica else "holds"
        return (
            f"{self.batch_size:,} rows do not divide into {parts} equal parts. Nothing is padded or dropped: every "
            f"device {work} all {self.batch_size:,}."
        )

    @property
    def left(self) -> int | None:
        """Bytes of a device's memory that are left, negative if it does not fit; None if its size is not known."""
        if self.cost is None or self.hardware is None or self.hardware.memory is None:
            return None
        return int(self.hardware.memory) - self.total

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if the size of the memory is not known."""
        return None if self.left is None else self.left >= 0

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds that a step spends on products ("compute"), on its memory and on the network, at the hardware's peak.

        Roofline (Williams et al., 2009): operations over their peak, the bytes of arguments, results and temporaries,
        each moved once, over the memory's bandwidth, and the bytes sent over that of the links. The first two are lower
        bounds. So is the third, unless the step was compiled for CPUs: these reduce where accelerators reduce and
        scatter, and send 16-bit numbers as 32 bits, up to four times the bytes.
        """
        cost = self.cost
        row = self.hardware
        if cost is None or row is None:
            return {}
        seconds: dict[str, float] = {}
        if cost.flops is not None:
            peaks = {dtype: peak_of(row, dtype) or row.fast or row.half for dtype in cost.flops.by_dtype}
            times = [n / peaks[dtype] for dtype, n in cost.flops.by_dtype.items() if peaks[dtype]]  # type: ignore[operator]
            seconds["compute"] = sum(times) / cost.devices
        if cost.memory is not None and row.bandwidth is not None:
            moved = cost.memory.arguments + cost.memory.outputs + 2 * cost.memory.temporaries
            seconds["memory"] = moved / row.bandwidth
        if cost.collectives is not None and row.link is not None:
            pairs = [pair for x in cost.collectives for pair in x.sent_by_span.items()]
            seconds["network"] = sum(sent / (row.link if span <= row.node else row.network) for span, sent in pairs)
        return seconds

    @property
    def step_seconds(self) -> tuple[float, float] | None:
        """Seconds of a step if everything overlaps, from and to; both the same unless it was compiled for CPUs."""
        if not self.seconds:
            return None
        longest = max(self.seconds.values())
        sure = [seconds for name, seconds in self.seconds.items() if name != "network" or self.bound != "<="]
        return max(sure, default=longest), longest

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        cost = self.cost
        flops = None if cost is None or cost.flops is None else cost.flops.count
        collectives = () if cost is None or cost.collectives is None else cost.collectives
        sent = {x.kind: {"calls": x.calls, "bytes": x.bytes, "sent": x.sent} for x in collectives}
        row: dict[str, Any] = {name: getattr(self, name) for name in ("strategy", "devices", "batch_size")}
        row |= {kind: self.bytes.get(kind) for kind in KINDS} | {
            "total": self.total if self.bytes else None,
            "bound": self.bound,
        }
        row |= {"fits": self.fits, "left": self.left, "flops": flops, "collectives": sent}
        row |= {f"{name}_seconds": self.seconds.get(name) for name in ("compute", "memory", "network")}
        return row | {"step_seconds": self.step_seconds, "note": self.note or None, "error": self.error or None}


@dataclass(frozen=True)
class Plan:
    """What `Trainer.plan` returns; printed, it is a table.

    Attributes:
        plans: The rows, in the order in which strategies and devices were given.
    """

    plans: tuple[PlanRow, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Return each row as a dict of plain values, bytes and seconds."""
        return [row.as_dict() for row in self.plans]

    @property
    def best(self) -> PlanRow | None:
        """The first row that fits; None if none is known to fit."""
        return next((row for row in self.plans if row.fits), None)

    def __str__(self) -> str:
        known = [row for row in self.plans if row.cost is not None]
        blocks = [_table(known), _collectives(known), _notes(self.plans)]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    __repr__ = __str__

    def plot(self) -> "Figure":
        """Draw the bytes of a device, stacked by kind, for each strategy and number of devices.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            LoggerError: matplotlib is not installed.
        """
        matplotlib = check.import_package("matplotlib.figure", owner="Plan.plot", install="matplotlib")
        known = [row for row in self.plans if row.cost is not None]
        figure = matplotlib.Figure(layout="constrained", figsize=(1.5 + max(len(known), 3), 4))
        axes = figure.add_subplot(ylabel="GiB per device")
        places = range(len(known))
        bottom = [0.0] * len(known)
        for kind in KINDS:
            heights = [row.bytes[kind] / 2**30 for row in known]
            axes.bar(places, heights, bottom=bottom, label=kind)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        for memory in {row.hardware.memory for row in known if row.hardware is not None and row.hardware.memory}:
            axes.axhline(memory / 2**30, color="black", linestyle="--", linewidth=1)
        axes.set_xticks(places, [f"{row.strategy}\n{row.devices}" for row in known])
        axes.legend()
        return figure


def _table(rows: Sequence[PlanRow]) -> list[str]:
    head = ("strategy", "devices", "rows", *KINDS, "total", "left", "FLOP", "step")
    lines: list[Sequence[str]] = []
    for row in rows:
        held = [size(row.bytes[kind]) for kind in KINDS]
        left = "-" if row.left is None else size(row.left) if row.left >= 0 else f"-{size(-row.left)}"
        flops = "-" if row.cost is None or row.cost.flops is None else count(row.cost.flops.count)
        time = "-"
        if row.step_seconds is not None:
            time = " to ".join(dict.fromkeys(map(duration, row.step_seconds)))
            time += f" ({max(row.seconds, key=lambda name: row.seconds[name])})"
        total = f"{row.bound} {size(row.total)}".strip()
        lines.append((row.strategy, str(row.devices), f"{row.batch_size:,}", *held, total, left, flops, time))
    return table([head, *lines]) if lines else []


def _collectives(rows: Sequence[PlanRow]) -> list[str]:
    lines = [
        (row.strategy, str(row.devices), x.kind, f"{x.calls:,}", size(x.bytes), size(x.sent))
        for row in rows
        for x in (row.cost.collectives or () if row.cost is not None else ())
    ]
    head = ("strategy", "devices", "collective", "calls", "result bytes", "sent by a device")
    return table([head, *lines], texts=3) if lines else []


def _notes(rows: Sequence[PlanRow]) -> list[str]:
    texts = [(row, text) for row in rows if (text := row.error or row.note)]
    notes = [f"{row.strategy} on {row.devices} device{'s' * (row.devices != 1)}: {text}" for row, text in texts]
    bounds = {row.bound for row in rows if row.cost is not None}
    if "<=" in bounds:
        notes.append(
            "<=: compiled for CPUs, whose compiler fuses less, reduces where others reduce and scatter, and sends "
            "16-bit numbers as 32 bits: temporaries and traffic are upper bounds. All other bytes are exact."
        )
    if ">=" in bounds:
        notes.append(
            ">=: the step runs in parts: temporaries are the gradients' sums and what microbatches keep, without those "
            "within a part."
        )
    free_memory = [(row.left, row.hardware) for row in rows if row.fits and row.hardware in GPUS]
    if any(x is not None and x < (1 - _TAKEN) * (gpu.memory or 0) for x, gpu in free_memory if gpu is not None):
        notes.append(
            f"jax takes {_TAKEN:.0%} of a GPU's memory. For more, set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the "
            "environment of the run."
        )
    if all(row.hardware is None for row in rows):
        notes.append(
            "Pass hardware= (in a shell --hardware), for example 'NVIDIA H100', to see what fits and how long a step "
            "takes."
        )
    return notes
