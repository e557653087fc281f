"""The engine of the newest evaluation, so that the next one compiles and copies only what is new."""

from typing import Any

import jax

from jaxlit.core.module import TrainModule
from jaxlit.core.precision import Precision
from jaxlit.engine.engine import Engine
from jaxlit.engine.program_key import program_key, same_key
from jaxlit.leaf_names import is_key
from jaxlit.strategies.base import Strategy


class EvalCache:
    """The engine of the newest evaluation, for the next one of the same module.

    Arrays are compared by identity: what the module holds is placed again only if it is another array than the last
    time, so that whatever was written to the module between two calls is used. Another module, or one of which more
    than the arrays has changed, gets a new engine.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        # By index in the engine's state, the array of the module that the one there is a copy of.
        self._copied_from: dict[int, Any] = {}

    def forget(self) -> None:
        """Release the engine and its arrays."""
        self._engine, self._copied_from = None, {}

    def forget_sources(self) -> None:
        """Place all of the module's arrays again next time, as a checkpoint's will replace those of the engine."""
        self._copied_from = {}

    def evaluator(
        self,
        module: TrainModule,
        strategy: Strategy,
        precision: Precision,
        *,
        debug: bool = False,
        take_ownership: bool = False,
        fitted: Engine | None = None,
    ) -> Engine:
        """Return an engine that evaluates the module with the arrays that it holds now.

        Args:
            module: The module.
            strategy: The strategy, set up.
            precision: The dtypes.
            debug: See `Engine`.
            take_ownership: See `Engine`.
            fitted: The engine of the last fit, whose state stays as it is.
        """
        key = program_key(module, strategy, precision)

        def serves(engine: Engine) -> bool:
            # A checkpoint that could not be restored leaves no arrays.
            known = engine.module is module and engine.debug == debug and engine.state.is_restored
            return known and same_key(engine.key, key)

        if self._engine is None or not serves(self._engine):
            self.forget()  # first, so that its arrays are not held as well as the new ones
            if fitted is not None and fitted.state.is_complete and serves(fitted):
                self._engine = fitted
            else:
                options = {"precision": precision, "debug": debug, "take_ownership": take_ownership}
                self._engine = Engine(module, strategy, None, **options)
                # The arrays of a module that the engine owns are overwritten: they cannot be compared with later.
                leaves = [] if take_ownership else self._engine.state.module_leaves(module)
                self._copied_from = {i: leaf.get_raw_value() for _, leaf, i in leaves}
        # Evaluate on a branch: the state of fit, and of the last evaluation, which may still be read, must not change.
        self._engine = self._engine.evaluator()
        if not take_ownership:
            self._place(module, self._engine)
        return self._engine

    def _place(self, module: TrainModule, engine: Engine) -> None:
        """Give the engine's state the arrays that the module holds now."""
        for _, leaf, i in engine.state.module_leaves(module):
            array, stored = leaf.get_raw_value(), engine.state.leaves[i]
            data = jax.random.key_data(array) if is_key(array) else array
            # A numpy array may have been written to in place: its identity shows nothing.
            same = data is stored or (isinstance(array, jax.Array) and array is self._copied_from.get(i))
            if not same or stored.is_deleted():
                # astype for weak types too, as jnp.full(shape, 1.0) makes them: to jit they are other types.
                engine.state.put(i, data.astype(stored.dtype))
                self._copied_from[i] = array
