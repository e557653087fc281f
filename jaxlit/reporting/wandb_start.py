"""How a run of Weights & Biases is opened: in bounded time, and offline if it cannot be online."""

import atexit
import contextlib
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlit.background import Background
from jaxlit.errors import JaxlitError
from jaxlit.reporting.terminal import join, say, short_path

if TYPE_CHECKING:
    import wandb

MARGIN = 10.0  # seconds beyond W&B's own limits, which do not cover its every wait
PATIENCE = 600.0  # seconds that a run on the disk has to open: nobody else has to answer, but the machine may be busy
_EXIT = 5.0  # seconds that the SDK's service has at the end of a process in which it did not do its work
_limited: list[Any] = []  # services whose end is limited


class WandbError(JaxlitError):
    """W&B is not installed, or failed where `on_error="raise"`."""


def open_run(
    arguments: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    alone: Mapping[str, Any],
    earlier: str | None,
    offline: bool,
    raises: bool,
    rows: str = "",
) -> "wandb.Run | Background[wandb.Run] | None":
    """Open a run online; if that fails, offline; if that fails as well, do without. One line tells which it is.

    A run on the disk may still open when this returns, on a busy machine.

    Args:
        arguments: Those of `wandb.init`, without mode and settings.
        settings: Those of `wandb.Settings` that are not always the same, and `mode` if it is not that of WANDB_MODE.
        alone: What of the arguments is another if the run cannot be online.
        earlier: The id of the offline run that stands for it, if it could not be opened online before.
        offline: Whether not to try online at all.
        raises: Whether the first failure is raised.
        rows: Where the rows are beside W&B, "" for nowhere.

    Returns:
        The SDK's run, or what it will be in; None if there is none.

    Raises:
        WandbError: The SDK is not installed.
        Exception: With `raises`, what the SDK raised.
    """
    wandb = import_wandb()
    why, changes, wanted = "", {"id": earlier} if earlier else {}, {**arguments, **alone}["id"]
    if not (offline or earlier or os.environ.get("WANDB_MODE") == "offline"):
        try:
            with _without_prompt():
                opening = Background("wandb-init", _init(arguments, settings))
                try:
                    run = opening.start().result(settings["init_timeout"] + MARGIN)
                except BaseException:  # too late, or a Ctrl-C: nobody waits for it any more
                    opening.then(_give_up)
                    raise
            _tell(run, wanted, "")
            return run
        except BaseException as error:
            limit_exit()
            if raises or not isinstance(error, Exception):
                raise
            late = isinstance(error, TimeoutError) or "timed out" in str(error)  # the SDK's own has no class
            why = f" ({first_line(error)}{'; WandbLogger(init_timeout=...) waits longer' if late else ''})"
            # The SDK holds a failed run's id until the process ends; without a key there is no run yet.
            if not isinstance(error, wandb.errors.UsageError):
                changes = {"id": secrets.token_hex(4)}
    kept = {k: v for k, v in settings.items() if not k.startswith("x_")}  # those are of a shared run
    try:
        return _open_offline({**arguments, **alone, **changes}, kept, lambda run: _tell(run, wanted, why), rows)
    except Exception as error:
        if raises:
            raise
        say(join([f"W&B: off for this run ({first_line(error)})", f"rows: {rows}" if rows else ""]))
        return None


def _open_offline(
    arguments: Mapping[str, Any], settings: Mapping[str, Any], tell: Callable[["wandb.Run"], Any], rows: str
) -> "wandb.Run | Background[wandb.Run]":
    start, limit = time.monotonic(), settings["init_timeout"] + MARGIN
    opening = Background("wandb-init", _init(arguments, {**settings, "mode": "offline", "init_timeout": PATIENCE}))
    try:
        with _without_prompt():
            opening.start().join(limit)
    except BaseException:  # a Ctrl-C
        opening.then(_give_up)
        raise
    if opening.is_done:
        tell(opening.result())
        return opening.result()
    said = f"W&B offline: the run is not open after {time.monotonic() - start:.0f} s, training continues"
    there = short_path(Path(arguments["dir"]) / "wandb")
    rows = f"rows: {rows}, and {there} as soon as it is" if rows else f"rows: {there} as soon as it is"
    say(join([said, rows, "WandbLogger(init_timeout=...) waits longer"], in_file=100))
    opening.then(tell)
    return opening


def _give_up(run: "wandb.Run") -> None:
    run.finish(exit_code=1)


def _tell(run: "wandb.Run", wanted: str, why: str) -> None:
    """Say in a line where a run is.

    Args:
        run: The run.
        wanted: The id that it should have.
        why: Why it is not online.
    """
    folder = Path(run.dir).parent
    if run.disabled:
        say("W&B disabled")
    elif run.offline:
        onto = f"--id {wanted} " if run.id != wanted else ""
        say(join([f"W&B offline{why}", f"upload: wandb sync {onto}{short_path(folder)}"]))
    else:
        say(f"W&B {run.url}")


def _init(arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> Callable[[], "wandb.Run"]:
    """Return what opens a run; it starts the SDK's service, if that is not there yet."""
    wandb = import_wandb()
    asked = os.environ.get("WANDB_MODE")  # the SDK has read it at its first use
    mode = asked if asked == "disabled" else settings.get("mode") or asked
    settings = {
        "finish_timeout_raises": True,
        "x_disable_meta": True,  # the command line and the environment may hold secrets
        "save_code": False,
        "console": "off",  # what the bar draws is no log
        "silent": True,
        **settings,
    }
    known = {k: v for k, v in settings.items() if k in wandb.Settings.model_fields and k != "mode"}

    def init() -> "wandb.Run":
        if wandb.run is None:  # else the SDK is set up already, as somebody wants it
            # Silent, since its lines come also from outside of runs.
            wandb.setup(settings=wandb.Settings(silent=True, x_service_wait=PATIENCE))
        return wandb.init(
            **arguments,
            mode=mode,
            resume="allow",
            allow_val_change=True,  # a resumed run may train longer
            reinit="create_new",
            settings=wandb.Settings(**known),
        )

    # Its reports of its own errors would keep the process from its end if the server does not answer.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return init


def limit_exit() -> None:
    """Limit how long the SDK keeps the process from its end: it waits for its service, which may hang, for ever."""
    # The SDK shows it nowhere, and `setup` would wait for a service that is being started.
    connection = getattr(import_wandb().sdk.wandb_setup._singleton, "_connection", None)
    service = getattr(getattr(connection, "_proc", None), "_process", None)
    if service is None or any(service is other for other in _limited):
        return
    _limited.append(service)
    ending = threading.Event()

    def end() -> None:
        ending.wait()
        time.sleep(_EXIT)
        service.kill()

    # Started now, since a process that ends starts no threads.
    threading.Thread(target=end, name="jaxlit-wandb-exit", daemon=True).start()
    atexit.register(ending.set)  # what is registered last is called first


def import_wandb() -> Any:
    """Return the SDK.

    Raises:
        WandbError: It is not installed.
    """
    try:
        import wandb
        import wandb.errors
    except ImportError as error:
        raise WandbError(
            "WandbLogger needs the wandb package, which is not installed. Run `pip install wandb`, or leave "
            "WandbLogger out."
        ) from error
    return wandb


@contextlib.contextmanager
def _without_prompt() -> Iterator[None]:
    """Let W&B find no one to ask for an API key: a job that waits for an answer has stopped."""
    stdin = sys.stdin
    with open(os.devnull) as nobody:
        sys.stdin = nobody
        try:
            yield
        finally:
            sys.stdin = stdin


def first_line(error: BaseException) -> str:
    """Return what an error says, short and without a path."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    # Each file has another path, and why it cannot be written is told once.
    found = re.search(r"\[Errno \d+\] ([^:\"']+)", line)
    return found[1].strip() if found else line
