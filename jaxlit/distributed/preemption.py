"""The notice that a machine is about to be taken, as jax tells it to all processes."""

import itertools

import jax
from jax.experimental.multihost_utils import reached_preemption_sync_point

_looks = itertools.count()  # of all trainings: jax's numbers go up in every process alike


def is_announced_by_jax() -> bool:
    """Return whether jax listens for SIGTERM, to tell all processes at one step; it does unless it was told not to."""
    from jax._src.distributed import global_state  # jax has no public way to ask

    return jax.process_count() > 1 and global_state.preemption_sync_manager is not None


def is_preempted() -> bool:
    """Return whether all processes end here, as one of them is about to be taken; all must ask at every step."""
    return reached_preemption_sync_point(next(_looks))
