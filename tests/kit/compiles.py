"""What is compiled meanwhile."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def compiles() -> Iterator[list[str]]:
    """List what is compiled inside the block."""
    result: list[str] = []

    def listen(event: str, seconds: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            result.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield result
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
