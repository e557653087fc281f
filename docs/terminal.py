"""Draw docs/terminal.svg, what a run of examples/digits.py shows in a terminal: `python docs/terminal.py`."""

import io
import os
import pty
import re
import sys
import tempfile
from pathlib import Path

import pyte
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

DOCS = Path(__file__).resolve().parent
WIDTH = 104
COMMAND = ["examples/digits.py", "--strategy", "fsdp"]


def run():
    """Return the lines of a terminal in which the command has run, on eight simulated devices."""
    screen = pyte.Screen(WIDTH, 60)
    stream = pyte.ByteStream(screen)

    def read(terminal):
        data = os.read(terminal, 65536)
        stream.feed(data)
        return data

    os.environ |= {"COLUMNS": str(WIDTH), "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    os.environ["PYTHONPATH"] = str(DOCS.parent)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        pty.spawn([sys.executable, str(DOCS.parent / COMMAND[0]), *COMMAND[1:]], read)
    return "\n".join(line.rstrip() for line in screen.display).rstrip()


def draw(lines):
    """Return the picture of a terminal."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ python {' '.join(COMMAND)}", style="bold green"))
    console.print(Text(lines))
    svg = console.export_svg(title="jaxlit", theme=MONOKAI, unique_id="jaxlit")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)  # whose file is at an address in the network


if __name__ == "__main__":
    (DOCS / "terminal.svg").write_text(draw(run()))
