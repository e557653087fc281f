"""MLFlowLogger: what a store holds after a training; a stand-in for MLflow's client keeps it."""

import contextlib
import posixpath
import re
import signal
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.journal import Rows, at_batch, hooks
from kit.modules import Mean
from kit.odd_names import LOGGED, MLFLOW_NAMES, train_odd_names
from kit.refusals import refuses
from kit.trainers import BARE, fit, make_trainer

import jaxlit as jl
from jaxlit.callbacks import MLFlowLogger
from jaxlit.errors import LoggerError

KEY = "hf_" + "Ab1" * 12


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: str


URI = "sqlite:///default.db"
# What all clients of one address share: experiments, runs, and the method that raises.
STORES: dict[str, Any] = defaultdict(lambda: SimpleNamespace(experiments={}, runs={}, fails="", rules={}))


class Refused(Exception):
    error_code = "INVALID_PARAMETER_VALUE"


def check_name(name: str, pattern: str = r"[/\w.\- :]*") -> None:
    """Refuse what MLflow 3 refuses as the name of a metric or a parameter."""
    normal = posixpath.normpath(name)
    if not re.fullmatch(pattern, name) or len(name) > 250 or normal != name or re.match(r"\.$|\.\.|/", normal):
        raise Refused(name)


class Client:
    """MLflow's client, as far as the logger calls it; parameters cannot be changed, as there."""

    def __init__(self, tracking_uri: str | None = None) -> None:
        self.tracking_uri = tracking_uri or URI
        self._store = STORES[self.tracking_uri]

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "tracking_uri" and self._store.fails == name:
            raise ConnectionError(f"{name} fails")
        return object.__getattribute__(self, name)

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self._store.experiments[name]) if name in self._store.experiments else None

    def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
        self._store.experiments[name] = f"e{len(self._store.experiments)}"
        return self._store.experiments[name]

    def search_runs(self, experiment_ids: list[str], filter_string: str = "") -> list[Any]:
        tag, wanted = filter_string.removeprefix("tags.").split(" = ")
        return [run for run in self._store.runs.values() if run.data.tags.get(tag) == wanted.strip("'")]

    def create_run(self, experiment_id: str, run_name: str | None = None, tags: Any = None) -> Any:
        info = SimpleNamespace(run_id=f"r{len(self._store.runs)}", experiment_id=experiment_id, status="RUNNING")
        info.run_name = run_name
        data = SimpleNamespace(tags=dict(tags), params={}, metrics=[])
        self._store.runs[info.run_id] = SimpleNamespace(info=info, data=data, files={})
        return self._store.runs[info.run_id]

    def get_run(self, run_id: str) -> Any:
        return self._store.runs[run_id]

    def update_run(self, run_id: str, status: str | None = None) -> None:
        self._store.runs[run_id].info.status = status

    set_terminated = update_run

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= 1000 and len(params) <= 100
        held = self._store.runs[run_id].data
        for key, value, *_ in [*metrics, *params]:
            check_name(key, **self._store.rules)
            assert len(str(value)) <= 6000
        held.metrics += metrics
        for key, value in params:
            assert held.params.setdefault(key, value) == value

    def log_artifacts(self, run_id: str, local_dir: str, artifact_path: str = "") -> None:
        files = {p.relative_to(local_dir).as_posix(): p.read_bytes() for p in Path(local_dir).rglob("*") if p.is_file()}
        self._store.runs[run_id].files |= {(Path(artifact_path) / name).as_posix(): files[name] for name in files}


@pytest.fixture(autouse=True)
def mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `import mlflow` find the stand-in."""
    STORES.clear()
    top = SimpleNamespace(
        tracking=SimpleNamespace(MlflowClient=Client), entities=SimpleNamespace(Metric=Metric, Param=Param)
    )
    for name, result in {"": top, ".tracking": top.tracking, ".entities": top.entities}.items():
        monkeypatch.setitem(sys.modules, f"mlflow{name}", result)


def the_run(uri: str = URI) -> Any:
    (run,) = STORES[uri].runs.values()
    return run


def made(**hparams: Any) -> Any:
    def init(self: Any, width: int = 3, api_key: str = KEY, nested: Any = None) -> None:
        Mean.__init__(self)

    return type("Made", (Mean,), {"__init__": init})(**hparams)


def log_media(trainer: Any, *_: Any) -> None:
    trainer.logger.log_text("a/note", f"key {KEY}")
    trainer.logger.log_hyperparams({"hf_token": KEY})
    trainer.logger.log_table("rows", ["x"], [[1]])
    trainer.logger.log_image("picture", np.zeros((2, 2, 3), np.uint8), caption=["black"])
    trainer.logger.log_histogram("spread", np.arange(4.0), bins=2)
    trainer.logger.log_table("rows", ["x"], [[2]])


def test_rows_hyperparameters_tags_and_media_are_in_the_run() -> None:
    logger, rows = MLFlowLogger("exp", "one", tags={"who": 3}, prefix="p"), Rows()
    model = made(width=7, nested={"a": {"b": 1}, "c[0]": 2})
    media = hooks(on_train_end=log_media)
    given = BARE | {"logger": logger, "log_every_n_steps": 1}
    trainer = fit(model, numbered(4), numbered(1, 9), rows, media, **given)
    run = the_run()
    result = {(m.step, m.key): m.value for m in run.data.metrics if m.key != "p/lr"}  # which `Rows` leaves out
    assert result == {(step, f"p/{name}"): value for step, row in rows.rows for name, value in row.items()}
    secrets = dict.fromkeys(("api_key", "hf_token"), "<redacted>")
    assert run.data.params == {"width": "7", "nested/a/b": "1", "nested/c_0_": "2", **secrets}
    assert run.data.tags.items() >= {("who", "3")} and (run.info.run_name, run.info.status) == ("one", "FINISHED")
    names = ("a/note/3.txt", "rows/3.csv", "picture/3.png", "picture/3.txt", "spread/3.json", "rows/3_1.csv")
    assert [*run.files] == [f"media/{name}" for name in names]
    assert [run.files[f"media/rows/{name}.csv"] for name in ("3", "3_1")] == [b"x\n1\n", b"x\n2\n"]
    assert not Path(trainer.run_dir / "media").exists()
    assert (logger.name, logger.version, logger.location) == ("exp", "r0", "sqlite:///default.db (run r0)")


def test_a_row_of_many_metrics_is_sent_in_parts() -> None:
    logger, row = MLFlowLogger(), {f"m{i}": float(i) for i in range(1234)}
    log = hooks(on_train_end=lambda *_: logger.log_metrics(row, 9))
    fit(Mean(), numbered(1), None, log, **BARE | {"logger": logger})
    assert {m.key: m.value for m in the_run().data.metrics if m.step == 9} == row


@pytest.mark.parametrize("client", ["stand-in", *["mlflow"] * (find_spec("mlflow") is not None)])
@pytest.mark.filterwarnings("ignore")  # of MLflow itself
def test_odd_names_are_told_apart_and_lose_no_value(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "mlflow.tracking", "mlflow.entities") if client == "mlflow" else ():
        monkeypatch.delitem(sys.modules, name)
    train_odd_names(logger := MLFlowLogger(save_dir="ml"))
    values = defaultdict(list)
    if client == "mlflow":
        for name in logger.experiment.get_run(logger.run_id).data.metrics:
            values[name] = [(m.step, m.value) for m in logger.experiment.get_metric_history(logger.run_id, name)]
    else:
        for metric in the_run(f"sqlite:///{Path.cwd() / 'ml' / 'mlflow.db'}").data.metrics:
            values[metric.key].append((metric.step, metric.value))
    names = {tuple(x): re.sub("-[0-9a-f]{8}$", "-#", name) for name, x in values.items()}
    assert {name: names.get(tuple(x)) for name, x in LOGGED.items()} == {**MLFLOW_NAMES, "mine": "mine"}


def test_a_resume_keeps_the_names_of_metrics() -> None:
    def log(*names: str) -> Any:
        return hooks(on_train_batch_end=lambda t, *_: [t.logger.log_metrics({name: t.global_step}) for name in names])

    fit(Mean(), numbered(1), None, log("a@b", "a#b"), logger=MLFlowLogger(), default_root_dir="run")
    again = {"default_root_dir": "run", "resume": "auto", "max_epochs": 2}
    fit(Mean(), numbered(1), None, log("a#b", "a@b"), logger=MLFlowLogger(), **again)
    order = [m.key[:4] for m in the_run().data.metrics if m.key.startswith("a_b")]
    assert order == ["a_b", "a_b-", "a_b-", "a_b"]


PATHS = {"/data/wiki": 0.7, "s3://books": 0.3, "损失": 1, "a/b": 2, "a": {"b": 3}, "..": {"x@y": 4, "x#y": 5}}


def test_hyperparameters_keyed_by_paths_are_parameters() -> None:
    fit(made(nested=PATHS | {"k" * 300: "v" * 6001}), numbered(1), **BARE | {"logger": MLFlowLogger()})
    params = the_run().data.params
    names = {"_/data/wiki": "0.7", "s3:/_/books": "0.3", "损失": "1", "a/b": "2", "a/b-#": "3", "_/x_y": "4"}
    names |= {"_/x_y-#": "5", "k" * 243: "v" * 6000}
    nested = {re.sub("-[0-9a-f]{8}$", "-#", name): x for name, x in params.items() if name.startswith("nested/")}
    assert nested == {f"nested/{name}": x for name, x in names.items()}


def test_a_name_that_an_old_server_refuses_is_left_out_alone(capsys: Any) -> None:
    STORES[URI].rules = {"pattern": r"[/\w.\- ]*"}
    row = {f"m{i}": 1.0 for i in range(7)} | {"a:b": 2.0}
    log = hooks(on_train_batch_end=lambda t, *_: t.logger.log_metrics(row))
    fit(Mean(), numbered(2), None, log, **BARE | {"logger": MLFlowLogger(), "log_every_n_steps": 1})
    names = [m.key for m in the_run().data.metrics]
    assert [names.count(name) for name in ("m0", "m6", "a:b", "loss")] == [2, 2, 0, 2]
    assert capsys.readouterr().out.count("leaves out what MLflow refuses, first 'a:b'") == 1


def test_a_value_that_is_no_number_is_refused_where_it_is_logged() -> None:
    def log(trainer: Any, *_: Any) -> None:
        with pytest.raises(ValueError, match="text"):
            trainer.logger.log_metrics({"a": "text"})

    given = {"logger": MLFlowLogger(), "log_every_n_steps": 1}
    fit(Mean(), numbered(2), None, hooks(on_train_batch_end=log), **BARE | given)
    assert [m.step for m in the_run().data.metrics if m.key == "loss"] == [0, 1]


@pytest.mark.parametrize("given", ["resumed", "an id"])
def test_a_resumed_training_and_one_with_an_id_go_on_in_the_run(given: str) -> None:
    first = MLFlowLogger(save_dir="ml")
    store = f"sqlite:///{Path.cwd() / 'ml' / 'mlflow.db'}"
    fit(made(), numbered(4), logger=first, default_root_dir="run", log_every_n_steps=1)
    again = MLFlowLogger(save_dir="ml", run_id=first.run_id if given == "an id" else None)
    arguments = {"default_root_dir": "run", "resume": "auto"} if given == "resumed" else {"default_root_dir": "new"}
    fit(made(width=9), numbered(4), logger=again, max_epochs=2, log_every_n_steps=1, **arguments)
    run = the_run(store)
    assert run.data.params["width"] == "3"  # a parameter of MLflow's keeps its value
    steps = [m.step for m in run.data.metrics if m.key == "loss"]
    assert steps == ([*range(8)] if given == "resumed" else [*range(4), *range(8)])


def test_each_fit_that_is_no_resume_has_a_run() -> None:
    trainer = make_trainer(**BARE | {"logger": MLFlowLogger()})
    for _ in range(2):
        trainer.fit(Mean(), numbered(2))
    trainer.validate(Mean(), numbered(1))
    runs = [*STORES[URI].runs.values()]
    assert [run.info.status for run in runs] == ["FINISHED"] * 2 and "val" in {m.key for m in runs[1].data.metrics}


@pytest.mark.parametrize("how, status", [("error", "FAILED"), ("Ctrl-C", "KILLED")])
def test_how_a_fit_ended_is_the_runs_status(how: str, status: str) -> None:
    stop = at_batch(1, lambda *_: 1 / 0 if how == "error" else signal.raise_signal(signal.SIGINT))
    with contextlib.suppress(ZeroDivisionError):
        fit(Mean(), numbered(4), None, stop, **BARE | {"logger": MLFlowLogger()})
    assert the_run().info.status == status


@pytest.mark.parametrize(
    "log_model, kept", [(False, []), (True, ["step_00000004"]), ("all", ["step_00000002", "step_00000004"])]
)
def test_checkpoints_are_artifacts(log_model: Any, kept: list[str]) -> None:
    trainer = fit(Mean(), numbered(2), logger=MLFlowLogger(log_model=log_model), max_epochs=2, default_root_dir="run")
    files = the_run().files
    assert sorted({name.split("/")[1] for name in files}) == kept
    for name in kept[-1:]:
        manifest = f"checkpoints/{name}/MANIFEST.json"
        assert files[manifest] == Path(trainer.run_dir / manifest).read_bytes()


@pytest.mark.parametrize("method", ["get_experiment_by_name", "log_batch", "log_artifacts", "set_terminated"])
def test_a_failure_is_printed_once_and_changes_no_weight(method: str, capsys: Any) -> None:
    STORES[URI].fails, model = method, Mean()
    given = {"logger": MLFlowLogger(log_model="all"), "log_every_n_steps": 1}
    fit(model, numbered(4), None, hooks(on_train_end=log_media), **BARE | given)
    assert float(model.w[...][0]) == mean([[1], [2], [3], [4]])
    assert capsys.readouterr().out.count("MLFlowLogger cannot send") == 1


def test_on_error_raise_ends_training() -> None:
    STORES[URI].fails = "log_batch"
    with pytest.raises(LoggerError, match="log_batch fails"):
        fit(Mean(), numbered(4), **BARE | {"logger": MLFlowLogger(on_error="raise"), "log_every_n_steps": 1})


def test_without_mlflow_the_constructor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    refuses(LoggerError, MLFlowLogger, r"pip install mlflow")
    with pytest.raises(AttributeError, match="MLFlowLogger, as Lightning spells it"):
        _ = jl.callbacks.MLflowLogger
