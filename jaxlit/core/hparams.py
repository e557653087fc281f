"""The constructor's arguments of a module or a DataModule, as it and its checkpoints keep them."""

import argparse
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from jaxlit.checkpoints.hparam_values import DEFAULT, NotKeptError, encode, not_kept, readable
from jaxlit.core.side_tables import SideTable
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.porting import takes_only_its_arguments
from jaxlit.reporting.secrets import PLACEHOLDER, hide, tell
from jaxlit.shown import shown

_CHOSEN = "..."  # how an argument is shown that the user chose not to keep


class Hparams(dict[str, Any]):
    """Hyperparameters: a dict, whose keys are attributes as well.

    Args:
        values: The hyperparameters.
        arguments: The names of those that the constructor takes; others were added.
        left_out: How the arguments that are not kept, and are not their defaults, are shown.
    """

    _arguments: frozenset[str]
    _left_out: dict[str, str]

    def __init__(
        self,
        values: Mapping[str, Any] | None = None,
        arguments: Iterable[str] = (),
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(values or {})
        object.__setattr__(self, "_arguments", frozenset(arguments))
        object.__setattr__(self, "_left_out", dict(left_out or {}))

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"hparams has no {name!r}, and has {list(self)}. Constructor arguments that can be saved are kept."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the constructor's arguments as a checkpoint keeps them, and what was added; secrets are not kept."""
        given: dict[str, Any] = dict.fromkeys(sorted(self._arguments - {"rngs", *self}), DEFAULT)
        given |= {name: not_kept(text) for name, text in self._left_out.items()}
        added: dict[str, Any] = {}
        for name, value in self.items():
            try:
                kept, secrets = encode(value), list[str]()
                hide({name: readable(value)}, secrets)
                tell(secrets)
                if secrets:
                    raise NotKeptError(PLACEHOLDER)
                (given if name in self._arguments else added)[name] = kept
            except NotKeptError as error:
                if name in self._arguments:
                    given[name] = not_kept(str(error))
        return given, added

    def readable(self) -> dict[str, Any]:
        """Return all as JSON for loggers, those that are not kept as their text."""
        left_out = {name: text for name, text in self._left_out.items() if text != _CHOSEN}
        return left_out | {name: readable(value) for name, value in self.items()}


_hparams: SideTable[Hparams] = SideTable()
_running: SideTable[dict[str, Any]] = SideTable()  # the arguments of the constructor that runs


class KeepsHparams:
    """The base of modules and DataModules, which keep their constructors' arguments."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            # No assignment: type checkers would take it for the signature of every module.
            setattr(cls, "__init__", _recorded(cls, vars(cls)["__init__"]))  # noqa: B010

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep those of the constructor's arguments that can be saved as hyperparameters."""
        made = super().__new__(cls)
        given = _named(cls.__mro__, made, args, kwargs, defaults=True)
        lost = {name: text for name, x in given.items() if (text := _not_kept(x)) is not None}
        left_out = {name: text for name, text in lost.items() if _is_asked_for(made, name, given[name])}
        _hparams[made] = Hparams({k: x for k, x in given.items() if k not in lost}, given, left_out)
        return made

    @property
    def hparams(self) -> Hparams:
        """The constructor's arguments that a checkpoint can keep: a dict, whose keys are attributes as well."""
        return hparams_of(self)

    @hparams.setter
    def hparams(self, values: Mapping[str, Any]) -> None:
        values = _mapping(f"{type(self).__name__}.hparams takes a dict", values)
        was = hparams_of(self)
        gone = [k for k in was if k not in values and k in was._arguments and _is_asked_for(self, k, was[k])]
        _hparams[self] = Hparams(values, was._arguments, was._left_out | dict.fromkeys(gone, _CHOSEN))

    @takes_only_its_arguments("self.save_hyperparameters")
    def save_hyperparameters(self, *args: Any, ignore: str | Sequence[str] = ()) -> None:
        """Say which constructor arguments are hyperparameters; without a call all that can be saved are.

        Called in a base class's constructor, those that it was given are as well.

        Args:
            *args: Names of those that are, or dicts of more.
            ignore: Names of those that are not.

        Raises:
            ArgumentError: The constructor has no argument of a name.
            ArgumentTypeError: There is no such argument.
        """
        ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore or ())
        called, names = f"{type(self).__name__}.save_hyperparameters", [x for x in args if isinstance(x, str)]
        here = _running.get(self) or {}
        kept = {**here, **hparams_of(self)}
        known = {*inspect.signature(type(self).__init__).parameters, *kept}
        if unknown := [x for x in (*names, *ignore) if x not in known]:
            raise ArgumentError(f"{called} names {unknown[0]!r}, which is no argument of the constructor.")
        # Names choose among the arguments of the constructor that runs, not of those around it.
        chosen = {*names} | (kept.keys() - here.keys() if here else set()) if names else kept.keys()
        hparams = {k: v for k, v in kept.items() if k in chosen and k not in ignore}
        for values in args:
            if not isinstance(values, str):
                hparams |= _mapping(f"{called} takes names of the constructor's arguments, and dicts", values)
        self.hparams = {k: v for k, v in hparams.items() if _not_kept(v) is None}


def hparams_of(owner: Any) -> Hparams:
    """Return the hyperparameters of a module or DataModule, always the same dict, without touching it."""
    if (hparams := _hparams.get(owner)) is None:  # a copy, made without the constructor
        names = _parameters(type(owner))
        hparams = _hparams[owner] = Hparams(arguments=names, left_out=dict.fromkeys(names, _CHOSEN))
    return hparams


def share_hparams(copy: Any, module: Any) -> None:
    """Give a copy the module's hyperparameters."""
    _hparams.share(copy, module)


def _not_kept(value: Any) -> str | None:
    """Return how a value is shown that a checkpoint cannot keep; None for one that it can."""
    try:
        encode(value)
    except NotKeptError as error:
        return str(error)
    return None


def _mapping(rule: str, values: Any) -> Mapping[str, Any]:
    """Return a mapping, or the attributes of what `argparse` has parsed."""
    values = vars(values) if isinstance(values, argparse.Namespace) else values
    if not isinstance(values, Mapping):
        raise ArgumentTypeError(f"{rule}, got {shown(values)}.")
    return values


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of a constructor that have names, without `self` and `rngs`, which need not be given."""
    _, *parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    return {p.name: p for p in parameters if p.name != "rngs" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _is_asked_for(owner: Any, name: str, value: Any) -> bool:
    """Return whether an argument that is not kept must be given again: it is not its default, nor random keys."""
    parameter = _parameters(type(owner)).get(name)
    try:
        return name != "rngs" and (parameter is None or not (value is parameter.default or value == parameter.default))
    except Exception:  # arrays
        return True


def _recorded(cls: type, init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor whose arguments `save_hyperparameters` sees while it runs."""

    @functools.wraps(init)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        outer = _running.get(self) or {}
        _running[self] = _named(cls.__mro__, self, args, kwargs, defaults=True)
        try:
            init(self, *args, **kwargs)
        finally:
            _running[self] = outer

    return run


def _named(
    classes: Iterable[type], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, defaults: bool
) -> dict[str, Any]:
    """Return a constructor's arguments by name; what it hands on as `*args, **kwargs` has the names of its base."""
    cls, *bases = [cls for cls in classes if hasattr(vars(cls).get("__init__"), "__code__")] or [type(owner)]
    parameters = inspect.signature(cls.__init__).parameters.values()
    try:
        # In part: jl.lazy leaves out rngs.
        bound = inspect.signature(cls.__init__).bind_partial(owner, *args, **kwargs)
    except TypeError:
        return {}  # the constructor itself will raise
    if defaults:
        bound.apply_defaults()
    given, kinds = dict(list(bound.arguments.items())[1:]), {p.kind: p.name for p in parameters}
    several, more = (kinds.get(kind, "") for kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD))
    named = given.pop(more, {})
    if several and more and bases:
        handed_on = _named(bases, owner, given.get(several, ()), named, defaults=False)
        if len(handed_on) == len(given.get(several, ())) + len(named):
            given.pop(several, None)
            named = handed_on
    return given | named
