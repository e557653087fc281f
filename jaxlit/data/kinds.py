"""What can be a loader, and which source draws from it."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxlit.data.array_loader import ArrayLoader
from jaxlit.data.array_source import ArraySource
from jaxlit.data.grain_source import GrainSource, kind_of
from jaxlit.data.plain_source import PlainSource
from jaxlit.data.rows import is_hugging_face
from jaxlit.data.source import Source
from jaxlit.errors import ArgumentTypeError
from jaxlit.shown import shown


def source_of(
    loader: Any, argument: str, *, may_go_on: bool = False, pinned: bool = False, keep: int | None = None
) -> Source:
    """Return the source that draws from a loader.

    Args:
        loader: A grain dataset or DataLoader, an `ArrayLoader`, or any re-iterable of batches.
        argument: Where it was given, for messages.
        may_go_on: See `Source`.
        pinned: Whether every epoch takes the same batches; an `ArrayLoader` then gives them in the rows' own order.
        keep: See `Source`.

    Raises:
        ArgumentTypeError: It is no loader.
    """
    check_loader(loader, argument)
    if pinned and type(loader) is ArrayLoader:
        loader = loader.unshuffled()
    kind = GrainSource if kind_of(loader) else ArraySource if isinstance(loader, ArrayLoader) else PlainSource
    return kind(loader, argument, may_go_on=may_go_on, pinned=pinned, keep=keep)


def check_loader(loader: Any, argument: str) -> None:
    """Refuse what is no loader.

    Raises:
        ArgumentTypeError: Naming what was given.
    """
    if isinstance(loader, (str, bytes, dict, type)) or _is_array(loader) or not _iterable(loader):
        hint = (
            "Wrap arrays as jl.ArrayLoader(arrays, batch_size)."
            if _is_array(loader)
            else ("Pass a jl.ArrayLoader, a grain dataset of batches, or another iterable of batches.")
        )
        raise ArgumentTypeError(f"{argument} is no loader: got {_shown(loader)}. {hint}")
    if isinstance(loader, (list, tuple)) and _are_columns(loader):
        kinds = ", ".join(f"{x.dtype}{list(x.shape)}" for x in loader)
        raise ArgumentTypeError(
            f"{argument} is no loader: got a {type(loader).__name__} of arrays that are no batches of one kind, "
            f"{kinds}. Wrap arrays as jl.ArrayLoader((x, y), batch_size)."
        )


def each_loader(loaders: Any, argument: str) -> list[tuple[Any, str]]:
    """Return a loader, or each of a list of loaders, with where it was given.

    Raises:
        ArgumentTypeError: One is no loader.
    """
    if loaders is None:
        return []
    several = isinstance(loaders, (list, tuple)) and loaders
    if several and (all(map(_is_loader, loaders)) or any(map(_is_surely_loader, loaders))):
        found = [(x, f"{argument}[{i}]") for i, x in enumerate(loaders)]
    else:
        found = [(loaders, argument)]
    for one in found:
        check_loader(*one)
    return found


def _iterable(x: Any) -> bool:
    return isinstance(x, Iterable) or (hasattr(x, "__getitem__") and hasattr(x, "__len__"))


def _are_columns(arrays: Any) -> bool:
    # Batches differ in their rows alone; a tuple of arrays is (x, y).
    if not arrays or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in arrays):
        return False
    return isinstance(arrays, tuple) or len({(x.shape[1:], x.dtype) for x in arrays}) > 1


def _is_array(x: Any) -> bool:
    # Hugging Face's tables have a shape as well, and so have its dicts of them.
    return hasattr(x, "shape") and not isinstance(x, dict) and not is_hugging_face(x)


def _is_surely_loader(x: Any) -> bool:
    return _is_loader(x) and not isinstance(x, list)


def _is_loader(x: Any) -> bool:
    # A list of batches is a loader itself; a list of loaders is several. Batches are pytrees of arrays.
    if isinstance(x, (Mapping, tuple, str, bytes)) or _is_array(x) or not _iterable(x):
        return False
    return not isinstance(x, list) or not x or not hasattr(x[0], "shape")


def _shown(x: Any) -> str:
    return f"the class {x.__name__}" if isinstance(x, type) else f"{type(x).__name__} {shown(x, 60)}"
