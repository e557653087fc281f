"""A step that is not finite loses nothing: the last good state is saved in its place, and a resume gets past it."""

import contextlib
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import Stream, numbered, random
from kit.by_hand import assert_same, mean
from kit.checkpoints import bytes_of, names
from kit.checkpoints import state_of as saved_state
from kit.journal import at_batch, hooks, raising
from kit.modules import Linear, Mean, Net
from kit.pairwise import pairwise
from kit.trainers import BARE, STRATEGIES, fit, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint
from jaxlit.engine.engine import Engine
from jaxlit.errors import NonFiniteError

BAD, COUNT, RATE = 4, 9, 0.1  # the bad batch, and all of them
KINDS = {"nan": np.nan, "inf": np.inf, "overflow": 3e38}  # the last one is ten times as large in the step


@jax.custom_vjp
def spoil(x: jax.Array, more: jax.Array) -> jax.Array:
    """Return `x`, to whose gradient `more` is added."""
    return x


spoil.defvjp(lambda x, more: (x, more), lambda more, g: (g + more, jnp.zeros_like(more)))


class Trapped(Linear):
    """Adds what a batch says to its loss, or to the gradient of its bias alone; it also keeps a mean and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.count = nnx.BatchStat(jnp.zeros(())), nnx.Variable(jnp.zeros((), jnp.int32))

    def training_step(self, batch: Any) -> jax.Array:
        self.seen[...] = 0.5 * self.seen[...] + 0.5 * jnp.mean(batch["x"])
        self.count[...] += 1
        in_loss, in_gradient = 10 * jnp.mean(batch["trap"], 0)
        bias = spoil(self.bias[...], in_gradient)
        return jnp.mean((batch["x"] @ self.kernel[...] + bias - batch["y"]) ** 2) + in_loss


def trapped(kind: str, where: str) -> list[dict[str, np.ndarray]]:
    """Return batches of which the fourth after the first is a trap."""
    batches = [batch | {"trap": np.zeros((8, 2), np.float32)} for batch in random(COUNT)]
    batches[BAD]["trap"][0, ("loss", "gradient").index(where)] = KINDS[kind]
    return batches


def by_hand(windows: list[Any], bad: int, where: str) -> dict[str, np.ndarray]:
    """Return `Trapped`'s parameters after steps with momentum, of which the bad one moves no parameter.

    Its kernel's own momentum takes the bad step if only the gradient of the bias is bad.
    """
    params = [np.asarray(Linear().kernel[...], np.float64), np.zeros(1)]
    momentum = [np.zeros_like(x) for x in params]
    for k, window in enumerate(windows):
        x, y = (np.concatenate([batch[name] for batch in window]) for name in "xy")
        error = x @ params[0] + params[1] - y
        for i, g in enumerate([2 * x.T @ error / len(x), 2 * error.mean(0)]):
            if k != bad or (where == "gradient" and i == 0):
                momentum[i] = 0.9 * momentum[i] + g
            if k != bad:
                params[i] = params[i] - RATE * momentum[i]
    return {"['kernel']": params[0], "['bias']": params[1]}


FACTORS = {
    "kind": list(KINDS),
    "where": ["loss", "gradient"],
    "accumulate": [1, 3],
    "strategy": [*STRATEGIES, "zero2", "hsdp"],
    "policy": ["raise", "rollback"],
}
FEW = [
    ("nan", "loss", 1, "single", "raise"),
    ("inf", "gradient", 1, "fsdp", "raise"),
    ("overflow", "gradient", 3, "shard_map", "rollback"),
]
PAIRS = [tuple(case.values()) for case in pairwise(FACTORS)]
CASES = list(dict.fromkeys([*FEW, *PAIRS, *itertools.product(*FACTORS.values())]))


@pytest.mark.parametrize(("kind", "where", "accumulate", "strategy", "policy"), thinned(CASES, *FEW, full=PAIRS[::7]))
def test_training_ends_before_a_bad_step_and_goes_on_behind_it(kind, where, accumulate, strategy, policy) -> None:
    batches, bad = trapped(kind, where), BAD // accumulate
    windows = [batches[i : i + accumulate] for i in range(0, COUNT, accumulate)]
    given = {"strategy": splitting(strategy), "accumulate_grad_batches": accumulate, "default_root_dir": "run"}
    trainer, model = make_trainer(nan_policy=policy, **given), Trapped()
    with pytest.raises(NonFiniteError) as raised:
        trainer.fit(model, batches)
    numbers, gradient = ("nan" if kind == "nan" else "inf", "none") if where == "loss" else (r"\d.*", "bias")
    inside = "nothing" if kind == "overflow" else r"batch\['trap'\], row 0 of 8"
    told = rf"Batch 4, run again on these parameters, gave the same: loss {numbers}, gradients that are not finite: "
    told += rf"{gradient}\. Not finite in the batch: {inside}\.$"
    assert re.search(rf"at optimizer step {bad} \(epoch 0\).*\n{told}", str(raised.value)), raised.value
    assert trainer.global_step == int(trainer.state.step) == bad
    assert_same(model, by_hand(windows[:bad], -1, where))
    # Also what the good batches of a bad window have counted is undone.
    assert int(model.count[...]) == bad * accumulate
    assert names() == [f"step_{bad:08d}"]
    saved = saved_state(f"run/checkpoints/step_{bad:08d}")
    note, position = saved["not_finite"], saved["position"]
    assert position["total_batch_idx"] == position["batch_idx"] == bad * accumulate
    took = ["opt_state[0].trace.kernel"] if where == "gradient" else []
    assert note == {"step": bad, "epoch": 0, "batches": [bad * accumulate, (bad + 1) * accumulate], "optimizer": took}
    resumed = fit(Trapped(), batches, nan_policy="skip", resume="auto", **given)
    assert resumed.global_step == len(windows) and int(resumed.module.count[...]) == COUNT
    assert_same(resumed.module, by_hand(windows, bad, where))


@pytest.mark.parametrize("accumulate", thinned([1, 2], 1))
def test_saved_state_is_bitwise_that_before_the_step(accumulate) -> None:
    """Statistics, counts and random keys with it: it is what training on the good batches alone leaves."""
    batches, good = random(7), 5 if accumulate == 1 else 4
    batches[5]["x"][2] = np.nan
    given: Any = {"accumulate_grad_batches": accumulate}
    trainer = make_trainer(default_root_dir="run", **given)
    with pytest.raises(NonFiniteError):
        trainer.fit(Net(rate=0.5, rngs=nnx.Rngs(0)), batches)
    # Stopped inside the epoch, whose sums continue.
    given |= {"max_steps": trainer.global_step, "enable_checkpointing": False}
    reference = fit(Net(rate=0.5, rngs=nnx.Rngs(0)), batches[:good], **given, max_epochs=None)
    assert bytes_of(trainer) == bytes_of(reference)
    path = f"run/checkpoints/step_{trainer.global_step:08d}"
    assert bytes_of(fit(Net(rate=0.5, rngs=nnx.Rngs(1)), batches, ckpt_path=path, **given)) == bytes_of(reference)


@pytest.mark.parametrize("loader", thinned(["shuffled", "generator", "no length"], "shuffled", "generator"))
def test_the_bad_batch_is_found_again_in_any_loader(loader) -> None:
    batches = trapped("nan", "gradient")
    arrays = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    made = {
        "shuffled": lambda: jl.ArrayLoader(arrays, 8, shuffle=True),
        "no length": lambda: Stream(batches),
        "generator": lambda: (batch for batch in batches),
    }[loader]
    order = list(made())
    (bad,) = [i for i, batch in enumerate(order) if np.isnan(batch["trap"]).any()]
    with pytest.raises(NonFiniteError) as raised:
        fit(Trapped(), made(), default_root_dir="run")
    told = f"Batch {bad}, run again on these parameters, gave the same"
    assert ("the loader cannot be set back" if loader == "generator" else told) in str(raised.value)
    trainer = fit(Trapped(), made(), default_root_dir="run", resume="auto", nan_policy="skip")
    assert trainer.global_step == COUNT
    assert_same(trainer.module, by_hand([[batch] for batch in order], bad, "gradient"))


def test_a_batch_that_is_another_one_the_second_time_is_told() -> None:
    batches = trapped("nan", "loss")
    loader = Stream(batches, batches[:BAD] + batches[BAD + 1 :])
    with pytest.raises(NonFiniteError, match=r"Batch 4, run again on these parameters, gave finite numbers \(loss \d"):
        fit(Trapped(), loader)


def test_another_error_finds_an_unchecked_bad_step() -> None:
    fails = at_batch(6, raising(RuntimeError, "mine"))
    with pytest.raises(RuntimeError, match="^mine"):
        fit(Mean(), spoilt(8, 3), None, fails, default_root_dir="run", log_every_n_steps=0)
    assert names() == ["step_00000003"]
    note = saved_state("run/checkpoints/step_00000003")["not_finite"]
    assert note == {"step": 3, "epoch": 0, "batches": [3, 4], "optimizer": []}


def spoilt(count: int, bad: int) -> list[Any]:
    batches = numbered(count)
    batches[bad]["x"][:] = np.nan
    return batches


def test_a_caught_error_leaves_the_last_good_state() -> None:
    def save(trainer: Any, *_: Any) -> None:
        for k in range(2 * (trainer.global_step == 5)):
            with pytest.raises(NonFiniteError, match="at optimizer step 3 "):
                trainer.save_checkpoint(f"inside/{k}")

    trainer, model = make_trainer(hooks(on_safe_point=save), default_root_dir="run"), Mean()
    with pytest.raises(NonFiniteError):
        trainer.fit(model, spoilt(8, 3))
    assert not Path("inside").exists()
    trainer.save_checkpoint("kept")
    good = mean([[1], [2], [3]])
    assert float(Mean.load_from_checkpoint("kept").w[...][0]) == good == float(model.w[...][0])
    resumed = fit(Mean(), spoilt(8, 3), ckpt_path="kept", nan_policy="skip")
    assert float(resumed.module.w[...][0]) == mean([[k] for k in (1, 2, 3, 5, 6, 7, 8)])


def test_hooks_of_batches_run_again_see_the_earlier_module() -> None:
    class Sees(Trapped):
        def on_before_batch_transfer(self, batch: Any, *_: Any) -> Any:
            seen.append(int(self.count[...]))
            return batch

    seen: list[int] = []
    look = hooks(on_train_batch_end=lambda trainer, module, *_: seen.append(int(module.count[...])))
    with pytest.raises(NonFiniteError):
        fit(Sees(), trapped("nan", "loss")[1:5], None, look, accumulate_grad_batches=2, prefetch=0, **BARE)
    # The first batch of the bad window has counted, and is undone.
    assert seen[-3:] == [3, 2, 2]


@pytest.mark.full
def test_next_start_and_second_error_name_the_bad_step(capsys) -> None:
    given: Any = {"default_root_dir": "run", "resume": "auto"}
    for again in (False, True):
        with pytest.raises(NonFiniteError) as raised:
            fit(Mean(), spoilt(8, 3), **given)
        assert ("It is the second time: training was resumed right before this step." in str(raised.value)) == again
        assert "Batch 3, run again on these parameters, gave the same" in str(raised.value)
        told = "resume: step 3 (epoch 0, batches 3 to 3) was not finite: now it runs under nan_policy='raise'"
        assert (told in capsys.readouterr().out) == again
    fit(Mean(), spoilt(8, 3), nan_policy="skip", **given)
    assert "batches 3 to 3) was not finite: now it runs under nan_policy='skip'" in capsys.readouterr().out
    fit(Mean(), spoilt(8, 3), nan_policy="skip", max_epochs=2, **given)
    assert "was not finite" not in capsys.readouterr().out
    given |= {"default_root_dir": "windows", "accumulate_grad_batches": 2}
    for policy in ("raise", "ignore"):
        with contextlib.suppress(NonFiniteError):
            fit(Mean(), spoilt(8, 3), nan_policy=policy, **given)
    assert "resume: step 1 (epoch 0, batches 2 to 3) was not finite" in capsys.readouterr().out


def test_rows_and_hook_means_match_a_training_that_skips() -> None:
    def table(folder: str) -> list[str]:
        return Path(folder, "metrics.csv").read_text().splitlines()

    def log(name: str) -> Any:
        return lambda trainer, module, *args: module.log(name, float(args[-1]), on_step=False, on_epoch=True)

    logs = hooks(on_train_batch_start=log("start"), on_train_batch_end=log("end"))
    given: Any = {"log_every_n_steps": 2, "resume": "auto"}
    with pytest.raises(NonFiniteError):
        fit(Mean(), spoilt(9, 4), None, logs, default_root_dir="parts", **given)
    assert len(table("parts")) == 4  # the row of the sixth step has told of the fifth
    for folder in ("parts", "whole"):
        trainer = fit(Mean(), spoilt(9, 4), None, logs, default_root_dir=folder, nan_policy="skip", **given)
        assert trainer.callback_metrics["start"] == trainer.callback_metrics["end"] == np.mean(range(9))
    assert table("parts") == table("whole")


@pytest.mark.parametrize(("hook", "bad"), [("on_train_batch_end", 4), ("on_train_epoch_start", 0)])
def test_values_that_hooks_log_at_steps_do_not_cost_the_checkpoint(hook: str, bad: int) -> None:
    trainer = make_trainer(hooks(**{hook: lambda t, m, *_: m.log("x", 1.0, on_epoch=True)}), default_root_dir="run")
    with pytest.raises(NonFiniteError):
        trainer.fit(Mean(), spoilt(6, bad))
    assert "x" not in trainer.callback_metrics
    assert names() == [f"step_0000000{bad}"] * (bad > 0)


def test_a_bad_step_behind_the_window_of_a_checkpoint_keeps_the_steps_between() -> None:
    save = at_batch(2, lambda trainer, module: trainer.save_checkpoint("kept"))  # after the window's first batch
    given: Any = {"accumulate_grad_batches": 2}
    with pytest.raises(NonFiniteError):
        fit(Mean(), spoilt(8, 4), None, save, **given)
    model = Mean()
    with pytest.raises(NonFiniteError, match="at optimizer step 2 "):
        fit(model, spoilt(8, 4), ckpt_path="kept", default_root_dir="run", **given)
    assert float(model.w[...][0]) == mean([[1, 2], [3, 4]])
    assert names() == ["step_00000002"]


def test_a_bad_step_of_the_next_epoch_does_not_take_the_window_of_the_checkpoint() -> None:
    given: Any = {"accumulate_grad_batches": 2, "max_epochs": 3, "default_root_dir": "run"}
    save = at_batch(2, lambda trainer, module: (trainer.save_checkpoint("kept"), trainer.stop("enough")))
    fit(Mean(), numbered(8), None, save, **{**given, "default_root_dir": "first"})
    skip = hooks(on_train_batch_start=lambda trainer, *_: -1 if trainer.current_epoch == 0 else None)
    with pytest.raises(NonFiniteError):
        fit(Mean(), spoilt(8, 0), None, skip, ckpt_path="kept", **given)
    assert saved_state("run/checkpoints/step_00000001")["position"]["filled"] == 0


def test_a_ctrl_c_while_an_error_is_handled_leaves_a_trainer_that_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxlit.loop.train.end_before_bad_step", raising(KeyboardInterrupt))
    trainer = make_trainer(at_batch(2, raising(RuntimeError, "mine")), **BARE)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Mean(), numbered(4))
    trainer.save_checkpoint("after")
    assert saved_state("after")["global_step"] == 3


def test_a_checkpoint_of_the_same_step_gets_the_note() -> None:
    saver = ModelCheckpoint(every_n_train_steps=3)
    with pytest.raises(NonFiniteError):
        fit(Mean(), spoilt(8, 3), None, saver, default_root_dir="run")
    assert names() == ["step_00000003"] == [Path(saver.last_model_path).name]
    assert saved_state(saver.last_model_path)["not_finite"]["step"] == 3


def test_without_rows_the_places_of_the_steps_are_bounded() -> None:
    ended: list[int] = []
    count = hooks(on_train_batch_end=lambda *args: ended.append(args[-1]))
    batches = [*spoilt(2, 1), *numbered(1) * 8190]
    with pytest.raises(NonFiniteError, match="at optimizer step 1 .*\nBatch 1, run again"):
        fit(Mean(), batches, None, count, log_every_n_steps=0, **BARE)
    assert 4096 <= len(ended) <= 4096 + 1024  # then the device is asked


@pytest.mark.full
def test_a_bad_window_of_a_checkpoint_is_restored_from_it() -> None:
    save = at_batch(4, lambda trainer, module: trainer.save_checkpoint("kept"))  # after the window's second batch
    batches = trapped("nan", "gradient")
    batches[4], batches[5] = batches[5], batches[4]
    given: Any = {"accumulate_grad_batches": 3}
    fit(Trapped(), batches, None, save, max_steps=2, nan_policy="ignore", **given)
    trainer, model = make_trainer(default_root_dir="run", **given), Trapped()
    expected = "at optimizer step 1 .*\nBatch 5, run again on these parameters, gave the same"
    with pytest.raises(NonFiniteError, match=expected):
        trainer.fit(model, batches, ckpt_path="kept")
    assert trainer.global_step == 1 and names() == ["step_00000001"]
    ours, kept = (saved_state(path) for path in ("run/checkpoints/step_00000001", "kept"))
    assert ours.pop("not_finite") == {"step": 1, "epoch": 0, "batches": [5, 6], "optimizer": []}
    assert ours["position"] == kept["position"]
    assert_same(model, by_hand([batches[:3]], -1, "gradient"))
    resumed = fit(Trapped(), batches, default_root_dir="run", resume="auto", nan_policy="skip", **given)
    # The momentum took nothing.
    assert_same(resumed.module, by_hand([batches[k : k + 3] for k in (0, 3, 6)], 1, "loss"))


def test_a_window_already_bad_in_its_checkpoint_is_skipped() -> None:
    save = at_batch(2, lambda trainer, module: trainer.save_checkpoint("kept"))  # after the window's first batch
    given: Any = {"accumulate_grad_batches": 2}
    with pytest.raises(NonFiniteError, match="\nBatch 2, run again .* gave the same"):
        fit(Mean(), spoilt(6, 2), None, save, **given)
    with pytest.raises(NonFiniteError, match="\nBatch 3, run again .*: the window was not finite where the checkpoint"):
        fit(Mean(), spoilt(6, 2), ckpt_path="kept", **given)
    resumed = fit(Mean(), spoilt(6, 2), ckpt_path="kept", nan_policy="skip", **given)
    assert float(resumed.module.w[...][0]) == mean([[1, 2], [5, 6]])


def test_a_bad_step_does_not_disable_the_logger_that_meets_it() -> None:
    class Saves(jl.callbacks.Logger):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint("kept")

    steps: list[int] = []
    count = hooks(on_train_batch_start=lambda trainer, *_: steps.append(trainer.global_step))
    with pytest.raises(NonFiniteError):
        fit(Mean(), spoilt(6, 1), None, count, logger=Saves())
    assert steps == [0, 1, 2]


def test_a_window_that_was_skipped_is_no_place_to_go_back_to() -> None:
    skips = hooks("Skips", on_train_batch_start=lambda t, m, batch, k: -1 if (t.current_epoch, k) == (0, 4) else None)
    given: dict[str, Any] = {"accumulate_grad_batches": 3, "max_epochs": 2, "default_root_dir": "run"}
    with pytest.raises(NonFiniteError):
        fit(Mean(), Stream(numbered(6), spoilt(6, 0)), None, skips, **given)
    position = saved_state("run/checkpoints/step_00000001")["position"]
    assert (position["global_step"], position["epoch"], position["batch_idx"]) == (1, 1, 0)


def test_each_skipped_step_is_read_and_warned_of_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    reads, bad_step = [], Engine.bad_step
    monkeypatch.setattr(Engine, "bad_step", lambda self: reads.append(1) or bad_step(self))
    batches = [{"x": np.full((8, 1), np.nan if k in (2, 9) else 1.0, np.float32)} for k in range(20)]
    given = {"nan_policy": "skip", "log_every_n_steps": 1, "default_root_dir": "run", "resume": "auto"}
    fit(Mean(), batches, max_epochs=1, **given)
    assert caplog.text.count("The update was skipped") == 2
    assert len(reads) < 8  # at the two steps, and where the epoch and training end
    caplog.clear()
    fit(Mean(), batches[:1] * 20, max_epochs=2, **given)
    assert "The update was skipped" not in caplog.text


def test_a_skipped_window_after_a_dropped_one_keeps_statistics() -> None:
    class Stat(Mean):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nnx.BatchStat(jnp.zeros(()))

        def training_step(self, batch: Any) -> jax.Array:
            self.seen[...] += jnp.mean(batch["x"])
            return super().training_step(batch) + batch["trap"]

    epochs = [[b | {"trap": np.float32(0)} for b in numbered(4, first)] for first in (1, 5)]
    epochs[1][1]["trap"] = np.float32(np.inf)  # of the window of 5 and 6
    drop = hooks(on_train_batch_start=lambda t, m, batch, idx: -1 if (t.current_epoch, idx) == (0, 3) else None)
    model, given = Stat(), {"accumulate_grad_batches": 2, "nan_policy": "skip", "max_epochs": 2}
    fit(model, Stream(*epochs), None, drop, **given)
    assert float(model.seen[...]) == 1 + 2 + 3 + 7 + 8
