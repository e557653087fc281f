"""What `configure_optimizers` returns: an `Optimizer`, or a transform of optax, and the updates that it makes.

Then complex parameters, which a transform sees as two real arrays each. At the end: which parameters decay, and groups
of parameters, by their paths or by nnx filters.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxlit.errors import ArgumentError, ArgumentTypeError, ModuleError, did_you_mean, note_place
from jaxlit.faces import refuse_unknown
from jaxlit.texts import keys_of, leaf_name, listed, shown


@dataclass(frozen=True)
class Optimizer:
    """An optax transform and the variables that it trains, or one transform for each group of them.

    A group is named by an attribute of the module (`"generator"`, `"net/head"`), a pattern of paths
    (`"encoder/*/kernel"`; a `*` matches any text, slashes too), or an nnx filter (`nnx.LoRAParam`; `...` for the
    rest). A parameter belongs to the first group that it fits.

    Args:
        tx: The transform.
        wrt: An nnx filter for the variables to train; the other `nnx.Param`s are frozen.
        by: A transform for each group, in place of `tx`.
        lr_schedule: The schedule inside `tx`, for rows, where it cannot be read off `tx`.

    Raises:
        ArgumentError: An argument is out of its set.
        ArgumentTypeError: There is no such argument, or `tx` is no transform.

    Example:
        >>> import jaxlit as jl, optax
        >>> from flax import nnx
        >>> head_only = jl.Optimizer(optax.adam(1e-3), wrt=nnx.All(nnx.Param, nnx.PathContains("head")))
        >>> both = jl.Optimizer(by={"generator": optax.adam(1e-3), "discriminator": optax.sgd(0.01)})
    """

    tx: optax.GradientTransformation = None  # type: ignore[assignment]  # by= is in its place
    wrt: Any = nnx.Param
    lr_schedule: optax.Schedule | None = None
    by: Mapping[Any, optax.GradientTransformation] | None = field(default=None, kw_only=True)
    groups: Mapping[str, str] = field(default_factory=dict, init=False, repr=False)  # of a parameter's name, if by=
    transforms: Mapping[str, optax.GradientTransformation] = field(default_factory=dict, init=False, repr=False)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse an unknown argument, with what to use in its place."""
        refuse_unknown(cls, args, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Refuse what is no transform, no filter, or no schedule."""
        if self.by is not None and self.tx is not None:
            raise ArgumentError(
                "jl.Optimizer(tx, by=...) takes tx or by=, got both. For the rest, use by={..., ...: tx}."
            )
        if self.by is None:
            object.__setattr__(self, "tx", transform_of("jl.Optimizer(tx)", self.tx))
        else:
            object.__setattr__(self, "by", _transforms(self.by))
        _check_filter("wrt", self.wrt)
        if self.lr_schedule is not None and (self.by is not None or not callable(self.lr_schedule)):
            raise ArgumentError(
                "jl.Optimizer(tx, lr_schedule=...) takes the optax schedule of tx, a function of the step, got "
                f"{shown(self.lr_schedule)}. Leave it out with by=: each group's rate is read off its transform."
            )

    def of(self, module: nnx.Module) -> "Optimizer":
        """Return this optimizer for a module, with the transform that `by` makes of its parameters.

        Raises:
            ArgumentError: A group has no parameter, or a parameter no group.
        """
        if self.by is None:
            return self
        groups = groups_of(module, self.wrt, list(self.by))
        transforms = dict(zip(labels_of(self.by), self.by.values(), strict=True))
        optimizer = self.with_tx(_by_label(transforms, groups, groups), groups)
        object.__setattr__(optimizer, "transforms", transforms)
        return optimizer

    def tx_of(self, names: Collection[str]) -> optax.GradientTransformation:
        """Return the transform for some of the parameters: of the groups, those that they are in."""
        return _by_label(self.transforms, self.groups, names) if self.groups else self.tx

    def with_tx(self, tx: optax.GradientTransformation, groups: Mapping[str, str]) -> "Optimizer":
        """Return this optimizer with another transform, and with the groups that it makes."""
        optimizer = replace(self, tx=tx, by=None)
        object.__setattr__(optimizer, "groups", groups)
        return optimizer


def _by_label(
    transforms: Mapping[str, optax.GradientTransformation], groups: Mapping[str, str], names: Collection[str]
) -> optax.GradientTransformation:
    labels = {groups[name] for name in names}
    used: dict = {label: tx for label, tx in transforms.items() if label in labels}
    return optax.partition(used, lambda params: map_params(lambda path, _: groups[leaf_name(path)], params))


def _check_filter(name: str, value: Any) -> None:
    try:
        nnx.filterlib.to_predicate(value)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"jl.Optimizer({name}=...) takes an nnx filter, got {shown(value)}. Pass, for example, nnx.Param or "
            "nnx.PathContains('head')."
        ) from None


def _transforms(by: Any) -> dict[Any, optax.GradientTransformation]:
    if not isinstance(by, Mapping) or not by:
        raise ArgumentTypeError(
            f"jl.Optimizer(by=...) takes a dict of groups and transforms, got {shown(by)}. Pass, for example, "
            "by={'encoder': optax.adam(1e-4), ...: optax.adam(1e-3)}, where ... is the rest."
        )
    for key in by:
        _check_filter("by", key)
    labels = labels_of(by)
    if twice := [x for x in labels if labels.count(x) > 1]:
        raise ArgumentError(f"jl.Optimizer(by=...) has two groups that are called {twice[0]!r}. Join them by nnx.Any.")
    return {key: transform_of(f"jl.Optimizer(by={{{key!r}: ...}})", tx) for key, tx in by.items()}


def updates_of(
    tx: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, loss: jax.Array, owner: str
) -> tuple[Any, Any]:
    """Return the updates of an optimizer, which `owner` has returned, and its state after them.

    Raises:
        ModuleError: It needs more than these arguments.
    """
    try:
        updates, after = optax.with_extra_args_support(tx).update(grads, opt_state, params, value=loss, grad=grads)
        if jax.tree.map(jnp.shape, jax.tree.leaves(updates)) != jax.tree.map(jnp.shape, jax.tree.leaves(params)):
            # Where all parameters have as many rows, one that sums over rows of a batch sums these
            raise ValueError("it takes a batch dimension away from the shapes of the parameters")
        return updates, after
    except (TypeError, ValueError) as error:
        text, takes_more = str(error).rstrip("."), isinstance(tx, optax.GradientTransformationExtraArgs)
        if takes_more and re.search(r"update\w*\(\) got an unexpected keyword argument '(value|grad)'", text):
            tx = optax.GradientTransformation(*tx)  # contrib.sam, alone or in a chain, takes neither
            return updates_of(tx, grads, opt_state, params, loss, owner)
        if not re.search("required keyword-only argument|must be provided|batch dim", text):
            note_place(error, f"the optimizer of {owner}")
            raise
        raise ModuleError(
            f"{owner}: the optimizer's update takes more than (grads, state, params, value=loss, grad=grads): {text}. "
            "One that evaluates the loss itself, optax.lbfgs, contrib.sophia or contrib.sam(opaque_mode=True), or that "
            "takes the gradient of each row, contrib.dpsgd, needs a loop of your own with jax.jit and jl.sharding."
        ) from error


def transform_of(owner: str, tx: Any) -> optax.GradientTransformation:
    """Return a transform of optax that `owner`, a call with its argument, was given.

    Raises:
        ArgumentTypeError: It is none.
    """
    if isinstance(tx, optax.MultiSteps):  # a transform in all but its type
        tx = tx.gradient_transformation()
    if isinstance(tx, optax.GradientTransformation):
        return tx
    raise ArgumentTypeError(
        f"{owner} takes an optax.GradientTransformation, got {shown(tx, 100)}. Pass what a function of optax returns: "
        "optax.adamw(1e-3)."
    )


class RealParts(NamedTuple):
    """A complex parameter as its optimizer sees it."""

    real: Any
    imag: Any


def on_real_parts(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a transform of complex parameters that updates the two parts of each as real arrays."""
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return inner.init(_real_parts(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = inner.update(_real_parts(updates), state, _real_parts(params), **_real_parts(extra))
        return map_params(lambda _, x: jax.lax.complex(*x) if isinstance(x, RealParts) else x, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def _real_parts(tree: Any) -> Any:
    return jax.tree.map(lambda x: RealParts(x.real, x.imag) if jnp.iscomplexobj(x) else x, tree)


def averages_of(opt_state: Any) -> list[tuple[Any, Any]]:
    """Return (b1, z) of each schedule-free optimizer in a state, for `averaged`."""
    free = optax.contrib.ScheduleFreeState
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, free))
    return [(x.b1, x.z) for x in nodes if isinstance(x, free)]


def averaged(params: Any, averages: Sequence[tuple[Any, Any]]) -> Any:
    """Return what evaluations see as the parameters, as `optax.contrib.schedule_free_eval_params` does."""
    leaves = [(b1, jax.tree.leaves_with_path(z, is_leaf=lambda x: isinstance(x, RealParts))) for b1, z in averages]
    of = {leaf_name(path): (b1, z) for b1, named in leaves for path, z in named}

    def average(path: Any, y: jax.Array) -> jax.Array:
        b1, z = of.get(leaf_name(path), (1.0, 0.0))
        z = jax.lax.complex(*z) if isinstance(z, RealParts) else z
        # As they are where nothing was trained.
        return jnp.where(y == z, y, ((y - (1.0 - b1) * z) / b1).astype(y.dtype))

    return jax.tree.map_with_path(average, params) if averages else params


def map_params(fn: Callable[[Any, Any], Any], params: Any) -> Any:
    """Return a tree of `fn(path, x)` for each parameter x, of which one may be `RealParts`."""
    return jax.tree.map_with_path(fn, params, is_leaf=lambda x: isinstance(x, RealParts))


_STACKED: ContextVar[dict[str, int]] = ContextVar("jaxlit_stacked")


def with_stacked(tx: optax.GradientTransformation, stacked: dict[str, int]) -> optax.GradientTransformation:
    """Return a transform whose `decay_mask` reads how many dims of a parameter are of stacked layers, or notes 0."""
    tx = optax.with_extra_args_support(tx)

    def run(fn: Callable, *args: Any, **extra: Any) -> Any:
        context = copy_context()
        context.run(_STACKED.set, stacked)
        return context.run(fn, *args, **extra)

    # Whatever looks at the first state shares one trace, until other dims are known.
    traced = jax.jit(lambda _, params: run(tx.init, params), static_argnums=0, inline=True)
    init = lambda params: traced(tuple(x for x in stacked.items() if x[1]), params)  # noqa: E731
    return optax.GradientTransformationExtraArgs(init, partial(run, tx.update))


_NEVER = ("bias", "scale")  # as flax calls what shifts and what normalizes; a bias of attention is a matrix
_VALUE = ("value", "raw_value")  # of a Variable


def decay_mask(params: Any) -> Any:
    """Return which parameters a weight decay should change: matrices and larger, but no biases, norms and embeddings.

    It is a `mask=` of optax, for every optimizer that decays weights. What is left out has fewer than two dims, is
    called `bias` or `scale`, or has `embed` in its name or `emb` at its end, as `nnx.Embed`'s `embedding` and a
    `pos_emb`. In a training, the dim of stacked layers that the step scans over does not count.

    Args:
        params: The parameters, a pytree of arrays or of nnx Variables.

    Returns:
        A pytree like them, of bools; one for the two parts of a complex parameter.

    Example:
        >>> import jaxlit as jl, optax
        >>> tx = optax.adamw(1e-3, weight_decay=0.1, mask=jl.decay_mask)
    """
    stacked = _STACKED.get({})
    return map_params(lambda path, x: _may_decay(path, x, stacked.setdefault(leaf_name(path), 0)), params)


def _may_decay(path: tuple, x: Any, stacked: int) -> bool:
    names = [key for key in map(str, keys_of(path)) if not key.isdigit()]  # of a list of arrays, the list's name
    names = names[:-1] if len(names) > 1 and names[-1] in _VALUE else names
    name = names[-1].lower() if names else ""
    is_weight = name not in _NEVER and "embed" not in name and not name.endswith("emb")
    return is_weight and jnp.ndim(jax.tree.leaves(x)[0]) - stacked > 1


def labels_of(keys: Iterable[Any], kind: str = "group") -> list[str]:
    """Return what each group is called, in rows and in the optimizer's state.

    A checkpoint holds the labels, so they must be those of the next process. What python prints with an address is
    called by its number: `group1`, `group2`.
    """
    return [_label(key, f"{kind}{place}") for place, key in enumerate(keys, 1)]


def _label(key: Any, by_place: str) -> str:
    if isinstance(key, nnx.PathContains):
        return _label(key.key, by_place)
    if isinstance(key, type):
        return key.__name__
    if isinstance(key, str) or key is ...:
        return "rest" if key is ... else key
    text = getattr(key, "__qualname__", "").replace("<locals>.", "") or " ".join(str(key).split())
    return by_place if "<lambda>" in text or re.search(r" at 0x[0-9a-fA-F]", text) else text


def names_in(module: nnx.Module, wrt: Any, key: Any) -> list[str]:
    """Return the names of the trained parameters in a group: a path, a pattern of paths, or an nnx filter."""
    fits = _fits(key)
    return [leaf_name(path) for path, x in nnx.to_flat_state(nnx.state(module, wrt, graph=True)) if fits(path, x)]


def fits_none(module: nnx.Module, wrt: Any, key: Any) -> str:
    """Return the error text of a group without a parameter, see `names_in`: that it has none, and which there are."""
    paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, wrt, graph=True))]
    inner = sorted({path[:i] for path in paths for i, letter in enumerate(path) if letter == "/"})
    hint = did_you_mean(key, [*inner, *paths]) if isinstance(key, str) else ""
    return f"fits no trained parameter of {type(module).__name__}.{hint} There are {listed(inner or paths)}"


def groups_of(module: nnx.Module, wrt: Any, keys: Sequence[Any]) -> dict[str, str]:
    """Return the group of each trained parameter, by its name: the first that it fits.

    Raises:
        ArgumentError: A group has no parameter, or a parameter no group.
    """
    ungrouped, group_of = names_in(module, wrt, ...), {}
    for key, label in zip(keys, labels_of(keys), strict=True):
        names = names_in(module, wrt, key)
        first = [name for name in names if name in ungrouped]
        if not first:
            why = "has nothing left: put it before those that fit it" if names else fits_none(module, wrt, key)
            raise ArgumentError(f"jl.Optimizer(by=...): {shown(key)} {why}.")
        group_of |= dict.fromkeys(first, label)  # in the order of the groups, in which a row has their rates
        ungrouped = [name for name in ungrouped if name not in group_of]
    if ungrouped:
        raise ArgumentError(
            f"jl.Optimizer(by=...) has no group for {listed(ungrouped)}. Add one, `...: optax.adam(1e-3)` for all "
            "that is left, or leave them out of wrt=."
        )
    return group_of


def _fits(key: Any) -> Any:
    """Return a function of a Variable's (path, Variable) to whether it is in a group."""
    if not isinstance(key, str):
        return nnx.filterlib.to_predicate(key)

    def fits(path: tuple, x: Any) -> bool:
        begins = [path[: n + 1] for n in range(len(path))]
        return any(fnmatchcase("/".join(map(str, part)), key) or leaf_name(part) == key for part in begins)

    return fits
