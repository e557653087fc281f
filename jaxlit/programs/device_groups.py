"""The groups of devices of a collective, read off the text of a compiled program."""

import re

import numpy as np

_LISTED = re.compile(r"\breplica_groups=\{\{(.*?)\}\}|\bsource_target_pairs=\{\{(.*?)\}\}")
_COUNTED = re.compile(r"\breplica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_OF_MESH = re.compile(r"\breplica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}")
_AXIS = re.compile(r"'([^']*)'(?:=(\d+))?")


def groups_of(text: str, devices: int) -> list[list[int]]:
    """Return the positions of the devices of each group, in the order of the program's devices.

    XLA writes groups in three ways: listed, `{{0,1},{2,3}}`, also the pairs of a permutation; as a reshaped and
    transposed range, `[2,4]<=[4,2]T(1,0)`; and as axes of a mesh, `mesh['a'=2,'b'=4] {'b'}`.

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
        count, size, dims, order = found.groups()
        ids = np.arange(int(count) * int(size)).reshape([int(n) for n in dims.split(",")])
        ids = ids.transpose([int(n) for n in order.split(",")]) if order else ids
        return ids.reshape(int(count), int(size)).tolist()
    if found := _OF_MESH.search(text):
        sizes = {name: int(size) for name, size in _AXIS.findall(found[1])}
        grouped = [name for name, _ in _AXIS.findall(found[2])]
        order = [i for i, name in enumerate(sizes) if name not in grouped]
        order += [i for i, name in enumerate(sizes) if name in grouped]
        ids = np.arange(np.prod([*sizes.values()])).reshape([*sizes.values()]).transpose(order)
        return ids.reshape(-1, int(np.prod([sizes[name] for name in grouped]))).tolist()
    return [list(range(devices))]
