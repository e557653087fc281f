"""A pipeline in two real processes, each of which has devices of every rank, trains as plain nnx does in one."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from kit.batches import sized
from kit.inside import is_key
from kit.journal import Rows
from kit.processes import error_of, launch, say
from kit.stages import Language, Layered, by_microbatches, numbers, sentences
from kit.trainers import BARE, fit, make_trainer

from jaxlit.distributed.team import fetch
from jaxlit.strategies import FSDP, Pipeline

BATCHES = sized(8, 8, 8, 6)  # the rows of the last one do not divide, and are joined
SENTENCES = sentences(16, 2)


def own(batches: Any) -> Any:
    """Return every second row: what the two processes give one after the other are microbatches of neighbours."""
    return jax.tree.map(lambda x: x[jax.process_index() :: jax.process_count()], batches)


def joined(batch: Any) -> Any:
    """Return the rows of a batch whose microbatches are cut out of one process's rows after the other's."""
    return jax.tree.map(lambda x: np.concatenate([x[0::2], x[1::2]]), batch)


def weights(module: Any) -> dict[str, Any]:
    plain = lambda x: fetch(jax.random.key_data(x) if is_key(x) else x)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(jax.tree.map(plain, nnx.as_pure(nnx.state(module))))
    return {jax.tree_util.keystr(path): x.tolist() for path, x in leaves}


def work() -> None:
    given: dict[str, Any] = {"default_root_dir": Path("run").absolute(), "log_every_n_steps": 1, "resume": "auto"}
    for steps in (2, 4):
        module, rows = Layered(rngs=nnx.Rngs(0)), Rows()
        strategy = Pipeline(4, "1f1b", 4, layers="layers")
        trainer = fit(module, own(BATCHES), None, rows, strategy=strategy, max_steps=steps, **given)
    say("losses", [float(x) for x in rows.of("loss")])
    say("weights", weights(module))
    say("validated", {key: float(x) for key, x in trainer.validate(module, own(BATCHES))[0].items()})
    say("predicted", [np.asarray(fetch(x)).tolist() for x in trainer.predict(module, own(BATCHES[:1]))])
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("stage", "data"))
    for strategy in (Pipeline(8), Pipeline(mesh=mesh)):
        trainer = make_trainer(strategy=strategy, **BARE)
        words = error_of(lambda trainer=trainer: trainer.fit(Layered(rngs=nnx.Rngs(0)), own(BATCHES)))
        say(f"refused {strategy.stages}", words)


def work_on_language() -> None:
    language = Language(rngs=nnx.Rngs(0))
    strategy = Pipeline(schedule="zbv", inner=FSDP(min_size=16), mesh={"data": -1, "stage": 2})
    fit(language, own(SENTENCES), strategy=strategy)
    say("language", weights(language))


@pytest.mark.full
def test_two_processes_pipeline_and_continue(tmp_path: Path) -> None:
    expected = Layered(rngs=nnx.Rngs(0))
    losses = by_microbatches(expected, [*BATCHES[:3], joined(BATCHES[3])], 4)
    evaluated = nnx.clone(expected)
    evaluated.eval()
    validation = np.average([float(evaluated.loss(x)) for x in BATCHES], weights=[8, 8, 8, 6])
    outputs = evaluated(joined(BATCHES[0])["x"])  # in the order of processes
    alone = Layered(rngs=nnx.Rngs(0))
    fit(alone, [*BATCHES[:3], joined(BATCHES[3])], strategy=Pipeline(4, "1f1b", 4, layers="layers"), **BARE)
    for process in launch(work, tmp_path / "run"):
        said = process.said
        assert process.code == 0, process.errors
        np.testing.assert_allclose(said["losses"], losses[2:], atol=1e-5)  # a checkpoint logs the row of its step first
        assert_found(said["weights"], expected)
        assert_found(said["weights"], alone, atol=1e-6)
        assert said["validated"] == pytest.approx({"val": validation}, rel=1e-5)
        np.testing.assert_allclose(said["predicted"][0], outputs, atol=1e-5)
        assert "4 devices, which do not divide into 8 stages" in said["refused 8"]
        assert "devices of its ranks are of processes [[0, 0, 0, 0], [1, 1, 1, 1]]" in said["refused None"]
    os.chdir(tmp_path / "run")
    restored = Layered(rngs=nnx.Rngs(1))
    fit(restored, BATCHES, default_root_dir="run", resume="auto", max_steps=4, strategy="fsdp")
    assert {path: x.tolist() for path, x in numbers(restored).items()} == said["weights"]


@pytest.mark.full
def test_two_processes_train_a_model_that_is_hard_to_cut(tmp_path: Path) -> None:
    language = Language(rngs=nnx.Rngs(0))
    by_microbatches(language, [np.concatenate([joined(x[:8]), joined(x[8:])]) for x in SENTENCES], 2)
    for process in launch(work_on_language, tmp_path / "run"):
        assert process.code == 0, process.errors
        assert_found(process.said["language"], language)


def assert_found(result: dict[str, Any], module: Any, atol: float = 1e-5) -> None:
    for path, x in numbers(module).items():
        np.testing.assert_allclose(result[path], x, rtol=0, atol=atol, err_msg=path)
