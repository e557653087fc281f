"""Threads that work next to the training loop."""

import threading

import pytest
from kit.waiting import held, interrupts

from jaxlit.background import Background, BackgroundQueue


def test_a_result_is_returned_and_an_error_raised():
    result, failed = Background("a", lambda: "result").start(), Background("b", lambda: 1 / 0).start()
    assert result.result(30) == "result"
    assert result.join(30)
    assert result.is_done
    assert result.error is None
    with pytest.raises(ZeroDivisionError):
        failed.result(30)
    assert isinstance(failed.error, ZeroDivisionError)


@pytest.mark.parametrize("daemon", [True, False])
def test_a_thread_runs_until_it_is_stopped(daemon):
    threads = []

    def work():
        threads.append(threading.current_thread())
        background.stopping.wait(30)

    background = Background("loop", work, daemon=daemon)
    background.start()
    assert not background.join(0.01)
    assert not background.is_done
    assert background.error is None
    background.stop()
    assert background.join(30)
    assert [(thread.name, thread.daemon) for thread in threads] == [("loop", daemon)]


@pytest.mark.parametrize("how", ["time is up", "Ctrl-C"])
def test_a_wait_for_a_result_ends(how):
    with held() as release, interrupts() as interrupt:
        background = Background("late", lambda: (interrupt() if how == "Ctrl-C" else None, release.wait(30)))
        with pytest.raises(KeyboardInterrupt if how == "Ctrl-C" else TimeoutError):
            background.start().result(25 if how == "Ctrl-C" else 0.01)


def test_jobs_are_done_in_order_and_errors_stop_none():
    done, failed = [], []
    jobs = BackgroundQueue("jobs", failed.append)
    with held() as release:
        jobs.submit(lambda: release.wait(30))
        for k in range(3):
            jobs.submit(lambda k=k: done.append(k) or 1 / (k - 1))
        assert not jobs.wait_idle(0.05)
        assert len(jobs) == 4
        assert done == []
    assert jobs.wait_idle(30)
    assert done == [0, 1, 2]
    assert len(jobs) == 0
    assert [type(error) for error in failed] == [ZeroDivisionError]
    jobs.stop()
    assert jobs.join(30)
