"""The command line of a training script, built from the signatures of its classes: `jl.cli.main(Model, Data)`."""

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax

from jaxlit import callbacks, strategies
from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.files import FOLDER
from jaxlit.core.module import TrainModule
from jaxlit.data.loaders import DataModule
from jaxlit.engine.creation import lazy
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError
from jaxlit.faces import refuse_unknown
from jaxlit.reporting.secrets import PLACEHOLDER, redacted
from jaxlit.reporting.terminal import say
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.registry import StrategyName, class_of, resolve_strategy, strategy_names
from jaxlit.trainer.trainer import Trainer

__all__ = ["main"]

_VERBS = {
    "fit": "train a model",
    "validate": "run its validation step",
    "follow": "run its validation step on each new checkpoint of a run that trains elsewhere",
    "test": "run its test step",
    "predict": "run its predict step, for a callback such as PredictionWriter",
    "plan": "show the memory and the time of a training step",
}
_CLASSES = ("model", "data", "trainer")
# Arguments of the Trainer's methods that the classes provide, or that only a program can use.
_NOT_ASKED = {"train_dataloaders", "val_dataloaders", "dataloaders", "datamodule", "return_predictions"}


def __dir__() -> list[str]:
    return __all__


def main(
    model: type[TrainModule],
    data: type[DataModule] | None = None,
    *,
    trainer_defaults: Mapping[str, Any] | None = None,
    args: Sequence[str] | None = None,
) -> Trainer:
    """Run a command line such as `python train.py fit --config run.yaml --trainer.strategy fsdp --model.width 512`.

    The arguments of the constructors become options, with their types, defaults and documentation. The model is built
    by `jl.lazy`, directly into its shards. `fit` writes `config.yaml` to the folder of the run.

    Args:
        model: The class of the module; its `rngs` are seeded by `--trainer.seed`.
        data: The class of the DataModule; None if the module has loader hooks.
        trainer_defaults: Defaults of Trainer arguments that replace those of the Trainer. Objects are given as in a
            file, by `class_path` and `init_args`.
        args: The arguments of the command line; None for those of this process.

    Returns:
        The Trainer, after the run.

    Raises:
        ArgumentError: `model` or `data` is not such a class, or jsonargparse is not installed.
        SystemExit: With code 2 if the command line is wrong.
    """
    for name, cls, base in (("model", model, TrainModule), ("data", data, DataModule)):
        fits = (isinstance(cls, type) and issubclass(cls, base)) or (name == "data" and cls is None)
        check.require(fits, name, cls, f"takes a subclass of jl.{base.__name__}", owner="jl.cli.main")
    args, defaults = sys.argv[1:] if args is None else [*args], trainer_defaults or {}
    refuse_unknown(Trainer, (), defaults)
    parser, parsers = _parsers(model, data, defaults, args)
    parsed = parser.parse_args(args)
    verb, parsed = parsed.verb, parsed[parsed.verb]
    parser, config = parsers[verb], _written(parsers[verb], parsed.clone(), model, data)
    try:
        options = _as_dict(parser.instantiate(parsed))
    except ValueError as error:  # raised by the constructor of a callback, for example
        return parser.error(str(error))
    of = {name: _as_dict(options.pop(name, {})) for name in _CLASSES}
    added = of["trainer"].pop("callbacks") or []
    added = added if isinstance(added, list) else [added]
    *_, file = options.pop("config", None) or [None]
    if verb != "fit" and of["trainer"]["default_root_dir"] is None and file and (Path(file).parent / FOLDER).is_dir():
        of["trainer"]["default_root_dir"] = Path(file).parent  # the folder of the fit that wrote the file
    trainer = None
    try:
        trainer = Trainer(**of["trainer"], callbacks=[*added, _SaveConfig(config)])
        module = lazy(model, **of["model"])
        options["data" if verb == "plan" else "datamodule"] = None if data is None else data(**of["data"])
        options |= {"return_predictions": False} if verb == "predict" else {}
        result = getattr(trainer, verb)(model=module, **options)
        if verb == "plan" and trainer.is_global_zero:
            say(str(result))
    except (ArgumentError, ArgumentTypeError, CheckpointError) as error:
        # An error after the module exists is an error of the run; other processes of a job must also receive it.
        if trainer is not None and (trainer.module is not None or jax.process_count() > 1):
            raise
        return parser.error(" ".join([str(error), *getattr(error, "__notes__", [])]))
    return trainer


def _as_dict(namespace: Any) -> dict[str, Any]:
    return dict(namespace.items(branches=True, nested=False)) if namespace else {}


def _parsers(
    model: type, data: type | None, defaults: Mapping[str, Any], args: list[str]
) -> tuple[Any, dict[str, Any]]:
    """Return the parser of the command line, and the parser of each command."""
    new_parser, parsers = _parser_class(), dict[str, Any]()
    has_arguments = any(arg.startswith("--trainer.strategy.") for arg in args)
    name, strategy = (partial(_strategy, has_arguments=x) for x in (False, has_arguments))
    importlib.import_module("jsonargparse.typing").register_type(_Name, name, strategy, fail_already_registered=False)
    parser = new_parser(description=sys.modules[model.__module__].__doc__, allow_abbrev=False)
    commands = parser.add_subcommands(dest="verb")
    for verb, text in _VERBS.items():
        parsers[verb] = each = new_parser(description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        each.add_argument("--config", action="config", help="A YAML file of these arguments.")
        for name, cls in zip(_CLASSES, (model, data, _Arguments), strict=True):
            if cls is not None:
                each.add_class_arguments(cls, name, skip={"rngs"}, fail_untyped=False, instantiate=False)
        each.add_method_arguments(Trainer, verb, skip={"model"} | ({"data"} if verb == "plan" else _NOT_ASKED))
        each.set_defaults({f"trainer.{name}": value for name, value in defaults.items()})
        commands.add_subcommand(verb, each, help=text)
    return parser, parsers


def _written(parser: Any, parsed: Any, model: type, data: type | None) -> str:
    """Return arguments as YAML, without defaults that would be read as a str: functions and dtypes."""
    for name, cls in (("model", model), ("data", data or object)):
        for key, x in inspect.signature(cls.__init__).parameters.items():
            if (path := f"{name}.{key}") not in parsed:
                continue
            if x.default is x.annotation is x.empty and parsed[path] is None:  # without a type it is not required
                parser.error(f"the following arguments are required: {path}")
            is_object = callable(x.default) or hasattr(x.default, "itemsize")
            if is_object and str(parsed[path]) in map(str, (x.default, parser.get_default(path))):
                parsed.pop(path)
    return parser.dump(parsed, skip_unset=False)


class _Name(str):
    """The name of a strategy."""


class _Arguments(Trainer):
    __doc__ = Trainer.__doc__  # of the help

    def __init__(self, *, strategy: _Name | StrategyName | Strategy = "auto", **arguments: Any) -> None:
        super().__init__(**arguments)


def _strategy(value: Any, *, has_arguments: bool) -> Any:
    """Return a strategy's name, or the class that it names if arguments are given as well; refuse another value."""
    spec = value if isinstance(value, dict) else {"class_path": value}
    if (name := spec.get("class_path")) in strategy_names():
        if value is name and not has_arguments:
            return name
        (cls, more), new = class_of(name), importlib.import_module("jsonargparse").Namespace
        init_args = new({**more, **spec.get("init_args", {})})
        return new(class_path=f"{cls.__module__}.{cls.__qualname__}", init_args=init_args)
    if not isinstance(value, str):
        raise ValueError("Expected a name")
    return resolve_strategy(value, None) and value


class _SaveConfig(Callback):
    """Writes the arguments of the classes to the folder of a fit; a file of an earlier start is renamed."""

    in_fast_dev_run = False

    def __init__(self, config: str) -> None:
        self._config = config

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if not trainer.is_global_zero:
            return
        yaml = importlib.import_module("yaml")  # comes with jsonargparse
        # Without the arguments of `fit` itself, so that the other commands accept the file.
        sections = {name: x for name, x in yaml.safe_load(self._config).items() if name in _CLASSES}
        text, path = yaml.safe_dump(_shown(redacted(sections)), sort_keys=False), trainer.run_dir / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text() != text:
            numbered = (path.with_stem(f"{path.stem}_{i}") for i in count())
            path.rename(next(other for other in numbered if not other.exists()))
        (part := path.with_suffix(".tmp")).write_text(text)
        part.replace(path)


def _shown(x: Any) -> Any:
    """Return values without redacted entries: a command that reads the file would take the placeholder as a value."""
    if isinstance(x, list):
        return [_shown(y) for y in x]
    if isinstance(x, dict):
        return {name: _shown(y) for name, y in x.items() if not (isinstance(y, str) and PLACEHOLDER in y)}
    return x


def _parser_class() -> Any:
    """Return a parser class of jsonargparse whose errors are one line."""
    install = '"jsonargparse[signatures]"'
    package = check.import_package("jsonargparse", owner="jl.cli.main", install=install, kind=ArgumentError)
    for room in (callbacks, strategies):
        for name in room.__all__:
            getattr(room, name)  # a class can be named once it is imported

    class Parser(package.ArgumentParser):  # type: ignore[misc, name-defined]
        def parse_string(self, content: str, path: Any = "", *args: Any, **kwargs: Any) -> Any:
            parsed = super().parse_string(content, path, *args, **kwargs)
            for name in _CLASSES:
                if name in parsed and not hasattr(parsed[name], "items"):
                    text = "takes arguments by name, such as `trainer: {max_epochs: 3}`"
                    self.error(f"{path}: {name} {text}, got {parsed[name]!r}")
            return parsed

        def error(self, message: str, ex: Exception | None = None) -> Any:
            if not self.exit_on_error:  # the parser of a class, whose error becomes part of another message
                return super().error(message, ex)
            self.exit(2, f"{self.prog.replace(' [options]', '')}: error: {' '.join(message.split())}\n")

    return Parser
