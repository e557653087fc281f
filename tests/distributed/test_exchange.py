"""What processes tell each other, and what one does while the others wait."""

import io
import os
import socket
import threading

import jax
import pytest
from kit.journal import raising
from kit.threads import as_processes

from jaxlit.distributed import team as exchange
from jaxlit.distributed.team import once_per_node, team
from jaxlit.errors import ProcessError


def test_agree_returns_every_processes_value_in_order(monkeypatch):
    def work(index):
        return [team().agree(f"topic {k}", {"process": index, "k": k}) for k in range(4)]

    expected = [[{"process": index, "k": k} for index in range(3)] for k in range(4)]
    assert as_processes(monkeypatch, work, 3) == [expected] * 3
    assert team().agree("anything", {"a": 1}) == [{"a": 1}], "alone"


def test_agree_names_the_process_that_is_elsewhere(monkeypatch):
    here, there = as_processes(monkeypatch, lambda index: team().agree(f"topic {index}", None))
    assert type(here) is type(there) is ProcessError
    assert str(here).startswith("Process 0 is at 'topic 0' while process 1 is at 'topic 1'")
    assert str(there).startswith("Process 1 is at 'topic 1' while process 0 is at 'topic 0'")


def test_agree_names_the_process_that_does_not_come(monkeypatch):
    error, _ = as_processes(monkeypatch, lambda index: index or team().agree("alone", None, timeout=0.01))
    assert type(error) is ProcessError and str(error).startswith("Process 1 did not reach 'alone' within 0.01 s")


@pytest.mark.parametrize(
    ("names", "boots", "leaders"),
    [(["one", "one"], "aa", [0]), (["one", "other"], "aa", [0, 1]), (["one", "one"], "ab", [0, 1])],
)
def test_work_is_done_once_a_computer_while_the_others_wait(names, boots, leaders, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: names[jax.process_index()])
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    monkeypatch.setattr(exchange, "open", lambda path: io.StringIO(boots[jax.process_index()]), raising=False)
    done, returned = [], threading.Event()

    def download():
        assert not returned.wait(0.05)
        done.append(jax.process_index())

    def work(index):
        once_per_node(download, "prepare_data")
        returned.set()
        return sorted(done)

    assert as_processes(monkeypatch, work) == [leaders] * 2


def test_a_failure_fails_the_others_with_its_text(monkeypatch):
    fail = raising(OSError, "the disk is full")
    first, second = as_processes(monkeypatch, lambda index: once_per_node(fail, "prepare_data"))
    assert type(first) is OSError and type(second) is ProcessError
    assert str(second) == "prepare_data failed in process 0: OSError('the disk is full')"
