"""What is kept between the calls of one Trainer, so that an evaluation compiles and copies only what is new."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit.core.module import TrainModule
from jaxlit.core.precision import Precision
from jaxlit.engine.engine import Engine
from jaxlit.engine.flat_state import FlatState
from jaxlit.engine.traits import Traits
from jaxlit.leaf_names import is_key
from jaxlit.strategies.base import Strategy


class KeptEngine:
    """The engine of the newest evaluation, for the next one of the same module.

    Arrays are known by identity: what the module holds is placed again only if it is another array than the last time,
    so that whatever was written to the module between two calls is used. For another module, and for one of which
    more than the numbers has changed, an engine is made again.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        # By place in the engine's state, the array of the module that the one there is a copy of.
        self._copied_from: dict[int, Any] = {}

    def forget(self) -> None:
        """Let go of the engine and its arrays."""
        self._engine, self._copied_from = None, {}

    def evaluator(
        self,
        module: TrainModule,
        strategy: Strategy,
        precision: Precision,
        *,
        debug: bool = False,
        own: bool = False,
        restores: bool = False,
        fitted: Engine | None = None,
    ) -> Engine:
        """Return an engine that evaluates the module with the arrays that it holds now.

        Args:
            module: The module.
            strategy: The strategy, set up.
            precision: The dtypes.
            debug: See `Engine`.
            own: See `Engine`.
            restores: Whether a checkpoint's arrays will take the place of the module's.
            fitted: The engine of the last fit, whose state stays as it is.
        """
        traits = Traits.of(module, strategy, precision)
        serves = partial(_serves, module, traits, debug)
        if self._engine is None or not serves(self._engine):
            self.forget()  # first, so that its arrays are not held beside the new ones
            if fitted is not None and fitted.state.is_whole and serves(fitted):
                self._engine = fitted
            else:
                self._engine = Engine(module, strategy, None, precision=precision, debug=debug, own=own)
                # Those of a module of our own are overwritten: it is given the engine's in their place.
                leaves = [] if own else self._engine.state.module_leaves(module)
                self._copied_from = {place: _array(leaf) for _, leaf, place in leaves}
        # Of its own, so that neither a fit's state nor the last evaluation, which may still be looked at, is changed.
        self._engine = self._engine.evaluator()
        if not own:
            self._take_from(module, self._engine.state)
        if restores:
            self._copied_from = {}
        return self._engine

    def _take_from(self, module: TrainModule, state: FlatState) -> None:
        """Give the engine's state the arrays that the module holds now."""
        for _, leaf, place in state.module_leaves(module):
            array, held = _array(leaf), state.leaves[place]
            data = jax.random.key_data(array) if is_key(array) else array
            # Of a numpy array identity says nothing: it may have been written to where it is.
            same = data is held or (isinstance(array, jax.Array) and array is self._copied_from.get(place))
            if not same or held.is_deleted():
                # astype for weak types too, as jnp.full(shape, 1.0) makes them: to jit they are other types.
                state.put(place, data.astype(held.dtype))
                self._copied_from[place] = array


def _serves(module: TrainModule, traits: Traits, debug: bool, engine: Engine) -> bool:
    """Return whether an engine can evaluate a module as it is now."""
    same = engine.module is module and engine.debug == debug and engine.traits.equal(traits)
    return same and _has_room_for(module, engine)


def _has_room_for(module: TrainModule, engine: Engine) -> bool:
    """Return whether the module's arrays have the shapes and dtypes of the engine's."""
    state, held = engine.state, engine.pure.precision.held
    parameters = set(jax.tree.leaves((state.at.params, state.at.frozen)))  # only these are held in another dtype
    for _, leaf, place in state.module_leaves(module):
        array, there = _array(leaf), state.leaves[place]
        # A checkpoint that could not be restored leaves nothing there.
        if there is None or not hasattr(array, "dtype"):
            return False
        impl = jax.random.key_impl(array) if is_key(array) else None
        data = array if impl is None else jax.random.key_data(array)
        dtype = jax.dtypes.canonicalize_dtype(data.dtype)
        if held is not None and place in parameters and jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.dtype(held)
        if (impl, data.shape, dtype) != (state.layout.key_impls.get(place), there.shape, there.dtype):
            return False
    return True


def _array(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
