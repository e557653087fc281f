"""Recognises methods of torch's tensors, which a step calls on arrays of jax."""

import re

import jax
import jax.numpy as jnp

_METHODS = {
    "view": "x.reshape(shape)",
    "size": "x.shape",
    "dim": "x.ndim",
    "numel": "x.size",
    "detach": "jax.lax.stop_gradient(x)",
    "to": "x.astype(dtype) for a dtype; the strategy places arrays",
    "type_as": "x.astype(y.dtype)",
    "cpu": "nothing: the strategy places arrays",
    "cuda": "nothing: the strategy places arrays",
    "contiguous": "nothing",
    "float": "x.astype(jnp.float32)",
    "long": "x.astype(jnp.int32)",
    "unsqueeze": "jnp.expand_dims(x, axis)",
    "permute": "x.transpose(axes)",
    "numpy": "self.log, or an output of the step",
    "clone": "nothing: arrays do not change",
    "expand": "jnp.broadcast_to(x, shape)",
    "eq": "x == y",
    "masked_fill": "jnp.where(mask, value, x)",
    "zero_": "jnp.zeros_like(x): arrays do not change",
    "data": "the array itself",
    "grad": "nothing: gradients are values of each step, which Callback.trace_step sees",
    "backward": "nothing: the gradient of what training_step returns is taken",
}
_ARGUMENTS = {"dim": "axis=", "keepdim": "keepdims="}


def _in_place_of(name: str | None) -> str | None:
    if name is None or name in _METHODS:
        return _METHODS.get(name or "")
    for owner, called in ((jnp, "jnp"), (jnp.linalg, "jnp.linalg"), (jax.nn, "jax.nn")):
        if callable(getattr(owner, name, None)):
            return f"{called}.{name}(x)"
    return None


def note_torch(error: BaseException) -> None:
    """Note on an error that a method of a tensor has caused what an array of jax has in its place."""
    if isinstance(error, AttributeError) and isinstance(error.obj, jax.Array) and (way := _in_place_of(error.name)):
        error.add_note(f"Arrays of jax have no {error.name}(). In its place: {way}.")
    elif isinstance(error, TypeError) and "unsupported format string passed to" in str(error):
        error.add_note("A step is traced once, without numbers. Print by jax.debug.print('{:.3f}', x), or self.log it.")
    elif isinstance(error, NotImplementedError) and "array.view()" in str(error):
        error.add_note(f"An array's view() is another than a tensor's. In its place: {_METHODS['view']}.")
    elif isinstance(error, TypeError) and "'int' object is not callable" in str(error):
        error.add_note("If this was x.size(): size is no method of arrays. In its place: x.shape.")
    elif isinstance(error, TypeError) and (found := re.search(r"keyword argument '(dim|keepdim)'", str(error))):
        error.add_note(f"Functions of jax say it as those of numpy do: {_ARGUMENTS[found[1]]} in place of {found[1]}=.")
