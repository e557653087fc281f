"""The examples run, and reach what they promise."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from kit.inside import laid_out, leaf_name
from kit.trainers import thinned

import jaxlit as jl

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_digits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return run("digits.py", monkeypatch, capsys, *arguments)


def run(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def accuracy(out: str) -> float:
    return float(re.findall(r"^validation accuracy (\S+)$", out, re.M)[0])


ONE, *MORE = ("single", "auto"), ("zero1", "1"), ("auto", "1")
MORE += [(name, "8") for name in ("ddp", "fsdp", "shard_map", "pmap", "simulate")]
RUNS = [pytest.param(*ONE, marks=[pytest.mark.sweep, pytest.mark.smoke]), *thinned([ONE, *MORE], ONE, full=())[1:]]


@pytest.mark.parametrize(("strategy", "devices"), RUNS)
def test_digits_reaches_95_percent(
    strategy: str, devices: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy(run_digits(monkeypatch, capsys, "--strategy", strategy, "--devices", devices)) >= 0.95


@pytest.mark.parametrize(
    "strategy", [pytest.param("fsdp", marks=pytest.mark.full), pytest.param("single", marks=pytest.mark.sweep)]
)
def test_records_reaches_95_percent(
    strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy(run("records.py", monkeypatch, capsys, "--strategy", strategy, "--epochs", "5")) >= 0.95


@pytest.mark.full
def test_a_strategy_of_ones_own_trains_to_the_losses_of_a_single_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run("custom_strategy.py", monkeypatch, capsys, "--steps", "4")
    assert "HSDP on mesh data=2 x fsdp=4" in out and "TensorParallel on mesh data=4 x tp=2" in out
    single, *others = np.array([line.split()[2:] for line in out.splitlines() if line.startswith("step")], float).T
    assert len(single) == 4 and len(others) == 2 and single[-1] < single[0] - 1
    for losses in others:
        np.testing.assert_allclose(losses, single, rtol=1e-5)


@pytest.mark.full
def test_experts_on_their_own_devices_learn_what_a_single_device_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closing_line(strategy: str) -> str:
        return run("experts.py", monkeypatch, capsys, "--strategy", strategy, "--epochs", "1").splitlines()[-1]

    split, single = map(closing_line, ("experts", "single"))
    assert split.endswith("experts P('ep', None, None)") and single.endswith("experts P()")
    losses = [float(re.findall(r"^loss (\S+),", line)[0]) for line in (split, single)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.full
def test_pipelines_train_to_the_losses_of_fsdp_in_the_order_of_their_schedules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run("pipeline.py", monkeypatch, capsys)
    fsdp, *pipelines = np.array([line.split()[2:] for line in out.splitlines() if line.startswith("step")], float).T
    assert len(fsdp) == 6 and len(pipelines) == 2 and fsdp[-1] < fsdp[0]
    for losses in pipelines:
        np.testing.assert_allclose(losses, fsdp, atol=1e-4, rtol=0)
    passes = ["fwd_2__0", "fwd_2__1", "fwd_2__2", "bwd_2__0", "fwd_2__3", "bwd_2__1", "bwd_2__2", "bwd_2__3"]
    assert f"rank 2 of 4, 4 stages: {passes}" in out
    assert "Interleaved1F1B(8, 4) with 4 microbatches" in out and "predicted bubble 27.3%" in out
    assert len(re.findall(r" ms a step$", out, re.M)) == 3


SPLIT = {  # into how many parts, by dim
    "HSDP": {"up.kernel": (1, 4), "attention.out.kernel": (1, 1, 4), "down.kernel": (4, 1), "norm.bias": (4,)},
    "TensorParallel": {
        "up.kernel": (1, 2),
        "attention.out.kernel": (2, 1, 1),
        "down.kernel": (2, 1),
        "norm.bias": (1,),
    },
}


@pytest.mark.parametrize("name", SPLIT)
def test_a_strategy_of_ones_own_splits_parameters_their_moments_and_their_gradients(name: str) -> None:
    example = runpy.run_path(str(EXAMPLES / "custom_strategy.py"))
    module = nnx.eval_shape(lambda: example["Transformer"](rngs=nnx.Rngs(0)))
    state, shardings = laid_out(example[name](), module, accumulate=True)
    paths = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)]
    for part in (lambda s: s.params, lambda s: s.opt_state[0].mu, lambda s: s.window.grads):
        leaves = zip(paths, jax.tree.leaves(part(state)), jax.tree.leaves(part(shardings)), strict=True)
        parts = {path: tuple(np.divide(x.shape, s.shard_shape(x.shape))) for path, x, s in leaves}
        assert {path: parts[path] for path in SPLIT[name]} == SPLIT[name]
    assert shardings.opt_state[0].count.is_fully_replicated


def check(name: str, **arguments: Any) -> dict[str, float]:
    example = runpy.run_path(str(EXAMPLES / "custom_strategy.py"))
    model_fn = lambda: example["Transformer"](rngs=nnx.Rngs(0))  # noqa: E731
    strategies = [example[name]()]
    return jl.testing.assert_same_training(
        model_fn, example["token_batches"](2), strategies=strategies, steps=2, **arguments
    )


@pytest.mark.parametrize("name", thinned(SPLIT, full=[*SPLIT][:1]))
def test_a_strategy_of_ones_own_passes_the_check_of_strategies(name: str) -> None:
    assert len(check(name, factors=jl.testing.FACTORS)) == 6


@pytest.mark.full
def test_a_strategy_of_ones_own_trains_on_windows_and_a_tail() -> None:
    check("TensorParallel", devices=[8], accumulate_grad_batches=2)


@pytest.mark.full
def test_piped_output_is_one_plain_line_an_epoch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_digits(monkeypatch, capsys, "--strategy", "ddp", "--epochs", "3")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out) and "━━  22" not in out
    assert len(re.findall(r"^epoch \d/3  22/22 .*train/loss .*val/accuracy ", out, re.M)) == 3


def test_single_refuses_more_than_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="'single' uses one device. Use strategy='ddp' for 8"):
        run_digits(monkeypatch, capsys, "--strategy", "single", "--devices", "8")
