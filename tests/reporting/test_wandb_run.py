"""A run whose server fails or hangs: nobody waits, one line says so, and checkpoints leave no copies."""

import errno
import json
import os
import shutil
import threading
from itertools import count
from pathlib import Path

import pytest
from kit.refusals import refuses
from kit.waiting import held, interrupts
from kit.wandb_runs import STEP, FakeRun, files_of

from jaxlit.background import BackgroundQueue
from jaxlit.reporting import wandb_run
from jaxlit.reporting.wandb_run import WandbError, WandbRun

SYNC = "later: wandb sync /there"


@pytest.fixture(autouse=True)
def no_margin(monkeypatch):
    monkeypatch.setattr(wandb_run, "MARGIN", 0.0)


def fail(*args):
    raise RuntimeError("the service is gone\nand more")


def send(run, rows=1, timeout=30.0, **given):
    """Log rows to a run, which is then finished."""
    found = WandbRun(run, timeout, **({"raises": False} | given))
    found.define_metric(STEP)
    for step in range(rows):
        found.log({"loss": 1.0, STEP: step})
    found.finish(failed=False)
    return found


# Rows


def test_rows_are_sent_in_order_by_another_thread_and_a_users_own_run_stays_open(capsys):
    run, own = FakeRun(), FakeRun()
    send(run, 100)
    assert [row[STEP] for row in run.rows] == list(range(100)) and run.codes == [0]
    assert len(run.threads) == 1 and threading.current_thread() not in run.threads
    send(own, own=False)
    assert len(own.rows) == 1 and own.codes == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("call", ["log", "define", "finish"])
def test_what_fails_is_said_once_and_not_tried_again_or_raised_if_asked(call, capsys):
    run = FakeRun(**{call: fail})
    send(run, 3)
    off, unfinished = "off for the rest of this run (the service is gone)", "the upload did not finish"
    expected = {"finish": f"{unfinished} (the service is gone); {SYNC}"}.get(call, off)
    assert capsys.readouterr().out.splitlines() == [f"W&B: {expected}"]
    assert len(run.rows) == {"log": 1, "define": 0, "finish": 3}[call] and run.codes == [0]
    refuses(WandbError, lambda: send(FakeRun(**{call: fail}), raises=True), "the service is gone")
    run = WandbRun(FakeRun(log=fail), 30.0, raises=True)
    run.log({})
    assert run._rows.wait_idle(30)
    refuses(WandbError, lambda: run.log({}), "the service is gone")  # at a later row already
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("call", ["log", "finish"])
def test_what_hangs_keeps_nobody_waiting_and_says_nothing_more_when_it_goes_on(call, capsys):
    returned = []
    with held() as release:
        run = FakeRun(**{call: lambda *row: returned.append(release.wait(30)) or fail()})
        found = send(run, 50, 0.1)
        assert returned == []
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("W&B: the upload did not finish (no end after") and line.endswith(SYNC)
    assert found._rows.wait_idle(30) and run.codes == [0]
    assert len(run.rows) == (1 if call == "log" else 50) and capsys.readouterr().out == ""


def test_rows_that_there_was_no_time_for_are_said_in_one_line(monkeypatch, capsys):
    wait_idle = BackgroundQueue.wait_idle
    with held() as release:
        monkeypatch.setattr(wandb_run, "MARGIN", 30.0)
        monkeypatch.setattr(
            BackgroundQueue, "wait_idle", lambda self, timeout: release.set() or wait_idle(self, timeout)
        )
        run = FakeRun(log=lambda row: release.wait(30))
        send(run, 50, 1e-6)
    assert len(run.rows) <= 1 and run.codes == [0]
    assert capsys.readouterr().out == f"W&B: the upload did not finish (there was no time left); {SYNC}\n"


def test_a_run_that_lags_behind_too_far_is_given_up(monkeypatch, capsys):
    monkeypatch.setattr(wandb_run, "_MOST_WAITING", 20)
    with held() as release:
        run = FakeRun(log=lambda row: release.wait(30))
        found = WandbRun(run, 30.0, raises=False)
        for step in range(50):
            found.log({STEP: step})
        assert capsys.readouterr().out == "W&B: off for the rest of this run (it is 20 rows after)\n"
    found.finish(failed=True)
    assert len(run.rows) <= 1 and run.codes == [1] and capsys.readouterr().out == ""


def test_a_failure_of_what_is_no_row_of_numbers_is_said_once_and_stops_no_rows(capsys):
    """The SDK writes an image when it is made, and each file has another path."""
    paths = count()

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"/there/{next(paths)}.png")

    run = FakeRun(log=lambda row: fail() if "note" in row else None)
    found = WandbRun(run, 30.0, raises=False)
    for step in range(3):
        found.log({"note": "a text"}, what="note")
        found.log(full, what="image")
        found.log({STEP: step})
    assert found._uploads.wait_idle(30)
    found.finish(failed=False)
    assert [row[STEP] for row in run.rows if STEP in row] == [0, 1, 2]
    assert len(run.rows) == 6 and next(paths) == 3  # each may succeed
    expected = ["W&B: note was not sent (the service is gone)", "W&B: image was not sent (No space left on device)"]
    assert capsys.readouterr().out.splitlines() == expected


def test_ctrl_c_leaves_a_run_that_finishes_and_a_line_says_how_to_send_the_rest(capsys):
    returned = []
    with held() as release, interrupts() as interrupt:
        run = FakeRun(finish=lambda: interrupt() or returned.append(release.wait(30)))
        with pytest.raises(KeyboardInterrupt):
            send(run, 1, 25.0)
        assert run.codes == [0] and returned == []
    assert capsys.readouterr().out == f"W&B: the upload was interrupted; {SYNC}\n"


# Checkpoints


def checkpoint(step):
    folder = Path(f"checkpoints/step_{step:08}")
    (folder / "arrays").mkdir(parents=True)
    (folder / "arrays/0").write_bytes(bytes([step]))
    (folder / "state.json").write_text(json.dumps({"global_step": step, "epoch": 1}))
    return folder


def upload(run, step, *, lasts=False):
    run.log_checkpoint(checkpoint(step), name="model", aliases=["latest", str(step)], metadata={}, lasts=lasts)


def copies():
    return len(list(Path("checkpoints").glob(".tmp-*")))


@pytest.mark.parametrize("links", [True, False])
def test_a_copy_of_a_checkpoint_is_deleted_once_it_is_sent_and_the_checkpoint_is_as_it_was(links, monkeypatch):
    def none(*paths):
        raise OSError(errno.EPERM, "no links here")

    with held() as release:
        if not links:
            monkeypatch.setattr(os, "link", none)
        run = FakeRun(arrives=lambda: release.wait(30))
        found = WandbRun(run, 30.0, raises=False)
        for step in (1, 2):
            upload(found, step)
        assert copies() == 2
        shutil.rmtree("checkpoints/step_00000001")  # by a ModelCheckpoint, before it has been sent
    upload(found, 3, lasts=True)
    found.finish(failed=False)
    assert run.sent == ["1", "2", "3"] and copies() == 0
    assert files_of(Path("checkpoints/step_00000002"))["arrays/0"] == bytes([2])


@pytest.mark.parametrize(("patience", "most"), [(0.0, 3), (60.0, 7)])
def test_a_run_that_gets_nowhere_keeps_three_copies_at_most(patience, most, capsys):
    begun = threading.Event()
    with held() as release:
        run = FakeRun(arrives=lambda: len(run.sent) > 3 and (begun.set() or release.wait(30)))
        found = WandbRun(run, patience, raises=False)
        for step in range(3):  # which arrive
            upload(found, step)
            assert found._uploads.wait_idle(30)
        for step in range(7):
            upload(found, 3 + step)
            assert begun.wait(30) and copies() == min(step + 1, most)
        found._finish_timeout = 30.0
    found.finish(failed=False)
    assert copies() == 0 and len(run.sent) == 3 + most
    expected = "W&B: step_00000006 was not sent (one before it is not through after 0 s)"
    assert capsys.readouterr().out.splitlines() == ([expected] if most == 3 else [])


def test_an_upload_that_fails_is_said_by_its_name_or_raised_and_a_run_that_is_off_keeps_no_copies(capsys):
    found = WandbRun(FakeRun(arrives=fail), 30.0, raises=False)
    upload(found, 4)
    found.finish(failed=False)
    assert capsys.readouterr().out == "W&B: step_00000004 was not sent (the service is gone)\n"
    upload(found := WandbRun(FakeRun(arrives=fail), 30.0, raises=True), 5)
    refuses(WandbError, lambda: found.finish(failed=False), "the service is gone")
    assert copies() == 2  # which a later sync needs
    found = WandbRun(FakeRun(log=fail), 30.0, raises=False)
    found.log({})
    assert found._rows.wait_idle(30)
    upload(found, 6)
    assert copies() == 2
    found.finish(failed=False)


@pytest.mark.parametrize("lasts", [True, False])
def test_a_checkpoint_that_cannot_be_read_is_said_once_or_raised(lasts, capsys):
    given = {"name": "model", "aliases": ["x"], "metadata": {}, "lasts": lasts}
    send_it = lambda run: run.log_checkpoint(Path("step_00000001"), **given)  # noqa: E731
    run = FakeRun()
    found = WandbRun(run, 30.0, raises=False)
    for _ in range(2):
        send_it(found)
    found.finish(failed=False)
    assert capsys.readouterr().out == "W&B: step_00000001 was not sent (No such file or directory)\n"
    refuses(WandbError, lambda: send_it(WandbRun(run, 30.0, raises=True)), "cannot send step_00000001: .*No such file")
    assert run.sent == []
