"""The same training without W&B, and with a W&B that fails in eight ways: every one ends with the same weights.

    python tests/sweeps/wandb_faults.py [a fault's name ...]

Each training is a process with images, tables, histograms and checkpoints sent to a server on this computer. Prints
what W&B cost and said in each, and fails if a number, a file, an exit code or the time is not as it must be.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

if TYPE_CHECKING:
    from kit.processes import Ended

TIMEOUTS = {(5, 5): 30.0, (20, 60): 120.0}  # those of start and end, and the most seconds that W&B may add
EPOCHS, MIDDLE = 8, 8  # of 2 steps each; the step in the middle
NOWHERE = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Fault:
    """What is wrong with W&B.

    Args:
        server: What the server does.
        at: Where that begins: "start", the "middle" or the "end" of training.
        env: What is another in the environment.
        raises: Whether logging raises from some row on.
        full: Whether the disk is nearly full.
    """

    server: str | None = None
    at: str = "start"
    env: dict[str, str] = field(default_factory=dict)
    raises: bool = False
    full: bool = False


FAULTS = {
    "no key": Fault(env={"WANDB_API_KEY": ""}),
    "wrong key": Fault("401"),
    "unreachable server": Fault(env={"WANDB_BASE_URL": NOWHERE}),
    "server answers 500": Fault("500"),
    "server dies in the middle": Fault("drop", "middle"),
    "finish hangs": Fault("hang", "end"),
    "log raises": Fault(raises=True),
    "full disk": Fault(full=True),
}


def run(folder: Path, fault: Fault, timeouts: tuple[float, float] = (5, 5)) -> "Ended":
    """Train in a process of its own, without W&B and then with it; the timeouts are those of its start and end."""
    from kit.wandb_backend import Backend
    from kit.wandb_runs import start

    told: dict[str, Any] = {"timeouts": timeouts, "raises": fault.raises}
    with Backend(fault.server if fault.at == "start" else None) as backend, contextlib.ExitStack() as stack:
        if fault.at != "start":
            told |= {"at": fault.at, "fault": f"{backend.url}/fault/{fault.server}"}
        if fault.full:
            told["disk"] = stack.enter_context(_small_disk(folder / "disk"))
        (ended,) = start(train, folder, log_to=backend, **fault.env, TOLD=json.dumps(told))
    return ended


def problems(found: "Ended", folder: Path, lines: int = 1) -> list[str]:
    """Return what is not as in the training without W&B, of which there are to be some lines about what is wrong."""
    told = told_of(found)
    # An upload may fail for the reason for which rows are given up, and be told of by the thread that sends it.
    given_up = {line.rpartition("(")[2] for line in told if line.startswith("W&B: off")}
    told = [x for x in told if "was not sent (" not in x or x.rpartition("(")[2] not in given_up]
    read = lambda name: {(folder / kind / name).read_bytes() for kind in ("plain", "run")}  # noqa: E731
    checks = {
        f"exit code {found.code}, {found.errors}": found.code == 0 and not found.errors,
        "state": found.said.get("plain") == found.said.get("run"),
        "files": found.code == 0 and all(len(read(name)) == 1 for name in ("metrics.csv", "metrics.jsonl")),
        f"{len(told)} lines of W&B": len(told) == lines,
    }
    return [name for name, right in checks.items() if not right]


def told_of(found: "Ended") -> list[str]:
    """Return the lines about what is wrong with W&B."""
    return [line for line in found.output.splitlines() if "W&B" in line and not line.startswith("W&B http")]


@contextlib.contextmanager
def _small_disk(path: Path) -> Iterator[str]:
    """Give a disk of which 160 kB are free."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], check=True)
    try:
        (path / "other").write_bytes(bytes(2**20 - 160 * 1024))
        yield str(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def train() -> None:
    """Train in this process without W&B and with it, and say hashes of both final states."""
    import jax
    import numpy as np
    from kit.processes import say
    from kit.wandb_runs import Wide, data

    import jaxlit as jl
    from jaxlit.callbacks import CSVLogger, JSONLLogger, ModelCheckpoint, WandbLogger

    told = json.loads(os.environ["TOLD"])
    limits = dict(zip(("init_timeout", "finish_timeout"), told["timeouts"], strict=True))
    watch = {"log_model": "all", "watch": "all", "watch_every_n_steps": 2}
    logger = WandbLogger("faults", save_dir=told.get("disk"), **watch, **limits)
    for name, own in (("plain", []), ("run", [logger, _more(logger, told)])):
        say(f"begin {name}", time.monotonic())
        trainer = jl.Trainer(
            strategy="single",
            max_epochs=EPOCHS,
            log_every_n_steps=1,
            callbacks=[*own, CSVLogger(), JSONLLogger(), ModelCheckpoint(save_top_k=-1)],
            default_root_dir=name,
        )
        trainer.fit(Wide(), data(), data())
        say(name, hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(trainer.state))).hexdigest())


def _more(logger: Any, told: dict[str, Any]) -> Any:
    """Return a callback that logs what is no number, and lets the fault begin."""
    from kit.journal import hooks
    from kit.wandb_runs import PIXELS

    def begin(at: str) -> None:
        if told.get("at") == at:
            urllib.request.urlopen(urllib.request.Request(told["fault"], method="POST")).close()

    def media(trainer: Any, module: Any) -> None:
        logger.log_image("image", PIXELS.repeat(12, axis=0).repeat(12, axis=1))
        logger.log_table("table", ["a"], [[1], [2]])
        logger.log_text("text", "a text " * 1000)

    if told["raises"]:
        import wandb

        log, count = wandb.Run.log, iter(range(10**9))

        def failing(self: Any, *args: Any, **given: Any) -> None:
            if next(count) >= 10:
                raise RuntimeError("log raises on request")
            log(self, *args, **given)

        wandb.Run.log = failing
    return hooks(
        on_train_batch_end=lambda trainer, *rest: begin("middle") if trainer.global_step == MIDDLE else None,
        on_train_end=lambda *all: begin("end"),
        on_train_epoch_end=media,
    )


def main(names: list[str]) -> int:
    """Run all; returns how many trainings were not as they must be."""
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        for timeouts, limit in TIMEOUTS.items():
            for fault in names or ["none", *FAULTS]:
                folder = Path(name) / f"{fault}{timeouts}"
                found = run(folder, FAULTS.get(fault, Fault()), timeouts)
                plain, begun = (found.said.get(f"begin {kind}", 0.0) for kind in ("plain", "run"))
                added = (time.monotonic() - begun) - (begun - plain)
                wrong = problems(found, folder, int(fault != "none")) + ([] if added < limit else ["the time"])
                failed += bool(wrong)
                print(f"{timeouts!s:<9}{fault:<26}{added:>6.1f} s  {', '.join(wrong) or 'ok'}", *told_of(found))
    print(f"{failed} trainings were not as without W&B")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
