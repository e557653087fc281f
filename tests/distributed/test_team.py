"""What processes decide together and tell each other, and what one does while the others wait."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from kit.batches import Stream, random, sized
from kit.costs import reads
from kit.inside import engine_of
from kit.journal import hooks, raising
from kit.modules import Linear
from kit.processes import launch, say
from kit.threads import as_processes
from kit.trainers import BARE, make_trainer

import jaxlit as jl
from jaxlit.distributed.team import Decisions, once_per_node, team
from jaxlit.errors import CheckpointError, DataError, ProcessError


class Steps:
    """Steps that wait for each other as collectives do: none is dispatched more than `ahead` before the slowest one."""

    def __init__(self, count: int, ahead: int) -> None:
        self.taken, self.ahead, self.moved = [0] * count, ahead, threading.Condition()

    def take(self, index: int) -> None:
        with self.moved:
            self.taken[index] += 1
            self.moved.notify_all()
            assert self.moved.wait_for(lambda: self.taken[index] - min(self.taken) <= self.ahead, 30), "a deadlock"


@contextlib.contextmanager
def listening(seconds: float) -> Iterator[Decisions]:
    """Give what decides with the other processes, and listen to them every so many seconds until all have ended."""
    stop, fate = threading.Event(), team()._fate  # type: ignore[union-attr]
    decisions = Decisions(fate)

    def listen() -> None:
        while not stop.is_set():
            fate._now.wait(seconds)
            decisions._listen()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    decisions.begin()
    yield decisions
    team().agree("all have ended", None)
    stop.set()
    listener.join()


def places_of(index: int, steps: Steps, count: int, asks: dict[int, str]) -> dict[str, int]:
    """Return the place at which a process is told to do what any of them asks for, by what it is."""
    done, asked = dict[str, int](), list[str]()
    with listening(0.001 * (1 + index)) as decisions:
        while len(done) < count:
            steps.take(index)
            asked += [asks[steps.taken[index]]] if steps.taken[index] in asks else []
            for text in decisions.decide(asked):
                done[text], asked = steps.taken[index], [x for x in asked if x != text]
    return done


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_all_processes_do_what_one_asks_for_at_one_place(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asks, steps = [{5: "a"}, {5: "b", 60: "c"}, {30: "d"}], Steps(3, ahead)
    one, *others = as_processes(monkeypatch, lambda index: places_of(index, steps, 4, asks[index]), 3)
    assert one.keys() == {*"abcd"}
    assert others == [one, one]
    assert one["a"] >= 5 and one["b"] >= 5 and one["c"] >= 60 and one["d"] >= 30
    steps = Steps(3, ahead)
    result = as_processes(monkeypatch, lambda index: places_of(index, steps, 1, {40: "stop"}), 3)
    assert result == [{"stop": 40}] * 3, "what all ask for at one place is done there"


def test_what_is_asked_for_again_is_done_at_equal_places(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(2, 4)

    def work(index: int) -> list[int]:
        done = list[int]()
        with listening(0.002) as decisions:
            team().agree("all have begun", None)
            for place in range(1, 60):
                steps.take(index)
                if decisions.decide([] if index else ["again"]):
                    done.append(place)
        return done

    one, other = as_processes(monkeypatch, work)
    assert one == other
    assert len(one) > 5


STEPS = 400


class Stopping(jl.Callback):
    """Ends training in some processes only, after a step."""

    def __init__(self, how: str, at: int, processes: tuple[int, ...]) -> None:
        self.how, self.at = how, at if jax.process_index() in processes else -1

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.at:
            return
        if self.how == "stop":
            trainer.should_stop = True
        elif self.how == "request":
            trainer.request_stop("the machine is needed")
        else:
            os.kill(os.getpid(), getattr(signal, self.how))


def train_together() -> None:
    """End trainings in ways that only one process knows of, and say where each process is then."""
    os.environ["SLURM_JOB_ID"] = "1"
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
    (rows,) = random(1, rows=8 * STEPS)
    loader = jl.ArrayLoader(rows, 8)
    cases = {how: Stopping(how, 5, (1,)) for how in ("SIGINT", "SIGHUP", "SIGUSR1", "request")}
    cases |= {"stop": Stopping("stop", 5, (0,)), "stop of all": Stopping("stop", 5, (0, 1))}
    given = BARE | {"strategy": "ddp", "max_epochs": 1, "enable_checkpointing": True}
    for name, callback in cases.items():
        trainer = make_trainer(callback, jl.callbacks.ModelCheckpoint(), default_root_dir=name, **given)
        code = None
        try:
            trainer.fit(Linear(), loader)
        except SystemExit as error:
            code = error.code
        saved = sorted(path.name for path in Path(name, "checkpoints").glob("step_*"))
        say(name, [trainer.global_step, code, trainer.interrupted, trainer.stop_reason, saved])
    forever = given | {"max_epochs": None, "num_sanity_val_steps": 0}
    steps = list[int]()
    watch = hooks(on_validation_start=lambda trainer, module: steps.append(trainer.global_step))
    saves = jl.callbacks.ModelCheckpoint(train_time_interval={"seconds": 1 + jax.process_index()}, save_top_k=-1)
    trainer = make_trainer(watch, saves, default_root_dir="timed", max_time={"seconds": 4}, **forever)
    trainer.val_check_interval = {"seconds": 1}
    trainer.fit(Linear(), loader, loader)
    saved = sorted(path.name for path in Path("timed", "checkpoints").glob("step_*"))
    say("timed", [trainer.global_step, steps, trainer.stop_reason, saved])
    uneven = Stream(sized(*[8] * (12 - 5 * jax.process_index()), seed=jax.process_index()))
    trainer = make_trainer(**BARE | {"strategy": "ddp", "max_epochs": 2})
    trainer.fit(Linear(), uneven)
    say("uneven", [trainer.global_step, trainer.current_epoch])


@pytest.mark.full
def test_two_processes_end_at_one_step_whichever_is_asked(tmp_path: Path) -> None:
    first, second = launch(train_together, tmp_path, devices=2)
    assert [first.code, second.code] == [0, 0], first.errors + second.errors
    assert first.said == second.said
    said = first.said
    codes = {"SIGINT": None, "SIGHUP": 129, "SIGUSR1": 138, "request": None}
    for name, code in codes.items():
        step, ended, interrupted, reason, saved = said[name]
        assert 5 <= step < STEPS
        assert ended == code
        assert interrupted
        assert reason == ("the machine is needed" if name == "request" else None)
        assert saved == [f"step_{step:08d}"]
    assert 5 <= said["stop"][0] < STEPS
    assert said["stop of all"][0] == 5, "what all ask for in one step is done in it"
    step, validated, reason, saved = said["timed"]
    assert reason.startswith("max_time")
    assert len(validated) >= 2 and len(saved) >= 2
    assert said["uneven"] == [14, 2]
    assert first.errors.count("process 1 has no batch left after 7 batches") == 2
    assert "left out: " in first.errors


def test_an_error_of_one_process_is_raised_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [None, CheckpointError("the disk is full"), DataError("no rows")]
    result = as_processes(monkeypatch, lambda index: team().same_error("writing", errors[index]), 3)
    assert result[1] is errors[1]
    assert [(type(error), str(error)) for error in result] == [(CheckpointError, "the disk is full")] * 3
    with pytest.raises(DataError, match="no rows"):
        team().same_error("writing", errors[2])
    assert team().same_error("writing", None) is None


def read_in_steps() -> None:
    """Say how many values were read from the devices after each step, one of which asks for a stop."""
    (rows,) = random(1, rows=8 * STEPS)
    asks, after = Stopping("stop", 20, (1,)), list[int]()
    with reads() as seen:
        count = hooks(on_train_batch_end=lambda *_: after.append(len(seen)))
        arguments = BARE | {"strategy": "ddp", "max_epochs": 1, "log_every_n_steps": 0, "num_sanity_val_steps": 0}
        make_trainer(asks, count, **arguments).fit(Linear(), jl.ArrayLoader(rows, 8))
    say("after", after)
    say("in all", len(seen))


@pytest.mark.full
def test_a_stop_of_one_process_reads_nothing_from_a_device(tmp_path: Path) -> None:
    first, second = launch(read_in_steps, tmp_path, devices=2)
    assert [first.code, second.code] == [0, 0], first.errors + second.errors
    assert first.said["in all"] > 0, "the counter has seen nothing"
    for one in (first, second):
        assert 20 <= len(one.said["after"]) < STEPS
        assert len({*one.said["after"][1:]}) == 1


def collectives(*callbacks: Any, loader: Any, **arguments: Any) -> dict[str, list[Any]]:
    """Train with four devices in all, and return what they send each other in each program."""
    given = BARE | {"strategy": "fsdp", "devices": 4, "max_epochs": 1, "num_sanity_val_steps": 0} | arguments
    trainer = make_trainer(*callbacks, **given)
    trainer.fit(Linear(4), loader)
    costs = [program.cost for program in engine_of(trainer).programs]
    return {cost.name: [[x.kind, x.calls, x.bytes, x.exact] for x in cost.collectives or ()] for cost in costs}


def send_in_steps() -> None:
    """Say what devices send each other in a run that decides nothing together, and in one that decides much."""
    mine = sized(*[4] * 40, features=4, seed=jax.process_index())
    say("plain", collectives(loader=mine))
    asks = Stopping("request", 5, (1,))
    saves = jl.callbacks.ModelCheckpoint(train_time_interval={"seconds": 1})
    decides = {"max_time": {"minutes": 10}, "enable_checkpointing": True, "default_root_dir": "run"}
    say("deciding", collectives(asks, saves, loader=Stream(mine), **decides))


@pytest.mark.full
def test_deciding_together_sends_nothing_more_in_a_step(tmp_path: Path) -> None:
    alone = collectives(loader=sized(*[8] * 40, features=4))
    assert sum(calls for _, calls, *_ in alone["train_step"]) > 0
    for one in launch(send_in_steps, tmp_path, devices=2):
        assert one.code == 0, one.errors
        assert one.said["plain"] == one.said["deciding"] == alone


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
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: boots[jax.process_index()])
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
