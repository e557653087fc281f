"""Servers of S3 and of Google Cloud Storage on this computer, in processes of their own."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

BUCKET = "runs"


@contextlib.contextmanager
def serving(kind: str, fault: str = "") -> Iterator[dict[str, str]]:
    """Serve "s3" or "gs" with one bucket, and yield the environment of its clients.

    The `fault` is of S3: "busy" answers each third request with 503, "slow" takes 0.05 s more for each, and "down" has
    failed for all requests that write after the first 30 of them.
    """
    environment = {x: y for x, y in os.environ.items() if not x.startswith(("XLA", "JAX"))}
    with subprocess.Popen(
        [sys.executable, __file__, kind, fault], stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            address = f"http://127.0.0.1:{port}"
            if kind == "gs":
                # Else gcsfs asks Google, by another protocol, of which type the bucket is.
                yield {"STORAGE_EMULATOR_HOST": address, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
            else:
                keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
                yield {"AWS_ENDPOINT_URL": address} | keys
        finally:
            server.kill()


def _serve_s3(fault: str) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application, lock, counts = DomainDispatcherApplication(create_backend_app), threading.Lock(), [0, 0]

    def serve(environ: Any, start: Any) -> Any:
        with lock:
            counts[0] += 1
            counts[1] += (is_write := environ["REQUEST_METHOD"] in ("PUT", "POST"))
            count, writes = counts
        if fault == "slow":
            time.sleep(0.05)
        if (fault == "busy" and count % 3 == 0) or (fault == "down" and is_write and writes > 30):
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>busy</Message></Error>"]
        return application(environ, start)

    server = make_server("127.0.0.1", 0, serve, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    import boto3

    address = f"http://127.0.0.1:{server.port}"
    client: Any = boto3.client(
        "s3", endpoint_url=address, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1"
    )
    client.create_bucket(Bucket=BUCKET)
    print(server.port, flush=True)


def _serve_gs() -> None:
    import socket

    from gcp_storage_emulator.server import create_server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with contextlib.redirect_stdout(sys.stderr):
        create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET).start()
    print(port, flush=True)


if __name__ == "__main__":
    _serve_gs() if sys.argv[1] == "gs" else _serve_s3(sys.argv[2])
    threading.Event().wait()
