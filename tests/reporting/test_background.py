"""Work beside the training loop: in order, and left at once on Ctrl-C."""

import threading

import pytest
from kit.waiting import held, interrupts

from jaxlit.reporting.background import Background, within


def test_jobs_are_done_in_order_and_one_that_fails_stops_none():
    done, failed = [], []
    jobs = Background("jobs", failed.append)
    with held() as release:
        jobs.submit(lambda: None)
        jobs.submit(lambda: release.wait(30))
        for k in range(3):
            jobs.submit(lambda k=k: done.append(k) or 1 / (k - 1))
        assert not jobs.join(0.05) and len(jobs) >= 4 and not done
    assert jobs.join(30) and done == [0, 1, 2] and len(jobs) == 0
    assert [type(error) for error in failed] == [ZeroDivisionError]
    jobs.submit(lambda: done.append(threading.current_thread()))
    assert jobs.join(30) and done[3].name == "jobs" and done[3].daemon
    jobs.close()
    done[3].join(30)
    assert not done[3].is_alive()


def test_what_comes_in_time_is_returned_or_raised_and_never_goes_to_late():
    assert within(25, lambda: "result", late=lambda result: pytest.fail("it was waited for")) == "result"
    with pytest.raises(ZeroDivisionError):
        within(25, lambda: 1 / 0, late=print)


@pytest.mark.parametrize("how", ["time is up", "Ctrl-C"])
def test_what_is_no_longer_waited_for_hands_its_result_to_late(how):
    taken, came = [], threading.Event()
    with held() as release, interrupts() as interrupt:

        def work():
            if how == "Ctrl-C":
                interrupt()
            release.wait(30)
            return "result"

        with pytest.raises(KeyboardInterrupt if how == "Ctrl-C" else TimeoutError):
            within(25 if how == "Ctrl-C" else 0.01, work, late=lambda x: taken.append(x) or came.set())
        assert taken == []
    assert came.wait(30) and taken == ["result"]
