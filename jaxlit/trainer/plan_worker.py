"""The process that compiles a training step for simulated devices: `jaxlit.trainer.plan` starts it."""

import io
import logging
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import jax

from jaxlit.errors import JaxlitError
from jaxlit.trainer.step_cost import cost_of_step, explained
from jaxlit.trainer.trainer import Trainer


def main(result: str) -> None:
    """Read a job from stdin, and write what it takes, or the error that it has raised, to a file."""
    job = io.BytesIO(sys.stdin.buffer.read())
    sys.path[:] = cloudpickle.load(job)  # first, for the modules of the rest
    warnings = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("jaxlit").addHandler(handler)
    try:
        outcome = _run(job)
        failed = False
    except JaxlitError as error:
        outcome = error
        failed = True
    Path(result).write_bytes(cloudpickle.dumps((outcome, failed, warnings)))


def _run(job: io.BytesIO) -> Any:
    config, arguments, *rest = cloudpickle.load(job)
    for name, value in config.items():
        jax.config.update(name, value)
    with explained():
        return cost_of_step(Trainer(**arguments), *rest)


if __name__ == "__main__":
    main(sys.argv[1])
