"""One process of several fails or dies: all end soon, and say which one, where and why."""

import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.journal import hooks
from kit.processes import Ended, launch, say
from kit.trainers import BARE, make_trainer, thinned

import jaxlit as jl
from jaxlit.distributed.fate import Failure, Fate

AT = 6  # the optimizer step after which the fault comes
DEAD_AFTER = 8.0  # in place of 30 s


def fault_here() -> tuple[str, bool]:
    """Return what this process fails of, and whether a save is in flight then: the environment has them.

    `<kind> <process or "all">[ saving]`; the processes of a job get equal arguments.
    """
    kind, process, *saving = os.environ["FAULT"].split()
    return kind if process in (str(jax.process_index()), "all") else "", bool(saving)


class Rows:
    """A loader without a length, each process with its own rows."""

    def __init__(self, count: int) -> None:
        self.fault, self.count = fault_here()[0], count

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for k in range(self.count):
            if k == AT and self.fault == "loader":
                raise OSError("the file is gone")
            yield {"x": np.full((4, 3), 1.0 + k + jax.process_index(), np.float32)}


class Net(jl.TrainModule):
    def __init__(self) -> None:
        self.w, is_large = nnx.Param(jnp.ones(3)), os.environ["FAULT"].startswith("disk")
        size = 2**20 if is_large else 1
        self.large = nnx.List([nnx.Param(jnp.ones(size)) for _ in range(2)])  # of which each process saves one

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        if fault_here()[0] == "compile":
            raise TypeError("no such layer")
        return jnp.mean(batch["x"] @ self.w[...]) + sum(jnp.mean(x[...]) for x in self.large)

    def configure_optimizers(self) -> optax.GradientTransformation:
        if fault_here()[0] == "configure_optimizers":
            raise KeyError("no rate")
        return optax.sgd(1e-3)


class Faulty(jl.Callback):
    """Fails in one process, after `AT` steps; with a save in flight, which all have begun."""

    runs_last = True

    def __init__(self) -> None:
        (self.fault, self.saving), self.save = fault_here(), None

    def on_safe_point(self, trainer: Any, module: Any, epoch_over: bool, training_over: bool) -> None:
        if trainer.global_step != AT or epoch_over:
            return
        if self.fault == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
        if self.saving:
            self.save = trainer.saver.begin("kept")
            if os.environ["FAULT"].startswith("disk"):
                self.save.wait()
        if self.fault in ("", "loader", "export"):
            return
        os.write(2, f"FAULT {time.time()}\n".encode())
        if self.fault == "exit":
            sys.exit(3)
        if self.fault == "holding":
            exponent, begun = 10**6, time.monotonic()
            while time.monotonic() - begun < 2.0:  # longer than from one beat to the next
                exponent, begun = 2 * exponent, time.monotonic()
                assert 3**exponent > 0  # no other thread runs meanwhile
            return
        if self.fault == "collective":
            jax.experimental.multihost_utils.process_allgather(np.ones(1))
        numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
        if self.fault in numbers:
            os.kill(os.getpid(), numbers[self.fault])
        raise ValueError("bad sample 123")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        say("raised", type(exception).__name__)
        if self.fault == "on_exception":
            raise ValueError("raised in on_exception")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if self.save is not None:
            self.save.wait()
        if self.fault == "teardown":
            raise ValueError("raised in teardown")


def train(batches: int = 200, **more: Any) -> None:
    say("began", socket.gethostname())
    given = BARE | {"strategy": "ddp", "max_epochs": 1, "fail_timeout": 4.0, "num_sanity_val_steps": 0}
    trainer = make_trainer(Faulty(), **given | more)
    rows = {"x": np.ones((8 * batches, 3), np.float32)}
    # The arrays need no agreement: a process that waits for another one is in a collective.
    trainer.fit(Net(), jl.ArrayLoader(rows, 8) if os.environ["FAULT"].startswith("kill") else Rows(batches))
    say("done", trainer.global_step)


def train_shortly() -> None:
    train(AT + 4)


def run(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch, work: Any = train, **more: Any) -> list[Ended]:
    monkeypatch.setenv("FAULT", fault)
    return launch(work, folder, devices=2, **{"grace": 60.0, "dead_after": DEAD_AFTER} | more)


def last_line(ended: Ended) -> str:
    return ended.errors.strip().splitlines()[-1]


def check(fault: str, ended: list[Ended], text: str, codes: list[int | None]) -> None:
    assert [one.code for one in ended] == codes, "\n\n".join(one.errors[-3000:] for one in ended)
    for code, one in zip(codes, ended, strict=True):
        if code is not None and code > 0:
            assert re.search(text, last_line(one)), one.errors[-3000:]
        assert "done" not in one.said or fault.startswith("export")


def here(index: int, reason: str) -> str:
    return rf"jaxlit: process {index} on {re.escape(socket.gethostname())} {reason}"


# By the fault: the process, the exit codes, and what the last line of each process that has ended by itself says.
RAISED = r"failed in Faulty\.on_safe_point in epoch 0, batch 6 \(global_step 6\): ValueError: bad sample 123"
SILENT = rf"gave no sign of life for {DEAD_AFTER:g} s"
CASES: dict[str, tuple[list[int | None], str]] = {
    "hook 1": ([1, 1], here(1, RAISED)),
    "hook 0": ([1, 1], here(0, RAISED)),
    "loader 1": ([1, 1], here(1, r"failed in Trainer\.fit\(.*\) in epoch 0, batch 6: OSError: the file is gone")),
    "configure_optimizers 1": ([1, 1], here(1, r"failed in Net\.configure_optimizers: KeyError: 'no rate'")),
    "compile 1": ([1, 1], here(1, r"failed after step 0 of epoch 0: TypeError: no such layer")),
    "on_exception 1": ([1, 1], here(1, RAISED)),
    "teardown 1": ([1, 1], here(1, RAISED)),
    "hook all": ([1, 1], here(0, RAISED) + "|" + here(1, RAISED)),
    "exit 1": ([1, 3], here(1, r"failed in .*: SystemExit: 3")),
    "disk 1 saving": ([1, 1], r"process \d on .*CheckpointError: .*kept could not be written: process 1: "),
    "kill 1": ([75, -signal.SIGKILL], here(1, f"{SILENT}; it was last seen ")),
    "kill 0": (
        [-signal.SIGKILL, 75],
        r"jaxlit: process 0, which coordinates the job, is gone; process 1 on .* was after",
    ),
    "stop 1": ([75, None], here(1, f"{SILENT}; it was last seen ")),
    "stop 0": ([None, 75], f"jaxlit: process 0 {SILENT}; process 1 on .* was after"),
}
IN_A_SAVE = ("hook 1", "loader 1", "on_exception 1", "teardown 1", "exit 1", "kill 1", "kill 0")
CASES |= {f"{fault} saving": CASES[fault] for fault in IN_A_SAVE}
FULL = ("compile 1", "disk 1 saving", "exit 1", "kill 0", "kill 1")


@pytest.mark.parametrize("fault", thinned(CASES, "hook 1 saving", full=FULL))
def test_a_fault_of_one_process_ends_both(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, text = CASES[fault]
    grace = 20.0 if None in codes else 60.0  # one that is stopped never ends
    check(fault, ended := run(fault, tmp_path, monkeypatch, grace=grace), text, codes)
    if fault.startswith("hook") and "all" not in fault:  # the thread may end a process that is in a collective
        assert ended[1 - int(fault.split()[1])].said.get("raised", "PeerError") == "PeerError"


def test_what_jax_raises_as_a_peer_has_failed_is_a_peer_error() -> None:
    fate = Fate(None, 0, 2, "a:1")
    broken = RuntimeError("INTERNAL: [external/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")
    assert fate.explained(broken) is broken
    fate.failure = Failure("process 1 on b failed after step 6: ValueError: bad sample 123", 1, False)
    error = fate.explained(broken)
    assert isinstance(error, jl.errors.PeerError) and error.__cause__ is broken and "bad sample 123" in str(error)
    for other in (RuntimeError("INTERNAL: no memory"), KeyError("gloo")):
        assert fate.explained(other) is other
    fate._error = broken  # this process has failed itself, and first
    assert fate.explained(broken) is broken


def test_an_abort_by_gloo_waits_for_the_reason_of_a_peer(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        fate = Fate(None, 0, 2, f"127.0.0.1:{coordinator.getsockname()[1]}")
        failure = Failure("process 1 on b failed after step 6: ValueError: bad sample 123", 1, False)
        threading.Timer(0.2, lambda: setattr(fate, "failure", failure)).start()
        assert fate._aborted() == 1
    assert "jaxlit: process 1 on b failed after step 6: ValueError: bad sample 123" in capfd.readouterr().err


@pytest.mark.full
def test_two_of_three_processes_name_the_one_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = run("kill 2", tmp_path, monkeypatch, count=3)
    check("kill 2", ended, here(2, SILENT), [75, 75, -signal.SIGKILL])


@pytest.mark.full
def test_a_clean_end_of_two_processes_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in run("none 9", tmp_path, monkeypatch, train_shortly):
        assert one.code == 0
        assert one.errors == ""
        assert one.said["done"] == AT + 4


def export() -> None:
    """Train to the end, and fail afterwards in one process, as the other one has ended."""
    train(AT + 4)
    if fault_here()[0] == "export":
        raise RuntimeError("no such bucket")


def leave_before() -> None:
    if jax.process_index() == 1:
        sys.exit(2)
    train()


def outside() -> None:
    """Fail before a run, of which the other process knows nothing."""
    if jax.process_index() == 1:
        raise RuntimeError("no such folder")
    train()


@pytest.mark.full
@pytest.mark.parametrize(
    ("work", "fault", "text"),
    [
        *((export, f"export {i}", here(i, "failed outside of a run: RuntimeError: no such bucket")) for i in (0, 1)),
        (leave_before, "none 9", "ProcessError: Process 1 has ended, and does not come to "),
        (outside, "none 9", here(1, "failed outside of a run: RuntimeError: no such folder")),
    ],
)
def test_an_end_outside_of_a_run_ends_all_with_its_reason(
    work: Any, fault: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(fault, run(fault, tmp_path, monkeypatch, work), text, [1, 1])


def fail_slowly() -> None:
    """Take two seconds in `teardown` after an error, in which something is written."""

    def slow(trainer: Any, module: Any, stage: str) -> None:
        if fault_here()[0]:
            end = time.monotonic() + 2.0
            while time.monotonic() < end:
                pass
            say("written", True)

    given = BARE | {"strategy": "ddp", "max_epochs": 1, "num_sanity_val_steps": 0}
    make_trainer(Faulty(), hooks(teardown=slow), **given).fit(Net(), Rows(200))


@pytest.mark.full
def test_a_process_that_fails_has_time_for_its_teardown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = run("hook 1", tmp_path, monkeypatch, fail_slowly)
    check("slow", ended, here(1, RAISED), [1, 1])
    assert ended[1].said["written"]
    assert "Traceback" in ended[1].errors


def hang() -> None:
    train(hang_timeout=12.0)


@pytest.mark.full
def test_a_collective_of_one_process_ends_all_by_hang_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = run("collective 1", tmp_path, monkeypatch, hang)
    codes = [one.code for one in ended]
    assert 76 in codes and {*codes} <= {75, 76}, "one finds it, or both at once"
    check("hang", ended, r"process \d on .* failed .*: TimeoutError: nothing moved", codes)


@pytest.mark.full
def test_a_long_call_that_holds_the_interpreter_is_no_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = run("holding 1", tmp_path, monkeypatch, train_shortly, dead_after=15.0)
    assert [one.code for one in ended] == [0, 0], ended[0].errors + ended[1].errors


def test_jax_must_wait_longer_than_a_death_takes() -> None:
    with pytest.raises(jl.errors.ArgumentError, match=r"heartbeat_timeout=20, dead_after=30.*larger than dead_after"):
        jl.distributed.initialize("a:1", 2, 0, heartbeat_timeout=20)
    with pytest.raises(jl.errors.ArgumentError, match="shutdown_timeout=30"):
        jl.distributed.initialize("a:1", 2, 0, shutdown_timeout=30)
