"""What a person sees of examples/digits.py: in terminals of two widths, in a file, and in a notebook."""

import contextlib
import fcntl
import json
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import nbformat
import numpy as np
import optax
import pyte
import pytest
from flax import nnx

import jaxlit as jl

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "examples" / "digits.py"
TIMEOUT = 120.0
# What a run of three epochs shows, each kind of line once and in this order.
ORDER = ["header", "table", "params", "compiled", "epoch 1/3", "epoch 2/3", "epoch 3/3"]
CLOSING = ["done", "checkpoint", "report", "resume", "accuracy"]


def environment(folder, **more):
    """Return the environment of a child that is nobody's in particular."""
    dropped = ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    own = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith(("TTY_", "LC_"))}
    own |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HOME": str(folder), "LANG": "C.UTF-8", "TERM": "xterm"}
    return own | more


def kinds(lines):
    """Return what each line is, a line that goes on being that of the one before; unknown ones as they are."""
    patterns = {
        "header": r"jaxlit \S+ . jax ",
        "table": r"[┏┃┡│└+|]",
        "params": r"[\d,]+ params",
        "compiled": r"compiled ",
        "done": r"done 3 epochs . 66 steps . .* s",
        "checkpoint": r"  checkpoint  runs/.*step_00000066",
        "report": r"  report      runs/",
        "resume": r"  resume      Trainer\(resume='runs/",
        "accuracy": r"validation accuracy 0\.\d{4}$",
    }
    found = []
    for line in lines:
        kind = next((name for name, pattern in patterns.items() if re.match(pattern, line)), line)
        if match := re.match(r"(epoch \d/\d)  .*22/22 .* it/s  train/loss \d.*  val/accuracy 0", line):
            kind = match[1]
        if kind != line or not line.startswith("  "):
            found.append(kind)
    return [kind for i, kind in enumerate(found) if i == 0 or kind != "table" or found[i - 1] != "table"]


class Screen(pyte.HistoryScreen):
    """A terminal that remembers what was too wide for it."""

    def __init__(self, columns, lines):
        super().__init__(columns, lines, history=1000, ratio=0.5)
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
    screen = Screen(columns, 24)
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


@pytest.fixture(scope="module", params=[80, 120])
def screen(request, tmp_path_factory):
    """The example in a terminal; on the narrow one with a strategy whose table is wider than it."""
    folder = tmp_path_factory.mktemp("terminal")
    command = [sys.executable, str(DIGITS), "--epochs", "3"]
    if request.param == 120:
        return in_terminal(command, 120, folder)
    return in_terminal(
        [*command, "--strategy", "fsdp"], 80, folder, XLA_FLAGS="--xla_force_host_platform_device_count=8"
    )


def test_nothing_is_wider_than_the_terminal(screen):
    assert screen.too_wide == []


def test_a_terminal_shows_every_line_once_and_nothing_else(screen):
    assert kinds(screen.text) == ORDER + CLOSING


def test_a_path_of_the_table_stands_in_one_line(screen):
    rows = [line for line in screen.text if line.startswith("│")]
    assert len(rows) == 6 and all(re.match(r"│ net\.layers\[\d\]\.(bias|kernel|scale) +│", row) for row in rows)


def test_a_line_was_live_meanwhile_and_the_cursor_is_back(screen):
    assert any(re.match(r"epoch 1/3  ─+  compiling", line) for line in screen.live)
    assert not any("compiling ..." in line for line in screen.text)
    assert not screen.cursor.hidden


def test_a_bar_is_left_where_there_is_room(screen):
    bars = ["━━━━" in line for line in screen.text if line.startswith("epoch")]
    assert bars == [screen.columns == 120] * 3


@pytest.fixture(scope="module")
def piped(tmp_path_factory):
    """What the example writes into a file under LANG=C, and then as UTF-8."""
    folder = tmp_path_factory.mktemp("file")
    twice = f"""
import runpy, sys
for encoding in ("ascii", "utf-8"):
    assert sys.stdout.encoding.lower() in ("ascii", "ansi_x3.4-1968", "utf-8"), sys.stdout.encoding
    sys.argv = ["digits.py", "--epochs", "3"]
    runpy.run_path({str(DIGITS)!r}, run_name="__main__")
    print("=====")
    sys.stdout.reconfigure(encoding="utf-8")
"""
    # What Python does by itself under LANG=C is turned off: not every platform does it.
    ascii_only = {"LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        own = environment(folder, FORCE_COLOR="1", **ascii_only)
        child = subprocess.run(
            [sys.executable, "-c", twice], stdout=out, stderr=err, cwd=folder, env=own, timeout=TIMEOUT
        )
    assert child.returncode == 0, (folder / "err").read_text()
    return [*(folder / "out").read_bytes().split(b"=====\n")[:2], (folder / "err").read_bytes()]


def test_a_file_has_a_line_for_each_epoch_and_no_control_codes(piped):
    text = piped[1].decode("utf-8")
    assert kinds(text.rstrip("\n").split("\n")) == ORDER + CLOSING
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text) and "━━  22" not in text


def test_a_file_of_ascii_has_the_same_lines(piped):
    text = piped[0].decode("ascii")
    assert kinds(text.rstrip("\n").split("\n")) == ORDER + CLOSING
    assert "?" not in text


def test_nothing_is_written_to_stderr(piped):
    assert piped[2] == b""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The example run by a notebook's kernel."""
    folder = tmp_path_factory.mktemp("notebook")
    spec = folder / "jupyter" / "kernels" / "ours"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.joinpath("kernel.json").write_text(json.dumps({"argv": argv, "display_name": "ours", "language": "python"}))
    places = {name: str(folder / name.lower()) for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")}
    found = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(f"import sys\nsys.path.insert(0, {str(DIGITS.parent)!r})\nimport digits"),
            nbformat.v4.new_code_cell("sys.argv = ['digits.py', '--epochs', '3']\ndigits.main()"),
        ]
    )
    nbformat.write(found, folder / "in.ipynb")
    # In a process of its own, whose event loop and warnings are none of this one's.
    run = "import nbclient, nbformat as f, sys; n = f.read('in.ipynb', 4); "
    run += "nbclient.NotebookClient(n, timeout=100, kernel_name='ours').execute(); f.write(n, 'out.ipynb')"
    own = environment(folder, JUPYTER_PATH=str(folder / "jupyter"), **places)
    child = subprocess.run(
        [sys.executable, "-c", run], cwd=folder, env=own, timeout=TIMEOUT, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    return nbformat.read(folder / "out.ipynb", 4)


def test_a_notebook_shows_every_line_once_and_nothing_else(notebook):
    imported, trained = (cell.outputs for cell in notebook.cells)
    texts = [o.text if o.output_type == "stream" else o.data["text/plain"] + "\n" for o in trained]
    assert imported == []
    assert kinds("".join(texts).rstrip("\n").split("\n")) == ORDER + CLOSING
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", "".join(texts))


@pytest.mark.parametrize("methods", [("write",), ("write", "flush")])
def test_a_stdout_of_somebodys_own_takes_the_lines(methods, monkeypatch):
    class Net(jl.TrainModule):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(()))

        def training_step(self, batch):
            return jnp.mean((self.w * batch["x"]) ** 2)

        def configure_optimizers(self):
            return optax.sgd(0.1)

    written = []
    able = {"write": written.append, "flush": lambda: None}
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(**{name: able[name] for name in methods}))
    trainer = jl.Trainer(strategy="single", max_epochs=1, logger=False)
    trainer.fit(Net(), [{"x": np.ones(2, np.float32)}])
    found = "".join(written)
    assert trainer.global_step == 1 and found.startswith("jaxlit ")
    assert "1 params" in found and "epoch 1/1" in found and "done 1 epoch" in found


def test_a_notebook_has_no_stderr_and_no_widgets(notebook):
    outputs = notebook.cells[1].outputs
    assert {o.get("name", "display") for o in outputs} <= {"stdout", "display"}
    assert {kind for o in outputs for kind in o.get("data", {})} == {"text/plain"}
    assert "widgets" not in notebook.metadata
