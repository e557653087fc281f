"""Fake devices: several on one CPU."""

import os
import re

import jax

from jaxlit.distributed.start import jax_runs

_FLAG = "--xla_force_host_platform_device_count"


def fake_devices(count: int) -> None:
    """Simulate `count` CPU devices; call it before the first use of jax, for example in a conftest.

    After that it only checks that there are at least `count` devices.

    Args:
        count: How many.

    Raises:
        RuntimeError: jax runs already, with fewer devices.

    Example:
        >>> import jaxlit as jl
        >>> jl.testing.fake_devices(8)
    """
    if not jax_runs():
        flags = re.sub(rf"{_FLAG}=\d+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={count}".strip()
        os.environ.pop("JAX_NUM_CPU_DEVICES", None)  # it would win over the flag
        jax.config.update("jax_platforms", "cpu")
        return
    if jax.device_count() < count:
        raise RuntimeError(
            f"fake_devices({count}) came after the first use of jax, which runs with {jax.device_count()} devices. "
            f"Call it earlier, or start Python with XLA_FLAGS={_FLAG}={count}."
        )
