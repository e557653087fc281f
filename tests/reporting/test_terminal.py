"""What a person sees of examples/digits.py in terminals of two widths, and of small fits."""

import contextlib
import fcntl
import io
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pyte
import pytest
from kit.batches import numbered
from kit.modules import Mean
from kit.processes import CHEAP, ROOT
from kit.trainers import fit

DIGITS = ROOT / "examples" / "digits.py"
TIMEOUT = 300.0  # on a busy machine; only what hangs takes as long
# What a run of three epochs shows, each kind of line once and in this order.
LINES = {
    "header": r"jaxlit \S+ . jax ",
    "table": r"(path|net\.layers\S+) ",
    "params": r"[\d,]+ params",
    "compiled": r"compiled ",
    **{f"epoch {k}": rf"epoch {k}/3 .*22/22 .* it/s +train/loss \d.* val/accuracy 0" for k in (1, 2, 3)},
    "done": r"done 3 epochs . 66 steps . .* s",
    "checkpoint": r"  checkpoint  runs/.*step_00000066",
    "report": r"  report      runs/",
    "resume": r"  resume      pass resume='runs/",
    "accuracy": r"validation accuracy 0\.\d{4}$",
}


def environment(folder, **more):
    """Return the environment of a child that is nobody's in particular."""
    dropped = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    own = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith(("TTY_", "LC_"))} | CHEAP
    own |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HOME": str(folder), "LANG": "C.UTF-8", "TERM": "xterm"}
    return own | more


def kinds(lines):
    """Return what each line is, a line that continues being that of the one before; unknown ones as they are."""
    result = []
    for line in lines:
        kind = next((name for name, pattern in LINES.items() if re.match(pattern, line)), line)
        goes_on = (kind == line and line.startswith("  ")) or (kind == "table" and result[-1] == "table")
        result += [] if goes_on else [kind]
    return result


class Screen(pyte.HistoryScreen):
    """A terminal that remembers what was too wide for it."""

    def __init__(self, columns):
        super().__init__(columns, 24, history=1000, ratio=0.5)
        self.too_wide, self.live = [], set()

    def draw(self, data):
        for character in data:
            if self.cursor.x == self.columns:
                self.too_wide.append(self.display[self.cursor.y])
            super().draw(character)
        self.live.add(self.display[self.cursor.y].rstrip())

    @property
    def text(self):
        """All lines, also those that have left the screen at its top."""
        above = ["".join(line[x].data for x in range(self.columns)) for line in self.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self.display]).rstrip("\n").split("\n")


def in_terminal(command, columns, folder, **more):
    """Run a command in a pseudo-terminal of 24 lines, and return what it has become."""
    screen = Screen(columns)
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment(folder, **more)
    )
    os.close(theirs)
    stream, deadline = pyte.ByteStream(screen), time.monotonic() + TIMEOUT
    try:
        # The kernel says EIO once nobody has the other side open.
        with contextlib.suppress(OSError):
            while select.select([ours], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                if not (data := os.read(ours, 65536)):
                    break
                stream.feed(data)
        code = child.wait(max(deadline - time.monotonic(), 1.0))
    finally:
        os.close(ours)
        if child.poll() is None:
            child.kill()
            child.wait()
    assert code == 0, "\n".join(screen.text)
    return screen


@pytest.mark.parametrize(
    "columns", [pytest.param(80, marks=pytest.mark.full), pytest.param(120, marks=pytest.mark.sweep)]
)
def test_a_terminal_shows_every_line_once_and_none_wider_than_it(columns, tmp_path):
    command, more = [sys.executable, str(DIGITS), "--epochs", "3"], {}
    if columns == 80:  # with a strategy whose table is wider than it
        command += ["--strategy", "fsdp"]
        more["XLA_FLAGS"] = CHEAP["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    screen = in_terminal(command, columns, tmp_path, **more)
    assert screen.too_wide == [] and kinds(screen.text) == [*LINES]
    assert len([line for line in screen.text if re.match(r"net\.layers\[\d\]\.(bias|kernel|scale) ", line)]) == 6
    assert any(re.match(r"epoch 1/3  ─+  compiling", line) for line in screen.live), "no line was live meanwhile"
    assert not any("compiling ..." in line for line in screen.text) and not screen.cursor.hidden
    # Two metrics and the mark leave no room for a bar in 80 columns, in no epoch.
    assert [len(re.findall("━{6}", line)) > 0 for line in screen.text if line.startswith("epoch")] == [columns > 80] * 3


@pytest.mark.parametrize("columns", [60, 80])
def test_a_dumb_terminal_has_lines_that_are_not_broken_in_a_word(columns, monkeypatch):
    stdout = io.StringIO()
    stdout.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(columns))
    fit(Mean(), numbered(3), logger=False, default_root_dir="run")
    lines = stdout.getvalue().splitlines()
    assert "\x1b" not in stdout.getvalue() and max(map(len, lines)) <= columns
    header = " ".join(line.strip() for line in lines[: [line[:5] for line in lines].index("path ")])
    assert header.replace(" ·", "").endswith(" 1 of 8 x cpu SingleDevice on mesh data=1 run run")


def test_a_second_fit_says_again_only_what_is_new(capsys):
    trainer = fit(Mean(), numbered(3), logger=False, log_every_n_steps=1, enable_checkpointing=True)
    first = capsys.readouterr().out.splitlines()
    trainer.fit(Mean(), numbered(3))
    again = capsys.readouterr().out.splitlines()
    assert first[0].startswith("jaxlit ") and sum(" params (" in line for line in first) == 1
    assert [line.split()[0] for line in again] == ["compiled", "epoch", "done", "checkpoint", "resume"]
