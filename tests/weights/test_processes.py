"""Weights in several processes: each reads its own shards, and one writes."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from kit.batches import random
from kit.modules import Net
from kit.processes import launch, say
from kit.trainers import fit, splitting

import jaxlit as jl
from jaxlit.errors import CheckpointError


def expected() -> Any:
    return Net(rngs=nnx.Rngs(5))


def load_and_save() -> None:
    seen: list[Any] = []

    def load(module: Any) -> None:
        report = jl.load_weights(module, "given.safetensors")
        kernel = module.blocks[0].kernel[...]
        seen.append([len(report.taken), kernel.is_fully_addressable])
        jl.save_weights(module, "saved.safetensors")

    data = jl.ArrayLoader(random(1)[0], 8)
    given: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "strategy": splitting("fsdp")}
    trained = fit(jl.lazy(Net), data, init_from=load, **given).module
    say("seen", seen)
    jl.save_weights(trained, "trained.safetensors")
    exported = jl.export(trained, random(1)[0])
    Path(f"net{jax.process_index()}.jax").write_bytes(exported)
    try:
        jl.load_weights(expected(), "given.safetensors" if jax.process_index() else "absent.safetensors")
    except Exception as error:
        say("error", f"{type(error).__name__}: {error}")
    try:
        jl.save_weights(expected(), "folder.safetensors")
    except CheckpointError as error:
        say("disk", str(error))


@pytest.mark.full
def test_two_processes_load_shards_and_one_saves(tmp_path: Path) -> None:
    jl.save_weights(expected(), tmp_path / "given.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    ended = launch(load_and_save, tmp_path, count=2, devices=4)
    assert [x.code for x in ended] == [0, 0], ended[0].errors + ended[1].errors
    given, saved = (safetensors.numpy.load_file(tmp_path / f"{name}.safetensors") for name in ("given", "saved"))
    assert given.keys() == saved.keys()
    for name, x in given.items():
        np.testing.assert_array_equal(saved[name], x)
    trained, batch = expected(), random(1)[0]
    jl.load_weights(trained, tmp_path / "trained.safetensors")
    trained.eval()
    for index in range(2):
        served = jax.export.deserialize(bytearray((tmp_path / f"net{index}.jax").read_bytes()))
        np.testing.assert_allclose(served.call(batch), trained(batch["x"]), rtol=1e-5, atol=1e-6)
    for x in ended:
        assert x.said["seen"] == [[11, False]]
        assert "there is no file absent.safetensors" in x.said["error"]
        assert "folder.safetensors could not be written" in x.said["disk"]
