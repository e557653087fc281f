"""How long the steps of a run took to compile."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from jaxlit.core.stage import STAGES

_EVENTS = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")
_STEPS = {stage.program for stage in STAGES.values()} | {"train_step_traced", "micro_step"}


class CompileLog:
    """Listens to jax while it is open, and adds up tracing, lowering and compiling of each kind of step.

    Attributes:
        seconds: Seconds by the step's name, in order of their first compile.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> "CompileLog":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Add up nothing inside the block."""
        kept = dict(self.seconds)
        try:
            yield
        finally:
            self.seconds = kept

    def _listen(self, event: str, duration_secs: float, **details: Any) -> None:
        # Named train_step while it is traced, jit(train_step) later.
        name = str(details.get("fun_name")).removeprefix("jit(").removesuffix(")")
        # A strategy may compile a step in parts: train_step_fwd_0.
        step = max((x for x in _STEPS if name == x or name.startswith(f"{x}_")), key=len, default=None)
        if step is not None and event.rpartition("/")[2] in _EVENTS:
            self.seconds[step] = self.seconds.get(step, 0.0) + duration_secs
