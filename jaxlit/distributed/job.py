"""The job that the environment names, and what only one of its processes does."""

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

import jax

from jaxlit.compat import clusters, coordination
from jaxlit.distributed.start import initialize, jax_runs
from jaxlit.errors import ProcessError

_logger = logging.getLogger("jaxlit")

P = ParamSpec("P")
T = TypeVar("T")


def join_job() -> None:
    """Join the processes of the job that the environment names, unless this process has joined them.

    Raises:
        ProcessError: jax runs already, so that each process would train alone, or the others do not come.
    """
    if jax.distributed.is_initialized() or (count := job_size()) == 1:
        return
    if jax_runs():
        raise ProcessError(
            f"The environment names a job of {count} processes, but jax runs in this one already: each would train "
            "alone. Call jl.distributed.initialize() at the top of the script, before anything uses jax; in Ray, start "
            "them with jl.integrations.ray.RayTrainer. If each is meant to train alone, set JAX_NUM_PROCESSES=1."
        )
    initialize()
    if (found := coordination().num_processes) != count:
        raise ProcessError(
            f"The environment names a job of {count} processes, and jax has found {found}. Pass "
            "the address of process 0 to jl.distributed.initialize, or set JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID; "
            "in Ray, start them with jl.integrations.ray.RayTrainer."
        )


def job_size() -> int:
    """Return how many processes the job has that the environment names, 1 if there is none.

    SLURM, Open MPI, TPU pods and indexed jobs of Kubernetes are detected by jax, workers of Ray Train by Ray;
    `JAX_NUM_PROCESSES` counts first.
    """
    if (count := os.environ.get("JAX_NUM_PROCESSES", "")).isdecimal():
        return int(count)
    if (ray_train := sys.modules.get("ray.train")) is not None:  # as in a worker that Ray Train has started
        with suppress(Exception):
            return ray_train.get_context().get_world_size()
    is_indexed = "JOB_COMPLETION_INDEX" in os.environ  # else a pod is no process of a job
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for cluster in clusters():
            if (cluster.__name__ != "K8sCluster" or is_indexed) and cluster.is_env_present():
                return cluster.get_process_count()
    if is_indexed:
        _logger.warning(
            "JOB_COMPLETION_INDEX says that this is a pod of an indexed job, and jax cannot find the others: it trains "
            'alone. To train together, pip install "jax[k8s]" and let the pods read their job; else set '
            "JAX_NUM_PROCESSES=1."
        )
    return 1


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Have a function run in process 0 only; in the others it returns None.

    What it does must not read arrays that other processes hold parts of: they would not take part.

    Example:
        >>> import jaxlit as jl
        >>> @jl.rank_zero_only
        ... def write(text):
        ...     return len(text)
        >>> write("done")  # in process 0
        4
    """

    @functools.wraps(function)
    def in_process_0(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if jax.process_index() == 0 else None

    return in_process_0
