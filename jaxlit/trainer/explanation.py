"""Where the time of a run went, by callback and hook."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jaxlit.errors import ArgumentError
from jaxlit.loop.run import Run


@dataclass(frozen=True)
class HookTime:
    """How long one owner's hook kept the loop waiting, without hooks that ran inside it."""

    owner: str  # the callback's class, the module's or the DataModule's; "Class:1" for the second of a class
    hook: str
    calls: int
    seconds: float  # of all calls
    longest: float  # seconds of the longest call


@dataclass(frozen=True)
class Explanation:
    """What `Trainer.explain` returns; printed, it is a table.

    Attributes:
        hooks: Each owner's hooks that ran, the longest first.
        seconds: How long the run took, or has taken so far.
        compile_seconds: Seconds of compiling by step; part of the rest.
    """

    hooks: Sequence[HookTime]
    seconds: float
    compile_seconds: dict[str, float]

    def __str__(self) -> str:
        blocked = sum(hook.seconds for hook in self.hooks)
        share = blocked / self.seconds if self.seconds else 0.0
        lines = [f"Callbacks and hooks took {blocked:.3g} s of {self.seconds:.3g} s ({share:.1%})."]
        if self.compile_seconds:
            each = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in self.compile_seconds.items())
            lines.append(f"Compiling: {each}.")
        rows = [("owner", "hook", "calls", "total", "mean", "longest")]
        rows += [
            (x.owner, x.hook, f"{x.calls:,}", *map(_time, (x.seconds, x.seconds / x.calls, x.longest)))
            for x in self.hooks
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [
                cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    __repr__ = __str__


def explain(run: Run | None) -> Explanation:
    """Return where the time of a run went.

    Raises:
        ArgumentError: There was none.
    """
    if run is None:
        raise ArgumentError("Trainer.explain has nothing to tell. Call it after fit, or from a hook.")
    spent, seen = [], Counter[tuple[str, str]]()
    for hook, f in run.hooks.functions():
        # Several of one class are told apart by their order.
        number, seen[f.owner, hook] = seen[f.owner, hook], seen[f.owner, hook] + 1
        if f.calls:
            owner = f"{f.owner}:{number}" if number else f.owner
            spent.append(HookTime(owner, hook, f.calls, f.seconds, f.longest))
    spent.sort(key=lambda hook: -hook.seconds)
    return Explanation(spent, run.seconds, dict(run.compiles.seconds))


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
