"""Recognises methods of torch's tensors, which a step calls on arrays of jax."""

import re

import jax

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
    "backward": "nothing: the gradient of what training_step returns is taken",
}
_ARGUMENTS = {"dim": "axis=", "keepdim": "keepdims="}


def note_torch(error: BaseException) -> None:
    """Note on an error that a method of a tensor has caused what an array of jax has in its place."""
    if isinstance(error, AttributeError) and isinstance(error.obj, jax.Array) and error.name in _METHODS:
        error.add_note(f"Arrays of jax have no {error.name}(). In its place: {_METHODS[error.name]}.")
    elif isinstance(error, NotImplementedError) and "array.view()" in str(error):
        error.add_note(f"An array's view() is another than a tensor's. In its place: {_METHODS['view']}.")
    elif isinstance(error, TypeError) and "'int' object is not callable" in str(error):
        error.add_note("If this was x.size(): size is no method of arrays. In its place: x.shape.")
    elif isinstance(error, TypeError) and (found := re.search(r"keyword argument '(dim|keepdim)'", str(error))):
        error.add_note(f"Functions of jax say it as those of numpy do: {_ARGUMENTS[found[1]]} in place of {found[1]}=.")
