"""`BackboneFreeze`, which leaves a part of the module untrained for some epochs."""

from typing import TYPE_CHECKING, Any

import optax
from flax import nnx

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.core.module import TrainModule
from jaxlit.core.optimizer import fits_none, names_in, transform_of
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.reporting.terminal import say
from jaxlit.texts import shown

if TYPE_CHECKING:
    from jaxlit.trainer.trainer import Trainer


class BackboneFreeze(Callback):
    """Leave a part of the module as it is until an epoch, and train it from then on.

    Until then an optimizer step does not change the part: parameters and the optimizer's state stay bit by bit, no
    weight decay acts on them, and `gradient_clip_val` clips by the norm of the other gradients. From that epoch on the
    part is trained as if its optimizer had been created then: its moments, counts and schedules begin there, and a clip
    inside the optimizer sees its gradients only. Rows have its rate as `lr/<part>`, 0 until then. Until
    then a step has no backward pass through the part and no update of it; it is compiled once for each set of frozen
    parts. Leave parameters that are never trained out of `jl.Optimizer(wrt=...)`.

    Batch statistics of the part change, as its layers run in training mode, unless `module.backbone.eval()` is called
    before `fit`. A checkpoint fits a training with the same parts. Several such callbacks unfreeze parts in turn.

    Args:
        part: A group as in `jl.Optimizer(by=...)`: an attribute like "backbone" or "net.layers[0]", a pattern of paths,
            "*/kernel", or an nnx filter of parameters.
        unfreeze_at_epoch: The first epoch that trains the part.
        tx: The optimizer of the part, for example with a lower rate; None for one like that of the module.

    Raises:
        ArgumentError: An argument is out of its set, or before the first step: the part has no trained parameter, all
            of them, or some of another part.
        ArgumentTypeError: `tx` is no optax transform.

    Example:
        >>> import jaxlit as jl, optax
        >>> freeze = jl.callbacks.BackboneFreeze("backbone", unfreeze_at_epoch=3, tx=optax.adam(1e-5))
        >>> trainer = jl.Trainer(max_epochs=10, callbacks=freeze, logger=False)
    """

    changes_step = True

    def __init__(
        self,
        part: Any = "backbone",
        *,
        unfreeze_at_epoch: int = 10,
        tx: optax.GradientTransformation | optax.MultiSteps | None = None,
    ) -> None:
        self.unfreeze_at_epoch = check.integer("unfreeze_at_epoch", unfreeze_at_epoch, low=1, owner="BackboneFreeze")
        rule = 'takes an attribute like "backbone", a pattern of paths, or an nnx filter'
        check.require(part not in ("", None), "part", part, rule, owner="BackboneFreeze")
        if not isinstance(part, str):
            try:
                nnx.filterlib.to_predicate(part)
            except (TypeError, ValueError):
                raise ArgumentTypeError(f"BackboneFreeze(part=...) {rule}, got {part!r}.") from None
        self.part, self.tx = part, None if tx is None else transform_of("BackboneFreeze(tx=...)", tx)

    def on_train_epoch_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Say that the part is trained from now on."""
        if trainer.current_epoch == self.unfreeze_at_epoch and trainer.is_global_zero:
            epoch = trainer.current_epoch
            say(f"BackboneFreeze: {shown(self.part)} is trained from epoch {epoch} on (the step is compiled again)")

    @property
    def frozen_part(self) -> Any:  # type: ignore[override]
        """The part."""
        return self.part

    def names(self, module: TrainModule, wrt: Any) -> frozenset[str]:
        """Return the names of the part's trained parameters; a subclass may override this.

        Names are those of the model's summary, as in "backbone.layers[0].kernel".

        Args:
            module: The module.
            wrt: The filter of trained parameters.

        Raises:
            ArgumentError: The part has none.
        """
        if names := names_in(module, wrt, self.part):
            return frozenset(names)
        raise ArgumentError(f"BackboneFreeze(part={shown(self.part)}) {fits_none(module, wrt, self.part)}.")
