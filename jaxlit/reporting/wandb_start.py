"""Opening a run of Weights & Biases in bounded time, offline if it cannot be online."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlit import checks as check
from jaxlit.background import Background
from jaxlit.errors import JaxlitError
from jaxlit.reporting.terminal import join, say, short_path

if TYPE_CHECKING:
    import wandb

_open_runs: list[Any] = []  # of this process, which have not ended

MARGIN = 10.0  # seconds beyond W&B's own limits, which do not cover all of its waits


class WandbError(JaxlitError):
    """W&B is not installed, or failed where `on_error="raise"`."""


def open_run(
    arguments: Mapping[str, Any], settings: Mapping[str, Any], *, offline: bool, raises: bool
) -> "wandb.Run | None":
    """Open a run online; if that fails, offline; if that fails too, continue without. One line tells which it is.

    Args:
        arguments: Those of `wandb.init`, without mode and settings.
        settings: Those of `wandb.Settings` that a user chooses.
        offline: Whether to write to disk only.
        raises: Whether the first failure is raised.

    Returns:
        The SDK's run; None if there is none.

    Raises:
        WandbError: The SDK is not installed.
        Exception: With `raises`, what the SDK raised.
    """
    why = ""
    for mode in ("offline",) if offline or os.environ.get("WANDB_MODE") == "offline" else (None, "offline"):
        try:
            run = _init(arguments, settings, mode)
        except BaseException as error:
            end_run(None, failed=True)  # the SDK holds the id of a run that failed as long as its service runs
            if raises or not isinstance(error, Exception):
                raise
            why = f" ({first_line(error)})"
        else:
            if run.disabled:
                say("W&B disabled")
            elif run.offline:
                say(join([f"W&B offline{why}", f"upload: wandb sync {short_path(Path(run.dir).parent)}"]))
            else:
                say(f"W&B {run.url}")
            _open_runs.append(run)
            return run
    say(f"W&B: off for this run{why}")
    return None


def _init(arguments: Mapping[str, Any], settings: Mapping[str, Any], mode: str | None) -> "wandb.Run":
    wandb = import_wandb()
    if (asked := os.environ.get("WANDB_MODE")) and (mode is None or asked == "disabled"):
        mode = asked  # the SDK reads it only at its first use
    # Its reports of its own errors would keep the process from its end if the server does not answer.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    settings = {
        "finish_timeout_raises": True,
        "x_disable_meta": True,  # the command line and the environment may hold secrets
        "save_code": False,
        "console": "off",  # what the progress bar draws is no log
        "silent": True,
        **settings,
    }
    known = {k: v for k, v in settings.items() if k in wandb.Settings.model_fields}  # 0.22 has no finish_timeout

    def init() -> Any:
        if wandb.run is None:  # otherwise the user has set up the SDK already
            # Its lines come also from outside of runs, and some versions ask for an API key in a terminal.
            wandb.setup(settings=wandb.Settings(silent=True, login_timeout=settings["init_timeout"]))
        return wandb.init(
            **arguments,
            mode=mode,
            resume="allow",
            allow_val_change=True,  # a resumed run may train longer
            reinit="create_new",
            settings=wandb.Settings(**known),
        )

    return Background("wandb-init", init).start().result(settings["init_timeout"] + MARGIN)


def open_already(wanted: str | None) -> "wandb.Run | None":
    """Return the run that the program has opened itself, as the agents of sweeps ask for, unless it is another.

    Args:
        wanted: The id of the run that was asked for, None for any.
    """
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None or wanted not in (None, run.id):
        return None
    say(f"W&B {short_path(Path(run.dir).parent) if run.offline else run.url} (the run that is open)")
    return run


def end_run(run: "wandb.Run | None", *, failed: bool) -> None:
    """Close the SDK's service after a run that failed, without waiting for it, unless other runs are open.

    At the end of the process the SDK would wait for the service, which may hang; one that is closed is not waited for.

    Args:
        run: The run that has ended; None for one that could not be opened.
        failed: Whether it could not be opened or finished.
    """
    if run in _open_runs:
        _open_runs.remove(run)
    wandb = import_wandb()
    if failed and not _open_runs and wandb.run is None:
        # The SDK unregisters its wait at the beginning of a teardown, so a moment is enough.
        Background("wandb-teardown", wandb.teardown).start().join(1.0)


def import_wandb() -> Any:
    """Return the SDK.

    Raises:
        WandbError: It is not installed.
    """
    return check.import_package("wandb", owner="WandbLogger", install="wandb", kind=WandbError)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; an OSError's without its path, so that it is printed once."""
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
