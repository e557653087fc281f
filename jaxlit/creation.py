"""How a training begins: from a module to the state of step 0, and a lazy module straight into its shards."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxlit.errors import ArgumentError, ModuleError
from jaxlit.module import TrainModule, set_hparams
from jaxlit.precision import Precision, cast
from jaxlit.state import TrainState, Window, leaf_name
from jaxlit.strategies.base import Strategy


def init_state(
    tx: optax.GradientTransformation,
    window_replicas: int | None,
    precision: Precision,
    params: Any,
    frozen: Any,
    model_state: Any,
) -> TrainState:
    """Build the state of step 0; metrics have no columns until the step was traced.

    Args:
        tx: The optimizer.
        window_replicas: Size of the accumulation window's leading dim, None if it has none, 0 for no window.
        precision: The dtypes.
        params: Trained variables.
        frozen: Other parameters.
        model_state: Other state.
    """
    params, frozen = cast(params, precision.held), cast(frozen, precision.held)
    window = None
    if window_replicas != 0:
        lead = () if window_replicas is None else (window_replicas,)
        window = Window(
            jax.tree.map(lambda p: jnp.zeros((*lead, *p.shape), jnp.float32), params),
            jnp.zeros(lead, jnp.float32),
            jnp.zeros((*lead, 2, 0), jnp.float32),
        )
    state = TrainState(
        counters=jnp.array([0, 0, 0, -1], jnp.int32),
        params=params,
        frozen=frozen,
        model_state=model_state,
        opt_state=tx.init(params),
        window=window,
        loss_scale=precision.first_scale(),
        sums=jnp.zeros((4, 0), jnp.float32),
    )
    # A copy of everything: an optimizer may keep the parameters themselves (lookahead, averages), and
    # neither two leaves of a donated state nor the state and its caller may share a buffer.
    return jax.tree.map(jnp.copy, state)


def check_trainable(tx: optax.GradientTransformation, params: Any, name: str) -> None:
    """Refuse what the optimizer cannot train.

    Raises:
        ModuleError: Naming the variable, or what the optimizer says.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ModuleError(f"{name} has no variable to train. Give it an nnx.Param, or widen jl.Optimizer(wrt=...).")
    for path, x in leaves:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ModuleError(
                f"{name}: {leaf_name(path)} is {x.dtype}, and only floating parameters can be trained. "
                "Make it an nnx.Variable, or leave it out of jl.Optimizer(wrt=...)."
            )
    try:
        jax.eval_shape(tx.init, params)
    except Exception as error:
        what = str(error).split("\n")[0].rstrip(".")
        raise ModuleError(
            f"{name}.configure_optimizers: the optimizer cannot be set up for the parameters: {what}. Give masks of "
            "optax.masked and the labels of optax.multi_transform as functions of params: lambda params: "
            "jax.tree.map(..., params)."
        ) from error


def check_variables(module: TrainModule) -> None:
    """Refuse a module whose Variables do not hold one array each.

    Raises:
        ModuleError: One of them holds something else.
    """
    for path, leaf in nnx.to_flat_state(nnx.state(module)):
        value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            where = leaf_name(path)
            raise ModuleError(
                f"{type(module).__name__}: {where} holds {type(value).__name__}, not an array. "
                "Make one nnx.Variable for each array."
            )


class lazy:
    """A module that is built inside the strategy, straight into its shards.

    Parameters larger than a device never exist whole on one. `rngs` left out is
    `nnx.Rngs(trainer.seed)`; an int or an `nnx.Rngs` is copied. The weights equal those of
    `cls(*args, **kwargs)` to rounding. The built module is `trainer.module`.

    Args:
        cls: A subclass of `TrainModule`.
        *args: Positional arguments of its constructor.
        **kwargs: Keyword arguments of its constructor.

    Example:
        >>> import jaxlit as jl
        >>> class Model(jl.TrainModule):
        ...     def __init__(self, width, *, rngs): ...
        >>> model = jl.lazy(Model, width=256)
    """

    def __init__(self, cls: type[TrainModule], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, TrainModule)):
            raise ArgumentError(f"jl.lazy(cls, ...) takes a subclass of jl.TrainModule, got {cls!r}.")
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def builder(self, seed: int) -> Callable[[], TrainModule]:
        """Return a function that builds the module, fit to be traced."""
        kwargs = dict(self.kwargs)
        names = list(inspect.signature(self.cls.__init__).parameters)
        args = list(self.args)
        if "rngs" in names and names.index("rngs") - 1 < len(args):  # given by position
            kwargs |= dict(zip(names[1 : len(args) + 1], args, strict=False))
            args = []
        rngs = kwargs.pop("rngs", seed if "rngs" in names else None)
        if rngs is None:
            return lambda: self.cls(*args, **kwargs)
        graphdef, state = nnx.split(nnx.Rngs(rngs) if isinstance(rngs, int) else rngs)
        state = nnx.as_pure(state)
        # The generator is rebuilt in the trace, so that drawing from it neither leaks nor changes the caller's.
        return lambda: self.cls(*args, **kwargs, rngs=nnx.merge(graphdef, state, copy=True))

    def note(self, module: TrainModule) -> TrainModule:
        """Keep the constructor's arguments as the hyperparameters of the built module."""
        set_hparams(module, self.args, self.kwargs)
        return module


def build_lazy(model: lazy, strategy: Strategy, seed: int) -> TrainModule:
    """Build a lazy module straight into the shards of the strategy."""
    build = model.builder(seed)
    graphs: list[Any] = []

    def init() -> Any:
        graphdef, params, rest = nnx.split(build(), nnx.Param, ...)
        graphs.append(graphdef)
        return nnx.as_pure(params), nnx.as_pure(rest)

    try:
        params, rest = jax.eval_shape(init)
    except ValueError as error:
        if "mesh" not in str(error):
            raise
        raise ModuleError(
            f"jl.lazy({model.cls.__name__}): a Variable is annotated with mesh axes, which flax looks up as it is made "
            f"({error}). Build the module under a mesh with these axes and give it to the Trainer: "
            f"with jax.set_mesh(mesh): module = {model.cls.__name__}(...)."
        ) from error
    blank = _abstract_state(params, rest)
    shardings = strategy.state_sharding(blank)
    arrays = strategy.create_state(init, (shardings.params, shardings.model_state))
    return model.note(nnx.merge(graphs[0], *arrays))


def _abstract_state(params: Any, model_state: Any) -> TrainState:
    """Return the abstract state of a model with no optimizer, to ask a strategy for its shardings."""
    empty = nnx.State({})
    state = jax.eval_shape(partial(init_state, optax.identity(), 0, Precision()), params, empty, model_state)
    return replace(state, opt_state=())
