"""The test server against the SDK itself: what a script logs is what the server has, and faults are faults."""

import contextlib
import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from wandb_backend import Backend

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
WEIGHTS = {"model": bytes(range(256)) * 40, "data": b"a,b\n1,2\n"}  # the contents of two artifacts

# The first process finishes a run, then shares another with the second process, which resumes the first run as well.
FIRST = """
import numpy as np, sys, wandb
quiet = dict(silent=True, x_disable_stats=True)
run = wandb.init(project="p", id="alone", name="shown", group="g", job_type="train", notes="why", tags=["x", "y"],
                 config={"lr": 0.1, "net": {"width": 3}}, settings=wandb.Settings(**quiet))
for step in range(30):
    run.log({"loss": 1 / (step + 1), "at": step})
pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
histogram = wandb.Histogram(np_histogram=([1, 2], [0.0, 0.5, 1.0]))
table = wandb.Table(columns=["name", "value"], data=[["one", 1], ["two", 2]])
run.log({"image": wandb.Image(pixels), "histogram": histogram, "table": table}, step=40)
run.summary["best"] = 0.25
print("a line of output")
for kind, file, contents in [("model", "deep/weights.bin", bytes(range(256)) * 40), ("data", "x.csv", b"a,b\\n1,2\\n")]:
    artifact = wandb.Artifact(f"the-{kind}", kind, metadata={"step": 30})
    with artifact.new_file(file, mode="wb") as opened:
        opened.write(contents)
    run.log_artifact(artifact, aliases=["best"]).wait(timeout=30)
    print(artifact.version, file=sys.stderr)
run.finish(exit_code=3)
shared = wandb.Settings(mode="shared", x_label="first", x_primary=True, silent=True)
run = wandb.init(project="p", id="both", config={"lr": 0.5}, settings=shared)
for step in range(4):
    run.log({"from": 1, "at": step})
sys.stdin.readline()
run.finish()
"""
SECOND = """
import sys, wandb
settings = wandb.Settings(mode="shared", x_label="second", x_primary=False, x_update_finish_state=False, silent=True)
run = wandb.init(project="p", id="both", settings=settings)
for step in range(3):
    run.log({"from": 2, "at": step})
run.finish()
settings = wandb.Settings(silent=True, x_disable_stats=True)
run = wandb.init(project="p", id="alone", resume="allow", config={"more": 1}, settings=settings)
print(run.resumed, run.starting_step, run.config["lr"], run.summary["best"], file=sys.stderr)
for step in range(30, 32):
    run.log({"loss": 1 / (step + 1), "at": step})
run.finish()
"""
THIRD = """
import sys, wandb
run = wandb.init(project="p", id="dying", settings=wandb.Settings(silent=True, x_disable_stats=True, finish_timeout=1))
artifact = wandb.Artifact("the-model", "model")
with artifact.new_file("weights") as opened:
    opened.write("1")
try:
    run.log_artifact(artifact).wait(timeout=30)
except ValueError as error:
    print(error, file=sys.stderr)
for step in range(30):
    run.log({"at": step})
run.finish()
"""


def start(script: str, folder: Path, backend: Backend) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder,
        env=backend.env(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> list[str]:
    """Wait until a script has ended well, and return what it itself wrote to standard error."""
    try:
        output, errors = process.communicate("\n", timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output + errors
    return [line for line in errors.splitlines() if line and not line.startswith("wandb: ")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Backend, list[str], list[str]]]:
    """A server after two processes, with what they told."""
    folder = tmp_path_factory.mktemp("served")
    with Backend() as backend:
        first = start(FIRST, folder, backend)
        try:
            backend.wait_for(lambda: "both" in backend.runs)
            second = ended(start(SECOND, folder, backend))
        finally:
            told = ended(first)
        yield backend, told, second


def test_an_online_run_arrives_whole(served: tuple[Backend, list[str], list[str]]) -> None:
    run = served[0].runs["alone"]
    assert [(row["at"], row["loss"]) for row in run.history[:30]] == [(i, 1 / (i + 1)) for i in range(30)]
    assert run.history[30]["histogram"] == {"_type": "histogram", "values": [1, 2], "bins": [0, 0.5, 1]}
    named = (run.project, run.display_name, run.group, run.job_type, run.notes, sorted(run.tags))
    assert named == ("p", "shown", "g", "train", "why", ["x", "y"])
    assert run.config == {"lr": 0.1, "net": {"width": 3}, "more": 1}
    assert run.summary["best"] == 0.25
    assert any(line.endswith("a line of output") for line in run.output)


def test_media_arrive_as_files_of_the_run(served: tuple[Backend, list[str], list[str]]) -> None:
    run = served[0].runs["alone"]
    row = run.history[30]
    with Image.open(BytesIO(run.files[row["image"]["path"]])) as image:
        np.testing.assert_array_equal(np.asarray(image), PIXELS)
    table = json.loads(run.files[row["table"]["path"]])
    assert table["columns"] == ["name", "value"]
    assert table["data"] == [["one", 1], ["two", 2]]


def test_artifacts_arrive_with_their_files_and_are_committed(served: tuple[Backend, list[str], list[str]]) -> None:
    backend, told, _ = served
    model, data = (artifact for artifact in backend.artifacts if artifact.name.startswith("the-"))
    assert (model.name, model.type, model.metadata, model.run_id) == ("the-model", "model", {"step": 30}, "alone")
    assert (model.files, data.files) == ({"deep/weights.bin": WEIGHTS["model"]}, {"x.csv": WEIGHTS["data"]})
    assert list(model.manifest["contents"]) == ["deep/weights.bin"]
    assert sorted(model.aliases) == ["best", "latest"]
    assert all(artifact.committed for artifact in backend.artifacts)
    assert told == ["v0", "v0"]
    [table] = (artifact for artifact in backend.artifacts if artifact.type == "run_table")
    assert json.loads(table.files["table.table.json"])["data"] == [["one", 1], ["two", 2]]


def test_a_second_process_resumes_a_finished_run(served: tuple[Backend, list[str], list[str]]) -> None:
    backend, _, told = served
    run = backend.runs["alone"]
    assert told == ["True 41 0.1 0.25"]
    assert (run.sessions, run.resumed, run.exit_code) == (2, True, 0)
    assert len(run.history) == 33
    assert [(row["_step"], row["at"]) for row in run.history[31:]] == [(41, 30), (42, 31)]


def test_two_processes_write_one_shared_run(served: tuple[Backend, list[str], list[str]]) -> None:
    run = served[0].runs["both"]
    expected = [(1, i) for i in range(4)] + [(2, i) for i in range(3)]
    assert sorted((row["from"], row["at"]) for row in run.history) == expected
    assert sorted([row["from"] for row in rows] for rows in run.clients.values()) == [[1] * 4, [2] * 3]
    labels = {name.partition("/l:")[2] for row in run.events for name in row if name.startswith("system.")}
    assert labels == {"first", "second"}
    assert (run.sessions, run.resumed, run.exit_code, run.config) == (2, False, 0, {"lr": 0.5})


def test_a_failing_commit_and_a_dying_server_reach_the_sdk(tmp_path: Path) -> None:
    with Backend() as backend:
        backend.fail_operations = {"CommitArtifact"}
        backend.die_after(10)
        told = ended(start(THIRD, tmp_path, backend))
    assert "CommitArtifact fails on request" in told[0]
    [artifact] = backend.artifacts
    assert (artifact.files, artifact.committed) == ({"weights": b"1"}, False)
    run = backend.runs["dying"]
    assert [row["at"] for row in run.history] == list(range(10))
    assert run.exit_code is None


@contextlib.contextmanager
def connected(backend: Backend, timeout: float = 30.0) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(backend.url.removeprefix("http://"), timeout=timeout)
    try:
        yield connection
    finally:
        connection.close()


def post(backend: Backend, path: str, body: object) -> int:
    """Send one request, and return the status of its answer."""
    with connected(backend) as connection:
        connection.request("POST", path, json.dumps(body))
        return connection.getresponse().status


def test_faults_begin_and_end_at_any_time() -> None:
    with Backend() as backend:
        statuses = []
        for backend.fault in ("500", None, "401", None):
            statuses.append(post(backend, "/telemetry", {}))
        assert statuses == [500, 200, 401, 200]
        backend.fault = "drop"
        with pytest.raises(http.client.RemoteDisconnected):
            post(backend, "/telemetry", {})
    with pytest.raises(ConnectionRefusedError):
        post(backend, "/telemetry", {})


def test_a_hanging_request_and_an_idle_connection_end_with_the_server() -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        with Backend() as backend:
            hanging = stack.enter_context(connected(backend, timeout=0.2))
            idle = stack.enter_context(connected(backend))
            for connection in (hanging, idle):
                connection.request("POST", "/telemetry", "{}")
                connection.getresponse().read()
            backend.fault = "hang"
            hanging.request("POST", "/telemetry", "{}")
            with pytest.raises(TimeoutError):
                hanging.getresponse()
        assert threading.active_count() == before
        assert [connection.sock.recv(1) for connection in (hanging, idle)] == [b"", b""]


def test_an_error_in_the_server_itself_is_raised_at_its_end() -> None:
    backend = Backend()
    with pytest.raises(http.client.RemoteDisconnected):
        post(backend, "/graphql", {"no": "operation"})
    with pytest.raises(KeyError, match="query"):
        backend.close()


def test_a_line_sent_twice_is_kept_once_and_a_restart_overwrites() -> None:
    with Backend() as backend:
        opening = {"name": "r", "project": "p", "host": "h"}
        post(backend, "/graphql", {"query": "mutation UpsertBucket", "variables": opening})
        for offset, values in ((0, [1, 2]), (1, [2, 3]), (3, [4]), (0, [9])):
            part = {"offset": offset, "content": [json.dumps({"a": value}) for value in values]}
            post(backend, "/files/tests/p/r/file_stream", {"files": {"wandb-history.jsonl": part}})
    assert [row["a"] for row in backend.runs["r"].history] == [9, 2, 3, 4]
