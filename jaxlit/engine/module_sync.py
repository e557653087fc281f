"""The user's module while the engine has the newest arrays."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx
from flax.errors import TraceContextError

from jaxlit.core.attributes import MODES, list_changes
from jaxlit.core.module import TrainModule, watchers
from jaxlit.errors import StateError
from jaxlit.texts import shown
from jaxlit.variables import arrays_of, merge, split

if TYPE_CHECKING:
    from jaxlit.engine.engine import Engine

_logger = logging.getLogger("jaxlit")

_CALLED = (
    " A call of the module in training mode writes batch statistics and random counters: compute with it by "
    "trainer.apply(fn, x), which runs fn(module, x) compiled and in evaluation mode."
)


class ModuleSync:
    """Gives the engine's arrays to the user's module when it is touched, and takes back what hooks wrote.

    Args:
        hook: Returns the name of the hook that runs.
        put_back: At the end give the module its original arrays, except those that a hook has written to.
    """

    def __init__(
        self, module: TrainModule, engine: "Engine", hook: Callable[[], str], *, put_back: bool = False
    ) -> None:
        self.module, self.engine, self.hook = module, engine, hook
        self.stale, self.touched = True, False
        self._variables = engine.state.variables(module)  # [(name, Variable)], in the order of its leaves
        self._graphdef, *self._structure = _structure(module)
        self._arrays: list = []  # those that the module was given last
        self._originals = [variable.get_raw_value() for _, variable in self._variables] if put_back else []
        self._first = engine.state.module_arrays() if put_back else []

    def touch(self, name: str = "__dict__") -> None:
        """Bring the module's arrays up to date, since its attribute of a name is read."""
        before, self.touched = self.touched, True  # also when nothing is new: a hook that reads may write
        if not self.stale:
            return
        self.stale = False  # first, so that setting an array does not come back here
        arrays = self.engine.state.module_arrays()
        try:
            self._set_arrays(arrays)
        except BaseException as error:
            self.stale, self.touched = True, before
            if not isinstance(error, TraceContextError):
                raise
            # nnx refuses to write inside a trace, which is that of a schedule that reads the module, for example.
            value = object.__getattribute__(self.module, "__dict__").get(name)
            if name == "__dict__" or nnx.has_data(value):
                attribute = "" if name == "__dict__" else f".{name}"
                raise StateError(
                    f"{type(self.module).__name__}{attribute} was read while jax traced a function, where its "
                    "newest arrays are not known. Read it before, and pass what the function needs as an argument."
                ) from error
        else:
            self._arrays = arrays

    def _set_arrays(self, arrays: list) -> None:
        for (_, variable), array in zip(self._variables, arrays, strict=True):
            variable.set_raw_value(array)  # at each touch of a batch hook: set_value takes twice as long

    def refuse_attribute(self, name: str) -> None:
        """Refuse to set an attribute of the module in a batch hook; other hooks are looked at when they end."""
        if name in MODES or "_batch_" not in (hook := self.hook()):
            return
        raise StateError(
            f"{type(self.module).__name__}.{name} was set in {hook}. The compiled steps cannot follow: hold it in an "
            "nnx.Variable that an epoch hook writes to, or pass it in the batch. Counters and other state that no step "
            "reads belong into a callback."
        )

    def take_writes(self, owner: str, hook: str, adopt: bool) -> None:
        """Take over what a hook of a callback or module, the owner, wrote to the module's Variables, if it may."""
        self.touched = False
        writer = f"{owner}.{hook}"
        # Only there: walking the graph after every batch hook that reads would cost milliseconds.
        if adopt and self._structure_has_changed():
            before = merge(self._graphdef, *self.engine.state.spec.tree.variables)
            changes = list_changes(before, self.module)
            raise StateError(
                f"{writer} changed the structure of {type(self.module).__name__}: {changes or 'an attribute'}. The "
                "compiled steps cannot follow: change it before fit, or in setup."
            )
        if adopt:  # the hook may have replaced a Variable or a part by another of the same structure
            self._variables = self.engine.state.variables(self.module)
        self.touched = False  # looking at the graph touches the module as well
        self._take(writer, adopt)

    def take_later_writes(self) -> None:
        """Take over what the caller has written to the module's Variables since the run has ended.

        Random generators stay as training left them: a call of the module draws from them, and a resume would draw
        other numbers than a training that continues.
        """
        if id(self.module) not in watchers:  # in a hook of a later run, the arrays are those that it evaluates
            now = {x.name: x.place for x in arrays_of(self.module, ...)}  # a part may have been replaced
            self._variables = [(name, now.get(name, leaf)) for name, leaf in self._variables]
            self._take("The program, after fit,", True, skip=nnx.RngState)

    def _take(self, writer: str, adopt: bool, skip: Any = ()) -> None:
        written = {}
        for i, ((name, variable), old) in enumerate(zip(self._variables, self._arrays, strict=True)):
            array = variable.get_raw_value()
            if array is old or isinstance(variable, skip):
                continue
            if not adopt:
                calls = isinstance(variable, (nnx.BatchStat, nnx.RngState))
                raise StateError(
                    f"{writer} wrote to {name}. A batch hook may read the module, not write to it: write in "
                    "on_train_epoch_start, on_train_epoch_end or on_validation_end." + _CALLED * calls
                )
            # A numpy array of float64 becomes one of float32, as in __init__; `object` is the dtype of no array.
            dtype = jax.dtypes.canonicalize_dtype(getattr(array, "dtype", object), allow_extended_dtype=True)
            if (getattr(array, "shape", None), dtype) != (old.shape, old.dtype):
                raise StateError(
                    f"{writer} wrote {shown(array)} to {name}, which is {shown(old)}. Write an array of the same "
                    "shape and dtype."
                )
            written[i] = array
            self.engine.state.note(f"{name}, written in {writer}", array)
        if written:
            self.engine.state.write(written)
            self.stale = True

    def _structure_has_changed(self) -> bool:
        now, *structure = _structure(self.module)
        if structure != self._structure:
            return True
        try:
            return now != self._graphdef
        except Exception:  # an attribute's own comparison, for example of arrays; one that is set was refused already
            return now.nodes != self._graphdef.nodes

    def _follow_replaced(self) -> None:
        """Follow a batch hook that has replaced Variables, without what it wrote to them."""
        before, self._variables = self._variables, self.engine.state.variables(self.module)
        pairs = zip(self._variables, before, strict=True)
        if replaced := [name for (name, now), (_, old) in pairs if isinstance(now, nnx.Variable) and now is not old]:
            text = "%s was replaced in a batch hook. What it wrote was not trained with: write in an epoch hook."
            _logger.warning(text, ", ".join(replaced))

    @contextmanager
    def registered(self) -> Iterator["ModuleSync"]:
        """Keep the module in sync inside the block, and give it the newest arrays at the end."""
        outer = watchers.get(id(self.module))  # of a run whose hook started this one
        watchers[id(self.module)] = self
        try:
            yield self
        finally:
            del watchers[id(self.module)]
            if outer is not None:
                watchers[id(self.module)] = outer
            # An error inside a step leaves arrays that the step had taken: then the module keeps what it has.
            if self.engine.state.is_complete:
                self.stale = True
                self.touch()
                if not self._structure_has_changed():
                    self._follow_replaced()
                if not self._originals:
                    self._arrays = self.engine.strategy.gather(self._arrays)
                    self._set_arrays(self._arrays)
                self.touched = False  # what is written from now on belongs to the module alone
            both = zip(self._first, self._arrays, strict=False)
            for (_, variable), original, (first, last) in zip(self._variables, self._originals, both, strict=False):
                if first is last:
                    variable.set_raw_value(original)


def _structure(module: TrainModule) -> list[Any]:
    """Return the graph of a module, and the structure of its state with what is no array in it."""
    graphdef, *states = split(module)
    return [graphdef, jax.tree.structure(states)]
