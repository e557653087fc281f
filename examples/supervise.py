"""Start a job of several processes, and start it again from its newest checkpoint where that can help.

    python examples/supervise.py --processes 2 --max-restarts 3 train.py [arguments of train.py]

The script calls `jl.distributed.initialize()`, and trains with `jl.Trainer(default_root_dir=..., resume="auto")`.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

PATIENCE_S = 60.0  # longer than dead_after=30 of `initialize` and fail_timeout=10 of the Trainer together


def start(script: list[str], count: int) -> list[subprocess.Popen[bytes]]:
    """Start the processes of one attempt; `jl.distributed.initialize` reads the variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}", "JAX_NUM_PROCESSES": str(count)}
    command, environment = [sys.executable, *script], os.environ | job
    return [subprocess.Popen(command, env=environment | {"JAX_PROCESS_ID": str(i)}) for i in range(count)]


def wait(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Return the exit codes. After a failure the processes end each other; one is killed only if it does not end."""
    end = None
    while any(process.poll() is None for process in processes) and (end is None or time.monotonic() < end):
        if end is None and any(process.poll() for process in processes):
            end = time.monotonic() + PATIENCE_S
        time.sleep(0.1)
    for process in processes:
        process.kill()
    codes = [process.wait() for process in processes]
    return [code if code >= 0 else 128 - code for code in codes]  # what a shell and schedulers call a signal


def may_restart(code: int) -> bool:
    return code in (75, 76) or (code > 128 and code != 128 + signal.SIGINT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--max-restarts", type=int, default=3)
    parser.add_argument("--fewer", action="store_true", help="start again with one process fewer")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    count, restarts, processes = args.processes, args.max_restarts, []

    def pass_on(number: int, _: object) -> None:
        nonlocal restarts
        restarts = 0
        for process in processes:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends Ctrl-C to the processes as well
    while True:
        began, processes = time.monotonic(), start([args.script, *args.arguments], count)
        codes = wait(processes)
        print(f"supervise: {count} processes ended with {codes} after {time.monotonic() - began:.1f} s", flush=True)
        failed = [code for code in codes if code]
        errors = [code for code in failed if not may_restart(code)]
        if not failed or errors or restarts <= 0:
            return (errors or failed or [0])[0]
        restarts, count = restarts - 1, max(1, count - args.fewer)


if __name__ == "__main__":
    sys.exit(main())
