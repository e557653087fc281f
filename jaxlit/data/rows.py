"""Loaders that give single rows where batches are wanted: how they are known, and what makes batches of them."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxlit.errors import DataError
from jaxlit.shown import shown

_TORCH = ("torch.utils.data.dataset.Dataset", "torch.utils.data.dataset.IterableDataset")
_HUGGING_FACE = ("datasets.arrow_dataset.Dataset", "datasets.iterable_dataset.IterableDataset")
_PLAIN = (bool, int, float, str)
_BY_STACKING = "jl.ArrayLoader(jax.tree.map(lambda *x: np.stack(x), *rows), batch_size=32)"


def check_rows(loader: Any, batch: Any, argument: str) -> None:
    """Refuse a loader whose first element is a single row.

    Args:
        loader: The loader.
        batch: Its first element.
        argument: Where the loader was given, for messages.

    Raises:
        DataError: Saying how its rows become batches.
    """
    kinds = _kinds(loader)
    leaves = _leaves(batch)
    has_number = any(isinstance(x, _PLAIN) or getattr(x, "shape", None) == () for x in leaves)
    if _TORCH[0] in kinds and _TORCH[1] not in kinds:
        how = (
            "torch.utils.data.DataLoader(dataset, batch_size=32). One whose elements are batches already goes into "
            "DataLoader(dataset, batch_size=None)"
        )
    elif is_hugging_face(loader) and has_number:
        how = 'dataset.with_format("numpy").batch(32)'
    elif _is_sequence(loader) and has_number and not any(getattr(x, "shape", ()) for x in leaves):
        how = ".batch(32)" if type(loader).__module__.partition(".")[0] == "grain" else _BY_STACKING
    else:
        return
    raise DataError(
        f"{argument} is a {type(loader).__name__} whose first element is {shown(batch, 60)}. These are rows: batch "
        f"them, by {how}."
    )


def is_hugging_face(loader: Any) -> bool:
    """Return whether a loader is a dataset of Hugging Face's `datasets`, whose elements may be rows or batches."""
    return bool(_kinds(loader).intersection(_HUGGING_FACE))


def doubted_rows(loader: Any, batch: Any, argument: str) -> str | None:
    """Return why the elements of a loader seem to be rows: a number of its own, a label say, stands beside an array.

    A Python float under a name, a temperature say, is one that all rows share; a fraction is taken for a label only
    where the loader is a sequence.
    """
    held = _leaves(batch)
    leaves = [np.asarray(x) for x in held]
    shared = [isinstance(batch, Mapping) and type(x) is float for x in held]
    labels = "iuf" if _is_sequence(loader) else "iu"
    own = [
        x.ndim == 0 and x.dtype.kind in labels and not is_shared for x, is_shared in zip(leaves, shared, strict=True)
    ]
    if not any(own) or all(x.ndim == 0 for x in leaves):
        return None
    return (
        f"{argument} gives a number beside an array, {shown(batch, 60)} first, which all rows of the batch share. "
        f"If these are rows, batch them, by {_BY_STACKING}."
    )


def _kinds(loader: Any) -> set[str]:
    return {f"{kind.__module__}.{kind.__name__}" for kind in type(loader).__mro__}


def _leaves(batch: Any) -> list[Any]:
    try:
        return jax.tree.leaves(batch, is_leaf=lambda x: type(x) is list and all(isinstance(y, _PLAIN) for y in x))
    except ValueError:  # keys that cannot be sorted: what takes batches in says so
        return []


def _is_sequence(loader: Any) -> bool:
    return hasattr(loader, "__getitem__") and hasattr(loader, "__len__")
