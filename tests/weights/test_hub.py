"""Weights by the name of a repository on a Hugging Face hub, of which only the bytes that are needed are read."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from fsspec.registry import _registry, known_implementations
from kit.batches import random
from kit.hub import Hub, serving
from kit.modules import Net
from kit.processes import error_of, launch, say
from kit.trainers import fit, splitting

import jaxlit as jl
from jaxlit.errors import ArgumentError, CheckpointError

URL = "hf://owner/net"
RNG = np.random.default_rng(0)
FILES = {  # two of a repository, as of torch: (out, in), with layers by number
    "model-00001-of-00002.safetensors": {
        "one.weight": RNG.normal(size=(16, 3)).astype(np.float32),
        "one.bias": RNG.normal(size=16).astype(np.float16),
        "unused": np.ones((300, 10), np.float32),
    },
    "model-00002-of-00002.safetensors": {
        **{f"h.{i}.weight": RNG.normal(size=(8, 6)).astype(np.float32) for i in range(3)},
        "qkv": RNG.normal(size=(24, 6)).astype(np.float32),
        "conv": RNG.normal(size=(4, 3, 2, 5)).astype(np.float32),
        "step": np.array(7, np.int32),
        "none": np.zeros((0, 2), np.float32),
    },
}
ARRAYS = {name: x for arrays in FILES.values() for name, x in arrays.items()}
RULES: dict[str, Any] = {
    r"one\.weight": jl.WeightRule("kernel", transpose=True),
    r"one\.bias": "bias",
    r"h\.(\d+)\.weight": jl.WeightRule("blocks", transpose=(-1, 0), stack=1),
    "conv": jl.WeightRule("conv", transpose=(2, 3, 1, 0)),
    "qkv": jl.WeightRule(["q", "k", "v"], transpose=True, axis=1, sizes=(16, 4, 4), reshape=True),
    "unused": None,
}
EXPECTED = {
    "kernel": ARRAYS["one.weight"].T,
    "bias": ARRAYS["one.bias"].astype(np.float32),
    "blocks": np.stack([ARRAYS[f"h.{i}.weight"].T for i in range(3)]),
    "q": ARRAYS["qkv"].T[:, :16].reshape(6, 4, 4),
    "k": ARRAYS["qkv"].T[:, 16:20].reshape(6, 1, 4),
    "v": ARRAYS["qkv"].T[:, 20:].reshape(6, 1, 4),
    "conv": ARRAYS["conv"].transpose(2, 3, 1, 0),
    "step": ARRAYS["step"],
    "none": ARRAYS["none"],
}


class Module(nnx.Module):
    def __init__(self, shardings: dict[str, Any]) -> None:
        for name, x in EXPECTED.items():
            setattr(self, name, nnx.Param(jax.device_put(jnp.zeros_like(x), shardings.get(name))))


def put(folder: Path) -> None:
    """Write a repository of two files with an index."""
    folder.mkdir(parents=True)
    for name, arrays in FILES.items():
        safetensors.numpy.save_file(arrays, folder / name)
    names = {name: file for file, arrays in FILES.items() for name in arrays}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    put(tmp_path / "hub" / "owner" / "net")
    with serving(tmp_path / "hub", monkeypatch) as hub:
        yield hub


def header_size(path: Path) -> int:
    """Return the bytes before the arrays of a file."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("axis", [None, 0, -1])
def test_arrays_are_those_of_the_files_and_their_bytes_are_sent_once(axis: int | None, hub: Hub) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows = {"kernel": -1, "blocks": -1, "conv": -1, "q": 0, "bias": 0}
    specs = {None: {}, 0: {"blocks": 1, "q": 1, "conv": 0}, -1: rows}[axis]
    split = {name: jax.P(*[None] * (dim % EXPECTED[name].ndim), "data") for name, dim in specs.items()}
    module = Module({name: jax.NamedSharding(mesh, spec) for name, spec in split.items()})
    report = jl.load_weights(module, URL, RULES)
    assert len(report.taken) == len(EXPECTED)
    for name, x in EXPECTED.items():
        np.testing.assert_array_equal(getattr(module, name)[...], x, strict=True)
    headers = sum(header_size(hub.root / "owner" / "net" / name) for name in FILES)
    # What splits into reshaped leaves is read for each of them: (q, k, v) by rows of the file.
    assert hub.bytes_of(".safetensors") == headers + sum(x.nbytes for name, x in ARRAYS.items() if name != "unused")


def test_a_revision_a_file_and_a_single_file_are_read(hub: Hub) -> None:
    folder = hub.root / "owner" / "net@v2"
    folder.mkdir()
    safetensors.numpy.save_file({"kernel": np.full((3, 16), 2.0, np.float32)}, folder / "model.safetensors")
    for source in (f"{URL}@v2", f"{URL}@v2/model.safetensors"):
        module = nnx.Linear(3, 16, use_bias=False, rngs=nnx.Rngs(0))
        jl.load_weights(module, source)
        assert (module.kernel[...] == 2).all()


def test_a_fit_begins_with_a_repository_or_a_folder(hub: Hub, tmp_path: Path) -> None:
    expected = Net(rngs=nnx.Rngs(5))
    (hub.root / "owner" / "trained").mkdir()
    jl.save_weights(expected, hub.root / "owner" / "trained" / "model.safetensors")
    began = list[Any]()

    class Begun(jl.Callback):
        def on_fit_start(self, trainer: jl.Trainer, module: Any) -> None:
            began.append(jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(module, nnx.Param))))

    for source in ("hf://owner/trained", hub.root / "owner" / "trained"):
        fit(jl.lazy(Net), random(1), None, Begun(), init_from=source, strategy=splitting("fsdp"))
    for values in began:
        jax.tree.map(np.testing.assert_array_equal, values, nnx.to_pure_dict(nnx.state(expected, nnx.Param)))
    file = hub.root / "owner" / "trained" / "model.safetensors"
    assert hub.bytes_of() == file.stat().st_size  # of eight devices, once


def test_what_cannot_be_read_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "owner" / "net")
    with serving(tmp_path, monkeypatch, token="secret") as hub:
        for url in (URL, "hf://owner/none"):
            with pytest.raises(CheckpointError, match=rf"no file {url}\..* needs HF_TOKEN") as e:
                jl.load_weights(Module({}), url, RULES)
            assert "secret" not in str(e.value)
        monkeypatch.setenv("HF_TOKEN", "secret")
        assert len(jl.load_weights(Module({}), URL, RULES).taken) == len(EXPECTED)
        (tmp_path / "owner" / "net" / "model-00002-of-00002.safetensors").write_bytes(b"12345678{}")
        with pytest.raises(CheckpointError, match="net/model-00002-of-00002.safetensors cannot be read as"):
            jl.load_weights(Module({}), URL, RULES)
    assert hub.sent


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"class": "no_such_hub.HfFileSystem", "err": "Install huggingface_hub to access HfFileSystem"}
    monkeypatch.setitem(known_implementations, "hf", known)  # as fsspec has it without that package
    monkeypatch.delitem(_registry, "hf", raising=False)
    fits = lambda: fit(Net(rngs=nnx.Rngs(0)), random(1), init_from=URL)  # noqa: E731
    for act in (fits, lambda: jl.load_weights(Module({}), URL)):
        with pytest.raises(ArgumentError, match=f"{re.escape(URL)}.*Install huggingface_hub") as e:
            act()
        assert "fsspec(" not in str(e.value)


def load_here() -> None:
    rows = dict[str, int]()

    def load(module: Any) -> None:
        jl.load_weights(module, "hf://owner/trained")
        for path, x in nnx.to_flat_state(nnx.state(module)):
            if isinstance(x[...], jax.Array) and x[...].ndim and jnp.issubdtype(x[...].dtype, jnp.floating):
                spans = [range(x.shape[0])[shard.index[0]] for shard in x[...].addressable_shards]
                count = max(span.stop for span in spans) - min(span.start for span in spans)
                rows[".".join(map(str, path))] = count

    trainer = fit(
        jl.lazy(Net), jl.ArrayLoader(random(1)[0], 8), init_from=load, strategy=splitting("fsdp"), logger=False
    )
    say("rows", rows)
    say("steps", trainer.global_step)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_process_reads_its_rows_from_the_endpoint_of_the_environment(count: int, hub: Hub, tmp_path: Path) -> None:
    (hub.root / "owner" / "trained").mkdir()
    path = hub.root / "owner" / "trained" / "model.safetensors"
    jl.save_weights(Net(rngs=nnx.Rngs(5)), path)
    ended = launch(load_here, tmp_path / "job", count=count, devices=4 // count, join=count > 1)
    assert [x.code for x in ended] == [0] * count, ended[0].errors
    arrays = safetensors.numpy.load_file(path)
    rows = [x.said["rows"] for x in ended]
    assert rows[0]["blocks.0.kernel"] == 16 // count
    expected = count * header_size(path)
    for name, x in arrays.items():
        expected += sum(x.nbytes // len(x) * read[name] for read in rows) if x.ndim else count * x.nbytes
    assert hub.bytes_of() == expected


def load_late() -> None:
    if jax.process_index() == jax.process_count() - 1:
        os.environ["HF_TOKEN"] = "late"
    say("error", error_of(lambda: jl.load_weights(Module({}), URL, RULES)))


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.full)])
def test_all_processes_end_when_one_can_read_no_more(count: int, hub: Hub, tmp_path: Path) -> None:
    ended = launch(load_late, tmp_path / "job", count=count, devices=1, join=count > 1)
    assert [x.code for x in ended] == [0] * count, ended[0].errors
    for x in ended:
        assert "net/model-0000" in x.said["error"] and "cannot be read" in x.said["error"]
