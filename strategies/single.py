"""One device: the reference that the other strategies equal."""

from typing import Literal

from jaxlit import checks as check
from jaxlit.errors import ArgumentError
from jaxlit.strategies.base import AXIS_TYPES, Strategy


class SingleDevice(Strategy):
    """Train on the first device.

    Args:
        axis_types: "explicit" for a model that types its arrays over the axis `data`; see `DDP`.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy="single", max_epochs=1, logger=False)
    """

    several_processes = False
    takes_mesh = False

    def __init__(self, *, axis_types: Literal["auto", "explicit"] = "auto") -> None:
        self.axis_types = check.one_of("axis_types", axis_types, AXIS_TYPES, owner=type(self).__name__)

    def setup(self, devices: int | None = None) -> None:
        """Take the first device; refuse a larger number."""
        if devices not in (None, 1):
            raise ArgumentError(
                f"Trainer(strategy='single', devices={devices}): 'single' uses one device. "
                f"Use strategy='ddp' for {devices}, or devices=1."
            )
        super().setup(1)
