"""Arrays of callbacks that live in the training state: what a callback must provide, and what is refused."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxlit.core.state import TrainState
from jaxlit.errors import ModuleError
from jaxlit.leaf_names import named_leaves
from jaxlit.notes import note_place
from jaxlit.shown import shown


def check_extras(
    keepers: Mapping[str, Any], params: Any, tolerates: Callable[[Exception, Any, str], bool]
) -> dict[str, Any]:
    """Refuse before anything is compiled what could not be kept in the state; return the callbacks that can be.

    Args:
        keepers: The callbacks with `init_arrays`, `update_arrays` and `eval_params`, by their keys.
        params: The trained parameters, arrays or `jax.ShapeDtypeStruct`s.
        tolerates: See `StepOptions`.

    Raises:
        ModuleError: A callback gives something that is no array, or arrays of another structure, shape or dtype.
    """
    kept = dict(keepers)
    for key, keeper in keepers.items():
        hook = "init_arrays"
        try:
            arrays = jax.eval_shape(partial(_init, keeper), params)
            hook = "update_arrays"
            made = jax.eval_shape(keeper.update_arrays, arrays, params, params, jax.ShapeDtypeStruct((), jnp.int32))
            trees = ({"arrays": some, "params": others} for some, others in ((arrays, params), made))
            old, new = ([f"{name} {x.dtype}{list(x.shape)}" for name, x in named_leaves(tree)] for tree in trees)
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
            del kept[key]
    return kept


def eval_index(keepers: Mapping[str, Any], index: TrainState, leaves: Sequence[Any]) -> Any:
    """Return the index in the state of what evaluations see as each parameter, a pytree like the parameters.

    Args:
        keepers: The callbacks that keep arrays, by their keys.
        index: The indices of the state's arrays.
        leaves: The arrays.

    Raises:
        ModuleError: Two callbacks ask for it, or one gives something else than its arrays, each like its parameter.
    """
    chosen = {key: made for key, x in keepers.items() if (made := x.eval_params(index.extras[key])) is not None}
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
    made = keeper.init_arrays(params)
    # Here, where they are what the callback returned: traced, a Python number is an array too.
    others = [x for x in jax.tree.leaves(made) if not (hasattr(x, "shape") and hasattr(x, "dtype"))]
    if others or not jax.tree.leaves(made):
        raise ModuleError(
            f"{type(keeper).__name__}.init_arrays must return a pytree of arrays, got {shown(made)}. Make numbers "
            "arrays, for example jnp.zeros(()), and keep what is no array in state_dict."
        )
    return made
