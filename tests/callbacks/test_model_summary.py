"""ModelSummary against counts worked out by hand."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit.callbacks import ModelSummary
from jaxlit.callbacks.model_summary import Row, summarize, totals

BODY = nnx.All(nnx.Param, nnx.PathContains("body"))


class Net(nnx.Module):
    """16,640 + 512 + 2,570 = 19,722 parameters, and 512 batch statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = nnx.List([nnx.Linear(64, 256, rngs=rngs), nnx.BatchNorm(256, rngs=rngs)])
        self.head = nnx.Linear(256, 10, rngs=rngs)


@pytest.fixture(scope="module")
def module() -> Net:
    return Net(nnx.Rngs(0))


def on_all(x: Any) -> NamedSharding:
    """Shard the body's kernel over eight devices, and replicate the rest."""
    return on(range(8), P("fsdp", None) if x.shape == (64, 256) else P())


def on(devices: Any, spec: P) -> NamedSharding:
    return NamedSharding(Mesh(np.asarray([jax.devices()[i] for i in devices]), ("fsdp",)), spec)


def make_state(module: Any, wrt: Any = nnx.Param, sharding: Any = on_all) -> Any:
    """Return the state on its devices, each array with the sharding that `sharding` returns."""
    place = lambda x: jax.device_put(np.asarray(x), sharding(x))  # noqa: E731
    _, *states = nnx.split(module, wrt, nnx.Param, ...)
    params, frozen, stats = (jax.tree.map(place, nnx.as_pure(state)) for state in states)
    opt_state = jax.tree.map(place, optax.adam(1e-3).init(params))
    return SimpleNamespace(params=params, frozen=frozen, model_state=stats, opt_state=opt_state)


def test_each_parameter_or_each_part_has_a_row(module) -> None:
    state = make_state(module)
    assert summarize(state, module) == [
        Row("body[0].bias", "Linear", (256,), 256, 256, "replicated", 1024, 1024),
        Row("body[0].kernel", "Linear", (64, 256), 16384, 16384, "P('fsdp', None)", 16384 * 4, 16384 * 4 // 8),
        Row("body[1].bias", "BatchNorm", (256,), 256, 256, "replicated", 1024, 1024),
        Row("body[1].scale", "BatchNorm", (256,), 256, 256, "replicated", 1024, 1024),
        Row("head.bias", "Linear", (10,), 10, 10, "replicated", 40, 40),
        Row("head.kernel", "Linear", (256, 10), 2560, 2560, "replicated", 10240, 10240),
    ]
    assert summarize(state, module, max_depth=1) == [
        Row("body", "List", None, 17152, 17152, "mixed", 3 * 1024 + 65536, 3 * 1024 + 8192),
        Row("head", "Linear", None, 2570, 2570, "replicated", 10280, 10280),
    ]
    assert [row.path for row in summarize(state, module, max_depth=2)][:2] == ["body[0]", "body[1]"]


def test_the_table_shows_paths_frozen_parameters_and_totals(make_trainer, module, capsys) -> None:
    state = make_state(module, BODY)
    rows = summarize(state, module)
    ModelSummary().on_fit_start(make_trainer(state=state), module)
    lines = capsys.readouterr().out.splitlines()
    assert all(row.path in "\n".join(lines) for row in rows)
    assert [line for line in lines if "(frozen)" in line] == [line for line in lines if "head" in line]
    assert {row.path: row.trained for row in rows if row.path.startswith("head")} == {"head.bias": 0, "head.kernel": 0}
    # Parameters: 19,722 x 4 bytes = 77.0 KiB. Adam: two copies of the body's 17,152 and a count = 134 KiB.
    # Per device: the body three times (3 x 11,264), head 10,280, statistics 2,048 and the count 4 = 45.0 KiB.
    # Replicated is all but the body's one matrix: three times 3,072, and the rest.
    assert lines[-2] == "19,722 params (17,152 trained), 77.0 KiB, optimizer 134 KiB, 45.0 KiB per device"
    assert lines[-1] == "  21.0 KiB of it is replicated (not sharded)"
    ModelSummary(max_depth=0).on_fit_start(make_trainer(state=state), module)
    assert capsys.readouterr().out == totals(state) + "\n", "the last line only"
    ModelSummary().on_fit_start(make_trainer(state=state, is_global_zero=False), module)
    assert capsys.readouterr().out == "", "of another process"
    # A deleted array still knows its shape and its sharding; reading it would raise.
    for x in jax.tree.leaves((state.params, state.model_state, state.opt_state)):
        x.delete()
    ModelSummary().on_fit_start(make_trainer(state=state), module)


@pytest.mark.parametrize(("layers", "paths", "left_out"), [(10, 20, False), (11, 11, True)])
def test_a_large_model_is_shown_by_its_parts(layers, paths, left_out, make_trainer, capsys) -> None:
    deep = nnx.Sequential(*[nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(layers)])
    state = make_state(deep)
    ModelSummary().on_fit_start(make_trainer(state=state), deep)
    text = capsys.readouterr().out
    assert text.count("\nlayers") == paths
    assert ("\nModelSummary(max_depth=-1) shows all 22 parameter arrays.\n" in text) == left_out
    assert ("shape" in text) != left_out
    ModelSummary(max_depth=-1).on_fit_start(make_trainer(state=state), deep)
    assert capsys.readouterr().out.count("\nlayers") == 2 * layers


def test_arrays_on_some_devices_count_where_they_are(module) -> None:
    """The body's arrays have 64 x 256 or 256 entries, the head's 256 x 10 and 10."""
    state = make_state(
        module, sharding=lambda x: on([5] if 10 in x.shape else [2], P())
    )  # two stages, each on a mesh of one
    assert {(row.path, row.sharding, row.bytes_per_device) for row in summarize(state, module, max_depth=1)} == {
        ("body", "on cpu:2", 4 * 17152),
        ("head", "on cpu:5", 4 * 2570),
    }
    # The fuller one: the body three times, 512 statistics and the count, of which the other has none.
    assert totals(state).endswith(f"optimizer 154 KiB, {(3 * 4 * 17152 + 2048 + 4) / 1024:.0f} KiB per device")
    crossed = make_state(module, sharding=lambda x: on([5] if x.ndim == 1 else [2], P()))
    assert [(row.sharding, row.bytes_per_device) for row in summarize(crossed, module, max_depth=1)] == [
        ("mixed", 4 * 16384),  # beside 4 * 768 on the other device
        ("mixed", 4 * 2560),
    ]
    split = lambda x: on([0, 1], P(*["fsdp"][: x.ndim]))  # noqa: E731
    halves = make_state(module, sharding=lambda x: on([4, 5, 7], P()) if 10 in x.shape else split(x))
    assert [(row.sharding, row.bytes_per_device) for row in summarize(halves, module, max_depth=1)] == [
        ("P('fsdp') on cpu:0,1", 4 * 17152 // 2),
        ("replicated on cpu:4,5,7", 4 * 2570),
    ]
