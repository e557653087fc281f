"""A run whose server fails or hangs: nothing waits for it, and one line says so."""

import errno
import json
import os
import shutil
import threading
import time
from itertools import count
from pathlib import Path

import pytest
import wandb
from kit.journal import raising
from kit.refusals import refuses
from kit.waiting import held, interrupts
from kit.wandb_runs import STEP, FakeRun

from jaxlit.reporting import wandb_run
from jaxlit.reporting.wandb_run import WandbError, WandbRun

SYNC = "later: wandb sync /there"
fail = raising(RuntimeError, "the service is gone\nand more")


@pytest.fixture(autouse=True)
def no_service(monkeypatch):
    monkeypatch.setattr(wandb_run, "MARGIN", 0.0)
    monkeypatch.setattr(wandb, "teardown", lambda: None)


def log(run, row, what=None):
    run.do(lambda: run.run.log(row() if callable(row) else row), what)


def send(run, rows=1, timeout=30.0, **given):
    """Log rows to a run, which is then finished."""
    result = WandbRun(run, timeout, **({"raises": False} | given))
    result.do(lambda: run.define_metric(STEP))
    for step in range(rows):
        log(result, {"loss": 1.0, STEP: step})
    result.finish(failed=False)
    return result


def test_rows_are_sent_in_order_by_another_thread(capsys):
    run, own = FakeRun(), FakeRun()
    send(run, 100)
    assert [row[STEP] for row in run.rows] == list(range(100)) and run.codes == [0]
    assert len(run.threads) == 1 and threading.current_thread() not in run.threads
    send(own, finishes=False)
    assert len(own.rows) == 1 and own.codes == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("call", ["log", "define", "finish"])
def test_a_failure_is_printed_once_or_raised_if_asked(call, capsys):
    run = FakeRun(**{call: fail})
    send(run, 3)
    off, unfinished = "off for the rest of this run (the service is gone)", "the upload did not finish"
    expected = {"finish": f"{unfinished} (the service is gone); {SYNC}"}.get(call, off)
    assert capsys.readouterr().out.splitlines() == [f"W&B: {expected}"]
    assert len(run.rows) == {"log": 1, "define": 0, "finish": 3}[call] and run.codes == [0]
    refuses(WandbError, lambda: send(FakeRun(**{call: fail}), raises=True), "the service is gone")
    run = WandbRun(FakeRun(log=fail), 30.0, raises=True)
    log(run, {})
    assert run._queue.wait_idle(30)
    refuses(WandbError, lambda: log(run, {}), "the service is gone")  # at a later row already
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("call", ["log", "finish"])
def test_a_call_that_hangs_is_left_and_prints_nothing_later(call, capsys):
    returned = []
    with held() as release:
        run = FakeRun(**{call: lambda *row: returned.append(release.wait(30)) or fail()})
        result = send(run, 50, 0.1)
        assert returned == []
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("W&B: the upload did not finish (no end after") and line.endswith(SYNC)
    assert result._queue.wait_idle(30) and run.codes == [0]
    assert len(run.rows) == (1 if call == "log" else 50) and capsys.readouterr().out == ""


def test_a_run_that_lags_behind_too_far_is_given_up(monkeypatch, capsys):
    monkeypatch.setattr(wandb_run, "_MAX_WAITING", 20)
    with held() as release:
        run = FakeRun(log=lambda row: release.wait(30))
        result = WandbRun(run, 30.0, raises=False)
        for step in range(50):
            log(result, {STEP: step})
        assert capsys.readouterr().out == "W&B: off for the rest of this run (it is 20 rows behind)\n"
    result.finish(failed=True)
    assert len(run.rows) <= 1 and run.codes == [1] and capsys.readouterr().out == ""


def test_a_failure_of_media_is_printed_once_and_stops_no_rows(capsys):
    """The SDK writes an image when it is made, and each file has another path."""
    paths = count()

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"/there/{next(paths)}.png")

    run = FakeRun(log=lambda row: fail() if "note" in row else None)
    result = WandbRun(run, 30.0, raises=False)
    for step in range(3):
        log(result, {"note": "a text"}, what="note")
        log(result, full, what="image")
        log(result, {STEP: step})
    result.finish(failed=False)
    assert [row[STEP] for row in run.rows if STEP in row] == [0, 1, 2]
    assert len(run.rows) == 6 and next(paths) == 3  # each may succeed
    expected = ["W&B: note was not sent (the service is gone)", "W&B: image was not sent (No space left on device)"]
    assert capsys.readouterr().out.splitlines() == expected


def test_ctrl_c_leaves_a_run_that_finishes(capsys):
    returned = []
    with held() as release, interrupts() as interrupt:
        # The main thread waits by then: a signal just before a wait for a lock is seen only after it.
        run = FakeRun(finish=lambda: time.sleep(0.2) or interrupt() or returned.append(release.wait(30)))
        with pytest.raises(KeyboardInterrupt):
            send(run, 1, 25.0)
        assert run.codes == [0] and returned == []
    assert capsys.readouterr().out == f"W&B: the upload was interrupted; {SYNC}\n"


def upload(run, step, *, lasts=False):
    folder = Path(f"checkpoints/step_{step:08}")
    (folder / "arrays").mkdir(parents=True)
    (folder / "arrays/0").write_bytes(bytes([step]))
    (folder / "state.json").write_text(json.dumps({"global_step": step, "epoch": 1}))
    run.log_checkpoint(folder, name="model", aliases=["latest", str(step)], metadata={}, lasts=lasts)


def test_a_checkpoint_may_be_deleted_once_it_is_taken():
    result = WandbRun(run := FakeRun(), 30.0, raises=False)
    for step in (1, 2):
        upload(result, step)
    assert result._queue.wait_idle(30)  # the SDK has its copies
    shutil.rmtree("checkpoints/step_00000001")
    upload(result, 3, lasts=True)
    result.finish(failed=False)
    assert run.sent == ["1", "2", "3"]
    assert sorted(path.name for path in Path("checkpoints").iterdir()) == ["step_00000002", "step_00000003"]


def test_a_refused_upload_is_printed_or_raised_if_asked(capsys):
    def late(timeout):
        raise RuntimeError("not yet") from TimeoutError()

    refused = raising(ValueError, "the server is full")
    for arrives, line in ((refused, "W&B: step_00000004 was not sent (the server is full)\n"), (late, "")):
        upload(run := WandbRun(FakeRun(arrives=arrives), 30.0, raises=False), 4)
        run.finish(failed=False)
        assert capsys.readouterr().out == line
        shutil.rmtree("checkpoints")
    upload(run := WandbRun(FakeRun(arrives=refused), 30.0, raises=True), 5)
    refuses(WandbError, lambda: run.finish(failed=False), "the server is full")


def test_a_checkpoint_that_cannot_be_read_is_printed_once(capsys):
    run = FakeRun()
    result = WandbRun(run, 30.0, raises=False)
    for _ in range(2):
        result.log_checkpoint(Path("step_00000001"), name="model", aliases=["x"], metadata={}, lasts=True)
    result.finish(failed=False)
    assert capsys.readouterr().out == "W&B: step_00000001 was not sent (No such file or directory)\n"
    assert run.sent == []
