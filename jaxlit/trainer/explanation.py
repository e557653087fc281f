"""Where the time of a run went, how its state is sharded, and what its programs cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from jaxlit.engine.engine import Engine
from jaxlit.errors import ArgumentError
from jaxlit.loop.run import Run
from jaxlit.programs.costs import Collective, Flops, ProgramCost
from jaxlit.reporting.terminal import bytes_of, bytes_per_device, devices_of, partition
from jaxlit.sharding import out_of_meshes
from jaxlit.texts import count, duration, size, table
from jaxlit.trainer.defaults import state_rows


@dataclass(frozen=True)
class LoopPart:
    """The seconds of a run that one thing took; those of all parts sum to the run's.

    `name` is "start" (loaders are opened, the state is created), "compile" (of steps, tracing included), "batches"
    (waiting for the loader), "steps" (placing batches, dispatching steps, and the loop's own Python), "device" (waiting
    until steps are done), "evaluation", "hooks" or "end".
    """

    name: str
    seconds: float


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
        compile_seconds: Seconds of compiling by step, as jax reports them; in "compile" of the loop, or in a hook.
        loop: Where these seconds went, the longest first.
        shardings: How the state is sharded: a part for each parameter, or for as many together as
            `ModelSummary(max_depth=...)` shows, then the rest and all of it.
        programs: What a call of each compiled program that ran costs, with a batch like the first one that it was
            given: `name`, `flops`, `memory` and `collectives`.
    """

    hooks: Sequence[HookTime]
    seconds: float
    compile_seconds: dict[str, float]
    loop: tuple[LoopPart, ...] = ()
    shardings: tuple[StatePart, ...] = ()
    programs: tuple[ProgramCost, ...] = ()

    def __str__(self) -> str:
        each = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in self.compile_seconds.items())
        loop, *other_tables = _tables(self)
        blocks = [[f"The run took {self.seconds:.3g} s."], loop, [f"Compiling: {each}."] if each else [], *other_tables]
        return "\n\n".join("\n".join(block) for block in blocks if block)

    __repr__ = __str__


@out_of_meshes
def explain(run: Run | None, compiles: Mapping[str, float]) -> Explanation:
    """Return where the time of a run went, how its state is sharded, and what its programs cost."""
    if run is None:
        raise ArgumentError("Trainer.explain has nothing to show. Call it after fit, or from on_fit_start on.")
    spent = [(f.owner, hook, f.calls, f.seconds, f.longest) for hook, f in run.hooks.functions() if f.calls]
    hooks = sorted((HookTime(*x) for x in spent), key=lambda hook: -hook.seconds)
    run.begin(run.part)  # until now
    whole = run.times.seconds
    parts = run.spent | {"batches": run.prefetcher.seconds, "device": run.in_flight.seconds}
    parts["hooks"] = sum(hook.seconds for hook in hooks)
    loop = tuple(LoopPart(*x) for x in sorted(parts.items(), key=lambda part: -part[1]) if x[1])
    seconds = dict(compiles)  # before programs that jax has forgotten meanwhile are compiled again
    programs = tuple(program.cost for program in run.engine.programs)
    return Explanation(hooks, whole, seconds, loop, _parts(run, run.engine), programs)


@out_of_meshes
def step_flops(run: Run | None) -> dict[str, Flops]:
    """Return the operations of each step that a run has taken, by its name; of several loaders' the first one's."""
    if run is None:
        return {}
    counted = {
        program.name: program.flops // program.steps for program in reversed(run.engine.programs) if program.flops
    }
    if (fused := counted.pop("train_steps", None)) is not None:  # a step of a dispatch is a step
        counted.setdefault("train_step", fused)
    return counted


def _parts(run: Run, engine: Engine) -> tuple[StatePart, ...]:
    if any(x is None for x in engine.state.leaves):  # as after a restore that failed
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
    loop = [(part.name, duration(part.seconds), f"{part.seconds / x.seconds:.1%}") for part in x.loop]
    states = [(s.name, s.partition, size(s.bytes), size(s.bytes_per_device)) for s in x.shardings]
    programs = list[Sequence[str]]()
    collectives = list[Sequence[str]]()
    for program in x.programs:
        memory = ["-" if program.memory is None else size(getattr(program.memory, column)) for column in columns]
        flops = "-" if program.flops is None else _least(program.flops, count(program.flops.count))
        programs.append((program.name, flops, *memory))
        none = ("-",) * 3 if program.collectives is None else ("none", "0", "0 B")
        sent = [(c.kind, _least(c, f"{c.calls:,}"), _least(c, size(c.bytes))) for c in program.collectives or ()]
        collectives += [(program.name, *cells) for cells in sent or [none]]
    tables = [
        table([("part", "total", "share"), *loop]),
        table([("owner", "hook", "calls", "total", "mean", "longest"), *hooks], texts=2),
        table([("state", "partition", "global", "per device"), *states], texts=2),
        table([("program", "FLOP", *columns), *programs]),
        table([("program", "collective", "calls", "result bytes"), *collectives], texts=2),
    ]
    return [lines if len(lines) > 1 else [] for lines in tables]


def _least(count: Flops | Collective, text: str) -> str:
    return text if count.exact else f">= {text}"
