"""The training state as one list of arrays."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import random
from kit.inside import engine_of
from kit.modules import Net
from kit.trainers import THREE, fit, thinned


@pytest.mark.parametrize("strategy", thinned(THREE, "fsdp"))
def test_a_state_is_finite_if_every_number_of_it_is(strategy) -> None:
    state = engine_of(fit(Net(rngs=nnx.Rngs(0)), random(1), strategy=strategy)).state
    assert state.is_finite()
    for place, array in enumerate(state.leaves):
        if not jnp.issubdtype(array.dtype, jnp.floating) or not array.size:
            continue
        for bad in (np.nan, np.inf):
            wrong = np.array(array)
            wrong.flat[-1] = bad
            state.put(place, wrong)
            assert not state.is_finite(), place
        state.put(place, array)
    assert state.is_finite()
