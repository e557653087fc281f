"""The processes of a training run the same thing, or each of them is refused before the first step."""

import hashlib
import json
import os
import platform
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib.version
import numpy as np
import optax
from jax.extend.source_info_util import summarize
from jax.stages import Traced

from jaxlit.distributed.team import team
from jaxlit.errors import ProcessError
from jaxlit.programs.jaxpr import described
from jaxlit.version import __version__

# Of jax's settings those that change numbers, or what is raised.
JAX_SETTINGS = (
    *("jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_default_matmul_precision"),
    *("jax_default_prng_impl", "jax_threefry_partitionable", "jax_random_seed_offset"),
    *("jax_use_shardy_partitioner", "jax_disable_jit", "jax_debug_nans", "jax_debug_infs"),
)
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_MOST_ITEMS, _MOST_TEXT, _MOST_FRAMES = 8, 160, 1000
_LIBRARY = str(Path(__file__).parents[1])


def same_job(
    topic: str,
    make_items: Callable[[], Mapping[str, str]],
    *,
    most: int = _MOST_ITEMS,
    place: Callable[[str], str] = lambda name: "",
) -> None:
    """Refuse in every process what is not the same in all of them. One process alone makes no items.

    Only a digest is exchanged as long as the items are equal.

    Args:
        topic: What the items are of, for messages.
        make_items: Returns what must be the same, a text by its name.
        most: How many items that differ are named.
        place: Returns where an item is in the user's code; places may differ.

    Raises:
        ProcessError: Items differ, with their names, values, processes and hosts.
    """
    processes = team()
    if processes.size == 1:
        return
    items = make_items()
    digests = processes.agree(topic, _digest(sorted(items.items())))
    kinds = list(dict.fromkeys(digests))
    if len(kinds) == 1:
        return
    # From here on all processes exchange the same things, as each has the same digests. First one digest for each item
    # of each kind of process: the text of a program may take megabytes.
    leads = [digests.index(kind) for kind in kinds]
    mine = {name: _digest(text) for name, text in items.items()} if processes.index in leads else None
    tables = [x for x in processes.agree(f"{topic}: what differs", mine) if x is not None]
    names = [x for x in dict.fromkeys(x for table in tables for x in table) if len({t.get(x) for t in tables}) > 1]
    values = {name: [items.get(name, "nothing"), place(name) if name in items else ""] for name in names[:most]}
    told = processes.agree(f"{topic}: the values", [socket.gethostname(), values])
    lines = [f"  {name}: {_compared([x[name] for _, x in told], [host for host, _ in told])}" for name in values]
    if most > 1 and len(names) > most:
        lines.append(f"  and {len(names) - most} more")
    error = ProcessError(
        "The processes do not run the same training. Start the same script with the same arguments and libraries in "
        f"each. What differs in {topic}:\n" + "\n".join(lines)
    )
    processes.same_error(f"{topic}: it differs", error)  # by which every process raises it


def same_program(name: str, make_program: Callable[[], Any], step: Any = None) -> None:
    """Refuse in every process a program that is not the same in all of them; to be called before it is compiled.

    Learning rates and seeds are constants in it.

    Args:
        name: Its name.
        make_program: Returns its trace, a `jax.stages.Traced` or a `ClosedJaxpr`; None if jax cannot trace it.
        step: The trace of the user's step in it, None for none: there, equations have their places in the user's code.

    Raises:
        ProcessError: It differs, with the first equation that does, and where that is.
    """
    if team().size == 1:
        return
    program = make_program()
    traces = {"the user's step": step, name: program.jaxpr if isinstance(program, Traced) else program}
    parts = {
        f"equation {k} of {title}": part
        for title, closed in traces.items()
        for k, part in enumerate(() if closed is None else described(closed))
    }
    texts = {key: text for key, (text, _) in parts.items()}
    same_job(f"the program {name}", lambda: texts, most=1, place=lambda key: _place(parts[key][1]))


def environment() -> dict[str, str]:
    """Return the versions, the settings of jax and XLA, and the devices that a process's numbers depend on."""
    libraries: Sequence[Any] = (jax, flax, optax, np)
    versions = {library.__name__: library.__version__ for library in libraries} | {"jaxlib": jaxlib.version.__version__}
    config = {name: str(jax.config.values.get(name)) for name in JAX_SETTINGS}  # type: ignore[attr-defined]
    # What is dumped, and where, changes no number.
    flags = {name: " ".join(sorted(x for x in os.environ.get(name, "").split() if "dump" not in x)) for name in _FLAGS}
    kinds = [device.device_kind for device in jax.local_devices()]
    devices = {"local devices": ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))}
    return {"python": platform.python_version(), "jaxlit": __version__} | versions | config | flags | devices


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _compared(values: Sequence[Sequence[str]], hosts: Sequence[str]) -> str:
    """Return the values of an item, each with its place in the code and the processes that have it."""
    texts, processes = [text for text, _ in values], dict[str, list[int]]()
    for process, text in enumerate(texts):
        processes.setdefault(text, []).append(process)
    same = (len(set(letters)) == 1 for letters in zip(*processes, strict=False))
    begins = max(len(list(takewhile(bool, same))) - _MOST_TEXT // 2, 0)  # of a long text what is around the difference
    result = []
    for text, indices in processes.items():
        shown = "..." * (begins > 0) + text[begins : begins + _MOST_TEXT] + "..." * (len(text) > begins + _MOST_TEXT)
        named = ", ".join(f"process {i} ({hosts[i]})" for i in indices[:3])
        more = f" and {len(indices) - 3} more" * (len(indices) > 3)
        result.append(f"{shown}{values[indices[0]][1]} in {named}{more}")
    return "; ".join(result)


def _place(eqn: Any) -> str:
    """Return where an equation is in the user's code, in parentheses."""
    if eqn is None:
        return ""
    # Lines "file:line:column (function)", the innermost frame first. What is further out than jaxlit is the line that
    # has called the Trainer, for every equation.
    frames = reversed(summarize(eqn.source_info, num_frames=_MOST_FRAMES).splitlines())
    inner = list(takewhile(lambda frame: not frame.startswith(_LIBRARY), frames))
    users = [frame for frame in inner if "site-packages" not in frame]
    places = [re.match(r".+?:\d+", frame.rpartition("site-packages/")[2]) for frame in users or inner]
    return f" ({places[0][0]})" if places and places[0] else ""
