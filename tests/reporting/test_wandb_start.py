"""Runs that open late, offline or not at all: nobody waits or is asked, and one line says which it is."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
import wandb
from kit.journal import hooks
from kit.processes import say
from kit.refusals import refuses
from kit.waiting import held, interrupts
from kit.wandb_runs import FakeRun, Wide, data, run_files, start, summary, trainer_of
from wandb.errors import UsageError

from jaxlit.callbacks import WandbLogger
from jaxlit.errors import JaxlitError
from jaxlit.reporting import wandb_run, wandb_start
from jaxlit.reporting.wandb_run import WandbRun
from jaxlit.reporting.wandb_start import open_run

SETTINGS = {"init_timeout": 25.0, "finish_timeout": 5.0}


def opened(**given):
    arguments = {"id": "wanted", "dir": str(Path.cwd())}
    return open_run(arguments, SETTINGS, **({"alone": {}, "earlier": None, "offline": False, "raises": False} | given))


@pytest.fixture
def asked(monkeypatch):
    """What `wandb.init` was given, and a list of what it calls; there is a keyboard, which it may not ask."""
    found, answers = [], []
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(wandb_start, "MARGIN", 0.0)
    monkeypatch.setattr(wandb, "setup", lambda settings: None)
    monkeypatch.setattr(wandb, "init", lambda **given: found.append((given, sys.stdin.isatty())) or answers.pop(0)())
    return found, answers


def fail():
    raise RuntimeError("the service is gone\nand more")


# With an SDK that a test makes up


def test_an_init_that_hangs_is_left_behind_and_ended_when_it_comes(asked, monkeypatch, capsys):
    given, answers = asked
    monkeypatch.setitem(SETTINGS, "init_timeout", 0.01)
    ended = threading.Event()
    late, run = FakeRun(finish=ended.set), FakeRun()
    run.offline = True
    with held() as release:
        answers += [lambda: release.wait(30) and late, lambda: run]
        found = opened()  # on a busy machine a future, as that limit holds for both
        assert (found if found is run else found.result(30)) is run and late.codes == []
    assert ended.wait(30) and late.codes == [1]
    (first, tty), (second, _) = given
    assert (first["mode"], second["mode"], tty) == (None, "offline", False)
    assert first["id"] == "wanted" != second["id"] and sys.stdin.isatty()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("W&B offline (no answer after") and line.endswith("wandb sync --id wanted /there")
    assert "; WandbLogger(init_timeout=...) waits longer) " in line


def test_a_run_on_the_disk_is_waited_for_and_its_timeouts_are_those_of_a_busy_machine(asked, monkeypatch, capsys):
    """Nobody else has to answer: the limit that was asked for is one for the training, not for the run."""
    given, answers = asked
    monkeypatch.setitem(SETTINGS, "init_timeout", 0.01)
    run = FakeRun()
    run.id, run.offline = "wanted", True
    with held() as release:
        answers.append(lambda: release.wait(30) and run)
        opening = opened(offline=True, rows="run/metrics.csv")
        assert not opening.is_done
        line = capsys.readouterr().out
        assert "not open after 0 s" in line and "rows: run/metrics.csv, and wandb as soon as it is" in line
        found = WandbRun(opening, 30.0, raises=False)
        found.log({"loss": 1.0})
        assert found.run is None
        said = []
        monkeypatch.setattr(wandb_run, "say", lambda line: (said.append(line), release.set()))
        found.finish(failed=False)  # which says that it waits
    assert run.rows == [{"loss": 1.0}] and run.codes == [0] and found.run is run
    assert said == ["W&B: training has ended, and waits for the offline run to open; Ctrl-C leaves it"]
    assert given[0][0]["settings"].init_timeout >= 600
    assert capsys.readouterr().out == "W&B offline \N{MIDDLE DOT} upload: wandb sync /there\n"


def test_a_run_on_the_disk_that_fails_after_its_time_is_said_to_be_off(asked, monkeypatch, capsys):
    monkeypatch.setitem(SETTINGS, "init_timeout", 0.01)
    with held() as release:
        asked[1].append(lambda: release.wait(30) and fail())
        found = WandbRun(opened(offline=True), 30.0, raises=False)
        found.log({"loss": 1.0})
        capsys.readouterr()
    found.finish(failed=False)
    told = capsys.readouterr().out.splitlines()
    assert [line for line in told if "waits" not in line] == ["W&B: off for the rest of this run (the service is gone)"]


def test_ctrl_c_leaves_a_run_that_opens_and_tries_nothing_else(asked, capsys):
    given, answers = asked
    ended = threading.Event()
    late = FakeRun(finish=ended.set)
    with held() as release, interrupts() as interrupt:
        answers.append(lambda: interrupt() or (release.wait(30) and late))
        with pytest.raises(KeyboardInterrupt):
            opened()
        assert len(given) == 1 and late.codes == [] and capsys.readouterr().out == ""
    assert ended.wait(30) and late.codes == [1]


def test_where_no_run_can_be_opened_there_is_none_or_the_failure_is_raised(asked, capsys):
    asked[1].extend([FakeRun, *[fail] * 4])
    assert opened().url == FakeRun.url and capsys.readouterr().out == f"W&B {FakeRun.url}\n"
    assert opened() is None
    assert capsys.readouterr().out == "W&B: off for this run (the service is gone)\n"
    asked[1].extend([fail] * 2)
    assert opened(rows="run/metrics.csv") is None
    off = "W&B: off for this run (the service is gone) \N{MIDDLE DOT} rows: run/metrics.csv\n"
    assert capsys.readouterr().out == off
    for offline in (False, True):
        with pytest.raises(RuntimeError, match="the service is gone"):
            opened(raises=True, offline=offline)


# With the real one


def test_without_a_key_a_run_is_offline_which_one_line_says(capfd):
    run = opened()
    run.finish()
    assert run.id == "wanted" and run.offline
    out, err = capfd.readouterr()
    (line,) = out.splitlines()
    assert line.startswith("W&B offline (") and "api key" in line.lower().replace("_", " ")
    assert "--id" not in line and err == ""
    assert Path(line.partition("wandb sync ")[2]).resolve() == run_files(".")[0].parent.resolve()
    with pytest.raises(UsageError, match="(?i)api.key"):
        opened(raises=True)


def test_a_mode_that_is_set_later_counts(monkeypatch, capsys):
    wandb.setup()  # which reads the environment
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)  # not the lack of a key
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_MODE", "offline")
    opened(raises=True).finish()
    assert capsys.readouterr().out.startswith("W&B offline \N{MIDDLE DOT} upload") and len(run_files(".")) == 1
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run = opened(raises=True, offline=True)
    run.finish()  # what is open would be used by others
    assert run.disabled and capsys.readouterr().out == "W&B disabled\n"


def test_without_the_package_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refuses(JaxlitError, opened, "pip install wandb")


# Processes


def fit_and_test():
    """Train and test with a server that cannot be reached, and before that without W&B."""
    several = jax.process_count() > 1
    kind = {"strategy": "ddp" if several else "single", "enable_checkpointing": not several, "max_epochs": 2}
    plain = trainer_of(default_root_dir="../plain", **kind)
    plain.fit(Wide(), data(), data())
    logger, runs = WandbLogger("project", init_timeout=1.0, finish_timeout=5.0, processes="shared"), []

    def note(trainer, module):
        runs.append((logger.experiment.id, logger.experiment.group, logger.experiment.offline))

    trainer = trainer_of(logger, hooks(on_train_end=note, on_test_end=note), default_root_dir="../run", **kind)
    trainer.fit(Wide(), data(), data())
    trainer.test(dataloaders=data())
    say("id", logger.id)
    say("runs", runs)
    say("same", all((x == y).all() for x, y in zip(*map(jax.tree.leaves, (plain.state, trainer.state)), strict=True)))


def fit_test_and_hang():
    """Then stop the SDK's own process, which answers nothing any more: the SDK waits for it at the end, for ever."""
    fit_and_test()
    wandb_run.MARGIN, wandb_start._EXIT = 0.0, 0.1
    stop = lambda *all: os.kill(wandb.setup()._connection._proc._process.pid, signal.SIGSTOP)  # noqa: E731
    logger, given = WandbLogger(offline=True, finish_timeout=0.5), {"max_epochs": 0, "default_root_dir": "../hangs"}
    trainer_of(logger, hooks(on_fit_end=stop), **given).fit(Wide(), data())
    say("ended", True)


def lines_in(file):
    return [line.rstrip(",") for line in file.read_text().splitlines()[1:]]


def lines_of_wandb(ended):
    return [line for line in ended.output.splitlines() if "W&B" in line]


@pytest.mark.full
def test_a_server_out_of_reach_and_a_service_that_hangs_change_nothing_and_learn_no_secret(tmp_path):
    secrets = {"MY_SECRET": "planted", "WANDB_API_KEY": "planted1" * 5, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    (ended,) = start(fit_test_and_hang, tmp_path / "here", log_to=None, **secrets)
    assert (ended.code, ended.errors) == (0, ""), ended.output + ended.errors
    assert ended.said["same"] and ended.said["ended"]
    with_it, without = (lines_in(tmp_path / name / "metrics.csv") for name in ("run", "plain"))
    assert with_it[:-1] == without  # the last is the test's
    # One run on the disk, with an id of its own, in two parts: of the fit and of the test.
    (fitted, tested), name = ended.said["runs"], ended.said["id"]
    assert fitted == tested == [fitted[0], "", True] and fitted[0] != name
    assert [path.name for path in run_files(tmp_path / "run")] == [f"run-{fitted[0]}.wandb"] * 2
    # Each line says how its part gets to the run of the training, which a checkpoint knows; none of an id in use.
    first, second, third, hung = lines_of_wandb(ended)
    assert third.startswith("W&B offline") and hung.startswith("W&B: the upload did not finish (no end after")
    assert first.startswith("W&B offline (") and second.startswith("W&B offline \N{MIDDLE DOT} ")
    told = [line.partition("wandb sync ")[2].split() for line in (first, second)]
    assert [words[:2] for words in told] == [["--id", name]] * 2
    found = [(tmp_path / "here" / words[2]).resolve() for words in told]
    assert found == [path.parent.resolve() for path in run_files(tmp_path / "run")]
    (state,) = tmp_path.glob("run/checkpoints/step_*/state.json")
    assert json.loads(state.read_text())["callbacks"]["WandbLogger"] == {"id": name}
    assert summary(tmp_path / "run")["config"]["api_key"] == "<redacted>"
    files = [path for path in (tmp_path / "run/wandb").rglob("*") if path.is_file()]
    assert [path for path in files if b"planted" in path.read_bytes()] == []


@pytest.mark.full
def test_processes_that_cannot_share_a_run_have_one_each_in_a_group(tmp_path):
    first, second = start(fit_and_test, tmp_path / "here", 2, log_to=None)
    assert [first.code, second.code] == [0, 0], first.errors + second.errors
    name = first.said["id"]
    assert second.said["id"] == name
    for ended, run in zip((first, second), (name, f"{name}-1"), strict=True):
        assert ended.said["runs"] == [[run, name, True]] * 2 and ended.said["same"]
        told = lines_of_wandb(ended)
        assert len(told) == 2 and all("--id" not in line for line in told) and "No API key" in told[0]
    assert {path.name for path in run_files(tmp_path / "run")} == {f"run-{name}.wandb", f"run-{name}-1.wandb"}
