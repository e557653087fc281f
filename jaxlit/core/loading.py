"""A module that is built from a checkpoint: with the hyperparameters that it was built with, and its weights."""

import contextlib
import inspect
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxlit.checkpoints.files import Checkpoint, locate
from jaxlit.checkpoints.hparam_values import DEFAULT, NotKeptError, decode
from jaxlit.checkpoints.remote import local
from jaxlit.checkpoints.weights import load_variables
from jaxlit.errors import ArgumentTypeError, CheckpointError
from jaxlit.porting import advice
from jaxlit.reporting.terminal import say, short_path

_logger = logging.getLogger("jaxlit")


def tell_taken(what: str, checkpoint: Checkpoint, skipped: Iterable[str]) -> None:
    """Say which checkpoint is taken, and why newer ones are not."""
    for reason in skipped:
        _logger.warning("A newer checkpoint was skipped. %s", reason)
    if jax.process_index() == 0:
        state = checkpoint.state
        say(f"{what}: {short_path(checkpoint.path)} (step {state['global_step']}, epoch {state['epoch']})")


def load_module(cls: type[Any], path: Any, overrides: dict[str, Any], *, strict: bool = True) -> Any:
    """Build a module from a checkpoint; see `TrainModule.load_from_checkpoint`."""
    parameters, texts = inspect.signature(cls.__init__).parameters, advice("load_from_checkpoint()")
    if foreign := next((name for name in overrides if name in texts and name not in parameters), None):
        raise ArgumentTypeError(f"{cls.__name__}.load_from_checkpoint has no argument {foreign!r}. {texts[foreign]}")
    checkpoint, skipped = locate(path := local(path), f"{cls.__name__}.load_from_checkpoint")
    if Path(path).absolute() != checkpoint.path:
        tell_taken("load_from_checkpoint", checkpoint, skipped)
    recorded = checkpoint.state["module"]["hparams"]
    arguments, missing = dict(overrides), dict[str, str]()
    for name, value in recorded.items():
        if value != DEFAULT and name not in overrides:
            try:
                arguments[name] = decode(value, cls)
            except NotKeptError as error:
                missing[name] = str(error)
    if missing:
        given = ", ".join(f"{name}={text}" for name, text in missing.items())
        raise CheckpointError(
            f"{cls.__name__} was built with {given}: pass {'=..., '.join(missing)}=... to load_from_checkpoint. "
            f"{checkpoint.path} keeps values, and functions and classes that can be found by name."
        )
    if "rngs" in parameters and "rngs" not in arguments:
        arguments["rngs"] = nnx.Rngs(0)  # what it draws is overwritten
    args: list[Any] = []
    several = next((name for name, p in parameters.items() if p.kind is p.VAR_POSITIONAL), None)
    if several in arguments and (rest := arguments.pop(several)):  # with all before it given by position as well
        before = list(parameters.values())[1 : list(parameters).index(several)]
        args = [*(arguments.pop(p.name, p.default) for p in before), *rest]
    try:
        module = cls(*args, **arguments)
    except TypeError as error:
        raise CheckpointError(
            f"{cls.__name__} cannot be built from {sorted(arguments)}: {error}. Load {checkpoint.path} with the class "
            "that it was made with, and pass what is missing to load_from_checkpoint."
        ) from error
    for name, value in (checkpoint.state.get("added_hparams") or {}).items():
        with contextlib.suppress(NotKeptError):
            module.hparams[name] = decode(value, cls)
    load_variables(module, checkpoint, strict=strict)
    return module
