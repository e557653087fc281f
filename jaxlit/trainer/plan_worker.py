"""The process that compiles a training step for simulated devices: `plan_process.py` starts it."""

import io
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import cloudpickle
import jax

from jaxlit.errors import ArgumentError, JaxlitError


def main(result: str) -> None:
    """Read a job from stdin, and write what it takes, or the error that it has raised, to a file."""
    job = io.BytesIO(sys.stdin.buffer.read())
    sys.path[:] = cloudpickle.load(job)  # first, for the modules of the rest
    warnings = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("jaxlit").addHandler(handler)
    try:
        made, failed = _run(job), False
    except Exception as error:
        made, failed = error if isinstance(error, JaxlitError) else _told(error), True
    Path(result).write_bytes(cloudpickle.dumps((made, failed, warnings)))


def _run(job: io.BytesIO) -> Any:
    from jaxlit.trainer.step_cost import cost_of_step
    from jaxlit.trainer.trainer import Trainer

    config, arguments, *rest = cloudpickle.load(job)
    for name, value in config.items():
        jax.config.update(name, value)
    return cost_of_step(Trainer(**arguments), *rest)


def _told(error: Exception) -> ArgumentError:
    """Return an error of a kind that the other process knows, which says where it was raised."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if "site-packages" not in x.filename]
    users = [x for x in frames if not x.filename.startswith(str(Path(__file__).parent.parent))]
    place = f" at {users[-1].filename}:{users[-1].lineno}, in {users[-1].name}" if users else ""
    return ArgumentError(
        f"Trainer.plan builds the module and traces its step on shapes alone, and this raised {type(error).__name__}"
        f"{place}: {error}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
