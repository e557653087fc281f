"""The examples run, and reach what they promise."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from kit.trainers import thinned

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_digits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return run("digits.py", monkeypatch, capsys, *arguments)


def run(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def accuracy(out: str) -> float:
    return float(re.findall(r"^validation accuracy (\S+)$", out, re.M)[0])


ONE, *MORE = ("single", "auto"), ("zero1", "1"), ("auto", "1")
MORE += [(name, "8") for name in ("ddp", "fsdp", "shard_map", "pmap", "simulate")]
RUNS = thinned([ONE, *MORE], ONE, full=())


@pytest.mark.parametrize(("strategy", "devices"), [pytest.param(*ONE, marks=pytest.mark.smoke), *RUNS[1:]])
def test_digits_reaches_95_percent(
    strategy: str, devices: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy(run_digits(monkeypatch, capsys, "--strategy", strategy, "--devices", devices)) >= 0.95


@pytest.mark.parametrize("strategy", thinned(("single", "fsdp"), "fsdp", full=()))
def test_records_reaches_95_percent(
    strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy(run("records.py", monkeypatch, capsys, "--strategy", strategy, "--epochs", "5")) >= 0.95


def test_piped_output_is_one_plain_line_an_epoch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_digits(monkeypatch, capsys, "--strategy", "ddp", "--epochs", "3")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out) and "━━  22" not in out
    assert len(re.findall(r"^epoch \d/3  22/22 .*train/loss .*val/accuracy ", out, re.M)) == 3


def test_single_refuses_more_than_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="'single' uses one device. Use strategy='ddp' for 8"):
        run_digits(monkeypatch, capsys, "--strategy", "single", "--devices", "8")
