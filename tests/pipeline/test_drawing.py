"""Schedules as text."""

import jaxlit as jl

DRAWN = """\
rank 0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
rank 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
"""


def test_each_rank_has_a_line_and_each_unit_of_time_a_column() -> None:
    assert jl.pipeline.chart(jl.strategies.Std1F1B(2), 3) + "\n" == DRAWN
    lines = jl.pipeline.chart(jl.strategies.ZBV(4, 2), 1).splitlines()
    assert lines[0].split()[2:] == ["0F0", ".", ".", "3F0", "3I0", "3W0", ".", "0I0", "0W0"]
    assert lines[1].split()[2:5] == [".", "1F0", "2F0"]
