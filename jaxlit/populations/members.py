"""The members of a population: each variation's module, split into its arrays and functions.

First the arguments of `jl.fit_many` are checked, and `build` yields the members. Then `Kind` compares the programs of
members, and `check_distinct` their trainings. Last, `content_text` describes an argument in every process alike.
"""

import hashlib
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlit import checks as check
from jaxlit.callbacks.early_stopping import EarlyStopping
from jaxlit.core.module import STAGES, TrainModule, is_overridden
from jaxlit.core.optimizer import updates_of
from jaxlit.core.parts import optimizer_of
from jaxlit.core.pure_module import PureModule
from jaxlit.core.train_state import PRECISIONS, Layout, Precision, StepOptions
from jaxlit.engine.training import Training, training_of
from jaxlit.errors import ArgumentError, ArgumentTypeError, ModuleError, did_you_mean
from jaxlit.loop.hooks import OF_CALLBACK
from jaxlit.programs.jaxpr import numbers_of
from jaxlit.programs.lifting import is_same
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.single import SingleDevice
from jaxlit.texts import array_text, is_key, shown, stable_text
from jaxlit.variables import is_constant, merge, split

OWNER = "jl.fit_many"


@dataclass(frozen=True)
class Options:
    """How a population trains; the attributes are the arguments of `jl.fit_many`, see there.

    Raises:
        ArgumentTypeError: One is of another type.
    """

    max_epochs: int
    early_stopping: EarlyStopping | None = None
    log: Callable[[int, int, dict[str, float]], object] | None = None
    log_every_n_steps: int = 50
    limit_train_batches: int | None = None
    default_root_dir: str | Path | None = None
    every_n_train_steps: int | None = None
    resume: str | None = None
    devices: int | str = "auto"
    precision: str = "32-true"

    def __post_init__(self) -> None:
        for name in ("max_epochs", "log_every_n_steps"):
            check.integer(name, getattr(self, name), low=1, owner=OWNER)
        for name in ("limit_train_batches", "every_n_train_steps"):
            check.integer(name, getattr(self, name), low=1, also=(None,), owner=OWNER)
        check.integer("devices", self.devices, low=1, also=("auto",), owner=OWNER)
        check.one_of("precision", self.precision, [x for x in PRECISIONS if x != "16-mixed"], owner=OWNER)
        check.require(self.resume in (None, "auto"), "resume", self.resume, "takes None or 'auto'", owner=OWNER)
        _require_type("early_stopping", self.early_stopping, EarlyStopping, "takes a jl.callbacks.EarlyStopping")
        for name in ("check", *OF_CALLBACK):
            if self.early_stopping and getattr(type(self.early_stopping), name) is not getattr(EarlyStopping, name):
                raise ArgumentError(
                    f"{OWNER}(early_stopping=...) calls no hooks and no check, which take a Trainer, and "
                    f"{type(self.early_stopping).__name__} has its own {name}. Override judge instead."
                )
        _require_type("log", self.log, Callable, "takes a function of (member, step, metrics)")
        for name in ("resume", "every_n_train_steps"):
            if self.default_root_dir is None and getattr(self, name) is not None:
                raise ArgumentError(f"{OWNER}({name}=...) needs default_root_dir, the folder of the checkpoints.")
        check.on_disk("default_root_dir", self.default_root_dir, owner=OWNER)
        if (count := jax.process_count()) > 1:
            raise ArgumentError(f"{OWNER} trains in one process, and there are {count}. Call it in one of its own.")


def _require_type(name: str, value: Any, cls: Any, rule: str) -> None:
    check.require(isinstance(value, cls | None), name, value, rule, owner=OWNER, kind=ArgumentTypeError)


@dataclass(frozen=True, eq=False)
class Member:
    """One training of a population."""

    index: int  # the position of its variation
    variation: Mapping[str, Any]  # the arguments of its module
    contents: Mapping[str, str]  # the texts of these before the module was built: see `content_text`
    training: Training  # how its module is trained alone, on one device; it holds no array
    like: int  # the index of the first member with the same programs

    @property
    def name(self) -> str:
        """The name of the member in messages."""
        return name_of(self.index, self.variation)

    @property
    def pure(self) -> PureModule:
        """The steps of its module as pure functions."""
        return self.training.pure

    @property
    def strategy(self) -> Strategy:
        """The strategy of one member alone."""
        return self.training.spec.strategy


class _OneMember(SingleDevice):
    """The strategy of one member: one device and no mesh. The program of all members has the mesh."""

    def in_mesh(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn


def name_of(index: int, variation: Mapping[str, Any]) -> str:
    """Return the name of a member in messages: `member 1 (seed=0, lr=0.1)`."""
    return f"member {index} ({', '.join(f'{key}={argument_text(value, 40)}' for key, value in variation.items())})"


def check_variations(make_module: Any, variations: Any) -> list[dict[str, Any]]:
    """Return the arguments of `make_module` for each member; refuse variations that it does not take."""
    if not callable(make_module) or isinstance(make_module, nnx.Module):
        raise ArgumentTypeError(
            f"{OWNER}(make_module, ...) takes a subclass of jl.TrainModule or a function that returns a module, got "
            f"{shown(make_module)}. Each member has a module of its own."
        )
    if not isinstance(variations, Sequence) or not all(isinstance(x, Mapping) for x in variations):
        raise ArgumentTypeError(
            f"{OWNER}(variations=...) takes a list of dicts, the arguments of make_module by name, got "
            f"{shown(variations)}. For seeds alone: [{{'seed': i}} for i in range(8)]."
        )
    if not variations:
        raise ArgumentError(f"{OWNER}(variations=...) takes at least one dict, got none.")
    parameters = _parameters(make_module)
    known = [*parameters.names, *(["seed"] if "rngs" in parameters.names else [])]
    for i, variation in enumerate(variations):
        if unknown := [name for name in variation if name not in known and not parameters.takes_more]:
            raise ArgumentError(
                f"{OWNER}: {name_of(i, variation)} has {unknown[0]!r}, which {_name(make_module)} does not take."
                f"{did_you_mean(unknown[0], known)} It takes {', '.join(known) or 'nothing'}."
            )
    return [_arguments(parameters.names, name_of(i, variation), variation) for i, variation in enumerate(variations)]


class _Parameters(NamedTuple):
    """The names of the arguments of a function or class, and whether it takes others too."""

    names: list[str]
    takes_more: bool


def _parameters(make_module: Callable[..., Any]) -> _Parameters:
    if isinstance(make_module, partial):
        names, takes_more = _parameters(make_module.func)
        # A variation may replace an argument of a partial, but a seed must not replace its rngs.
        names = [x for x in names[len(make_module.args) :] if x != "rngs" or x not in make_module.keywords]
        return _Parameters(names, takes_more)
    is_class = isinstance(make_module, type)
    # A class that hands on **kwargs takes what its base takes.
    makers = [x.__init__ for x in make_module.__mro__ if "__init__" in vars(x)] if is_class else [make_module]
    names = list[str]()
    for make in makers:
        parameters = [*inspect.signature(make).parameters.values()][is_class:]
        names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return _Parameters(names, takes_more=False)
    return _Parameters(names, takes_more=True)


def _arguments(parameters: Sequence[str], member: str, variation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `make_module`: a seed makes the `rngs` of a module that takes them."""
    arguments = dict(variation)
    if "rngs" in parameters and "rngs" not in arguments:
        seed = arguments.get("seed", 0)
        try:
            arguments["rngs"] = nnx.Rngs(seed if is_key(seed) else operator.index(seed))  # flax takes no int of numpy
        except TypeError:
            raise ArgumentTypeError(f"{OWNER}: {member} takes an int as seed, got {shown(seed)}.") from None
        if "seed" not in parameters:
            arguments.pop("seed", None)
    return arguments


def _name(make_module: Any) -> str:
    make_module = getattr(make_module, "func", make_module)
    return getattr(make_module, "__qualname__", type(make_module).__name__)


class Built(NamedTuple):
    """A member, and the arrays of its module."""

    member: Member
    layout: Layout  # how the arrays become the module's trained, frozen and other variables
    arrays: list[np.ndarray]  # on the host; random keys as raw data


def build(
    make_module: Callable[..., Any],
    variations: Sequence[Mapping[str, Any]],
    precision: Precision,
    example: Any,
    log_every: int,
) -> Iterator[Built]:
    """Yield the members; each module is built when the iterator reaches it."""
    strategy = _OneMember()
    strategy.setup(1)
    for i, arguments in enumerate(check_variations(make_module, variations)):
        contents = {name: content_text(x) for name, x in variations[i].items()}
        module = make_module(**arguments)
        check_module(module, _name(make_module))
        optimizer = optimizer_of(module)
        graphdef, state = split(module)
        # Without arrays: otherwise those of all modules would stay in memory next to the training state.
        origin = merge(graphdef, jax.tree.map(abstract, state))
        pure = PureModule(nnx.graphdef(module, graph=True), optimizer.wrt, origin, precision)
        variables = pure.split(module)
        layout = Layout(variables)
        training = training_of(origin, pure, strategy, StepOptions(optimizer, log_every=log_every, example=example))
        # Copies: an attribute may be an array of numpy that make_module fills again for the next member.
        arrays = list(map(np.array, jax.device_get(layout.flatten(variables))))
        yield Built(Member(i, dict(variations[i]), contents, training, i), layout, arrays)


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def check_module(module: Any, made_by: str) -> None:
    """Refuse what a population cannot train: no module, or one with hooks, which see one training."""
    if not isinstance(module, TrainModule):
        raise ModuleError(f"{OWNER}: {made_by} must return a jl.TrainModule, got {shown(module)}.")
    if not is_overridden(module, "training_step"):
        raise ModuleError(f"{type(module).__name__} has no training_step. Define training_step(self, batch).")
    hooks = [*OF_CALLBACK, "configure_callbacks", "on_before_batch_transfer"]
    if has := [name for name in hooks if callable(getattr(type(module), name, None))]:
        raise ModuleError(
            f"{OWNER} calls no hooks, which see one training, and {type(module).__name__} has {has[0]}. Leave it out, "
            "or train each module with a Trainer. Rows of all members reach jl.fit_many(log=...)."
        )


def check_same_state(first: Member, member: Member) -> None:
    """Refuse a member whose arrays are not those of the first one."""
    spec, other = first.training.spec, member.training.spec
    arrays, other_arrays = ({name: f"{dtype}{list(shape)}" for name, shape, dtype in x.entries} for x in (spec, other))
    for name in arrays | other_arrays:
        a, b = arrays.get(name, "nothing"), other_arrays.get(name, "nothing")
        if a != b and name != "sums":  # of metrics, which are compared by their names
            raise ArgumentError(
                f"{OWNER}: all members must have the same arrays, and {name} is {a} in {first.name} and {b} in "
                f"{member.name}. Leave out what changes shapes, layers or the kind of optimizer, and call jl.fit_many "
                "once for each."
            )
    structures = {jax.tree.structure(x.tree, is_leaf=is_constant) for x in (spec, other)}  # numbers may differ
    if spec.optimizer_kind != other.optimizer_kind or len(structures) > 1:
        raise ArgumentError(
            f"{OWNER}: all members must have the same kind of optimizer, and it is {spec.optimizer_kind} in "
            f"{first.name} and {other.optimizer_kind} in {member.name}. Call jl.fit_many once for each."
        )


class Kind(NamedTuple):
    """The traces from which the programs of a member follow, and the state of their numbers at that time."""

    programs: Sequence[Any]
    # Checksums: a trace refers to the NumPy arrays that it has read, and make_module may fill them again.
    numbers: Sequence[str]
    logged: Mapping[str, Sequence[Any]]  # the metrics of each step, and the names of the rates
    schedule: Any

    def is_same(self, other: "Kind") -> bool:
        """Return whether members of the two kinds have the same programs."""
        alike = self.logged == other.logged and self.schedule is other.schedule and self.numbers == other.numbers
        return alike and all(map(is_same, self.programs, other.programs))


def trace_of(training: Training, stage: str, loader: int | None, batch: Any) -> Any:
    """Trace a step of a member alone, and its gradient in training, for the shapes and dtypes of a batch.

    `loader` is the loader's index, None for a step that does not take it.
    """
    variables, number = jax.tree.map(abstract, training.spec.tree.variables), jax.ShapeDtypeStruct((), jnp.int32)
    # A new function each time: jax would return the earlier trace of the same one.
    run = partial(training.pure.run, stage, training.spec.strategy.replica, loader)
    if stage == "training":  # a number may be in a rule of jax.custom_vjp only, which the step alone does not run
        run = jax.value_and_grad(run, has_aux=True)
    return jax.make_jaxpr(run)(*variables, batch, number, number, number)


def kind_of(training: Training, examples: Mapping[tuple[str, int | None], Any]) -> Kind:
    """Trace each step and the optimizer of a member, which costs about half of tracing its programs.

    `examples` has the shapes and dtypes of a batch, by the stage and the loader of its step.
    """
    pure, tx = training.pure, training.options.optimizer.tx
    params = jax.tree.map(abstract, training.spec.tree.variables[0])

    def first_step(grads: Any, params: Any, loss: Any) -> Any:
        opt_state = tx.init(params)
        return opt_state, updates_of(tx, grads, opt_state, params, loss, f"{pure.name}.configure_optimizers")

    programs = [jax.make_jaxpr(first_step)(params, params, jnp.zeros(()))]
    logged: dict[str, Sequence[Any]] = {"the optimizer": training.rates.names}
    for (stage, loader), batch in examples.items():
        programs.append(trace_of(training, stage, loader, batch))
        logged[STAGES[stage].step] = pure.table(stage, loader).metrics
    numbers = [array_text(x if is_key(x) else np.asarray(x)) for program in programs for x in numbers_of(program)]
    return Kind(programs, numbers, logged, training.options.optimizer.lr_schedule)


def check_same_logs(first: str, a: Kind, name: str, b: Kind) -> None:
    """Refuse a member of kind `b` that logs other values than the first one, of kind `a`, or in another way."""
    for step, values in a.logged.items():
        for x, y in itertools.zip_longest(values, b.logged[step]):
            if x != y:
                raise ArgumentError(
                    f"{OWNER}: all members must log the same, and {step} logs {x} in {first}, and {y} in {name}. "
                    "Log the same names in the same way, or call jl.fit_many once for each kind of members."
                )


def check_distinct(
    members: Sequence[Member], arrays: Sequence[Sequence[np.ndarray]], numbers: Sequence[np.ndarray]
) -> None:
    """Refuse two members of different variations that would be the same training.

    Given are the arrays of each member's module, and the numbers in which the programs differ, (members, ...) each.
    """
    seen = dict[str, int]()
    for i, member in enumerate(members):
        digest = hashlib.sha256()
        for x in (*arrays[i], *(column[i] for column in numbers)):
            digest.update(np.ascontiguousarray(x).tobytes())
        first = seen.setdefault(digest.hexdigest(), i)
        if members[first].contents != member.contents:
            raise ArgumentError(
                f"{OWNER}: {members[first].name} and {member.name} begin with the same weights, and their steps are "
                "the same for the first batch: what they differ in reaches neither. Read it in a step or in "
                "configure_optimizers, or leave it out."
            )


_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def argument_text(value: Any, most: int) -> str:
    """Return how an argument is shown: as `shown` does, but an array of one number as that number."""
    return str(value) if _is_number(value) else shown(value, most)


def content_text(value: Any) -> str:
    """Return the text of a number or a string; for other values a text with a checksum of all that they hold.

    Arrays count by their data, functions by their code, defaults and closures, and other objects by what pickle would
    store; classes and modules by their names.
    """
    plain = value.item() if _is_number(value) else value
    return repr(plain) if isinstance(plain, _PLAIN) else f"{stable_text(value)} with checksum {_checksum(value, {})}"


def _is_number(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) and not x.shape and not (is_key(x) or x.dtype == object)


def _checksum(x: Any, known: dict[int, tuple[Any, str]]) -> str:
    """Return the checksum of a value; `known` has those met before, by their ids, as values may hold each other."""
    if isinstance(x, _PLAIN):
        return repr(x)
    if id(x) not in known:
        known[id(x)] = x, "itself"
        parts = _parts(x)
        texts = [parts] if isinstance(parts, str) else [_checksum(part, known) for part in parts]
        text = "\n".join([type(x).__qualname__, *texts])
        known[id(x)] = x, hashlib.sha256(text.encode()).hexdigest()[:16]
    return known[id(x)][1]


def _parts(x: Any) -> list[Any] | str:
    """Return the values that a value consists of, or its text."""
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return x.tolist() if x.dtype == object else array_text(x)
    if isinstance(x, dict):
        return [part for item in x.items() for part in item]
    if isinstance(x, (list, tuple)):
        return [*x]
    if isinstance(x, (set, frozenset)):
        return stable_text(str(sorted(map(repr, x))))
    if isinstance(x, partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, CodeType):
        return [x.co_code, x.co_names, x.co_consts]
    if isinstance(x, FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or () if cell != CellType()]  # an empty one would raise
        return [x.__code__, x.__defaults__, x.__kwdefaults__, cells]
    if isinstance(x, MethodType):
        return [x.__func__, x.__self__]
    if hasattr(x, "__wrapped__") and not isinstance(x, type):
        return [x.__wrapped__]
    if not isinstance(x, (type, ModuleType)):
        try:
            reduced = x.__reduce_ex__(2)
        except Exception:  # of another library, which cannot be pickled
            reduced = ""
        if isinstance(reduced, tuple):
            return [[*part] if isinstance(part, Iterator) else part for part in reduced[1:]]
    return stable_text(repr(x))
