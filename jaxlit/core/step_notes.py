"""Notes on what a user's step raises while it is traced: in which layer, and what to write in its place."""

import traceback
from typing import Any

import flax.errors
import jax
from flax import nnx

from jaxlit.leaf_names import leaf_name
from jaxlit.notes import add_note
from jaxlit.porting import advice

LINEN_AS_NNX = "self.net = nnx.bridge.ToNNX(Net(), rngs=rngs).lazy_init(x), with x as a batch has it"
RETURN_THE_LOSS = (
    "The Trainer takes the optimizer's step, with the gradient of the loss that training_step returns: return the loss "
    "alone, and the transform from configure_optimizers: return optax.adam(1e-3). To take all steps yourself, return "
    "jax.lax.stop_gradient(loss) and optax.set_to_zero(), or write a loop of your own with jl.compile_step."
)

_TRACED = (
    "A step is traced with arrays that have no values yet: Python's if, float, range and numpy need some. Use "
    "jnp.where, jax.lax.cond or jnp in their place, log arrays as they are, or look at values under jax.disable_jit()."
)
_NUMPY = "Functions of jax have the arguments of numpy: axis= and keepdims= in place of dim= and keepdim=."
# The kind of an error, what its message contains, and the note.
_NOTES: tuple[tuple[Any, str, str], ...] = (
    (
        flax.errors.CallCompactUnboundModuleError,
        "",
        f"A linen module has no variables of its own. Give it some: {LINEN_AS_NNX}.",
    ),
    (
        TypeError,
        "unsupported format string passed to",
        "A step is traced once, without numbers. Print by jax.debug.print('{:.3f}', x), or self.log it.",
    ),
    (
        NotImplementedError,
        "array.view()",
        "An array's view() is another than a tensor's. In its place: x.reshape(shape).",
    ),
    (
        TypeError,
        "'int' object is not callable",
        "If this was x.size(): size is no method of arrays. In its place: x.shape.",
    ),
    (TypeError, "argument 'dim'", _NUMPY),
    (TypeError, "argument 'keepdim'", _NUMPY),
    (
        flax.errors.TraceContextError,
        "Cannot mutate Opt",
        f"An optimizer of nnx was updated in the step. {RETURN_THE_LOSS}",
    ),
    (
        flax.errors.TraceContextError,
        "",
        "A step may change the Variables of its own module only. A layer that is held by a closure, by a global or by "
        "an object that is no nnx.Module is not part of it: make the layer an attribute of the module, and call it in "
        "a method.",
    ),
    ((jax.errors.JAXTypeError, jax.errors.JAXIndexError), "", _TRACED),
)


def note_step_error(error: Exception, step: str, batch: Any) -> None:
    """Note on what a traced step raised: the batch, the layer, and what to write in its place.

    Args:
        error: The error.
        step: The step's name, `Model.training_step`.
        batch: The batch that it was traced with.
    """
    shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", batch)
    add_note(error, f"{step} was traced with a batch of {shapes}.")
    if layer := _layer_of(error):
        add_note(error, f"It was raised in {layer}.")
    if (
        isinstance(error, AttributeError)
        and isinstance(error.obj, jax.Array)
        and (way := advice("jax.Array").get(str(error.name)))
    ):
        add_note(error, f"Arrays of jax have no {error.name}(). In its place: {way}.")
    for kind, words, note in _NOTES:
        if isinstance(error, kind) and words in str(error):
            add_note(error, note)


def _layer_of(error: Exception) -> str | None:
    """Return the path and the class of the innermost layer whose method raised an error."""
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Not isinstance, which reads an attribute: the Trainer's module would fetch its newest arrays, in a trace.
    layers = [x for x in frames if issubclass(type(x), nnx.Module)]
    if not layers:
        return None
    kind = type(layers[-1])
    name = f"{'nnx.' * kind.__module__.startswith('flax.nnx.')}{kind.__name__}"
    # None of a copy that a transform of nnx has made.
    path = next((path for path, node in nnx.iter_graph(layers[0]) if node is layers[-1]), None)
    return None if path == () else name if path is None else f"self.{leaf_name(path)} ({name})"
