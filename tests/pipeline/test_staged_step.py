"""What is told of a pipeline's stages."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.modules import Linear
from kit.trainers import fit

import jaxlit as jl
from jaxlit.pipeline.staged_step import layers_of

WIDTH, ROWS = 32, 12


class Deep(Linear):
    def __init__(self) -> None:
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)) for _ in range(4)])

    def training_step(self, batch: Any) -> jax.Array:
        for block in self.blocks:
            batch = jl.pipeline_yield(jnp.tanh(block(batch)))
        return jnp.mean(batch**2)


def fitted(strategy: jl.strategies.Pipeline) -> str:
    given = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False}
    fit(Deep(), [np.ones((ROWS, WIDTH), np.float32)], strategy=strategy, devices=2, **given)
    return strategy.describe()


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["embed", "blocks[0].kernel", "blocks[0].bias", "blocks[1].kernel"], "embed, blocks[0], blocks[1]"),
        ([f"blocks[{i}].a[7].kernel" for i in range(8)], "blocks[0], blocks[1] ... blocks[7]"),
        (["blocks[2].kernel", "head.kernel"], "blocks[2], head"),
        ([], "-"),
    ],
)
def test_layers_are_told_by_their_list_and_places(names: list[str], told: str) -> None:
    assert layers_of(names) == told


def test_describe_tells_after_a_fit_what_stages_are_made_of() -> None:
    lines = fitted(jl.strategies.Pipeline(2, microbatches=3)).splitlines()
    assert lines[0] == "Pipeline on mesh stage=2 x data=1, Std1F1B(2) with 3 microbatches"
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[2:4]]
    params = f"{2 * (WIDTH + 1) * WIDTH:,}"
    assert [row[:3] for row in rows] == [["0", "0", "blocks[0], blocks[1]"], ["1", "1", "blocks[2], blocks[3]"]]
    assert [row[3] for row in rows] == [params, params]
    matmuls = 2 * 2 * (ROWS // 3) * WIDTH * WIDTH
    assert [row[4] for row in rows] == [f"{matmuls / 1e9:.3g}"] * 2
    assert [row[-1] for row in rows] == ["2", "1"]
    assert lines[-1].startswith("predicted bubble 25.0%")


def test_remat_keeps_only_what_goes_into_a_stage() -> None:
    strategy = jl.strategies.Pipeline(2, microbatches=3, remat=True)
    rows = [re.split(r"\s{2,}", line.strip()) for line in fitted(strategy).splitlines()[2:4]]
    # Of the first stage that is the batch, an input of the step; of the second what it was sent.
    sent = ROWS // 3 * WIDTH * 4
    assert [row[5] for row in rows] == ["0 B", f"{sent} B"]


def test_the_summary_names_the_stage_of_each_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    fitted(jl.strategies.Pipeline(2, layers=["blocks.1"], microbatches=3))
    out = capsys.readouterr().out
    result = {line.split()[0]: line for line in out.splitlines() if line.startswith("blocks[")}
    assert len(result) == 8
    for name, line in result.items():
        stage = int(name[len("blocks[")]) // 2
        assert f"stage {stage}" in line and f"stage {1 - stage}" not in line
