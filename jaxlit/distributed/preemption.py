"""The notice that a machine is about to be preempted, which jax sends to all processes."""

import itertools

import jax
from jax.experimental.multihost_utils import reached_preemption_sync_point

_looks = itertools.count()  # of all trainings: jax's numbers must increase equally in every process


def is_announced_by_jax() -> bool:
    """Return whether jax handles SIGTERM and notifies all processes at one step, as it does by default."""
    from jax._src.distributed import global_state  # jax has no public way to ask

    return jax.process_count() > 1 and global_state.preemption_sync_manager is not None


def is_preempted() -> bool:
    """Return whether all processes end here, because one is preempted; all must ask at every step."""
    return reached_preemption_sync_point(next(_looks))
