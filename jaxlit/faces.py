"""The face of a room: its public names, each imported when it is first used."""

import builtins
import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from jaxlit.porting import no_such_public_name

_patching = threading.Lock()


@contextlib.contextmanager
def lazy_imports(face: dict[str, Any]) -> Iterator[None]:
    """Put off each `from module import name` of the block until the face is asked for the name.

    Type checkers and readers see imports like any other. `etils.epy.lazy_api_imports` does the same.

    Args:
        face: The globals of the package; also gets a `__dir__` and a `__getattr__`.
    """
    modules: dict[str, str] = {}  # of each name

    def note(module: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if globals is not face:  # another thread's import, which is none of ours
            return plain_import(module, globals, locals, fromlist, level)
        names = sys.modules[module].__all__ if fromlist == ("*",) else fromlist
        modules.update(dict.fromkeys(names, module))
        return SimpleNamespace(**dict.fromkeys(names))

    with _patching:
        plain_import, builtins.__import__ = builtins.__import__, note
        try:
            yield
        finally:
            builtins.__import__ = plain_import
    for name in modules:
        del face[name]

    def get(name: str) -> Any:
        if name not in modules:
            raise no_such_public_name(face["__name__"], name, modules)
        if (module := modules[name]) == face["__name__"]:  # a file of this room
            face[name] = importlib.import_module(f"{module}.{name}")
        else:
            face[name] = getattr(importlib.import_module(module), name)
        return face[name]

    face.update(__getattr__=get, __dir__=lambda: face["__all__"])
