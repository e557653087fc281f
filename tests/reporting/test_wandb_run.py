"""A run whose server fails or hangs: nothing waits for it, and one line says so. Runs that are offline or not
opened at all: nothing waits for them, and one line says which it is.
"""

import errno
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from itertools import count
from pathlib import Path

import jax
import pytest
import wandb
from kit.checkpoints import seal
from kit.journal import hooks, raising
from kit.processes import say
from kit.refusals import refuses
from kit.waiting import held, interrupts
from kit.wandb_runs import STEP, FakeRun, Wide, data, run_files, start, trainer_of
from wandb.errors import UsageError

from jaxlit.callbacks import WandbLogger
from jaxlit.errors import JaxlitError
from jaxlit.reporting import wandb_run
from jaxlit.reporting.wandb_run import WandbError, WandbRun, open_run

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
    (folder / "data-0123abcd").mkdir(parents=True)
    (folder / "data-0123abcd/state.json").write_text(json.dumps({"global_step": step, "epoch": 1}))
    seal(folder)
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


SETTINGS = {"init_timeout": 25.0, "finish_timeout": 5.0}


def opened(**given):
    return open_run({"id": "wanted", "dir": str(Path.cwd())}, SETTINGS, **({"offline": False, "raises": False} | given))


@pytest.fixture
def asked(monkeypatch):
    """The arguments of each `wandb.init`, and functions that answer it."""
    calls, answers = [], []
    monkeypatch.setattr(wandb_run, "_open_runs", [])
    monkeypatch.setattr(wandb, "setup", lambda settings: None)
    monkeypatch.setattr(wandb, "teardown", lambda: closed.append(threading.current_thread()))
    monkeypatch.setattr(wandb, "init", lambda **given: calls.append(given) or answers.pop(0)())
    closed = []
    return calls, answers, closed


def test_an_init_that_hangs_is_left_and_the_run_is_offline(asked, monkeypatch, capsys):
    calls, answers, closed = asked
    monkeypatch.setitem(SETTINGS, "init_timeout", 0.5)
    run = FakeRun()
    run.offline = True
    with held() as release:
        answers += [lambda: release.wait(30), lambda: run]
        assert opened() is run
    assert [(given["mode"], given["id"]) for given in calls] == [(None, "wanted"), ("offline", "wanted")]
    assert len(closed) == 1  # so that the end of the process does not wait for it
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"W&B offline \(no answer after .*\) \N{MIDDLE DOT} upload: wandb sync /there", line)


def test_ctrl_c_leaves_a_run_that_opens_and_tries_nothing_else(asked, capsys):
    calls, answers, closed = asked
    with held() as release, interrupts() as interrupt:
        answers.append(lambda: interrupt() or release.wait(30))
        with pytest.raises(KeyboardInterrupt):
            opened()
    assert len(calls) == len(closed) == 1
    assert capsys.readouterr().out == ""


def test_where_no_run_can_be_opened_there_is_none(asked, capsys):
    asked[1].extend([FakeRun, *[fail] * 2])
    assert opened().url == FakeRun.url
    assert capsys.readouterr().out == f"W&B {FakeRun.url}\n"
    assert opened() is None
    assert capsys.readouterr().out == "W&B: off for this run (the service is gone)\n"


@pytest.mark.parametrize("offline", [False, True])
def test_a_failure_to_open_a_run_is_raised_if_asked(asked, offline):
    asked[1].append(fail)
    with pytest.raises(RuntimeError, match="the service is gone"):
        opened(raises=True, offline=offline)


@pytest.mark.parametrize("whose", ["the user's", "another logger's"])
def test_the_service_of_another_open_run_is_not_closed(asked, monkeypatch, whose):
    if whose == "the user's":
        monkeypatch.setattr(wandb, "run", FakeRun())
    else:
        asked[1].append(FakeRun)
        other = opened()
    asked[1].extend([fail] * 2)
    assert opened() is None
    assert asked[2] == []
    if whose != "the user's":  # the last one closes it
        wandb_run.end_run(other, failed=True)
        assert len(asked[2]) == 1


def test_without_a_key_a_run_is_offline_which_one_line_says(capfd):
    run = opened()
    run.finish()
    assert run.id == "wanted" and run.offline
    out, err = capfd.readouterr()
    (line,) = out.splitlines()
    assert line.startswith("W&B offline (") and "api key" in line.lower().replace("_", " ")
    assert err == ""
    assert Path(line.partition("wandb sync ")[2]).resolve() == run_files(".")[0].parent.resolve()
    with pytest.raises(UsageError, match="(?i)api.key"):
        opened(raises=True)


def test_a_mode_that_is_set_later_counts(monkeypatch, capsys):
    wandb.setup()  # which reads the environment
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)  # not the lack of a key
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_MODE", "offline")
    opened(raises=True).finish()
    assert capsys.readouterr().out.startswith("W&B offline \N{MIDDLE DOT} upload") and len(run_files(".")) == 1
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run = opened(raises=True, offline=True)
    run.finish()  # what is open would be used by others
    assert run.disabled and capsys.readouterr().out == "W&B disabled\n"


def test_without_the_package_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refuses(JaxlitError, opened, "pip install wandb")


def fit_and_hang():
    """Train with a server that cannot be reached, and before that without W&B.

    Then stop the SDK's own process, which answers nothing any more: at its end the SDK would wait for it.
    """
    plain = trainer_of(default_root_dir="../plain", max_epochs=2)
    plain.fit(Wide(), data(), data())
    logger = WandbLogger("project", init_timeout=1.0, finish_timeout=5.0)
    trainer = trainer_of(logger, default_root_dir="../run", max_epochs=2)
    trainer.fit(Wide(), data(), data())
    say("same", all((x == y).all() for x, y in zip(*map(jax.tree.leaves, (plain.state, trainer.state)), strict=True)))
    wandb_run.MARGIN = 0.0
    stop = lambda *all: os.kill(wandb.setup()._connection._proc._process.pid, signal.SIGSTOP)  # noqa: E731
    logger, given = WandbLogger(offline=True, finish_timeout=0.5), {"max_epochs": 0, "default_root_dir": "../hangs"}
    trainer_of(logger, hooks(on_fit_end=stop), **given).fit(Wide(), data())
    say("ended", True)


@pytest.mark.full
def test_a_server_out_of_reach_changes_no_number(tmp_path):
    (ended,) = start(
        fit_and_hang, tmp_path / "here", log_to=None, WANDB_API_KEY=40 * "a", WANDB_BASE_URL="http://127.0.0.1:9"
    )
    assert (ended.code, ended.errors) == (0, ""), ended.output + ended.errors
    assert ended.said["same"]
    plain, run = ((tmp_path / kind / "metrics.csv").read_bytes() for kind in ("plain", "run"))
    assert plain == run
    assert ended.said["ended"], "a service that hangs keeps the process"
    first, _, hung = [line for line in ended.output.splitlines() if "W&B" in line]
    assert first.startswith("W&B offline (")
    assert hung.startswith("W&B: the upload did not finish (no end after")
