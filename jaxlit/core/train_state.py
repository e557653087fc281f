"""Everything a training step changes, as one pytree, and how a training takes its steps.

`TrainState` with its flat form, `Layout`; `Precision`, the dtypes of a step and the scale of its loss; `StepOptions`;
and at the end the arrays that callbacks keep in the state.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxlit.core.optimizer import Optimizer, on_real_parts, with_stacked
from jaxlit.core.parts import Part
from jaxlit.errors import ModuleError, note_place
from jaxlit.texts import is_key, leaf_name, named_leaves, shown
from jaxlit.variables import impl_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """An accumulation window: what the microbatches since the last optimizer step add up to.

    Strategies whose step sees one replica's rows keep a window per replica, stacked along a leading
    dim of size `num_replicas`, and reduce it once, in the update step.
    """

    grads: nnx.State[Any, Any]  # sum of weighted gradients, the shape of the parameters, see `sum_dtype`
    metrics: jax.Array  # (2, num_metrics), see jaxlit.core.log.Table


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowStart:
    """What the steps of an accumulation window write to the module, as it was before the window.

    Under `nan_policy="skip"` a window that is not finite puts it back, under "16-mixed" one that overflows.
    """

    batches: jax.Array  # () int32, batches since then
    arrays: dict[str, jax.Array]  # by path: floating arrays of the module; of no meaning after 0 batches


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a training step changes."""

    # One array: each array more in the state costs a step one or two microseconds.
    counters: jax.Array  # (4,) int32: step, epoch, batch_idx, bad_step
    params: nnx.State[Any, Any]  # variables that the optimizer trains
    frozen: nnx.State[Any, Any]  # nnx.Param variables that it does not
    model_state: nnx.State[Any, Any]  # batch statistics, rng keys and counts, caches, custom variables
    opt_state: Any  # optax.OptState
    window: Window | None  # None when every batch is an optimizer step
    loss_scale: jax.Array | None  # (2,) float32, see Precision; None without loss scaling
    sums: jax.Array  # (4, num_metrics), metrics of the epoch so far
    extras: dict[str, Any] = field(default_factory=dict)  # arrays of callbacks, by their `state_key`
    window_start: WindowStart | None = None  # None where no window is put back

    @property
    def step(self) -> jax.Array:
        """() int32, optimizer steps taken."""
        return self.counters[0]

    @property
    def epoch(self) -> jax.Array:
        """() int32, the current epoch."""
        return self.counters[1]

    @property
    def batch_idx(self) -> jax.Array:
        """() int32, batches of this epoch seen."""
        return self.counters[2]

    @property
    def bad_step(self) -> jax.Array:
        """() int32, the first non-finite step under "raise", the newest under "skip"; -1 if there was none."""
        return self.counters[3]

    def advance(self, *, steps: int, bad_step: jax.Array | None = None) -> "TrainState":
        """Count one batch and `steps` optimizer steps."""
        bad_step = self.bad_step if bad_step is None else bad_step
        return replace(self, counters=jnp.stack([self.step + steps, self.epoch, self.batch_idx + 1, bad_step]))

    @property
    def variables(self) -> tuple[nnx.State[Any, Any], nnx.State[Any, Any], nnx.State[Any, Any]]:
        """The module's arrays: (params, frozen, model_state)."""
        return self.params, self.frozen, self.model_state

    def with_variables(self, variables: Sequence[nnx.State[Any, Any]]) -> "TrainState":
        """Return the state with other (params, frozen, model_state)."""
        params, frozen, model_state = variables
        return replace(self, params=params, frozen=frozen, model_state=model_state)

    @property
    def module(self) -> dict[str, jax.Array]:
        """The module's arrays by their paths, in the order of `variables`."""
        return {leaf_name(path[1:]): x for path, x in jax.tree_util.tree_leaves_with_path(self.variables)}

    def next_start(self) -> WindowStart | None:
        """Return `window_start` after one more batch: the first of a window stores the module's arrays."""
        if (start := self.window_start) is None:
            return None
        begins, module = start.batches == 0, self.module
        arrays = {name: jnp.where(begins, module[name], x) for name, x in start.arrays.items()}
        return WindowStart(start.batches + 1, arrays)


class Layout:
    """The flat form of a pytree: a list of raw arrays.

    Typed PRNG keys leave jit's C++ fast path, so the list has their raw `key_data`, which the trace wraps again.

    Args:
        tree: A pytree of arrays or `jax.ShapeDtypeStruct`s.
        view: What `unflatten` makes of such a pytree.

    Attributes:
        key_impls: The implementation of each leaf that is a key, by index.
    """

    def __init__(self, tree: Any, view: Callable[[Any], Any] = lambda tree: tree) -> None:
        self._view = view
        leaves, self.treedef = jax.tree.flatten(tree)
        self.key_impls = {i: impl_of(x) for i, x in enumerate(leaves) if is_key(x)}

    def flatten(self, tree: Any) -> list[jax.Array]:
        """Return the leaves of `tree`, keys as raw data."""
        leaves = jax.tree.leaves(tree)
        for i in self.key_impls:
            leaves[i] = jax.random.key_data(leaves[i])
        return leaves

    def unflatten(self, leaves: list) -> Any:
        """Return the tree of `leaves`, raw data as keys."""
        if self.key_impls:
            leaves = list(leaves)
            for i, impl in self.key_impls.items():
                leaves[i] = jax.random.wrap_key_data(leaves[i], impl=impl)
        return self._view(jax.tree.unflatten(self.treedef, leaves))


_FIRST_SCALE = 2.0**15  # the largest power of two that float16 holds, as the loss itself may be float16
_GROWTH_INTERVAL = 2000  # finite steps after which the scale doubles

FullPrecisionName = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"]
PrecisionName = Literal[FullPrecisionName, "32", "bf16", "16"]  # and Lightning's short words
PRECISIONS = get_args(FullPrecisionName)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training.

    A mixed precision keeps parameters, optimizer, state, loss and metrics in float32, and casts floating
    parameters and batch leaves for the step. "16-mixed" scales the loss so that small gradients survive
    float16, after Micikevicius et al., 2017 (https://arxiv.org/abs/1710.03740): the scale halves when a
    gradient overflows, whose step changes nothing, and doubles after 2000 steps without.
    """

    name: str = "32-true"  # "32-true", "bf16-mixed", "bf16-true" or "16-mixed"

    @property
    def compute(self) -> Any:
        """The dtype that parameters and batches have in a step; None leaves them as they are."""
        return {"bf16-mixed": jnp.bfloat16, "bf16-true": jnp.bfloat16, "16-mixed": jnp.float16}.get(self.name)

    @property
    def held(self) -> Any:
        """The dtype in which parameters are held; None leaves them as they are."""
        return jnp.bfloat16 if self.name == "bf16-true" else None

    def first_scale(self) -> jax.Array | None:
        """Return the loss scale to begin with: (2,) float32, the scale and the finite steps since it changed."""
        return jnp.array([_FIRST_SCALE, 0.0], jnp.float32) if self.name == "16-mixed" else None

    def next_scale(self, scale: jax.Array, overflow: jax.Array) -> jax.Array:
        """Return the scale after an optimizer step."""
        factor, steps = scale[0], scale[1] + 1
        grown = steps >= _GROWTH_INTERVAL
        factor = jnp.where(overflow, factor / 2, jnp.where(grown, factor * 2, factor))
        return jnp.stack([factor, jnp.where(overflow | grown, 0.0, steps)])


def cast(tree: Any, dtype: Any) -> Any:
    """Return the tree with its floating arrays in `dtype`; None changes nothing."""
    if dtype is None:
        return tree

    def to_dtype(x: Any) -> Any:
        floating = not is_key(x) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if floating and x.dtype != dtype else x

    return jax.tree.map(to_dtype, tree)


def sum_dtype(x: Any, dtype: Any = jnp.float32) -> Any:
    """Return the dtype in which gradients of a parameter add up, given that of real parameters.

    It is float32 for parameters of fewer bits too: small gradients would be lost in a sum of 16 bits.
    """
    dtype = jnp.float64 if jnp.finfo(x.dtype).bits == 64 else dtype
    return jnp.promote_types(dtype, jnp.complex64) if jnp.iscomplexobj(x) else dtype


@dataclass(frozen=True)
class StepOptions:
    """How a training takes its optimizer steps."""

    optimizer: Optimizer  # what `configure_optimizers` returned, with a state for each of the parts
    accumulate: int = 1  # batches an optimizer step
    nan_policy: str = "raise"  # "raise", "skip" or "ignore"
    # transforms the gradients before the optimizer; without state. None for nothing
    clip: optax.GradientTransformation | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)  # callbacks that keep arrays in the state, by their keys
    parts: Sequence[Part] = ()  # what is trained from an epoch on only
    # a function of (error, callback, hook) to whether training continues without the callback
    tolerates: Callable[[Exception, Any, str], bool] = lambda *_: False
    log_every: int = 0  # steps from row to row, 0 for none or as long as it is unknown
    rows_after: int = 0  # the step at which that interval was set: rows at later multiples of it count
    example: Any = None  # the first batch, for a strategy that looks at the step before it places the state
    holds_weights: bool = False  # whether the optimizer's state begins with numbers of the parameters, as averages do

    def for_params(self, params: Any, stacked: dict[str, int]) -> "StepOptions":
        """Return the options with transforms for these parameters, some of which may be complex; see `with_stacked`."""
        tx, clip = with_stacked(self.optimizer.tx, stacked), self.clip
        if any(map(jnp.iscomplexobj, jax.tree.leaves(params))):
            tx, clip = on_real_parts(tx), None if clip is None else on_real_parts(clip)
        return replace(self, optimizer=self.optimizer.with_tx(tx, self.optimizer.groups), clip=clip)


def check_extras(
    keepers: Mapping[str, Any], params: Any, tolerates: Callable[[Exception, Any, str], bool]
) -> dict[str, Any]:
    """Check before anything is compiled that the arrays of callbacks fit into the state; return the callbacks.

    Args:
        keepers: The callbacks with `init_arrays`, `update_arrays` and `eval_params`, by their keys.
        params: The trained parameters, arrays or `jax.ShapeDtypeStruct`s.
        tolerates: See `StepOptions`; a callback whose error is tolerated is left out.
    """
    working = dict(keepers)
    for key, keeper in keepers.items():
        hook = "init_arrays"
        try:
            arrays = jax.eval_shape(partial(_init, keeper), params)
            hook = "update_arrays"
            step = jax.ShapeDtypeStruct((), jnp.int32)
            old = _described(arrays, params)
            new = _described(*jax.eval_shape(keeper.update_arrays, arrays, params, params, step))
            if old != new:
                changed = next((x for x in [*old, *new] if x not in old or x not in new), "a container")
                raise ModuleError(
                    f"{type(keeper).__name__}.update_arrays changed {changed}. Arrays and parameters must keep their "
                    "structure, shapes and dtypes: create them as such in init_arrays."
                )
        except Exception as error:
            if not tolerates(error, keeper, hook):
                note_place(error, f"{type(keeper).__name__}.{hook}")
                raise
            del working[key]
    return working


def eval_index(keepers: Mapping[str, Any], index: TrainState, leaves: Sequence[Any]) -> Any:
    """Return the index in the state of what evaluations see as each parameter, a pytree like the parameters.

    Args:
        keepers: The callbacks that keep arrays, by their keys.
        index: The indices of the state's arrays.
        leaves: The arrays.
    """
    chosen = {key: tree for key, x in keepers.items() if (tree := x.eval_params(index.extras[key])) is not None}
    if len(chosen) > 1:
        raise ModuleError(
            f"{' and '.join(chosen)} both choose by eval_params what evaluations see in place of the parameters. Leave "
            "one of them out."
        )
    for key, indices in chosen.items():
        known = {i: (leaves[i].dtype, leaves[i].shape) for i in jax.tree.leaves(index.extras[key])}
        wanted = [(leaves[i].dtype, leaves[i].shape) for i in jax.tree.leaves(index.params)]
        same = jax.tree.structure(indices) == jax.tree.structure(index.params)
        if not same or [isinstance(i, int) and known.get(i) for i in jax.tree.leaves(indices)] != wanted:
            raise ModuleError(
                f"{type(keepers[key]).__name__}.eval_params must return leaves of its arrays unchanged, in a pytree "
                "with the parameters' structure, shapes and dtypes. Compute new values in update_arrays."
            )
        return indices
    return index.params


def _init(keeper: Any, params: Any) -> Any:
    arrays = keeper.init_arrays(params)
    leaves = jax.tree.leaves(arrays)
    # Checked here, before jax traces a Python number, which makes it an array too.
    if not leaves or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves):
        raise ModuleError(
            f"{type(keeper).__name__}.init_arrays must return a pytree of arrays, got {shown(arrays)}. Make numbers "
            "arrays, for example jnp.zeros(()), and keep what is no array in state_dict."
        )
    return arrays


def _described(arrays: Any, params: Any) -> list[str]:
    return [f"{name} {x.dtype}{list(x.shape)}" for name, x in named_leaves({"arrays": arrays, "params": params})]
