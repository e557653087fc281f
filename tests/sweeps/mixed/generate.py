"""Cases drawn by hypothesis."""

from typing import Any

from hypothesis import assume
from hypothesis import strategies as st
from sweeps.mixed.case import (
    COUNTERS,
    EVALUATING,
    GLOBAL,
    LAYERS,
    OPTIMIZERS,
    RANDOM,
    SCHEDULED,
    STRATEGIES,
    TARGETS,
    Case,
    is_sound,
)


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
    result = ["all", "all", "head", "no_bias"]
    result += ["lora"] * 3 * bool({*parts} & {"lora", "lora_around"})
    result += ["online"] * 3 * bool({*parts} & {"hard_target", "soft_target"})
    return pick(*result)
