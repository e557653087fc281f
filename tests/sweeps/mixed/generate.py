"""Cases drawn by hypothesis."""

from typing import Any

from hypothesis import assume
from hypothesis import strategies as st
from sweeps.mixed import case as c
from sweeps.mixed.case import Case


@st.composite
def cases(draw: Any) -> Case:
    """Draw a case whose numbers are promised."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    strategy = pick(*c.STRATEGIES)
    devices = 1 if strategy == "single" else pick(2, 2, 3, 8, 8, 1)
    alone = strategy in c.GLOBAL or devices == 1
    base = pick(8, 6) if devices == 3 else 8
    layer = pick(*c.LAYERS, *c.RANDOM, *c.TARGETS, *c.EVALUATING, "copied", "centred")
    others = pick((), (pick(*c.LAYERS),), (pick(*c.COUNTERS),), (pick(*c.COUNTERS), pick(*c.RANDOM, *c.EVALUATING)))
    parts = tuple(dict.fromkeys((layer, *others)))
    wrt = ["all", "all", "head", "no_bias", *["lora"] * 3 * bool({*parts} & {"lora", "lora_around"})]
    wrt += ["online"] * 3 * bool({*parts} & {"hard_target", "soft_target"})
    loss = pick("mean", "mean", "sum", "masked_mean" if alone else "mean")
    optimizer = pick(*c.OPTIMIZERS)
    sizes = (*([base] * pick(1, 2, 3)), *pick((), (), (5,), (3, base)))
    plan = pick("", "", "", "again", "cut", "cut elsewhere")
    case = Case(
        parts=parts,
        loss=loss,
        mask=pick("full", "some", "half"),
        wrt=pick(*wrt),
        optimizer=optimizer,
        schedule=pick("", "by_step", "by_epoch") if optimizer in c.SCHEDULED else "",
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
        changes["again"] = pick(*c.STRATEGIES)
    elif plan and steps > 1:
        changes["cut"] = draw(st.integers(1, steps - 1))
        changes["resume_on"] = pick(*c.STRATEGIES) if "else" in plan else ""
    if not alone and loss == "sum":
        changes["loss_reduction"] = pick("", "sum")
    case = Case(**{**vars(case), **changes})
    assume(c.is_sound(case))
    return case
