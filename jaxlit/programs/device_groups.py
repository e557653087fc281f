"""The groups of devices of a collective, read off the text of a compiled program."""

import re

import numpy as np

_LISTED = re.compile(r"\breplica_groups=\{\{(.*?)\}\}|\bsource_target_pairs=\{\{(.*?)\}\}")
_COUNTED = re.compile(r"\breplica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_OF_MESH = re.compile(r"\breplica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+))?")
_AXIS = re.compile(r"'([^']*)'(?:=(\d+))?")


def groups_of(text: str, devices: int) -> list[list[int]]:
    """Return the positions of the devices of each group, in the order of the program's devices.

    XLA writes groups in three ways: listed, `{{0,1},{2,3}}`, also the pairs of a permutation; as a reshaped and
    transposed range, `[2,4]<=[4,2]T(1,0)`; and as axes of a mesh, `mesh['a'=2,'b'=4] {'b'}`,
    which may have its devices in another order, `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`.

    Args:
        text: The attributes of an instruction.
        devices: How many devices there are; all are one group where none is named.

    Example:
        >>> groups_of("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
        [[0, 2], [1, 3]]
    """
    if found := _LISTED.search(text):
        return [[int(n) for n in group.split(",")] for group in (found[1] or found[2]).split("},{")]
    if found := _COUNTED.search(text):
        count, size, *iota = found.groups()
        return _iota(*iota).reshape(int(count), int(size)).tolist()
    if found := _OF_MESH.search(text):
        sizes = {name: int(size) for name, size in _AXIS.findall(found[1])}
        grouped = [name for name, _ in _AXIS.findall(found[3])]
        # The devices of the mesh in its order, where it is not that of the program.
        listed = found[2] and _IOTA.match(found[2])
        ids = _iota(*listed.groups()) if listed else np.arange(np.prod([*sizes.values()]))
        if found[2] and not listed:
            ids = np.array([int(n) for n in found[2].split(",")])
        order = [i for i, name in enumerate(sizes) if name not in grouped]
        order += [i for i, name in enumerate(sizes) if name in grouped]
        ids = ids.reshape([*sizes.values()]).transpose(order)
        return ids.reshape(-1, int(np.prod([sizes[name] for name in grouped]))).tolist()
    return [list(range(devices))]


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Return a range in these dims, transposed, as a list."""
    shape = [int(n) for n in dims.split(",")]
    ids = np.arange(np.prod(shape)).reshape(shape)
    return (ids.transpose([int(n) for n in order.split(",")]) if order else ids).ravel()
