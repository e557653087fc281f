"""Match the arrays of a checkpoint with those of a model, and load them into a module."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit.checkpoints.files import Checkpoint
from jaxlit.errors import CheckpointError
from jaxlit.texts import is_key, leaf_name, table

_logger = logging.getLogger("jaxlit")

Spec = tuple[str, tuple[int, ...], str]  # name, shape, dtype
_MOST_ROWS = 20


def match(
    saved: list[Spec], wanted: list[Spec], *, skip: Callable[[str], bool] = lambda name: False, cast: bool
) -> tuple[dict[int, int], list[tuple[str, str, str]]]:
    """Return the index of the wanted array for each saved array, and (name, saved, wanted) of those that differ.

    Names for which `skip` returns True are ignored. `cast` accepts floating-point arrays of another precision, as
    precision="bf16-true" makes them.
    """
    unmatched = {name: i for i, (name, _, _) in enumerate(saved)}
    pairs, rows = {}, []
    for k, (name, _, _) in enumerate(wanted):
        if skip(name):
            continue
        i = unmatched.pop(name, None)
        if i is not None and _fits(saved[i], wanted[k], cast):
            pairs[i] = k
        else:
            rows.append((name, "nothing" if i is None else _text(saved[i]), _text(wanted[k])))
    rows += [(name, _text(saved[i]), "nothing") for name, i in unmatched.items() if not skip(name)]
    return pairs, rows


def report(
    checkpoint: Checkpoint, rows: list[tuple[str, str, str]], owner: str, strict: bool, *, resumes: bool = False
) -> None:
    """Refuse a checkpoint with arrays, the rows, that differ from those of a model, the owner, or warn of them.

    Raises:
        CheckpointError: Something differs, and `strict` is set.
    """
    if not rows:
        return
    if not strict:
        _logger.warning("%s was loaded in part. Not taken from it:\n%s", checkpoint.path, comparison(rows))
        return
    optimizer = any(name == "the optimizer" or name.startswith("opt_state") for name, _, _ in rows)
    hint = "Build the model and the optimizer as they were. "
    hint += "For a new training that begins with the weights that fit, pass fit(init_from=path). " * resumes
    hint += "Pass reset_optimizer=True to begin with a new optimizer. " * optimizer
    raise CheckpointError(
        f"{checkpoint.path} does not fit {owner}:\n{comparison(rows)}\n{hint}Pass strict=False to take what fits."
    )


def comparison(
    rows: list[tuple[str, str, str]],
    head: tuple[str, str] = ("in the checkpoint", "in the model"),
    most: int = _MOST_ROWS,
) -> str:
    """Return a table of (name, saved, wanted), of which `most` rows are shown."""
    lines = table([("", *head), *rows[:most]], texts=3)
    lines += [f"and {len(rows) - most} more"] if len(rows) > most else []
    return "\n".join(f"  {line}" for line in lines)


def load_variables(module: Any, checkpoint: Checkpoint, *, strict: bool, draws: bool = True) -> None:
    """Load the arrays of a checkpoint into a module's Variables and array attributes, each directly into its sharding.

    Args:
        module: The module.
        checkpoint: The checkpoint.
        strict: Refuse a checkpoint that does not fit. If False, load what fits, and warn about the rest.
        draws: Load the states of random generators too.

    Raises:
        CheckpointError: The checkpoint does not fit, or no array in it does.
    """
    targets, wanted, generators = [], [], set()
    for path, leaf in nnx.to_flat_state(nnx.state(module)):
        name, value = f"module.{leaf_name(path)}", leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        if isinstance(leaf, nnx.RngState) and not draws:
            generators.add(name)
            continue
        impl = jax.random.key_impl(value) if is_key(value) else None
        data = jnp.asarray(value) if impl is None else jax.random.key_data(value)
        targets.append((path, data, impl))
        wanted.append((name, data.shape, str(data.dtype) if impl is None else f"key<{impl}>"))

    def skip(name: str) -> bool:
        return not name.startswith("module.") or name in generators

    pairs, rows = match(checkpoint.weights, wanted, skip=skip, cast=True)
    name = type(module).__name__
    if rows and not pairs and not strict:
        raise CheckpointError(
            f"Nothing in {checkpoint.path} fits {name} by name and shape:\n{comparison(rows)}\nFor a part of {name}, "
            "load the module that was saved, and give its weights to the part: "
            "nnx.update(model.part, nnx.state(loaded, nnx.Param))."
        )
    report(checkpoint, rows, name, strict)
    specs = {}
    for i, k in pairs.items():
        _, data, _ = targets[k]
        # An uncommitted array stays uncommitted: a mesh of several processes does not accept a committed one.
        specs[i] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=data.sharding) if data.committed else None
    loaded = {}
    for i, array in checkpoint.arrays(specs).items():
        path, data, impl = targets[pairs[i]]
        array = jnp.asarray(array, data.dtype)
        loaded[path] = array if impl is None else jax.random.wrap_key_data(array, impl=impl)
    nnx.update(module, nnx.from_flat_state(loaded))


def _fits(saved: Spec, wanted: Spec, cast: bool) -> bool:
    (_, shape, dtype), (_, wanted_shape, wanted_dtype) = saved, wanted
    are_floats = all("float" in x and "float8" not in x for x in (dtype, wanted_dtype))
    return shape == wanted_shape and (dtype == wanted_dtype or (cast and are_floats))


def _text(spec: Iterable[Any]) -> str:
    _, shape, dtype = spec
    return f"{dtype}{list(shape)}"
