"""How long the steps of a run took to compile."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxlit.core.stage import STAGES

_EVENTS = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")
_STEPS = {stage.program for stage in STAGES.values()} | {"train_step_traced", "micro_step", "train_steps"}


class CompileLog(dict[str, float]):
    """Seconds of tracing, lowering and compiling of each kind of step, in the order of their first compile.

    Args:
        changed: Called after each change.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._changed = changed

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to jax inside the block, and add up."""

        def listen(event: str, duration_secs: float, **details: Any) -> None:
            # Named train_step while it is traced, jit(train_step) later.
            name = str(details.get("fun_name")).removeprefix("jit(").removesuffix(")")
            # A strategy may compile a step in parts: train_step_fwd_0.
            step = max((x for x in _STEPS if name == x or name.startswith(f"{x}_")), key=len, default=None)
            if step is not None and event.rpartition("/")[2] in _EVENTS:
                self[step] = self.get(step, 0.0) + duration_secs
                self._changed()

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
