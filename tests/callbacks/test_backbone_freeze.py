"""A frozen part stays bit by bit, and trains from its epoch on as a loop by hand trains it."""

import itertools
import signal
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import random
from kit.by_hand import GRAPH, assert_same, state_of
from kit.checkpoints import bytes_of
from kit.compiles import compiles
from kit.journal import Rows, at_batch, hooks
from kit.modules import Net, module
from kit.refusals import fit_refuses
from kit.trainers import BARE, STRATEGIES, fit, splitting, thinned

import jaxlit as jl
from jaxlit.callbacks import BackboneFreeze
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError

EPOCHS, BATCHES = 4, random(4)
ADAM = optax.adamw(0.03, weight_decay=0.3)


class Deep(Net):
    """Has batch statistics, moments and a weight decay in what is frozen."""

    def __init__(self) -> None:
        super().__init__(rngs=nnx.Rngs(0))
        kernel = self.inner.kernel[...]
        self.inner.kernel[...] = kernel.at[0, 0].set(-0.0).at[0, 1].set(1e-40)  # what adding zero would change

    def configure_optimizers(self) -> Any:
        return ADAM


def by_hand(
    parts: dict[str, tuple[int, Any]], batches: Any = BATCHES, window: int = 1, clip: float | None = None
) -> Any:
    """Train a `Deep` by nnx and optax: each part from its epoch on, by an optimizer that is made there.

    Args:
        parts: By the attribute, the first epoch and the optimizer.
        batches: Those of each epoch; one that is not finite is left out.
        window: Batches of a step.
        clip: The largest norm of all gradients that are used.
    """
    model, states, (kept, tree) = Deep(), dict[str, Any](), jax.tree.flatten(nnx.state(Deep(), nnx.Param))
    gradient = nnx.jit(nnx.value_and_grad(lambda model, batch: model.loss(batch), **GRAPH), **GRAPH)
    part_of = lambda name: next((part for part in parts if name.startswith(f"['{part}']")), "")  # noqa: E731
    for epoch, i in itertools.product(range(EPOCHS), range(0, len(batches), window)):
        model.count[...] += window
        if any(not np.isfinite(batch["x"]).all() for batch in batches[i : i + window]):
            continue
        result = [gradient(model, batch)[1] for batch in batches[i : i + window]]
        grads = named(jax.tree.map(lambda *g: sum(g) / len(g), *map(nnx.as_pure, result)))
        params = named(nnx.as_pure(nnx.state(model, nnx.Param)))
        live = {name: g for name, g in grads.items() if epoch >= parts.get(part_of(name), (0, None))[0]}
        if clip is not None:
            norm = np.sqrt(sum(float((g**2).sum()) for g in live.values()))
            assert norm > clip
            live = {name: g * (clip / norm) for name, g in live.items()}
        for part in {part_of(name) for name in live}:
            tx = parts.get(part, (0, None))[1] or ADAM
            mine = {name: x for name, x in params.items() if part_of(name) == part}
            state = states[part] if part in states else tx.init(mine)
            updates, states[part] = tx.update({name: live[name] for name in mine}, state, mine)
            params |= optax.apply_updates(mine, updates)
        assert len(params) == len(kept)
        nnx.update(model, jax.tree.unflatten(tree, list(params.values())))
    return model


def named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def keeping(part: str) -> tuple[list[list[bytes]], Any]:
    """Return the bits of a part at the start of each epoch, and the callback that keeps them."""
    bits: list[list[bytes]] = []

    def keep(trainer: Any, module: Any) -> None:
        bits.append([np.asarray(x).tobytes() for x in jax.tree.leaves(nnx.state(getattr(module, part)))])

    return bits, hooks(on_train_epoch_start=keep, on_train_end=keep)


SLOW = optax.sgd(0.05, momentum=0.9)
CASES: dict[str, Any] = {
    "one": ({"inner": (2, None)}, {}),
    "of its own optimizer": ({"inner": (1, SLOW)}, {}),
    "two": ({"inner": (3, None), "blocks": (1, SLOW)}, {}),
    "clipped": ({"inner": (2, None)}, {"clip": 0.05}),
    "window": ({"inner": (2, None)}, {"window": 2, "clip": 0.05}),
    "to the end": ({"inner": (EPOCHS, None)}, {}),
    "of two batches": ({"inner": (1, optax.MultiSteps(SLOW, 2))}, {}),
}
EVERY = [(case, strategy) for case in CASES for strategy in STRATEGIES]


def trained(parts: dict[str, Any], strategy: str, *more: Any, **given: Any) -> tuple[Any, Any]:
    freezes = [BackboneFreeze(part, unfreeze_at_epoch=start, tx=tx) for part, (start, tx) in parts.items()]
    model = Deep()
    given = {"max_epochs": EPOCHS, "strategy": splitting(strategy)} | given
    return model, fit(model, given.pop("batches", BATCHES), None, *freezes, *more, **given)


@pytest.mark.parametrize(
    ("case", "strategy"), thinned(EVERY, full=[("window", "fsdp"), *EVERY[3::8], ("two", "single")])
)
def test_it_trains_as_a_loop_by_hand(case: str, strategy: str) -> None:
    parts, options = CASES[case]
    kept = {part: keeping(part) for part in parts}
    given = {"accumulate_grad_batches": options.get("window", 1), "gradient_clip_val": options.get("clip")}
    model, _ = trained(parts, strategy, *(callback for _, callback in kept.values()), **given, **BARE)
    assert_same(model, by_hand(parts, **options), rtol=2e-4, atol=2e-5)
    for part, (start, _) in parts.items():
        bits, _ = kept[part]
        assert all(x == bits[0] for x in bits[: start + 1]) and len(bits) == EPOCHS + 1
        assert start == EPOCHS or bits[start + 1] != bits[0]


STOPS = [(strategy, stop) for strategy in STRATEGIES for stop in ((0, 2, 3), (1, 1, 6), (2, 0, 9))]


@pytest.mark.parametrize(("strategy", "stop"), thinned(STOPS, full=[("fsdp", (1, 1, 6)), *STOPS[::10]]))
def test_a_resumed_training_ends_bit_by_bit_the_same(strategy: str, stop: tuple[int, int, int]) -> None:
    epoch, batch, step = stop
    end = at_batch(batch, lambda t, m: signal.raise_signal(signal.SIGINT) if t.current_epoch == epoch else None)
    parts, result = {"inner": (2, None), "blocks": (1, SLOW)}, []
    for runs in (["whole"], ["parts", "parts"]):
        for number, folder in enumerate(runs, 1):
            more = [end] if number < len(runs) else []
            given = {"default_root_dir": folder, "resume": "auto", "accumulate_grad_batches": 1, "batches": BATCHES}
            model, trainer = trained(parts, strategy, *more, **given)
            assert trainer.global_step == (step if more else EPOCHS * len(BATCHES))
        result.append((bytes_of(trainer), state_of(model)))
    assert result[0][0] == result[1][0]
    assert_same(result[0][1], result[1][1], rtol=0, atol=0)


@pytest.mark.parametrize("strategy", thinned(["single", "fsdp", "shard_map"], "fsdp"))
def test_a_skipped_step_changes_nothing(strategy: str) -> None:
    bad = jax.tree.map(np.copy, BATCHES[2])
    bad["x"][3] = np.nan
    batches = [*BATCHES[:2], bad, BATCHES[3]]
    model, _ = trained({"inner": (2, None)}, strategy, batches=batches, nan_policy="skip", **BARE)
    assert_same(model, by_hand({"inner": (2, None)}, batches), rtol=2e-4, atol=2e-5)


def test_a_step_is_compiled_for_each_set_of_parts() -> None:
    seen, moments = list[list[str]](), list[Any]()

    def start(trainer: Any, module: Any) -> None:
        moments.append(jax.device_get(trainer.state.opt_state.parts["inner"]))

    with compiles() as result:
        watch = {"on_train_batch_end": lambda *_: seen.append(list(result)), "on_train_end": start}
        trained({"inner": (2, None)}, "single", hooks(on_train_epoch_start=start, **watch), **BARE)
    before, after = (seen[epoch * len(BATCHES)] for epoch in (1, 2))
    assert seen[2 * len(BATCHES) - 1] == before and seen[-1] == after, "within a set nothing is compiled"
    assert after[len(before) :] == ["jit(train_step)"]
    flat = [[x.tobytes() for x in jax.tree.leaves(state)] for state in moments]
    assert flat[0] == flat[1] == flat[2] != flat[3]
    (count, *_) = [x for x in jax.tree.leaves(moments[-1]) if not x.ndim]
    assert count == (EPOCHS - 2) * len(BATCHES)


@pytest.mark.parametrize("strategy", thinned(["single", "fsdp", "shard_map"], "single"))
def test_a_frozen_part_costs_what_a_part_costs_that_is_never_trained(strategy: str) -> None:
    class Head(Deep):
        def configure_optimizers(self) -> Any:
            return jl.Optimizer(ADAM, wrt=nnx.All(nnx.Param, nnx.PathContains("outer")))

    def cost(model: Any, *freezes: Any) -> list[int]:
        seen = list[int]()
        note = hooks(on_train_batch_end=lambda trainer, *_: seen.append(trainer.step_flops["train_step"].count))
        fit(model, BATCHES[:1], None, note, *freezes, max_epochs=3, strategy=splitting(strategy), **BARE)
        return seen

    rest = nnx.Not(nnx.PathContains("outer"))
    (never, *_), whole = cost(Head()), cost(Deep())[0]
    assert cost(Deep(), BackboneFreeze(rest, unfreeze_at_epoch=2)) == [never, never, whole]
    assert never < whole / 2


def test_batch_statistics_of_a_frozen_part_move_in_training() -> None:
    for evaluates in (False, True):
        model = Deep()
        if evaluates:
            model.norm.eval()
        before = {name: x.copy() for name, x in state_of(model).items()}
        fit(model, BATCHES, None, BackboneFreeze("norm", unfreeze_at_epoch=9), **BARE)
        after = state_of(model)
        same = {name: np.array_equal(before[name], after[name]) for name in before if "norm" in name}
        assert same == {name: name.endswith(("['scale']", "['bias']")) or evaluates for name in same} and len(same) == 4


def test_rates_of_a_part_are_hyperparameters_of_their_own() -> None:
    model = module(base=Deep, tx=optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    trainer = fit(model, BATCHES, None, BackboneFreeze("inner"), **BARE)
    assert dict(trainer.hyperparams) == pytest.approx({"learning_rate": 0.1, "learning_rate/inner": 0.1})


@pytest.mark.parametrize("resumed", [False, True])
def test_the_epoch_that_trains_a_part_says_so(resumed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    given: Any = {"max_epochs": 3, "default_root_dir": "run"}
    if resumed:
        fit(Deep(), BATCHES, None, BackboneFreeze("inner", unfreeze_at_epoch=2), **given | {"max_epochs": 2})
        assert "is trained" not in capsys.readouterr().out
    fit(
        Deep(), BATCHES, None, BackboneFreeze("inner", unfreeze_at_epoch=2), resume="auto" if resumed else None, **given
    )
    assert (
        capsys.readouterr().out.count(
            "BackboneFreeze: 'inner' is trained from epoch 2 on (the step is compiled again)\n"
        )
        == 1
    )


SCHEDULE, FALL = optax.linear_schedule(0.1, 0.0, 24), optax.linear_schedule(0.02, 0.0, 24)
TOLD = jl.Optimizer(optax.lars(SCHEDULE), lr_schedule=SCHEDULE)
RATES: dict[str, tuple[Any, dict[Any, tuple[int, Any]], dict[str, tuple[Any, int]]]] = {
    "one": (optax.sgd(SCHEDULE), {"inner": (1, None)}, {"lr": (SCHEDULE, 0), "lr/inner": (SCHEDULE, 1)}),
    "told, of its own that hides it": (TOLD, {"inner": (1, optax.lars(FALL))}, {"lr": (SCHEDULE, 0)}),
    "two": (
        optax.adam(SCHEDULE),
        {(lambda path, x: path[0] == "inner"): (2, None), "blocks": (1, optax.sgd(FALL))},
        {"lr": (SCHEDULE, 0), "lr/part1": (SCHEDULE, 2), "lr/blocks": (FALL, 1)},
    ),
    "a group": (
        jl.Optimizer(by={"inner": optax.sgd(SCHEDULE), ...: optax.sgd(FALL)}),
        {nnx.PathContains("inner"): (1, None)},
        {"lr/inner": (SCHEDULE, 1), "lr/rest": (FALL, 0)},
    ),
    "some of groups": (
        jl.Optimizer(by={"*/kernel": optax.sgd(SCHEDULE), "*/bias": optax.adam(FALL), ...: optax.adam(SCHEDULE)}),
        {"inner": (1, None), "norm": (2, None)},
        {
            "lr/*/kernel": (SCHEDULE, 0),
            "lr/*/bias": (FALL, 0),
            "lr/*/kernel/inner": (SCHEDULE, 1),
            "lr/*/bias/inner": (FALL, 1),
            "lr/*/bias/norm": (FALL, 2),
            "lr/rest/norm": (SCHEDULE, 2),
        },
    ),
}


@pytest.mark.parametrize("case", thinned(RATES, "some of groups"))
def test_the_rate_of_a_part_is_0_until_its_epoch(case: str) -> None:
    made, parts, expected = RATES[case]
    freezes = [BackboneFreeze(part, unfreeze_at_epoch=start, tx=tx) for part, (start, tx) in parts.items()]
    rows, model = Rows(rates=True), module(base=Deep, tx=made)
    fit(model, BATCHES, None, rows, *freezes, max_epochs=3, log_every_n_steps=1, **BARE)
    result = {name: rows.of(name) for name in rows.rows[0][1] if name.startswith("lr")}
    assert result.keys() == expected.keys()
    for name, (schedule, epoch) in expected.items():
        late = range(-epoch * len(BATCHES), (3 - epoch) * len(BATCHES))
        assert result[name] == pytest.approx([0.0 if step < 0 else float(schedule(step)) for step in late]), name


class Own(BackboneFreeze):
    def names(self, module: Any, wrt: Any) -> Any:
        return self.part


@pytest.mark.parametrize(
    ("freezes", "words"),
    [
        ([BackboneFreeze("iner")], r"fits no trained parameter of Deep.*Did you mean 'inner'\?.*inner, norm"),
        ([BackboneFreeze("inne")], "'inne'.* fits no trained parameter of Deep"),
        ([BackboneFreeze(nnx.BatchStat)], "BatchStat.* fits no trained parameter of Deep"),
        ([Own(["inner/kernel"])], r"Own\.names.* of Deep, got \['inner/kernel'\]\. It has: .*'inner\.kernel'"),
        ([Own(())], r"takes names of trained parameters of Deep, got \[\]\. It has: \["),
        ([BackboneFreeze("blocks"), BackboneFreeze(nnx.PathContains("blocks"))], r"has blocks\[0\]\..*which another"),
    ],
)
def test_parts_that_are_none_or_overlap_are_refused(freezes: list[Any], words: str) -> None:
    fit_refuses((ArgumentError, ArgumentTypeError), words, model=Deep(), train=BATCHES, callbacks=freezes)


def test_a_checkpoint_of_other_parts_is_refused() -> None:
    trained({"inner": (2, None)}, "single", default_root_dir="run", max_epochs=1)
    with pytest.raises(CheckpointError, match="optimizer"):
        fit(Deep(), BATCHES, None, max_epochs=2, default_root_dir="run", resume="auto")
