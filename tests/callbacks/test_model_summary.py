"""ModelSummary against counts worked out by hand."""

from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit.callbacks import ModelSummary
from jaxlit.callbacks.model_summary import Row, summarize, totals
from jaxlit.errors import ArgumentError


class Net(nnx.Module):
    """16,640 + 512 + 2,570 = 19,722 parameters, and 512 batch statistics."""

    def __init__(self, rngs):
        self.body = nnx.List([nnx.Linear(64, 256, rngs=rngs), nnx.BatchNorm(256, rngs=rngs)])
        self.head = nnx.Linear(256, 10, rngs=rngs)


@pytest.fixture
def module():
    return Net(nnx.Rngs(0))


def make_state(module, wrt=nnx.Param):
    """Return the state on eight devices: the body's kernel in eight shards, the rest whole on each."""
    mesh = Mesh(np.asarray(jax.devices()), ("fsdp",))

    def place(x):
        return jax.device_put(x, NamedSharding(mesh, P("fsdp", None) if x.shape == (64, 256) else P()))

    _, *states = nnx.split(module, wrt, nnx.Param, ...)
    params, frozen, stats = (jax.tree.map(place, nnx.as_pure(state)) for state in states)
    opt_state = jax.tree.map(place, optax.adam(1e-3).init(params))
    return SimpleNamespace(params=params, frozen=frozen, model_state=stats, opt_state=opt_state)


def test_each_parameter_has_a_row(module):
    assert summarize(make_state(module), module) == [
        Row("body[0].bias", "Linear", (256,), 256, 256, "replicated", 1024),
        Row("body[0].kernel", "Linear", (64, 256), 16384, 16384, "P('fsdp', None)", 16384 * 4 // 8),
        Row("body[1].bias", "BatchNorm", (256,), 256, 256, "replicated", 1024),
        Row("body[1].scale", "BatchNorm", (256,), 256, 256, "replicated", 1024),
        Row("head.bias", "Linear", (10,), 10, 10, "replicated", 40),
        Row("head.kernel", "Linear", (256, 10), 2560, 2560, "replicated", 10240),
    ]


def test_frozen_parameters_are_counted_and_not_as_trained(module):
    rows = summarize(make_state(module, wrt=nnx.All(nnx.Param, nnx.PathContains("body"))), module)
    assert {row.path: row.trained for row in rows if row.path.startswith("head")} == {"head.bias": 0, "head.kernel": 0}


def test_depth_one_has_a_row_for_each_part(module):
    assert summarize(make_state(module), module, max_depth=1) == [
        Row("body", "List", None, 17152, 17152, "mixed", 3 * 1024 + 8192),
        Row("head", "Linear", None, 2570, 2570, "replicated", 10280),
    ]


def test_depth_two_names_an_element_of_a_list(module):
    rows = summarize(make_state(module), module, max_depth=2)
    assert [row.path for row in rows][:2] == ["body[0]", "body[1]"]


def test_the_last_line_adds_everything_up(module):
    # Parameters: 19,722 x 4 bytes = 77.0 KiB. Adam: two copies of the body's 17,152 and a count = 134 KiB.
    # Per device: the body three times (3 x 11,264), head 10,280, statistics 2,048 and the count 4 = 45.0 KiB.
    state = make_state(module, wrt=nnx.All(nnx.Param, nnx.PathContains("body")))
    assert totals(state) == "19,722 params (17,152 trained), 77.0 KiB, optimizer 134 KiB, 45.0 KiB per device"


def test_the_table_shows_every_path_whole(make_trainer, module, capsys):
    ModelSummary().on_fit_start(make_trainer(state=make_state(module)), module)
    printed = capsys.readouterr().out
    assert all(row.path in printed for row in summarize(make_state(module), module))


def test_the_table_marks_what_is_not_trained(make_trainer, module, capsys):
    state = make_state(module, wrt=nnx.All(nnx.Param, nnx.PathContains("body")))
    ModelSummary().on_fit_start(make_trainer(state=state), module)
    marked = [line for line in capsys.readouterr().out.splitlines() if "(frozen)" in line]
    assert len(marked) == 2 and all("head" in line for line in marked)


def test_depth_zero_prints_the_last_line_only(make_trainer, module, capsys):
    state = make_state(module)
    ModelSummary(max_depth=0).on_fit_start(make_trainer(state=state), module)
    assert capsys.readouterr().out == totals(state) + "\n"


def test_no_array_is_read(make_trainer, module):
    state = make_state(module)
    # A deleted array still knows its shape and its sharding; reading it would raise.
    for x in jax.tree.leaves((state.params, state.model_state, state.opt_state)):
        x.delete()
    ModelSummary().on_fit_start(make_trainer(state=state), module)


def test_only_the_first_process_prints(make_trainer, module, capsys):
    ModelSummary().on_fit_start(make_trainer(state=make_state(module), is_global_zero=False), module)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("depth", [-2, 1.0, "1", True, None])
def test_a_wrong_depth_is_refused(depth):
    with pytest.raises(ArgumentError, match=r"ModelSummary\(max_depth=...\)"):
        ModelSummary(max_depth=depth)
