"""Groups of devices are read as XLA writes them: what a collective moves shows which devices are in one group."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit.programs.costs import count_collectives, groups_of

DEVICES = np.asarray(jax.devices())


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,4},{1,5}}", [[0, 4], [1, 5]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", [[3, 1], [2, 0]]),
        ("channel_id=1", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_each_way_of_writing_groups(text: str, groups: list[list[int]]) -> None:
    assert groups_of(f"x), channel_id=2, {text}, use_global_device_ids=true", 8) == groups


@pytest.mark.parametrize("axis", ["a", "b"])
@pytest.mark.parametrize("sharding", ["by hand", "by XLA"])
def test_a_program_sends_within_its_axis(axis: str, sharding: str) -> None:
    mesh = Mesh(DEVICES.reshape(2, 4), ("a", "b"))
    if sharding == "by hand":
        body: Any = lambda x: jax.lax.psum(x, axis)  # noqa: E731
        run = jax.shard_map(body, mesh=mesh, in_specs=P(axis), out_specs=P(), check_vma=False)
    else:
        run = lambda x: jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P()))  # noqa: E731
    given = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P(axis)))
    (sent,) = count_collectives(jax.jit(run).lower(given).compile().as_text())
    assert {*sent.sent_by_span} == {5 if axis == "a" else 4}
