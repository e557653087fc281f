"""How arrays are sharded, and their bytes on each device."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax


def partition(arrays: Iterable[Any], devices: Iterable[jax.Device]) -> str:
    """Return how arrays are sharded: "P('fsdp', None)", "replicated", or "mixed" if they differ.

    Those of one device are "on cpu:3", and those of some devices "replicated on cpu:4,5".

    Args:
        arrays: Arrays, or their shapes, dtypes and shardings.
        devices: All devices in question.
    """
    among = frozenset(devices)
    partitions = {_partition(sharding, among) for sharding in {x.sharding for x in arrays}}
    return partitions.pop() if len(partitions) == 1 else "mixed"


def bytes_of(arrays: Iterable[Any]) -> int:
    """Return the bytes of unsharded arrays."""
    return sum(x.size * x.dtype.itemsize for x in arrays)


def bytes_per_device(arrays: Iterable[Any]) -> int:
    """Return the bytes of arrays on the device that has the most of them."""
    by_sharding, held = Counter[Any](), Counter[jax.Device]()
    for x in arrays:
        by_sharding[x.sharding] += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for sharding, num_bytes in by_sharding.items():
        held.update(dict.fromkeys(sharding.device_set, num_bytes))
    return max(held.values(), default=0)


def devices_of(arrays: Iterable[Any]) -> frozenset[jax.Device]:
    """Return the devices of arrays."""
    return frozenset().union(*(sharding.device_set for sharding in {x.sharding for x in arrays}))


def _partition(sharding: Any, among: frozenset[jax.Device]) -> str:
    held = sharding.device_set
    if len(held) == 1:
        return f"on {_names(held)}"
    split = any(axes is not None for axes in sharding.spec)
    text = f"P({', '.join(map(repr, sharding.spec))})" if split else "replicated"
    return text if held == among else f"{text} on {_names(held)}"


def _names(devices: Iterable[jax.Device]) -> str:
    """Return devices as "cpu:0,1,6"."""
    return f"{next(iter(devices)).platform}:{','.join(map(str, sorted(device.id for device in devices)))}"
