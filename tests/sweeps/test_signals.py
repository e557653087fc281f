"""Training ended by a signal anywhere, and started again, equals the one that was not, and no step is done twice.

SIGTERM, SIGHUP and SIGINT come once and twice, at 28 moments, with a stderr that is open, that nobody reads or that is
full. Only a second SIGINT gives up what came since the last checkpoint.
"""

import csv
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.processes import launch, say
from kit.resume_model import InEveryHook, fit, loaders, make_trainer
from kit.resume_runs import write_final

import jaxlit as jl

# In several windows of accumulation, epochs and validations: where a hook is called for the n-th time.
CALLS = {"on_fit_start": (0,), "on_train_start": (0,), "on_train_epoch_start": (0, 1), "on_train_batch_start": (0, 10)}
CALLS |= {"on_log": (2,), "on_train_batch_end": (1, 5, 8, 30), "on_safe_point": (5, 23), "on_validation_start": (0, 1)}
CALLS |= {"on_validation_end": (0, 2), "on_validation_epoch_start": (1,), "on_validation_batch_start": (2,)}
CALLS |= {"on_validation_batch_end": (1, 4), "on_validation_epoch_end": (1,), "on_train_epoch_end": (0, 1)}
CALLS |= {"on_train_end": (0,), "on_fit_end": (0,), "a draw": (12,), "a save": (0,)}
MOMENTS = [(hook, number) for hook, numbers in CALLS.items() for number in numbers]
SIGNALS = {"SIGTERM": 143, "SIGHUP": 129, "SIGINT": 0}
WHOLE = Path("whole")
AT_ONCE = 130  # what shells show for KeyboardInterrupt


class Sends(InEveryHook):
    """Sends this process signals, at one call of one hook."""

    def __init__(self, hook: str, number: int, numbers: list[int]) -> None:
        self.hook, self.left, self.numbers = hook, number, numbers

    def at(self, trainer: jl.Trainer, hook: str, arguments: tuple[Any, ...]) -> None:
        if hook == self.hook:
            self.left -= 1
            if self.left == -1:
                self.send(self.numbers)

    def send(self, numbers: list[int]) -> None:
        if numbers:
            try:
                signal.raise_signal(numbers[0])
            finally:  # a wait for data is cut by the first
                self.send(numbers[1:])

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self.at(trainer, "a save", ())


class Draws:
    """The batches of a loader, the draw of one of which is a hook like any other."""

    def __init__(self, loader: Any, sends: Sends) -> None:
        self.loader, self.sends, self.set_epoch = loader, sends, loader.set_epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        for batch in self.loader:
            self.sends.at(None, "a draw", ())  # type: ignore[arg-type]
            yield batch


def train(folder: Path, number: int, moment: tuple[str, int], numbers: list[int]) -> None:
    jl.testing.fake_devices(1)
    for handled in ("SIGINT", "SIGTERM", "SIGHUP"):  # whatever the parent had
        signal.signal(getattr(signal, handled), signal.default_int_handler if handled == "SIGINT" else signal.SIG_DFL)
    sends = Sends(*moment, numbers)
    loader, val = loaders()
    arguments: dict[str, Any] = {"resume": "auto", "enable_checkpointing": True, "num_sanity_val_steps": 0}
    trainer = make_trainer("single", folder, [sends], f"journal{number}", **arguments)
    fit(trainer, (Draws(loader, sends), val))
    write_final(trainer, folder)


def forked(stderr: str, *given: Any) -> int:
    """Run `train` in a process of its own; returns its exit code."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        ours, theirs = os.pipe()
        os.close(ours)
        file = {"open": given[0] / "stderr", "full": "/dev/full"}.get(stderr)
        os.dup2(theirs if file is None else os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        train(*given)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except KeyboardInterrupt:
        code = AT_ONCE
    except BaseException as error:
        (given[0] / "error").write_text(repr(error))
    finally:
        os._exit(code)


def lines(folder: Path, count: int) -> list[Any]:
    """Return the batches that were trained, in all processes."""
    paths = [folder / f"journal{number}" for number in range(count)]
    result = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    return [line for line in result if line[0] == "on_train_batch_end"]


def rows(folder: Path) -> list[Any]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def problems(name: str, times: int, stderr: str, moment: tuple[str, int]) -> list[str]:
    """Train until the signal, and once more, in a folder of the working one; returns what is not as it must be."""
    folder = Path("-".join(map(str, moment)).replace(" ", "_"))
    folder.mkdir()
    result, expected = [], AT_ONCE if (name, times) == ("SIGINT", 2) else SIGNALS[name]
    if (code := forked(stderr, folder, 0, moment, [getattr(signal, name)] * times)) != expected:
        result.append(f"ended with {code}, not {expected}")
    if code := forked("open", folder, 1, ("", 0), []):
        error = (folder / "error").read_text() if (folder / "error").exists() else ""
        return [*result, f"the second process ended with {code}: {error}"]
    done, first, wanted = lines(folder, 2), lines(folder, 1), lines(WHOLE, 1)
    if expected == AT_ONCE:  # which gives up what came since the last checkpoint: it is done again
        done = first[: len(wanted) - (len(done) - len(first))] + done[len(first) :]
    result += [f"the {len(done)} batches differ from {len(wanted)}"] if done != wanted else []
    result += ["the rows differ"] if rows(folder) != rows(WHOLE) else []
    same = (folder / "final.json").read_bytes() == (WHOLE / "final.json").read_bytes()
    return result if same else [*result, "the final state differs"]


def train_with_signals() -> None:
    """Train without a signal, and with one at each moment; each in a fork of this process, which uses no device."""
    name, times, stderr = json.loads(Path("case.json").read_text())
    WHOLE.mkdir()
    code = forked("open", WHOLE, 0, ("", 0), [])
    say("whole", code)
    if not code:
        say("problems", {str(moment): found for moment in MOMENTS if (found := problems(name, times, stderr, moment))})


@pytest.mark.sweep
@pytest.mark.parametrize("stderr", ["open", "unread", "full"])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", SIGNALS)
def test_a_training_ended_by_a_signal_continues_as_if_it_were_not(
    name: str, times: int, stderr: str, tmp_path: Path
) -> None:
    (tmp_path / "case.json").write_text(json.dumps([name, times, stderr]))
    (ended,) = launch(train_with_signals, tmp_path, count=1, devices=1, join=False)
    assert ended.code == 0, ended.errors
    assert ended.said["whole"] == 0
    assert ended.said["problems"] == {}
