"""Trainings that are stopped by exceptions or by SIGKILL, resumed, and compared with one that was not.

As a script it is one process of such a training, see `run_child`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jaxlit as jl
from kit.resume_model import InEveryHook, Journal, RaisesAt, Stopped, final, fit, loaders, make_trainer


def cut_and_resume(
    folder: Path,
    data: Callable[[], Any] = loaders,
    *,
    strategy: str = "single",
    stops: Sequence[tuple[str, int]] = (("on_safe_point", 36),),
    more: Callable[[], Sequence[jl.Callback]] = tuple,
    **arguments: Any,
) -> dict[str, Any]:
    """Train once without a stop, and once with exceptions, each in a Trainer that continues; returns what differs.

    `data` and `more` make the loaders and further callbacks of each Trainer.
    """
    arguments = {"max_epochs": 2, **arguments}
    whole = fit(make_trainer(strategy, folder / "whole", more(), "journal0", **arguments), data())
    write_final(whole, folder / "whole")
    arguments |= {"enable_checkpointing": True, "resume": "auto"}
    for number, stop in enumerate(stops):
        trainer = make_trainer(strategy, folder / "cut", [*more(), RaisesAt(*stop)], f"journal{number}", **arguments)
        try:
            fit(trainer, data(), seed=number)  # a resume must not live on what is built alike
        except Stopped:
            continue
        raise AssertionError(f"{stop} did not come")
    last = make_trainer(strategy, folder / "cut", more(), f"journal{len(stops)}", **arguments)
    write_final(fit(last, data(), seed=len(stops)), folder / "cut")
    return problems_of(folder / "cut", folder / "whole", len(stops) + 1)


class KillsAt(InEveryHook):
    """Ends the process by SIGKILL in a hook, at its first call once so many optimizer steps were taken."""

    def __init__(self, hook: str, step: int) -> None:
        self.hook, self.step = hook, step

    def at(self, trainer: jl.Trainer, hook: str, arguments: tuple[Any, ...]) -> None:
        if hook == self.hook and trainer.global_step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def start_child(
    root: Path, number: int, strategy: str, *, epochs: int, every: int, kill: tuple[str, int] | None = None
) -> subprocess.Popen[str]:
    """Start a process that trains, or continues, in a folder with a checkpoint every so many steps.

    It writes `journal<number>` and, unless it dies at the hook and step of `kill`, `final.json`.
    """
    told = json.dumps([str(root), number, strategy, epochs, every, kill])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, __file__, told], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def ended(child: subprocess.Popen[str], timeout: float = 120.0) -> tuple[int, str]:
    """Wait for a process; returns its exit code, and what it has printed."""
    try:
        output, _ = child.communicate(timeout=timeout)
    finally:
        child.kill()
        child.wait()
    return child.returncode, output


def write_final(trainer: jl.Trainer, root: Path) -> None:
    """Write what a training ended with, for `problems_of`."""
    (root / "final.json").write_text(json.dumps(final(trainer)))


def problems_of(folder: Path, reference: Path, count: int) -> dict[str, Any]:
    """Return what differs from a training without a stop if all of `count` processes but the last were killed.

    And as "lost" how many optimizer steps were done again.
    """
    result: dict[str, Any] = {}
    lost = 0
    # Rows are read late, and at once when training ends: they are compared with rows.
    for kind in ("hooks", "rows"):
        whole, reached = _training(reference / "journal0", kind), 0
        for number in range(count):
            mine = _training(folder / f"journal{number}", kind)
            # A process begins nowhere after what the one before has reached: nothing is left out.
            begins = [at for at in range(reached + 1 if number else 1) if whole[at : at + len(mine)] == mine]
            if not begins:
                result[f"{kind} of journal{number}"] = "are no part of the whole"
                continue
            if kind == "hooks" and number and begins[-1] < reached:
                lost += whole[reached - 1][2] - whole[begins[-1]][2]
            reached = begins[-1] + len(mine)
        if reached != len(whole):
            result[f"{kind} at the end"] = f"{len(whole) - reached} are missing"
    for name in ("metrics.csv", "final.json"):
        if (folder / name).read_bytes() != (reference / name).read_bytes():
            result[name] = "differs"
    return result | {"lost": lost}


def _training(path: Path, kind: str) -> list[list[Any]]:
    lines = [line for line in Journal(path).lines() if line[0] not in ("on_fit_start", "on_train_start")]
    if kind == "rows":  # which tell their step themselves
        return [line[3:] for line in lines if line[0] == "on_log"]
    return [line for line in lines if line[0] != "on_log"]


def run_child(root: str, number: int, strategy: str, epochs: int, every: int, kill: Sequence[Any] | None) -> None:
    """Train in this process, or continue."""
    jl.testing.fake_devices(8)
    saves = jl.callbacks.ModelCheckpoint(every_n_train_steps=every)
    callbacks = [saves] if kill is None else [saves, KillsAt(*kill)]
    trainer = make_trainer(
        strategy, Path(root), callbacks, f"journal{number}", max_epochs=epochs, resume="auto", enable_checkpointing=True
    )
    fit(trainer)
    write_final(trainer, Path(root))


if __name__ == "__main__":
    run_child(*json.loads(sys.argv[1]))
