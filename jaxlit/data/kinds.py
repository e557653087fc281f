"""What can be a loader, which source draws from it, and whether its elements are batches or rows."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxlit.data.array_loader import ArrayLoader
from jaxlit.data.grain_source import GrainSource, kind_of
from jaxlit.data.plain_source import ArraySource, PlainSource
from jaxlit.data.source import Source
from jaxlit.errors import ArgumentTypeError, DataError
from jaxlit.shown import shown

_TORCH = ("torch.utils.data.dataset.Dataset", "torch.utils.data.dataset.IterableDataset")
_HUGGING_FACE = {"datasets.arrow_dataset.Dataset", "datasets.iterable_dataset.IterableDataset"}
_NUMBERS = (bool, int, float, str)
_BATCHED = "batched(rows, 32) of docs/data.md, in Existing loaders"
_BY_STACKING = "jl.ArrayLoader(jax.tree.map(lambda *x: np.stack(x), *rows), batch_size=32)"


def source_of(
    loader: Any, argument: str, *, may_continue: bool = False, overfit: bool = False, keep: int | None = None
) -> Source:
    """Return the source that draws from a loader.

    Args:
        loader: A grain dataset or DataLoader, an `ArrayLoader`, or any re-iterable of batches.
        argument: Where it was given, for messages.
        may_continue: See `Source`.
        overfit: Whether every epoch takes the same batches; an `ArrayLoader` then gives them in the rows' own order.
        keep: See `Source`.

    Raises:
        ArgumentTypeError: `loader` is not a loader.
    """
    check_loader(loader, argument)
    if overfit and type(loader) is ArrayLoader:
        loader = loader.unshuffled()
    kind = GrainSource if kind_of(loader) else ArraySource if isinstance(loader, ArrayLoader) else PlainSource
    return kind(loader, argument, may_continue=may_continue, overfit=overfit, keep=keep)


def check_loader(loader: Any, argument: str) -> None:
    """Refuse what is no loader.

    Raises:
        ArgumentTypeError: Naming what was given.
    """
    are_columns = isinstance(loader, (list, tuple)) and _are_columns(loader)
    if are_columns or isinstance(loader, (str, bytes, dict, type)) or _is_array(loader) or not _is_iterable(loader):
        raise ArgumentTypeError(
            f"{argument} is no loader: got {shown(loader, 60)}. Pass a grain dataset of batches or another iterable of "
            "batches of one kind; wrap arrays as jl.ArrayLoader(arrays, batch_size), several as (x, y)."
        )


def each_loader(loaders: Any, argument: str) -> list[tuple[Any, str]]:
    """Return a loader, or each of a list of loaders, with where it was given.

    Raises:
        ArgumentTypeError: One is no loader.
    """
    if loaders is None:
        return []
    each = [(loaders, argument)]
    if isinstance(loaders, (list, tuple)) and loaders:
        certain = [_is_loader(x) and not isinstance(x, list) for x in loaders]
        if any(certain) or all(map(_is_loader, loaders)):
            each = [(x, f"{argument}[{i}]") for i, x in enumerate(loaders)]
    for one in each:
        check_loader(*one)
    return each


def check_rows(loader: Any, element: Any, argument: str) -> None:
    """Refuse a loader whose first element is a single row.

    Args:
        loader: The loader.
        element: Its first element.
        argument: Where the loader was given, for messages.

    Raises:
        DataError: Saying how its rows become batches.
    """
    classes, leaves = _classes(loader), _leaves(element)
    has_number = any(isinstance(x, _NUMBERS) or getattr(x, "shape", None) == () for x in leaves)
    if _TORCH[0] in classes and _TORCH[1] not in classes:
        how = (
            "torch.utils.data.DataLoader(dataset, batch_size=32). One whose elements are batches already goes into "
            "DataLoader(dataset, batch_size=None)"
        )
    elif classes & _HUGGING_FACE and has_number:
        how = 'dataset.with_format("numpy").batch(32)'
    elif _is_sequence(loader) and has_number and not any(getattr(x, "shape", ()) for x in leaves):
        how = ".batch(32)" if kind_of(loader) else _BY_STACKING
    else:
        return
    raise DataError(
        f"{argument} is a {type(loader).__name__} whose first element is {shown(element, 60)}. These are rows: batch "
        f"them, by {how}."
    )


def doubt_of(source: Source, element: Any) -> str | None:
    """Return why a loader's elements seem to be rows: one has a number, such as a label, next to an array.

    A Python float under a name, such as a temperature, is one that all rows share. A fraction is taken for a label
    only where the loader is a sequence. Returns None where there is no doubt.
    """
    leaves = _leaves(element)
    kinds = "iuf" if source.is_grain or _is_sequence(source.loader) else "iu"
    numbers = [x for x in leaves if np.ndim(x) == 0]
    labels = [x for x in numbers if np.asarray(x).dtype.kind in kinds]
    labels = [x for x in labels if not (isinstance(element, Mapping) and type(x) is float)]
    if isinstance(source, ArraySource) or source.makes_batches or not labels or len(numbers) == len(leaves):
        return None
    how = ".batch(32)" if source.is_grain else _BY_STACKING if _is_sequence(source.loader) else _BATCHED
    return (
        f"{source.argument} gives a number next to an array, {shown(element, 60)} first, which all rows of the batch "
        f"share. If these are rows, batch them, by {how}."
    )


def _is_iterable(x: Any) -> bool:
    return isinstance(x, Iterable) or _is_sequence(x)


def _is_sequence(x: Any) -> bool:
    return hasattr(x, "__getitem__") and hasattr(x, "__len__")


def _is_array(x: Any) -> bool:
    # Hugging Face's tables have a shape as well, and so have its dicts of them.
    return hasattr(x, "shape") and not isinstance(x, dict) and not _classes(x) & _HUGGING_FACE


def _are_columns(arrays: Any) -> bool:
    # Batches differ in their rows alone; a tuple of arrays is (x, y).
    if not arrays or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in arrays):
        return False
    return isinstance(arrays, tuple) or len({(x.shape[1:], x.dtype) for x in arrays}) > 1


def _is_loader(x: Any) -> bool:
    # A list of batches is a loader itself; a list of loaders is several. Batches are pytrees of arrays.
    if isinstance(x, (Mapping, tuple, str, bytes)) or _is_array(x) or not _is_iterable(x):
        return False
    return not isinstance(x, list) or not x or not hasattr(x[0], "shape")


def _classes(loader: Any) -> set[str]:
    return {f"{kind.__module__}.{kind.__name__}" for kind in type(loader).__mro__}


def _leaves(element: Any) -> list[Any]:
    try:
        return jax.tree.leaves(element, is_leaf=lambda x: type(x) is list and all(isinstance(y, _NUMBERS) for y in x))
    except ValueError:  # keys that cannot be sorted, which `check_batch` refuses
        return []
