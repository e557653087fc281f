"""The loaders of a run: given to the Trainer, or made by hooks."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from jaxlit.control import Interrupted
from jaxlit.core.stage import STAGES
from jaxlit.data.batch_validator import BatchValidator
from jaxlit.data.datamodule import DataModule
from jaxlit.data.kinds import check_rows, doubt_of, each_loader, source_of
from jaxlit.data.source import Source, length_of, located
from jaxlit.data.watchdog import Watchdog
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError
from jaxlit.notes import noting_place
from jaxlit.shown import shown

_logger = logging.getLogger("jaxlit")


class Loaders:
    """The loaders of one run.

    Args:
        method: The Trainer's method, for messages.
        given: What was passed to it, by stage: the loaders and the argument's name.
        datamodule: The DataModule, if one was passed.
        limits: By stage, a number of batches or a fraction.
        validator: Arguments of each loader's `BatchValidator`.
        overfit: Whether every epoch takes the same batches, in the loader's own order.
    """

    def __init__(
        self,
        method: str,
        given: Mapping[str, tuple[Any, str]],
        datamodule: DataModule | None,
        limits: Mapping[str, int | float],
        *,
        validator: Mapping[str, Any],
        overfit: bool = False,
    ) -> None:
        # As in Lightning, a DataModule may be passed as the loaders.
        stage, (first, argument) = next(iter(given.items()))
        if isinstance(first, DataModule) and datamodule is None:
            datamodule, given = first, {**given, stage: (None, argument)}
        if datamodule is not None and not isinstance(datamodule, DataModule):
            raise ArgumentTypeError(f"Trainer.{method}(datamodule=...) takes a jl.DataModule, got {shown(datamodule)}.")
        for loaders, argument in given.values():  # refused before anything is set up
            if loaders is not None and datamodule is not None:
                raise ArgumentError(
                    f"Trainer.{method}({argument}=..., datamodule=...) names two sources of data. Leave one out."
                )
            each_loader(loaders, f"Trainer.{method}({argument}=...)")
        self._opened: dict[str, list[tuple[Source, int | None]]] = {}
        # By argument: a loader that a hook makes again keeps its validator: its batches are compared with the old.
        self._validators: dict[str, BatchValidator] = {}
        self.method, self.given, self.datamodule = method, given, datamodule
        self.module: Any = None  # which may have the loader hooks as well, once it is built
        self._limits, self._overfit, self._validator = limits, overfit, validator

    def from_hook(self, stage: str) -> bool:
        """Return whether a hook makes the stage's loaders, and so can make them again."""
        return self.given[stage][0] is None and self._hook(STAGES[stage].loaders) is not None

    def check_before_building(self, cls: type, timeouts: tuple[float | None, float | None]) -> None:
        """Check the first batches of the loaders that were passed, before a module of class `cls` is built.

        Loaders that a hook returns, or whose batches a hook changes, are checked after it.
        """
        if self.datamodule is not None or hasattr(cls, "on_before_batch_transfer"):
            return
        for stage, (loaders, _) in self.given.items():
            if loaders is not None:
                self._opened[stage] = self.open(stage, required=True)
                with Watchdog(*timeouts) as watchdog:
                    for source, limit in self._opened[stage]:
                        self.check_first(source, limit, watchdog, required=stage == "training")

    def check_first(self, source: Source, limit: int | None, watchdog: Watchdog, *, required: bool) -> None:
        """Draw a loader's first batch and refuse one that no step could take.

        Args:
            source: The loader.
            limit: How many batches of it are wanted; nothing is drawn for 0.
            watchdog: Watches the wait. A signal that cuts it leaves the batch to the loops, which then stop.
            required: Whether an empty loader is refused; otherwise it warns.
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
                if not validator.prepares:  # what a hook makes of a batch is checked in its turn
                    check_rows(source.loader, batch, source.argument)
                    validator(batch)
                if (doubt := doubt_of(source, batch)) is not None:
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
        """Return each loader of a stage, with its limit in batches.

        Raises:
            ArgumentError: There is none, though one is required, or a limit does not fit.
        """
        if stage in self._opened:
            return self._opened.pop(stage)
        hook, limit_name = STAGES[stage].loaders, STAGES[stage].limit
        limit_name = "overfit_batches" if self._overfit else limit_name
        loaders, argument = self.given[stage]
        where = f"Trainer.{self.method}({argument}=...)"
        if loaders is None and (make := self._hook(hook)) is not None:
            where = f"{type(make.__self__).__name__}.{hook}()"  # type: ignore[attr-defined]
            with noting_place(where.removesuffix("()")):
                loaders = make()
            if loaders is None:
                raise DataError(f"{where} returned None. Return a loader.")
        if loaders is None:
            if not required:
                return []
            raise ArgumentError(
                f"Trainer.{self.method} has no {argument}. Pass a loader such as jl.ArrayLoader(arrays, batch_size) or "
                f"datamodule= with {hook}, or define {hook} in the module."
            )
        each = each_loader(loaders, where)
        if stage == "training" and len(each) > 1:
            raise ArgumentError(f"{where} takes one loader, got {len(each)}. Join them, for example by grain's mix.")
        pairs = []
        for idx, one in enumerate(each):
            limit = limit_of(self._limits[stage], *one, limit_name)
            source = self._source(*one, stage, idx, limit)
            pairs.append((source, limit))
            asked = self._limits[stage]
            if isinstance(asked, int) and limit is not None and limit < asked:
                text = "Trainer(%s=%d) is more than %s has: an epoch takes its %d batches."
                _logger.warning(text, limit_name, asked, source.argument, limit)
            if stage != "training" and limit is None and source.is_endless:
                raise ArgumentError(f"{source.argument} is a loader without end. Pass Trainer({limit_name}=...).")
        return [(s, n) for s, n in pairs if n != 0 or s.length == 0 or stage == "training"]

    def _source(self, loader: Any, argument: str, stage: str, idx: int, limit: int | None) -> Source:
        """Return the source of a loader, and make its validator."""
        if argument not in self._validators:
            self._validators[argument] = BatchValidator(argument, **self._transfer(idx), **self._validator)
        may_continue = stage == "training" and not self._overfit
        keep = limit if self._overfit else None
        return source_of(loader, argument, may_continue=may_continue, overfit=self._overfit, keep=keep)

    def _hook(self, name: str) -> Callable[..., Any] | None:
        """Return a hook of the DataModule, or else of the module, if it is overridden."""
        if self.datamodule is not None and getattr(type(self.datamodule), name) is not getattr(DataModule, name):
            return getattr(self.datamodule, name)
        if self.datamodule is None and callable(getattr(type(self.module), name, None)):
            return getattr(self.module, name)
        return None

    def _transfer(self, idx: int) -> dict[str, Any]:
        name = "on_before_batch_transfer"
        hook = self._hook(name) or getattr(self.module, name, None)
        if hook is None:
            return {}
        owner = type(getattr(hook, "__self__", self.module)).__name__
        return {"prepare": lambda batch: hook(batch, idx), "prepared_by": f"{owner}.{name}"}


def limit_of(limit: int | float, loader: Any, where: str, argument: str) -> int | None:
    """Return how many batches a limit allows, None for all.

    Args:
        limit: A number of batches, or a fraction of those that the loader has.
        loader: The loader.
        where: Where it was given, for messages.
        argument: The Trainer's argument that is the limit.

    Raises:
        ArgumentError: A fraction of an unknown length, or of so few batches that none is left.
    """
    length = length_of(loader)
    if isinstance(limit, int):
        return limit if length is None else min(limit, length)
    if limit in (0.0, 1.0):
        return length if limit else 0
    if length is None or 0 < length * limit < 1:
        raise ArgumentError(
            f"Trainer({argument}={limit}) is a fraction, and {where} has "
            f"{'no length' if length is None else f'{length} batches'}. Give the number of batches as an int."
        )
    return int(length * limit)
