"""How a training begins: from a module to the state of step 0.

At the end `lazy`: a module that is built inside the strategy, straight into its shards.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.errors import TraceContextError
from jax.core import Tracer
from jax.sharding import NamedSharding

from jaxlit.core.attributes import LINEN_AS_NNX, each_attribute, hide_values
from jaxlit.core.inspection import written_to
from jaxlit.core.log import Table
from jaxlit.core.module import TrainModule
from jaxlit.core.pure_module import PureModule
from jaxlit.core.train_state import Precision, TrainState, Window, WindowStart, cast, sum_dtype
from jaxlit.errors import ArgumentError, ModuleError
from jaxlit.sharding import note_mesh, renamed
from jaxlit.strategies.base import Strategy
from jaxlit.texts import is_key, named_leaves, shown
from jaxlit.variables import merge, split


def init_state(
    tx: optax.GradientTransformation,
    window_replicas: int | None,
    precision: Precision,
    *variables: Any,
    extras: Mapping[str, Any] = MappingProxyType({}),
    undone: Sequence[str] = (),
) -> TrainState:
    """Build the state of step 0; metrics have no columns until the step was traced.

    `window_replicas` is the size of the accumulation window's leading dim, None if it has none, 0 for no window;
    `variables` are (params, frozen, model_state), and `undone` the paths of what a window that is left out puts back.
    """
    params, frozen, model_state = variables
    params, frozen, window = cast(params, precision.held), cast(frozen, precision.held), None
    no_metrics = Table([])
    if window_replicas != 0:
        lead = () if window_replicas is None else (window_replicas,)
        grads = jax.tree.map(lambda p: jnp.zeros((*lead, *p.shape), sum_dtype(p)), params)
        window = Window(grads, jnp.zeros((*lead, *no_metrics.empty().shape), float))
    state = TrainState(
        counters=jnp.array([0, 0, 0, -1], jnp.int32),
        params=params,
        frozen=frozen,
        model_state=model_state,
        opt_state=tx.init(params),
        window=window,
        loss_scale=precision.first_scale(),
        sums=jnp.asarray(no_metrics.empty_sums()),
        # Each gets a copy of the tree, which it may write to.
        extras={key: keeper.init_arrays(jax.tree.map(lambda x: x, params)) for key, keeper in extras.items()},
    )
    if undone:
        module = state.module
        start = WindowStart(jnp.zeros((), jnp.int32), {name: module[name] for name in undone})
        state = replace(state, window_start=start)
    return unshared(state)


def unshared(state: Any) -> Any:
    """Return a copy of all arrays of a state.

    An optimizer may keep the parameters themselves (lookahead, averages), and neither two leaves of a donated state nor
    the state and its caller may share a buffer. Of types that are not weak, as jnp.asarray(0.0) makes them: a step
    returns none, and would compile a second time.
    """
    return jax.tree.map(lambda x: jnp.copy(x) if is_key(x) else jnp.array(x, dtype=x.dtype), state)


def check_trainable(tx: optax.GradientTransformation, params: Any, module: TrainModule) -> None:
    """Refuse variables of a module that the optimizer cannot train.

    Raises:
        ModuleError: Naming the variable, or the optimizer's error.
    """
    name, leaves = type(module).__name__, named_leaves(params)
    if not leaves:
        held = next((path for path, at, name in each_attribute(module) if isinstance(at[name], linen.Module)), None)
        why = "" if held is None else f"; {held} is a linen module, whose variables nnx does not see: {LINEN_AS_NNX}"
        raise ModuleError(
            f"{name} has no variable to train{why}. Give it an nnx.Param, or widen jl.Optimizer(wrt=...)."
        )
    for path, x in leaves:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise ModuleError(
                f"{name}: {path} is {x.dtype}, and only floating and complex parameters can be trained. "
                "Make it an nnx.Variable, or leave it out of jl.Optimizer(wrt=...)."
            )
    # By shapes: the error comes now, before the state is made in shards, where it would be one of compiling.
    try:
        jax.eval_shape(tx.init, params)
    except Exception as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise ModuleError(
            f"{name}.configure_optimizers: the optimizer cannot be set up for the parameters: {reason}. Give masks of "
            "optax.masked and the labels of optax.multi_transform as functions of params: lambda params: "
            "jax.tree.map_with_path(lambda path, _: path[0].key, params)."
        ) from error


def check_rounding(tx: optax.GradientTransformation, params: Any, module: TrainModule) -> None:
    """Refuse an optimizer that keeps numbers in the 16 bits of the parameters, where these change them.

    Raises:
        ModuleError: A hyperparameter changes by over a thousandth, or is scheduled, or a number becomes 0 or 1.
    """
    state = dict(named_leaves(jax.eval_shape(tx.init, params)))
    if not (low := [name for name, x in state.items() if not x.shape and x.dtype in (jnp.bfloat16, jnp.float16)]):
        return
    # Of small parameters: numbers such as a hyperparameter depend on the paths and dims of the parameters only.
    small = jax.tree.map(lambda x: jnp.zeros((1,) * len(x.shape), x.dtype), params)
    try:
        rounded, exact = (dict(named_leaves(tx.init(x))) for x in (small, cast(small, jnp.float32)))
    except Exception:  # of an optimizer that takes no other shapes
        return
    for name in [name for name in low if name in rounded and name in exact]:
        was, now = float(exact[name]), float(rounded[name])
        of_schedule = name.replace("hyperparams.", "hyperparams_states.")
        is_scheduled = any(x.startswith(f"{of_schedule}.") for x in state)
        is_changed = is_scheduled or abs(now - was) > 1e-3 * abs(was)
        if (is_changed and of_schedule != name) or (now != was and now in (0, 1)):
            rounding = "every value of its schedule" if is_scheduled else f"{was:.6g} to {now:.6g}"
            raise ModuleError(
                f"{type(module).__name__}.configure_optimizers: the optimizer keeps {name} in {rounded[name].dtype}, "
                f"the dtype of the parameters, which rounds {rounding}. Pass optax.inject_hyperparams(..., "
                "hyperparam_dtype=jnp.float32), or keep them in float32, as precision='bf16-mixed' does."
            )


def undone_with_window(pure: PureModule, strategy: Strategy, state: TrainState, example: Any) -> list[str]:
    """Return the paths of what a training step writes to the module, but for counts and random keys.

    The state is abstract. Without a first batch all arrays count as written.
    """
    written = [True] * len(state.module)
    if example is not None:
        written = written_to(pure, strategy.step_program(state, pure, example), *state.variables)
    triples = zip(pure.leaves(*state.variables), state.module.items(), written, strict=True)
    return [name for leaf, (name, x), is_written in triples if is_written and not leaf.continues(x.dtype)]


@lru_cache(maxsize=64)
def epoch_starter(sharding: NamedSharding) -> Callable[..., jax.Array]:
    """Return a program of (counters, epoch), the same for all engines whose counters have this sharding."""
    return jax.jit(lambda counters, epoch: counters.at[1].set(epoch).at[2].set(0), out_shardings=sharding)


class lazy:
    """A module that is built inside the strategy, straight into its shards.

    Parameters larger than a device never exist unsharded on one. `rngs` left out is
    `nnx.Rngs(trainer.seed)`; an int or an `nnx.Rngs` is copied. The weights equal those of
    `make(*args, **kwargs)` to rounding. The built module is `trainer.module`.

    Args:
        make: A subclass of `TrainModule`, or a function that returns one's instance.
        *args: Positional arguments of it.
        **kwargs: Keyword arguments of it.

    Example:
        >>> import jaxlit as jl
        >>> class Model(jl.TrainModule):
        ...     def __init__(self, width, *, rngs): ...
        >>> model = jl.lazy(Model, width=256)
    """

    def __init__(self, make: Callable[..., TrainModule], *args: Any, **kwargs: Any) -> None:
        if not callable(make) or (isinstance(make, type) and not issubclass(make, TrainModule)):
            rule = "takes a subclass of jl.TrainModule, or a function that makes one"
            raise ArgumentError(f"jl.lazy(make, ...) {rule}, got {shown(make)}.")
        self.make, self.args, self.kwargs = make, args, kwargs

    @property
    def cls(self) -> type[TrainModule]:
        """The class of the module; `TrainModule` itself if only a function knows it."""
        return self.make if isinstance(self.make, type) else TrainModule

    @property
    def name(self) -> str:
        """What is called, for messages."""
        return getattr(self.make, "__name__", type(self.make).__name__)

    @property
    def parameters(self) -> list[str]:
        """The names of its parameters."""
        if isinstance(self.make, type):  # nnx hides the signature of a class
            return [*inspect.signature(self.make.__init__).parameters][1:]
        return [*inspect.signature(self.make).parameters]

    def builder(self, seed: int) -> Callable[[], TrainModule]:
        """Return a function that builds the module, fit to be traced."""
        kwargs = dict(self.kwargs)
        names, args = self.parameters, list(self.args)
        if "rngs" in names and names.index("rngs") < len(args):  # given by position
            kwargs |= dict(zip(names, args, strict=False))
            args = []
        rngs = kwargs.pop("rngs", seed if "rngs" in names else None)
        if rngs is None:
            return lambda: self.make(*args, **kwargs)
        graphdef, state = nnx.split(nnx.Rngs(rngs) if isinstance(rngs, int) else rngs, graph=True)
        state = nnx.as_pure(state)
        # The generator is rebuilt in the trace, so that drawing from it neither leaks nor changes the caller's.
        return lambda: self.make(*args, **kwargs, rngs=nnx.merge(graphdef, state, copy=True))


def shape_lazy(model: lazy, strategy: Strategy, seed: int) -> tuple[TrainModule, Callable[[], Any]]:
    """Return a lazy module of shapes and dtypes, and a function that makes its parameters and other variables."""
    build = model.builder(seed)
    graphs = []

    def init() -> Any:
        # The strategy places what the module annotates: its names may be of dims, which no mesh knows.
        with nnx.use_eager_sharding(False):
            try:
                module = build()
            except Exception as error:
                note_mesh(error)
                raise
            if not isinstance(module, TrainModule):
                raise ArgumentError(f"jl.lazy({model.name}): it must make a jl.TrainModule, got {shown(module)}.")
            for node in [x for _, x in nnx.iter_graph(module, graph=True) if isinstance(x, nnx.Pytree)]:
                for name, value in list(vars(node).items()):
                    if isinstance(value, Tracer):  # for nnx a static attribute, which would leave the trace
                        setattr(node, name, nnx.data(value))
            graphdef, params, rest = split(module, nnx.Param, ...)
            hide_values(module)
        graphs.append(graphdef)
        return params, rest

    try:
        # On Explicit axes with the types that its code gives to arrays.
        params, rest = strategy.under_mesh(jax.eval_shape)(init if strategy.explicit_axes else strategy.in_mesh(init))
    except TraceContextError as error:
        if "Rng" not in str(error):
            raise
        name = model.name
        raise ModuleError(
            f"jl.lazy({name}) builds {name} while it is traced, and its __init__ draws from an nnx.Rngs that was made "
            "before, a default argument or a global one. Take it as an argument, def __init__(self, ..., *, rngs), "
            "which jl.lazy gives; or make it in __init__, nnx.Rngs(0)."
        ) from error
    return merge(graphs[0], params, rest), strategy.typed(init, ())


def build_lazy(model: lazy, strategy: Strategy, seed: int) -> TrainModule:
    """Build a lazy module straight into the shards of the strategy."""
    shapes, init = shape_lazy(model, strategy, seed)
    graphdef, params, rest = split(shapes, nnx.Param, ...)
    pure = PureModule(graphdef, nnx.Param, shapes)
    # Of a state without optimizer, known before an array exists: none is ever unsharded on a device.
    blank = jax.eval_shape(partial(init_state, optax.identity(), 0, Precision()), params, nnx.State({}), rest)
    shardings = strategy.state_sharding(replace(blank, opt_state=()), pure, None)
    used, _, used_rest = strategy.used_sharding(shardings, pure)
    arrays = strategy.create_state(init, (shardings.params, shardings.model_state))
    if strategy.explicit_axes:  # with types, which differ between what the module has split and what its size has
        mesh = strategy.model_mesh
        arrays = jax.tree.map(lambda x, of: renamed(x, mesh) if x.sharding == of else x, arrays, (used, used_rest))
    return merge(graphdef, *arrays)
