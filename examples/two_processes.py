"""Two real processes of four simulated devices each train together; with `--fail` one of them raises.

    python examples/two_processes.py [--fail]

The file starts itself: each process finds in its environment which one it is.
"""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import optax
from flax import nnx

import jaxlit as jl


class Regression(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 1, rngs=rngs)

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        loss = ((self.linear(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


class Fail(jl.Callback):
    def on_train_batch_end(self, trainer: jl.Trainer, *_: object) -> None:
        if jax.process_index() == 1 and trainer.global_step == 10:
            raise ValueError("bad sample 123")


def train(*callbacks: jl.Callback) -> None:
    """Train in one of the processes; the batch of 32 rows is that of all of them."""
    jl.testing.fake_devices(4)
    jl.distributed.initialize()
    x = np.random.default_rng(0).normal(size=(640, 16)).astype(np.float32)
    data = {"x": x, "y": x @ np.linspace(-1, 1, 16, dtype=np.float32)}
    trainer = jl.Trainer(strategy="fsdp", max_epochs=4, fail_timeout=3, logger=False, callbacks=[*callbacks],
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(jl.lazy(Regression), jl.ArrayLoader(data, batch_size=32))
    print(f"{jax.local_device_count()} of {jax.device_count()} devices, loss {trainer.callback_metrics['loss']:.2e}")


def main(*arguments: str) -> list[int]:
    """Start both processes, print what each of them says, and return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}", "JAX_NUM_PROCESSES": "2"}
    command = [sys.executable, __file__, *arguments]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = [subprocess.Popen(command, env=os.environ | job | {"JAX_PROCESS_ID": i}, **given) for i in "01"]
    for index, process in enumerate(both):
        said = [line for line in process.communicate()[0].splitlines() if not line.startswith("[Gloo]")]
        print(f"process {index} ended with exit code {process.returncode}, and said:", *said, sep="\n  ")
    return [process.returncode for process in both]


if __name__ == "__main__":
    if "JAX_PROCESS_ID" in os.environ:
        train(*[Fail()] * ("--fail" in sys.argv))
    else:
        main(*sys.argv[1:])
