"""The arrays that a checkpoint has of a module: they are matched by name, and loaded into its Variables."""

import hashlib
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit.checkpoints.files import Checkpoint, fitting
from jaxlit.checkpoints.safetensors import bytes_of
from jaxlit.distributed.team import fetch_once
from jaxlit.errors import CheckpointError
from jaxlit.texts import is_key, table
from jaxlit.values import decode
from jaxlit.variables import arrays_of, impl_of, is_array, leaves_of

_logger = logging.getLogger("jaxlit")

Spec = tuple[str, tuple[int, ...], str]  # name, shape, dtype


def match(
    saved: list[Spec], wanted: list[Spec], *, skip: Callable[[str], bool] = lambda name: False, cast: bool
) -> tuple[dict[int, int], list[tuple[str, str, str]]]:
    """Return the index of the wanted array for each saved array, and (name, saved, wanted) of those that differ.

    Names that `skip` accepts are ignored. `cast` allows another precision, as precision="bf16-true" makes it.
    """
    unmatched = {name: i for i, (name, _, _) in enumerate(saved)}
    pairs, rows = {}, []
    for k, (name, _, _) in enumerate(wanted):
        if skip(name):
            continue
        i = unmatched.pop(name, None)
        dtypes = {wanted[k][2]} if i is None else {wanted[k][2], saved[i][2]}
        fits = len(dtypes) == 1 or (cast and dtypes <= {"bfloat16", "float16", "float32", "float64"})
        if i is not None and fits and saved[i][1] == wanted[k][1]:
            pairs[i] = k
        else:
            rows.append((name, "nothing" if i is None else _text(saved[i]), _text(wanted[k])))
    rows += [(name, _text(saved[i]), "nothing") for name, i in unmatched.items() if not skip(name)]
    return pairs, rows


def match_base(
    checkpoint: Checkpoint, saved: list[Spec], wanted: list[Spec], arrays: Any, hashes: Any, *, strict: bool, **how: Any
) -> tuple[dict[int, int], list[tuple[str, str, str]]]:
    """Return what `match` does, without the pairs of what the checkpoint has left out: the model's arrays stay.

    `arrays` are those of the model, some with known `hashes`. Others are refused, or in the rows if not `strict`.
    """
    left_out, others = checkpoint.state.get("left_out") or [], []
    pairs, rows = match([*saved, *((name, tuple(shape), dtype) for name, shape, dtype, _ in left_out)], wanted, **how)
    for i, (name, _, dtype, was) in enumerate(left_out, len(saved)):
        if (k := pairs.pop(i, None)) is not None:
            x, known = arrays[k], hashes.get(k) if wanted[k][2] == dtype else None
            now = known or ("" if isinstance(x, jax.ShapeDtypeStruct) else hash_of(x.astype(dtype)))
            others += [(name, f"sha256 {was[:12]}", f"sha256 {now[:12]}" if now else "no values")] * (now != was)
    if others and strict:
        raise CheckpointError(
            f"{checkpoint.path} has what was trained, as trained_only=True saves it. All other arrays must be those "
            f"that training began with, and some are not:\n{comparison(others)}\nBuild the model with those weights. "
            "With strict=False, load_from_checkpoint and a resume take what was trained nevertheless."
        )
    return pairs, rows + others


def hash_of(x: Any) -> str:
    """Return the sha256 of an array, whatever its sharding; if other processes hold parts of it, all must call this."""
    return hashlib.sha256(bytes_of(fetch_once(x))).hexdigest()


def report(
    checkpoint: Checkpoint, rows: list[tuple[str, str, str]], owner: str, strict: bool, *, resumes: bool = False
) -> None:
    """Refuse a checkpoint whose arrays, the rows, differ from those of a model, the owner; if not strict, warn."""
    if not rows or not strict:
        if rows:
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
    rows: list[tuple[str, str, str]], head: tuple[str, str] = ("in the checkpoint", "in the model"), most: int = 20
) -> str:
    """Return a table of (name, saved, wanted), of which `most` rows are shown."""
    lines = table([("", *head), *rows[:most]], texts=3)
    lines += [f"and {len(rows) - most} more"] if len(rows) > most else []
    return "\n".join(f"  {line}" for line in lines)


def load_variables(module: Any, checkpoint: Checkpoint, *, strict: bool, draws: bool = True) -> None:
    """Load the arrays of a checkpoint into a module's Variables and array attributes, each directly into its sharding.

    If not `strict`, what fits is loaded, with a warning about the rest; with `draws` also states of random generators.
    """
    targets, wanted, generators = [], [], set()
    for leaf in arrays_of(module):
        name, value = f"module.{leaf.name}", leaf.value
        if isinstance(leaf.variable, nnx.RngState) and not draws:
            generators.add(name)
            continue
        is_shape, impl = isinstance(value, jax.ShapeDtypeStruct), impl_of(value) if is_key(value) else None
        data = value if is_shape else jnp.asarray(value)
        if impl is not None:
            data = jax.eval_shape(jax.random.key_data, data) if is_shape else jax.random.key_data(data)
        targets.append((leaf.place, data, impl))
        wanted.append((name, data.shape, str(data.dtype) if impl is None else f"key<{impl}>"))

    # The weights of a new fit may fit in part, but trained ones mean nothing with others.
    how: Any = {"strict": strict or not draws, "cast": True}
    how["skip"] = lambda name: not name.startswith("module.") or name in generators
    pairs, rows = match_base(checkpoint, checkpoint.weights, wanted, [x for _, x, _ in targets], {}, **how)
    name = type(module).__name__
    if rows and not pairs and not strict:
        raise CheckpointError(
            f"Nothing in {checkpoint.path} fits {name} by name and shape:\n{comparison(rows)}\nFor a part of {name}, "
            "load the module that was saved, and give its weights to the part: "
            "nnx.update(model.part, nnx.state(loaded, nnx.Param))."
        )
    report(checkpoint, rows, name, strict)
    specs = {i: targets[k][1] for i, k in pairs.items()}
    # An uncommitted array stays uncommitted: a mesh of several processes does not accept a committed one.
    specs = {i: x if x.sharding is not None and getattr(x, "committed", True) else None for i, x in specs.items()}
    for i, array in checkpoint.arrays(specs).items():
        place, data, impl = targets[pairs[i]]
        array = jnp.asarray(array, data.dtype)
        place.set_raw_value(array if impl is None else jax.random.wrap_key_data(array, impl=impl))
    load_numbers(module, checkpoint)


def load_numbers(module: Any, checkpoint: Checkpoint) -> None:
    """Load the numbers that Variables of a module hold in place of arrays."""
    with fitting(checkpoint.path):
        saved = checkpoint.state.get("numbers") or {}
        for leaf in leaves_of(module) if saved else ():
            if leaf.name in saved and not is_array(leaf.value):
                leaf.place.set_raw_value(decode(saved[leaf.name], type(module)))


def _text(spec: Spec) -> str:
    return f"{spec[2]}{list(spec[1])}"
