"""The same training without W&B, and with a W&B that fails in eight ways: every one ends with the same weights.

    python tests/sweeps/wandb_faults.py [a fault's name ...]

Each training is a process with images, tables, histograms and checkpoints sent to a server on this computer. Prints
what W&B cost and said in each, and fails if a number, a file, an exit code or the time is not as it must be.
"""

import contextlib
import dataclasses
import hashlib
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

TIMEOUTS = {(5, 5): 30.0, (20, 60): 120.0}  # those of start and end, and the most seconds that W&B may add
EPOCHS, MIDDLE = 8, 8  # of 2 steps each; the step in the middle
_MIB = 2**20


@dataclass(frozen=True)
class Outcome:
    """How a training ended.

    Args:
        code: Its exit code.
        state: A hash of its final state, bit by bit.
        files: What its loggers wrote.
        seconds: How long it took, without the waiting for a fault to begin.
        told: The lines about what is wrong with W&B.
        output: All that it printed.
        errors: Its standard error.
    """

    code: int | None
    state: str
    files: list[bytes]
    seconds: float
    told: list[str]
    output: str
    errors: str

    def problems(self, plain: "Outcome", limit: float, lines: int = 1) -> list[str]:
        """Return what is not as in the training without W&B."""
        found = [] if self.code == 0 else [f"exit code {self.code}"]
        found += [name for name in ("state", "files") if getattr(self, name) != getattr(plain, name)]
        # An upload may fail for the reason for which rows are given up, and be told of by the thread that sends it.
        given_up = {line.rpartition("(")[2] for line in self.told if line.startswith("W&B: off")}
        told = [x for x in self.told if "was not sent (" not in x or x.rpartition("(")[2] not in given_up]
        found += [] if len(told) == lines else [f"{len(told)} lines of W&B"]
        found += ["standard error"] if self.errors else []
        added = self.seconds - plain.seconds
        return found + ([f"{added:.1f} s more"] if added > limit else [])


@dataclass(frozen=True)
class Fault:
    """What is wrong with W&B.

    Args:
        at: Where it begins: "start", the "middle" or the "end" of training.
        server: What happens to the server there.
        env: What changes in the environment.
        told: What the child must know.
    """

    at: str = "start"
    server: Callable[[Any], object] = lambda backend: None
    env: Callable[[], dict[str, str]] = dict
    told: dict[str, Any] = dataclasses.field(default_factory=dict)


def _answer(fault: str) -> Callable[[Any], None]:
    return lambda backend: setattr(backend, "fault", fault)


def _closed_port() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"WANDB_BASE_URL": f"http://127.0.0.1:{free.getsockname()[1]}"}


FAULTS = {
    "no key": Fault(env=lambda: {"WANDB_API_KEY": ""}),
    "wrong key": Fault(server=_answer("401")),
    "unreachable server": Fault(env=_closed_port),
    "server answers 500": Fault(server=_answer("500")),
    "server dies in the middle": Fault("middle", _answer("drop")),
    "finish hangs": Fault("end", _answer("hang")),
    "log raises": Fault(told={"raises": True}),
    "full disk": Fault(told={"full": True}),
}


def run(folder: Path, fault: Fault | None, timeouts: tuple[float, float] = (5, 5), limit: float = 300.0) -> Outcome:
    """Train in a process of its own.

    Args:
        folder: Where, a new folder.
        fault: What is wrong with W&B; None to train without it.
        timeouts: Those of the logger, for the start and the end.
        limit: Seconds after which it is killed.
    """
    from wandb_backend import Backend

    folder.mkdir(parents=True)
    point, go = folder / "point", folder / "go"
    told: dict[str, Any] = {"wandb": fault is not None, "timeouts": timeouts}
    with contextlib.ExitStack() as stack:
        backend = stack.enter_context(Backend())
        env = backend.env(folder) | {"JAX_PLATFORMS": "cpu"}
        env.pop("XLA_FLAGS", None)
        if fault is not None:
            env |= fault.env()
            told |= fault.told | {"at": fault.at if fault.at != "start" else None}
            if fault.at == "start":
                fault.server(backend)
        if told.get("full"):
            told["disk"] = stack.enter_context(_small_disk(folder / "disk"))
        output, errors = (stack.enter_context((folder / name).open("w+")) for name in ("output", "errors"))
        start, waited = time.monotonic(), 0.0
        child = subprocess.Popen(
            [sys.executable, __file__, "child", json.dumps(told)],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        try:
            while child.poll() is None and time.monotonic() - start < limit:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=0.05)
                if fault is not None and point.exists() and not go.exists():
                    before = time.monotonic()
                    fault.server(backend)
                    waited = time.monotonic() - before
                    go.touch()
        finally:
            code = child.poll()
            if code is None:
                child.kill()
                child.wait()
        seconds = time.monotonic() - start - waited
        texts = [(folder / name).read_text() for name in ("output", "errors")]
    lines = texts[0].splitlines()
    told_of = [line for line in lines if "W&B" in line and not line.startswith("W&B http")]
    files = [(folder / "run" / name).read_bytes() for name in ("metrics.csv", "metrics.jsonl")]
    state = next((line for line in lines if line.startswith("state ")), "")
    return Outcome(code, state, files, seconds, told_of, *texts)


@contextlib.contextmanager
def _small_disk(path: Path) -> Iterator[str | None]:
    """Give a disk that is nearly full; None where no disk can be mounted."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        yield None
        return
    try:
        (path / "other").write_bytes(bytes(_MIB - 160 * 1024))
        yield str(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, capture_output=True)


# The process that trains -------------------------------------------------------------------------------


def train(told: dict[str, Any]) -> None:
    """Train, and print a hash of the final state."""
    import jax
    import numpy as np
    from flax import nnx
    from wandb_model import Line, data

    import jaxlit as jl
    from jaxlit.callbacks import CSVLogger, JSONLLogger, ModelCheckpoint, WandbLogger

    class Point(jl.Callback):
        """Waits, where the fault is to begin, until it has."""

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if told.get("at") == "middle" and trainer.global_step == MIDDLE:
                self.wait()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            if told.get("at") == "end":
                self.wait()

        def wait(self) -> None:
            Path("point").touch()
            deadline = time.monotonic() + 120
            while not Path("go").exists() and time.monotonic() < deadline:
                time.sleep(0.01)

    class Media(jl.Callback):
        """Logs what is no number at the end of each epoch."""

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            for logger in (c for c in trainer.callbacks if isinstance(c, WandbLogger)):
                logger.log_image("image", np.random.default_rng(0).random((60, 60, 3)))
                logger.log_table("table", ["a"], [[1], [2]])
                logger.log_text("text", "a text " * 1000)

    class Limit(jl.Callback):
        """Lets no process that is started write more than a few kB to a file."""

        def __init__(self, size: int) -> None:
            self.size = size

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))

    callbacks: list[Any] = [Point(), Media(), CSVLogger(), JSONLLogger(), ModelCheckpoint(save_top_k=-1)]
    if told["wandb"]:
        start, end = told["timeouts"]
        logger = WandbLogger(
            "faults",
            log_model="all",
            watch="all",
            watch_every_n_steps=2,
            init_timeout=start,
            finish_timeout=end,
            save_dir=told.get("disk"),
        )
        callbacks[:0] = [logger]
        if told.get("full") and told["disk"] is None:
            callbacks[:1] = [Limit(8192), logger, Limit(resource.RLIM_INFINITY)]
    if told.get("raises"):
        import wandb

        log, count = wandb.Run.log, iter(range(10**9))

        def failing(self: Any, *args: Any, **given: Any) -> None:
            if next(count) >= 10:
                raise RuntimeError("log raises on request")
            log(self, *args, **given)

        wandb.Run.log = failing
    trainer = jl.Trainer(
        strategy="single", max_epochs=EPOCHS, log_every_n_steps=1, callbacks=callbacks, default_root_dir="run"
    )
    trainer.fit(Line(rngs=nnx.Rngs(0)), data(), data())
    digest = hashlib.sha256()
    for x in jax.tree.leaves(trainer.state):
        digest.update(np.asarray(x).tobytes())
    print(f"state {digest.hexdigest()}")


def main(names: list[str]) -> int:
    """Run all; returns how many trainings were not as they must be."""
    failed, count = 0, 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        plain = run(root / "plain", None)
        if plain.code != 0:
            print(f"The training without W&B ended with {plain.code}: {plain.output}{plain.errors}")
            return 1
        print(f"without W&B: {plain.seconds:.1f} s, {plain.state[:20]}")
        for timeouts, limit in TIMEOUTS.items():
            for fault in names or ["none", *FAULTS]:
                found = run(root / f"{fault}{timeouts}", FAULTS.get(fault, Fault()), timeouts)
                problems = found.problems(plain, limit, lines=int(fault != "none"))
                count, failed = count + 1, failed + bool(problems)
                added = found.seconds - plain.seconds
                print(f"{timeouts!s:<9}{fault:<26}{added:>6.1f} s  {', '.join(problems) or 'ok'}", flush=True)
                for line in found.told:
                    print(f"{'':<12}{line}")
                if problems:
                    print(found.output[-1500:], found.errors[-1500:], sep="\n")
    print(f"{count} trainings, {failed} of them not as without W&B")
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        train(json.loads(sys.argv[2]))
    else:
        sys.exit(min(main(sys.argv[1:]), 1))
