"""What a checkpoint has of a module: arrays, matched by name, and constructor arguments as JSON values.

What JSON does not have is a dict `{"jaxlit": kind, "value": ...}`; functions and classes are saved by name. Nothing is
imported to look up a name: it is looked up in the modules that are loaded, and only in those of the class that is
built, of jax, flax, optax and numpy.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import logging
import math
import re
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxlit.checkpoints.files import Checkpoint, fitting
from jaxlit.checkpoints.safetensors import bytes_of
from jaxlit.distributed.team import fetch_once
from jaxlit.errors import CheckpointError
from jaxlit.texts import is_key, shown, table
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


_KIND, _VALUE = "jaxlit", "value"
DEFAULT = {_KIND: "default"}  # of an argument that had its default, and whose value is not kept
_MAKERS: dict[Any, Callable[[Any], Any]] = {"dtype": np.dtype, "float": float, "tuple": tuple, "dict": dict}
_MAKERS |= {"partition": lambda entries: P(*entries), "scalar": lambda parts: np.dtype(parts[0]).type(parts[1])}
_MAKERS["omegaconf"] = lambda values: importlib.import_module("omegaconf").OmegaConf.create(values)
_LIBRARIES = ("jax.nn", "jax.numpy", "jax.nn.initializers", "jax.lax", "numpy", "flax.nnx", "optax")  # public names


class NotKeptError(Exception):
    """A value cannot be saved, or not be restored; its text is the value as messages show it."""


def encode(x: Any) -> Any:
    """Return a value as JSON, or raise a NotKeptError if it would come back as another."""
    kind = type(x)  # exactly: a value of a subclass would come back as one of its base
    if issubclass(kind, dict) and kind is not dict:  # first: its keys may be attributes, and any other raises
        raise NotKeptError(f"{kind.__name__}(...)")
    if is_omegaconf(x):
        try:
            values = encode(sys.modules["omegaconf"].OmegaConf.to_container(x, resolve=True))
        except Exception as error:  # a reference to what is not there
            raise NotKeptError(f"{kind.__name__}(...)") from error
        if "${" in json.dumps(values):  # a text that would be read as a reference
            raise NotKeptError(f"{kind.__name__}(...)")
        return _node("omegaconf", values)
    if (name := _name_of(x)) is not None:
        return _node("name", name)
    if isinstance(x, np.dtype):
        return _node("dtype", x.name)
    if issubclass(kind, (np.bool_, np.number)) and type(x.item()) in (bool, int, float):
        return _node("scalar", [x.dtype.name, encode(x.item())])
    if kind is float and not math.isfinite(x):
        return _node("float", str(x))
    if x is None or kind in (bool, int, float, str):
        return x
    if kind in (list, tuple):
        values = [encode(value) for value in x]
        return values if kind is list else _node("tuple", values)
    if kind is P and P(*x) == x:
        return _node("partition", [encode(entry) for entry in x])
    if kind is dict:
        if _KIND not in x and all(isinstance(key, str) for key in x):
            return {key: encode(value) for key, value in x.items()}
        return _node("dict", [[encode(key), encode(value)] for key, value in x.items()])
    is_plain = dataclasses.is_dataclass(x) and not isinstance(x, (type, nnx.Module, int, float, str, list, tuple, dict))
    if is_plain and (name := _name_of(type(x))) is not None:
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init}
        values, names = {key: encode(value) for key, value in fields.items()}, {f.name for f in dataclasses.fields(x)}
        with contextlib.suppress(Exception):  # of the user's code
            again = type(x)(**fields)
            is_same = all(getattr(again, n) == getattr(x, n) for n in {*getattr(x, "__dict__", {}), *names})
            if is_same and names == type(x).__dataclass_fields__.keys():  # it may take more than the fields
                return _node("dataclass", values, name=name)
    # Functions and arrays are named; the repr of anything else may show a secret.
    is_named = isinstance(getattr(x, "__qualname__", None), str) or (hasattr(x, "shape") and hasattr(x, "dtype"))
    raise NotKeptError(shown(x) if is_named else f"{type(x).__name__}(...)")


def is_omegaconf(x: Any) -> bool:
    """Return whether a value is a `DictConfig` or a `ListConfig`, whose attributes are its values."""
    return type(x).__module__.startswith("omegaconf.")


def not_kept(text: str) -> dict[str, Any]:
    """Return what is saved of a value that cannot be: how it is shown."""
    return _node("not kept", text)


def decode(x: Any, cls: type) -> Any:
    """Return the value of what `encode` or `not_kept` returned, for a class, or raise a NotKeptError."""

    def value_of(node: dict[str, Any]) -> Any:
        value: Any = node.get(_VALUE)
        try:
            if (kind := node.get(_KIND)) is None:
                return node
            if kind == "name":
                return _named(value, cls)  # "package.module:Class.method"
            if kind in _MAKERS:
                return _MAKERS[kind](value)
            of = _named(node["name"], cls) if kind == "dataclass" else None
            if isinstance(of, type) and dataclasses.is_dataclass(of):  # nothing else is called
                return of(**value)
        except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
            raise NotKeptError(_dotted(value) if kind == "name" else shown(node)) from error
        raise NotKeptError(value if kind == "not kept" else shown(node))

    return _from_inside(x, value_of)


def _from_inside(x: Any, hook: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a JSON value with every dict replaced by `hook(dict)`, the inner ones first."""
    return json.loads(json.dumps(x), object_hook=hook)


def readable(x: Any) -> Any:
    """Return a value as JSON for people to read: "jax.nn.relu" for a function."""

    def plain(node: dict[str, Any]) -> Any:
        kind = node.get(_KIND)
        value: Any = node if kind is None else node.get(_VALUE)
        value = {str(key): item for key, item in value} if kind == "dict" else value
        return _dotted(value) if kind == "name" else value

    try:
        return _from_inside(encode(x), plain)
    except NotKeptError as error:
        return str(error)


def _node(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {_KIND: kind, **more, _VALUE: value}


def _name_of(x: Any) -> str | None:
    """Return "module:name" of a function, a class or a member of an Enum; None if that leads to nothing or another."""
    of = type(x) if isinstance(x, Enum) else x
    module, name = getattr(of, "__module__", None), getattr(of, "__qualname__", None) or getattr(of, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    name = f"{name}.{x.name}" if isinstance(x, Enum) else name
    place = next((at for at in (*_LIBRARIES, module) if _look_up(at, name) is x), None)
    return None if place is None else f"{_script() if place == '__main__' else place}:{name}"


def _script() -> str:
    """Return how a name of `__main__` is saved: with the module that other programs import the script as."""
    spec, file = (getattr(sys.modules["__main__"], name, None) for name in ("__spec__", "__file__"))
    return f"__main__/{Path(file or '').stem if spec is None else spec.name}"


def _dotted(path: Any) -> str:
    return re.sub("^__main__/[^:]*", "__main__", str(path)).replace(":", ".")


def _look_up(module: str, name: str) -> Any:
    return functools.reduce(lambda x, part: getattr(x, part, None), name.split("."), sys.modules.get(module))


def _named(path: str, cls: type) -> Any:
    """Return the value of a name, in the program that builds the class."""
    module, _, name = path.partition(":")
    # The program that loads what a script has trained may import the script, and has another `__main__`.
    module = "__main__" if module == _script() else module.removeprefix("__main__/")
    x = _look_up(module, name)
    # By the name of the value itself: a module may import functions of any other.
    known = None if x is None else _name_of(x)
    if known is not None:
        # A checkpoint may name values of a module of the user, of the class, or of a library of arrays.
        place = known.partition(":")[0].partition("/")[0]
        root, file = place.partition(".")[0], getattr(sys.modules[place], "__file__", None)
        roots = {name.partition(".")[0] for name in (*_LIBRARIES, *(x.__module__ for x in cls.__mro__))}
        is_of_users = root in {"__main__", *roots} or (file is not None and "-packages" not in file)
        if is_of_users and root not in sys.stdlib_module_names and root != "jaxlit":
            return x
    if isinstance(x, type) and module == "builtins":  # float as a dtype
        return x
    raise KeyError(path)
