"""A compiled program is called as if nothing were asked of it, and told apart from what it costs."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit.engine.compiled_program import CompiledProgram


class Product:
    """A compiled function of (state, batch), which knows how often it was traced."""

    def __init__(self) -> None:
        self.traces = 0
        self.jitted = jax.jit(self._body, donate_argnums=0)

    def _body(self, state: list[Any], batch: Any) -> Any:
        self.traces += 1
        return [state[0] + batch["x"] @ state[0]], batch["n"] + 1


def batch() -> Any:
    return {"x": np.ones((4, 4)), "n": np.int64(3)}  # of 64 bits, which jax makes 32


def test_the_second_call_is_of_the_strategys_function() -> None:
    function = Product().jitted
    program = CompiledProgram("train_step", function)
    assert not program.ran and program.run is not function
    state, count = program.run([jnp.ones((4, 4))], batch())
    assert program.ran and program.run is function
    np.testing.assert_array_equal(state[0], np.full((4, 4), 5.0))
    assert count == 4


def test_it_holds_no_array_of_its_call() -> None:
    program = CompiledProgram("train_step", jax.jit(lambda state, x: (state, x.sum())))
    state, x = [jnp.ones(3)], jnp.ones(5)
    held = [weakref.ref(a) for a in (*state, x)]
    program.run(state, x)
    del state, x
    gc.collect()
    assert [ref() for ref in held] == [None, None]
