"""Schedules as text, and from the command line."""

import pytest

import jaxlit as jl
from jaxlit.__main__ import main

DRAWN = """\
rank 0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
rank 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
"""


def test_each_rank_has_a_line_and_each_unit_of_time_a_column() -> None:
    assert jl.pipeline.chart(jl.strategies.Std1F1B(2), 3) + "\n" == DRAWN
    lines = jl.pipeline.chart(jl.strategies.ZBV(4, 2), 1).splitlines()
    assert lines[0].split()[2:] == ["0F0", ".", ".", "3F0", "3I0", "3W0", ".", "0I0", "0W0"]
    assert lines[1].split()[2:5] == [".", "1F0", "2F0"]


def test_the_command_line_compares_and_draws(capsys: pytest.CaptureFixture[str]) -> None:
    main(["pipeline", "--stages", "4", "--microbatches", "8", "--schedule", "1f1b"])
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith(("gpipe", "1f1b", "zb"))]
    assert rows == [
        ["gpipe", "4", "27.3%", "33", "8"],
        ["1f1b", "4", "27.3%", "33", "4"],
        ["zb_h1", "4", "11.1%", "27", "4"],
        ["zbv", "8", "5.9%", "25.5", "4"],
    ]
    assert jl.pipeline.chart(jl.strategies.Std1F1B(4), 8) in out


def test_a_schedule_that_cannot_be_has_a_line_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["pipeline", "--stages", "4", "--microbatches", "9", "--comm", "0.1"])
    out = capsys.readouterr().out
    assert ["interleaved_1f1b", "8", "-", "-", "-"] in [line.split() for line in out.splitlines()]
    assert "Interleaved1F1B(8, 4): 9 microbatches do not divide into 2 rounds" in out


def test_the_command_line_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert "compare pipeline schedules" in capsys.readouterr().out


def test_bad_numbers_end_the_command_with_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["pipeline", "--stages", "0", "--microbatches", "9"])
    assert "num_stages=...) takes an int of at least 1, got 0" in capsys.readouterr().err
