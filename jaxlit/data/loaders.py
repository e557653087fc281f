"""Where the loaders of a run come from."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxlit.core.stage import STAGES
from jaxlit.data.datamodule import DataModule
from jaxlit.data.first_batch import check_first
from jaxlit.data.intake import Intake
from jaxlit.data.kinds import each_loader, source_of
from jaxlit.data.source import Source, length_of
from jaxlit.data.watchdog import Watchdog
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError
from jaxlit.notes import noting_place

_logger = logging.getLogger("jaxlit")


class Loaders:
    """The loaders of one run.

    Args:
        verb: The Trainer's method, for messages.
        given: What was passed to it, by stage: the loaders and the argument's name.
        datamodule: The DataModule, if one was passed.
        module: The module, which may have the loader hooks as well; None while it is not built.
        limits: By stage, a number of batches or a fraction.
        intake: Arguments of each loader's `Intake`.
        pinned: Whether every epoch takes the same batches, in the loader's own order.
        asked: Whether the limits are the user's own.
    """

    def __init__(
        self,
        verb: str,
        given: Mapping[str, tuple[Any, str]],
        datamodule: DataModule | None,
        module: Any,
        limits: Mapping[str, int | float],
        *,
        intake: Mapping[str, Any],
        pinned: bool = False,
        asked: bool = True,
    ) -> None:
        # As in Lightning, a DataModule may stand in the place of the loaders.
        stage, (first, argument) = next(iter(given.items()))
        if isinstance(first, DataModule) and datamodule is None:
            datamodule, given = first, {**given, stage: (None, argument)}
        if datamodule is not None and not isinstance(datamodule, DataModule):
            kind = f"the class {datamodule.__name__}" if isinstance(datamodule, type) else type(datamodule).__name__
            raise ArgumentTypeError(f"Trainer.{verb}(datamodule=...) takes a jl.DataModule object, got {kind}.")
        for loaders, argument in given.values():
            if loaders is not None and datamodule is not None:
                raise ArgumentError(
                    f"Trainer.{verb}({argument}=..., datamodule=...) names two sources of data. Leave one of them out."
                )
        for loaders, argument in given.values():  # what is no loader is refused before anything is set up
            each_loader(loaders, f"Trainer.{verb}({argument}=...)")
        self._opened: dict[str, list[tuple[Source, int | None]]] = {}
        # By where a loader comes from: those that a hook makes again have one, so that their batches are compared too.
        self._intakes: dict[str, Intake] = {}
        self.verb, self.given, self.datamodule, self.module = verb, given, datamodule, module
        self._limits, self._pinned, self._intake, self._asked = limits, pinned, intake, asked

    def from_hook(self, stage: str) -> bool:
        """Return whether a hook makes the stage's loaders, and so can make them again."""
        return self.given[stage][0] is None and self._hook(STAGES[stage].loaders) is not None

    def check_before_building(self, cls: type, timeouts: tuple[float | None, float | None]) -> None:
        """Look at the first batches of the loaders that were passed, before a module of class `cls` is built.

        A loader that a hook gives, or whose batches a hook changes, has to wait for the module.
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
        """Draw a loader's first batch and refuse one that no step could take."""
        check_first(source, limit, self.intake_of(source), watchdog, required=required)

    def intake_of(self, source: Source) -> Intake:
        """Return what takes in the batches of a source."""
        return self._intakes[source.argument]

    def open(self, stage: str, *, required: bool) -> list[tuple[Source, int | None]]:
        """Return each loader of a stage, with its limit in batches.

        Raises:
            ArgumentError: There is none, though one is required, or a limit does not fit.
        """
        if stage in self._opened:
            return self._opened.pop(stage)
        hook, limit_name = STAGES[stage].loaders, STAGES[stage].limit
        limit_name = "overfit_batches" if self._pinned else limit_name
        loaders, argument = self.given[stage]
        where = f"Trainer.{self.verb}({argument}=...)"
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
                f"Trainer.{self.verb} has no {argument}. Pass a loader, jl.ArrayLoader(arrays, batch_size) say, or "
                f"datamodule= with {hook}, or define {hook} in the module."
            )
        found = each_loader(loaders, where)
        if stage == "training" and len(found) > 1:
            raise ArgumentError(f"{where} takes one loader, got {len(found)}. Join them into one, a grain mix say.")
        limits = [limit_of(self._limits[stage], *one, limit_name) for one in found]
        pairs = [
            (self._source(*one, stage, idx, limit), limit)
            for idx, (one, limit) in enumerate(zip(found, limits, strict=True))
        ]
        for source, limit in pairs:
            self._check_limit(source, limit, stage, limit_name)
        return [(s, n) for s, n in pairs if n != 0 or s.length == 0 or stage == "training"]

    def _source(self, loader: Any, argument: str, stage: str, idx: int, limit: int | None) -> Source:
        """Return the source of a loader, and see to it that there is what takes its batches in."""
        if argument not in self._intakes:
            may_be_empty = jax.process_count() > 1
            self._intakes[argument] = Intake(argument, **self._transfer(idx), **self._intake, may_be_empty=may_be_empty)
        may_go_on = stage == "training" and not self._pinned
        keep = limit if self._pinned else None
        return source_of(loader, argument, may_go_on=may_go_on, pinned=self._pinned, keep=keep)

    def _check_limit(self, source: Source, limit: int | None, stage: str, limit_name: str) -> None:
        asked = self._limits[stage]
        if self._asked and isinstance(asked, int) and limit is not None and limit < asked:
            _logger.warning(
                "Trainer(%s=%d) is more than %s has: an epoch takes its %d batches.",
                limit_name,
                asked,
                source.argument,
                limit,
            )
        if stage != "training" and limit is None and source.is_endless:
            raise ArgumentError(f"{source.argument} is a loader without end. Pass Trainer({limit_name}=...).")

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
    if limit == 1.0:
        return length
    if limit == 0.0:
        return 0
    if length is None:
        raise ArgumentError(
            f"Trainer({argument}={limit}) is a fraction, but {where} has no length. "
            "Give the number of batches as an int."
        )
    count = int(length * limit)
    if count == 0 and length:
        raise ArgumentError(
            f"Trainer({argument}={limit}) of {length} batches is less than one. "
            f"Give at least {1 / length:.3g}, or an int."
        )
    return count
