"""Which arrays of a checkpoint fit a model, and a module with its weights."""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx

from jaxlit.checkpoints.files import Checkpoint, locate
from jaxlit.checkpoints.hparam_values import NotKeptError, decode, encode
from jaxlit.errors import ArgumentTypeError, CheckpointError, did_you_mean
from jaxlit.field_arguments import ARGUMENTS
from jaxlit.leaf_names import is_key, leaf_name

_logger = logging.getLogger("jaxlit")

Spec = tuple[str, tuple[int, ...], str]  # name, shape, dtype


_MOST_ROWS = 12


def match(
    saved: list[Spec], wanted: list[Spec], *, skip: Callable[[str], bool], cast: bool
) -> tuple[dict[int, int], list[tuple[str, str, str]]]:
    """Return which saved array is which wanted one, by index, and a table of (name, saved, wanted) of the others.

    Args:
        saved: The arrays of a checkpoint.
        wanted: Those of an engine or a module.
        skip: Tells which names not to look at.
        cast: Take floating numbers of another precision too, as precision="bf16-true" makes them.
    """
    at = {name: i for i, (name, _, _) in enumerate(saved)}
    pairs, rows = {}, []
    for k, (name, shape, dtype) in enumerate(wanted):
        if skip(name):
            continue
        i = at.pop(name, None)
        if i is not None and saved[i][1] == shape and (saved[i][2] == dtype or (cast and _float(dtype, saved[i][2]))):
            pairs[i] = k
        else:
            rows.append((name, "nothing" if i is None else _text(saved[i]), _text((name, shape, dtype))))
    rows += [(name, _text(saved[i]), "nothing") for name, i in at.items() if not skip(name)]
    return pairs, rows


def report(checkpoint: Checkpoint, rows: list[tuple[str, str, str]], owner: str, strict: bool) -> None:
    """Tell what differs between a checkpoint and a model.

    Raises:
        CheckpointError: Something does, and `strict` is set.
    """
    if not rows:
        return
    widths = [max(len(row[i]) for row in [*rows[:_MOST_ROWS], _HEAD]) for i in range(2)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in [_HEAD, *rows[:_MOST_ROWS]]]
    lines += [f"  and {len(rows) - _MOST_ROWS} more"] if len(rows) > _MOST_ROWS else []
    table = "\n".join(lines)
    if not strict:
        _logger.warning("%s was loaded in part, with strict=False. Not taken from it:\n%s", checkpoint.path, table)
        return
    optimizer = any(row[0] == "the optimizer" or row[0].startswith("opt_state") for row in rows)
    hint = "Pass reset_optimizer=True to begin with a new optimizer, or " if optimizer else "Pass "
    raise CheckpointError(
        f"{checkpoint.path} does not fit {owner}:\n{table}\nBuild the model and the optimizer as they were. {hint}"
        "strict=False to take what fits."
    )


_HEAD = ("", "in the checkpoint", "in the model")


def load_module(cls: type[Any], path: Any, overrides: dict[str, Any], *, strict: bool = True) -> Any:
    """Build a module from a checkpoint; see `TrainModule.load_from_checkpoint`."""
    parameters = inspect.signature(cls.__init__).parameters
    advice = {k: v for k, v in ARGUMENTS["load_from_checkpoint"].items() if k not in parameters}
    if foreign := next((name for name in overrides if name in advice), None):
        raise ArgumentTypeError(f"{cls.__name__}.load_from_checkpoint has no argument {foreign!r}. {advice[foreign]}")
    checkpoint, _ = locate(path, f"{cls.__name__}.load_from_checkpoint")
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hparams = checkpoint.state["module"]["hparams"]
    for name in hparams:
        if name not in parameters and not takes_any:
            raise CheckpointError(
                f"{checkpoint.path} was made with the hyperparameter {name!r}, which {cls.__name__} does not have."
                f"{did_you_mean(name, parameters)} Load it with the class that it was made with."
            )
    hparams = {name: value for name, value in hparams.items() if name not in overrides}
    for name, value in hparams.items():
        if _is_redacted(value):
            raise CheckpointError(
                f"{checkpoint.path} does not keep {name!r}, which is or holds a secret. Pass it: "
                f"{cls.__name__}.load_from_checkpoint(path, {name}=...)."
            )
    arguments = _rebuilt(cls, checkpoint, hparams) | overrides
    if "rngs" in parameters and "rngs" not in arguments:
        arguments["rngs"] = nnx.Rngs(0)  # what it draws is overwritten
    args: list[Any] = []
    several = next((name for name, p in parameters.items() if p.kind is p.VAR_POSITIONAL), None)
    if several in arguments:  # what stands before it can only be given by position
        before = [name for name in list(parameters)[1 : list(parameters).index(several)] if name in arguments]
        args = [arguments.pop(name) for name in before] + list(arguments.pop(several))
    try:
        module = cls(*args, **arguments)
    except TypeError as error:
        raise CheckpointError(
            f"{cls.__name__} cannot be built from {sorted(arguments)}: {error}. Pass what is missing to "
            "load_from_checkpoint."
        ) from error
    for name, value in (checkpoint.state.get("added_hparams") or {}).items():
        with contextlib.suppress(NotKeptError):
            module.hparams[name] = decode(value, cls)
    load_variables(module, checkpoint, strict=strict)
    return module


def _rebuilt(cls: type, checkpoint: Checkpoint, hparams: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's hyperparameters as they were given to the constructor.

    Raises:
        CheckpointError: Some must be given again.
    """
    parameters, found, missing = inspect.signature(cls.__init__).parameters, {}, {}
    for name, value in hparams.items():
        try:
            found[name] = decode(value, cls)
        except NotKeptError as error:
            if name not in parameters or not _is_same(value, parameters[name].default):
                missing[name] = str(error)
    if not missing:
        return found
    given = ", ".join(f"{name}={text}" for name, text in missing.items())
    raise CheckpointError(
        f"{cls.__name__} was built with {given}: pass {', '.join(f'{name}=...' for name in missing)} to "
        f"load_from_checkpoint. {checkpoint.path} keeps values, and functions and classes that can be found by name."
    )


def _is_same(saved: Any, default: Any) -> bool:
    try:
        return encode(default) == saved
    except NotKeptError:
        return False


def _is_redacted(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_is_redacted, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and "<redacted>" in value


def load_variables(module: Any, checkpoint: Checkpoint, *, strict: bool) -> None:
    """Give a module's Variables the arrays of a checkpoint."""
    variables, wanted = [], []
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        value = variable.get_value()
        dtype = f"key<{jax.random.key_impl(value)}>" if is_key(value) else str(value.dtype)
        shape = jax.random.key_data(value).shape if is_key(value) else value.shape
        variables.append(variable)
        wanted.append((f"module.{leaf_name(path)}", tuple(shape), dtype))
    pairs, rows = match(checkpoint.specs, wanted, skip=lambda name: not name.startswith("module."), cast=True)
    report(checkpoint, rows, type(module).__name__, strict)
    target = {}
    for i, k in pairs.items():
        value = variables[k].get_value()
        data = jax.random.key_data(value) if is_key(value) else jax.numpy.asarray(value)
        target[i] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=data.sharding)
    for i, array in checkpoint.arrays(target).items():
        variable = variables[pairs[i]]
        old = variable.get_value()
        variable.set_value(jax.random.wrap_key_data(array, impl=jax.random.key_impl(old)) if is_key(old) else array)


def _float(*dtypes: str) -> bool:
    return all("float" in dtype and "float8" not in dtype for dtype in dtypes)


def _text(spec: Iterable[Any]) -> str:
    _, shape, dtype = spec
    return f"{dtype}{list(shape)}"
