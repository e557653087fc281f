"""WandbLogger with the real SDK, without network, read back by W&B's own reader."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb

from jaxlit.callbacks import WandbLogger
from jaxlit.callbacks.wandb_logger import redact
from jaxlit.errors import ArgumentError, JaxlitError

STEP = "trainer/global_step"


def read(run_dir, *options):
    """Return what W&B reads in the newest offline run below a folder: one object, or a list of records."""
    newest = max(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(newest)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout
    return json.loads(out) if options else [json.loads(line) for line in out.splitlines()]


def summary(run_dir):
    return read(run_dir, "--summary")


def train(trainer, logger, rows=((0, {"loss": 1.0}),), error=None):
    trainer.start(logger)
    for step, values in rows:
        trainer.log(logger, values, step)
    if error is not None:
        logger.on_exception(trainer, trainer.module, error)
    logger.teardown(trainer, trainer.module, "fit")


def test_rows_come_back_with_the_steps_that_made_them(make_trainer):
    trainer = make_trainer()
    # A step that goes back, as after a resume, is kept too.
    rows = [(4, {"loss": 1.5}), (9, {"loss": 0.5, "val/loss": 2.0}), (7, {"loss": 0.25})]
    train(trainer, WandbLogger(offline=True), rows)
    items = [record["history"]["item"] for record in read(trainer.run_dir) if record["type"] == "history"]
    found = [{k: v for k, v in item.items() if not k.startswith("_")} for item in items]
    assert found == [{**values, STEP: step, "epoch": 0} for step, values in rows]


def test_every_metric_has_the_global_step_as_its_axis(make_trainer):
    trainer = make_trainer()
    train(trainer, WandbLogger(offline=True))
    metrics = [record["metric"] for record in read(trainer.run_dir) if record["type"] == "metric"]
    assert {(m.get("glob_name") or m.get("name"), m.get("step_metric")) for m in metrics} == {(STEP, None), ("*", STEP)}


def test_the_run_holds_its_description(make_trainer):
    trainer = make_trainer(module=SimpleNamespace(hparams={"width": 8}), config={"max_epochs": 3})
    logger = WandbLogger("digits", name="first", id="abc123", tags=["a", "b"], notes="why", offline=True)
    train(trainer, logger)
    found = summary(trainer.run_dir)
    described = {k: found[k] for k in ("project", "name", "run_id", "tags", "notes")}
    assert described == {
        "project": "digits",
        "name": "first",
        "run_id": "abc123",
        "tags": ["a", "b"],
        "notes": "why",
    }
    assert found["config"] == {"width": 8, "trainer": {"max_epochs": 3}, "strategy": "DDP on mesh data=8"}


@pytest.mark.parametrize(("error", "code"), [(None, 0), (ValueError("bad batch"), 1)])
def test_the_exit_code_tells_of_an_error(make_trainer, error, code):
    trainer = make_trainer()
    train(trainer, WandbLogger(offline=True), error=error)
    assert summary(trainer.run_dir)["exit_code"] == code


def test_a_second_fit_has_the_same_id(make_trainer):
    trainer, logger = make_trainer(), WandbLogger(offline=True, id="abc123")
    train(trainer, logger)
    train(trainer, logger, [(1, {"loss": 0.5})])
    files = [path.name for path in trainer.run_dir.glob("wandb/offline-run-*/*.wandb")]
    assert files == ["run-abc123.wandb"] * 2


def test_offline_is_said_in_one_line_with_the_command_that_uploads(make_trainer, capfd):
    trainer = make_trainer()
    train(trainer, WandbLogger(offline=True))
    out, err = capfd.readouterr()
    (folder,) = trainer.run_dir.glob("wandb/offline-run-*")
    assert len(out.splitlines()) == 1 and out.rstrip().endswith(f"wandb sync {folder}") and err == ""


def test_without_a_key_the_run_goes_offline(make_trainer, capfd):
    trainer, logger = make_trainer(), WandbLogger()
    train(trainer, logger)
    out = capfd.readouterr().out
    assert len(out.splitlines()) == 1 and "No API key" in out
    assert summary(trainer.run_dir)["summary"]["loss"] == 1.0


def test_without_a_key_on_error_raise_raises(make_trainer):
    logger, trainer = WandbLogger(on_error="raise"), make_trainer()
    with pytest.raises(wandb.errors.UsageError, match="API key"):
        trainer.start(logger)


def test_nothing_asks_for_a_key_on_a_terminal(make_trainer, monkeypatch):
    class Keyboard:
        def isatty(self):
            return True

        def readline(self, *size):
            raise AssertionError("someone was asked")

    keyboard, trainer = Keyboard(), make_trainer()
    monkeypatch.setattr(sys, "stdin", keyboard)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    train(trainer, WandbLogger())
    assert sys.stdin is keyboard


UNREACHABLE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from jaxlit.callbacks import WandbLogger
trainer = SimpleNamespace(run_dir=Path(sys.argv[1]), is_global_zero=True, config={},
                          strategy=SimpleNamespace(describe=lambda: "DDP"))
module = SimpleNamespace(hparams={"api_key": "planted-1", "nested": [{"db_password": "planted-2"}], "width": 8})
logger = WandbLogger(init_timeout=5, finish_timeout=5)
logger.setup(trainer, module, "fit")
logger.on_log(trainer, {"loss": 1.0}, 0)
logger.teardown(trainer, module, "fit")
"""


@pytest.fixture(scope="module")
def unreachable(tmp_path_factory):
    """Return a run whose server does not answer, with secrets everywhere, in a process of its own.

    W&B reads its environment once in a process.
    """
    home = tmp_path_factory.mktemp("unreachable")
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env |= {"HOME": str(home), "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "planted3" * 5}
    env |= {"MY_SECRET": "planted-4", "PYTHONPATH": str(Path(__file__).parents[2])}
    env |= {f"WANDB_{kind}_DIR": str(home / kind) for kind in ("CACHE", "DATA", "CONFIG")}
    command = [sys.executable, "-c", UNREACHABLE, str(home / "run"), "--password=planted-5"]
    done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return home, done


def test_a_server_that_does_not_answer_leaves_the_run_on_disk(unreachable):
    home, done = unreachable
    assert done.returncode == 0, done.stderr
    assert summary(home / "run")["summary"]["loss"] == 1.0


def test_a_server_that_does_not_answer_is_said_in_one_line(unreachable):
    _, done = unreachable
    lines = done.stdout.splitlines()
    assert len(lines) == 1 and lines[0].startswith("W&B: offline (") and "wandb sync" in lines[0]


def test_no_secret_is_written_anywhere(unreachable):
    home, done = unreachable
    files = [path for path in home.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert [path for path in files if b"planted" in path.read_bytes()] == []
    assert "planted" not in done.stdout + done.stderr


def test_what_looks_like_a_secret_is_redacted_at_any_depth():
    config = {
        "API_KEY": "x",
        "apiKey": ["x"],
        "a": {"hf_token": "x", "list": [{"client_secret": {"y": "x"}}, ({"PASSWORD": 1234},)]},
        "aws_credentials": "x",
        "Authorization": "x",
    }
    assert "x" not in (text := json.dumps(redact(config)).replace("<redacted>", "")) and "1234" not in text


def test_ordinary_hyperparameters_are_kept():
    config = {"width": 8, "max_tokens": 4096, "names": ["a", {"lr": 0.1}], "key": None}
    assert redact(config) == config


class FakeRun:
    """A run whose server does as a test says."""

    dir = "/there/files"

    def __init__(self, log=lambda row: None, finish=lambda: None):
        self._log, self._finish, self.rows = log, finish, []

    def log(self, row):
        self.rows.append(row)
        self._log(row)

    def finish(self, exit_code):
        self._finish()

    def define_metric(self, *args, **kwargs):
        pass


def fail(*args):
    raise RuntimeError("the service is gone")


@pytest.fixture
def make_logger(monkeypatch):
    """Return a function that makes a logger on a fake run."""

    def make(run, **arguments):
        logger = WandbLogger(**arguments)
        monkeypatch.setattr(logger, "_start", lambda folder, config: run)
        return logger

    return make


def test_logging_that_fails_is_said_once_and_not_tried_again(make_trainer, make_logger, capsys):
    run = FakeRun(log=fail)
    train(make_trainer(), make_logger(run), [(i, {"loss": 1.0}) for i in range(3)])
    assert len(run.rows) == 1
    assert capsys.readouterr().out.count("the service is gone") == 1


def test_logging_that_fails_raises_if_asked(make_trainer, make_logger):
    with pytest.raises(RuntimeError, match="the service is gone"):
        train(make_trainer(), make_logger(FakeRun(log=fail), on_error="raise"))


def test_a_finish_that_hangs_is_left_behind(make_trainer, make_logger, monkeypatch, capsys):
    monkeypatch.setattr("jaxlit.callbacks.wandb_logger._FINISH_MARGIN", 0.0)
    release = threading.Event()
    train(make_trainer(), make_logger(FakeRun(finish=release.wait), finish_timeout=0.01))
    release.set()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("wandb sync /there")


def test_a_finish_that_fails_is_said_in_one_line(make_trainer, make_logger, capsys):
    train(make_trainer(), make_logger(FakeRun(finish=fail)))
    (line,) = capsys.readouterr().out.splitlines()
    assert "the service is gone" in line


def test_only_the_first_process_has_a_run(make_trainer):
    logger, trainer = WandbLogger(offline=True), make_trainer(is_global_zero=False)
    train(trainer, logger)
    assert logger.experiment is None and not trainer.run_dir.exists()


def test_without_the_package_the_error_says_what_to_do(make_trainer, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    logger, trainer = WandbLogger(offline=True), make_trainer()
    with pytest.raises(JaxlitError, match="pip install wandb"):
        trainer.start(logger)


def test_two_loggers_have_different_ids():
    assert WandbLogger().id != WandbLogger().id


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("project", ""),
        ("name", 3),
        ("id", "a/b"),
        ("group", ""),
        ("tags", "one"),
        ("tags", [1]),
        ("notes", 1),
        ("save_dir", 1),
        ("offline", "yes"),
        ("on_error", "ignore"),
        ("init_timeout", 0),
        ("finish_timeout", -1.0),
        ("finish_timeout", float("inf")),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name, value):
    with pytest.raises(ArgumentError) as error:
        WandbLogger(**{name: value})
    assert f"WandbLogger({name}=...)" in str(error.value) and repr(value) in str(error.value)
