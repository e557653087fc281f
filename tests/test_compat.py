"""The private parts of other libraries that jaxlit uses: what breaks where one is gone or behaves otherwise."""

import signal
import subprocess
import sys
from pathlib import Path

import grain
import numpy as np
import pytest

from jaxlit import compat


def ended(folder: Path, code: str) -> "subprocess.CompletedProcess[str]":
    """Run a script in a process of its own, in which jax does not run yet."""
    (folder / "script.py").write_text(code)
    return subprocess.run([sys.executable, folder / "script.py"], capture_output=True, text=True, check=False)


STORE = """
import socket, jax
from jaxlit import compat
from jaxlit.distributed.job import jax_runs
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
jax.distributed.initialize(address, 1, 0)
job = compat.coordination()
client = job.client
client.key_value_set("room/a", "1")
client.key_value_set("room/a", "2", allow_overwrite=True)
print(client.blocking_key_value_get("room/a", 1000), client.key_value_dir_get("room/"))
print(client.key_value_increment("count", 1))
client.key_value_delete("room/a")
try:
    client.blocking_key_value_get("room/a", 10)
except jax.errors.JaxRuntimeError as error:
    print(str(error).split(":")[0])
print(job.coordinator_address == address, job.process_id, job.num_processes, job.preemption_sync_manager is not None)
print(jax_runs())
"""


@pytest.mark.full
def test_processes_agree_by_jaxs_store_before_devices_exist(tmp_path: Path) -> None:
    """Without it, processes share neither agreements nor failures."""
    done = ended(tmp_path, STORE)
    expected = ["2 [('room/a', '2')]", "1", "DEADLINE_EXCEEDED", "True 0 1 True", "False"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_the_clusters_that_jax_detects_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, each process of a job of SLURM trains alone where nobody called `initialize`."""
    found = {cluster.__name__: cluster for cluster in compat.clusters()}
    assert {"SlurmCluster", "OmpiCluster", "K8sCluster", "GceTpuCluster"} <= found.keys()
    assert "Mpi4pyCluster" not in found  # which a user must choose
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "here", "NTASKS": "4", "PROCID": "1", "LOCALID": "0"}
    assert not found["SlurmCluster"].is_env_present()
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert found["SlurmCluster"].is_env_present()
    assert found["SlurmCluster"].get_process_count() == 4


ABORT = """
import faulthandler, os, threading
from jaxlit import compat
faulthandler.enable()
compat.on_abort(lambda: {code})
threading.Thread(target=os.abort).start()
threading.Event().wait(60)
"""


@pytest.mark.parametrize(("code", "expected"), [(75, 75), pytest.param(None, -signal.SIGABRT, marks=pytest.mark.full)])
def test_an_abort_from_another_thread_ends_with_a_code(code: int | None, expected: int, tmp_path: Path) -> None:
    """Without it, a process whose coordinator is gone ends by SIGABRT, and names neither the reason nor its place."""
    done = ended(tmp_path, ABORT.format(code=code))
    assert done.returncode == expected
    assert ("Fatal Python error: Aborted" in done.stderr) == (code is None)  # the handler before it


def data_loader(seed: int | None, num_epochs: int | None = 1) -> grain.DataLoader:
    sampler = grain.samplers.IndexSampler(
        10, grain.sharding.NoSharding(), shuffle=seed is not None, num_epochs=num_epochs, seed=seed
    )
    return grain.DataLoader(data_source=range(10), sampler=sampler, operations=[grain.transforms.Batch(5)])


def rows(loader: grain.DataLoader) -> list[int]:
    return np.concatenate([*loader]).tolist()


def test_a_data_loader_is_shuffled_anew_by_its_parts() -> None:
    """Without them, every epoch of a DataLoader has the order of the first."""
    loader = data_loader(3)
    again = compat.reseeded_loader(loader, lambda seed: seed + 4, lambda dataset: dataset)
    assert rows(again) == rows(data_loader(7)) != rows(loader)
    assert rows(loader) == rows(data_loader(3))  # which is left as it was
    parts = compat.loader_parts(loader)
    assert (len(parts.sampler), parts.data_source, len(parts.operations)) == (10, range(10), 1)
    for same in (data_loader(None), data_loader(3, num_epochs=None)):
        left = compat.reseeded_loader(same, lambda seed: seed + 4, lambda dataset: dataset)
        assert compat.loader_parts(left).sampler is compat.loader_parts(same).sampler


def window_shuffled(seed: int) -> grain.IterDataset:
    numbers = grain.MapDataset.range(20).to_iter_dataset()
    return grain.experimental.WindowShuffleIterDataset(numbers, window_size=10, seed=seed)


def test_a_stage_of_an_iter_dataset_is_reseeded() -> None:
    """Without its seed, every epoch of a window shuffle has the order of the first."""
    stage = window_shuffled(3)
    assert [*compat.reseeded_stage(stage, lambda seed: seed + 4, {})] == [*window_shuffled(7)] != [*stage]
    assert [*compat.reseeded_stage(stage.map(str), lambda seed: seed + 4, {})] == [*stage.map(str)]


@pytest.mark.parametrize(("times", "endless"), [(None, True), (2, False)])
def test_a_repetition_without_end_is_known(times: int | None, endless: bool) -> None:
    """Without it, training waits for the end of an epoch that has none."""
    repeated = grain.experimental.RepeatIterDataset(window_shuffled(3), num_epochs=times)
    assert compat.repeats_without_end(repeated) is endless
    assert not compat.repeats_without_end(window_shuffled(3))
