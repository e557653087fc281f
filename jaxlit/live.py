"""The user's module while the engine holds the newest arrays."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flax import nnx

from jaxlit import module as _module
from jaxlit.errors import StateError

if TYPE_CHECKING:
    from jaxlit.engine import Engine


class Live:
    """Hands the engine's arrays to the user's module when it is touched, and takes back what hooks wrote.

    Args:
        module: The caller's module.
        engine: The engine that trains it.
    """

    def __init__(self, module: "_module.TrainModule", engine: "Engine") -> None:
        self.module, self.engine = module, engine
        self.stale, self.touched = True, False
        self._variables = engine.variables(module)  # [(name, Variable)], in the order of its leaves
        self._graphdef = nnx.graphdef(module)
        self._given: list[Any] = []

    def touch(self) -> None:
        """Bring the module's arrays up to date."""
        if not self.stale:
            return
        # First, so that set_value does not come back here.
        self.stale, self.touched = False, True
        self._given = self.engine.module_arrays()
        for (_, variable), array in zip(self._variables, self._given, strict=True):
            variable.set_value(array)

    def settle(self, owner: str, hook: str, adopt: bool) -> None:
        """Take over what a hook wrote to the module's Variables, or refuse it.

        Args:
            owner: Name of the callback or module whose hook ran.
            hook: Name of the hook.
            adopt: Whether this hook may write.

        Raises:
            StateError: It wrote where it may not, or changed the module's structure, a shape or a dtype.
        """
        self.touched = False
        where = f"{owner}.{hook}"
        # Only here: walking the graph after every batch hook that reads would cost milliseconds.
        if adopt and nnx.graphdef(self.module) != self._graphdef:
            raise StateError(
                f"{where} changed the structure of {type(self.module).__name__} (an attribute, a sub-module or a "
                "mode). The compiled steps cannot follow: change it before fit."
            )
        written = {}
        for i, ((name, variable), given) in enumerate(zip(self._variables, self._given, strict=True)):
            array = variable.get_value()
            if array is given:
                continue
            if not adopt:
                raise StateError(
                    f"{where} wrote to {name}. A batch hook may read the module, not write to it: write in "
                    "on_train_epoch_start, on_train_epoch_end or on_validation_end."
                )
            shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
            if (shape, dtype) != (given.shape, given.dtype):
                raise StateError(
                    f"{where} wrote {dtype}{shape} to {name}, which is {given.dtype}{given.shape}. "
                    "Write an array of the same shape and dtype."
                )
            written[i] = array
        if written:
            self.engine.write(written)
            self.stale = True

    @contextmanager
    def registered(self) -> Iterator["Live"]:
        """Keep the module in sync inside the block, and leave it the newest arrays."""
        _module._live[id(self.module)] = self
        try:
            yield self
        finally:
            del _module._live[id(self.module)]
            # An error inside a step leaves arrays that the step had taken: then the module keeps what it has.
            if not any(x.is_deleted() for x in self.engine.leaves):
                self.stale = True
                self.touch()
