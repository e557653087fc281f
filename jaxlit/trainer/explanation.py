"""Where the time of a run went, how its state is sharded, and what its programs cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from jaxlit.engine.engine import Engine
from jaxlit.errors import ArgumentError
from jaxlit.loop.run import Run, Setup
from jaxlit.mesh_context import out_of_meshes
from jaxlit.programs.collectives import Collective
from jaxlit.programs.cost import ProgramCost
from jaxlit.programs.flops import Flops
from jaxlit.reporting.placement import bytes_of, bytes_per_device, devices_of, partition
from jaxlit.table import count, duration, size, table
from jaxlit.trainer.defaults import state_rows


@dataclass(frozen=True)
class HookTime:
    """How long one owner's hook kept the loop waiting, without hooks that ran inside it."""

    owner: str  # the callback's class, the module's or the DataModule's
    hook: str
    calls: int
    seconds: float  # of all calls
    longest: float  # seconds of the longest call


@dataclass(frozen=True)
class StatePart:
    """How a part of the training state is sharded."""

    name: str  # a parameter's path; "(optimizer)", "(window)", "(other)" and "(all)" for those together
    partition: str  # "P('fsdp', None)", "replicated", "on cpu:3", or "mixed"
    bytes: int  # of the global arrays
    bytes_per_device: int  # on the device that holds the most of it


@dataclass(frozen=True)
class Explanation:
    """What `Trainer.explain` returns; printed, it is tables.

    Attributes:
        hooks: Each owner's hooks that ran, the longest first.
        seconds: How long the run took, or has taken so far.
        compile_seconds: Seconds of compiling by step; part of the rest.
        shardings: How the state is sharded: a part for each parameter, or for as many together as
            `ModelSummary(max_depth=...)` shows, then the rest and all of it.
        programs: What a call of each compiled program that ran costs, with a batch like the first one that it was
            given: `name`, `flops`, `memory` and `collectives`.
    """

    hooks: Sequence[HookTime]
    seconds: float
    compile_seconds: dict[str, float]
    shardings: tuple[StatePart, ...] = ()
    programs: tuple[ProgramCost, ...] = ()

    def __str__(self) -> str:
        blocked = sum(hook.seconds for hook in self.hooks)
        share = blocked / self.seconds if self.seconds else 0.0
        lines = [f"Callbacks and hooks took {blocked:.3g} s of {self.seconds:.3g} s ({share:.1%})."]
        if self.compile_seconds:
            each = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in self.compile_seconds.items())
            lines.append(f"Compiling: {each}.")
        hooks, *others = _tables(self)
        return "\n\n".join("\n".join(block) for block in ([*lines, *hooks], *others) if len(block) > 1)

    __repr__ = __str__


@out_of_meshes
def explain(run: Setup | None, compiles: Mapping[str, float]) -> Explanation:
    """Return where the time of a run went, how its state is sharded, and what its programs cost.

    Raises:
        ArgumentError: There was none.
    """
    if not isinstance(run, Run):
        raise ArgumentError("Trainer.explain has nothing to show. Call it after fit, or from on_fit_start on.")
    spent = [(f.owner, hook, f.calls, f.seconds, f.longest) for hook, f in run.hooks.functions() if f.calls]
    hooks = sorted((HookTime(*x) for x in spent), key=lambda hook: -hook.seconds)
    seconds = dict(compiles)  # before programs that jax has forgotten meanwhile are compiled again
    programs = tuple(program.cost for program in run.engine.programs)
    return Explanation(hooks, run.times.seconds, seconds, _parts(run, run.engine), programs)


@out_of_meshes
def step_flops(run: Setup | None) -> dict[str, Flops]:
    """Return the operations of each step that a run has taken, by its name; of several loaders' the first one's."""
    if not isinstance(run, Run):
        return {}
    counted = {
        program.name: program.flops // program.steps for program in reversed(run.engine.programs) if program.flops
    }
    if (fused := counted.pop("train_steps", None)) is not None:  # a step of a dispatch is a step
        counted.setdefault("train_step", fused)
    return counted


def _parts(run: Run, engine: Engine) -> tuple[StatePart, ...]:
    if not engine.state.is_restored:
        return ()
    state = engine.state.spec.tree
    rows = state_rows(run.hooks.callbacks, state, run.module, engine.strategy.notes)
    parts = [StatePart(row.path, row.sharding, row.bytes, row.bytes_per_device) for row in rows]
    groups = {
        "(parameters)": () if rows else (state.params, state.frozen),
        "(optimizer)": state.opt_state,
        "(window)": state.window,
        "(other)": (state.model_state, state.counters, state.sums, state.loss_scale, state.extras),
        "(all)": state,
    }
    devices = devices_of(jax.tree.leaves(state))
    for name, tree in groups.items():
        if leaves := jax.tree.leaves(tree):
            parts.append(StatePart(name, partition(leaves, devices), bytes_of(leaves), bytes_per_device(leaves)))
    return tuple(parts)


def _tables(x: Explanation) -> list[list[str]]:
    """Return the lines of each table, the head first."""
    columns = ("arguments", "outputs", "temporaries", "aliased")
    hooks = [
        (h.owner, h.hook, f"{h.calls:,}", *map(duration, (h.seconds, h.seconds / h.calls, h.longest))) for h in x.hooks
    ]
    states = [(s.name, s.partition, size(s.bytes), size(s.bytes_per_device)) for s in x.shardings]
    programs, collectives = list[Sequence[str]](), list[Sequence[str]]()
    for program in x.programs:
        memory = ["-" if program.memory is None else size(getattr(program.memory, column)) for column in columns]
        flops = "-" if program.flops is None else _least(program.flops, count(program.flops.count))
        programs.append((program.name, flops, *memory))
        none = ("-",) * 3 if program.collectives is None else ("none", "0", "0 B")
        sent = [(c.kind, _least(c, f"{c.calls:,}"), _least(c, size(c.bytes))) for c in program.collectives or ()]
        collectives += [(program.name, *cells) for cells in sent or [none]]
    return [
        table([("owner", "hook", "calls", "total", "mean", "longest"), *hooks], texts=2),
        table([("state", "partition", "global", "per device"), *states], texts=2),
        table([("program", "FLOP", *columns), *programs]),
        table([("program", "collective", "calls", "result bytes"), *collectives], texts=2),
    ]


def _least(count: Flops | Collective, text: str) -> str:
    return text if count.exact else f">= {text}"
