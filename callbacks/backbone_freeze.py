"""Leave a part of the module untrained for some epochs."""

from collections.abc import Iterable, Sequence
from typing import Any

import optax
from flax import nnx

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.core.groups import fits_none, labels_of, names_in
from jaxlit.core.module import TrainModule
from jaxlit.core.optimizer import transform_of
from jaxlit.core.parts import Part
from jaxlit.errors import ArgumentError, ArgumentTypeError, did_you_mean
from jaxlit.shown import shown


class BackboneFreeze(Callback):
    """Leave a part of the module as it is until an epoch, and train it from then on.

    Until then an optimizer step changes nothing of it: its parameters stay bit by bit, its optimizer's state does not
    move, no weight decay acts on it, and `gradient_clip_val` clips by the norm of the other gradients. From that epoch
    on it is trained as if its optimizer had been made then: moments, counts and schedules of it begin there, and a clip
    that is a part of the optimizer goes by its gradients alone. Rows have its rate as `lr/<part>`, 0 until then. The
    step is compiled once: it looks the epoch up, and computes the gradients of the part from the start. What is never
    trained is said by `jl.Optimizer(wrt=...)`, and costs nothing.

    Batch statistics of the part move, as its layers run in training mode: `module.backbone.eval()` before `fit` keeps
    them. A checkpoint is of a training with the same parts. Several such callbacks unfreeze one part after the other.

    Args:
        part: What a group of `jl.Optimizer(by=...)` is: an attribute, "backbone" or "net.layers[0]" say, a pattern of
            paths, "*/kernel", or an nnx filter of parameters.
        unfreeze_at_epoch: The first epoch that trains it.
        tx: The optimizer of the part, with a lower rate say; None for one like that of the module.

    Raises:
        ArgumentError: An argument is out of its set, or before the first step: the part names no trained parameter, all
            of them, or some that another part names.
        ArgumentTypeError: `tx` is no optax transform.

    Example:
        >>> import jaxlit as jl, optax
        >>> freeze = jl.callbacks.BackboneFreeze("backbone", unfreeze_at_epoch=3, tx=optax.adam(1e-5))
        >>> trainer = jl.Trainer(max_epochs=10, callbacks=freeze, logger=False)
    """

    def __init__(
        self,
        part: Any = "backbone",
        *,
        unfreeze_at_epoch: int = 10,
        tx: optax.GradientTransformation | optax.MultiSteps | None = None,
    ) -> None:
        self.unfreeze_at_epoch = check.integer("unfreeze_at_epoch", unfreeze_at_epoch, low=1, owner="BackboneFreeze")
        rule = 'takes an attribute, "backbone" say, a pattern of paths, or an nnx filter'
        check.require(part not in ("", None, True, False), "part", part, rule, owner="BackboneFreeze")
        if not isinstance(part, str):
            try:
                nnx.filterlib.to_predicate(part)
            except (TypeError, ValueError):
                raise ArgumentTypeError(f"BackboneFreeze(part=...) {rule}, got {part!r}.") from None
        self.part, self.tx = part, None if tx is None else transform_of("BackboneFreeze(tx=...)", tx)

    def names(self, module: TrainModule, wrt: Any) -> frozenset[str]:
        """Return the names of the trained parameters that it holds; a rule of one's own overrides this.

        Names are those of the model's summary, as in "backbone.layers[0].kernel".

        Args:
            module: The module.
            wrt: The filter of those that are trained.

        Raises:
            ArgumentError: There is none.
        """
        if found := names_in(module, wrt, self.part):
            return frozenset(found)
        raise ArgumentError(f"BackboneFreeze(part={shown(self.part)}) {fits_none(module, wrt, self.part)}.")


def _names_of(callback: BackboneFreeze, module: TrainModule, wrt: Any) -> frozenset[str]:
    """Return what a callback, of which a subclass may have changed it, names; nothing that is not there."""
    found, there = callback.names(module, wrt), names_in(module, wrt, ...)
    whose = f"{type(callback).__name__}.names(...)"
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise ArgumentTypeError(
            f"{whose} returns the names of parameters, got {shown(found)}. Return a frozenset of them."
        )
    found = frozenset(found)
    some = f" One is called {there[0]!r}." if there else " There is none."
    if unknown := sorted(map(str, found.difference(there))):
        raise ArgumentError(
            f"{whose} names {unknown[0]!r}, which is no trained parameter of {type(module).__name__}."
            f"{did_you_mean(unknown[0], there)}{some}"
        )
    if not found:
        raise ArgumentError(f"{whose} names no trained parameter of {type(module).__name__}.{some}")
    return found


def held_parts(callbacks: Sequence[Callback], module: TrainModule, wrt: Any) -> tuple[Part, ...]:
    """Return the parts that the callbacks hold for some epochs.

    Args:
        callbacks: The callbacks of a fit.
        module: Its module.
        wrt: The filter of what is trained.

    Raises:
        ArgumentError: A part has no trained parameter, two have the same, or nothing is left to train.
    """
    freezes = [c for c in callbacks if isinstance(c, BackboneFreeze)]
    parts = list[Part]()
    for callback, label in zip(freezes, labels_of([c.part for c in freezes], "part"), strict=True):
        names = _names_of(callback, module, wrt)
        if both := sorted(name for part in parts for name in part.names & names):
            raise ArgumentError(
                f"BackboneFreeze(part={shown(callback.part)}) names {both[0]}, which another one names as well. Give "
                "each its own."
            )
        if label in {part.label for part in parts}:
            raise ArgumentError(f"Two BackboneFreezes have parts that are called {label!r}. Join them by nnx.Any.")
        parts.append(Part(label, names, callback.unfreeze_at_epoch, callback.tx))
    if parts and not {*names_in(module, wrt, ...)} - {name for part in parts for name in part.names}:
        raise ArgumentError(
            f"BackboneFreeze(part={', '.join(shown(c.part) for c in freezes)}) holds every trained parameter of "
            f"{type(module).__name__}. Name a part of them."
        )
    return tuple(parts)
