"""Several real processes: what they train together is what one process trains, and what cannot work is refused."""

import contextlib
import fcntl
import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.inside import key_value_store
from kit.processes import Ended, launch, say
from kit.scale import Scale
from kit.trainers import BARE

import jaxlit as jl
from jaxlit.distributed.exchange import agree, fetch
from jaxlit.distributed.start import own_rows

QUIET = BARE  # two processes would write the same files
STRATEGIES = ("ddp", "fsdp", "zero1", "shard_map")
ROWS = 103  # over two processes 52 and 51

# Modules and data -------------------------------------------------------------------------------------


class Net(jl.TrainModule):
    """Batch statistics, random numbers, and arrays large enough to be sharded."""

    def __init__(self, dropout: float, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 512, rngs=rngs)
        self.norm = nnx.BatchNorm(512, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs) if dropout else nnx.identity
        self.last = nnx.Linear(512, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        loss = jnp.mean((self(batch["x"]) - batch["y"]) ** 2)
        self.log("train", loss, on_epoch=True)
        self.log("largest", batch["x"].max(), on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        self.log("val", jnp.mean((self(batch["x"]) - batch["y"]) ** 2))

    def predict_step(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"y": self(batch["x"]), "row": batch["row"]}

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.001, momentum=0.9)


class Again:
    """An iterable that calls a function for each iteration."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


def rows(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(count)
    x, y = rng.normal(size=(count, 4)).astype(np.float32), rng.normal(size=(count, 1)).astype(np.float32)
    x[-1] += 10.0  # a tail that is left out, doubled or padded shows
    return {"x": x, "y": y, "row": np.arange(count, dtype=np.int32)}


def local_batches(size: int) -> list[dict[str, np.ndarray]]:
    """Every second row, in batches of this process's own."""
    mine = {k: v[jax.process_index() :: jax.process_count()] for k, v in rows(ROWS).items()}
    return [{k: v[i : i + size] for k, v in mine.items()} for i in range(0, len(mine["x"]), size)]


def plain(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(fetch(x), np.float64).tolist(), tree)


class Losses(jl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


def train_stream(strategy: str, *options: str) -> dict[str, Any]:
    """Train on one global stream with a tail of 4 rows, and validate with one of 1 row; in any number of processes."""
    losses = Losses()
    trainer = jl.Trainer(strategy=strategy, max_epochs=2, callbacks=[losses], seed=5, **QUIET)
    validation = jl.ArrayLoader(rows(33), 16)
    dropout = 0.25 if "dropout" in options else 0.0
    module = jl.lazy(Net, dropout) if "lazy" in options else Net(dropout, nnx.Rngs(0))
    trainer.fit(module, jl.ArrayLoader(rows(36), 16, shuffle=True, seed=3), validation)
    trained: Any = trainer.module
    return {
        "losses": losses.seen,
        "metrics": plain(dict(trainer.callback_metrics)),
        "predictions": plain(trainer.predict(None, validation)),
        "weights": plain([trained.first.kernel[...], trained.last.kernel[...], trained.norm.mean[...]]),
        "sharded": not trained.first.kernel[...].sharding.is_fully_replicated,
    }


def train_on(loader: Any, **options: Any) -> dict[str, Any]:
    """Train, validate and predict with a loader."""
    trainer = jl.Trainer(max_epochs=1, num_sanity_val_steps=0, **{"strategy": "ddp", **QUIET, **options})
    module = Scale(size=4)
    trainer.fit(module, loader)
    return {
        "weights": plain(module.w[...]),
        "metrics": plain(dict(trainer.callback_metrics)),
        "validation": plain(trainer.validate(Scale(size=4), loader)),
        "predictions": plain(trainer.predict(Scale(size=4), loader)),
    }


def refusal_of(loader: Any) -> str:
    return error_of(lambda: jl.Trainer(max_epochs=1, strategy="ddp", **QUIET).fit(Scale(size=4), loader))


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# What the processes do --------------------------------------------------------------------------------


def attempt(name: str, work: Callable[[], Any]) -> None:
    """Say what `work` returns; whatever it raises in all processes leaves the others to come."""
    try:
        value = work()
    except Exception:
        value = {"traceback": traceback.format_exc()}
    say(name, value)


def train_everything() -> None:
    jl.distributed.initialize("127.0.0.1:1", 2, 0)  # a second call does nothing
    say("processes", [jax.process_count(), jax.process_index(), jax.device_count()])
    say("own rows", [[own_rows(n).start, own_rows(n).stop] for n in (16, 8, 4, 1)])
    for case in STREAMS:
        attempt(case, lambda case=case: train_stream(*case.split()))


def train_on_shares() -> None:
    import grain

    for strategy, size in LISTS:
        attempt(f"list {strategy} {size}", lambda s=strategy, n=size: train_on(local_batches(n), strategy=s))
    process, count = jax.process_index(), jax.process_count()
    share = grain.MapDataset.source(Rows(ROWS))[process::count]
    attempt("grain", lambda: train_on(share.batch(26)))
    attempt("grain with a thread", lambda: train_on(share.batch(26), prefetch=2))
    for kind, tail in GLOBAL:
        arrays = jl.ArrayLoader(rows(16 + tail), 16)
        stream = arrays if kind == "ArrayLoader" else Again(lambda x=arrays: iter(x))
        attempt(f"{kind} {tail}", lambda x=stream: train_on(x, strategy="shard_map"))
    loader = grain.DataLoader(
        data_source=Rows(ROWS),
        sampler=grain.samplers.IndexSampler(
            ROWS, shard_options=jl.distributed.shard_options(), shuffle=False, num_epochs=1
        ),
        operations=[grain.transforms.Batch(16)],
        worker_count=0,
    )
    attempt("DataLoader", lambda: train_on(loader))
    attempt("host keys", see_host_keys)
    attempt("csv", write_csv)


class Rows:
    """A grain source of single rows."""

    def __init__(self, count: int) -> None:
        self.rows = rows(count)

    def __len__(self) -> int:
        return len(self.rows["x"])

    def __getitem__(self, i: Any) -> dict[str, np.ndarray]:
        return {k: v[i] for k, v in self.rows.items()}


class SeeIds(jl.Callback):
    """Keeps what hooks see of the batch's key `id`."""

    def __init__(self) -> None:
        self.seen: dict[str, list[list[str]]] = {"training": [], "validation": [], "predict": []}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen["training"].append(list(batch["id"]))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen["validation"].append(list(batch["id"]))

    def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen["predict"].append(list(batch["id"]))


def see_host_keys() -> dict[str, Any]:
    found = {}
    named = rows(36) | {"id": np.array([f"row {i}" for i in range(36)], dtype=object)}
    mine = [batch | {"id": [f"row {i}" for i in batch["row"]]} for batch in local_batches(26)]
    for name, loader in (("ArrayLoader", jl.ArrayLoader(named, 16)), ("list", mine)):
        ids = SeeIds()
        trainer = jl.Trainer(max_epochs=1, num_sanity_val_steps=0, host_keys=("id",), callbacks=[ids], **QUIET)
        trainer.fit(Scale(size=4), loader, loader)
        assert trainer.predict(Scale(size=4), loader, return_predictions=False) is None
        found[name] = ids.seen
        found[f"{name} refused"] = error_of(lambda t=trainer, x=loader: t.predict(Scale(size=4), x))
    return found


def write_csv() -> list[str]:
    folder = Path(f"run{jax.process_index()}").absolute()
    quiet = {k: v for k, v in QUIET.items() if k != "logger"}
    jl.Trainer(max_epochs=1, default_root_dir=folder, log_every_n_steps=1, **quiet).fit(
        Scale(size=4), local_batches(26)
    )
    return sorted(x.name for x in folder.rglob("*")) if folder.exists() else []


def refuse_everything() -> None:
    process = jax.process_index()
    for name, arguments in REFUSED_STRATEGIES.items():
        say(name, error_of(lambda a=arguments: jl.Trainer(max_epochs=1, **a, **QUIET)))
    first = process == 0
    data = rows(48)
    half = {k: v[process::2] for k, v in data.items()}
    batches = [{k: v[i : i + 8] for k, v in half.items()} for i in (0, 8, 16)]
    cases = {
        "same rows": [{k: v[i : i + 8] for k, v in data.items()} for i in (0, 8, 16)],
        "dtypes": batches if first else [b | {"x": b["x"].astype(np.float16)} for b in batches],
        "structure": batches if first else [b | {"more": b["y"]} for b in batches],
        "row shapes": batches if first else [b | {"x": b["x"][:, :3]} for b in batches],
        "rows of a batch": batches if first else [{k: v[:4] for k, v in b.items()} for b in batches],
        "number of batches": batches if first else batches[:2],
    }
    for name, loader in cases.items():
        say(name, refusal_of(loader))
    say("arrays of an ArrayLoader", refusal_of(jl.ArrayLoader(half, 8)))
    say("seeds of an ArrayLoader", refusal_of(jl.ArrayLoader(data, 8, shuffle=True, seed=process)))
    say("afterwards", train_on(batches)["metrics"])  # a refusal leaves nothing behind


def refuse_and_prepare() -> None:
    refuse_everything()
    process = jax.process_index()
    say("agreed", agree("a number", {"process": process, "pi": 3.5}))

    class Download(jl.DataModule):
        def __init__(self, fails: bool = False) -> None:
            self.fails, self.found = fails, None

        def prepare_data(self) -> None:
            if self.fails:
                raise OSError("the disk is full")
            time.sleep(0.5)  # long enough for the other to find nothing, if it did not wait
            with Path("calls").open("a") as file:
                file.write(str(process))

        def setup(self, stage: str) -> None:
            self.found = Path("calls").read_text()

        def train_dataloader(self) -> Any:
            return jl.ArrayLoader(rows(8), 8)

    data = Download()
    jl.Trainer(max_epochs=1, **QUIET).fit(Scale(size=4), datamodule=data)
    say("prepared", data.found)
    failing = Download(fails=True)
    say("failed", error_of(lambda: jl.Trainer(max_epochs=1, **QUIET).fit(Scale(size=4), datamodule=failing)))
    say("set up after the failure", failing.found)
    os.makedirs(f"computer{process}")
    os.chdir(f"computer{process}")
    socket.gethostname = lambda: f"computer{process}"
    elsewhere = Download()
    jl.Trainer(max_epochs=1, **QUIET).fit(Scale(size=4), datamodule=elsewhere)
    os.chdir("..")
    say("prepared on two computers", elsewhere.found)
    say("another topic", error_of(lambda: agree(f"topic {process}", None, timeout=10.0)))
    agree("both are here", None)
    if process == 0:
        say("absent", error_of(lambda: agree("alone", None, timeout=1.0)))


def read_the_same_rows() -> None:
    jl.Trainer(max_epochs=1, strategy="ddp", **QUIET).fit(Scale(size=4), [rows(8), rows(8)])


def differ_in_the_middle() -> None:
    sizes = [8, 8, 8, 8] if jax.process_index() == 0 else [8, 4, 8, 8]
    data = rows(8 + jax.process_index())
    refuse_and_leave([{k: v[:n] for k, v in data.items()} for n in sizes])


def end_at_different_batches() -> None:
    batches = local_batches(8)[: 4 - jax.process_index()]
    refuse_and_leave(Again(lambda: iter(batches)))


def refuse_and_leave(loader: Any) -> None:
    say("refusal", refusal_of(loader))
    leave()


def leave() -> None:
    """End at once: jax itself would wait minutes for a process that hangs in a collective."""
    client = key_value_store()
    client.key_value_set(f"left/{jax.process_index()}", "")
    if jax.process_index() == 0:  # without it jax ends the other, which may still want to say something
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.blocking_key_value_get("left/1", 10_000)
    os._exit(1)


def join_too_late() -> None:
    jax.devices()
    jl.distributed.initialize("127.0.0.1:1", 2, 1, timeout=5)


def join_nobody() -> None:
    jl.distributed.initialize(f"127.0.0.1:{UNUSED_PORT}", 2, 1, timeout=1)


def begin_alone() -> None:
    jl.distributed.initialize()
    jl.distributed.initialize()
    say("processes", [jax.process_count(), jax.process_index(), jax.device_count()])


STREAMS = (*STRATEGIES, "ddp dropout", "fsdp lazy dropout")
# Two local batches of 26 rows do not divide among the devices, two of 24 do, the tails never do.
LISTS = (("ddp", 26), ("ddp", 24), ("fsdp", 26), ("shard_map", 26), ("shard_map", 24))
# Of these tails 4 rows divide among the processes and not among the devices, 8 among both.
GLOBAL = (("ArrayLoader", 1), ("generator", 1), ("generator", 4), ("generator", 5), ("generator", 8))
UNUSED_PORT = 9  # the discard service, which nobody runs
REFUSED_STRATEGIES: dict[str, dict[str, Any]] = {
    "pmap": {"strategy": "pmap"},
    "single": {"strategy": "single"},
    "simulate": {"strategy": "simulate:8"},
    "devices": {"strategy": "ddp", "devices": 4},
}


# Their launches, each once a test run -----------------------------------------------------------------


def once(work: Callable[[], None], base: Path, **options: Any) -> list[Ended]:
    """Launch once for all workers of the test run: who comes second waits for the first."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = (base.parent if run else base) / f"{work.__name__}{run or ''}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = folder / "ended.json"
        if not result.exists():
            result.write_text(json.dumps([asdict(x) for x in launch(work, folder / "run", **options)]))
        return [Ended(**x) for x in json.loads(result.read_text())]


def heard(processes: list[Ended], name: str) -> list[Any]:
    """Return what every process said under a name."""
    for index, process in enumerate(processes):
        assert name in process.said, f"process {index} ended with {process.code}:\n{process.errors[-3000:]}"
        value = process.said[name]
        assert not (isinstance(value, dict) and "traceback" in value), f"process {index}:\n{value['traceback']}"
    return [process.said[name] for process in processes]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return once(train_everything, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return once(train_on_shares, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return once(refuse_and_prepare, tmp_path_factory.getbasetemp())


def close(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


# One global stream ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", STREAMS)
def test_a_global_stream_over_two_processes_gives_what_one_process_gives(case: str, trained: list[Ended]) -> None:
    found = heard(trained, case)
    alone = train_stream(*case.split())
    assert len(alone["losses"]) == 6
    for process in found:
        for part in alone:
            close(process[part], alone[part])


def test_fsdp_shards_over_the_processes(trained: list[Ended]) -> None:
    assert [x["sharded"] for x in heard(trained, "fsdp") + heard(trained, "ddp")] == [True, True, False, False]


def test_processes_know_each_other_and_a_second_initialize_does_nothing(trained: list[Ended]) -> None:
    assert heard(trained, "processes") == [[2, 0, 8], [2, 1, 8]]


def test_own_rows_are_parts_that_differ_by_one_row_at_most(trained: list[Ended]) -> None:
    assert heard(trained, "own rows") == [[[0, 8], [0, 4], [0, 2], [0, 0]], [[8, 16], [4, 8], [2, 4], [0, 1]]]


def test_alone_all_rows_are_ones_own() -> None:
    assert [own_rows(n) for n in (64, 7)] == [slice(0, 64), slice(0, 7)]


def test_all_processes_end_well_and_warn_of_nothing(trained: list[Ended], shared: list[Ended]) -> None:
    assert [x.code for x in (*trained, *shared)] == [0] * 4
    assert [x.errors for x in trained] == [""] * 2  # grain tells the others of records that it drops


# Shares of the users' own -----------------------------------------------------------------------------


def check_against_numpy(found: dict[str, Any], global_batches: list[np.ndarray], count: int) -> None:
    """Compare with formulas.

    Args:
        found: What `train_on` returned.
        global_batches: The numbers of the rows of each batch, of all processes.
        count: How many rows the data has.
    """
    x = rows(count)["x"].astype(np.float64)
    seen = x[np.concatenate(global_batches)]
    metrics = {"mean": seen.mean(), "sum": seen.sum(), "min": seen.min(), "max": seen.max()}
    assert found["metrics"] == pytest.approx(metrics, rel=1e-6)
    assert found["validation"] == [pytest.approx(metrics, rel=1e-6)]
    gradients = sum(x[batch].mean(0) / 4 for batch in global_batches)
    np.testing.assert_allclose(found["weights"], np.arange(1.0, 5.0) - gradients, rtol=1e-6, atol=1e-6)
    assert len(found["predictions"]) == len(global_batches)
    for batch, prediction in zip(global_batches, found["predictions"], strict=True):
        assert prediction["row"] == batch.tolist()
        np.testing.assert_allclose(prediction["y"], np.arange(1.0, 5.0) * x[batch], rtol=1e-6)


def interleaved(size: int) -> list[np.ndarray]:
    """The rows of the global batches when each process has every second row: those of process 0 come first."""
    own = [np.arange(ROWS)[process::2] for process in range(2)]
    return [np.concatenate([x[i : i + size] for x in own]) for i in range(0, len(own[0]), size)]


@pytest.mark.parametrize("strategy, size", LISTS)
def test_local_batches_make_global_ones(strategy: str, size: int, shared: list[Ended]) -> None:
    for found in heard(shared, f"list {strategy} {size}"):
        check_against_numpy(found, interleaved(size), ROWS)


@pytest.mark.parametrize("case", ("grain", "grain with a thread"))
def test_slices_of_a_grain_dataset_make_global_batches(case: str, shared: list[Ended]) -> None:
    for found in heard(shared, case):
        check_against_numpy(found, interleaved(26), ROWS)


@pytest.mark.parametrize("kind, tail", GLOBAL)
def test_an_array_loader_gives_global_batches_also_behind_a_generator(
    kind: str, tail: int, shared: list[Ended]
) -> None:
    for found in heard(shared, f"{kind} {tail}"):
        check_against_numpy(found, [np.arange(16), np.arange(16, 16 + tail)], 16 + tail)


def test_shard_options_share_the_records_of_a_grain_data_loader(shared: list[Ended]) -> None:
    own = ROWS // 2  # the last record does not divide, and is left out
    batches = [
        np.concatenate([np.arange(i, min(i + 16, own)), own + np.arange(i, min(i + 16, own))])
        for i in range(0, own, 16)
    ]
    for found in heard(shared, "DataLoader"):
        check_against_numpy(found, batches, ROWS)


def test_host_keys_reach_the_hooks_of_the_process_that_drew_them(shared: list[Ended]) -> None:
    name = lambda numbers: [f"row {i}" for i in numbers]  # noqa: E731
    for process, found in enumerate(heard(shared, "host keys")):
        mine = np.arange(ROWS)[process::2]
        expected = [name(mine[:26]), name(mine[26:])]
        assert found["list"] == {"training": expected, "validation": expected, "predict": expected}
        half, tail = 8 * process, 32 + 2 * process
        expected = [name(range(half, half + 8)), name(range(16 + half, 24 + half)), name(range(tail, tail + 2))]
        assert found["ArrayLoader"] == {"training": expected, "validation": expected, "predict": expected}


@pytest.mark.parametrize("loader", ("ArrayLoader", "list"))
def test_predictions_with_host_keys_are_refused_in_several_processes(loader: str, shared: list[Ended]) -> None:
    for found in heard(shared, "host keys"):
        assert found[f"{loader} refused"].startswith("ArgumentError") and "host_keys" in found[f"{loader} refused"]
        assert "return_predictions=False" in found[f"{loader} refused"]


def test_only_process_0_writes_metrics(shared: list[Ended]) -> None:
    assert heard(shared, "csv") == [["metrics.csv"], []]


# What cannot work -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case, words",
    (
        ("same rows", ("every process reads the same rows", "shard_options")),
        ("dtypes", ("batch['x']", "float32[4]", "float16[4]")),
        ("structure", ("batch['more']", "nothing")),
        ("row shapes", ("batch['x']", "float32[4]", "float32[3]")),
        ("rows of a batch", ("rows of the first one", "rows [8, 4]")),
        ("number of batches", ("number of batches", "batches [3, 2]")),
        ("arrays of an ArrayLoader", ("ArrayLoader",)),
        ("seeds of an ArrayLoader", ("seed",)),
    ),
)
def test_loaders_that_do_not_belong_together_are_refused_everywhere(
    case: str, words: tuple[str, ...], refused: list[Ended]
) -> None:
    for error in heard(refused, case):
        assert error.startswith("DataError: Trainer.fit(train_dataloaders=...)")
        for word in words:
            assert word in error


def test_a_refusal_leaves_nothing_behind(refused: list[Ended]) -> None:
    x = rows(48)["x"].astype(np.float64)
    for metrics in heard(refused, "afterwards"):
        assert metrics == pytest.approx({"mean": x.mean(), "sum": x.sum(), "min": x.min(), "max": x.max()}, rel=1e-6)


@pytest.mark.parametrize("case", REFUSED_STRATEGIES)
def test_strategies_that_cannot_span_processes_are_refused_everywhere(case: str, refused: list[Ended]) -> None:
    for error in heard(refused, case):
        assert error.startswith("ArgumentError")
        assert ("2 processes" if case == "devices" else "there are 2") in error


def test_a_refusal_ends_every_process_with_its_message(tmp_path: Path) -> None:
    for process in launch(read_the_same_rows, tmp_path / "run"):
        assert process.code == 1
        assert "DataError: Trainer.fit(train_dataloaders=...): every process reads the same rows" in process.errors


def test_another_number_of_rows_in_mid_epoch_is_refused_where_it_happens(tmp_path: Path) -> None:
    _, process = launch(differ_in_the_middle, tmp_path / "run", grace=0.0)
    assert process.code == 1
    assert process.said["refusal"].startswith("DataError: Trainer.fit(train_dataloaders=...)")
    assert "4 rows in process 1, those before had 8" in process.said["refusal"]


def test_epochs_of_different_lengths_that_nobody_knew_are_refused_everywhere(tmp_path: Path) -> None:
    processes = launch(end_at_different_batches, tmp_path / "run")
    for error in heard(processes, "refusal"):
        assert error.startswith("ProcessError") and "number of batches" in error


# Agreement and downloads ------------------------------------------------------------------------------


def test_agree_returns_every_processes_value_in_order(refused: list[Ended]) -> None:
    assert heard(refused, "agreed") == [[{"process": 0, "pi": 3.5}, {"process": 1, "pi": 3.5}]] * 2


def test_agree_names_the_process_that_is_elsewhere(refused: list[Ended]) -> None:
    here, there = heard(refused, "another topic")
    assert here.startswith("ProcessError: Process 0 is at 'topic 0' while process 1 is at 'topic 1'")
    assert there.startswith("ProcessError: Process 1 is at 'topic 1' while process 0 is at 'topic 0'")


def test_agree_names_the_process_that_does_not_come(refused: list[Ended]) -> None:
    assert refused[0].said["absent"].startswith("ProcessError: Process 1 did not come to 'alone' within 1 s")


def test_agree_alone_returns_the_value() -> None:
    assert agree("anything", {"a": 1}) == [{"a": 1}]


def test_prepare_data_runs_once_a_computer_while_the_others_wait(refused: list[Ended]) -> None:
    assert heard(refused, "prepared") == ["0", "0"]
    assert heard(refused, "prepared on two computers") == ["0", "1"]


def test_a_failure_of_prepare_data_fails_the_others_with_its_text(refused: list[Ended]) -> None:
    first, second = heard(refused, "failed")
    assert first == "OSError: the disk is full"
    assert second.startswith("ProcessError") and "process 0" in second and "the disk is full" in second
    assert heard(refused, "set up after the failure") == [None, None]


# initialize -------------------------------------------------------------------------------------------


def test_alone_initialize_does_nothing(tmp_path: Path) -> None:
    (process,) = launch(begin_alone, tmp_path / "run", count=1, join=False)
    assert (process.code, process.said, process.errors) == (0, {"processes": [1, 0, 4]}, "")


@pytest.mark.parametrize(
    "given, words",
    (
        ({"num_processes": 2}, ("num_processes without", "coordinator_address, process_id")),
        ({"coordinator_address": "a:1"}, ("coordinator_address without", "num_processes, process_id")),
        ({"coordinator_address": "a:1", "process_id": 0}, ("coordinator_address, process_id without num_processes",)),
        ({"coordinator_address": "a", "num_processes": 2, "process_id": 0}, ("'host:port'", "'a'")),
        ({"coordinator_address": "a:1", "num_processes": 2, "process_id": 2}, ("process_id=2", "at most 1")),
        ({"coordinator_address": "a:1", "num_processes": 2, "process_id": -1}, ("process_id=-1", "counts from 0")),
    ),
)
def test_initialize_refuses_arguments_that_do_not_fit(given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(jl.errors.ArgumentError) as refused:
        jl.distributed.initialize(**given)
    for word in words:
        assert word in str(refused.value)


def test_initialize_after_the_first_use_of_jax_is_refused(tmp_path: Path) -> None:
    (process,) = launch(join_too_late, tmp_path / "run", count=1, join=False)
    assert process.code == 1
    assert "ProcessError: distributed.initialize came after the first use of jax" in process.errors


def test_a_coordinator_that_is_not_there_is_named_in_time(tmp_path: Path) -> None:
    (process,) = launch(join_nobody, tmp_path / "run", count=1, join=False)
    assert process.code not in (0, None)
    assert f"127.0.0.1:{UNUSED_PORT}" in process.output + process.errors
