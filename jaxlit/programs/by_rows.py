"""Whether a program is the same computation for every number of rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jaxlit.programs.jaxpr import CALLS, equations

# Operations on shapes, of which a dim of size 1 needs others than a longer one.
_OF_SHAPES = (*CALLS, "broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose")


def same_computation(programs: Sequence[tuple[int, Any]]) -> bool:
    """Return whether programs differ in shapes only, and in numbers as their rows or the inverse of these.

    Args:
        programs: Pairs of the number of rows and the `ClosedJaxpr` that was traced with them.
    """
    rows = np.array([count for count, _ in programs], float)
    names, numbers = zip(*(zip(*_operations(program.jaxpr), strict=True) for _, program in programs), strict=True)
    if any(found != names[0] for found in names):
        return False
    for several in zip(*numbers, strict=True):
        if len({len(x) for x in several}) > 1:
            return False
        for values in zip(*several, strict=True):
            with np.errstate(invalid="ignore"):  # of an infinity
                scaled = [np.array(values) * rows**power for power in (0, 1, -1)]
            if not any(np.allclose(x, x[0], rtol=1e-5, atol=0, equal_nan=True) for x in scaled):
                return False
    return True


def _operations(jaxpr: Any) -> list[tuple[str, list[Any]]]:
    """Return the name and the numbers of each operation, those of inner programs too."""
    found = [("", list[Any]())]
    for eqn in equations(jaxpr):
        if eqn.primitive.name not in _OF_SHAPES:
            literals = (x.val for x in eqn.invars if isinstance(x, core.Literal))
            found.append((eqn.primitive.name, [x for x in literals if np.ndim(x) == 0]))
    return found
