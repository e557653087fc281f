"""A compiled program that can be asked what it costs, and what limits such programs.

After `CompiledProgram`: the folder in which a later process finds programs instead of compiling them again; the bound
on steps that are dispatched and not finished; and the error of devices without enough memory.
"""

import contextlib
import functools
import logging
import time
import zlib
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.stages import Traced

from jaxlit.checks import cache_folder
from jaxlit.core.train_state import TrainState
from jaxlit.distributed.job import same_program
from jaxlit.errors import OutOfMemoryError
from jaxlit.programs.costs import Flops, Memory, ProgramCost, count_collectives, count_flops, trace
from jaxlit.reporting.terminal import bytes_per_device
from jaxlit.sharding import is_out, out
from jaxlit.strategies.base import Program, state_shardings
from jaxlit.texts import size


class CompiledProgram:
    """A program as a strategy has compiled it, and the shapes of its first call.

    Args:
        program: The strategy's function.
        step: The trace of the user's step in it, for messages; None for none.
    """

    def __init__(self, name: str, program: Callable, step: Any = None) -> None:
        self.name, self.program, self._step = name, program, step
        self.run: Callable = self._first  # after it the strategy's function itself, so that no step waits for more
        self.ran, self.steps = False, 1  # whether it was called, and the optimizer steps of a call
        self._arguments: tuple | None = None
        self._out = False  # whether the first call left a mesh of the caller's, which jax keeps programs by

    def _first(self, *args: Any) -> Any:
        self.note_arguments(*args)  # before the call, which may overwrite arrays
        same_program(self.name, lambda: trace(self.program, *args), self._step)  # a trace that the call uses again
        result = self.program(*args)
        self.ran, self.run = True, self.program
        return result

    def note_arguments(self, *args: Any) -> Self:
        """Note the arguments of a call, or their shapes, dtypes and shardings, without a call; returns itself."""
        self._arguments, self._out = jax.tree.map(_abstract, args), is_out.get()
        return self

    @property
    def failed(self) -> bool:
        """Whether its first call has raised an error."""
        return self._arguments is not None and not self.ran

    @cached_property
    def flops(self) -> Flops | None:
        """The operations of a call like the first one, from its trace; None if they are not known."""
        traced = self._trace()
        return None if traced is None else count_flops(traced.jaxpr.jaxpr)

    @cached_property
    def cost(self) -> ProgramCost:
        """What a call like the first one costs; what jax has in its caches is not traced or compiled again."""
        if hasattr(self.program, "estimate"):  # it runs in parts
            return self.program.estimate(*self._arguments)  # type: ignore[attr-defined]
        if (traced := self._trace()) is None:
            return ProgramCost(self.name)
        with out(self._out):
            compiled = traced.lower().compile()
        text, analysis = compiled.as_text(), compiled.memory_analysis()
        kinds = ("argument", "output", "temp", "alias")
        memory = None if analysis is None else Memory(*(getattr(analysis, f"{x}_size_in_bytes") for x in kinds))
        return ProgramCost(self.name, self.flops, memory, None if text is None else count_collectives(text))

    def _trace(self) -> Traced | None:
        assert self._arguments is not None, "nothing is known of a program before its first call"
        with out(self._out):
            return trace(self.program, *self._arguments)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Return what jax knows an argument of a compiled function by."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if isinstance(x, jax.Array):
        placed = x.sharding if x.committed else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed, weak_type=x.aval.weak_type)  # type: ignore[attr-defined]
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))


def run_eagerly(run: Callable, program: Program) -> Callable:
    """Do by hand what jit does besides compiling: take numpy arrays, and give results their shardings."""

    def call(*args: Any) -> tuple:
        args = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, args)
        pairs = zip(run(*args), state_shardings(program), strict=True)
        return tuple(x if to is None else jax.device_put(x, to) for x, to in pairs)

    return call


MAX_BYTES = 2 * 2**30
_JAX_LEAST_SECONDS = 1.0  # of compiling, from which on jax stores a program by default: on a fast machine, almost none

_logger = logging.getLogger("jaxlit")
_folder_set_here: list[str | None] = [None]  # another one is the user's


def use_compile_cache(location: bool | str | Path) -> None:
    """Have jax store its programs from now on, unless the user has chosen a folder or switched jax's cache off.

    Args:
        location: A folder, True for one of jaxlit's, False for none. Old entries are deleted down to `MAX_BYTES`.
    """
    config: Any = jax.config
    current, folder = config.jax_compilation_cache_dir, None
    if current not in (None, _folder_set_here[0]) or not config.jax_enable_compilation_cache:
        return
    if location is not False:
        try:
            folder = str(cache_folder("compiled") if location is True else Path(location).expanduser().absolute())
            if folder != current:
                Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)  # only its owner may write code there
                _trim(Path(folder))
                _delete_cut(Path(folder))
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            folder = None
            _warn(str(error))
    if folder != current:
        config.update("jax_compilation_cache_dir", folder)
        reset_cache()  # jax opens a folder once
        _folder_set_here[0] = folder
    if folder is not None and config.jax_persistent_cache_min_compile_time_secs == _JAX_LEAST_SECONDS:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _trim(folder: Path) -> None:
    """Delete the oldest entries down to `MAX_BYTES`; jax does so itself only with another package."""
    total, stats = 0, {}
    for file in folder.glob("*-cache"):  # as jax names its entries
        with contextlib.suppress(OSError):  # another process may have deleted it
            stats[file] = file.stat()
    for file in sorted(stats, key=lambda file: stats[file].st_mtime, reverse=True):
        total += stats[file].st_size
        if total > MAX_BYTES:
            file.unlink(missing_ok=True)


def _delete_cut(folder: Path) -> None:
    """Delete entries that a kill or a full disk has cut: jax writes in place, and never over an entry."""
    mark = folder / "checked"
    with contextlib.suppress(OSError):  # read-only, or another process has deleted an entry
        since = mark.stat().st_mtime if mark.exists() else 0.0  # earlier entries were looked at by an earlier start
        mark.touch()
        for file in folder.glob("*-cache"):
            if file.stat().st_mtime >= since and not _is_complete(file.read_bytes()):
                file.unlink(missing_ok=True)


def _is_complete(entry: bytes) -> bool:
    stream = zlib.decompressobj()
    try:
        stream.decompress(entry)
    except zlib.error:  # of another format, which jax takes where it finds a package for it
        return True
    return stream.eof


@functools.cache
def _warn(reason: str) -> None:
    """Warn, once a process."""
    _logger.warning(
        "Compiled programs cannot be stored: %s. Later starts compile again. Trainer(compile_cache=...) takes another "
        "folder, or False for none.",
        reason.rstrip("."),
    )


class Bound:
    """Bounds the steps in flight by one wait a period: a wait each step costs more than a step's Python."""

    def __init__(self, limit: int) -> None:
        # A wait is for the token of the period before: up to two periods of steps are under way at once.
        self.period = max(1, limit // 2)  # steps from wait to wait
        self._count, self._token, self._each = 0, None, limit == 1
        self.seconds = 0.0  # how long all waits took

    def __call__(self, token: jax.Array) -> None:
        """Count a step by one of its results, and wait once a period for the one a period ago."""
        self._count += 1
        if self._count >= self.period:
            self._count = 0
            self.wait(token)

    def wait(self, token: jax.Array) -> None:
        """End a period with one of the results of its last step, and wait for those of the period before."""
        # With the newest step of a period still running the device never idles; a limit of one leaves no choice.
        if (waits_for := token if self._each else self._token) is not None:
            begun = time.perf_counter()
            waits_for.block_until_ready()
            self.seconds += time.perf_counter() - begun
        self._token = token

    def drain(self, token: jax.Array) -> None:
        """Count a step, and once a period wait for it."""
        # For results that the next step overwrites: an older token could not be waited for any more.
        self._count += 1
        if self._count == self.period:
            self._count, self._token = 0, token
            self.wait(token)
            self._token = None


_REMEDIES = (
    'Parameters and optimizer shrink with strategy="fsdp" over more devices (the optimizer alone with "zero1") and '
    'precision="bf16-true"; batch and temporaries with smaller batches, which accumulate_grad_batches adds up to the '
    'same step, more devices, precision="bf16-mixed" and, for scanned layers, jl.strategies.FSDP(remat=True).'
)


def is_exhausted(error: BaseException) -> bool:
    """Return whether an error is jax's of a device without memory left."""
    # The message of a CPU may be INTERNAL: Out of memory allocating ...
    words = ("RESOURCE_EXHAUSTED", "Out of memory")
    return isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in words)


def out_of_memory(
    error: BaseException,
    place: str,
    *,
    state: TrainState | None = None,
    batch: int | None = None,
    programs: Iterable[CompiledProgram] = (),
) -> OutOfMemoryError:
    """Return jax's error with what uses the memory, and what to do.

    Args:
        error: The error.
        place: What was compiled or run: "in train_step".
        state: The shapes, dtypes and shardings of the training state.
        batch: The bytes of a batch on a device.
        programs: Those whose temporaries may be the cause.
    """
    trees = {}
    if state is not None:
        trees = {"parameters": (state.params, state.frozen), "optimizer": state.opt_state}
        trees |= {"accumulation window": state.window, "callbacks": state.extras, "other state": state.model_state}
    parts = [(name, bytes_per_device(leaves)) for name, tree in trees.items() if (leaves := jax.tree.leaves(tree))]
    parts += [] if batch is None else [("batch", batch)]
    temporaries = []
    for program in programs:
        with contextlib.suppress(Exception):  # it cannot even be compiled, or its platform reports none
            temporaries.append((program.cost.memory.temporaries, program.name))  # type: ignore[union-attr]
    parts += [(f"temporaries of {name}", most) for most, name in sorted(temporaries)[-1:]]
    used = ", ".join(f"{name} {size(count)}" for name, count in parts)
    used = f" On the device that holds the most: {used}." if used else ""
    reason = str(error).strip().splitlines()[0].rstrip(".")[:300]
    exhausted = OutOfMemoryError(f"The devices ran out of memory {place}: {reason}.{used} {_REMEDIES}")
    exhausted.__cause__ = error
    return exhausted
