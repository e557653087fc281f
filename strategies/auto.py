"""`Auto`, which chooses a strategy by the memory that a step needs."""

from collections.abc import Mapping

import jax

from jaxlit import checks as check
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.ddp import DDP
from jaxlit.strategies.fsdp import FSDP
from jaxlit.strategies.single import SingleDevice


class Auto(FSDP):
    """Train under the first of `single`, `ddp`, `zero1`, `fsdp` and `fsdp` with `remat` that fits.

    On one device the choice is between `single` and `remat`, on several among the others. It is made when a fit
    begins, by the compiled memory of a training step, and holds for the Trainer from then on. A candidate that is
    certain not to fit, by its state and the temporaries of those before it, is not compiled: usually one compile is
    wasted. Until a fit, a module that `jl.lazy` builds or that is only evaluated is split as by `fsdp`.

    Args:
        memory_bytes: The bytes of a device that a step may use; None for 95 % of what jax reports, less what other
            arrays use. CPUs report nothing: without a limit `strategy="auto"` is `single` or `ddp`, and this class
            refuses.

    Raises:
        ArgumentError: The devices report no limit, and `memory_bytes` is None.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy=jl.strategies.Auto(memory_bytes=24 * 10**9), max_epochs=1, logger=False)
    """

    takes_mesh = False

    def __init__(self, memory_bytes: int | None = None) -> None:
        super().__init__()
        self.memory_bytes = check.integer("memory_bytes", memory_bytes, low=1, also=(None,), owner="Auto")

    def setup(self, devices: int | None = None) -> None:
        """Build the mesh; raise an ArgumentError if no limit is known."""
        super().setup(devices)
        rule = "has to be given where devices report no memory, as CPUs do not"
        check.require(self.limit() is not None, "memory_bytes", None, rule, owner="Auto")

    def limit(self, own: int = 0) -> int | None:
        """Return the bytes of a device that a step may use; see `memory_limit`."""
        return memory_limit(own) if self.memory_bytes is None else self.memory_bytes

    def candidates(self) -> Mapping[str, Strategy]:
        """Return the strategies among which it chooses, the first choice first, by their names."""
        return candidates(self.mesh.size)


def candidates(devices: int) -> dict[str, Strategy]:
    """Return the strategies among which "auto" chooses on this number of devices, by their names."""
    last: dict[str, Strategy] = {"fsdp with remat": FSDP(remat=True)}
    if devices == 1:
        return {"single": SingleDevice()} | last
    return {"ddp": DDP(), "zero1": FSDP(stage=1), "fsdp": FSDP()} | last


def memory_limit(step_bytes: int = 0) -> int | None:
    """Return the bytes that a training step may use of any device of this process; None if one does not report them.

    XLA plans with 95 % of the memory, as allocations leave gaps. The bytes of arrays other than the `step_bytes` of the
    step are subtracted: the result is negative if they exceed that.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if not all(x.get("bytes_limit") for x in stats):
        return None
    return min(int(0.95 * x["bytes_limit"]) - max(x.get("bytes_in_use", 0) - step_bytes, 0) for x in stats)
