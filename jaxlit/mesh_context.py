"""Keeps a mesh of the caller's out of jaxlit's programs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import jax
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

_NO_DEVICES: Any = np.empty((), dtype=object)
_NO_MESH = jax.sharding.Mesh(_NO_DEVICES, ())
is_out: ContextVar[bool] = ContextVar("is_out", default=False)  # compiled programs are kept by it


def out_of_meshes(fn: F) -> F:
    """Return `fn` running without the mesh that `jax.set_mesh` has put around it.

    A strategy has a mesh of its own, which it puts in context where it traces; jax refuses programs on other devices,
    or with axes of other types, than those of the mesh in context.
    """

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if jax.sharding.get_abstract_mesh().empty:
            return fn(*args, **kwargs)
        with out():
            return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


@contextmanager
def out(wanted: bool = True) -> Iterator[None]:
    """Leave the mesh in context, if that is wanted."""
    if not wanted or (is_out.get() and jax.sharding.get_abstract_mesh().empty):
        yield
        return
    token = is_out.set(True)
    try:
        with jax.set_mesh(_NO_MESH):
            yield
    finally:
        is_out.reset(token)
