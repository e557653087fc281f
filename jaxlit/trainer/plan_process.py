"""The cost of a training step on devices that are not there: compiled for simulated ones in another process."""

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle
import jax

from jaxlit.distributed.same_job import JAX_SETTINGS
from jaxlit.errors import ArgumentError
from jaxlit.trainer.step_cost import StepCost

_logger = logging.getLogger("jaxlit")

# XLA plans the memory before LLVM generates machine code, which nobody will run.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def cost_elsewhere(
    trial: Any, model: Any, batch: Any, num_batches: int | float, *, devices: int, timeout: float, logged: set[str]
) -> StepCost:
    """Return what `cost_of_step` returns on as many simulated devices, in a separate process.

    Args:
        trial: See `cost_of_step`.
        model: See `cost_of_step`; a module is of shapes and dtypes.
        batch: See `cost_of_step`.
        num_batches: See `cost_of_step`.
        devices: How many.
        timeout: Seconds after which the process is ended.
        logged: The warnings that were logged before; those of the process are logged and added.

    Raises:
        ArgumentError: The module cannot be sent to another process, or the process took too long or was ended.
        Exception: What `cost_of_step` has raised there.
    """
    try:
        config = {name: getattr(jax.config, name) for name in JAX_SETTINGS}
        job = cloudpickle.dumps((config, trial.settings.arguments, model, batch, num_batches))
    except Exception as error:
        raise ArgumentError(
            "Trainer.plan sends the module, its callbacks and its strategy to a process that simulates devices, and "
            f"one of them cannot be pickled: {error}. Keep open files, locks and the like out of their attributes."
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        log = Path(folder, "log")
        flags = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS} --xla_force_host_platform_device_count={devices}"
        # The process is no part of the job that this one belongs to.
        env = os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu", "JAX_NUM_PROCESSES": "1"}
        with log.open("wb") as output:
            command = [sys.executable, "-m", "jaxlit.trainer.plan_worker", str(result)]
            # A new session: Ctrl-C reaches this process alone, which ends the other.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=env, start_new_session=True
            )
            try:
                process.communicate(cloudpickle.dumps(sys.path) + job, timeout=timeout)
            except subprocess.TimeoutExpired:
                raise ArgumentError(
                    f"Trainer.plan: {devices} devices: the compile took longer than {timeout:g} s. Raise timeout."
                ) from None
            finally:
                process.kill()
                process.wait()
        if not result.exists():
            last = " ".join(log.read_text(errors="replace").split())[-500:]
            raise ArgumentError(
                f"Trainer.plan: the process for {devices} devices ended with {process.returncode}: {last}"
            )
        outcome, failed, warnings = cloudpickle.loads(result.read_bytes())
    for text in warnings:
        if text not in logged:
            logged.add(text)
            _logger.warning(text)
    if failed:
        raise outcome
    return outcome
