"""Threads that work next to the training loop."""

import threading

import pytest

from jaxlit.background import Background


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
