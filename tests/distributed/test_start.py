"""How several processes start, and which rows are whose; tests/distributed/test_processes.py starts real ones."""

import re

import jax
import pytest
from kit.refusals import refuses

import jaxlit as jl
from jaxlit.distributed import job as start
from jaxlit.errors import ArgumentError, ProcessError


def test_own_rows_are_parts_that_differ_by_one_row_at_most(monkeypatch):
    assert [start.own_rows(n) for n in (64, 7)] == [slice(0, 64), slice(0, 7)], "alone all are one's own"
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for rows in (9, 7, 2):
        parts = [[*range(rows)][start.own_rows(rows, process)] for process in range(3)]
        assert [row for part in parts for row in part] == [*range(rows)] and max(map(len, parts)) - min(
            map(len, parts)
        ) <= 1


@pytest.mark.parametrize("given", [("a:1", None, 0), ("a", 2, 0), ("a:1", 2, 2), ("a:1", 2, -1)])
def test_initialize_refuses_arguments_that_do_not_fit(given):
    assert jax.devices()  # so that what is not refused here is refused later
    words = ("'host:port'", "counts from 0", re.escape(", ".join(map(repr, given))), "all three, or none")
    refuses(ArgumentError, lambda: jl.distributed.initialize(*given), *words)


@pytest.mark.parametrize("given", [("a:1", "2", "2"), ("a", "2", "0"), ("a:1", "2", ""), ("a:1", "two", "0")])
def test_a_job_that_the_environment_names_wrongly_is_refused(given, monkeypatch):
    for name, value in zip(("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"), given, strict=True):
        monkeypatch.setenv(f"JAX_{name}", value)
    refuses(ArgumentError, jl.distributed.initialize, f"got {given[0]!r}, ", "JAX_NUM_PROCESSES and JAX_PROCESS_ID")


def test_initialize_takes_the_job_that_the_environment_names(monkeypatch):
    calls = []
    monkeypatch.setattr(start, "jax_runs", lambda: False)
    monkeypatch.setattr(start, "_wait_for", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **_: calls.append(given[:3]))
    for name, value in (("COORDINATOR_ADDRESS", "node0:1234"), ("NUM_PROCESSES", "4"), ("PROCESS_ID", "3")):
        monkeypatch.setenv(f"JAX_{name}", value)
    jl.distributed.initialize()
    assert calls == [("node0:1234", 4, 3)]
    jl.distributed.initialize("node1:1234", 2, 0)
    assert calls[1:] == [("node1:1234", 2, 0)], "arguments come first"


def test_initialize_after_the_first_use_of_jax_is_refused(monkeypatch):
    assert jax.devices()
    for _ in range(2):
        jl.distributed.initialize()
    assert not jax.distributed.is_initialized()
    words = "distributed.initialize came after the first use of jax"
    refuses(ProcessError, lambda: jl.distributed.initialize("127.0.0.1:1", 2, 1, timeout=5), words)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")  # which jax would find
    refuses(ProcessError, jl.distributed.initialize, words)


def test_a_coordinator_that_is_not_there_is_named_in_time(monkeypatch):
    monkeypatch.setattr(start, "jax_runs", lambda: False)
    unused = "127.0.0.1:9"  # the discard service, which nobody runs
    refuses(ProcessError, lambda: jl.distributed.initialize(unused, 2, 1, timeout=0), f"did not meet at {unused}")
