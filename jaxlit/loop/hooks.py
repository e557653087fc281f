"""Which hooks are called, and what follows each call."""

import contextlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxlit.callbacks.base import Callback
from jaxlit.control import Position
from jaxlit.core.log import ACTIVE
from jaxlit.data.loaders import DataModule
from jaxlit.errors import JaxlitError, ModuleError, NonFiniteError, add_note, did_you_mean, note_place
from jaxlit.faces import advice

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.engine.module_sync import ModuleSync
    from jaxlit.loop.results import HostLog

_HOOKS = {
    *(name for cls in (Callback, DataModule) for name in vars(cls) if name.startswith("on_")),
    "on_before_batch_transfer",
}

_logger = logging.getLogger("jaxlit")

OF_CALLBACK = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
_OF_DATAMODULE = ("prepare_data", "setup", "teardown", "on_exception")
# Hooks that are not given the module.
_WITHOUT_MODULE = ("on_log", "on_trace")
# What a logger refuses there is a mistake in what it was given, and nothing has been trained yet.
_BEFORE_TRAINING = ("setup", "log_hyperparams", "on_load_checkpoint", "on_fit_start")


@dataclass(slots=True, eq=False)
class TimedFunction:
    """A hook of one callback, module or DataModule, and the time of its calls, without hooks that ran inside it."""

    source: Any  # the callback, module or DataModule
    function: Callable[..., Any]  # takes the trainer and the module first
    calls: int = 0
    seconds: float = 0.0  # of all calls
    longest: float = 0.0  # seconds of the longest call

    @property
    def owner(self) -> str:
        """The name of the source's class."""
        return type(self.source).__name__


@dataclass(eq=False)
class Hook:
    """Every hook of one name; calling it calls them in order."""

    hooks: "Hooks"
    name: str
    functions: list[TimedFunction]  # of each owner

    def __bool__(self) -> bool:
        return bool(self.functions)

    def without(self, callbacks: Sequence[Callback]) -> "Hook":
        """Return the hook without those of some callbacks."""
        functions = [f for f in self.functions if all(f.source is not c for c in callbacks)]
        return Hook(self.hooks, self.name, functions)

    def __call__(self, *args: Any) -> bool:
        """Call every hook of this name; returns whether one of them returned -1."""
        hooks = self.hooks
        skip = False
        failed = None
        if not self.functions:
            return skip
        log = hooks.log
        live = hooks.live
        # Of the hook that has called this one, for example by a checkpoint.
        outer_hook = log.hook
        outer_named = log.named
        outer_nested = hooks.nested_seconds
        log.hook = self.name
        hooks.nested_seconds = 0.0
        if log.named:  # a name may be logged once in each call of a hook
            log.named = set()
        begun = start = perf_counter()
        # Timed and collected without a context manager or a helper: this runs for every hook of every step.
        token = ACTIVE.set(log)
        try:
            for function in self.functions:
                try:
                    try:
                        result = function.function(hooks.trainer, hooks.module, *args)
                    except BaseException as error:
                        if not hooks.disable_if_allowed(error, function.source, self.name, args):
                            if self.name != "on_log" or not isinstance(error, Exception):
                                raise
                            failed = failed or error  # every logger gets the row
                        result = None
                    if result is not None and isinstance(result, (int, np.integer)) and result == -1:
                        skip = True
                    # After each owner, so that an error names the one that wrote.
                    if live is not None and live.touched:
                        hooks.take_writes(function.owner)
                finally:
                    now = perf_counter()
                    function.calls += 1
                    function.seconds += (seconds := now - start - hooks.nested_seconds)
                    function.longest = seconds if seconds > function.longest else function.longest
                    start = now
                    hooks.nested_seconds = 0.0
        finally:
            ACTIVE.reset(token)
            log.hook = outer_hook
            log.named = outer_named
            hooks.nested_seconds = outer_nested + start - begun
        if failed is not None:
            raise failed
        return skip


class Hooks:
    """The hooks of the DataModule, the callbacks and the module, in this order, that are overridden.

    Hooks, and nothing else, are given the Trainer. `log` is what `self.log` fills in hooks.
    """

    def __init__(
        self,
        trainer: Any,
        module: "TrainModule",
        callbacks: Sequence[Callback],
        log: "HostLog",
        datamodule: DataModule | None,
        position: Position,
    ) -> None:
        self.trainer = trainer
        self.module = module
        self.callbacks = callbacks
        self.log = log
        self.datamodule = datamodule
        self.position = position
        self._disabled: list[Callback] = []  # by an error
        self.live: ModuleSync | None = None  # set while a run owns the arrays of the module
        self.nested_seconds = 0.0  # seconds of hooks inside the one that runs
        self.bound: dict[str, Hook] = {}  # by name
        for owner in (*callbacks, module, datamodule):
            _refuse_gone(owner)
            attributes = vars(owner) if isinstance(owner, Callback) else {}
            for name in _OF_DATAMODULE if owner is datamodule else OF_CALLBACK:
                method = getattr(type(owner), name, None)
                if name in attributes or (callable(method) and method is not getattr(Callback, name, None)):
                    _adapted(owner, name)  # a wrong signature is refused now, not in the middle of training

    def bind(self, name: str) -> Hook:
        """Return every hook of this name."""
        if name in self.bound:
            return self.bound[name]
        owners: list[Any] = [c for c in self.callbacks if overrides(c, name) and self.may_run(c, name)]
        if callable(getattr(type(self.module), name, None)):
            owners.append(self.module)
        if name in ("on_train_epoch_end", "on_safe_point"):
            owners.sort(key=lambda c: isinstance(c, Callback) and c.runs_last)  # stable: those keep their order
        # Loader hooks return something, so their users call them.
        if name in _OF_DATAMODULE and self.datamodule is not None:
            owners.insert(0, self.datamodule)
        functions = [TimedFunction(owner, _adapted(owner, name)) for owner in owners]
        return self.bound.setdefault(name, Hook(self, name, functions))

    def __call__(self, name: str, *args: Any) -> None:
        """Call every hook of this name."""
        self.bind(name)(*args)

    def functions(self) -> list[tuple[str, TimedFunction]]:
        """Return every (hook, function) that was bound so far."""
        return [(hook.name, function) for hook in self.bound.values() for function in hook.functions]

    def may_run(self, callback: Callback, hook: str) -> bool:
        """Return whether a hook is called: of a disabled callback only the one that closes what it has opened."""
        return hook == "teardown" or all(callback is not x for x in self._disabled)

    def disable_if_allowed(self, error: BaseException, owner: Any, hook: str, args: tuple[Any, ...] = ()) -> bool:
        """Disable the callback that has raised, with one warning, if it may fail; return whether the run continues.

        If it ends, the place is noted on the error, by the hook and its arguments.
        """
        position = self.position
        name = f"{type(owner).__name__}.{hook}"
        # Arguments of a batch hook: (batch, batch_idx), at the end (outputs, batch, batch_idx).
        batch = args[1 + hook.endswith("_end")] if "_batch_" in hook else position.batch_idx
        at = f"in epoch {position.epochs}, batch {batch} (global_step {position.global_step})"
        # A NonFiniteError is not the logger's: it may have saved a checkpoint, which checks the steps.
        ends = isinstance(error, NonFiniteError) or (isinstance(error, JaxlitError) and hook in _BEFORE_TRAINING)
        if ends or not (isinstance(owner, Callback) and owner.may_fail and isinstance(error, Exception)):
            note_place(error, f"{name} {at}")
            return False
        if all(owner is not x for x in self._disabled):
            self._disabled.append(owner)
            for other, function in self.functions():
                if function.source is owner and other != "teardown":
                    function.function = lambda *_: None
            _logger.warning(
                "%s failed %s: %r. The logger is disabled for the rest of this run, and training continues; with "
                "on_error='raise' it ends training.",
                *(name, at, error),
            )
        return True

    def ask(self, owner: Any, hook: str, function: Callable[[], Any], otherwise: Any = None) -> Any:
        """Return the result of a callback's method, or `otherwise` if it raises and the run continues without it."""
        try:
            return function()
        except Exception as error:
            if not self.disable_if_allowed(error, owner, hook):
                raise
            return otherwise

    def keyed(self) -> dict[str, Callback]:
        """Return the callbacks by the keys of their states, numbered where several have the same."""
        keys: dict[str, Callback] = {}
        for callback in self.callbacks:
            name = self.ask(callback, "state_key", lambda c=callback: c.state_key, type(callback).__name__)
            same = sum(key == name or key.startswith(f"{name}:") for key in keys)
            keys[f"{name}:{same}" if same else name] = callback
        return keys

    def call_all(self, name: str, argument: Any, first: BaseException | None) -> BaseException | None:
        """Call every hook of a name whatever the others raise, and return the first error of all.

        A later error is noted on the first: it never hides it.
        """
        for function in self.bind(name).functions:
            try:
                Hook(self, name, [function])(argument)
            except BaseException as error:  # a Ctrl-C in one teardown must not keep the others from theirs
                if first is not None:
                    add_note(first, f"{function.owner}.{name} raised as well: {error!r}")
                first = first or error
        return first

    def take_writes(self, owner: str) -> None:
        """Adopt, or refuse, what the running hook has written to the module so far; errors name the `owner`."""
        hook = self.log.hook
        if self.live is not None and self.live.touched:
            self.live.take_writes(owner, hook, adopt="_batch_" not in hook and hook not in _WITHOUT_MODULE)


def _refuse_gone(owner: Any) -> None:
    # If nothing called a hook of Lightning, the model would train without the hook's work, silently.
    gone = dict(advice("hook"))
    if not isinstance(owner, Callback):
        gone |= dict.fromkeys(("trace_step", "on_trace"), "Put it into a Callback.")
    for name in dir(type(owner)):
        if not (name in gone or name.startswith("on_")) or not callable(getattr(type(owner), name, None)):
            continue
        hint = f" {gone[name]}" if name in gone else ""
        # A user's helper may begin with on_ as well: only a name that is nearly a hook is a misspelling.
        if not hint and name not in _HOOKS:
            hint = did_you_mean(name, _HOOKS, 0.9)
        if hint:
            raise ModuleError(f"{type(owner).__name__}.{name} would never be called.{hint}")
    if getattr(owner, "automatic_optimization", True) is False:
        raise ModuleError(
            f"{type(owner).__name__}.automatic_optimization = False: there is no manual optimization. Give parts "
            "optimizers with jl.Optimizer(by={...}) and jax.lax.stop_gradient in the loss, or write the loop with "
            "jl.compile_step."
        )


def overrides(callback: Callback, hook: str) -> bool:
    """Return whether a callback overrides a hook."""
    if not hasattr(Callback, hook):  # prepare_data belongs to modules and DataModules
        return False
    return getattr(type(callback), hook) is not getattr(Callback, hook) or hook in vars(callback)


def _adapted(owner: Any, hook: str) -> Callable[..., Any]:
    """Return a hook that takes the trainer and the module first, whatever of them the owner's method takes."""
    if isinstance(owner, Callback):
        method = fitting(owner, hook)
        return method if hook not in _WITHOUT_MODULE else lambda trainer, module, *args: method(trainer, *args)
    method = fitting(owner, hook, [name for name in _arguments(hook) if name not in ("trainer", "module")])
    return lambda trainer, module, *args: method(*args)


@cache
def _arguments(hook: str) -> list[str]:
    """Return the names of what a callback's hook is called with."""
    return list(inspect.signature(getattr(Callback, hook)).parameters)[1:] if hasattr(Callback, hook) else []


def fitting(owner: Any, hook: str, arguments: list[str] | None = None) -> Callable[..., Any]:
    """Return an owner's hook that can be called with arguments of these names, None for those of a callback's hook.

    It may leave out `dataloader_idx`, as in Lightning; one that takes other arguments is refused.
    """
    method = getattr(owner, hook)
    arguments = _arguments(hook) if arguments is None else arguments
    signature = inspect.signature(method)
    for left_out in (0, 1) if arguments[-1:] == ["dataloader_idx"] else (0,):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments[: len(arguments) - left_out])
            return (lambda *args: method(*args[:-1])) if left_out else method
    raise ModuleError(
        f"{type(owner).__name__}.{hook}{signature} is called with ({', '.join(arguments)}). Give it these arguments."
    )
