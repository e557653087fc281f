"""Cases drawn by hypothesis, and the mix of them in which everything meets everything."""

import itertools
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from sweeps.mixed.case import (
    COUNTERS,
    DEVICES,
    EVALUATING,
    GLOBAL,
    LAYERS,
    OPTIMIZERS,
    RANDOM,
    SCHEDULED,
    STRATEGIES,
    TARGETS,
    Case,
    features,
    is_sound,
)

AHEAD = 250  # cases that are looked at for each one that is taken

# What makes no sense without another.
TOGETHER = {"loss_reduction": ("loss",), "schedule": ("optimizer",), "wrt": ("parts",), "val_every": ("val", "sizes")}
TOGETHER |= {"cut": ("sizes", "epochs"), "resume_on": ("cut", "sizes", "epochs"), "limit": ("sizes",)}


@st.composite
def cases(draw: Any) -> Case:
    """Draw a case whose numbers are promised."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    strategy = pick(*STRATEGIES)
    devices = 1 if strategy == "single" else pick(2, 2, 3, 8, 8, 1)
    alone = strategy in GLOBAL or devices == 1
    base = pick(8, 6) if devices == 3 else 8
    tail = draw(st.sampled_from([(), (), (5,), (3, base)]))
    parts = _draw_parts(pick)
    loss = pick("mean", "mean", "sum", "masked_mean" if alone else "mean")
    optimizer = pick(*OPTIMIZERS)
    sizes = (*([base] * pick(1, 2, 3)), *tail)
    plan = pick("", "", "", "again", "cut", "cut elsewhere")
    case = Case(
        parts=parts,
        loss=loss,
        mask=pick("full", "some", "half"),
        wrt=_draw_wrt(pick, parts),
        optimizer=optimizer,
        schedule=pick("", "by_step", "by_epoch") if optimizer in SCHEDULED else "",
        sizes=sizes,
        epochs=pick(1, 2) if len(sizes) < 4 else 1,
        limit=pick(0, 0, max(1, len(sizes) - 1)),
        accumulate=pick(1, 1, 2, 3),
        clip=pick("", "", "norm", "value"),
        precision=pick("32-true", "32-true", "32-true", "bf16-mixed"),
        nested=pick(False, False, True),
        strategy=strategy,
        devices=devices,
    )
    changes: dict[str, Any] = {}
    if val := pick((), ((8,),), ((8, 5),), ((8,), (5,))):
        changes |= {"val": val, "val_every": pick(0, draw(st.integers(1, case.num_batches)))}
    steps = case.epochs * case.steps_per_epoch
    if plan == "again":
        changes["again"] = pick(*STRATEGIES)
    elif plan and steps > 1:
        changes |= {"cut": draw(st.integers(1, steps - 1)), "resume_on": pick(*STRATEGIES) if "else" in plan else ""}
    if not alone and loss == "sum":
        changes["loss_reduction"] = pick("", "sum")
    case = Case(**{**vars(case), **changes})
    assume(is_sound(case))
    return case


def _draw_parts(pick: Any) -> tuple[str, ...]:
    layer = pick(*LAYERS, *RANDOM, *TARGETS, *EVALUATING, "copied", "centred")
    others = pick((), (pick(*LAYERS),), (pick(*COUNTERS),), (pick(*COUNTERS), pick(*RANDOM, *EVALUATING)))
    return tuple(dict.fromkeys((layer, *others)))


def _draw_wrt(pick: Any, parts: tuple[str, ...]) -> str:
    found = ["all", "all", "head", "no_bias"]
    found += ["lora"] * 3 * bool({*parts} & {"lora", "lora_around"})
    found += ["online"] * 3 * bool({*parts} & {"hard_target", "soft_target"})
    return pick(*found)


def mix(count: int, number: int) -> list[Case]:
    """Return `count` cases in which as many pairs of features as possible occur, the same for each seed."""
    drawn: dict[Case, None] = {}

    @seed(number)
    @settings(
        database=None,
        deadline=None,
        max_examples=12 * count,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def collect(case: Case) -> None:
        drawn[case] = None

    collect()
    left, seen, times, taken = list(drawn), set(), {}, []

    def gain(case: Case) -> float:
        found = features(case)
        new = sum(pair not in seen for pair in itertools.combinations(found, 2))
        return new / (1 + len(case.parts)) + sum(8 / (1 + times.get(f, 0)) for f in found)

    while left and len(taken) < count:
        best = max(left[:AHEAD], key=gain)
        left.remove(best)
        taken.append(best)
        found = features(best)
        seen.update(itertools.combinations(found, 2))
        for feature in found:
            times[feature] = times.get(feature, 0) + 1
    return taken


def smaller(case: Case) -> Iterator[Case]:
    """Yield sound cases that are simpler: first those that keep one thing, or two, then those that lose one."""
    given = [name for name, value in vars(case).items() if value != getattr(Case(), name)]
    where = {name: getattr(case, name) for name in ("strategy", "devices")}
    leaps = []
    for count in (1, 2):
        for kept in itertools.combinations([name for name in given if name not in where], count):
            names = {*kept, *(other for name in kept for other in TOGETHER.get(name, ()))}
            leaps.append({**where, **{name: getattr(case, name) for name in names}})
    # Most failures are of a part or the loss, under a strategy.
    leaps.sort(key=lambda kept: (len(kept), "parts" not in kept, "loss" not in kept))
    steps = [{**vars(case), name: value} for name in vars(case) for value in _simpler(name, getattr(case, name))]
    steps = [changes | ({"devices": 1} if changes["strategy"] == "single" else {}) for changes in steps]
    for changes in [*leaps[:14], *steps]:
        changed = Case(**changes)
        if changed != case and is_sound(changed):
            yield changed


def _simpler(name: str, value: Any) -> list[Any]:
    default = getattr(Case(), name)
    if value == default:
        return []
    if name == "parts":
        fewer = [*((part,) for part in value), *itertools.combinations(value, len(value) - 1)] if len(value) > 1 else []
        return [*fewer, default]
    if name == "devices":
        return [n for n in DEVICES if n < value]
    if name == "strategy":
        order = [s for s in ("single", "ddp", "shard_map", "simulate") if (s in GLOBAL) >= (value in GLOBAL)]
        return order[: order.index(value)] if value in order else order
    others = {"sizes": [(8,), value[:-1], value[1:]], "val": [((8,),), value[:1]]} if name in ("sizes", "val") else {}
    return [default, *(x for x in others.get(name, []) if x)]
