"""Load weights into a module by name and shape, each directly into its sharding, and save them to a file."""

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlit import checks as check
from jaxlit.checkpoints.module_state import comparison, match
from jaxlit.checkpoints.safetensors import NAMES
from jaxlit.distributed.team import LONG_S, error_of_all, fetch_once
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError
from jaxlit.reporting.terminal import say
from jaxlit.sharding import array_of_shards
from jaxlit.texts import count, is_key, listed, shown
from jaxlit.variables import is_array, leaves_of
from jaxlit.version import __version__
from jaxlit.weights.sources import dotted, read_arrays, write_safetensors
from jaxlit.weights.weight_rules import Assigned, Ranged, WeightRule, assign, in_files

_logger = logging.getLogger("jaxlit")

_HEAD = ("in the source", "in the module")
_SHAPE = jax.ShapeDtypeStruct
_NO_WEIGHTS = nnx.Any(nnx.RngState, nnx.metrics.MetricState, nnx.Intermediate, nnx.Cache)


@dataclass(frozen=True)
class LoadedWeights:
    """The result of `load_weights`; printed, it is a table.

    Attributes:
        taken: The (leaf, array in the source, array in the module) of each leaf that was loaded.
        left: The same for arrays that do not match; a missing side is "nothing".
    """

    taken: list[tuple[str, str, str]]
    left: list[tuple[str, str, str]]

    def __str__(self) -> str:
        groups = [("taken", self.taken), ("not taken", self.left)]
        return "\n".join(f"{title}:\n{comparison(rows, _HEAD, len(rows))}" for title, rows in groups if rows)


def load_weights(
    module: nnx.Module,
    source: str | Path | Mapping[str, Any],
    rename: Mapping[str, str | WeightRule | None] | None = None,
    *,
    strict: bool = True,
    missing: str | Sequence[str] | None = None,
) -> LoadedWeights:
    r"""Load pretrained weights into a module, each directly into the sharding of its leaf.

    Floating-point weights of any precision and byte order are cast to the dtype of their leaf. Files are read shard by
    shard: a sharded array is never entire on a device, nor on the host unless a rule reshapes it. From a URL, a process
    reads the bytes for its shards, one array at a time. All processes must call this. A module of `nnx.eval_shape`
    receives arrays in place of its shapes; its random generators stay shapes. Pass a function to `fit` for one that it
    builds: `init_from=lambda module: jl.load_weights(module, path, rename)`.

    Args:
        module: Any NNX module.
        source: A safetensors file, the `*.safetensors.index.json` of several, a folder with either of them or such a
            repository, `"hf://owner/name@revision"`, an `.npz` file (no 8-bit floats), or a mapping of names to arrays.
        rename: A mapping of regular expressions to rules. The first expression that matches the entire name of an
            array applies. Its rule is the name of a leaf, which may refer to groups (`r"blocks.\1.norm.scale"`), a
            `jl.WeightRule`, or None to skip the array. A name that no expression matches is the name of a leaf.
        strict: Refuse weights that do not match the module exactly, before anything changes. If False, load those that
            match by name and shape, and warn about the others.
        missing: Regular expressions of leaves that keep their values where the source has nothing for them, or an array
            of another shape: `missing=r"head\..*"` loads everything but a new head, and refuses all other differences.
            Rules for these leaves may match no name.

    Returns:
        Which arrays were loaded and which were not.

    Raises:
        ArgumentError: A rule cannot be applied to an array that it matches, or a rule with a leaf matches no name, or
            an expression of `missing` no leaf.
        CheckpointError: A file cannot be read, or the weights do not match; a table lists the leaves and shapes.
    """
    with error_of_all("loading weights"):
        if not isinstance(module, nnx.Module):
            raise ArgumentTypeError(f"load_weights takes a flax.nnx module, got {shown(module)}.")
        check.boolean("strict", strict, owner="load_weights")
        weights = {weight.name: weight for weight in weights_of(module)}
        assigned = assign(read_arrays(source), rename or {}, {name: w.array.shape for name, w in weights.items()})
        # An array attribute is often a constant that only `__init__` knows.
        needed = {name for name, x in weights.items() if x.variable is not None or isinstance(x.array, _SHAPE)}
        needed |= {*assigned.arrays}
        arrays = {name: weight.array for name, weight in weights.items() if name in needed}
        report = _compare(arrays, assigned)
        kept = _matched(missing, arrays, type(module).__name__)
        assigned.idle[:] = [x for x in assigned.idle if not _is_optional((rename or {})[x], arrays, kept, assigned)]
        _check(report, assigned, arrays, type(module).__name__, source, strict, kept)
    loaded = [weights[name] for name, _, _ in report.taken]
    with error_of_all("reading weights", timeout=LONG_S):
        for name, at, _, x in loaded:
            array = place(assigned.arrays[name], x)
            at.set_raw_value(array if is_array(old := at.get_raw_value()) else type(old)(array.item()))
    if jax.process_index() == 0:
        title = f"weights: {len(loaded)} of the {len(arrays)} arrays of {type(module).__name__}"
        say(f"{title}, {count(sum(x.array.size for x in loaded))} numbers, from {_shown_source(source)}")
    return report


def save_weights(module: nnx.Module, path: str | Path) -> None:
    """Write the weights of a module to a safetensors file; a name is the path of a leaf, joined by dots.

    `jl.load_weights(module, path)` and the safetensors library read the same bits. Every Variable and array attribute
    is written except random generators, metrics, decoding caches and intermediates that layers sow. Sharded arrays are
    gathered one at a time and written by process 0; all processes must call this. An existing file stays until the new
    one is complete.

    Args:
        module: Any NNX module; `trainer.module` is the one of the last run.
        path: The file, `*.safetensors`.

    Raises:
        ArgumentTypeError: `module` is not an NNX module, or `path` has another suffix.
        CheckpointError: The file format does not support the dtype of a leaf, or the file cannot be written.
    """
    with error_of_all("saving weights"):
        if not isinstance(module, nnx.Module):
            raise ArgumentTypeError(f"save_weights takes a flax.nnx module, got {shown(module)}.")
        if not (isinstance(path, (str, os.PathLike)) and str(path).endswith(".safetensors")):
            raise ArgumentTypeError(f"save_weights takes the path of a file, *.safetensors, got {shown(path)}.")
        path = Path(os.path.abspath(check.on_disk("path", path, owner="save_weights")))
        leaves = [(weight.name, weight.array) for weight in weights_of(module)]
        for name, x in leaves:
            if isinstance(x, jax.ShapeDtypeStruct):
                raise CheckpointError(f"save_weights: {name} is a shape without an array. Load weights into it first.")
            if np.dtype(x.dtype) not in NAMES:
                raise CheckpointError(
                    f"save_weights: {name} is {x.dtype}, and a safetensors file supports {', '.join(NAMES.values())}."
                )
    # The largest items first, so that each array begins at a multiple of its item size.
    leaves.sort(key=lambda leaf: (-leaf[1].dtype.itemsize, leaf[0]))
    specs, arrays = [(name, x.shape, np.dtype(x.dtype)) for name, x in leaves], (fetch_once(x) for _, x in leaves)
    with error_of_all("saving weights"):
        try:
            if jax.process_index() == 0:
                notes = {"format": "np", "module": type(module).__name__, "jaxlit": __version__}
                write_safetensors(Path(path), specs, arrays, notes)
        except OSError as error:
            raise CheckpointError(f"{path} could not be written: {error}. An existing file is unchanged.") from error
        finally:
            for _ in arrays:  # every process takes part in gathering each array, also after an error in process 0
                pass


def _matched(missing: Any, names: Collection[str], owner: str) -> set[str]:
    """Return the names that a regular expression matches entirely; refuse one that matches none."""
    patterns = [missing] if isinstance(missing, str) else () if missing is None else missing
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ArgumentTypeError(f"load_weights(missing=...) takes regular expressions, got {shown(missing)}.")
    result = set()
    for pattern in patterns:
        try:
            found = {name for name in names if re.fullmatch(pattern, name)}
        except re.error as error:
            raise ArgumentError(
                f"load_weights(missing=...) takes regular expressions, got {pattern!r}: {error}."
            ) from None
        if not found:
            raise ArgumentError(f"load_weights(missing={pattern!r}) matches no leaf of {owner}: {listed([*names])}.")
        result |= found
    return result


def _is_optional(rule: Any, names: Collection[str], kept: set[str], assigned: Assigned) -> bool:
    """Return whether each leaf of a rule, whatever its groups are, may be missing, or has an array by another rule."""
    to = rule.to if isinstance(rule, WeightRule) else rule
    parts = [re.split(r"\\(?:\d+|g<\w+>)", in_files(leaf)) for leaf in ([to] if isinstance(to, str) else to)]
    patterns = [".+".join(map(re.escape, texts)) for texts in parts]
    found = [{name for name in names if re.fullmatch(pattern, name)} for pattern in patterns]
    return all(leaves & kept and leaves <= kept | assigned.arrays.keys() for leaves in found)


def _compare(arrays: Mapping[str, Any], assigned: Assigned) -> LoadedWeights:
    def kind(name: str, x: Any) -> str:
        """Return the dtype for which an array is taken: that of its leaf, if both are floating-point."""
        pair = [x.dtype] if name not in arrays or is_key(arrays[name]) else [x.dtype, arrays[name].dtype]
        are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in pair)
        return str(pair[-1] if are_floats else np.dtype(x.dtype).newbyteorder("="))

    saved = [(name, tuple(x.shape), kind(name, x)) for name, x in assigned.arrays.items()]
    wanted = [(name, tuple(x.shape), "key" if is_key(x) else str(x.dtype)) for name, x in arrays.items()]
    pairs, rows = match(saved, wanted, cast=True)

    def text(name: str, shape: list[int]) -> str:
        first, *more = assigned.origins[name]
        change = "" if first.endswith(f"{shape}") else f" -> {shape}"  # a rule has changed the shape
        return f"{first}{f' and {len(more)} more' if more else ''}{change}"

    texts = {name: text(name, list(shape)) for name, shape, _ in saved}
    specs = [wanted[k] for k in pairs.values()]
    taken = [(name, texts[name], f"{dtype}{list(shape)}") for name, shape, dtype in specs]
    return LoadedWeights(taken, [(name, texts.get(name, "nothing"), wanted) for name, _, wanted in rows])


def _check(
    report: LoadedWeights,
    assigned: Assigned,
    arrays: Mapping[str, Any],
    name: str,
    source: Any,
    strict: bool,
    kept: Collection[str],
) -> None:
    """Refuse weights that do not match, or warn about those that are not taken; those `kept` may be missing."""
    idle = f"These rules apply to no name: {', '.join(map(repr, assigned.idle))}. " if assigned.idle else ""
    left = [row for row in report.left if row[0] not in kept or isinstance(arrays[row[0]], _SHAPE)]
    if not left and not idle:
        return
    rows, missing = comparison(left, _HEAD), [leaf for leaf, _, _ in left if leaf in arrays]
    if idle and (not left or not strict):
        raise ArgumentError(f"{idle}Correct them, or leave them out; one with None, to skip an array, may match none.")
    if not strict and report.taken and not any(isinstance(arrays[leaf], _SHAPE) for leaf in missing):
        _logger.warning("%s was loaded in part. Not taken:\n%s", name, rows)
        return
    hint = "Map their names in rename= to names of leaves, or to None to skip them."
    shapes = {leaf: (assigned.arrays[leaf].shape, arrays[leaf].shape) for leaf in missing if leaf in assigned.arrays}
    if turned := [leaf for leaf, (x, y) in shapes.items() if len(x) == 2 and x == y[::-1] != y]:
        rule = f"jl.WeightRule({turned[0]!r}, transpose=True)"
        hint = f"{turned[0]} has its dims in reverse, as a torch Linear has them: rename= takes {rule}."
    if any(isinstance(arrays[leaf], _SHAPE) for leaf in kept):
        hint = "The module has shapes in place of arrays: build what the source lacks."
    elif strict and report.taken:
        hint += " Pass missing= for leaves that the source may lack, or strict=False to load only what fits."
    raise CheckpointError(f"The weights of {_shown_source(source)} do not fit {name}:\n{rows}\n{idle}{hint}")


def place(source: Any, like: Any) -> jax.Array:
    """Return an array of a source with the dtype and sharding of the array `like`."""
    like = like if isinstance(like, _SHAPE) else jnp.asarray(like)

    def read(index: tuple[slice, ...]) -> np.ndarray:
        # A copy of this shard only: jax may keep using the memory that it is given.
        return np.array(source[index], like.dtype, order="C", copy=True)

    # An uncommitted array stays uncommitted: a mesh of several processes does not accept a committed one.
    if like.sharding is None or not getattr(like, "committed", True):
        return jnp.asarray(read((slice(None),) * like.ndim))
    if isinstance(source, Ranged):  # one request for all devices of this process
        source = source.fetched(like.sharding.addressable_devices_indices_map(like.shape).values())
    return array_of_shards(like.shape, like.sharding, read)


def _shown_source(source: Any) -> str:
    return str(source) if isinstance(source, (str, Path)) else f"a mapping of {len(source)} names"


class Weight(NamedTuple):
    """A weight of a module, by its name in files."""

    name: str
    place: Any  # see `ModuleLeaf`
    variable: nnx.Variable | None
    array: Any


def weights_of(module: nnx.Module) -> Iterator[Weight]:
    """Yield the weights of a module; refuse two of one name.

    Every Variable is a weight except random generators, metrics, decoding caches and intermediates that layers sow.

    Raises:
        CheckpointError: Two leaves have the same name.
    """
    no_weights, names = nnx.filterlib.to_predicate(_NO_WEIGHTS), set()
    for path, place, variable, x in leaves_of(module):
        is_number = variable is not None and isinstance(x, (bool, int, float, complex))
        dtype = getattr(x, "dtype", np.dtype(object))
        if not (is_number or any(jnp.issubdtype(dtype, kind) for kind in (np.bool_, np.number))):
            continue  # a random key of the user's own, a text, an array of texts
        if variable is not None and no_weights(path, variable):
            continue
        if (name := dotted(path)) in names:
            raise CheckpointError(
                f"Two leaves of {type(module).__name__} are called {name} in files. Rename one of them."
            )
        names.add(name)
        # A numpy attribute becomes a jax array when it is loaded or trained, and has its dtype in a file too.
        is_plain = is_number or (variable is None and isinstance(x, np.ndarray))
        yield Weight(name, place, variable, jnp.asarray(x) if is_plain else x)
