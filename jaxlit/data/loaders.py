"""The loaders of a run: `DataModule`, the `Loaders` that a run takes from arguments or hooks, and their checks.

The functions at the end say what can be a loader, which source draws from it, and whether its elements are rows.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxlit.control import Interrupted
from jaxlit.core.module import STAGES, KeepsHparams
from jaxlit.data.array_loader import ArrayLoader
from jaxlit.data.batch_validator import BatchValidator
from jaxlit.data.grain_source import GrainSource, kind_of
from jaxlit.data.source import ArraySource, PlainSource, Source, length_of, located
from jaxlit.data.watchdog import Watchdog
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError, noting_place
from jaxlit.faces import no_such_name
from jaxlit.texts import shown

_TORCH = ("torch.utils.data.dataset.Dataset", "torch.utils.data.dataset.IterableDataset")
_HUGGING_FACE = {"datasets.arrow_dataset.Dataset", "datasets.iterable_dataset.IterableDataset"}
_NUMBERS = (bool, int, float, str)
_BATCHED = "batched(rows, 32) of docs/data.md, in Existing loaders"
_BY_STACKING = "jl.ArrayLoader(jax.tree.map(lambda *x: np.stack(x), *rows), batch_size=32)"
_logger = logging.getLogger("jaxlit")


class DataModule(KeepsHparams):
    """Data and its loaders in one object, for `Trainer.fit(model, datamodule=...)`.

    Override what is needed. `prepare_data` runs first and is for downloads, `setup` builds datasets, the
    loader hooks return a loader, or for validation, test and prediction a list or dict of loaders.

    Example:
        >>> import jaxlit as jl, numpy as np
        >>> class Squares(jl.DataModule):
        ...     def setup(self, stage):
        ...         self.rows = {"x": np.arange(8.0), "y": np.arange(8.0) ** 2}
        ...     def train_dataloader(self):
        ...         return jl.ArrayLoader(self.rows, 4, shuffle=True)
        >>> data = Squares()
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        raise no_such_name("DataModule", name, dir(self), called=type(self).__name__)

    trainer: Any = None
    """The `Trainer` that runs it, from the start of a run on."""

    def prepare_data(self) -> None:
        """Download or write files; runs before `setup`, in one process of each computer while the others wait."""

    def setup(self, stage: str) -> None:
        """Build datasets; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Clean up, also after an error."""

    def train_dataloader(self) -> Any:
        """Return the training loader."""
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """Return a validation loader, or a list or dict of several."""
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        """Return a test loader, or a list or dict of several."""
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        """Return a loader to predict, or a list or dict of several."""
        raise NotImplementedError

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to train on, still as numpy."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep of the data, as JSON values, apart from the positions of loaders."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, after `setup`."""

    def on_exception(self, exception: BaseException) -> None:
        """Run when the run raised, before `teardown`."""


class Loaders:
    """The loaders of one run.

    By stage, `arguments` are the loaders that were passed to the Trainer's `method`, and the argument's name, and
    `limits` a number of batches or a fraction. `validator` has arguments of each loader's `BatchValidator`, and
    `overfit` is whether every epoch takes the same batches, unshuffled.
    """

    def __init__(
        self,
        method: str,
        arguments: Mapping[str, tuple[Any, str]],
        datamodule: DataModule | None,
        limits: Mapping[str, int | float],
        *,
        validator: Mapping[str, Any],
        overfit: bool = False,
    ) -> None:
        # As in Lightning, a DataModule may be passed as the loaders.
        stage, (first, argument) = next(iter(arguments.items()))
        if isinstance(first, DataModule) and datamodule is None:
            datamodule = first
            arguments = {**arguments, stage: (None, argument)}
        if datamodule is not None and not isinstance(datamodule, DataModule):
            raise ArgumentTypeError(f"Trainer.{method}(datamodule=...) takes a jl.DataModule, got {shown(datamodule)}.")
        for loaders, argument in arguments.values():  # refused before anything is set up
            if loaders is not None and datamodule is not None:
                raise ArgumentError(
                    f"Trainer.{method}({argument}=..., datamodule=...) names two sources of data. Leave one out."
                )
            each_loader(loaders, f"Trainer.{method}({argument}=...)")
        self._opened: dict[str, list[tuple[Source, int | None]]] = {}
        # By argument: the validator of a loader that is reloaded compares its batches with the old ones.
        self._validators: dict[str, BatchValidator] = {}
        self.method, self._arguments, self.datamodule = method, arguments, datamodule
        self.module: Any = None  # which may have the loader hooks as well, once it is built
        self._limits, self._overfit, self._validator_options = limits, overfit, validator

    def from_hook(self, stage: str) -> bool:
        """Return whether a hook returns the stage's loaders, and so can return new ones."""
        return self._arguments[stage][0] is None and self._hook(STAGES[stage].loaders) is not None

    def check_before_building(self, cls: type, timeouts: tuple[float | None, float | None]) -> None:
        """Check the first batches of the loaders that were passed, before a module of class `cls` is built.

        Loaders that a hook returns, or whose batches a hook changes, are checked after it.
        """
        if self.datamodule is not None or hasattr(cls, "on_before_batch_transfer"):
            return
        for stage, (loaders, _) in self._arguments.items():
            if loaders is not None:
                self._opened[stage] = self.open(stage, required=True)
                with Watchdog(*timeouts) as watchdog:
                    # Of an iterator a batch that is drawn before a resume would be lost.
                    for source, limit in [x for x in self._opened[stage] if not x[0].is_iterator]:
                        self.check_first(source, limit, watchdog, required=stage == "training")

    def check_first(self, source: Source, limit: int | None, watchdog: Watchdog, *, required: bool) -> None:
        """Draw a loader's first batch, unless the limit is 0, and refuse a batch that no step could take.

        After a signal in the wait the check ends, and the loops stop the run. An empty loader is refused if it is
        `required`, otherwise it warns.
        """
        if source.peeked or (limit == 0 and source.length != 0):
            return
        validator, control = self.validator_of(source), watchdog.control
        watchdog.watch(source.argument, 0, 0)
        try:
            try:
                control.drawing = True
                first = source.peek()
            finally:
                control.drawing = False
            for batch in first:
                if not validator.prepares:  # what a hook returns is checked when it has run
                    check_rows(source.loader, batch, source.argument)
                    validator(batch)
                if (doubt := _doubt(source, batch)) is not None:
                    _logger.warning(doubt)
        except Interrupted:
            return
        except Exception as error:
            located(error, validator.blamed, 0, 0)
            raise
        finally:
            watchdog.rest()
        if source.peeked and not source.gave:
            if required:
                raise source.empty()
            _logger.warning(source.empty())

    def validator_of(self, source: Source) -> BatchValidator:
        """Return the validator of a source's batches."""
        return self._validators[source.argument]

    @property
    def changes(self) -> dict[str, str]:
        """By argument, how batches of the newest kind differ from those of the kind before."""
        return {argument: validator.change for argument, validator in self._validators.items() if validator.change}

    def open(self, stage: str, *, required: bool) -> list[tuple[Source, int | None]]:
        """Return each loader of a stage, with its limit in batches; refuse a missing loader if it is `required`."""
        if stage in self._opened:
            return self._opened.pop(stage)
        hook, limit_name = STAGES[stage].loaders, STAGES[stage].limit
        limit_name = "overfit_batches" if self._overfit else limit_name
        loaders, argument = self._arguments[stage]
        origin = f"Trainer.{self.method}({argument}=...)"
        if loaders is None and (make := self._hook(hook)) is not None:
            place = f"{type(make.__self__).__name__}.{hook}"  # type: ignore[attr-defined]
            origin = f"{place}()"
            with noting_place(place):
                loaders = make()
            if loaders is None:
                raise DataError(f"{origin} returned None. Return a loader.")
        if loaders is None:
            if not required:
                return []
            raise ArgumentError(
                f"Trainer.{self.method} has no {argument}. Pass a loader such as jl.ArrayLoader(arrays, batch_size) or "
                f"datamodule= with {hook}, or define {hook} in the module."
            )
        pairs = each_loader(loaders, origin)
        if stage == "training" and (len(pairs) > 1 or isinstance(loaders, dict)):
            raise ArgumentError(
                f"{origin} takes one loader, got {len(pairs)} in a {type(loaders).__name__}. Join them."
            )
        sources = []
        stage_limit = self._limits[stage]
        for idx, (loader, name) in enumerate(pairs):
            limit = _batches_of(stage_limit, loader, name, limit_name)
            if name not in self._validators:
                options = {**self._transfer_hook(idx), **self._validator_options}
                self._validators[name] = BatchValidator(name, **options)
            may_continue = stage == "training" and not self._overfit
            keep = limit if self._overfit else None
            source = source_of(loader, name, may_continue=may_continue, overfit=self._overfit, keep=keep)
            sources.append((source, limit))
            if isinstance(stage_limit, int) and limit is not None and limit < stage_limit:
                text = "Trainer(%s=%d) is more than %s has: an epoch takes its %d batches."
                _logger.warning(text, limit_name, stage_limit, name, limit)
            if stage != "training" and limit is None and source.is_endless:
                raise ArgumentError(f"{name} is a loader without end. Pass Trainer({limit_name}=...).")
        return [(s, limit) for s, limit in sources if limit != 0 or s.length == 0 or stage == "training"]

    def _hook(self, name: str) -> Callable[..., Any] | None:
        """Return a hook of the DataModule, or else of the module, if it is overridden."""
        if self.datamodule is not None and getattr(type(self.datamodule), name) is not getattr(DataModule, name):
            return getattr(self.datamodule, name)
        if self.datamodule is None and callable(getattr(type(self.module), name, None)):
            return getattr(self.module, name)
        return None

    def _transfer_hook(self, idx: int) -> dict[str, Any]:
        name = "on_before_batch_transfer"
        hook = self._hook(name) or getattr(self.module, name, None)
        if hook is None:
            return {}
        owner = type(getattr(hook, "__self__", self.module)).__name__
        return {"prepare": lambda batch: hook(batch, idx), "prepared_by": f"{owner}.{name}"}


def _batches_of(limit: int | float, loader: Any, origin: str, limit_name: str) -> int | None:
    """Return how many batches a limit of the Trainer allows, None for all; `origin` is where the loader is from."""
    length = length_of(loader)
    if isinstance(limit, int):
        return limit if length is None else min(limit, length)
    if limit in (0.0, 1.0):
        return length if limit else 0
    if length is None or 0 < length * limit < 1:
        raise ArgumentError(
            f"Trainer({limit_name}={limit}) is a fraction, and {origin} has "
            f"{'no length' if length is None else f'{length} batches'}. Give the number of batches as an int."
        )
    return int(length * limit)


def source_of(
    loader: Any, argument: str, *, may_continue: bool = False, overfit: bool = False, keep: int | None = None
) -> Source:
    """Return the source that draws from a loader; refuse what is no loader.

    A loader is a grain dataset or DataLoader, an `ArrayLoader`, which is not shuffled for `overfit`, or any re-iterable
    of batches. The other arguments are those of `Source`.
    """
    _check_loader(loader, argument)
    if overfit and type(loader) is ArrayLoader:
        loader = loader.unshuffled()
    array_source = ArraySource if isinstance(loader, ArrayLoader) else PlainSource
    kind = GrainSource if kind_of(loader) else array_source
    return kind(loader, argument, may_continue=may_continue, overfit=overfit, keep=keep)


def _check_loader(loader: Any, argument: str) -> None:
    """Raise an ArgumentTypeError for what is no loader."""
    are_columns = isinstance(loader, (list, tuple)) and _are_columns(loader)
    if are_columns or isinstance(loader, (str, bytes, dict, type)) or not _may_iterate(loader):
        raise ArgumentTypeError(
            f"{argument} is no loader: got {shown(loader, 60)}. Pass a grain dataset of batches or another iterable of "
            "batches of one kind; wrap arrays as jl.ArrayLoader(arrays, batch_size), several as (x, y)."
        )


def each_loader(loaders: Any, argument: str) -> list[tuple[Any, str]]:
    """Return a loader, or each of a list or dict of them, with its argument for messages; refuse what is no loader."""
    if loaders is None:
        return []
    pairs = [(loaders, argument)]
    if isinstance(loaders, (list, tuple)) and loaders:
        certain = [_is_loader(x) and not isinstance(x, list) for x in loaders]
        if any(certain) or all(map(_is_loader, loaders)):
            pairs = [(x, f"{argument}[{i}]") for i, x in enumerate(loaders)]
    elif isinstance(loaders, dict) and loaders and all(map(_is_named_loader, loaders.values())):
        pairs = [(x, f"{argument}[{key!r}]") for key, x in loaders.items()]
    for loader, name in pairs:
        _check_loader(loader, name)
    return pairs


def check_rows(loader: Any, element: Any, argument: str) -> None:
    """Raise a DataError for a loader whose first element is a single row, with how rows become batches."""
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


def _doubt(source: Source, element: Any) -> str | None:
    """Return why a loader's elements seem to be rows, None if they do not: a number is next to an array.

    A Python float under a name, such as a temperature, is one that all rows share. A fraction is taken for a label
    only where the loader is a sequence.
    """
    leaves = _leaves(element)
    kinds = "iuf" if source.is_grain or _is_sequence(source.loader) else "iu"
    numbers = [x for x in leaves if np.ndim(x) == 0]
    has_label = any(
        np.asarray(x).dtype.kind in kinds and not (isinstance(element, Mapping) and type(x) is float) for x in numbers
    )
    if isinstance(source, ArraySource) or source.makes_batches or not has_label or len(numbers) == len(leaves):
        return None
    how = ".batch(32)" if source.is_grain else _BY_STACKING if _is_sequence(source.loader) else _BATCHED
    return (
        f"{source.argument} gives a number next to an array, {shown(element, 60)} first, which all rows of the batch "
        f"share. If these are rows, batch them, by {how}."
    )


def _is_sequence(x: Any) -> bool:
    return hasattr(x, "__getitem__") and hasattr(x, "__len__")


def _may_iterate(x: Any) -> bool:
    # Not arrays. Hugging Face's tables have a shape as well, and so have its dicts of them.
    is_array = hasattr(x, "shape") and not isinstance(x, dict) and not _classes(x) & _HUGGING_FACE
    return not is_array and (isinstance(x, Iterable) or _is_sequence(x))


def _are_columns(arrays: Any) -> bool:
    # Batches differ in their rows alone; a tuple of arrays is (x, y).
    if not arrays or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in arrays):
        return False
    return isinstance(arrays, tuple) or len({(x.shape[1:], x.dtype) for x in arrays}) > 1


def _is_loader(x: Any) -> bool:
    # A list of batches is one loader, not a list of loaders. Batches are pytrees of arrays.
    if isinstance(x, (Mapping, tuple, str, bytes)) or not _may_iterate(x):
        return False
    return not (isinstance(x, list) and x and (hasattr(x[0], "shape") or isinstance(x[0], _NUMBERS)))


def _is_named_loader(x: Any) -> bool:
    return _is_loader(x) or (type(x) is list and hasattr(x[0], "shape"))


def _classes(loader: Any) -> set[str]:
    return {f"{kind.__module__}.{kind.__name__}" for kind in type(loader).__mro__}


def _leaves(element: Any) -> list[Any]:
    try:
        return jax.tree.leaves(element, is_leaf=lambda x: type(x) is list and all(isinstance(y, _NUMBERS) for y in x))
    except ValueError:  # keys that cannot be sorted, which `check_batch` refuses
        return []
