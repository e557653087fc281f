"""A compiled program is called as if nothing were asked of it, and told apart from what it costs."""

import gc
import weakref

import jax
import jax.numpy as jnp

from jaxlit.engine.compiled_program import CompiledProgram


def test_it_holds_no_array_of_its_call() -> None:
    program = CompiledProgram("train_step", jax.jit(lambda state, x: (state, x.sum())))
    state, x = [jnp.ones(3)], jnp.ones(5)
    held = [weakref.ref(a) for a in (*state, x)]
    program.run(state, x)
    del state, x
    gc.collect()
    assert [ref() for ref in held] == [None, None]
