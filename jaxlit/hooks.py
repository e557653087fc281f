"""Which hooks are called, and what follows each call."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxlit.callbacks.base import Callback

if TYPE_CHECKING:
    from jaxlit.live import Live
    from jaxlit.module import TrainModule
    from jaxlit.trainer import Trainer


class Hooks:
    """The hooks of the callbacks and the module that are overridden; nothing else is called.

    Args:
        trainer: The trainer.
        module: The module, whose hooks come after the callbacks'.
        callbacks: The callbacks, in order.
    """

    def __init__(self, trainer: "Trainer", module: "TrainModule", callbacks: Sequence[Callback]) -> None:
        self.trainer, self.module, self.callbacks = trainer, module, callbacks
        self.live: Live | None = None  # set while a fit owns the state
        self._bound: dict[str, list[tuple[str, Callable[..., Any]]]] = {}

    def bind(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        """Return (owner, function) of each hook of this name; functions take the trainer and the module first."""
        if hook not in self._bound:
            # The sort is stable: callbacks that run last keep their order behind the module.
            late = hook == "on_train_epoch_end"
            owners = [c for c in self.callbacks if _overrides(c, hook)]
            found = [(c.runs_last and late, type(c).__name__, _of_callback(c, hook)) for c in owners]
            if callable(getattr(type(self.module), hook, None)):
                own = getattr(self.module, hook)
                found.append((False, type(self.module).__name__, lambda trainer, module, *args: own(*args)))
            self._bound[hook] = [(owner, function) for _, owner, function in sorted(found, key=lambda x: x[0])]
        return self._bound[hook]

    def __call__(self, hook: str, *args: Any) -> None:
        """Call every hook of this name."""
        for owner, function in self.bind(hook):
            function(self.trainer, self.module, *args)
            self.settle(owner, hook)

    def settle(self, owner: str, hook: str) -> None:
        """Take over, or refuse, what a hook wrote to the module."""
        if self.live is not None and self.live.touched:
            self.live.settle(owner, hook, adopt="_batch_" not in hook and hook != "on_log")


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(Callback, hook) or hook in vars(callback)


def _of_callback(callback: Callback, hook: str) -> Callable[..., Any]:
    method = getattr(callback, hook)
    # on_log takes no module: it is about numbers.
    return method if hook != "on_log" else lambda trainer, module, *args: method(trainer, *args)
