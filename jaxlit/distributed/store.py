"""Exchange of values by jax's key-value store, which needs no device.

Each process writes its value and increments a counter; the last one writes a key for which the others wait. So n
processes poll nothing, and each reads all values in one request.
"""

from typing import Any

import jax


def arrive(client: Any, folder: str, index: int, size: int, value: str) -> None:
    """Give this process's value to an exchange.

    Args:
        client: jax's client of the store.
        folder: A folder of the exchange, which all processes name alike.
        index: Which process this is.
        size: How many there are.
        value: The value.
    """
    client.key_value_set(f"{folder}/value/{index}", value)
    if client.key_value_increment(f"{folder}/count", 1) == size:
        client.key_value_set(f"{folder}/all", "")


def gather(client: Any, folder: str, size: int, seconds: float) -> list[str] | None:
    """Return the values of all processes, in their order; None if some have not arrived within so many seconds."""
    try:
        client.blocking_key_value_get(f"{folder}/all", max(1, int(seconds * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None
    values = arrived(client, folder)
    return [values[process] for process in range(size)]


def arrived(client: Any, folder: str) -> dict[int, str]:
    """Return the values that are there, by process."""
    return {int(key.rsplit("/", 1)[1]): value for key, value in client.key_value_dir_get(f"{folder}/value/")}
