"""A module that is built inside the strategy, straight into its shards."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx
from flax.errors import TraceContextError
from jax.core import Tracer

from jaxlit.core.hparams import share_hparams
from jaxlit.core.module import TrainModule
from jaxlit.core.precision import Precision
from jaxlit.core.pure_module import PureModule
from jaxlit.engine.creation import check_variables, init_state
from jaxlit.errors import ArgumentError, ModuleError
from jaxlit.shown import shown
from jaxlit.strategies.base import Strategy


class lazy:
    """A module that is built inside the strategy, straight into its shards.

    Parameters larger than a device never exist unsharded on one. `rngs` left out is
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
            raise ArgumentError(f"jl.lazy(cls, ...) takes a subclass of jl.TrainModule, got {shown(cls)}.")
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
        cls: Callable[..., TrainModule] = self.cls
        return lambda: cls(*args, **kwargs, rngs=nnx.merge(graphdef, state, copy=True))


def shape_lazy(model: lazy, strategy: Strategy, seed: int) -> tuple[TrainModule, Callable[[], Any]]:
    """Return a lazy module of shapes and dtypes, and a function that makes its parameters and other variables."""
    build = model.builder(seed)
    graphs, traced = list[Any](), list[TrainModule]()

    def init() -> Any:
        # The strategy places what the module annotates: its names may be of dims, which no mesh knows.
        with nnx.use_eager_sharding(False):
            module = build()
            for node in [x for _, x in nnx.iter_graph(module) if isinstance(x, nnx.Pytree)]:
                for name, value in list(vars(node).items()):
                    if isinstance(value, Tracer):  # for nnx a static attribute, which would leave the trace
                        setattr(node, name, nnx.data(value))
            check_variables(module)
            graphdef, params, rest = nnx.split(module, nnx.Param, ...)
        graphs.append(graphdef)
        traced.append(module)
        return nnx.as_pure(params), nnx.as_pure(rest)

    try:
        params, rest = jax.eval_shape(strategy.in_mesh(init))
    except TraceContextError as error:
        if "Rng" not in str(error):
            raise
        name = model.cls.__name__
        raise ModuleError(
            f"jl.lazy({name}) builds {name} while it is traced, and its __init__ draws from an nnx.Rngs that was made "
            "before, a default argument or a global one. Take it as an argument, def __init__(self, ..., *, rngs), "
            "which jl.lazy gives; or make it in __init__, nnx.Rngs(0)."
        ) from error
    module = nnx.merge(graphs[0], params, rest)
    share_hparams(module, traced[0])
    return module, init


def build_lazy(model: lazy, strategy: Strategy, seed: int) -> TrainModule:
    """Build a lazy module straight into the shards of the strategy."""
    shapes, init = shape_lazy(model, strategy, seed)
    graphdef, *variables = nnx.split(shapes, nnx.Param, ...)
    params, rest = map(nnx.as_pure, variables)
    pure = PureModule(graphdef, nnx.Param, shapes)
    # Of a state without optimizer, known before an array exists: none is ever unsharded on a device.
    blank = jax.eval_shape(partial(init_state, optax.identity(), 0, Precision()), params, nnx.State({}), rest)
    shardings = strategy.state_sharding(replace(blank, opt_state=()), pure, None)
    arrays = strategy.create_state(init, (shardings.params, shardings.model_state))
    built = nnx.merge(graphdef, *arrays)
    share_hparams(built, shapes)
    return built
