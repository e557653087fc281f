"""A W&B server: it keeps what the real SDK sends over HTTP.

It understands GraphQL (runs and artifacts), `file_stream` (history, summary) and PUT (the contents of files), which is
all that the SDK uses while a run continues. Seen with wandb 0.22.3 to 0.31.
"""

import gzip
import json
import re
import sys
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, Self
from urllib.parse import quote, unquote

Json = dict[str, Any]
HISTORY, EVENTS, SUMMARY = "wandb-history.jsonl", "wandb-events.jsonl", "wandb-summary.json"

_VIEWER = {"id": "1", "entity": "tests", "username": "tests", "email": "", "flags": "{}", "teams": None}
_CONSTANT: dict[str, Json] = {"Viewer": {"viewer": _VIEWER}, "ArtifactType": {"project": {"artifact": None}}}


class ReceivedRun(SimpleNamespace):
    """A run as the server knows it.

    A resumed process continues its lines where the run ended.

    Attributes:
        sessions: How many times a process has opened the run.
        resumed: Whether a process asked for the state of the run and got it.
        exit_code: None until a process has finished the run.
        settings: The config as the SDK sends it, with the SDK's own entry.
        lines: Lines of the streamed files, by file, then by offset, in the order of their first arrival.
        files: Contents of the uploaded files, by name.
    """

    def __init__(self, id: str, project: str) -> None:
        super().__init__(id=id, project=project, display_name=id, group=None, job_type=None, notes=None, tags=[])
        self.sessions, self.resumed, self.exit_code = 0, False, None
        self.summary, self.settings, self.files, self.lines = {}, {}, {}, defaultdict(dict)

    @property
    def config(self) -> Json:
        return {key: entry["value"] for key, entry in self.settings.items() if key != "_wandb"}

    @property
    def history(self) -> list[Json]:
        return [json.loads(line) for line in self.lines[HISTORY].values()]


class Backend:
    """A server on this computer, from its construction until it is closed.

    Attributes:
        url: Its address, for `WANDB_BASE_URL`.
        runs: By run id.
        artifacts: In the order of their creation; the SDK makes one for each logged table too.
        refused: The id of a run whose artifacts are refused.
    """

    def __init__(self) -> None:
        self.runs: dict[str, ReceivedRun] = {}
        self.artifacts: list[Any] = []
        self.refused = ""
        self._lock = threading.Lock()
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Refuse connections from now on, and raise what an answer had raised."""
        self._server.shutdown()
        self._server.server_close()
        if self._server.errors:
            raise self._server.errors[0]

    def models_of(self, run_id: str) -> list[Any]:
        return [a for a in self.artifacts if a.run_id == run_id and a.type == "model"]

    def receive(self, method: str, path: str, body: bytes) -> Json:
        """Keep a request, one at a time, and return its answer."""
        with self._lock:
            parts = path.strip("/").split("/")
            if parts == ["graphql"]:
                return self._operate(json.loads(body))
            if parts[-1] == "file_stream":
                self._stream(self.runs[parts[-2]], json.loads(body))
            elif method == "PUT" and parts[0] != "manifest":
                kind, owner, name = parts[0], parts[1], unquote("/".join(parts[2:]))
                (self.runs[owner] if kind == "run" else self.artifacts[int(owner)]).files[name] = body
            return {}  # all that the SDK's telemetry needs

    def _stream(self, run: ReceivedRun, sent: Json) -> None:
        for file, part in (sent.get("files") or {}).items():
            if file == SUMMARY:
                run.summary = json.loads(part["content"][-1])
                continue
            for offset, line in enumerate(part["content"], part["offset"]):
                run.lines[file][offset] = line
        if sent.get("complete"):
            run.exit_code = sent["exitcode"]

    def _operate(self, request: Json) -> Json:
        result = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
        assert result, request["query"]
        name, asked = result.group(1), request.get("variables") or {}
        if name == "CommitArtifact" and self.artifacts[int(asked["artifactID"])].run_id == self.refused:
            return {"data": None, "errors": [{"message": f"{name} fails on request"}]}
        if name == "UpsertBucket":
            return {"data": self._open_run(asked)}
        operation = getattr(self, f"_{name}", None)
        return {"data": operation(asked) if operation else _CONSTANT.get(name, {})}  # the SDK can do without the others

    def _open_run(self, asked: Json) -> Json:
        """Open a run, or change its config later in the session (only the first request tells the host)."""
        new = asked["name"] not in self.runs
        run = self.runs.setdefault(asked["name"], ReceivedRun(asked["name"], asked["project"]))
        names = {"displayName": "display_name", "groupName": "group", "jobType": "job_type"}
        for theirs, ours in (names | {"notes": "notes", "tags": "tags"}).items():
            if asked.get(theirs) is not None:
                setattr(run, ours, asked[theirs])
        run.sessions += asked.get("host") is not None
        if asked.get("config"):
            run.settings = json.loads(asked["config"])
        bucket = self._bucket(run) | {"description": "", "sweepName": None, "project": self._project(run)}
        return {"upsertBucket": {"bucket": bucket, "inserted": new}}

    def _RunResumeStatus(self, asked: Json) -> Json:
        run = self.runs.get(asked["name"])
        if run is None:
            return {"model": None}
        run.resumed = True
        bucket = self._bucket(run) | {"tags": run.tags, "notes": run.notes, "summaryMetrics": json.dumps(run.summary)}
        for name, file in (("history", HISTORY), ("events", EVENTS), ("log", "output.log")):
            bucket[f"{name}LineCount"] = 1 + max(run.lines[file], default=-1)
            bucket[f"{name}Tail"] = json.dumps(list(run.lines[file].values())[-1:])
        bucket["wandbConfig"] = json.dumps({"t": 1})  # without it the SDK thinks that the run has never started
        return {"model": self._project(run) | {"bucket": bucket}}

    def _bucket(self, run: ReceivedRun) -> Json:
        return {"id": run.id, "name": run.id, "displayName": run.display_name, "config": json.dumps(run.settings)}

    def _project(self, run: ReceivedRun) -> Json:
        return {"id": "1", "internalId": "1", "name": run.project, "entity": {"id": "1", "name": "tests"}}

    def _upload(self, kind: str, owner: str, name: str) -> Json:
        return {"id": "1", "uploadUrl": f"{self.url}/{kind}/{owner}/{quote(name)}", "uploadHeaders": []}

    def _CreateRunFiles(self, asked: Json) -> Json:
        files = [self._upload("run", asked["run"], name) | {"name": name} for name in asked["files"]]
        return {"createRunFiles": {"runID": asked["run"], "uploadHeaders": [], "files": files}}

    def _CreateArtifact(self, asked: Json) -> Json:
        given = asked["input"]
        made = SimpleNamespace(
            **{"id": str(len(self.artifacts)), "name": given["artifactCollectionName"], "files": {}},
            **{"type": given["artifactTypeName"], "run_id": given["runName"], "digest": given["digest"]},
            **{"aliases": [alias["alias"] for alias in given.get("aliases") or []], "committed": False},
            metadata=json.loads(given.get("metadata") or "{}"),
        )
        self.artifacts.append(made)
        sequence = {"id": made.name, "latestArtifact": None}
        return {"createArtifact": {"artifact": {"id": made.id, "state": "PENDING", "artifactSequence": sequence}}}

    def _CreateArtifactManifest(self, asked: Json) -> Json:
        manifest = {"id": asked["artifactID"], "file": self._upload("manifest", asked["artifactID"], "json")}
        return {"createArtifactManifest": {"artifactManifest": manifest}}

    def _CreateArtifactFiles(self, asked: Json) -> Json:
        nodes = []
        for file in asked["input"]["artifactFiles"]:
            node = self._upload("artifact", file["artifactID"], file["name"]) | {"uploadMultipartUrls": None}
            nodes.append({"node": node | {"storagePath": file["name"], "artifact": {"id": file["artifactID"]}}})
        return {"createArtifactFiles": {"files": {"edges": nodes}}}

    def _CommitArtifact(self, asked: Json) -> Json:
        artifact = self.artifacts[int(asked["artifactID"])]
        artifact.committed = True
        return {"commitArtifact": {"artifact": {"id": artifact.id, "digest": artifact.digest}}}

    def _ArtifactByID(self, asked: Json) -> Json:
        """Answer what `Artifact.wait` asks after the upload; the SDK insists on every key."""
        artifact = self.artifacts[int(asked["id"])]
        version = sum(other.name == artifact.name for other in self.artifacts[: int(artifact.id)])
        project = self._project(self.runs[artifact.run_id])
        collection = {"__typename": "ArtifactSequence", "name": artifact.name, "project": project}
        answer: Json = dict.fromkeys(("description", "historyStep", "commitHash", "updatedAt"))
        answer |= {"__typename": "Artifact", "id": artifact.id, "digest": artifact.digest, "state": "COMMITTED"}
        answer |= {"artifactSequence": collection, "versionIndex": version, "artifactType": {"name": artifact.type}}
        answer |= {"metadata": json.dumps(artifact.metadata), "tags": [], "ttlIsInherited": False}
        answer |= {"fileCount": len(artifact.files), "size": sum(map(len, artifact.files.values()))}
        return {"artifact": answer | {"ttlDurationSeconds": -1, "createdAt": "2026-01-01T00:00:00Z"}}


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # of the SDK's many connections at once none is reset: it would try again after seconds
    block_on_close = False

    def __init__(self, backend: Backend) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend, self.errors = backend, list[BaseException]()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if error and not isinstance(error, ConnectionError):  # a process may leave at any time
            self.errors.append(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.answer(self.server.backend.receive(self.command, self.path, body))

    do_GET = do_PUT = do_POST

    def answer(self, content: Json) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass
